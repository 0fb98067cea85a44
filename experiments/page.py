"""docs/claims.md and docs/variants.md, written from what was measured, docs/claims/NAME.json, and the pictures."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import write_whole
from experiments import variants
from experiments.claim import KOREAN, VERDICTS, Claim, Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
THEMES = {"A": "Attention", "P": "Positions", "M": "Many heads", "F": "Feed-forward, Add & Norm"}
OPENING = """# The claims, run

Essays and textbooks explain attention, positional encoding and multi-head attention with claims that are seldom run.
Here each is an experiment on a laptop: what it predicts was written down first, with the rule that decides; then it was
measured. Where a first measurement showed that the experiment or its rule was not fit to decide, that is said.
`python -m experiments` lists them, `python -m experiments A8` runs one and puts its numbers here, `python -m
experiments all` runs all, and writes this page. Models are small and trained for seconds: a verdict is about these
measurements, whose numbers say how far it goes. What every variant costs and yields, without a verdict:
[variants.md](variants.md).
"""
VARIANTS = f"""# The variants, side by side

Positions × key/value heads × window × place of the norm: every combination is trained alike ({variants.STEPS} steps on
the built-in stories, two layers, width 64, a context of {variants.CONTEXT}) with three seeds. Bits per byte over the
whole validation split, their mean and half of what they spread over; operations of a forward pass, of which the matrix
products count; speeds of one text ({variants.PROMPT} tokens read, {variants.NEW} written), medians of {variants.ROUNDS}
runs in turn. Written by `python -m experiments variants`.
"""


def record(claim: Claim, numbers: Numbers, seconds: float) -> None:
    """Keeps what a claim measured, and draws it."""
    keep(claim.id, numbers, seconds)
    picture(claim.id, claim.draw, numbers)


def record_variants(numbers: Numbers, seconds: float) -> None:
    """Keeps what was measured of the variants, and draws it."""
    keep("variants", numbers, seconds)
    picture("variants", variants.draw_variants, numbers, (10, 7))
    picture("encodings", variants.draw_encodings, numbers, (12, 7))


def write_pages(claims: Iterable[Claim]) -> None:
    """Of all that was measured."""
    write_whole(DOCS / "claims.md", claims_page(claims))
    if kept := recorded("variants"):
        write_whole(DOCS / "variants.md", variants_page(kept[0]))


def keep(name: str, numbers: Numbers, seconds: float) -> None:
    (DOCS / "claims").mkdir(parents=True, exist_ok=True)
    kept = {"seconds": round(seconds, 1), "numbers": numbers}
    write_whole(DOCS / "claims" / f"{name}.json", json.dumps(kept, ensure_ascii=False) + "\n")


def picture(name: str, draw: Callable[[Numbers, "Figure"], None], numbers: Numbers, inches=(8, 4.5)) -> None:
    """Draws docs/claims/NAME.png."""
    from matplotlib.figure import Figure

    figure = Figure(inches, layout="constrained")
    draw(numbers, figure)
    figure.savefig(DOCS / "claims" / f"{name}.png", dpi=100, format="png")


def recorded(name: str) -> tuple[Numbers, float] | None:
    """What was measured last, and the seconds that it took."""
    file = DOCS / "claims" / f"{name}.json"
    if not file.exists():
        return None
    kept = json.loads(file.read_text("utf-8"))
    return kept["numbers"], kept["seconds"]


def claims_page(claims: Iterable[Claim]) -> str:
    """The whole page, of the claims that have been measured."""
    found = [(claim, *kept) for claim in claims if (kept := recorded(claim.id))]
    verdicts = [claim.verdict(numbers) for claim, numbers, _ in found]
    counts = ", ".join(f"{verdicts.count(verdict)} × *{verdict}*" for verdict in VERDICTS)
    rows = [["ID", "claim", "주장", "verdict", "판정", "seconds"]]
    for (claim, _, seconds), verdict in zip(found, verdicts, strict=True):
        link = f"[{claim.english}](#{claim.id.lower()})"
        rows.append([claim.id, link, claim.korean, verdict, KOREAN[verdict], f"{seconds:,.0f}"])
    minutes = sum(seconds for *_, seconds in found) / 60
    parts = [OPENING, f"{len(found)} claims: {counts}; {minutes:.0f} minutes in all.\n", markdown(rows)]
    for letter, theme in THEMES.items():
        sections = [section(claim, numbers) for claim, numbers, _ in found if claim.id[0] == letter]
        parts += [f"## {theme}\n", *sections] if sections else []
    return "\n".join(parts)


def section(claim: Claim, numbers: Numbers) -> str:
    verdict = claim.verdict(numbers)
    return "\n".join(
        [
            f"### {claim.id}\n",
            f"**{claim.english}** {claim.korean}\n",
            f"*Prediction.* {claim.prediction}\n",
            f"*Rule.* {claim.rule}.\n",
            *([f"*Changed after a first measurement.* {claim.changed}\n"] if claim.changed else []),
            markdown(claim.table(numbers)),
            f"![{claim.id}](claims/{claim.id}.png)\n",
            f"**{verdict}** ({KOREAN[verdict]}). {claim.finding(numbers)}\n",
        ]
    )


def variants_page(numbers: Numbers) -> str:
    pictures = "![Bits per byte of every variant](claims/variants.png)\n", "![Encodings](claims/encodings.png)\n"
    return "\n".join(
        [VARIANTS, markdown(variants.table(numbers)), pictures[0], "## The codes of positions\n", pictures[1]]
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    heading, *rest = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [heading, ["---"] * len(heading), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
