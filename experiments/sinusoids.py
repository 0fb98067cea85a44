"""Sinusoidal codes: are they unique, and do they tell distance?"""

import math
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from attention import rotary_turns, sinusoidal_encoding
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, above, fresh_model, plain_ticks, trained
from experiments.positions import CONTEXT, means, positioned, validation_rows


def frequencies(width: int) -> Tensor:
    """Radians per position of each pair of coordinates, in float64."""
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def exact_codes(pos: Tensor, width: int) -> Tensor:
    """PE (…, width) in float64, not by Byeol's own code."""
    angles = pos.double().unsqueeze(-1) * frequencies(width)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class Unique(Claim):
    id = "P5"
    english = "Every position has a sinusoidal code of its own, like the hands of a clock at every moment."
    korean = "모든 위치는 서로 다른 사인·코사인 코드를 갖는다. 시곗바늘의 조합이 순간마다 다른 것과 같다."
    prediction = (
        "No two of 100,000 positions have codes closer than 100 × float32 rounding (2⁻²³ of their norm √(d/2)), at "
        "widths 2 to 512. All pairs are covered: |PE(p) − PE(p + k)|² = Σ 4 sin²(ωk/2) depends on k alone. It is "
        "computed in float64; Byeol's float32 codes at every k that their rounding could bring closest."
    )
    rule = (
        "holds if the smallest distance, exact and in float32, is above 100 × rounding at every width; holds with a "
        "condition if it is at width 512 but not at every narrower one; else does not hold"
    )

    def measure(self) -> Numbers:
        widths = [2**i for i in range(1, 10)]
        keys = ("exact", "apart", "float32", "float32_apart", "typical", "rounding")
        found = zip(*map(closest, widths), strict=True)
        return {"widths": widths} | dict(zip(keys, map(list, found), strict=True))

    def verdict(self, numbers: Numbers) -> Verdict:
        rows = zip(numbers["exact"], numbers["float32"], numbers["rounding"], strict=True)
        apart = [min(exact, float32) > 100 * rounding for exact, float32, rounding in rows]
        return HOLDS if all(apart) else CONDITION if apart[-1] else FAILS

    def finding(self, numbers: Numbers) -> str:
        exact, apart, typical = (numbers[key] for key in ("exact", "apart", "typical"))
        margin = min(a / b for a, b in zip(numbers["float32"], numbers["rounding"], strict=True))
        roundings = zip(numbers["widths"], exact, numbers["float32"], numbers["rounding"], strict=True)
        close = [str(width) for width, *found, rounding in roundings if min(found) <= 100 * rounding]
        lead = f"The condition: any width but {' and '.join(close)}. " if self.verdict(numbers) == CONDITION else ""
        return (
            f"{lead}At width 2 the two closest codes (k = {apart[0]:,}) are {exact[0]:.1e} from each other, two "
            f"typical ones {typical[0]:.1f}; at width 512 the closest (k = {apart[-1]:,}) {exact[-1]:.2g}, typical "
            f"ones {typical[-1]:.1f}. In Byeol's float32 the smallest distance at any width is {margin:,.0f} "
            "roundings. Exact codes differ at every width: the first pair of coordinates turns by one radian a "
            "position, and no whole number of radians is a whole number of turns."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        heading = ["width", "smallest, exact", "at k, exact", "smallest, float32", "at k, float32"]
        heading += ["typical", "100 roundings"]
        rows = [
            [str(width), f"{exact:.3g}", f"{k:,}", f"{float32:.3g}", f"{k32:,}", f"{typical:.2f}", f"{100 * step:.1e}"]
            for width, exact, k, float32, k32, typical, step in zip(*numbers.values(), strict=True)
        ]
        return [heading, *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        axes, widths = figure.subplots(), numbers["widths"]
        axes.plot(widths, numbers["typical"], "s--", color="0.6", label="typical distance (median over k)")
        axes.plot(widths, numbers["exact"], "o-", label="smallest distance, exact")
        axes.plot(widths, numbers["float32"], "x:", markersize=9, label="smallest distance, Byeol's float32")
        axes.plot(widths, [100 * r for r in numbers["rounding"]], "k:", label="100 × float32 rounding")
        axes.set(xscale="log", yscale="log", xlabel="width d_model", ylabel="distance between two codes")
        axes.set_title("How close the closest two of 100,000 positions come")
        plain_ticks(axes.xaxis, widths)
        axes.legend()


def closest(width: int, n: int = 100_000) -> tuple[float, int, float, int, float, float]:
    """Of the codes of positions 0 to n - 1: their smallest distance and the k at which it is, exactly and as Byeol
    has them, the median over k, and the rounding of a code in float32."""
    k = torch.arange(1, n)
    exact = sum(4 * (frequency * k / 2).sin().square() for frequency in frequencies(width)).sqrt()
    codes = sinusoidal_encoding(torch.arange(n), width)
    off = max(
        (part.double() - exact_codes(torch.arange(start, start + len(part)), width)).norm(dim=-1).max().item()
        for start, part in zip(range(0, n, 10_000), codes.split(10_000), strict=True)
    )
    smallest, at = math.inf, 0
    for place in exact.argsort().tolist():
        if exact[place] - 2 * off >= smallest:  # rounding cannot bring this k, nor those after it, any closer
            break
        found = (codes[place + 1 :] - codes[: -place - 1]).norm(dim=-1).min().item()
        smallest, at = min((smallest, at), (found, place + 1))
    rounding = 2**-23 * math.sqrt(width / 2)
    return exact.min().item(), int(k[exact.argmin()]), smallest, at, exact.median().item(), rounding


class LinearShift(Claim):
    id = "P6"
    english = "The code of pos + k is a linear map of the code of pos."
    korean = "pos + k 위치의 코드는 pos 위치의 코드를 선형 변환한 것이다."
    prediction = (
        "One matrix for each k, built of rotations by ωk, takes PE(pos) to PE(pos + k) at every position: to 1e-9 in "
        "float64 (an angle of 200,000 radians is rounded to 3e-11), and Byeol's float32 codes within the rounding "
        "of their angles. Random codes have no such matrix: the best one, by least squares, fails on new positions."
    )
    rule = (
        "does not hold if the error in float64 is above 1e-9 anywhere; holds if besides float32 stays within 2⁻²² of "
        "(pos + k + 1) everywhere and the best map of random codes leaves more than half of their variance; else holds "
        "with a condition"
    )
    changed = "The error is told by position, on which it depends, instead of by shift. The rule is as it was."

    def measure(self) -> Numbers:
        ends, numbers = [10**i for i in range(1, 6)], {"float64": [], "float32": [], "of_rounding": []}
        for end in ends:
            pos = torch.randint(end, (300,), generator=torch.Generator().manual_seed(0))
            errors = [
                shift_errors(pos, k, width) for k in (1, 2, 7, 10**3, 10**5) if k <= end for width in (2, 64, 512)
            ]
            for name, found in zip(numbers, zip(*errors, strict=True), strict=True):
                numbers[name].append(max(found))
        torch.manual_seed(0)
        codes = {"sinusoidal": exact_codes(torch.arange(4096), 64), "random": torch.randn(4096, 64).double()}
        return {"ends": ends, **numbers, "left": {name: unexplained(table, 10) for name, table in codes.items()}}

    def verdict(self, numbers: Numbers) -> Verdict:
        if max(numbers["float64"]) > 1e-9:
            return FAILS
        return HOLDS if max(numbers["of_rounding"]) <= 1 and numbers["left"]["random"] > 0.5 else CONDITION

    def finding(self, numbers: Numbers) -> str:
        left, lead = numbers["left"], ""
        if self.verdict(numbers) == CONDITION:
            rounded = max(numbers["of_rounding"]) > 1
            little = "it says little, as a matrix fits at least half of random codes too"
            lead = f"The condition: {'float64' if rounded else little}. "
        return (
            f"{lead}Over positions and k up to {numbers['ends'][-1]:,} and widths 2, 64 and 512, one matrix for each k "
            f"and width errs by {max(numbers['float64']):.0e} at most in float64. Byeol's float32 codes follow it to "
            f"{max(numbers['float32']):.1e}, at most {max(numbers['of_rounding']):.2f} of what the rounding of such "
            "angles allows. A matrix fitted to every second of 4,096 positions (k = 10) leaves "
            f"{left['sinusoidal']:.0e} of the variance of the others for sinusoids, {left['random']:.2f} for random "
            "codes. The matrix turns each pair of coordinates, as RoPE turns queries and keys themselves."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = zip(*(numbers[key] for key in ("ends", "float64", "float32", "of_rounding")), strict=True)
        rows = [[f"{end:,}", f"{exact:.1e}", f"{single:.1e}", f"{share:.2f}"] for end, exact, single, share in rows]
        return [["pos and k up to", "largest error, float64", "float32", "as a part of what rounding allows"], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        axes, ends = figure.subplots(), numbers["ends"]
        left = math.sqrt(numbers["left"]["random"])
        axes.axhline(left, color="C3", linestyle="--", label="random codes, best matrix for k = 10 (rms)")
        axes.plot(ends, numbers["float32"], "s-", color="C1", label="Byeol's codes, float32 (largest)")
        axes.axhline(1e-9, color="black", linestyle=":", label="1e-9")
        axes.plot(ends, numbers["float64"], "o-", color="C0", label="exact codes, float64 (largest)")
        axes.set(xscale="log", yscale="log", xlabel="pos and k up to (positions)", ylabel="error of M_k PE(pos)")
        axes.set_title("How far one rotation M_k, the same for all pos, misses PE(pos + k)")
        plain_ticks(axes.xaxis, ends)
        axes.legend(loc="center right", framealpha=1)


def shift(k: int, width: int) -> Tensor:
    """The matrix M with M PE(pos) = PE(pos + k): in each pair (sin, cos) a rotation by ωk."""
    cos, sin = (frequencies(width) * k).cos(), (frequencies(width) * k).sin()
    return torch.block_diag(*torch.stack((cos, sin, -sin, cos), dim=-1).view(-1, 2, 2))


def shift_errors(pos: Tensor, k: int, width: int) -> tuple[float, float, float]:
    """The largest error of M PE(pos): with exact codes, with Byeol's, and the latter in units of their rounding."""
    matrix = shift(k, width)
    exact = (exact_codes(pos, width) @ matrix.T - exact_codes(pos + k, width)).abs().max()
    before, after = (sinusoidal_encoding(place, width).double() for place in (pos, pos + k))
    ours = (before @ matrix.T - after).abs().amax(-1)
    return exact.item(), ours.max().item(), (ours / (2**-22 * (pos + k + 1))).max().item()


def unexplained(codes: Tensor, k: int) -> float:
    """The share of variance that the best matrix from codes to those k further leaves where it was not fitted."""
    before, after = codes[:-k], codes[k:]
    matrix = torch.linalg.lstsq(before[::2], after[::2], driver="gelsd").solution
    left = after[1::2] - before[1::2] @ matrix
    return (left.square().sum() / (after[1::2] - after[1::2].mean(0)).square().sum()).item()


class DistanceInScores(Claim):
    id = "P7"
    english = "From the dot products QKᵀ the model reads how far apart two tokens are."
    korean = "모델은 QKᵀ 내적에서 두 토큰이 얼마나 떨어져 있는지를 읽어 낸다."
    prediction = (
        "PE(p)·PE(p + k) depends on k alone. In the first layer of trained models k explains most of the variance of "
        "the scores' position part, more than through random W_Q and W_K. Counted is what softmax sees: each query's "
        "mean over its keys is taken off. Three seeds, mean of 4 heads; learned positions and rotary ones (one word at "
        "all places) for contrast."
    )
    rule = (
        "does not hold if k explains less than 99.9 % of PE(p)·PE(p′), or no more of the trained position part than of "
        "the random one, beyond the spread between seeds; holds if it explains at least half of the trained one; else "
        "holds with a condition"
    )

    def measure(self) -> Numbers:
        codes, tokens = exact_codes(torch.arange(CONTEXT), 64), validation_rows(CONTEXT, 32)
        products, shares, best = codes @ codes.T, {}, {}
        for position in ("sinusoidal", "learned", "rope"):
            for when, make in (("random", fresh_model), ("trained", trained)):
                models = [make(positioned(position, seed)).cpu() for seed in SEEDS]
                heads, name = [explained(position_part(model)).tolist() for model in models], f"{position}, {when}"
                shares[name], best[name] = list(map(mean, heads)), mean(map(max, heads))
            shares[f"{position}, words too"] = [explained(text_scores(model, tokens)).mean().item() for model in models]
        return {
            "law": explained(products).item(),
            "uneven": ((products - products.T).abs().max() / products.max()).item(),
            "products": {str(pos): products[pos].tolist() for pos in (8, 24, 40, 56)},
            "shares": shares,
            "best_head": best,
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        shares = numbers["shares"]
        random, learned = (shares[f"sinusoidal, {when}"] for when in ("random", "trained"))
        if numbers["law"] < 0.999 or not above(learned, random):
            return FAILS
        return HOLDS if mean(learned) >= 0.5 else CONDITION

    def finding(self, numbers: Numbers) -> str:
        share = {name.replace("rope", "rotary"): f"{each:.0%}" for name, each in means(numbers["shares"]).items()}
        each = "; ".join(
            f"{position} {share[f'{position}, random']}, {share[f'{position}, trained']}, "
            f"{share[f'{position}, words too']}"
            for position in ("sinusoidal", "learned", "rotary")
        )
        lead = "The condition: in part. k explains less than half of what trained sinusoidal positions contribute. "
        return (
            f"{lead if self.verdict(numbers) == CONDITION else ''}k explains {numbers['law']:.1%} of PE(p)·PE(p′), "
            f"products that tell how far, not whether left or right (even in k, to {numbers['uneven']:.0e} of their "
            "size). Of the scores' position part through random matrices, of that through trained ones, and of whole "
            f"scores in text k explains: {each}. Learned codes start without distance in them, so what they reach was "
            "trained. Sinusoidal ones hold it, but W_Q and W_K between them are free to read places instead; rotary "
            "positions leave them no such choice."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [["PE(p)·PE(p′), no matrices", f"{numbers['law']:.1%}", "", ""]]
        for name, found in numbers["shares"].items():
            each, best = ", ".join(f"{share:.1%}" for share in found), numbers["best_head"].get(name)
            rows.append([name.replace("rope", "rotary"), f"{mean(found):.1%}", each, f"{best:.1%}" if best else ""])
        return [["scores", "explained by k", "three seeds", "best head"], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2)
        for place, (pos, products) in enumerate(numbers["products"].items()):  # upon each other, so ever thinner
            distances, width = [key - int(pos) for key in range(len(products))], 10 - 2.7 * place
            left.plot(distances, products, linewidth=width, label=f"p = {pos}")
        left.set(xlabel="k (positions; negative: to the left)", ylabel="PE(p) · PE(p + k), width 64")
        left.set_title("Codes alone: the product\nby the distance, for four p")
        left.legend()
        colors = {"random": "0.6", "trained": "C0", "words too": "C1"}
        for name, found in numbers["shares"].items():
            label, color = name.replace("rope", "rotary").replace(", ", ",\n"), colors[name.split(", ")[1]]
            right.barh(label, 100 * mean(found), color=color)
            right.plot([100 * share for share in found], [label] * len(found), "k.")
        right.plot([], [], "k.", label="one seed")
        right.invert_yaxis()
        right.set(xlabel="explained by the distance k (% of variance)", ylabel="scores of layer 1", xlim=(0, 105))
        right.set_title("Through W_Q and W_K")
        right.legend(loc="lower right", fontsize="small")


def explained(scores: Tensor) -> Tensor:
    """Of scores (…, T, T) the share of their variance that a function of k = query - key explains, over the keys that a
    causal query sees. Each query's mean over them is taken off first, as softmax does not see it."""
    query, key = torch.tril_indices(scores.shape[-1], scores.shape[-1])
    rows = one_hot(query).double()
    centre = torch.eye(len(query), dtype=torch.float64) - rows / rows.sum(0) @ rows.T
    by_distance = centre @ one_hot(query - key).double()
    seen = scores.double()[..., query, key] @ centre
    fitted = seen @ by_distance @ torch.linalg.pinv(by_distance.T @ by_distance) @ by_distance.T
    return fitted.square().sum(-1) / seen.square().sum(-1)


@torch.no_grad()
def position_part(model: nn.Module) -> Tensor:
    """What positions contribute to the scores of the first layer, (H, T, T): codes through the gain of the norm, W_Q
    and W_K; rotary positions turn the query and the key of one token."""
    stack, pos = model.decoder, torch.arange(CONTEXT)
    match model.config.position:
        case "rope":
            x = stack.embed(torch.zeros(CONTEXT, dtype=torch.long))
        case "sinusoidal":
            x = sinusoidal_encoding(pos, 64)
        case _:
            x = stack.position(pos)
    return scores_of(stack, x.unsqueeze(0) * stack.blocks[0].attention_norm.weight)[0]


@torch.no_grad()
def text_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """The whole scores of the first layer (B, H, T, T) on tokens (B, T), before they are scaled."""
    stack, pos = model.decoder, torch.arange(tokens.shape[1])
    return scores_of(stack, stack.blocks[0].attention_norm(stack.embedding(tokens, pos, len(pos))))


def scores_of(stack: nn.Module, x: Tensor) -> Tensor:
    """QKᵀ of the first layer, (B, H, T, T), of what enters its attention, (B, T, C)."""
    angles = stack.angles(torch.arange(x.shape[1]))
    q, k, _ = stack.blocks[0].attention.queries_keys_values(x, None if angles is None else rotary_turns(angles))
    return q @ k.transpose(-2, -1)


CLAIMS = [Unique(), LinearShift(), DistanceInScores()]
