"""The scores QKᵀ: their shape, their cost and their size."""

from collections.abc import Callable
from itertools import accumulate, product

import torch
from torch import Tensor

from attention import KERNELS, Mask, scaled_dot_product_attention
from config.schema import ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import in_turn, machine, plain_ticks, slope
from model import Block

LENGTHS = [128, 256, 512, 1024, 2048, 4096]
CASES = ("attention, definition", "attention, fused", "block, definition", "block, fused", "block without scores")


class Square(Claim):
    id = "A4"
    english = "One product QKᵀ holds all pairs at once, and so the cost grows with the square of the length."
    korean = "QKᵀ 한 번의 곱에 모든 토큰 쌍이 들어 있고, 그래서 비용이 길이의 제곱으로 늘어난다."
    prediction = (
        "Every entry of one product equals its pair's own dot product; and from 1,024 to 4,096 tokens the time and the "
        "memory of attention (forward and backward, causal, 2 heads of 32) grow with the exponent 2, in the "
        "definition and in a fused kernel."
    )
    rule = (
        "does not hold if an entry differs from its pair's dot product by more than 1e-12 in float64, or if the "
        "definition's time or memory grows with an exponent outside 1.7 to 2.3; then it holds if the fused kernel's "
        "time and memory are in that range too, and holds with a condition if either is not"
    )
    changed = (
        "Lengths ended at 2,048 tokens at first, where the fused kernel's time had the exponent 1.66. The rule is "
        "as it was; with that exponent it said at best *holds with a condition*."
    )

    def measure(self) -> Numbers:
        machine()  # which keeps freed memory, as in training
        torch.manual_seed(0)
        q, k = torch.randn(2, 64, 32, dtype=torch.float64)
        alone = torch.stack([torch.stack([(query * key).sum() for key in k]) for query in q])
        steps = {f"{case} {length}": attending(case, length) for case in CASES for length in LENGTHS}
        costs = {"seconds": in_turn(steps), "bytes": peak_bytes(steps)}
        numbers = {"lengths": LENGTHS, "pairs": alone.numel(), "difference": (q @ k.T - alone).abs().max().item()}
        for name, found in costs.items():
            numbers[name] = {case: [found[f"{case} {length}"] for length in LENGTHS] for case in CASES}
        return numbers

    def verdict(self, numbers: Numbers) -> Verdict:
        if numbers["difference"] > 1e-12 or self.no_square(numbers, "definition"):
            return FAILS
        return CONDITION if self.no_square(numbers, "fused") else HOLDS

    def no_square(self, numbers: Numbers, kernel: str) -> list[str]:
        """Of a kernel's time and memory those that do not grow with the square."""
        found = {"time": "seconds", "memory": "bytes"}
        return [name for name in found if not 1.7 <= exponent(numbers, found[name], f"attention, {kernel}") <= 2.3]

    def takes_over(self, numbers: Numbers, kernel: str) -> str:
        """The length at which attention takes as long as all the rest of the block."""
        lengths, rest = numbers["lengths"], numbers["seconds"]["block without scores"]
        share = [a / b for a, b in zip(numbers["seconds"][f"attention, {kernel}"], rest, strict=True)]
        for i in range(1, len(share)):
            if share[i - 1] < 1 <= share[i]:
                p = slope(lengths[i - 1 : i + 1], share[i - 1 : i + 1])
                return f"at about {lengths[i] * share[i] ** (-1 / p):,.0f}"
        return f"below {lengths[0]}" if share[0] >= 1 else f"above {lengths[-1]:,}"

    def finding(self, numbers: Numbers) -> str:
        told, most = {}, {}
        for kernel in ("definition", "fused"):
            time, memory = (exponent(numbers, what, f"attention, {kernel}") for what in ("seconds", "bytes"))
            told[kernel] = f"{time:.2f} in time and {memory:.2f} in memory"
            most[kernel] = f"{numbers['bytes'][f'attention, {kernel}'][-1] / 1e6:,.0f} MB"
        condition = (
            "The condition: by the definition time and memory both grow with the square, but not the "
            f"{' and the '.join(self.no_square(numbers, 'fused'))} of the fused kernel. "
        )
        power, start = exponent(numbers, "bytes", "attention, fused"), f"{numbers['lengths'][-3]:,}"
        less = power < 2 and "memory" in self.no_square(numbers, "fused")
        held = ", but they need not be held all at once" * less
        fixed = (
            f"Growth below linear cannot last: from {start} tokens on part of the fused kernel's memory does not "
            "depend on the length. "
        ) * (less and power < 0.9)
        return (
            f"{condition * (self.verdict(numbers) == CONDITION)}From {start} tokens on attention's exponents are "
            f"{told['definition']} by the definition, {told['fused']} fused; at {numbers['lengths'][-1]:,} tokens it "
            f"holds {most['definition']} and {most['fused']}: every pair must be computed (one product gave all "
            f"{numbers['pairs']:,}, to within {numbers['difference']:.0e}){held}. {fixed}In a block of width 64 "
            f"attention takes as long as all the rest {self.takes_over(numbers, 'definition')} tokens by the "
            f"definition, {self.takes_over(numbers, 'fused')} fused; in shorter texts the square is not the larger "
            "part of the bill, and the wider the model, the longer these texts may be."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        columns = {"length, tokens": [*(f"{length:,}" for length in numbers["lengths"]), "exponent"]}
        for what, unit, factor in (("seconds", "ms", 1e3), ("bytes", "MB", 1e-6)):
            for case, found in numbers[what].items():
                cells = [f"{factor * y:,.1f}" for y in found]
                columns[f"{case}, {unit}"] = [*cells, f"{exponent(numbers, what, case):.2f}"]
        return [list(columns), *map(list, zip(*columns.values(), strict=True))]

    def draw(self, numbers: Numbers, figure) -> None:
        lengths, (time, memory) = numbers["lengths"], figure.subplots(1, 2)
        for axes, what, factor in ((time, "seconds", 1e3), (memory, "bytes", 1e-6)):
            for case, style in zip(CASES, ("C3o-", "C0^-", "C3o:", "C0^:", "C7s:"), strict=True):
                axes.plot(lengths, [factor * y for y in numbers[what][case]], style, label=case)
            guide = 2 * factor * numbers[what]["attention, definition"][-1]
            for label, power, dash in (("∝ T²", 2, "k--"), ("∝ T", 1, "k-.")):
                line = [guide * (length / lengths[-1]) ** power for length in lengths]
                axes.plot(lengths, line, dash, linewidth=0.8, label=label)
            axes.set(xscale="log", yscale="log", xlabel="length T (tokens)")
            plain_ticks(axes.xaxis, lengths)
            plain_ticks(axes.yaxis, [0.1, 1, 10, 100, 1000])
            axes.grid(alpha=0.3)
        time.set(ylabel="time (ms)", title="Time, forward and backward,\nof attention alone and of a block")
        memory.set(ylabel="memory (MB)", title="Most memory held at once,\nforward and backward")
        figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def exponent(numbers: Numbers, what: str, case: str) -> float:
    """Over the three longest lengths, where starting an operation no longer counts."""
    return slope(numbers["lengths"][-3:], numbers[what][case][-3:])


def attending(case: str, length: int) -> Callable[[], object]:
    """Forward and backward of attention alone or of a whole block, at width 64."""
    what, _, kernel = case.partition(", ")
    attention = KERNELS["reference" if kernel == "definition" else "fused"]
    if what == "attention":
        inputs = [torch.randn(1, 2, length, 32, requires_grad=True) for _ in range(3)]
        return lambda: torch.autograd.grad(attention(*inputs, Mask(length, length)).sum(), inputs)
    block = Block(ModelConfig(vocab_size=1, d_model=64, n_head=2).resolve(), cross=False)
    block.attention.kernel = attention if kernel else lambda q, k, v, mask, scale: v
    x = torch.randn(1, length, 64, requires_grad=True)
    wanted = [x, *block.parameters()]
    return lambda: torch.autograd.grad(block(x, Mask(length, length)).sum(), wanted, allow_unused=True)


def peak_bytes(functions: dict[str, Callable[[], object]]) -> dict[str, int]:
    """The most memory that each function holds at once, of what it takes itself, inside kernels too."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        for name, function in functions.items():
            with torch.profiler.record_function(name):
                function()
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    peaks = {}
    for event in events:
        if event.name() in functions:
            begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
            peaks[event.name()] = max(accumulate(size for time, size in changes if begin <= time <= end))
    return peaks


class Transposed(Claim):
    id = "A7"
    english = "Without transposing K the product of queries and keys is impossible."
    korean = "K를 전치하지 않으면 쿼리와 키의 곱은 아예 계산되지 않는다."
    prediction = "Of 7 lengths T and 7 widths d_k, torch refuses Q (T, d_k) times K (T, d_k) in all 49 pairs."
    rule = (
        "with transposition every product runs; without it, the claim holds if every product is refused; with a "
        "condition if those with T = d_k, and only those, run, and what they give is wrong (the output's relative "
        "error above 0.1); it does not hold otherwise"
    )

    def measure(self) -> Numbers:
        torch.manual_seed(0)
        sizes = [8, 16, 32, 48, 64, 96, 128]
        shapes = [(length, width) for length in sizes for width in sizes]
        plain = [runs(lambda q, k: q @ k, *shape) for shape in shapes]
        turned = [runs(lambda q, k: q @ k.transpose(-2, -1), *shape) for shape in shapes]
        q, k, v = torch.randn(3, 1, 8, 64, 64, dtype=torch.float64)
        mask, later = Mask(64, 64), torch.arange(64) == 63
        kernels = (scaled_dot_product_attention, untransposed)
        right, wrong = (kernel(q, k, v, mask) for kernel in kernels)
        moved = k + later.unsqueeze(-1) * torch.randn_like(k)  # another last key, which only the last query may see
        changes = [(kernel(q, moved, v, mask) - kernel(q, k, v, mask))[..., :-1, :].norm() for kernel in kernels]
        scores = torch.stack([(q @ k.transpose(-2, -1))[0, 0], (q @ k)[0, 0]]).flatten(1)
        return {
            "sizes": sizes,
            "runs without": plain,
            "runs with": turned,
            "error": ((wrong - right).norm() / right.norm()).item(),
            "correlation": torch.corrcoef(scores)[0, 1].item(),
            "leaks": [(change / right.norm()).item() for change in changes],
            "scores": scores[:, ::4].tolist(),
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        ran, equal = numbers["runs without"], [int(a == b) for a in numbers["sizes"] for b in numbers["sizes"]]
        if not all(numbers["runs with"]):
            return FAILS
        if not any(ran):
            return HOLDS
        return CONDITION if ran == equal and numbers["error"] > 0.1 else FAILS

    def finding(self, numbers: Numbers) -> str:
        ran, of = sum(numbers["runs without"]), len(numbers["runs without"])
        right, wrong = numbers["leaks"]
        condition = (
            "The condition: T is not d_k. Where they are equal, say 64 tokens and heads of 64, nothing is "
            "refused, and query i meets, in place of key j, coordinate j of all keys. So the shape does not protect; a "
            "test against the definition does. "
        )
        return (
            f"{condition * (self.verdict(numbers) == CONDITION)}Without transposition {ran} of {of} products ran, with "
            f"it {sum(numbers['runs with'])}. At T = d_k = 64 the scores without it correlate with the right ones by "
            f"{numbers['correlation']:.2f}, attention's output is wrong by {numbers['error']:.0%} of its norm, and "
            "another last key changes what the earlier queries get, which the causal mask forbids, by "
            f"{wrong:.1%} (by the definition {right:.1%}). To be exact, what is needed is the sum over the width: "
            "einsum('td,sd->ts') says so without transposing anything."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        sizes, ran = numbers["sizes"], iter(numbers["runs without"])
        rows = [[f"T = {length}", *("runs" if next(ran) else "refused" for _ in sizes)] for length in sizes]
        return [["Q (T, d_k) times K (T, d_k)", *(f"d_k = {size}" for size in sizes)], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2)
        sizes, (x, y) = numbers["sizes"], numbers["scores"]
        ran = torch.tensor(numbers["runs without"]).view(len(sizes), -1)
        left.imshow(ran.tolist(), cmap="RdYlGn_r", vmin=-1, vmax=1.5, origin="lower", aspect="auto")
        for (i, j), runs in zip(product(range(len(sizes)), repeat=2), numbers["runs without"], strict=True):
            left.text(j, i, "runs" if runs else "refused", ha="center", va="center", fontsize=7)
        left.set_xticks(range(len(sizes)), sizes)
        left.set_yticks(range(len(sizes)), sizes)
        left.set(xlabel="width of a head d_k", ylabel="tokens T")
        left.set_title("Does torch multiply Q (T, d_k)\nwith K (T, d_k) untransposed?")
        right.plot(x, y, ".", alpha=0.5, label="one score (query, key)")
        right.plot([min(x), max(x)], [min(x), max(x)], "k--", label="what is right")
        right.set(xlabel="score in QKᵀ", ylabel="score in QK, at the same place")
        right.set_title("What it gives at T = d_k = 64,\nagainst the right scores")
        right.legend()


def runs(product: Callable[[Tensor, Tensor], Tensor], length: int, width: int) -> int:
    """1 if queries and keys of this shape can be multiplied so, 0 if torch refuses."""
    try:
        product(torch.zeros(2, length, width), torch.zeros(2, length, width))
    except RuntimeError:
        return 0
    return 1


def untransposed(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The definition with its transposition forgotten."""
    return scaled_dot_product_attention(q, k.transpose(-2, -1), v, mask)


class GrowthWithWidth(Claim):
    id = "A8"
    english = "Dot products of queries and keys grow explosively (exponentially) with their width."
    korean = "쿼리와 키의 내적은 벡터의 폭이 커질수록 기하급수적으로 커진다."
    prediction = (
        "With entries of unit variance, the standard deviation of q·k over 20,000 pairs at widths 16 to 1,024 "
        "multiplies by a growing factor at each doubling: its exponent against the width rises. (The mean over 1,000 "
        "queries of the largest probability of 64 keys is shown beside it; A9 takes the median, of 128 keys.)"
    )
    rule = (
        "holds if the fitted exponent is above 1 and rises by more than 0.2 from the narrow to the wide half; holds "
        "with a condition if it is above 1 without rising (a power, not an explosion); does not hold otherwise"
    )

    def measure(self) -> Numbers:
        torch.manual_seed(0)
        widths = [16, 32, 64, 128, 256, 512, 1024]
        deviations = [(torch.randn(20_000, d) * torch.randn(20_000, d)).sum(-1).std().item() for d in widths]
        largest = {"QKᵀ": [], "QKᵀ / √d_k": []}
        for d in widths:
            scores = torch.randn(1000, d) @ torch.randn(64, d).T
            for name, scale in zip(largest, (1, d**-0.5), strict=True):
                largest[name].append((scores * scale).softmax(-1).amax(-1).mean().item())
        return {"widths": widths, "deviations": deviations, "largest": largest}

    def verdict(self, numbers: Numbers) -> Verdict:
        narrow, wide, whole = self._exponents(numbers)
        if whole <= 1:
            return FAILS
        return HOLDS if wide > narrow + 0.2 else CONDITION

    def _exponents(self, numbers: Numbers) -> tuple[float, float, float]:
        x, y, half = numbers["widths"], numbers["deviations"], len(numbers["widths"]) // 2 + 1
        return slope(x[:half], y[:half]), slope(x[-half:], y[-half:]), slope(x, y)

    def finding(self, numbers: Numbers) -> str:
        first, last = ({name: found[i] for name, found in numbers["largest"].items()} for i in (0, -1))
        meaning = {
            HOLDS: "The exponent itself rises: an explosion.",
            CONDITION: "The condition: 'explosively' means a power, faster than the width, and no exponential.",
            FAILS: "No explosion: scores grow at most in step with the width (in theory with √d_k, if the entries are "
            "independent, which is why √d_k, and not d_k, divides them).",
        }[self.verdict(numbers)]
        return (
            f"{meaning} The standard deviation grows with the power {self._exponents(numbers)[-1]:.3f} of the width, "
            f"from {numbers['deviations'][0]:.1f} to {numbers['deviations'][-1]:.1f}. The mean largest probability of "
            f"64 keys goes from {first['QKᵀ']:.2f} to {last['QKᵀ']:.2f}, and that of the scaled scores from "
            f"{first['QKᵀ / √d_k']:.2f} to {last['QKᵀ / √d_k']:.2f}: what the softmax makes of such scores is another "
            "question, and A9's."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = zip(numbers["widths"], numbers["deviations"], *numbers["largest"].values(), strict=True)
        heading = ["d_k", "standard deviation of q·k", "√d_k"]
        heading += [f"mean largest probability of 64 keys, {name}" for name in numbers["largest"]]
        return [heading, *([f"{d:,}", f"{s:.2f}", f"{d**0.5:.2f}", f"{p:.3f}", f"{r:.3f}"] for d, s, p, r in rows)]

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2)
        widths = numbers["widths"]
        left.plot(widths, numbers["deviations"], "o", label="measured")
        left.plot(widths, [d**0.5 for d in widths], label="√d_k")
        left.plot(widths, [4 * d / 16 for d in widths], ":", label="∝ d_k")
        left.plot(widths, [4 * 2 ** ((d - 16) / 16) for d in widths], "--", label="∝ 2^(d_k / 16), exponential")
        left.set(xscale="log", yscale="log", ylabel="standard deviation of q·k", ylim=(0.4, 1000))
        left.set_title("How scores of random\nqueries and keys grow")
        plain_ticks(left.yaxis, [1, 4, 16, 64, 256])
        for (name, found), style in zip(numbers["largest"].items(), ("C3o-", "C0^-"), strict=True):
            right.plot(widths, found, style, label=f"softmax of {name}")
        right.set(xscale="log", ylim=(0, 1), ylabel="mean largest probability of 64 keys")
        right.set_title("What the softmax makes of them")
        for axes, place in ((left, "lower right"), (right, "center right")):
            axes.set_xlabel("width d_k")
            plain_ticks(axes.xaxis, widths[::2])
            axes.legend(loc=place)


CLAIMS = [Square(), Transposed(), GrowthWithWidth()]
