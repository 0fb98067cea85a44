"""The pictures: a run's losses, and what the heads look at."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from config.errors import UserError
from plots import AttentionMap, attention_maps, loss_curve


@pytest.fixture
def drawn(monkeypatch):
    """What was drawn: label -> [(x, y), ...]."""
    curves, plot, line = {}, Axes.plot, Axes.axhline

    def recording_plot(axes, x, y, **style):
        curves[style["label"]] = list(zip(x, y, strict=True))
        return plot(axes, x, y, **style)

    def recording_line(axes, y, **style):
        curves[style["label"]] = y
        return line(axes, y, **style)

    monkeypatch.setattr(Axes, "plot", recording_plot)
    monkeypatch.setattr(Axes, "axhline", recording_line)
    return curves


def write(folder: Path, records: list[dict]) -> tuple[Path, Path]:
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return metrics, folder / "loss.png"


def is_png(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82") and len(data) > 5_000


RECORDS = [{"step": step, "loss": 5.0 / step} for step in range(1, 6)]


def test_the_picture_shows_training_and_validation_against_the_step(tmp_path, drawn):
    records = [{**record, **({"val_loss": 3.0} if record["step"] % 2 else {})} for record in RECORDS]
    metrics, picture = write(tmp_path, records)
    loss_curve(metrics, picture)
    assert is_png(picture)
    assert drawn == {
        "training": [(step, 5.0 / step) for step in range(1, 6)],
        "validation": [(1, 3.0), (3, 3.0), (5, 3.0)],
    }


def test_without_validation_there_is_one_curve(tmp_path, drawn):
    metrics, picture = write(tmp_path, RECORDS)
    loss_curve(metrics, picture)
    assert is_png(picture)
    assert list(drawn) == ["training"]


def test_a_run_that_has_measured_nothing_gives_an_empty_picture(tmp_path, drawn):
    metrics, picture = write(tmp_path, [])
    loss_curve(metrics, picture)
    assert picture.exists()
    assert drawn == {}


WORDS = ["The", "animal", "was", "too", "tired", "to", "cross", "."]
NASTY = [
    "</script><script>alert(1)</script>",
    "<!--",
    "&amp;",
    "\"'`",
    "\\",
    "{{data}}",
    "\u2028",
    "\ud800",
    "별",
    "$x$",
]


def attention(kind="self-attention", layer=0, heads=4, n_kv_head=4, queries=WORDS, keys=WORDS, window=None):
    """Heads that look at random keys; self-attention is causal, and its window a band of the triangle."""
    distance = np.arange(len(queries))[:, None] - np.arange(len(keys))
    visible = np.ones(distance.shape, bool)
    if kind == "self-attention":
        visible = (distance >= 0) & (distance < (window or len(keys)))
    weights = np.random.default_rng(layer).exponential(size=(heads, *visible.shape)) ** 2 * visible
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return AttentionMap(kind, layer, weights, visible, n_kv_head, list(queries), list(keys))


def encoder_decoder() -> list[AttentionMap]:
    """In the order in which a model computes them; the target has other tokens than the source."""
    target = ["<start>", "Das", "Tier", "war"]
    encoder = [attention("encoder self-attention", layer) for layer in range(2)]
    own, cross = (
        [attention(kind, layer, queries=target, keys=keys) for layer in range(3)]
        for kind, keys in (("self-attention", target), ("cross-attention", WORDS))
    )
    return encoder + [part for pair in zip(own, cross, strict=True) for part in pair]


class Page(HTMLParser):
    """What a browser makes of a page: its tags, and the text in its scripts."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.scripts, self.html = [], [], path.read_text("utf-8")
        self.feed(self.html)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text):
        if self.tags[-1:] == ["script"]:
            self.scripts[-1] += text

    def cells(self, index: int) -> np.ndarray:
        """The bytes of a map: (H + 1, T, S)."""
        drawn = self.data["maps"][index]
        shape = drawn["heads"] + 1, len(drawn["queries"]), len(drawn["keys"])
        return np.frombuffer(zlib.decompress(base64.b64decode(drawn["bytes"])), np.uint8).reshape(shape)


def draw_page(folder: Path, maps: list[AttentionMap], title="Attention") -> Page:
    attention_maps(maps, folder / "attention.html", title)
    return Page(folder / "attention.html")


def test_a_page_holds_every_head_of_every_layer_of_every_kind(tmp_path):
    maps = encoder_decoder()
    page = draw_page(tmp_path, maps, "From English")
    kinds = ["encoder self-attention", "self-attention", "cross-attention"]
    in_order = [part for kind in kinds for part in maps if part.kind == kind]
    assert page.data["title"] == "From English"
    assert [(drawn["kind"], drawn["layer"]) for drawn in page.data["maps"]] == [
        *((kinds[0], layer) for layer in range(2)),
        *((kinds[1], layer) for layer in range(3)),
        *((kinds[2], layer) for layer in range(3)),
    ]
    for index, (drawn, given) in enumerate(zip(page.data["maps"], in_order, strict=True)):
        assert (drawn["queries"], drawn["keys"]) == (given.queries, given.keys)
        *heads, mean = page.cells(index)
        for cells, weights in zip([*heads, mean], [*given.weights, given.weights.mean(0)], strict=True):
            off = np.abs(cells / 254 - np.sqrt(weights))[given.visible]
            assert off.max() < 0.501 / 254  # the nearest of 255 levels


@pytest.mark.parametrize("window", [None, 3])
def test_exactly_the_hidden_cells_are_marked(tmp_path, window):
    given = attention(window=window)
    given.visible[2] = given.weights[:, 2] = False  # a query that sees nothing
    page = draw_page(tmp_path, [given])
    assert not given.visible.all()
    assert ((page.cells(0) == 255) == ~given.visible).all()


def test_a_page_says_which_heads_share_keys_and_values(tmp_path):
    maps = [attention(heads=6, n_kv_head=2), attention("cross-attention", heads=4, n_kv_head=1)]
    assert [(drawn["heads"], drawn["n_kv_head"]) for drawn in draw_page(tmp_path, maps).data["maps"]] == [
        (6, 2),
        (4, 1),
    ]


def test_a_page_needs_nothing_but_itself(tmp_path):
    html = draw_page(tmp_path, encoder_decoder()).html
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|\b(src|href)\b *=|@import|\burl\(|\bimport\b|\bfetch\(", html)


def test_no_text_can_leave_its_place(tmp_path):
    plain = draw_page(tmp_path, [attention(queries=["a"] * len(NASTY), keys=["a"] * len(NASTY))])
    nasty = draw_page(tmp_path, [attention(queries=NASTY, keys=NASTY)], title=NASTY[0])
    (drawn,) = nasty.data["maps"]
    assert drawn["queries"][:6] == drawn["keys"][:6] == NASTY[:6]
    assert drawn["keys"][7:] == NASTY[7:]
    assert nasty.data["title"] == NASTY[0]
    assert nasty.tags == plain.tags
    assert nasty.scripts[1:] == plain.scripts[1:]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "∅"),
        (" ", "␣"),
        ("  \n", "␣␣⏎"),
        ("\u3000", "␣"),
        (".\n\n", ".⏎⏎"),
        ("\tx y", "⇥x y"),
        (" winter", " winter"),
        ("a\x00", "a␀"),
    ],
)
def test_what_would_be_invisible_is_marked(tmp_path, text, shown):
    (drawn,) = draw_page(tmp_path, [attention(queries=[text], keys=[text])]).data["maps"]
    assert drawn["queries"] == drawn["keys"] == [shown]


@pytest.fixture
def images(monkeypatch):
    """What was drawn: [(axes, pixels (T, S, 4)), ...]."""
    drawn, imshow = [], Axes.imshow

    def recording(axes, pixels, **style):
        drawn.append((axes, pixels))
        return imshow(axes, pixels, **style)

    monkeypatch.setattr(Axes, "imshow", recording)
    return drawn


def test_a_png_shows_every_head_and_the_mean(tmp_path, images):
    maps, picture = encoder_decoder(), tmp_path / "attention.PNG"
    attention_maps(maps, picture, "From English")
    assert is_png(picture)
    assert len(images) == sum(len(part.weights) + 1 for part in maps)
    titles = [axes.get_title() for axes, _ in images[:5]]
    assert titles == ["head 0", "head 1", "head 2", "head 3", "mean"]
    assert [label.get_text() for label in images[0][0].get_yticklabels()] == WORDS
    assert [label.get_text() for label in images[-1][0].get_xticklabels()] == WORDS


def test_a_png_has_a_color_of_its_own_for_hidden_cells_and_darkens_with_the_weight(tmp_path, images):
    given = attention(heads=2, n_kv_head=1, window=3)
    given.weights[:, 4, 4] = 0  # seen, but not looked at
    attention_maps([given], tmp_path / "attention.png", "A window")
    assert [axes.get_title() for axes, _ in images] == ["head 0\nkeys/values 0", "head 1\nkeys/values 0", "mean"]
    for (_, pixels), weights in zip(images, [*given.weights, given.weights.mean(0)], strict=True):
        (grey,) = {tuple(color) for color in pixels[~given.visible]}
        seen = pixels[given.visible]
        assert np.abs(seen.astype(int) - grey).max(1).min() > 20  # that far from any other
        lightness = seen[:, :3].astype(int).sum(1)[np.argsort(weights[given.visible])]
        assert (np.diff(lightness) <= 0).all()
        assert lightness[0] > lightness[-1]


def test_a_png_refuses_a_character_that_its_font_has_not(tmp_path):
    with pytest.raises(UserError, match=r"'별' \(U\+BCC4\): give FILE.html"):
        attention_maps([attention(queries=["별"], keys=["a"])], tmp_path / "attention.png", "A star")
    assert list(tmp_path.iterdir()) == []


def test_a_png_of_many_tokens_leaves_their_texts_out(tmp_path, images):
    attention_maps([attention(queries=["별"] * 33, keys=["별"] * 33)], tmp_path / "attention.png", "Stars")
    assert is_png(tmp_path / "attention.png")
    assert images[0][0].get_yticklabels() == []


def test_a_png_shows_a_dollar_as_a_dollar(tmp_path):
    attention_maps([attention(queries=["$\\frac$"], keys=["$"])], tmp_path / "attention.png", "$\\nonsense$")
    assert is_png(tmp_path / "attention.png")


@pytest.mark.parametrize("name", ["attention", "attention.svg", "html"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=f"{name} is neither a .html nor a .png"):
        attention_maps([attention()], tmp_path / name, "Attention")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "folder.html", tmp_path / "missing" / "attention.html"):
        with pytest.raises(UserError, match=f"{path.name} cannot be written"):
            attention_maps([attention()], path, "Attention")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder.html"]


def test_a_picture_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    picture = tmp_path / "attention.html"
    picture.write_text("the last one")

    write_bytes = Path.write_bytes

    def full(path, data):
        write_bytes(path, data[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match="No space left on device"):
            attention_maps([attention()], picture, "Attention")
    assert picture.read_text() == "the last one"
    attention_maps([attention()], picture, "Attention")
    assert picture.read_text("utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [picture]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Looks at the page and uses it as a reader would; what it sees goes into <pre id="seen">.
READER = """
<script>
const errors = [];
onerror = onunhandledrejection = (event) => { errors.push(String(event.reason ?? event)); };
</script>
<script type="module">
while (!document.querySelector("[aria-pressed=true]")) await new Promise((resolve) => setTimeout(resolve, 10));
const find = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => find(selector).textContent.trim();
const texts = (selector) => all(selector).map((element) => element.textContent);
const press = (key) => {
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  return text("#chosen h2");
};
const move = (row, column) => {
  const area = find("#cells canvas").getBoundingClientRect();
  const clientX = area.left + area.width * (column + 0.5) / all("#keys span").length;
  const clientY = area.top + area.height * (row + 0.5) / all("#queries span").length;
  find("#cells").dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
  return text("#readout");
};
const seen = { title: document.title, kinds: texts("#overview h2"), groups: texts(".group") };
const buttons = all("#overview button");
seen.buttons = buttons.length;
seen.first = text("#chosen h2");
seen.cell = move(2, 1);
seen.on = texts("#scroll .on");
buttons[7].click();
seen.clicked = text("#chosen h2");
seen.pressed = buttons.flatMap((button, index) => button.ariaPressed === "true" ? index : []);
seen.queries = texts("#queries span");
seen.hidden = move(0, 1);
seen.keys = ["Left", "Left", "Right", "Down", "Up", "Up", "Down"].map((key) => press(`Arrow${key}`));
const canvas = find("#cells canvas");
seen.pixels = [...canvas.getContext("2d").getImageData(0, 0, canvas.width, 1).data];
seen.errors = errors;
const pre = document.body.appendChild(document.createElement("pre"));
pre.id = "seen";
pre.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(seen))));
</script>
"""


def read(page: Page, folder: Path) -> dict:
    """What the reader saw."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    (folder / "read.html").write_text(page.html + READER, "utf-8")
    quiet = ["--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run", "--no-sandbox"]
    profile, url = f"--user-data-dir={folder / 'profile'}", (folder / "read.html").as_uri()
    command = [CHROMIUM, "--headless", *quiet, profile, "--virtual-time-budget=5000", "--dump-dom", url]
    dom = subprocess.run(command, capture_output=True, timeout=60).stdout.decode()
    seen = json.loads(base64.b64decode(re.search(r'<pre id="seen">(.*?)</pre>', dom)[1]))
    assert seen["errors"] == []
    return seen


def test_a_reader_can_click_point_and_move_with_the_arrow_keys(tmp_path, images):
    words = ["별", *WORDS[1:], "</b>"]
    own = attention(n_kv_head=2, queries=words, keys=words)
    cross = [attention("cross-attention", layer, heads=2, n_kv_head=2, queries=WORDS[:4]) for layer in range(2)]
    seen = read(draw_page(tmp_path, [*cross, own], "A <b> star 별"), tmp_path)
    assert seen["title"] == "A <b> star 별"
    assert seen["kinds"] == ["cross-attention", "self-attention"]
    assert seen["groups"] == ["keys/values 0", "keys/values 1"]
    assert seen["buttons"] == 3 + 3 + 5
    assert seen["first"] == "cross-attention, layer 1, mean over heads"
    weight = re.fullmatch(r"“was” looks at “animal”\s+(0\.\d\d\d?)", seen["cell"])[1]
    assert float(weight) == pytest.approx(cross[1].weights.mean(0)[2, 1], abs=0.006)
    assert seen["on"] == ["animal", "was"]
    assert seen["clicked"] == "self-attention, layer 0, head 1 (keys/values 0)"
    assert seen["pressed"] == [7]
    assert seen["queries"] == words
    assert seen["hidden"] == "“별” may not see “animal”"
    assert seen["keys"] == [
        "self-attention, layer 0, head 0 (keys/values 0)",
        "self-attention, layer 0, head 0 (keys/values 0)",  # the first
        "self-attention, layer 0, head 1 (keys/values 0)",
        "self-attention, layer 0, head 1 (keys/values 0)",  # the last
        "cross-attention, layer 1, head 1",
        "cross-attention, layer 0, head 1",
        "cross-attention, layer 1, head 1",
    ]
    attention_maps(
        [part._replace(queries=["a"] * 4) for part in cross], tmp_path / "attention.png", "In the same colors"
    )
    assert seen["pixels"] == images[4][1][0].flatten().tolist()


def test_a_decoder_is_first_seen_in_its_last_layer(tmp_path):
    seen = read(draw_page(tmp_path, [attention(layer=layer, n_kv_head=1) for layer in range(3)]), tmp_path)
    assert seen["first"] == "self-attention, layer 2, mean over heads"
    assert seen["groups"] == ["keys/values 0"]
