"""Words and positions in one vector."""

import math
from statistics import mean, median

import torch
from torch import Tensor, nn

from attention import sinusoidal_encoding
from config.schema import Config
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, plain_ticks, small, spread, stories, told, trained, validate
from experiments.roles import CONTEXT


def positioned(position: str, seed: int, **model) -> Config:
    """The small model of all claims about positions: many small steps, after which it uses them."""
    shape = {"n_layer": 2, "d_model": 64, "max_seq_len": CONTEXT, "position": position} | model
    config = small(800, seed, **shape)
    return config.model_copy(update={"train": config.train.model_copy(update={"batch_size": 16})})


def loss_of(model: nn.Module) -> float:
    return validate(model, CONTEXT)["loss"]


def means(found: dict[str, list[float]]) -> dict[str, float]:
    """Of each variant the mean of its seeds."""
    return {name: mean(values) for name, values in found.items()}


def widest(losses: dict[str, list[float]]) -> float:
    """The largest distance between seeds of the same variant."""
    return max(map(spread, losses.values()))


def draw_losses(axes, losses: dict[str, list[float]], title: str) -> None:
    """A dot for each seed, a bar at the mean."""
    for place, found in enumerate(losses.values()):
        axes.plot([place] * len(found), found, "o", color="C0", alpha=0.6, label=None if place else "one seed")
        axes.plot(place, mean(found), "_", color="C1", markersize=24, label=None if place else "mean of the seeds")
    axes.set_xticks(range(len(losses)), [name.replace(" ", "\n") for name in losses], fontsize="small")
    axes.set(xlabel="model", ylabel="validation loss (nats per token)", title=title, xlim=(-0.5, len(losses) - 0.5))
    axes.margins(y=0.25)
    axes.legend(loc="upper right", fontsize="small", handlelength=3)


def validation_rows(length: int, n_row: int = 2000) -> Tensor:
    """The first tokens of the validation text as rows (n_row, length)."""
    return torch.from_numpy(stories().val.tokens[: n_row * length].astype("int64")).view(-1, length)


class Separable(Claim):
    id = "P3"
    english = "In a space as wide as 512, word and position stay separable after they are added."
    korean = "512차원처럼 넓은 공간에서는 단어와 위치를 더해도 둘을 다시 구분해 낼 수 있다."
    prediction = (
        "Of 1,000 words (unit variance, as Byeol's start) plus one of 100 positions, linear probes (discriminants), "
        "fitted on 30,000 combinations, recover word and position of 10,000 that they have not seen: at width 512, but "
        "not at width 8."
    )
    rule = (
        "holds if at width 512 both probes are right at least 95 % of the time and at width 8 one of them is not; "
        "holds with a condition if both are at either width (width is not the reason) or only one is at 512; else "
        "does not hold"
    )

    def measure(self) -> Numbers:
        torch.manual_seed(0)
        widths = [8, 16, 32, 64, 128, 256, 512]
        found = [separate(torch.randn(1000, d), sinusoidal_encoding(torch.arange(100), d)) for d in widths]
        models = [trained(positioned("sinusoidal", seed)) for seed in SEEDS]
        words = [model.decoder.embed.weight.detach().float().cpu() * math.sqrt(64) for model in models]
        after = [separate(word, sinusoidal_encoding(torch.arange(CONTEXT), 64)) for word in words]
        shares = {name: [right[name] for right in found] for name in found[0]}
        return {"widths": widths, **shares, "trained": {name: mean(right[name] for right in after) for name in shares}}

    def verdict(self, numbers: Numbers) -> Verdict:
        at_8, at_512 = ([numbers[name][place] >= 0.95 for name in ("word", "position")] for place in (0, -1))
        if all(at_512) and not all(at_8):
            return HOLDS
        return CONDITION if any(at_512) else FAILS

    def finding(self, numbers: Numbers) -> str:
        word, position, learned = (numbers[key] for key in ("word", "position", "trained"))
        lead = ""
        if self.verdict(numbers) == CONDITION:
            found = [name for name in ("word", "position") if numbers[name][-1] >= 0.95]
            condition = "width is not the reason, as 8 is enough" if len(found) == 2 else f"the {found[0]} alone"
            lead = f"The condition: {condition}. "
        return (
            f"{lead}At width 512 the probes find the word in {word[-1]:.1%} and the position in {position[-1]:.1%} of "
            f"unseen combinations; at width 8 in {word[0]:.1%} and {position[0]:.1%} (chance: 0.1 % and 1 %). With the "
            f"words that a model of width 64 has learned (1,024, in 64 positions): {learned['word']:.1%} and "
            f"{learned['position']:.1%}. What width changes: a code's norm, √(width / 2), grows, while a random word's "
            "part along any one direction stays near 1."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        widths = [*map(str, numbers["widths"]), "64, trained"]
        shares = ([*numbers[name], numbers["trained"][name]] for name in ("word", "position"))
        rows = [
            [width, f"{word:.1%}", f"{position:.1%}"] for width, word, position in zip(widths, *shares, strict=True)
        ]
        return [["width", "word found", "position found"], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        axes = figure.subplots()
        for color, (name, chance) in enumerate([("word", 0.1), ("position", 1)]):
            shares = [100 * share for share in numbers[name]]
            axes.plot(numbers["widths"], shares, "o-", color=f"C{color}", label=f"{name} (chance: {chance:g} %)")
            axes.plot(64, 100 * numbers["trained"][name], "*", color=f"C{color}", markersize=15)
        axes.plot([], [], "k*", markersize=12, label="with words learned by a model 64 wide")
        axes.axhline(95, color="black", linestyle=":", label="95 %")
        axes.set(xscale="log", xlabel="width of the space", ylabel="found by a linear probe (% of unseen pairs)")
        axes.set_title("Word and position, told apart after they were added")
        plain_ticks(axes.xaxis, numbers["widths"])
        axes.legend()


def separate(words: Tensor, codes: Tensor) -> dict[str, float]:
    """Shares of unseen sums word + code in which linear discriminants, fitted on other sums, find the two again."""
    draw = torch.randperm(len(words) * len(codes), generator=torch.Generator().manual_seed(0))[:40_000]
    labels = {"word": draw // len(codes), "position": draw % len(codes)}
    sums = words[labels["word"]] + codes[labels["position"]]
    found = {}
    for name, label in labels.items():
        weight, bias = discriminant(sums[:30_000], label[:30_000], len(words) if name == "word" else len(codes))
        found[name] = ((sums[30_000:] @ weight + bias).argmax(-1) == label[30_000:]).float().mean().item()
    return found


def discriminant(x: Tensor, label: Tensor, n_label: int) -> tuple[Tensor, Tensor]:
    """The linear probe x @ weight + bias of classes that share a covariance, in closed form (Fisher, 1936)."""
    x = x.double()
    counts = torch.bincount(label, minlength=n_label).clamp(min=1).unsqueeze(1)
    means = torch.zeros(n_label, x.shape[1], dtype=x.dtype).index_add_(0, label, x) / counts
    within = x - means[label]
    covariance = within.T @ within / len(x)
    covariance += 1e-4 * x.var(0).mean() * torch.eye(x.shape[1], dtype=x.dtype)
    weight = torch.linalg.solve(covariance, means.T)
    return weight.float(), (-(means * weight.T).sum(-1) / 2).float()


class FaintColour(Claim):
    id = "P4"
    english = "The position is a faint colour on the word: much smaller than what it is added to."
    korean = "위치 정보는 단어 위에 옅게 칠한 색과 같아서, 더해지는 단어보다 훨씬 작다."
    prediction = (
        "The norm of the position's code is at most 0.316 of the word's (a tenth of its power), at the start and after "
        "training, whether words are multiplied by √d_model (as in 2017) or not: the median over words, after training "
        "over the tokens of the validation text."
    )
    rule = (
        "holds if at width 64 the ratio, mean of the seeds, is at most 0.316 in all four cases (start and end, with "
        "√d_model and without); holds with a condition if in some; does not hold if in none"
    )

    def measure(self) -> Numbers:
        torch.manual_seed(0)
        widths, kinds = [16, 32, 64, 128, 256, 512], {"with √d_model": None, "without": unscaled}
        tokens = validation_rows(1, 20_000)[:, 0]
        start, ends, losses = {}, {}, {}
        for name, change in kinds.items():
            start[name] = [self._ratio(torch.randn(1000, d) * d**-0.5, not change) for d in widths]
        for name, change in kinds.items():
            models = [trained(positioned("sinusoidal", seed), change) for seed in SEEDS]
            words = [model.decoder.embed.weight.detach().cpu()[tokens] for model in models]
            ends[name] = [self._ratio(word, not change) for word in words]
            losses[name] = [loss_of(model) for model in models]
        return {"widths": widths, "start": start, "trained": ends, "losses": losses}

    def _ratio(self, words: Tensor, scaled: bool) -> float:
        """|p| / |x|: the code of every position has the norm √(d/2)."""
        width = words.shape[-1]
        return median((math.sqrt(width / 2) / (words.norm(dim=-1) * (math.sqrt(width) if scaled else 1))).tolist())

    def verdict(self, numbers: Numbers) -> Verdict:
        faint = [ratio <= 0.316 for ratio in self._cases(numbers).values()]
        return HOLDS if all(faint) else CONDITION if any(faint) else FAILS

    def _cases(self, numbers: Numbers) -> dict[str, float]:
        place = numbers["widths"].index(64)
        start = {f"start, {name}": ratios[place] for name, ratios in numbers["start"].items()}
        return start | {f"trained, {name}": mean(ratios) for name, ratios in numbers["trained"].items()}

    def finding(self, numbers: Numbers) -> str:
        cases, losses = self._cases(numbers), means(numbers["losses"])
        wide = {name: ratios[-1] for name, ratios in numbers["start"].items()}
        faint = [name for name, ratio in cases.items() if ratio <= 0.316]
        lead = f"The condition: these cases alone: {'; '.join(faint)}. " if self.verdict(numbers) == CONDITION else ""
        return (
            f"{lead}|p| / |x| at width 64: {', '.join(f'{name}: {ratio:.2f}' for name, ratio in cases.items())}. At "
            f"width {numbers['widths'][-1]} it starts at {wide['with √d_model']:.2f} with √d_model and "
            f"{wide['without']:.1f} without. Sines fix |p| = √(d/2), so the size of the word decides: chosen at the "
            f"start, then learned. The loss is {losses['with √d_model']:.3f} with √d_model, {losses['without']:.3f} "
            f"without (spread between seeds {widest(numbers['losses']):.3f})."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        starts = zip(numbers["widths"], *numbers["start"].values(), strict=True)
        rows = [[f"start, width {width}", f"{one:.3f}", f"{other:.3f}"] for width, one, other in starts]
        rows.append(["trained, width 64", *map(told, numbers["trained"].values())])
        rows.append(["loss (nats), width 64", *map(told, numbers["losses"].values())])
        return [["|p| / |x|", *numbers["start"]], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        axes = figure.subplots()
        for color, (name, ratios) in enumerate(numbers["start"].items()):
            ends = numbers["trained"][name]
            axes.plot(numbers["widths"], ratios, "o-", color=f"C{color}", label=f"at the start, words {name}")
            axes.plot([64] * len(ends), ends, "*", color=f"C{color}", markersize=13, label=f"trained, words {name}")
        axes.axhspan(0.01, 0.316, color="0.9", label="faint: a tenth of the power, or less")
        axes.set(xscale="log", yscale="log", xlabel="width d_model", ylabel="norm of the position / norm of the word")
        axes.set(ylim=(0.05, 30), title="How strong is the position, beside the word?")
        plain_ticks(axes.xaxis, numbers["widths"])
        plain_ticks(axes.yaxis, [0.1, 0.316, 1, 3, 10])
        axes.legend(loc="upper left", fontsize="small")


def unscaled(model: nn.Module) -> None:
    """Undoes Byeol's multiplication of words by √d_model, which comes with sinusoidal positions."""
    model.decoder.embed.register_forward_hook(lambda module, _, words: words / math.sqrt(module.embedding_dim))


CLAIMS = [Separable(), FaintColour()]
