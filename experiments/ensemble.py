"""Do many heads stand in for each other?"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean

from torch import Tensor, nn

from data.loader import Batches
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.heads import COUNTS, by_heads, draw_by_heads, nats
from experiments.lab import SEEDS, above, fit, fresh_model, stories, told, trained
from experiments.positions import CONTEXT
from model import MultiHeadAttention


@contextmanager
def failing(attention: MultiHeadAttention, heads: Sequence[int], how: str) -> Iterator[None]:
    """Within, `o_proj` reads of these heads zeros ("silent"), or what they found in another text ("misled")."""

    def change(_, inputs: tuple[Tensor]) -> Tensor:
        parts = inputs[0].unflatten(-1, (attention.n_head, -1)).clone()  # (B, T, H, D)
        parts[:, :, heads] = parts[:, :, heads].roll(1, dims=0) if how == "misled" else 0
        return parts.flatten(2)

    handle = attention.o_proj.register_forward_pre_hook(change)
    try:
        yield
    finally:
        handle.remove()


def damages(model: nn.Module, tokens, how: str) -> dict[str, list]:
    """How many nats each head of each layer is worth, and all heads of each layer together."""
    intact, found = nats(model, tokens), {"heads": [], "layers": []}
    for block in model.decoder.blocks:
        worth, every = [], list(range(block.attention.n_head))
        for chosen in [*([head] for head in every), every]:
            with failing(block.attention, chosen, how):
                worth.append(nats(model, tokens) - intact)
        found["heads"].append(worth[:-1])
        found["layers"].append(worth[-1])
    return found


class HeadsForgive(Claim):
    id = "M3"
    english = "Heads act like an ensemble: when one looks at the wrong place, the others cancel the noise."
    korean = "여러 헤드는 앙상블처럼 작동해서 한 헤드가 엉뚱한 곳을 보아도 나머지가 그 잡음을 상쇄한다."
    prediction = (
        "Language models of 1, 2, 4 and 8 heads at equal width, three seeds; one head at a time falls silent "
        "(ablated: its columns of o_proj see zeros) or is misled (they see what it found in another text). The loss "
        "rises by less than that head's equal part of what all heads of its layer are worth, whichever head it is."
    )
    rule = (
        "share = rise of the loss with one of 8 heads failing / with all 8 of its layer failing alike; an equal part "
        "is 1/8. Holds if in both modes the largest share of any head stays below 1/8 in every seed; holds with a "
        "condition if the average share does so, in both modes; does not hold otherwise"
    )
    changed = (
        "The average was a ratio of means at first, over layers and seeds, not the mean of each layer's ratios; the "
        "verdict was the same."
    )

    def measure(self) -> Numbers:
        found = {how: {str(n): [] for n in COUNTS} for how in ("silent", "misled")}
        for n_head in COUNTS:
            models = [trained(by_heads(n_head, seed)) for seed in SEEDS]
            for how in found:
                found[how][str(n_head)] = [damages(model, stories().val.tokens[:12_000], how) for model in models]
        return {"damages": found}

    def verdict(self, numbers: Numbers) -> Verdict:
        shares = [self._shares(of["8"]) for of in numbers["damages"].values()]
        if all(max(worst) < 1 / 8 for _, worst in shares):
            return HOLDS
        return CONDITION if all(max(average) < 1 / 8 for average, _ in shares) else FAILS

    def _shares(self, seeds: list[dict]) -> tuple[list[float], list[float]]:
        """The average share of a head, and the largest, of each seed."""
        layers = (zip(of["heads"], of["layers"], strict=True) for of in seeds)
        shares = [[head / every for heads, every in of for head in heads] for of in layers]
        return list(map(mean, shares)), list(map(max, shares))

    def _worst_nats(self, seeds: list[dict]) -> list[float]:
        return [max(map(max, of["heads"])) for of in seeds]

    def finding(self, numbers: Numbers) -> str:
        said = []
        for how, of in numbers["damages"].items():
            average, worst = self._shares(of["8"])
            said.append(f"{mean(average):.1%} on average and {max(worst):.1%} at worst when {how}")
        meaning = {
            HOLDS: "Even the worst head costs less than an equal part in every model: the others cover for it.",
            CONDITION: "The condition: it is the average head. That one costs less than an equal part in every model, "
            "the worst one not, and so it matters which head fails.",
            FAILS: "Not even the average head costs less than an equal part in every model: heads divide the work.",
        }[self.verdict(numbers)]
        return (
            f"{meaning} Of what its layer is worth one of 8 heads costs {', '.join(said)}; an equal part is 12.5 %. "
            "That one of many costs fewer nats than the only one would show no ensemble yet: each of many does less."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [["failing head is", "heads", "average (nats)", "worst (nats)"]]
        rows[0] += ["average share", "worst share", "equal part"]
        for how, of in numbers["damages"].items():
            for n, seeds in of.items():
                everyone = [mean(mean(heads) for heads in seed["heads"]) for seed in seeds]
                rows.append([how, n, told(everyone), told(self._worst_nats(seeds))])
                average, worst = self._shares(seeds)
                rows[-1] += [f"{share:.1%}" for share in (mean(average), max(worst), 1 / int(n))]
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        modes = {"silent": "One head silent", "misled": "One head sees another text"}
        for axes, (how, title) in zip(figure.subplots(1, 2, sharey=True), modes.items(), strict=True):
            shares = {n: self._shares(seeds) for n, seeds in numbers["damages"][how].items()}
            for which, name in ((1, "worst"), (0, "average")):
                draw_by_heads(axes, {n: share[which] for n, share in shares.items()}, f"the {name} head")
            axes.plot(COUNTS, [1 / n for n in COUNTS], "k:", label="an equal part: 1 / heads")
            axes.set(title=title, ylim=(0, None), ylabel="share of what its layer's heads are worth")
            axes.legend()


class HeadsPreventOverfitting(Claim):
    id = "M6"
    english = "Many heads prevent overfitting."
    korean = "헤드가 많으면 과적합이 방지된다."
    prediction = (
        "Trained 60 times over on 8,000 tokens, 1, 2, 4 and 8 heads at equal width: the gap between the loss on new "
        "stories and on those learned shrinks with more heads, and new stories are predicted better."
    )
    rule = (
        "holds if both the gap and the validation loss are lower with 8 heads than with one, by more than the "
        "three seeds differ; holds with a condition if the gap alone is (it may have learned less instead of "
        "understanding more); does not hold otherwise"
    )
    n_token, steps, every = 8_000, 480, 60

    def measure(self) -> Numbers:
        found = {str(n): [self._overfit(n, seed) for seed in SEEDS] for n in COUNTS}
        return {
            "steps": list(range(0, self.steps + 1, self.every)),
            "by_heads": {n: {k: [run[k] for run in runs] for k in runs[0]} for n, runs in found.items()},
        }

    def _overfit(self, n_head: int, seed: int) -> dict[str, list[float]]:
        """The losses on what is learned and on new stories, before, in and after training."""
        corpus, losses = stories(), {"train": [], "validation": []}
        few, new = corpus.train.tokens[: self.n_token], corpus.val.tokens[: self.n_token]
        model = fresh_model(by_heads(n_head, seed))
        batches = Batches(few, CONTEXT, 16, seed, corpus.tokenizer.end_id)

        def look() -> None:
            losses["train"].append(nats(model, few))
            losses["validation"].append(nats(model, new))

        def batch(step: int) -> tuple[Tensor, Tensor]:
            if step % self.every == 0:
                look()
            return batches.batch(step)

        fit(model, batch, self.steps)
        look()
        return losses

    def verdict(self, numbers: Numbers) -> Verdict:
        (_, new, gap, _), (_, new_of_8, gap_of_8, _) = (self._columns(numbers)[n] for n in ("1", "8"))
        if not above(gap, gap_of_8):
            return FAILS
        return HOLDS if above(new, new_of_8) else CONDITION

    def _columns(self, numbers: Numbers) -> dict[str, list[list[float]]]:
        """By heads, of each seed: training and validation loss at the end, their gap, the lowest validation loss."""
        found = {}
        for n, of in numbers["by_heads"].items():
            train, new = ([run[-1] for run in of[name]] for name in ("train", "validation"))
            gaps = [b - a for a, b in zip(train, new, strict=True)]
            found[n] = [train, new, gaps, [min(run) for run in of["validation"]]]
        return found

    def finding(self, numbers: Numbers) -> str:
        one, eight = (self._columns(numbers)[n] for n in ("1", "8"))
        narrower, wider = above(one[2], eight[2]), above(eight[2], one[2])
        meaning = {
            HOLDS: "With eight heads the gap is smaller and new stories are predicted better.",
            CONDITION: "The condition: the gap alone. It is smaller with eight heads, but new stories are not "
            "predicted better by more than the seeds differ.",
            FAILS: "Eight heads widen the gap." if wider else "Eight heads do not change the gap clearly.",
        }[self.verdict(numbers)]
        same = " Eight heads have as many parameters as one, and it is these that can learn by heart."
        return (
            f"{meaning} The gap is {told(eight[2])} nats with eight and {told(one[2])} with one, "
            f"{'more' if narrower or wider else 'not more'} apart than seeds are. The loss on new stories is "
            f"{told(one[3])} with one head and {told(eight[3])} with eight where it is lowest on the way, and ends at "
            f"{told(one[1])} and {told(eight[1])}.{same * (self.verdict(numbers) == FAILS)}"
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        losses = ["training loss", "validation loss", "gap", "lowest validation loss on the way"]
        rows = [[n, *map(told, columns)] for n, columns in self._columns(numbers).items()]
        return [["heads", *(f"{loss} (nats)" for loss in losses)], *rows]

    def draw(self, numbers: Numbers, figure) -> None:
        curves, gaps = figure.subplots(1, 2, width_ratios=(3, 2))
        for colour, (n, of) in enumerate(numbers["by_heads"].items()):
            for name, style in (("validation", "-"), ("train", "--")):
                middle = [mean(losses) for losses in zip(*of[name], strict=True)]
                label = f"{n} head{'s' * (n != '1')}" if style == "-" else None
                curves.plot(numbers["steps"], middle, style, color=f"C{colour}", label=label)
        curves.set(xlabel="training steps (60 passes over 8,000 tokens)", ylabel="loss (nats per token)")
        curves.set(ylim=(0, None), title="New stories (solid), those learned (dashed)")
        curves.legend()
        draw_by_heads(gaps, {n: gap for n, (_, _, gap, _) in self._columns(numbers).items()})
        gaps.set(ylabel="gap at the end (nats per token)", title="The gap against the heads")


CLAIMS = [HeadsForgive(), HeadsPreventOverfitting()]
