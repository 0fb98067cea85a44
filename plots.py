"""Pictures. matplotlib is imported when one is drawn, because it takes a second."""

import json
from pathlib import Path


def loss_curve(metrics: Path, picture: Path) -> None:
    """Draws the losses in a run's metrics.jsonl against the step, as a PNG; dashed, the least that is possible."""
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
    figure.savefig(picture, dpi=120)
    plt.close(figure)
