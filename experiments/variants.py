"""The design's variants side by side: positions, key/value heads, windows and the place of the norm, without a verdict.

Every combination is trained alike on the stories, three seeds each; docs/variants.md has the table and two pictures.
"""

import time
from itertools import product
from statistics import fmean, median

import torch

from attention import apply_rotary, rotary_angles, sinusoidal_encoding
from cache import KVCache
from config import Config
from experiments.claim import Numbers
from experiments.lab import SEEDS, fresh_model, small, spread, stories, trained, validate
from generation import stream
from machine import step_flops

POSITIONS, KV_HEADS, WINDOWS, NORMS = ("rope", "sinusoidal", "learned", "none"), (4, 2, 1), (None, 32), ("pre", "post")
STEPS, CONTEXT, PROMPT, NEW, ROUNDS = 150, 128, 96, 32, 5
COLUMNS = ("parameters", "flops", "cache_bytes", "slots", "prefill", "decode")  # of a variant's numbers, as told


def variant(position: str, n_kv_head: int, window: int | None, norm: str, seed: int = 0) -> Config:
    shape = {"n_layer": 2, "d_model": 64, "max_seq_len": CONTEXT}
    return small(STEPS, seed, position=position, n_kv_head=n_kv_head, window=window, norm_position=norm, **shape)


def name(position: str, n_kv_head: int, window: int | None, norm: str) -> str:
    return f"{position}, {n_kv_head} key/value heads, window {window or 'none'}, {norm}-norm"


def measure() -> Numbers:
    combinations = list(product(POSITIONS, KV_HEADS, WINDOWS, NORMS))
    rows = {name(*each): quality(*each) | sizes(variant(*each)) for each in combinations}
    models = {name(*each): fresh_model(variant(*each)) for each in combinations}
    for row, speeds in speed(models).items():
        rows[row] |= speeds
    learned = trained(variant("learned", 4, None, "pre")).decoder.position.weight.detach()
    return {"rows": rows, "learned": [[round(value, 4) for value in code] for code in learned.tolist()]}


def quality(*options) -> dict[str, float]:
    """Bits per byte over the validation split: the mean of three seeds, and half of what they spread over."""
    bits = [validate(trained(variant(*options, seed)), CONTEXT)["bits_per_byte"] for seed in SEEDS]
    return {"bits": fmean(bits), "spread": spread(bits) / 2}


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
        [name, *(f"{row[key]:.4f}" for key in ("bits", "spread")), *(f"{row[key]:,.0f}" for key in COLUMNS)]
        for name, row in best
    ]


def draw_variants(numbers: Numbers, figure) -> None:
    """Bits per byte of every combination: a panel for each place of the norm and window, a group for each position."""
    panels = figure.subplots(2, 2, sharey=True)
    rows = numbers["rows"]
    for axes, (norm, window) in zip(panels.flat, product(NORMS, WINDOWS), strict=True):
        for place, (n_kv_head, marker) in enumerate(zip(KV_HEADS, "os^", strict=True)):
            found = [rows[name(position, n_kv_head, window, norm)] for position in POSITIONS]
            bits, spread = [row["bits"] for row in found], [row["spread"] for row in found]
            at = [group + (place - 1) * 0.2 for group in range(len(POSITIONS))]
            axes.errorbar(at, bits, spread, fmt=marker, capsize=3, label=f"{n_kv_head} key/value heads")
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
