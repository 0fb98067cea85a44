"""Pictures. matplotlib is imported when one is drawn, because it takes a second."""

import base64
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config.errors import UserError


def loss_curve(metrics: Path, picture: Path) -> None:
    """Draws the losses in a run's metrics.jsonl against the step, as a PNG; dashed, the least that is possible. The
    picture is written whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")  # no window, and none needed
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curves = {
        "loss": ("training", {"linewidth": 1}),
        "val_loss": ("validation", {"marker": "o"}),
        "held_out_loss": ("held-out combinations", {"marker": "x"}),
        "val_floor": ("entropy of the text", {"color": "black", "linestyle": "--"}),
    }
    for key, (label, style) in curves.items():
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    fresh = picture.with_name(f".{picture.name}")
    figure.savefig(fresh, dpi=120, format="png")
    plt.close(figure)
    fresh.replace(picture)


def decoding_times(curves: dict[str, np.ndarray], first: int, picture: Path) -> None:
    """Draws the seconds that each token took against its position, from `first` on, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, seconds in curves.items():
        axes.plot(range(first, first + len(seconds)), 1000 * seconds, label=label, linewidth=1)
    axes.set(xlabel="tokens before it", ylabel="milliseconds a token", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


class AttentionMap(NamedTuple):
    """What the heads of one layer look at."""

    kind: str  # shown as heading: "self-attention", "encoder self-attention", "cross-attention"
    layer: int  # from 0
    weights: np.ndarray  # (H, T, S) float32, rows sum to one (or to zero where a query sees nothing)
    visible: np.ndarray  # (T, S) bool: which keys a query may see
    n_kv_head: int  # G key/value heads; query head h reads key/value head h // (H/G)
    queries: list[str]  # T token texts, the rows
    keys: list[str]  # S token texts, the columns


def attention_maps(maps: Sequence[AttentionMap], picture: Path, title: str) -> None:
    """Draws every head of every layer: a `.html` page to look around in, which needs nothing else, or a `.png`.

    At least one map; kinds stay in the order in which they first come. The picture is written whole or not at all.
    Raises `UserError` for another suffix, a file that cannot be written, and characters that a `.png` cannot show.
    """
    draw = {".html": _attention_page, ".png": _attention_grid}.get(picture.suffix.lower())
    if draw is None:
        raise UserError(f"{picture} is neither a .html nor a .png: attention can be drawn as one of these")
    kinds = list(dict.fromkeys(attention.kind for attention in maps))
    data = draw(sorted(maps, key=lambda attention: (kinds.index(attention.kind), attention.layer)), title)
    unfinished = picture.with_name(f".{picture.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(picture)
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):  # it is not there if all went well
            unfinished.unlink()


HIDDEN = 255  # the byte of a cell that the mask hides; a weight w is the byte 254·√w: most weights are small
FEW_TOKENS = 32  # so many have room for their texts in a grid of maps


def _colors() -> np.ndarray:
    """The color of each byte: (256, 4) uint8, red, green, blue and opacity; from white to night, and grey if hidden."""
    stops = [(255, 255, 255), (197, 216, 238), (110, 153, 206), (44, 84, 156), (13, 25, 66)]
    levels = np.linspace(0, HIDDEN - 1, len(stops))
    ramp = [np.interp(np.arange(HIDDEN), levels, channel) for channel in zip(*stops, strict=True)]
    colors = np.full((256, 4), 255, np.uint8)
    colors[:HIDDEN, :3] = np.rint(ramp).T
    colors[HIDDEN, :3] = 222, 219, 211
    return colors


def _cells(attention: AttentionMap) -> np.ndarray:
    """A byte for each weight, after the heads' their mean: (H + 1, T, S) uint8."""
    weights = np.concatenate([attention.weights, attention.weights.mean(0, keepdims=True)])
    return np.where(attention.visible, np.rint(np.sqrt(weights.clip(0, 1)) * (HIDDEN - 1)), HIDDEN).astype(np.uint8)


def _shown(text: str) -> str:
    """A token's text with marks for what is invisible: line ends and tabs, spaces where there is nothing else."""
    if not text.strip():
        text = re.sub(r"[^\S\n\t]", "␣", text) or "∅"
    marks = {code: 0x2400 + code for code in range(32)} | {ord("\n"): "⏎", ord("\t"): "⇥"}
    return text.translate(marks)


def _attention_page(maps: Sequence[AttentionMap], title: str) -> bytes:
    def compressed(array: np.ndarray) -> str:
        return base64.b64encode(zlib.compress(array.tobytes())).decode()

    data = {
        "title": _shown(title),
        "colors": compressed(_colors()),
        "maps": [
            {
                "kind": attention.kind,
                "layer": attention.layer,
                "heads": len(attention.weights),
                "n_kv_head": attention.n_kv_head,
                "queries": [_shown(text) for text in attention.queries],
                "keys": [_shown(text) for text in attention.keys],
                "bytes": compressed(_cells(attention)),
            }
            for attention in maps
        ],
    }
    template = Path(__file__).with_name("plots_attention.html").read_text("utf-8")
    # Without a < no text can end the script element that it is in; JSON is ASCII otherwise.
    return template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c")).encode()


def _attention_grid(maps: Sequence[AttentionMap], title: str) -> bytes:
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.figure import Figure

    few = max(max(attention.visible.shape) for attention in maps) <= FEW_TOKENS
    texts = [title, *(attention.kind for attention in maps)]
    if few:
        texts += [text for attention in maps for text in attention.queries + attention.keys]
    _check_font(_shown(text) for text in texts)
    kinds = [list(layers) for _, layers in groupby(maps, key=lambda attention: attention.kind)]
    widths, heights = zip(*[_inches(layers, few) for layers in kinds], strict=True)
    style = {"font.size": 8, "xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "text.parse_math": False}  # a $ is a $
    style |= {"axes.edgecolor": "0.7", "xtick.major.size": 0, "ytick.major.size": 0}
    with matplotlib.rc_context(style):
        figure = Figure((max(widths), sum(heights) + 1), layout="constrained")
        figure.suptitle(_shown(title), fontsize=11, wrap=True)
        *parts, foot = figure.subfigures(len(kinds) + 1, height_ratios=[*heights, 0.6])
        for part, layers in zip(parts, kinds, strict=True):
            _draw_kind(part, layers, few)
        scale = ScalarMappable(PowerNorm(0.5, 0, 1), ListedColormap(_colors()[:HIDDEN] / 255))
        bar = foot.add_axes((0.5 - 1 / max(widths), 0.7, 2 / max(widths), 0.2))  # two inches wide
        figure.colorbar(scale, bar, orientation="horizontal", ticks=[0, 0.05, 0.2, 0.5, 1], format="{x:g}")
        bar.set_xlabel("weight (grey: may not be seen)")
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _inches(layers: list[AttentionMap], few: bool) -> tuple[float, float]:
    """The width and height that the maps of a kind take, with their texts."""
    n_query, n_key = layers[0].visible.shape
    queries, keys = (max(len(text) for text in texts) for texts in (layers[0].queries, layers[0].keys))
    width, height = (max(1.2, 0.12 * few * n) + 0.1 for n in (n_key, n_query))
    columns = len(layers[0].weights) + 1
    return 0.4 + 0.07 * few * queries + columns * width, 0.7 + 0.07 * few * keys + len(layers) * height


def _draw_kind(figure, layers: list[AttentionMap], few: bool) -> None:
    """A row a layer, a column a head, and last their mean."""
    n_head, n_kv_head = len(layers[0].weights), layers[0].n_kv_head
    figure.suptitle(layers[0].kind, fontsize=9, fontweight="bold")
    grid = figure.subplots(len(layers), n_head + 1, squeeze=False)
    for row, attention in zip(grid, layers, strict=True):
        for axes, cells in zip(row, _colors()[_cells(attention)], strict=True):
            axes.imshow(cells)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"layer {attention.layer}")
        if few:
            row[0].set_yticks(range(len(attention.queries)), [_shown(text) for text in attention.queries])
    if few:
        for axes in grid[-1]:
            axes.set_xticks(range(len(attention.keys)), [_shown(text) for text in attention.keys], rotation=90)
    for head, axes in enumerate(grid[0, :-1]):
        shared = f"\nkeys/values {head * n_kv_head // n_head}" if n_kv_head < n_head else ""
        axes.set_title(f"head {head}{shared}", fontsize=8)
    grid[0, -1].set_title("mean", fontsize=8)


def _check_font(texts: Iterable[str]) -> None:
    """Raises `UserError` for a character that none of matplotlib's fonts has: it would be drawn as an empty box."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams["font.family"]]
    known = set().union(*(font.get_charmap() for font in fonts))
    for character in "".join(texts):
        if ord(character) not in known:
            where = f"the font of a .png ({fonts[0].family_name})"
            raise UserError(f"{where} has no {character!r} (U+{ord(character):04X}): give FILE.html instead")
