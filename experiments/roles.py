"""Queries, keys and values: why three."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention import rotary_turns, sinusoidal_encoding
from config.schema import Config, ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, above, bar, fit, small, stories, story_batches, told, trained, validate
from model import MultiHeadAttention, build_model

CONTEXT = 64
Change = Callable[[nn.Module], None] | None
Losses = dict[str, list[float]]  # of each variant, one for each seed


def shape(seed: int, d_ff: int) -> Config:
    """Two layers of four heads. The d_ff of 256 is Byeol's; each 32 more cost as much as a matrix of a layer."""
    return small(250, seed, n_layer=2, n_head=4, d_model=96, d_ff=d_ff, max_seq_len=CONTEXT)


def language_losses(variants: dict[str, tuple[Change, int]]) -> Losses:
    """Validation losses, in nats per token, of models that are changed thus, with feed-forwards this wide."""
    return {
        name: [validate(trained(shape(seed, d_ff), change), CONTEXT)["loss"] for seed in SEEDS]
        for name, (change, d_ff) in variants.items()
    }


def parameters(variants: dict[str, tuple[Change, int]]) -> dict[str, int]:
    counts = {}
    for name, (change, d_ff) in variants.items():
        model = build_model(shape(0, d_ff).model.resolve(stories().tokenizer.vocab_size))
        if change:
            change(model)
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    return counts


def losses_table(numbers: Numbers, what: str) -> list[list[str]]:
    """Parameters and validation losses, the first row's compared with the others."""
    least, *_ = numbers["loss"].values()
    return [
        [what, "parameters", "validation loss (nats per token)", f"more than {next(iter(numbers['loss']))}"],
        *(
            [name, f"{numbers['parameters'][name]:,}", told(losses), f"{mean(losses) - mean(least):+.3f}"]
            for name, losses in numbers["loss"].items()
        ),
    ]


@torch.no_grad()
def calls(model: nn.Module, modules: Sequence[nn.Module], tokens: Tensor) -> list[tuple[tuple, Tensor]]:
    """What enters these modules and what leaves them, in the order in which they run."""
    found: list[tuple[tuple, Tensor]] = []
    hooks = [module.register_forward_hook(lambda _, *call: found.append(call)) for module in modules]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


class Nothing(nn.Module):
    """Stands for a sublayer that is removed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class ConstantValues(nn.Module):
    """The same learned value at every key."""

    def __init__(self, width: int):
        super().__init__()
        self.value = nn.Parameter(torch.randn(width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.value.to(x.dtype).expand_as(x)


class PlaceValues(nn.Module):
    """A key tells where it stands, W_V PE(pos), and not what it says."""

    def __init__(self, v_proj: nn.Module):
        super().__init__()
        self.v_proj = v_proj

    def forward(self, x: Tensor) -> Tensor:
        places = sinusoidal_encoding(torch.arange(x.shape[1], device=x.device), x.shape[2]).to(x.dtype)
        return self.v_proj(places).expand_as(x)


def identity_values(model: nn.Module) -> None:
    for block in model.decoder.blocks:
        block.attention.v_proj = nn.Identity()


def constant_values(model: nn.Module) -> None:
    for block in model.decoder.blocks:
        block.attention.v_proj = ConstantValues(model.config.d_model)


def place_values(model: nn.Module) -> None:
    for block in model.decoder.blocks:
        block.attention.v_proj = PlaceValues(block.attention.v_proj)


def tied_queries_keys(model: nn.Module) -> None:
    for block in model.decoder.blocks:
        block.attention.k_proj = block.attention.q_proj


def all_tied(model: nn.Module) -> None:
    tied_queries_keys(model)
    for block in model.decoder.blocks:
        block.attention.v_proj = block.attention.q_proj


def bigram_loss(train: Tensor, val: Tensor, size: int) -> float:
    """Nats per token of `val`, each guessed from the one before it, by the pairs counted in `train`."""
    pairs = torch.bincount(train[:-1] * size + train[1:], minlength=size**2).view(size, size).double()
    alone = torch.bincount(train, minlength=size).double() + 1
    guess = pairs + alone / alone.sum()  # as if each row had one more observation, for pairs never seen
    return -(guess / guess.sum(1, keepdim=True))[val[:-1], val[1:]].log().mean().item()


class ValuesCarryContent(Claim):
    id = "A5"
    english = "Attention scores alone are not enough: V carries the content, and W_V makes it what others need."
    korean = "어텐션 점수는 어디를 볼지만 말한다. 무엇을 전할지는 V가 맡으며, W_V가 그 내용을 쓸모 있게 바꾼다."
    prediction = (
        "Language models of two layers and four heads are trained alike. With values that say nothing (one constant "
        "for all keys), or only where a key stands, the validation loss is higher than with learned values; so it is "
        "with V = X, W_V removed (its parameters go to the feed-forward)."
    )
    rule = (
        "'clearly' means: the means over three seeds differ by more than the seeds do, largest less smallest; holds if "
        "constant values, values of place alone and V = X are all clearly worse than learned ones; holds with a "
        "condition if the first two are and V = X is not (content is needed, its transformation is not); does not "
        "hold otherwise"
    )
    variants: ClassVar = {
        "V learned": (None, 256),
        "V = X": (identity_values, 288),
        "V = where the key stands": (place_values, 256),
        "V constant": (constant_values, 288),
    }

    def measure(self) -> Numbers:
        train, val = (torch.from_numpy(split.tokens.astype("int64")) for split in (stories().train, stories().val))
        return {
            "loss": language_losses(self.variants),
            "parameters": parameters(self.variants),
            "bigram": bigram_loss(train, val, stories().tokenizer.vocab_size),
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        learned, *others = numbers["loss"].values()
        identity, place, constant = (above(losses, learned) for losses in others)
        if not (place and constant):
            return FAILS
        return HOLDS if identity else CONDITION

    def finding(self, numbers: Numbers) -> str:
        learned, identity, place, constant = numbers["loss"].values()
        said = {
            HOLDS: "Both halves are seen: content must come through V, and W_V improves on the bare input.",
            CONDITION: "The condition: content must come through V, but what W_V makes of it is no clear gain.",
            FAILS: "Values without content did not all end clearly worse.",
        }[self.verdict(numbers)]
        return (
            f"{said} Learned values end at {told(learned)} nats per token, V = X at {told(identity)}, values that tell "
            f"*where* a key stands and not *what* it says at {told(place)}, a constant at {told(constant)}: weights "
            "that sum to one make of a constant that same constant, so every token knows itself alone (what a table of "
            f"counted pairs makes of that: {numbers['bigram']:.3f}). What W_V can add depends on the number of heads: "
            "in a single one W_O could do all that W_V does (A·X·W_V·W_O has one matrix between); with several, W_V "
            "decides which part of the input each head may pass on, where V = X gives every head a fixed slice of it."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        more = numbers["bigram"] - mean(numbers["loss"]["V learned"])
        return [*losses_table(numbers, "values"), ["(pairs counted)", "", f"{numbers['bigram']:.3f}", f"{more:+.3f}"]]

    def draw(self, numbers: Numbers, figure) -> None:
        axes = figure.subplots()
        for row, (name, losses) in enumerate(numbers["loss"].items()):
            axes.barh(row, mean(losses), color=f"C{row}", alpha=0.4)
            axes.plot(losses, [row] * len(losses), "o", color=f"C{row}", label="one seed each" if row == 0 else None)
            axes.text(0.03, row, f"{name}: {mean(losses):.2f}", va="center")
        axes.axvline(numbers["bigram"], color="gray", ls="--", label="table of pairs, counted: no attention at all")
        axes.set(xlabel="validation loss (nats per token)", ylabel="what a key offers", yticks=[], ylim=(-1.4, 3.6))
        axes.set_title("The same attention with values that say more or less")
        axes.legend(loc="lower left", ncols=2)


N_SYMBOL, N_VALUE = 12, 8


def successor_batch(step: int, rows: int = 64) -> tuple[Tensor, Tensor]:
    """Symbols in a random order, each once and with a random value: token = symbol * N_VALUE + value. They follow one
    another in rings of three (0 → 1 → 2 → 0, 3 → 4 → 5 → 3, ...). Whoever comes last of its ring, and so sees both
    others, is asked for the value of its successor, not of its predecessor."""
    generator = torch.Generator().manual_seed(step)
    symbols = torch.rand(rows, N_SYMBOL, generator=generator).argsort(1)
    values = torch.randint(N_VALUE, (rows, N_SYMBOL), generator=generator)
    place = symbols.argsort(1)  # of each symbol
    ring = symbols // 3 * 3
    successor, predecessor = ring + (symbols + 1) % 3, ring + (symbols + 2) % 3
    here = torch.arange(N_SYMBOL)
    asked = (place.gather(1, successor) < here) & (place.gather(1, predecessor) < here)
    targets = values.gather(1, place.gather(1, successor))
    return symbols * N_VALUE + values, targets.where(asked, -100)


def successor_accuracy(change: Change, seed: int, steps: int = 400) -> float:
    """One head, one layer, no positions and no feed-forward: the scores alone must tell the direction."""
    torch.manual_seed(seed)
    shape = {"n_layer": 1, "n_head": 1, "d_model": 64, "position": "none", "tie_embeddings": False}
    model = build_model(ModelConfig(vocab_size=N_SYMBOL * N_VALUE, **shape))
    (block,) = model.decoder.blocks
    block.feed_forward = Nothing()
    if change:
        change(model)
    fit(model, lambda step: successor_batch((seed + 1) * 100_000 + step), steps)
    inputs, targets = successor_batch(0, rows=2000)
    with torch.no_grad():
        right = model(inputs).argmax(-1) == targets
    return right[targets >= 0].float().mean().item()


def scores(attention: MultiHeadAttention, x: Tensor, turns=None) -> Tensor:
    """QKᵀ before scale and mask, (B, H, T, T)."""
    return attention.queries(x, turns) @ attention.keys_values(x, turns)[0].mT


def exchanged_scores(attention: MultiHeadAttention, x: Tensor, angles: Tensor) -> Tensor:
    """What the score of i and j would be if the contents of i and j changed places: q_j · R(j − i) k_i."""
    return scores(attention, x, rotary_turns(-angles)).mT


def asymmetry(scores: Tensor, others: Tensor) -> float:
    """‖S − S'‖ / ‖S‖: zero if equal, √2 if unrelated."""
    return (torch.linalg.vector_norm(scores - others) / torch.linalg.vector_norm(scores)).item()


@torch.no_grad()
def asymmetries(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """How far scores change when query and key change places, the mean over layers: without rotary positions, with
    them, and with them when the two contents are exchanged while their places stay."""
    blocks = model.decoder.blocks
    inputs = [output for _, output in calls(model, [block.attention_norm for block in blocks], tokens)]
    angles = model.decoder.angles(torch.arange(tokens.shape[1], device=tokens.device))
    found: dict[str, list[float]] = {"without rotation": [], "rotated": [], "contents exchanged": []}
    for block, x in zip(blocks, inputs, strict=True):
        plain, turned = scores(block.attention, x), scores(block.attention, x, rotary_turns(angles))
        exchanged = exchanged_scores(block.attention, x, angles)
        for name, pair in zip(found, [(plain, plain.mT), (turned, turned.mT), (turned, exchanged)], strict=True):
            found[name].append(asymmetry(*pair))
    return {name: mean(values) for name, values in found.items()}


class ThreeRoles(Claim):
    id = "A6"
    english = "Queries, keys and values are three because their roles differ."
    korean = "쿼리, 키, 값은 맡은 일이 서로 달라서 셋으로 나뉜다."
    prediction = (
        "With Q = K scores are symmetric: i looks at j as j at i, no direction. So one head that is asked for the "
        "successor in a ring of three, where predecessor and successor both stand before it, looks the right way in at "
        "most two cases of three (around the ring each score would have to be above the last), and guesses one in "
        "eight of the others: 71%. Language models, too, are worse with Q = K, and with Q = K = V (the parameters go "
        "to the feed-forward)."
    )
    rule = (
        "holds if (1) ‖S − Sᵀ‖ / ‖S‖ is below 0.00001 with either tie and above 0.1 untied, (2) the successor is found "
        "in at least 90% of the cases untied and at most 75% with either tie, means of three seeds, and (3) the "
        "language models with either tie are clearly worse (the means differ by more than the seeds do); holds with a "
        "condition if (1) and (2) hold and (3) does not for one tie or both; does not hold otherwise"
    )
    changed = (
        "With AdamW the untied head did not learn the ring either (26 %): *does not hold*. It is trained by Muon now, "
        "as all else here. The rule is as it was."
    )
    first_verdict = FAILS
    variants: ClassVar = {"untied": (None, 256), "Q = K": (tied_queries_keys, 288), "Q = K = V": (all_tied, 320)}

    def measure(self) -> Numbers:
        variants, (tokens, _) = self.variants, story_batches(shape(0, 256))(10_000)
        return {
            "loss": language_losses(variants),
            "parameters": parameters(variants),
            "asymmetry": {n: asymmetries(trained(shape(0, w), change), tokens) for n, (change, w) in variants.items()},
            "accuracy": {n: [successor_accuracy(change, i) for i in SEEDS] for n, (change, _) in variants.items()},
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        untied, *tied = (found["without rotation"] for found in numbers["asymmetry"].values())
        free, *bound = map(mean, numbers["accuracy"].values())
        symmetric = untied > 0.1 and max(tied) < 1e-5
        if not (symmetric and free >= 0.9 and max(bound) <= 0.75):
            return FAILS
        best, *losses = numbers["loss"].values()
        return HOLDS if all(above(loss, best) for loss in losses) else CONDITION

    def finding(self, numbers: Numbers) -> str:
        loss, right, turn = (numbers[name] for name in ("loss", "accuracy", "asymmetry"))
        untied, *tied = loss
        costs = [f"{name} costs {mean(loss[name]) - mean(loss[untied]):+.3f}" for name in tied]
        equal = [name for name in tied if not above(loss[name], loss[untied])]
        worse = f"{' and '.join(equal)} {'are' if len(equal) > 1 else 'is'} not clearly worse"
        condition = f"The condition: a single head needs them apart; on language {worse}. "
        return (
            f"{condition * (self.verdict(numbers) == CONDITION)}When query and key change places, scores change by "
            f"{turn[untied]['without rotation']:.2f} of their norm untied, by {turn['Q = K']['without rotation']:.2g} "
            f"with Q = K. The successor is found in {mean(right[untied]):.0%} of the cases untied, "
            f"{mean(right['Q = K']):.0%} with Q = K and {mean(right['Q = K = V']):.0%} with all three tied. On "
            f"language {' and '.join(costs)} nats per token over {told(loss[untied])}. There the tie has ways around: "
            "the causal mask already says who came first, several heads and layers share the work, and rotary "
            "positions let even Q = K tell *a before b* from *b before a*. (Rotated scores stay symmetric, "
            f"{turn['Q = K']['rotated']:.2g}, as a token is turned alike as query and as key; but exchange two "
            f"contents and leave the places, and they change by {turn['Q = K']['contents exchanged']:.2f}.)"
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        kinds = [f"‖S − S'‖ / ‖S‖, {kind}" for kind in numbers["asymmetry"]["untied"]]
        rows = [["variant", "parameters", *kinds, "successor found", "validation loss (nats per token)"]]
        for name, losses in numbers["loss"].items():
            found = [f"{value:.2g}" for value in numbers["asymmetry"][name].values()]
            right = f"{mean(numbers['accuracy'][name]):.1%}"
            rows.append([name, f"{numbers['parameters'][name]:,}", *found, right, told(losses)])
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.7, 1, 1])
        figure.get_layout_engine().set(w_pad=0.12)  # inches between a panel and the next one's label
        for n, (name, found) in enumerate(numbers["asymmetry"].items()):
            bars = left.bar([k + (n - 1) * 0.28 for k in range(3)], found.values(), 0.26, color=f"C{n}", label=name)
            left.bar_label(bars, [f"{value:.2g}" for value in found.values()], fontsize=7)
            bar(middle, n, numbers["accuracy"][name], f"C{n}")
            bar(right, n, numbers["loss"][name], f"C{n}")
        left.set_xticks(range(3), [kind.replace(" ", "\n") for kind in numbers["asymmetry"]["untied"]])
        left.set(title="Query and key exchanged", ylabel="‖S − S'‖ / ‖S‖", ylim=(0, 2), xlabel="scores S")
        left.legend(title="0: no direction", fontsize=8, loc="upper left")
        middle.axhline(17 / 24, color="gray", ls="--", label="bound if S = Sᵀ")
        middle.set(title="Successor found", ylabel="share found", ylim=(0, 1.25))
        middle.legend(fontsize=8, loc="upper right")
        right.set(title="Language", ylabel="validation loss (nats per token)")
        for axes in (middle, right):
            axes.set_xticks(range(3), ["untied", "Q = K", "Q = K\n= V"], fontsize="small")
            axes.set_xlabel("dots: one seed each")


CLAIMS = [ValuesCarryContent(), ThreeRoles()]
