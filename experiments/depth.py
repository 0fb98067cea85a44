"""What makes depth possible: the scale, residuals, norms; and what the feed-forward is for."""

import math
from collections.abc import Callable
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
from experiments.roles import CONTEXT, Nothing, losses_table
from loss import Loss
from model import Block

DEPTHS = (2, 6, 12)
STARTS = ("small start", "unit start")
RATES = (0.003, 0.01)
STEPS = 150
FULL, NO_SCALE, NO_NORM, NO_RESIDUAL, NEITHER = "full", "no scale", "no norm", "no residual", "neither"


def deep_model(variant: str, start: str, n_layer: int, seed: int) -> tuple[nn.Module, Callable]:
    """One head of 128, LayerNorm and GELU, and its batches. The small start is the trunk's, matrices N(0, 0.02); the
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
    that follow. No loss counts as more than ln V, that of knowing nothing: a run may diverge."""
    model, batch = deep_model(variant, start, n_layer, seed)
    nothing = math.log(model.config.vocab_size)
    first, *_, last = gradient_norms(model, *(tensor.to(lab.machine().device) for tensor in batch(0)))
    losses = lab.fit(model, batch, STEPS, OptimConfig(name="adamw", learning_rate=rate, warmup_steps=20))
    with torch.no_grad():
        graded = ([tensor.to(lab.machine().device) for tensor in batch(step)] for step in range(STEPS, STEPS + 20))
        loss = mean(Loss(model)(*pair).item() / pair[1].numel() for pair in graded)
    curve = [mean(losses[step : step + 10]) for step in range(0, STEPS, 10)]
    loss, *curve = (min(value, nothing) if math.isfinite(value) else nothing for value in (loss, *curve))
    return {"loss": loss, "curve": curve, "gradients": [first, last], "rate": rate}


def better(variant: str, start: str, n_layer: int) -> dict:
    """The run with the better learning rate, of the first seed."""
    return min((run(variant, start, n_layer, rate, 0) for rate in RATES), key=lambda found: found["loss"])


def deep_runs(*variants: str) -> dict[str, dict[str, dict[str, dict]]]:
    """Of each variant, start and depth the better run."""
    return {v: {start: {str(n): better(v, start, n) for n in DEPTHS} for start in STARTS} for v in variants}


def deep_seeds(*variants: str) -> dict[str, dict[str, list[float]]]:
    """Of each variant and start the losses of all seeds in the deepest model, at the first one's better rate."""
    deep = max(DEPTHS)
    rate = {(v, start): better(v, start, deep)["rate"] for v, start in product(variants, STARTS)}
    return {
        v: {start: [run(v, start, deep, rate[v, start], seed)["loss"] for seed in SEEDS] for start in STARTS}
        for v in variants
    }


def unigram_loss() -> float:
    """Nats per token for who knows only how frequent each is."""
    share = torch.bincount(torch.from_numpy(lab.stories().train.tokens.astype("int64"))).double()
    return torch.special.entr(share / share.sum()).sum().item()


def kept(numbers: Numbers, variant: str, start: str, depth: int) -> float:
    """How much of what the full model learned beyond the frequencies of tokens, this one learned as well."""
    loss, full = (numbers["runs"][name][start][str(depth)]["loss"] for name in (variant, FULL))
    if depth == max(DEPTHS) and variant in numbers.get("seeds", {}):
        loss, full = (mean(numbers["seeds"][name][start]) for name in (variant, FULL))
    return (numbers["unigram"] - loss) / (numbers["unigram"] - full)


def percent(numbers: Numbers, variant: str, start: str, *depths: int) -> str:
    """For people: what is kept at these depths."""
    return " / ".join(f"{round(100 * kept(numbers, variant, start, n))}%" for n in depths)


def shares(numbers: Numbers, *variants: str) -> str:
    """For people: what is kept at each depth, from either start."""
    told = ((variant, (percent(numbers, variant, start, *DEPTHS) for start in STARTS)) for variant in variants)
    return "; ".join(f"{variant} {' and '.join(found)}" for variant, found in told)


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
        "√d_k로 나누지 않으면 소프트맥스가 포화되고 기울기가 사라져 학습이 멎는다. 층을 깊게 쌓는 비결은 이 나눗셈이다."
    )
    prediction = (
        "(a) With queries and keys of unit variance, the largest of 128 probabilities goes to one as d_k grows to "
        "1,024, and the softmax's derivative to zero; divided by √d_k neither moves. (b) Language models of 2, 6 and "
        "12 layers (one head, d_k = 128) are trained alike, from the trunk's small start and from one that keeps unit "
        "variance, each with the better of two learning rates. At 12 layers those without scale learn next to nothing "
        "(those without norms or residuals are there to compare)."
    )
    rule = (
        "(a) at d_k = 1,024 the median largest probability is above 0.99 unscaled and below 0.5 scaled, and the median "
        "norm of the derivative unscaled is below a tenth of the scaled; (b) from both starts, the unscaled models "
        "learn less than half of what the full ones do (beyond the frequencies of tokens) at 12 layers and more than "
        "half at 2; holds if (a) and (b); holds with a condition if (a), and from one start or both 12 layers end "
        "clearly worse unscaled (the means of three seeds differ by more than the seeds do); does not hold otherwise"
    )
    changed = (
        "Trials of 150 to 200 steps came first: their losses were known when the rule was written. They led to "
        "LayerNorm and GELU (without norms SwiGLU diverged at one rate) and to two starts for every variant."
    )

    def measure(self) -> Numbers:
        widths = [2**n for n in range(4, 11)]
        return {
            "widths": widths,
            "unscaled": [saturation(d, 1.0) for d in widths],
            "scaled": [saturation(d, d**-0.5) for d in widths],
            "runs": deep_runs(FULL, NO_SCALE, NO_NORM, NO_RESIDUAL),
            "seeds": deep_seeds(FULL, NO_SCALE),
            "unigram": unigram_loss(),
        }

    def _clearly_worse(self, numbers: Numbers) -> list[str]:
        """From which starts."""
        seeds = numbers["seeds"]
        return [start for start in STARTS if above(seeds[NO_SCALE][start], seeds[FULL][start])]

    def verdict(self, numbers: Numbers) -> Verdict:
        unscaled, scaled = numbers["unscaled"][-1], numbers["scaled"][-1]
        peaked = unscaled["largest"] > 0.99 and scaled["largest"] < 0.5
        if not (peaked and unscaled["derivative"] < 0.1 * scaled["derivative"]):
            return FAILS
        if all(kept(numbers, NO_SCALE, start, 12) < 0.5 < kept(numbers, NO_SCALE, start, 2) for start in STARTS):
            return HOLDS
        return CONDITION if self._clearly_worse(numbers) else FAILS

    def finding(self, numbers: Numbers) -> str:
        unscaled, scaled, seeds = (numbers[name] for name in ("unscaled", "scaled", "seeds"))
        usual, worse = numbers["widths"].index(64), " and ".join(self._clearly_worse(numbers)) or "neither start"
        condition = ", which is the condition" * (self.verdict(numbers) == CONDITION)
        of_scaled = [a["derivative"] / b["derivative"] for a, b in zip(unscaled, scaled, strict=True)]
        ends = "; ".join(f"{s}, {told(seeds[NO_SCALE][s], 2)} against {told(seeds[FULL][s], 2)}" for s in STARTS)
        first = [[numbers["runs"][v][s]["12"]["gradients"][0] for v in (NO_SCALE, FULL)] for s in STARTS]
        return (
            f"Unscaled, the largest probability is {unscaled[usual]['largest']:.2f} at d_k = 64 and "
            f"{unscaled[-1]['largest']:.4f} at 1,024 (scaled {scaled[-1]['largest']:.2f}), the softmax's derivative "
            f"{of_scaled[usual]:.2f} and {of_scaled[-1]:.4f} times the scaled. At 12 layers, unscaled against full, "
            f"in nats per token: {ends}; clearly worse from {worse}{condition}. Of what the full models "
            "learned is kept at 2 / 6 / 12 layers, from the small and from the unit start: "
            f"{shares(numbers, NO_SCALE, NO_NORM, NO_RESIDUAL)}. Before training, the unscaled first layer's gradient "
            f"is {' and '.join(f'{a / b:.2g}' for a, b in first)} times the full one's: a saturated softmax shuts the "
            "way through the scores for most queries, yet where two keys rival it passes on √d_k times as much, and "
            "values and residuals carry gradients around it. From a small start scores begin near zero, divided or not."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [["variant", "start", *(f"loss (nats per token), {n} layers" for n in DEPTHS)]]
        rows[0] += ["kept at 12", "gradient norm of the first of 12 layers before training"]
        for variant, start in product(numbers["runs"], STARTS):
            runs = numbers["runs"][variant][start]
            losses = [f"{found['loss']:.2f}" for found in runs.values()]
            if variant in numbers["seeds"]:
                losses[-1] = told(numbers["seeds"][variant][start], 2)
            first = f"{runs['12']['gradients'][0]:.1e}"
            rows.append([variant, start, *losses, percent(numbers, variant, start, 12), first])
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
            for variant, runs in numbers["runs"].items():
                style = "-" if variant in (FULL, NO_SCALE) else ":"
                axes.plot(range(5, STEPS, 10), runs[start]["12"]["curve"], style, label=variant)
            axes.axhline(numbers["unigram"], color="gray", lw=0.8, label="frequencies only")
            axes.set(xlabel="step", ylabel="training loss (nats per token)", ylim=(2, 7.1))
            axes.set_title(f"Training 12 layers,\n{start}")
        panels[1].legend(fontsize=8, loc="lower left")


class AddAndNorm(Claim):
    id = "F2"
    english = "Add & Norm (residual connections and normalisation) make depth possible."
    korean = "잔차 연결과 정규화(Add & Norm) 덕분에 층을 깊이 쌓을 수 있다."
    prediction = (
        "Models of 2, 6 and 12 layers are trained alike: full, without norms, without residuals, without both; from "
        "the trunk's small start and from one that keeps unit variance, each with the better of two learning rates. "
        "Where either is left out, the first layer's gradient loses touch with the last one's as depth grows, and at "
        "12 layers little is learned."
    )
    rule = (
        "a removal breaks depth from a start if at 12 layers less than half of what the full model learned from it "
        "(beyond the frequencies of tokens) is learned, and less than without it at 2 layers; holds if leaving out the "
        "norms breaks depth from both starts, and leaving out the residuals does; holds with a condition if any "
        "removal breaks depth from any start; does not hold otherwise"
    )
    changed = "As with A9, whose runs it shares, the losses of trials were known when the rule was written."

    def measure(self) -> Numbers:
        return {"runs": deep_runs(FULL, NO_NORM, NO_RESIDUAL, NEITHER), "unigram": unigram_loss()}

    def _broken(self, numbers: Numbers) -> list[tuple[str, str]]:
        """Which removals break depth from which starts."""
        broken = []
        for variant, start in product((NO_NORM, NO_RESIDUAL, NEITHER), STARTS):
            runs = numbers["runs"][variant][start]
            if kept(numbers, variant, start, 12) < 0.5 and runs["12"]["loss"] > runs["2"]["loss"]:
                broken.append((variant, start))
        return broken

    def verdict(self, numbers: Numbers) -> Verdict:
        broken = self._broken(numbers)
        if {*product((NO_NORM, NO_RESIDUAL), STARTS)} <= {*broken}:
            return HOLDS
        return CONDITION if broken else FAILS

    def finding(self, numbers: Numbers) -> str:
        broken = self._broken(numbers)
        early = [f"{variant} ({start})" for variant, start in broken if kept(numbers, variant, start, 2) < 0.5]
        shallow = f"Not depth alone is broken where 2 layers, too, keep less than half: {', '.join(early)}. "
        full = (" / ".join(f"{run['loss']:.2f}" for run in numbers["runs"][FULL][s].values()) for s in STARTS)
        return (
            f"Depth is broken by: {', '.join(f'{variant} ({start})' for variant, start in broken) or 'nothing'}"
            f"{' (this is the condition)' * (self.verdict(numbers) == CONDITION)}. From the small and from the unit "
            f"start the full models end at {' and '.join(full)} nats per token with 2 / 6 / 12 layers; of what they "
            f"learned is kept: {shares(numbers, NO_NORM, NO_RESIDUAL, NEITHER)}. {shallow * bool(early)}The two parts "
            "do different work: a residual lets a token's own content, and its gradient, pass a layer unchanged, where "
            "attention alone would have to carry each token along; a norm bounds sizes whatever the weights are, "
            "which a careful start does in part (the trunk's shrinks, with depth, what is added to a residual)."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [["variant", "start", "layers", "loss (nats per token)", "kept", "learning rate"]]
        rows[0].append("gradient norm before training, first / last layer")
        for variant, start, n in product(numbers["runs"], STARTS, DEPTHS):
            found = numbers["runs"][variant][start][str(n)]
            cells = [f"{found['loss']:.2f}", percent(numbers, variant, start, n), f"{found['rate']:g}"]
            rows.append([variant, start, str(n), *cells, " / ".join(f"{value:.1e}" for value in found["gradients"])])
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        losses, gradients = figure.subplots(2, 2, sharex=True, sharey="row")
        for upper, lower, start in zip(losses, gradients, STARTS, strict=True):
            for (variant, runs), marker in zip(numbers["runs"].items(), "osv^", strict=True):
                found = [runs[start][str(depth)] for depth in DEPTHS]
                first = [run["gradients"][0] or math.nan for run in found]  # a zero has no place on a logarithmic axis
                upper.plot(DEPTHS, [run["loss"] for run in found], marker + "-", label=variant)
                lower.plot(DEPTHS, first, marker + "-")
            upper.axhline(numbers["unigram"], color="gray", ls=":", label="frequencies only")
            upper.set(title=start, xlabel="layers", ylabel="loss after training\n(nats per token)")
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
    block, read = model.decoder.blocks[0], []
    norms = (block.attention_norm, block.feed_forward_norm)
    hooks = [norm.register_forward_hook(lambda *call: read.append(call[-1])) for norm in norms]
    model(tokens)
    for hook in hooks:
        hook.remove()
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
    korean = "언어를 다루는 데 필요한 비선형성은 피드포워드 신경망이 채운다."
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
        bent = numbers["curvature"]
        return (
            f"Full {told(full)}, linear {told(linear)}, none {told(none)} nats per token: the same matrices without "
            f"their activation bring {self._brought(numbers):.0%} of what the feed-forward gains over none. Attention "
            f"alone, three times as deep, ends at {told(deeper)}, {'not ' * (not above(deeper, full))}clearly worse "
            "than full. But attention is not linear either: f(x + y) differs from f(x) + f(y) by "
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
