"""Longer texts than in training."""

from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema import RopeScaling
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import SEEDS, machine, plain_ticks, spread, stories, trained
from experiments.positions import CONTEXT, positioned
from model import build_model

TIMES = 8  # how much longer the texts are
BLOCK = CONTEXT // 2  # positions that are told together
KINDS = ("linear", "ntk", "yarn", "llama3")
TRAINED = {
    "sinusoidal": {"position": "sinusoidal"},
    "sinusoidal, window": {"position": "sinusoidal", "window": BLOCK},
    "learned": {"position": "learned"},
    "none": {"position": "none"},
    "rotary": {"position": "rope"},
    "rotary, window": {"position": "rope", "window": BLOCK},
}
REMEDIES = tuple(f"rotary, {kind}" for kind in (*KINDS, "window"))


class BeyondTraining(Claim):
    id = "P8"
    english = "Sinusoidal positions fail beyond the trained length; rotary ones are the modern answer."
    korean = "사인·코사인 위치는 학습한 길이를 넘으면 무너지며, 그 현대적인 해법은 RoPE다."
    prediction = (
        "Models trained on 64 tokens read 512 of a stream that is cut anywhere, so that later positions are no harder. "
        "From positions 32–63 to 448–511 the loss rises by more than 0.1 nats (a tenth more perplexity) with "
        "sinusoidal positions, not with rotary ones. Besides: learned positions (which end at 63), none, a window of "
        "32, and rotary scalings (factor 8, put in after training; their rise is from the unscaled loss)."
    )
    rule = (
        "does not hold if the sinusoidal loss, mean of three seeds, rises by 0.1 nats or less, or the rotary one by "
        "more than that plain, with every scaling and with a window; holds if plain rotary rises by 0.1 or less; else "
        "holds with a condition"
    )

    def measure(self) -> Numbers:
        rows = windows()
        losses: dict[str, list[list[float]]] = {name: [] for name in dict.fromkeys((*TRAINED, *REMEDIES))}
        for seed in SEEDS:
            for name, options in TRAINED.items():
                losses[name].append(loss_by_block(trained(positioned(seed=seed, **options)), rows))
            rotary = trained(positioned("rope", seed))
            for kind in KINDS:
                losses[f"rotary, {kind}"].append(loss_by_block(scaled(rotary, kind), rows))
        return {"losses": losses}

    def verdict(self, numbers: Numbers) -> Verdict:
        rises = self._rises(numbers)
        if rises["sinusoidal"] <= 0.1 or min(rises[name] for name in ("rotary", *REMEDIES)) > 0.1:
            return FAILS
        return HOLDS if rises["rotary"] <= 0.1 else CONDITION

    def _means(self, numbers: Numbers) -> dict[str, list[float]]:
        """Of each model the loss of each block of positions, mean of the seeds."""
        return {name: list(map(mean, zip(*seeds, strict=True))) for name, seeds in numbers["losses"].items()}

    def _rises(self, numbers: Numbers) -> dict[str, float]:
        """From the second half of the trained length to the last eighth of the text; scaled ones from unscaled."""
        means = self._means(numbers)
        before = {name: found[1] for name, found in means.items()}
        before |= {f"rotary, {kind}": before["rotary"] for kind in KINDS}
        return {name: mean(found[-2:]) - before[name] for name, found in means.items() if name != "learned"}

    def finding(self, numbers: Numbers) -> str:
        rises, means = self._rises(numbers), self._means(numbers)
        changed = ", ".join(f"{name.split(', ')[1]} {rises[name]:+.2f}" for name in REMEDIES)
        helped = [name.split(", ")[1] for name in REMEDIES if rises[name] <= 0.1]
        lead = ""
        if self.verdict(numbers) == CONDITION:
            told = [f"a window of {BLOCK}" if name == "window" else f"{name} scaling" for name in helped]
            lead = f"The condition: rotary positions with {' or '.join(told)}; plain ones fail too. "
            if "window" in helped and rises["sinusoidal, window"] > 0.1:
                lead += "The window alone is no answer, for it does not keep sinusoidal positions from failing. "
        return (
            f"{lead}At eight times the trained length the loss changes by {rises['sinusoidal']:+.2f} nats with "
            f"sinusoidal positions ({rises['sinusoidal, window']:+.2f} with a window of 32), {rises['none']:+.2f} with "
            f"none, and {rises['rotary']:+.2f} with plain rotary ones; with rotary ones changed: {changed}. Within the "
            f"trained length it is {means['sinusoidal'][1]:.2f} with sinusoidal and {means['rotary'][1]:.2f} with "
            "rotary ones (positions 32–63). Rotary scores depend on distances, and long texts have distances that "
            "training never showed. A window never asks for them; scaling squeezes them into the known range (here "
            "untrained, with published settings, made for contexts of thousands)."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        rises, places = self._rises(numbers), {f"{BLOCK * i}–{BLOCK * i + 31}": i for i in (0, 1, 2, 4, 8, 15)}
        rows = [["loss (nats) at positions", *places, "rise (nats)", "spread of seeds, last"]]
        for name, found in self._means(numbers).items():
            rows.append([name, *(f"{found[i]:.3f}" if i < len(found) else "" for i in places.values())])
            last = [seed[-1] for seed in numbers["losses"][name]]
            rows[-1] += [f"{rises[name]:+.3f}" if name in rises else "", f"{spread(last):.3f}"]
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        panels = {"Positions added, or none": ["sinusoidal", "sinusoidal, window", "learned", "none"]}
        panels |= {"Rotary positions": ["rotary", *REMEDIES]}
        means = self._means(numbers)
        for axes, (title, names) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
            for name in names:
                middles = [BLOCK * (place + 0.5) for place in range(len(means[name]))]
                axes.plot(middles, means[name], "--" if name.endswith("window") else "-", marker=".", label=name)
            axes.axvline(CONTEXT, color="black", linestyle=":", label="trained length")
            axes.set(xscale="log", xlabel="position (tokens)", ylabel="loss (nats per token)", title=title)
            plain_ticks(axes.xaxis, [CONTEXT // 2, *(CONTEXT * 2**i for i in range(4))])
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def scaled(model: nn.Module, kind: str) -> nn.Module:
    """The same weights, their rotary positions scaled to `TIMES` the trained length."""
    original = {} if kind in ("linear", "ntk") else {"original_max_seq_len": CONTEXT}
    scaling = RopeScaling(kind=kind, factor=float(TIMES), **original)
    longer = build_model(model.config.model_copy(update={"rope_scaling": scaling})).to(model.lm_head.weight.device)
    longer.load_state_dict(model.state_dict())
    return longer.eval()


def windows(n_row: int = 256, length: int = TIMES * CONTEXT) -> Tensor:
    """Validation text from evenly spread places on, one token more than is read: (n_row, length + 1)."""
    tokens = torch.from_numpy(stories().val.tokens.astype("int64")).unfold(0, length + 1, 1)
    return tokens[torch.linspace(0, len(tokens) - 1, n_row, dtype=torch.float64).long()]


@torch.no_grad()
def loss_by_block(model: nn.Module, rows: Tensor) -> list[float]:
    """The mean loss of rows (B, T + 1) at positions 0–31, 32–63, and so on, as far as the model has positions."""
    length = CONTEXT if model.config.position == "learned" else rows.shape[1] - 1
    total = torch.zeros(length)
    for part in rows[:, : length + 1].split(32):
        part = part.to(machine().device)
        with machine().autocast():
            logits = model(part[:, :-1])
        total += F.cross_entropy(logits.float().transpose(1, 2), part[:, 1:], reduction="none").sum(0).cpu()
    return (total / len(rows)).view(-1, BLOCK).mean(-1).tolist()


CLAIMS = [BeyondTraining()]
