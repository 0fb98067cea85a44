"""The picture of a run's losses."""

import json
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from plots import loss_curve


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
