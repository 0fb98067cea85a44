"""What makes depth possible: the scale, residuals, norms; and what the feed-forward is for."""

import math
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention import Mask, rotary_turns
from config.schema import OptimConfig
from experiments import lab
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, above, bar, plain_ticks, told
from experiments.roles import CONTEXT, Nothing, calls, losses_table
from loss import Loss
from model import Block

DEPTHS = (2, 6, 12)
STARTS = ("small start", "unit start")
RATES = (0.003, 0.01)
STEPS = 150
WORSE = 0.1  # nats above ln V, the loss of knowing nothing, that a run may end and not have diverged
COUNTED = (
    f"A run that ends more than {WORSE} above ln V, the loss of knowing nothing, or at no finite loss, has diverged, "
    "and counts as ln V. Where the full model learns nothing beyond the frequencies there is no share to judge, and "
    "nothing counts as stalled or broken"
)
UNJUDGED = "not judged"
FULL, NO_SCALE, NO_NORM, NO_RESIDUAL, NEITHER = "full", "no scale", "no norm", "no residual", "neither"
REMOVALS = [*product((NO_NORM, NO_RESIDUAL, NEITHER), STARTS)]


def deep_model(variant: str, start: str, n_layer: int, seed: int) -> tuple[nn.Module, Callable]:
    """One head of 128, LayerNorm and GELU, and its batches. The small start is Byeol's, matrices N(0, 0.02); the
    unit start draws those of the blocks with 1/√inputs, so that queries and keys, as all else, have unit variance."""
    shape = {"n_head": 1, "d_model": 64, "head_dim": 128, "norm": "layernorm", "activation": "gelu"}
    config = lab.small(STEPS, seed, n_layer=n_layer, max_seq_len=CONTEXT, tie_embeddings=False, **shape)
    model = lab.fresh_model(config)
    for block in model.decoder.blocks:
        if start == "unit start":
            for matrix in (weight for weight in block.parameters() if weight.dim() == 2):
                nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        leave_out(variant, block)
    if variant in (NO_NORM, NEITHER):
        model.decoder.norm = nn.Identity()
    batch = lab.story_batches(config)
    return model, lambda step: tuple(tensor[:8] for tensor in batch(step))


def leave_out(variant: str, block: Block) -> None:
    if variant == NO_SCALE:
        block.attention.scale = 1.0
    if variant in (NO_NORM, NEITHER):
        block.attention_norm = block.feed_forward_norm = nn.Identity()
    if variant in (NO_RESIDUAL, NEITHER):
        block.after = lambda x, y, norm: y


def gradient_norms(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    """Of the loss with respect to each block's matrices, all of a block together."""
    Loss(model)(inputs, targets).div(targets.numel()).backward()
    squares = [sum(p.grad.square().sum() for p in b.parameters() if p.dim() == 2) for b in model.decoder.blocks]
    model.zero_grad()
    return [square.sqrt().item() for square in squares]


@cache
def run(variant: str, start: str, n_layer: int, rate: float, seed: int) -> dict:
    """One training: the gradient norms of its first and last block before it, the curve, and the loss on 20 batches
    that follow, None if the run diverged: that is, ended more than `WORSE` above ln V or not finite."""
    model, batch = deep_model(variant, start, n_layer, seed)
    first, *_, last = gradient_norms(model, *(tensor.to(lab.machine().device) for tensor in batch(0)))
    losses = lab.fit(model, batch, STEPS, OptimConfig(name="adamw", learning_rate=rate, warmup_steps=20))
    with torch.no_grad():
        graded = ([tensor.to(lab.machine().device) for tensor in batch(step)] for step in range(STEPS, STEPS + 20))
        loss = mean(Loss(model)(*pair).item() / pair[1].numel() for pair in graded)
    curve = [mean(losses[step : step + 10]) for step in range(0, STEPS, 10)]
    return {
        "loss": loss if loss <= math.log(model.config.vocab_size) + WORSE else None,  # None for what is no number, too
        "curve": [value if math.isfinite(value) else None for value in curve],
        "gradients": [first, last],
        "rate": rate,
    }


def better(variant: str, start: str, n_layer: int) -> dict:
    """The run with the better learning rate, of the first seed."""
    found = [run(variant, start, n_layer, rate, 0) for rate in RATES]
    return min(found, key=lambda one: math.inf if one["loss"] is None else one["loss"])


def deep_numbers(*variants: str) -> Numbers:
    """Of each variant, start and depth the better run; of the deepest models the losses of all seeds, at the first
    one's better rate; and the losses of who knows only how frequent tokens are, and of who knows nothing."""
    runs = {v: {start: {str(n): better(v, start, n) for n in DEPTHS} for start in STARTS} for v in variants}
    deep = max(DEPTHS)
    seeds = {
        v: {s: [run(v, s, deep, found[str(deep)]["rate"], seed)["loss"] for seed in SEEDS] for s, found in of.items()}
        for v, of in runs.items()
    }
    nothing = math.log(lab.stories().tokenizer.vocab_size)
    return {"runs": runs, "seeds": seeds, "unigram": unigram_loss(), "nothing": nothing}


def unigram_loss() -> float:
    """Nats per token for who knows only how frequent each is."""
    share = torch.bincount(torch.from_numpy(lab.stories().train.tokens.astype("int64"))).double()
    return torch.special.entr(share / share.sum()).sum().item()


def of_seeds(numbers: Numbers, variant: str, start: str, depth: int) -> list[float | None]:
    """Of each seed that was run."""
    deepest = depth == max(DEPTHS)
    return numbers["seeds"][variant][start] if deepest else [numbers["runs"][variant][start][str(depth)]["loss"]]


def counted(numbers: Numbers, variant: str, start: str, depth: int) -> list[float]:
    """The same for the rules: a run that diverged has learned nothing."""
    return [numbers["nothing"] if loss is None else loss for loss in of_seeds(numbers, variant, start, depth)]


def kept(numbers: Numbers, variant: str, start: str, depth: int) -> float:
    """How much of what the full model learned beyond the frequencies of tokens, this one learned as well; if the full
    one learned nothing, no number, and so neither much nor little."""
    loss, full = (mean(counted(numbers, name, start, depth)) for name in (variant, FULL))
    return (numbers["unigram"] - loss) / (numbers["unigram"] - full) if full < numbers["unigram"] else math.nan


def lost(numbers: Numbers, variant: str, start: str, depth: int) -> str:
    """For people: how many seeds diverged, if any did."""
    found = of_seeds(numbers, variant, start, depth)
    gone = found.count(None)
    return "" if not gone else "diverged" if gone == len(found) else f"{gone} of {len(found)} diverged"


def loss_told(numbers: Numbers, variant: str, start: str, depth: int) -> str:
    ended = [loss for loss in of_seeds(numbers, variant, start, depth) if loss is not None]
    if word := lost(numbers, variant, start, depth):
        return f"{word}, else {told(ended, 2)}" if ended else word
    return told(ended, 2) if len(ended) > 1 else f"{ended[0]:.2f}"


def percent(numbers: Numbers, variant: str, start: str, depth: int) -> str:
    """For people: what is kept."""
    share, word = kept(numbers, variant, start, depth), lost(numbers, variant, start, depth)
    if word == "diverged":
        return word
    return UNJUDGED if math.isnan(share) else f"{round(100 * share)}%" + f" ({word})" * bool(word)


def listed(pairs: Iterable[tuple[str, str]]) -> str:
    """For people: variants and their starts."""
    return ", ".join(f"{variant} ({start})" for variant, start in pairs) or "none"


def unjudged(numbers: Numbers) -> str:
    """A sentence about where the full model learned nothing, if there is such a place."""
    found = [(f"{n} layers", s) for n, s in product((2, 12), STARTS) if math.isnan(kept(numbers, FULL, s, n))]
    return f"Not judged, as the full model learned nothing beyond frequencies: {listed(found)}. " if found else ""


def saturation(width: int, scale: float, n_query: int = 2000, n_key: int = 128) -> dict[str, float]:
    """Of queries and keys of unit variance, the medians over queries: the largest probability, and the norm of the
    softmax's derivative."""
    generator = torch.Generator().manual_seed(width)
    q = torch.randn(n_query, width, generator=generator, dtype=torch.float64)
    k = torch.randn(n_key, width, generator=generator, dtype=torch.float64)
    p = (q @ k.T * scale).softmax(-1)
    return {"largest": p.amax(-1).median().item(), "derivative": derivative_norm(p).median().item()}


def derivative_norm(p: Tensor) -> Tensor:
    """‖diag(p) − ppᵀ‖ of each row of probabilities: how far they move with the scores."""
    square = p.square()
    return (square * ((1 - p).square() + square.sum(-1, keepdim=True) - square)).sum(-1).sqrt()


class ScaleAndDepth(Claim):
    id = "A9"
    english = "Unscaled, the softmax saturates, gradients vanish and learning stalls; √d_k cures it and allows depth."
    korean = (
        "√d_k로 나누지 않으면 소프트맥스가 포화되고 기울기가 사라져 학습이 멎는다. √d_k로 나누면 이 문제가 풀리고 "
        "층을 깊게 쌓을 수 있다."
    )
    prediction = (
        "(a) With queries and keys of unit variance, the median (over 2,000 queries) of the largest of 128 "
        "probabilities goes to one as d_k grows to 1,024, and that of the softmax's derivative to zero; divided by "
        "√d_k neither moves. (b) Language models of 2, 6 and 12 layers (one head, d_k = 128) are trained alike, from "
        "Byeol's small start and from one that keeps unit variance, each with the better of two learning rates (12 "
        "layers with three seeds, at the rate that is better for the first; fewer layers with one). At 12 layers "
        "those without scale learn next to nothing (those without norms or residuals are there to compare)."
    )
    rule = (
        "(a) the softmax saturates if at d_k = 1,024 the median largest probability is above 0.99 unscaled and below "
        "0.5 scaled, and the median norm of the derivative unscaled is below a tenth of the scaled. From a start, (b) "
        "gradients vanish if, before training, that of the first of 12 layers is unscaled below a tenth of the full "
        "model's; (c) learning stalls if 12 layers end clearly worse unscaled (the means of three seeds differ by more "
        "than the seeds do) and learn less than half of what the full ones do (beyond the frequencies of tokens); (d) "
        "the scale is needed for depth if (c), and 2 layers learn at least half. It holds if (a), and (b) to (d) from "
        "both starts; holds with a condition if (a), and (b) to (d) from one start; does not hold otherwise. "
        f"{COUNTED}"
    )
    changed = (
        "Trials of 150 to 200 steps came first: their losses were known when the rule was written. They led to "
        "LayerNorm and GELU (without norms SwiGLU diverged at one rate) and to two starts for every variant. Later "
        "the rule was made stricter: until then the verdict was *holds with a condition*, for which it was enough that "
        "12 layers end clearly worse from one start, even if 2 layers stall, too; gradients in the models were not "
        "judged. At first norms and residuals had one seed, and what diverged was shown as ln V. That nothing is "
        "judged where the full model learns nothing was added last."
    )
    first_verdict = CONDITION

    def measure(self) -> Numbers:
        widths = [2**n for n in range(4, 11)]
        return {
            "widths": widths,
            "unscaled": [saturation(d, 1.0) for d in widths],
            "scaled": [saturation(d, d**-0.5) for d in widths],
            **deep_numbers(FULL, NO_SCALE, NO_NORM, NO_RESIDUAL),
        }

    def _saturates(self, numbers: Numbers) -> bool:
        unscaled, scaled = numbers["unscaled"][-1], numbers["scaled"][-1]
        peaked = unscaled["largest"] > 0.99 and scaled["largest"] < 0.5
        return peaked and unscaled["derivative"] < 0.1 * scaled["derivative"]

    def _first_gradient(self, numbers: Numbers, start: str) -> float:
        """Unscaled, in the first of 12 layers, as a multiple of the full model's."""
        unscaled, full = (numbers["runs"][variant][start]["12"]["gradients"][0] for variant in (NO_SCALE, FULL))
        return unscaled / full

    def _parts(self, numbers: Numbers) -> tuple[list[str], list[str], list[str]]:
        """From which starts gradients vanish, learning stalls, and depth is the reason."""
        vanish = [start for start in STARTS if self._first_gradient(numbers, start) < 0.1]
        worse = [s for s in STARTS if above(*(counted(numbers, variant, s, 12) for variant in (NO_SCALE, FULL)))]
        stall = [start for start in worse if kept(numbers, NO_SCALE, start, 12) < 0.5]
        return vanish, stall, [start for start in stall if kept(numbers, NO_SCALE, start, 2) >= 0.5]

    def _whole(self, numbers: Numbers) -> list[str]:
        """From which starts all three are true."""
        return [start for start in STARTS if all(start in part for part in self._parts(numbers))]

    def verdict(self, numbers: Numbers) -> Verdict:
        starts = self._whole(numbers)
        if not (self._saturates(numbers) and starts):
            return FAILS
        return HOLDS if starts == [*STARTS] else CONDITION

    def finding(self, numbers: Numbers) -> str:
        unscaled, scaled, usual = numbers["unscaled"], numbers["scaled"], numbers["widths"].index(64)
        of_scaled = [a["derivative"] / b["derivative"] for a, b in zip(unscaled, scaled, strict=True)]
        vanish, stall, deep = self._parts(numbers)
        where = ["the " + " and the ".join(starts) if starts else "neither start" for starts in (vanish, stall, deep)]
        condition = f"The condition: every part is true from the {' and the '.join(self._whole(numbers))} alone. "
        better = "So a model's start decides whether it needs the division; its depth, here, does not. "
        around = (
            "Values and residuals carry gradients around a saturated softmax, and where two keys rival it passes on "
            "√d_k times as much. "
        )
        return (
            f"{condition * (self.verdict(numbers) == CONDITION)}At d_k = 1,024 the softmax "
            f"{'saturates' if self._saturates(numbers) else 'does not saturate as far as the rule asks'} unscaled: its "
            f"median largest probability is {unscaled[-1]['largest']:.4f} (scaled {scaled[-1]['largest']:.2f}), its "
            f"derivative {of_scaled[-1]:.4f} times the scaled (at 64, {unscaled[usual]['largest']:.2f} and "
            f"{of_scaled[usual]:.2f}). In 12 layers gradients vanish from {where[0]}: before training the first "
            f"layer's is {' and '.join(f'{self._first_gradient(numbers, start):.2g}' for start in STARTS)} times the "
            f"full model's, from small and unit start. {around * (not vanish)}Learning stalls from {where[1]}, and "
            f"depth is the reason from {where[2]}. Without scale, in per cent of what the full models learn: "
            f"{'; '.join(self._reason(numbers, start, stall, deep) for start in STARTS)}. "
            f"{unjudged(numbers)}{better * (len(stall) == 1 and not deep and not unjudged(numbers))}"
        ).strip()

    def _reason(self, numbers: Numbers, start: str, stall: list[str], deep: list[str]) -> str:
        few, many = (percent(numbers, NO_SCALE, start, depth) for depth in (2, 12))
        words = {"diverged": "diverge", UNJUDGED: "are not judged"}
        short, long = (words.get(share, f"keep {share}") for share in (few, many))
        if start not in stall:
            return f"from the {start} 12 layers {long}"
        reason = "for depth" if start in deep else "at 2 layers already"
        needed = f", so there the scale is needed {reason}" * (few != UNJUDGED)
        return f"from the {start} 2 layers {short} and 12 {long}{needed}"

    def table(self, numbers: Numbers) -> list[list[str]]:
        seeds = dict.fromkeys(DEPTHS, "one seed") | {12: f"{len(SEEDS)} seeds"}
        rows = [["variant", "start", *(f"loss (nats per token), {n} layers ({seeds[n]})" for n in DEPTHS)]]
        rows[0] += ["kept at 2", "kept at 12", "gradient norm of the first of 12 layers before training"]
        for variant, start in product(numbers["runs"], STARTS):
            cells = [loss_told(numbers, variant, start, n) for n in DEPTHS]
            cells += [percent(numbers, variant, start, n) for n in (2, 12)]
            first = numbers["runs"][variant][start]["12"]["gradients"][0]
            rows.append([variant, start, *cells, f"{first:.1e}"])
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        left, *panels = figure.subplots(1, 3, width_ratios=[1.3, 1, 1])
        for name, style in (("unscaled", "-"), ("scaled", "--")):
            for kind, line, label in (
                ("largest", "C0o", "largest probability"),
                ("derivative", "C3s", "derivative ‖∂p/∂s‖"),
            ):
                values = [found[kind] for found in numbers[name]]
                left.plot(numbers["widths"], values, line + style, label=f"{label}, {name}")
        left.set(
            xscale="log", yscale="log", xlabel="width d_k", ylabel="median over queries (128 keys)", ylim=(None, 30)
        )
        left.set_title("Softmax p of scores s,\ndivided by √d_k or not")
        plain_ticks(left.xaxis, numbers["widths"][::2])
        plain_ticks(left.yaxis, [0.001, 0.01, 0.1, 1])
        left.legend(fontsize=8, loc="upper left")
        for axes, start in zip(panels, STARTS, strict=True):
            words = []
            for variant, runs in numbers["runs"].items():
                style = "-" if variant in (FULL, NO_SCALE) else ":"
                curve = [math.nan if value is None else value for value in runs[start]["12"]["curve"]]
                axes.plot(range(5, STEPS, 10), curve, style, label=variant)
                words += [f"{variant}: diverged"] * (runs[start]["12"]["loss"] is None)
            axes.text(0.97, 0.98, "\n".join(words), transform=axes.transAxes, ha="right", va="top", fontsize=8)
            axes.axhline(numbers["unigram"], color="gray", lw=0.8, label="frequencies only")
            axes.set(xlabel="step", ylabel="training loss (nats per token)", ylim=(2, 7.4))
            axes.set_title(f"Training 12 layers,\n{start}, seed 0")
        panels[1].legend(fontsize=8, loc="lower left")
        figure.get_layout_engine().set(w_pad=0.1)


class AddAndNorm(Claim):
    id = "F2"
    english = "Add & Norm (residual connections and normalisation) make depth possible."
    korean = "잔차 연결과 정규화(Add & Norm) 덕분에 층을 깊이 쌓을 수 있다."
    prediction = (
        "Models of 2, 6 and 12 layers are trained alike: full, without norms, without residuals, without both; from "
        "Byeol's small start and from one that keeps unit variance, each with the better of two learning rates (12 "
        "layers with three seeds, at the rate that is better for the first; fewer layers with one). Where either "
        "is left out, the first layer's gradient loses touch with the last one's as depth grows, and at 12 layers "
        "little is learned."
    )
    rule = (
        "a removal breaks depth from a start if of what the full model learned from it (beyond the frequencies of "
        "tokens) at least half is learned at 2 layers and less than half at 12; holds if leaving out the norms and "
        "leaving out the residuals each break depth from both starts; holds with a condition if any removal breaks "
        f"depth from any start; does not hold otherwise. {COUNTED}"
    )
    changed = (
        "As with A9, whose runs it shares, the losses of trials were known when the rule was written. At first what "
        "2 layers learned did not have to be half, only more than 12 do, so that leaving out the residuals counted; "
        "there was one seed, and what diverged was shown as ln V. The verdict was *holds with a condition*. That "
        "nothing is judged where the full model learns nothing was added last."
    )

    def measure(self) -> Numbers:
        return deep_numbers(FULL, NO_NORM, NO_RESIDUAL, NEITHER)

    def _broken(self, numbers: Numbers) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Which removals break depth from which starts, and which are broken at 2 layers already."""
        few, many = ({pair: kept(numbers, *pair, depth) for pair in REMOVALS} for depth in (2, 12))
        return [pair for pair in REMOVALS if few[pair] >= 0.5 > many[pair]], [p for p in REMOVALS if few[p] < 0.5]

    def verdict(self, numbers: Numbers) -> Verdict:
        broken, _ = self._broken(numbers)
        if {*product((NO_NORM, NO_RESIDUAL), STARTS)} <= {*broken}:
            return HOLDS
        return CONDITION if broken else FAILS

    def finding(self, numbers: Numbers) -> str:
        broken, early = self._broken(numbers)
        condition, small = self.verdict(numbers) == CONDITION, (NO_NORM, STARTS[0], 12)
        shallow = f"Broken at 2 layers already, so that depth is not the reason: {listed(early)}. "
        start = f"A small start can stand in for the norms: 12 layers without them keep {percent(numbers, *small)}. "
        stands_in = kept(numbers, *small) >= 0.5 and (NO_NORM, STARTS[1]) in broken
        return (
            f"{'The condition: depth' if condition else 'Depth'} is broken by {listed(broken)}{' alone' * condition}. "
            f"{shallow * bool(early)}{unjudged(numbers)}{start * stands_in}{self._gradients(numbers)} A "
            "residual lets a token's own content, and its gradient, pass a layer unchanged; a norm bounds sizes "
            "whatever the weights are."
        )

    def _gradients(self, numbers: Numbers) -> str:
        """What comes of the prediction that the first layer's gradient loses touch with the last one's."""
        apart, rest = [], []
        for variant, start in REMOVALS:
            (a, b), (c, d) = (numbers["runs"][variant][start][n]["gradients"] for n in ("2", "12"))  # first, last layer
            if not all(0 < norm < math.inf for norm in (a, b, c, d)):
                rest.append((variant, start))
            elif not 0.1 <= a / b * d / c <= 10:
                apart.append((variant, start))
        borne = " not" if not apart else " in part" if len(apart + rest) < len(REMOVALS) else ""
        out = f" (It cannot be judged where float32 cannot hold a gradient: {listed(rest)}.)" * bool(rest)
        return (
            f"That the first layer's gradient loses touch with the last one's is{borne} borne out: their ratio changes "
            f"more than tenfold from 2 to 12 layers in {listed(apart)}.{out}"
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        loss = f"loss (nats per token; 12 layers: {len(SEEDS)} seeds)"
        rows = [["variant", "start", "layers", loss, "kept", "learning rate"]]
        rows[0].append("gradient norm before training, first / last layer")
        for variant, start, n in product(numbers["runs"], STARTS, DEPTHS):
            found = numbers["runs"][variant][start][str(n)]
            cells = [loss_told(numbers, variant, start, n), percent(numbers, variant, start, n)]
            gradients = " / ".join(f"{value:.1e}" for value in found["gradients"])
            rows.append([variant, start, str(n), *cells, f"{found['rate']:g}", gradients])
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        losses, gradients = figure.subplots(2, 2, sharex=True, sharey="row")
        for upper, lower, start in zip(losses, gradients, STARTS, strict=True):
            words = []
            for (variant, runs), marker in zip(numbers["runs"].items(), "osv^", strict=True):
                found = [runs[start][str(depth)] for depth in DEPTHS]
                first = [run["gradients"][0] or math.nan for run in found]  # a zero has no place on a logarithmic axis
                gone = [n for n in DEPTHS if lost(numbers, variant, start, n)]
                words += [f"{variant}, {n} layers: {lost(numbers, variant, start, n)}" for n in gone]
                ends = [math.nan if n in gone else mean(of_seeds(numbers, variant, start, n)) for n in DEPTHS]
                upper.plot(DEPTHS, ends, marker + "-", label=variant)
                lower.plot(DEPTHS, first, marker + "-")
            upper.axhline(numbers["unigram"], color="gray", ls=":", label="frequencies only")
            upper.text(0.97, 0.97, "\n".join(words), transform=upper.transAxes, ha="right", va="top", fontsize=8)
            upper.set(title=start, xlabel="layers", ylabel="loss after training\n(nats per token)", ylim=(2, 8.2))
            lower.set(yscale="log", xlabel="layers (a gradient of 0 is not drawn)", xticks=DEPTHS)
            lower.set_ylabel("gradient norm of the first\nlayer before training")
        figure.legend(*losses[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
        figure.suptitle("Residuals and norms left out, from a small and from a unit start")


def no_feed_forward(model: nn.Module) -> None:
    for block in model.decoder.blocks:
        block.feed_forward = Nothing()


def linear_feed_forward(model: nn.Module) -> None:
    for block in model.decoder.blocks:
        block.feed_forward.activation = lambda x: x


def superposition(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """‖f(x + y) − f(x) − f(y)‖ / ‖f(x + y)‖: zero if f is linear."""
    whole = f(x + y)
    return (torch.linalg.vector_norm(whole - f(x) - f(y)) / torch.linalg.vector_norm(whole)).item()


@torch.no_grad()
def curvature(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """How far the first layer's sublayers are from linear, on what they read from the first and second half of the
    rows."""
    block = model.decoder.blocks[0]
    read = [output for _, output in calls(model, [block.attention_norm, block.feed_forward_norm], tokens)]
    length, attention = tokens.shape[1], block.attention
    turns = rotary_turns(model.decoder.angles(torch.arange(length, device=tokens.device)))
    mask = Mask(length, length, device=tokens.device)
    return {
        "attention": superposition(
            lambda x: attention(*attention.queries_keys_values(x, turns), mask), *read[0].chunk(2)
        ),
        "feed-forward": superposition(block.feed_forward, *read[1].chunk(2)),
    }


class NonLinearity(Claim):
    id = "F1"
    english = "The feed-forward network supplies the non-linearity that language needs."
    korean = "언어에 필요한 비선형성은 피드포워드 신경망이 제공한다."
    prediction = (
        "Language models of two layers are trained with the feed-forward as it is (GELU), with the same matrices and "
        "no activation, and without it; and six layers of attention alone, which have as many parameters. The linear "
        "feed-forward brings little of what the full one does, and attention alone does not replace it."
    )
    rule = (
        "'clearly': the means over three seeds differ by more than the seeds do; holds if the linear feed-forward is "
        "clearly worse than the full one and brings less than half of what the full one gains over none, and attention "
        "alone at equal parameters is clearly worse than full; holds with a condition if the first is true and the "
        "others are not both; does not hold if the linear one is not clearly worse"
    )
    variants: ClassVar = {
        "full": (2, None),
        "linear": (2, linear_feed_forward),
        "none": (2, no_feed_forward),
        "none, three times as deep": (6, no_feed_forward),
    }

    def measure(self) -> Numbers:
        shape = {"d_model": 96, "d_ff": 384, "activation": "gelu", "max_seq_len": CONTEXT}
        models = {
            name: [lab.trained(lab.small(250, seed, n_layer=n_layer, **shape), change) for seed in SEEDS]
            for name, (n_layer, change) in self.variants.items()
        }
        tokens = lab.story_batches(lab.small(250, n_layer=2, **shape))(10_000)[0].to(lab.machine().device)
        return {
            "loss": {name: [lab.validate(model, CONTEXT)["loss"] for model in found] for name, found in models.items()},
            "parameters": {name: sum(p.numel() for p in found[0].parameters()) for name, found in models.items()},
            "curvature": {name: curvature(models[name][0], tokens) for name in ("full", "linear")},
        }

    def _brought(self, numbers: Numbers) -> float:
        """The share of the gain over none that the linear one brings."""
        full, linear, none, _ = map(mean, numbers["loss"].values())
        return (none - linear) / (none - full)

    def verdict(self, numbers: Numbers) -> Verdict:
        full, linear, _, deeper = numbers["loss"].values()
        if not above(linear, full):
            return FAILS
        return HOLDS if self._brought(numbers) < 0.5 and above(deeper, full) else CONDITION

    def finding(self, numbers: Numbers) -> str:
        full, linear, none, deeper = numbers["loss"].values()
        bent, reasons = numbers["curvature"], []
        if self._brought(numbers) >= 0.5:
            reasons.append("much of the gain is that of the matrices, without any activation")
        if not above(deeper, full):
            reasons.append("as many parameters of attention alone do not end clearly worse")
        condition = f"The condition: {', and '.join(reasons)}. "
        return (
            f"{condition * (self.verdict(numbers) == CONDITION)}Full {told(full)}, linear {told(linear)}, none "
            f"{told(none)} nats per token: the same matrices without their activation bring "
            f"{self._brought(numbers):.0%} of what the feed-forward gains over none. Attention alone, three times as "
            f"deep, ends at {told(deeper)}, {'not ' * (not above(deeper, full))}clearly worse than full. But "
            "attention is not linear either: f(x + y) differs from f(x) + f(y) by "
            f"{bent['full']['attention']:.2f} of its norm in the attention, by {bent['full']['feed-forward']:.2f} in "
            f"the feed-forward and by {bent['linear']['feed-forward']:.1g} in the linear one. Better said: with its "
            "weights given, attention is a linear mixture of tokens, and what is non-linear in it only decides which "
            "are mixed; the feed-forward is where each token is worked on by itself."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        return losses_table(numbers, "feed-forward")

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
        for n, losses in enumerate(numbers["loss"].values()):
            bar(left, n, losses, f"C{n}")
            left.text(n, mean(losses) / 2, f"{mean(losses):.2f}", ha="center")
        left.set_xticks(range(4), ["full\n(GELU)", "linear", "none", "none,\n3 × as deep"])
        left.set(xlabel="feed-forward (dots: one seed each)", ylabel="validation loss (nats per token)")
        left.set_title("What the activation is worth")
        bent = numbers["curvature"]
        values = [bent["full"]["attention"], bent["full"]["feed-forward"], bent["linear"]["feed-forward"]]
        right.bar(range(3), values, color=["C4", "C0", "C1"])
        right.set_xticks(range(3), ["attention", "FFN,\nfull", "FFN,\nlinear"])
        right.set(xlabel="sublayer (FFN: feed-forward)", ylabel="‖f(x + y) − f(x) − f(y)‖ / ‖f(x + y)‖")
        right.set_title("How far from linear? (0: linear)")


CLAIMS = [ScaleAndDepth(), NonLinearity(), AddAndNorm()]
