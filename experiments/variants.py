"""The design's variants side by side: positions, key/value heads, windows and the place of the norm, without a verdict.

Every combination is trained with the same steps on the stories, three seeds each; docs/variants.md has the table and
two pictures.
"""

import math
import time
from collections.abc import Callable
from itertools import product
from statistics import fmean, median

import torch
from torch import nn

from attention import apply_rotary, rotary_angles, sinusoidal_encoding
from cache import KVCache
from config import Config
from experiments.claim import Numbers
from experiments.lab import SEEDS, fresh_model, small, spread, stories, trained, validate
from generation import stream
from machine import step_flops

POSITIONS, KV_HEADS, WINDOWS, NORMS = ("rope", "sinusoidal", "learned", "none"), (4, 2, 1), (None, 32), ("pre", "post")
STEPS, LONGER, CONTEXT, PROMPT, NEW, ROUNDS = 150, 600, 128, 96, 32, 5
COLUMNS = ("parameters", "flops", "cache_bytes", "slots", "prefill", "decode")  # of a variant's numbers, as told


def variant(position: str, n_kv_head: int, window: int | None, norm: str, seed: int = 0, steps=STEPS) -> Config:
    shape = {"n_layer": 2, "d_model": 64, "max_seq_len": CONTEXT}
    return small(steps, seed, position=position, n_kv_head=n_kv_head, window=window, norm_position=norm, **shape)


def name(position: str, n_kv_head: int, window: int | None, norm: str) -> str:
    return f"{position}, {n_kv_head} key/value heads, window {window or 'none'}, {norm}-norm"


def singular(text: str) -> str:
    """For people: numbers are kept under `name`."""
    return text.replace("1 key/value heads", "1 key/value head")


def measure() -> Numbers:
    combinations = list(product(POSITIONS, KV_HEADS, WINDOWS, NORMS))
    rows = {name(*each): quality(*each) | sizes(variant(*each)) for each in combinations}
    models = {name(*each): fresh_model(variant(*each)) for each in combinations}
    for row, speeds in speed(models).items():
        rows[row] |= speeds
    learned = trained(variant("learned", 4, None, "pre")).decoder.position.weight.detach()
    codes = [[round(value, 4) for value in code] for code in learned.tolist()]
    return {"rows": rows, "learned": codes, "start": start(), "longer": longer()}


def quality(*options, steps: int = STEPS, change: Callable[[nn.Module], None] | None = None) -> dict[str, float]:
    """Bits per byte over the validation split: the mean of three seeds, and half of what they spread over."""
    models = [trained(variant(*options, seed, steps), change) for seed in SEEDS]
    bits = [validate(model, CONTEXT)["bits_per_byte"] for model in models]
    return {"bits": fmean(bits), "spread": spread(bits) / 2}


def start(steps: int = STEPS) -> dict[str, float]:
    """The `quality` of no positions, with words as sinusoidal positions have them."""
    return quality("none", 4, None, "pre", steps=steps, change=words_of_sinusoidal)


def longer(steps: int = LONGER) -> dict[str, dict[str, float]]:
    """The `quality` of sinusoidal and of no positions after more steps."""
    return {position: quality(position, 4, None, "pre", steps=steps) for position in ("sinusoidal", "none")}


def words_of_sinusoidal(model: nn.Module) -> None:
    """Words start with the deviation 1/√d_model and are multiplied by √d_model, but no code is added."""
    embed = model.decoder.embed
    nn.init.normal_(embed.weight, std=embed.embedding_dim**-0.5)
    embed.register_forward_hook(lambda module, _, words: words * math.sqrt(module.embedding_dim))


def sizes(config: Config) -> dict[str, float]:
    """Parameters, operations of a forward pass and bytes of the cache; each counted, none taken from a formula here."""
    model = fresh_model(config)
    cache = KVCache.allocate(model.config, 1, CONTEXT, device="meta")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": step_flops(model, 1, CONTEXT) // 3 // CONTEXT,  # of a training step a third is forward
        "cache_bytes": cache.nbytes // cache.slots,
        "slots": cache.slots,
    }


def speed(models: dict[str, torch.nn.Module]) -> dict[str, dict[str, float]]:
    """Tokens per second of reading a prompt and of writing after it: medians, all models in turn."""
    prompt = stories().val.tokens[:PROMPT].tolist()
    seconds: dict[str, list[tuple[float, float]]] = {model: [] for model in models}
    for _ in range(ROUNDS + 1):  # the first, to warm up, is forgotten
        for each, model in models.items():
            begin = time.perf_counter()
            moments = [time.perf_counter() - begin for _ in stream(model, [prompt], max_new_tokens=NEW)]
            seconds[each].append((moments[0], moments[-1] - moments[0]))
    medians = {each: [median(kind) for kind in zip(*times[1:], strict=True)] for each, times in seconds.items()}
    return {each: {"prefill": PROMPT / read, "decode": (NEW - 1) / write} for each, (read, write) in medians.items()}


def table(numbers: Numbers) -> list[list[str]]:
    heading = ["variant, the best first", "bits per byte", "± (half the spread)", "parameters", "FLOPs per token"]
    heading += ["cache bytes per token", "tokens it keeps at most", "prefill tokens/s", "decode tokens/s"]
    best = sorted(numbers["rows"].items(), key=lambda row: row[1]["bits"])
    return [heading] + [
        [singular(name), *(f"{row[key]:.4f}" for key in ("bits", "spread")), *(f"{row[key]:,.0f}" for key in COLUMNS)]
        for name, row in best
    ]


def finding(numbers: Numbers) -> str:
    """What stands out, and how much of it the start of the words explains."""
    one, none = (numbers["rows"][name(position, 4, None, "pre")] for position in ("sinusoidal", "none"))
    scaled, later = numbers["start"], numbers["longer"]
    words, codes = scaled["bits"] - none["bits"], one["bits"] - scaled["bits"]
    clear = min(words, codes) > 2 * max(each["spread"] for each in (one, none, scaled))
    cause = f" Of the difference of {words + codes:.3f} the words alone make {words:.3f}, the codes the rest." * clear
    lag = later["sinusoidal"]["bits"] - later["none"]["bits"]
    noise = max(each["spread"] for each in later.values()) * 2
    caught = "are still behind" if lag > noise else "are ahead" if lag < -noise else "are as good as none"
    said = "{bits:.3f} ± {spread:.3f}".format
    pre = {each: row["bits"] for each, row in numbers["rows"].items() if each.startswith("sin") and "pre" in each}
    last = min(pre.values()) > max(row["bits"] for each, row in numbers["rows"].items() if each not in pre)
    lead = "Sinusoidal positions with pre-norm come last, whatever the heads and the window. " if last else ""
    return (
        f"{lead}With pre-norm, four key/value heads and no window, sinusoidal positions reach {said(**one)} bits per "
        f"byte, no positions {said(**none)}, and these with words started and multiplied as for sinusoidal ones "
        f"{said(**scaled)}.{cause} After {LONGER} steps sinusoidal positions {caught}: "
        f"{said(**later['sinusoidal'])} against {said(**later['none'])}.\n"
    )


def draw_variants(numbers: Numbers, figure) -> None:
    """Bits per byte of every combination: a panel for each place of the norm and window, a group for each position."""
    panels = figure.subplots(2, 2, sharey=True)
    rows = numbers["rows"]
    for axes, (norm, window) in zip(panels.flat, product(NORMS, WINDOWS), strict=True):
        for place, (n_kv_head, marker) in enumerate(zip(KV_HEADS, "os^", strict=True)):
            found = [rows[name(position, n_kv_head, window, norm)] for position in POSITIONS]
            bits, spread = [row["bits"] for row in found], [row["spread"] for row in found]
            at = [group + (place - 1) * 0.2 for group in range(len(POSITIONS))]
            label = singular(f"{n_kv_head} key/value heads")
            axes.errorbar(at, bits, spread, fmt=marker, capsize=3, label=label)
        axes.set_xticks(range(len(POSITIONS)), POSITIONS)
        axes.set(title=f"{norm}-norm, window {window or 'none'}", xlabel="positions", ylabel="bits per byte")
    panels[0, 0].legend(fontsize=8)
    figure.suptitle("Validation after equal training (lower is better; three seeds: mean ± half the spread)")


def draw_encodings(numbers: Numbers, figure) -> None:
    """The codes of positions as heat maps, and below what two positions have in common."""
    pos, learned = torch.arange(CONTEXT), torch.tensor(numbers["learned"])
    sines, angles = sinusoidal_encoding(pos, learned.shape[1]), rotary_angles(pos, learned.shape[1])
    turned = apply_rotary(torch.ones(1, 1, *learned.shape), angles)[0, 0]
    columns = (
        ("sinusoidal (added)", "coordinate", sines, sines),
        ("learned (added), after training", "coordinate", learned, learned),
        ("rotary (q and k turned): cosines", "pair of coordinates", angles.cos(), turned),
    )
    for (upper, lower), (title, across, code, shared) in zip(figure.subplots(2, 3).T, columns, strict=True):
        bound = code.abs().max()
        image = upper.imshow(code, aspect="auto", cmap="RdBu_r", interpolation="nearest", vmin=-bound, vmax=bound)
        upper.set(title=title, xlabel=across, ylabel="position")
        figure.colorbar(image, ax=upper)
        image = lower.imshow(torch.nn.functional.cosine_similarity(shared[:, None], shared[None], dim=-1))
        lower.set(title="cosine between two positions", xlabel="position", ylabel="position")
        figure.colorbar(image, ax=lower)
    lower.set_title("cosine of equal vectors, turned")
