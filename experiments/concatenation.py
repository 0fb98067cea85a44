"""Adding the code of a position, or putting it beside the word."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from attention import sinusoidal_encoding
from config.schema import Config
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, above, fit, fresh_model, in_turn, story_batches, told, trained
from experiments.positions import CONTEXT, draw_losses, loss_of, means, positioned
from machine import step_flops


class WordAndPosition(nn.Module):
    """Words (B, T) and their sinusoidal positions, added, concatenated, or concatenated and projected: (B, T, C)."""

    order: Tensor | None = None  # which position's code each place is given instead of its own

    def __init__(self, n_word: int, width: int, how: str):
        super().__init__()
        self.how, self.word_width = how, width // 2 if how == "widen" else width
        self.word = nn.Embedding(n_word, self.word_width)
        nn.init.normal_(self.word.weight, std=self.word_width**-0.5)
        if how == "project":
            self.joint = nn.Linear(2 * width, width, bias=False)
            nn.init.normal_(self.joint.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        order = torch.arange(CONTEXT) if self.order is None else self.order
        pos = order[: tokens.shape[1]].to(tokens.device)
        words = self.word(tokens) * math.sqrt(self.word_width)
        codes = sinusoidal_encoding(pos, self.word_width).expand_as(words)
        if self.how == "add":
            return words + codes
        both = torch.cat((words, codes), dim=-1)
        return both if self.how == "widen" else self.joint(both)


def joining(how: str) -> Callable[[nn.Module], None]:
    """What makes a model of Byeol's join words and positions in this way."""

    def change(model: nn.Module) -> None:
        model.decoder.embed = WordAndPosition(model.config.vocab_size, model.config.d_model, how)

    change.__qualname__ = how  # by which kept models are told apart
    return change


ADD, PROJECT, ADD_WIDE, WIDEN = JOINED = ("add", "concatenate, project", "add, as wide", "concatenate, widen")


def joined(name: str, seed: int) -> tuple[Config, Callable[[nn.Module], None]]:
    """The run in which words and positions meet in this way: its configuration and what changes Byeol's model."""
    width, how = {ADD: (64, "add"), PROJECT: (64, "project"), ADD_WIDE: (128, "add"), WIDEN: (128, "widen")}[name]
    return positioned("none", seed, d_model=width, d_ff=3 * width, tie_embeddings=False), joining(how)


CHANGED = (
    "Losses had to differ by more than the seeds of any of the four models, now of the two that are compared. The "
    "verdict was the same."
)


class Concatenation(Claim):
    id = "P1"
    english = "Concatenating positions to words, not adding them, breaks every layer's size and wastes computation."
    korean = "위치 벡터를 더하지 않고 이어 붙이면 모든 층의 크기가 달라지고 계산이 낭비된다."
    prediction = (
        "Words of width 64 with 64 more for the position need blocks of four times the weights, which is not repaid: "
        "a model as wide (128; the same tokens and operations) that adds positions is at least as good. Nor does a "
        "projection back to 64 help: it costs or it learns less."
    )
    rule = (
        "does not hold if widening multiplies the blocks' weights by less than 3, or beats adding in a model as wide "
        "by more than the seeds of either differ; else holds with a condition if concatenating and projecting back "
        "costs less than 10 % more operations and is not worse than adding by more than their seeds differ; else holds"
    )
    changed = CHANGED

    def measure(self) -> Numbers:
        models, steps = {}, {}
        for name in JOINED:
            config, change = joined(name, 0)
            models[name] = fresh_model(config)
            change(models[name])
            steps[name] = partial(fit, models[name], story_batches(config), 3, config.optim)
        return {
            "losses": {name: [loss_of(trained(*joined(name, seed))) for seed in SEEDS] for name in JOINED},
            "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
            "block_weights": {
                name: sum(p.numel() for p in model.decoder.blocks.parameters() if p.dim() == 2)
                for name, model in models.items()
            },
            "operations": {name: step_flops(model, 1, CONTEXT) // CONTEXT for name, model in models.items()},
            "seconds": {name: seconds / 3 for name, seconds in in_turn(steps).items()},
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        losses, weights = numbers["losses"], numbers["block_weights"]
        if weights[WIDEN] < 3 * weights[ADD] or above(losses[ADD_WIDE], losses[WIDEN]):
            return FAILS
        cheap = numbers["operations"][PROJECT] < 1.1 * numbers["operations"][ADD]
        return CONDITION if cheap and not above(losses[PROJECT], losses[ADD]) else HOLDS

    def finding(self, numbers: Numbers) -> str:
        losses, loss = numbers["losses"], {name: told(found) for name, found in numbers["losses"].items()}
        weights, operations, seconds = (
            {name: numbers[key][name] / numbers[key][ADD] for name in JOINED}
            for key in ("block_weights", "operations", "seconds")
        )
        better, worse = above(losses[ADD], losses[PROJECT]), above(losses[PROJECT], losses[ADD])
        good = "better than" if better else "worse than" if worse else "as good as"
        lead = "The condition: the blocks are widened, which concatenating does not require. "
        return (
            f"{lead if self.verdict(numbers) == CONDITION else ''}Projected back to the width of the word, a "
            f"concatenation multiplies operations by {operations[PROJECT]:.3f} and is {good} adding: a loss of "
            f"{loss[PROJECT]} against {loss[ADD]}. Widening multiplies the blocks' weights by "
            f"{weights[WIDEN]:.2f}, all operations by {operations[WIDEN]:.2f} and a step's time here by "
            f"{seconds[WIDEN]:.2f}; a model as wide that adds, by {weights[ADD_WIDE]:.2f}, {operations[ADD_WIDE]:.2f} "
            f"and {seconds[ADD_WIDE]:.2f}. Losses of these two: {loss[WIDEN]} and {loss[ADD_WIDE]}."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        counts = ("parameters", "block_weights", "operations")
        rows = [["model", "parameters", "weights of the blocks", "operations per token", "ms per step", "loss (nats)"]]
        for name, losses in numbers["losses"].items():
            rows.append([name, *(f"{numbers[key][name]:,}" for key in counts)])
            rows[-1] += [f"{1000 * numbers['seconds'][name]:.0f}", told(losses)]
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2)
        bars = {"weights of\nthe blocks": "block_weights", "operations": "operations", "time of\na step": "seconds"}
        for place, name in enumerate([PROJECT, ADD_WIDE, WIDEN]):
            ratios = [numbers[key][name] / numbers[key][ADD] for key in bars.values()]
            left.bar([x + 0.27 * (place - 1) for x in range(3)], ratios, 0.25, label=name, color=f"C{place + 1}")
        left.axhline(1, color="black", linestyle=":", label="add")
        left.set_xticks(range(3), list(bars))
        left.margins(y=0.45)
        left.set(xlabel="what it costs", ylabel="times that of adding")
        left.set_title("What it costs, as a multiple\nof adding (64 wide)")
        left.legend(fontsize="small")
        draw_losses(right, numbers["losses"], "What it brings, equal tokens\n(left pair: 64 wide, right pair: 128)")


class Injection(Claim):
    id = "P2"
    english = "Concatenation lists the position beside the word but does not inject it into the word."
    korean = "이어 붙이기는 위치를 단어 옆에 늘어놓을 뿐, 단어 속에 스며들게 하지는 못한다."
    prediction = (
        "A model that concatenates makes less of the position than one that adds: its loss is higher (equal width, "
        "tokens and steps), and giving each place the code of another one hurts it less than half as much. "
        "Against it stands the algebra: W[x; p] = W₁x + W₂p, so any first layer adds."
    )
    rule = (
        "does not hold if W[x; p] equals W₁x + W₂p to 1e-12 in float64, wrong codes cost each concatenating model at "
        "least half of what they cost adding at its width (and that something), and projecting is not worse than "
        "adding by more than the seeds of either differ; holds with a condition if only the last part fails; else holds"
    )
    changed = CHANGED

    def measure(self) -> Numbers:
        losses, damage = {}, {}
        for name in JOINED:
            models = [trained(*joined(name, seed)) for seed in SEEDS]
            losses[name] = [loss_of(model) for model in models]
            damage[name] = [wrong_codes(model) - loss for model, loss in zip(models, losses[name], strict=True)]
        return {"algebra": algebra(), "losses": losses, "damage": damage}

    def verdict(self, numbers: Numbers) -> Verdict:
        losses, damage = numbers["losses"], means(numbers["damage"])
        pairs = ((PROJECT, ADD), (WIDEN, ADD_WIDE))
        used = all(damage[one] >= damage[other] / 2 > 0 for one, other in pairs)
        if numbers["algebra"]["error"] > 1e-12 or not used:
            return HOLDS
        return CONDITION if above(losses[PROJECT], losses[ADD]) else FAILS

    def finding(self, numbers: Numbers) -> str:
        losses, damage = numbers["losses"], means(numbers["damage"])
        lead = "The condition: it is learning that suffers, as projecting learns less; the position is used. "
        return (
            f"{lead if self.verdict(numbers) == CONDITION else ''}W[x; p] and W₁x + W₂p differ by "
            f"{numbers['algebra']['error']:.0e} of their size: the first matrices behind a concatenation, those of Q, "
            "K and V, add word and position, each through its own matrix. Adding is the case W₁ = W₂ = 1 (to "
            f"{numbers['algebra']['adding']:.0e}). Codes of the wrong places cost {damage[ADD]:.2f} nats after adding, "
            f"{damage[PROJECT]:.2f} after concatenating and projecting; in models twice as wide {damage[ADD_WIDE]:.2f} "
            f"after adding, {damage[WIDEN]:.2f} after concatenating. The loss is {told(losses[PROJECT])} "
            f"with projecting, {told(losses[ADD])} with adding."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [[name, told(found), told(numbers["damage"][name])] for name, found in numbers["losses"].items()]
        error = ["W[x; p] − W₁x − W₂p, relative", f"{numbers['algebra']['error']:.1e}", ""]
        return [["model", "loss (nats)", "more with wrong codes (nats)"], *rows, error]

    def draw(self, numbers: Numbers, figure) -> None:
        left, right = figure.subplots(1, 2)
        draw_losses(left, numbers["losses"], "Loss, equal tokens\n(left pair: 64 wide, right pair: 128)")
        draw_losses(right, numbers["damage"], "What codes of wrong positions cost:\nhow far they are used")
        right.set(ylabel="more loss with wrong codes (nats)", ylim=(0, 1.15 * right.get_ylim()[1]))


def algebra(width: int = 512) -> dict[str, float]:
    """How far W[x; p] is from W₁x + W₂p, and with W = (1 1) from x + p, relative to their size, in float64."""
    torch.manual_seed(0)
    words = torch.randn(100, width, dtype=torch.float64)
    codes = sinusoidal_encoding(torch.arange(100), width).double()
    both = torch.cat((words, codes), dim=-1)
    weight, eye = torch.randn(width, 2 * width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    expected = words @ weight[:, :width].T + codes @ weight[:, width:].T
    error = (both @ weight.T - expected).abs().max() / expected.abs().max()
    adding = (both @ torch.cat((eye, eye), dim=1).T - (words + codes)).abs().max()
    return {"error": error.item(), "adding": adding.item()}


def wrong_codes(model: nn.Module) -> float:
    """The loss of a `joined` model when each place is given the code of another, drawn once."""
    model.decoder.embed.order = torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(0))
    return loss_of(model)


CLAIMS = [Concatenation(), Injection()]
