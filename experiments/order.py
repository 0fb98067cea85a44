"""What is lost without positions."""

from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Mask
from config.schema import ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, above, stories, told, trained
from experiments.positions import CONTEXT, draw_losses, loss_of, positioned, validation_rows
from model import Stack


class OrderLost(Claim):
    id = "A3"
    english = (
        "Without positions the Transformer is blind to order: 아버지가 방에 들어가신다 (father enters the room) and "
        "아버지 가방에 들어가신다 (enters father's bag) look the same."
    )
    korean = (
        "위치 정보가 없으면 트랜스포머는 순서를 모르므로, ‘아버지가 방에 들어가신다’와 ‘아버지 가방에 들어가신다’를 "
        "구별하지 못한다."
    )
    prediction = (
        "Shuffling the input of an encoder without positions shuffles its outputs and changes nothing else; the pair "
        "is one bag of units, however it is cut; and a causal decoder without positions learns no order: it predicts "
        "no better than the same decoder made blind to the order of what came before (all layers but the last see the "
        "token alone), or no worse when the tokens before the last are shuffled."
    )
    rule = (
        "does not hold if shuffling changes the encoder's outputs by more than 1e-9 of their size without positions, "
        "or by less than 1e-3 with them; holds if besides the pair is one bag in all four cuts, and the causal decoder "
        "does not end clearly better than the order-blind one, or does not lose clearly more when earlier tokens are "
        "shuffled (clearly: the means differ by more than the three seeds of either); else holds with a condition"
    )
    pair = ("아버지가 방에 들어가신다", "아버지 가방에 들어가신다")
    changed = (
        "Training was 400 steps of 32 rows, too few for positions to be of use; it is 800 of 16. That a decoder uses "
        "order must now be shown by shuffling, too, or its gain could be capacity. The verdict was *holds with a "
        "condition* before, too: the pair's words differ, however a decoder is trained. Later the cost of "
        "shuffling was compared with that for the order-blind one, and each difference with the seeds of its two "
        "sides; before, with the largest spread of any variant's losses."
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
        losses, disorder = numbers["losses"], numbers["disorder"]
        gains = above(losses["order-blind"], losses["no positions"])
        return gains and above(disorder["no positions"], disorder["order-blind"])

    def finding(self, numbers: Numbers) -> str:
        losses, disorder, learns = numbers["losses"], numbers["disorder"], self._learns_order(numbers)
        bags = {cut.replace(", no", " without"): found["same_bag"] for cut, found in numbers["pair"].items()}
        same, other = (" or ".join(cut for cut, found in bags.items() if found == one) for one in (1, 0))
        limits = []
        if other:
            limits.append(f"cut into {other} the pair does not look the same{same and f', into {same} it does'}")
        if learns:
            limits.append("only an encoder is blind, not a causal decoder")
        condition = f"The condition: {'; and '.join(limits)}. " * (self.verdict(numbers) == CONDITION)
        learned = "is enough to learn order from" if learns else "has not taught it order here"
        return (
            f"{condition}Shuffling changes the encoder's outputs by {numbers['shuffled']['none']:.1e} of their size "
            f"without positions, by {numbers['shuffled']['sinusoidal']:.2g} with sinusoidal ones. A causal decoder "
            f"without positions ends at {told(losses['no positions'])} nats, the order-blind one at "
            f"{told(losses['order-blind'])}; shuffling what came before the last token costs them "
            f"{told(disorder['no positions'])} and {told(disorder['order-blind'])}: the causal "
            f"mask, which shows each token only those before it, {learned}."
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
        left.barh(list(bars), list(bars.values()), color=["C0", "C1", *["C2"] * 4])  # from the edge; none of 0
        for row, value in enumerate(bars.values()):
            if value == 0:
                left.text(2e-18, row, "exactly 0", va="center")
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
