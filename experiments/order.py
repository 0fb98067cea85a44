"""What is lost without positions."""

from collections import Counter
from functools import partial
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Mask
from config.schema import ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, stories, told, trained
from experiments.positions import CONTEXT, draw_losses, loss_of, means, positioned, validation_rows, widest
from model import Stack


class OrderLost(Claim):
    id = "A3"
    english = (
        "Without positions the Transformer is blind to order: 아버지가 방에 들어가신다 (father enters the room) and "
        "아버지 가방에 들어가신다 (enters father's bag) look the same."
    )
    korean = "위치 정보가 없으면 트랜스포머는 순서를 모르므로, 띄어쓰기만 다른 두 문장이 같은 것으로 보인다."
    prediction = (
        "Shuffling the input of an encoder without positions shuffles its outputs and changes nothing else; the pair "
        "is one bag of units, however it is cut; and a causal decoder without positions learns no order: it predicts "
        "no better than the same decoder made blind to the order of what came before (all layers but the last see the "
        "token alone), or no worse when the tokens before the last are shuffled."
    )
    rule = (
        "does not hold if shuffling changes the encoder's outputs by more than 1e-9 of their size without positions, "
        "or by less than 1e-3 with them; holds if besides the pair is one bag in all four cuts, and the causal decoder "
        "gains on the order-blind one, or loses when earlier tokens are shuffled, no more than the spread between "
        "seeds; else holds with a condition"
    )
    pair = ("아버지가 방에 들어가신다", "아버지 가방에 들어가신다")
    changed = (
        "Training was 400 steps of 32 rows, too few for positions to be of use; it is 800 of 16. That a decoder uses "
        "order must now be shown by shuffling, too, or its gain could be capacity. No threshold was moved."
    )

    def measure(self) -> Numbers:
        models = {"order-blind": ("none", order_blind), "no positions": ("none", None)}
        models |= {"sinusoidal": ("sinusoidal", None), "rotary": ("rope", None)}
        losses, disorder = {}, {}
        for name, (position, change) in models.items():
            decoders = [trained(positioned(position, seed), change) for seed in SEEDS]
            losses[name] = [loss_of(decoder) for decoder in decoders]
            disorder[name] = [cost_of_disorder(decoder, validation_rows(CONTEXT + 1)) for decoder in decoders]
        cuts = {"characters, no spaces": lambda text: list(text.replace(" ", "")), "characters": list}
        cuts |= {"pieces (BPE)": stories().tokenizer.encode, "words": str.split}
        shuffled = {position: shuffling_error(encoder(position)) for position in ("none", "sinusoidal")}
        pair = {name: compare(*map(cut, self.pair)) for name, cut in cuts.items()}
        return {"shuffled": shuffled, "pair": pair, "losses": losses, "disorder": disorder}

    def verdict(self, numbers: Numbers) -> Verdict:
        if numbers["shuffled"]["none"] > 1e-9 or numbers["shuffled"]["sinusoidal"] < 1e-3:
            return FAILS
        one_bag = all(found["same_bag"] for found in numbers["pair"].values())
        return HOLDS if one_bag and not self._learns_order(numbers) else CONDITION

    def _learns_order(self, numbers: Numbers) -> bool:
        losses = means(numbers["losses"])
        gain = losses["order-blind"] - losses["no positions"]
        return min(gain, mean(numbers["disorder"]["no positions"])) > widest(numbers["losses"])

    def finding(self, numbers: Numbers) -> str:
        bags = {name: ("different bags", "one bag")[found["same_bag"]] for name, found in numbers["pair"].items()}
        losses, disorder = means(numbers["losses"]), means(numbers["disorder"])
        learned = "is enough to learn order from" if self._learns_order(numbers) else "has not taught it order here"
        return (
            f"Shuffling changes the encoder's outputs by {numbers['shuffled']['none']:.1e} of their size without "
            f"positions, by {numbers['shuffled']['sinusoidal']:.2g} with sinusoidal ones. The pair, cut into units: "
            f"{', '.join(f'{name}: {bag}' for name, bag in bags.items())}. Losses of causal decoders, in nats: "
            f"{', '.join(f'{name} {loss:.3f}' for name, loss in losses.items())} (spread between "
            f"seeds {widest(numbers['losses']):.3f}). Shuffling what came before the last token costs the one without "
            f"positions {disorder['no positions']:.2f} nats, the order-blind one {disorder['order-blind']:.2f}: the "
            f"causal mask, which shows each token only those before it, {learned}."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [[f"outputs, shuffled: {name}", f"{error:.1e}", ""] for name, error in numbers["shuffled"].items()]
        for name, found in numbers["pair"].items():
            rows.append([f"the pair as {name}", f"{found['distance']:.1e}", "yes" if found["same_bag"] else "no"])
        for title, key in (("loss", "losses"), ("shuffling costs", "disorder")):
            rows += [[f"{title}: {name}", f"{told(found)} nats", ""] for name, found in numbers[key].items()]
        return [["measured", "relative difference, or nats", "the same bag"], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2)
        bars = {"shuffled text,\nno positions": numbers["shuffled"]["none"]}
        bars["shuffled text,\nsinusoidal"] = numbers["shuffled"]["sinusoidal"]
        bars |= {f"the pair as\n{name}": found["distance"] for name, found in numbers["pair"].items()}
        lengths = [max(value, 1e-17) for value in bars.values()]
        left.barh(list(bars), lengths, left=1e-18, color=["C0", "C1", *["C2"] * 4])
        left.axvline(1e-9, color="black", linestyle=":")
        left.text(3e-9, 2, "tells them\napart →", va="center")
        left.invert_yaxis()
        left.set(xscale="log", xlim=(1e-18, 10), xlabel="relative difference of outputs", ylabel="two inputs")
        left.set_title("What an encoder tells apart")
        draw_losses(right, numbers["losses"], "Does order help a decoder?")


def order_blind(model: nn.Module) -> None:
    """In every layer but the last each token sees itself alone; what the last then sees is a bag of earlier tokens."""
    for block in model.decoder.blocks[:-1]:
        block.forward = partial(_alone, block.forward)


def _alone(forward, x: Tensor, mask: Mask, *rest, **more) -> Tensor:
    return forward(x, Mask(x.shape[1], x.shape[1], window=1, device=x.device), *rest, **more)


@torch.no_grad()
def cost_of_disorder(model: nn.Module, rows: Tensor) -> float:
    """How many nats worse the end of each row (B, T + 1) is predicted when all before the last input are shuffled."""
    rows = rows.to(model.lm_head.weight.device)
    n_before = rows.shape[1] - 2
    order = torch.rand(len(rows), n_before, generator=torch.Generator().manual_seed(0)).argsort(-1).to(rows.device)
    shuffled = torch.cat((rows[:, :n_before].gather(1, order), rows[:, n_before:]), dim=1)
    both = (model.lm_head(model.features(text[:, :-1])[:, -1]) for text in (rows, shuffled))
    right, wrong = (F.cross_entropy(logits.float(), rows[:, -1]).item() for logits in both)
    return wrong - right


def encoder(position: str) -> Stack:
    """Four layers in float64, their weights large enough for every token to matter to every other."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=50, n_layer=4, n_head=4, d_model=64, position=position).resolve()
    stack = Stack(config, config.n_layer, causal=False).double().eval()
    for parameter in stack.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return stack


@torch.no_grad()
def shuffling_error(stack: Stack, n_token: int = 40, rounds: int = 10) -> float:
    """How far the outputs of shuffled tokens are from the shuffled outputs, relative to the largest output."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for _ in range(rounds):
        tokens = torch.randint(stack.config.vocab_size, (1, n_token), generator=generator)
        order = torch.randperm(n_token, generator=generator)
        outputs = stack(tokens)
        worst = max(worst, ((stack(tokens[:, order]) - outputs[:, order]).abs().max() / outputs.abs().max()).item())
    return worst


@torch.no_grad()
def compare(one: list, other: list) -> dict[str, float]:
    """Are these the same bag of units? And how far apart is an encoder's mean output, in which order does not show?"""
    ids = {unit: id for id, unit in enumerate(dict.fromkeys([*one, *other]))}
    stack = encoder("none")
    means = [stack(torch.tensor([[ids[unit] for unit in text]])).mean(1) for text in (one, other)]
    distance = (means[0] - means[1]).norm() / means[0].norm()
    return {"same_bag": int(Counter(one) == Counter(other)), "distance": distance.item()}


CLAIMS = [OrderLost()]
