"""docs/claims.md and docs/variants.md, written from what was measured, docs/claims/NAME.json, and the pictures."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from checkpoint import write_whole
from config.errors import UserError
from experiments import variants
from experiments.claim import KOREAN, VERDICTS, Claim, Numbers, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
DOCS = Path(__file__).parents[1] / "docs"
THEMES = {"A": "Attention", "P": "Positions", "M": "Many heads", "F": "Feed-forward, Add & Norm"}
OPENING = """# The claims, run

Essays and textbooks explain attention, positional encoding and multi-head attention with claims that are seldom run.
Here each is an experiment on a laptop: a prediction, a rule that decides and can refute it, a measurement, a verdict.
`python -m experiments` lists them, `python -m experiments A8` runs one and puts its numbers here, `python -m
experiments all` runs all, and writes this page. Models are small and trained for seconds: a verdict is about these
measurements, whose numbers say how far it goes. What every variant costs and yields, without a verdict:
[variants.md](variants.md).
"""
VARIANTS = f"""# The variants, side by side

Positions × key/value heads × window × place of the norm: every combination is trained for {variants.STEPS} steps on the
built-in stories (two layers, width 64, a context of {variants.CONTEXT}) with three seeds. The start is not the same for
all: with sinusoidal positions the words, which are also the rows of the output, start with a deviation of 1/√d_model
and are multiplied by √d_model; with the others they start with 0.02 and are not. Matrices start with 0.02 or less with
pre-norm, by Glorot's rule with post-norm. Bits per byte over the whole validation split, their mean and half of what
they spread over; operations of a forward pass, of which the matrix products count; speeds of one text
({variants.PROMPT} tokens read, {variants.NEW} written), medians of {variants.ROUNDS} runs in turn. Written by
`python -m experiments variants`.
"""


class Measured(NamedTuple):
    numbers: Numbers
    seconds: float
    """The most that it took there; models that another claim had trained before cost it nothing."""
    machine: str


class Judged(NamedTuple):
    claim: Claim
    measured: Measured
    verdict: Verdict
    finding: str
    table: list[list[str]]


def record(claim: Claim, measured: Measured) -> None:
    """Keeps what a claim measured, and draws it."""
    keep(claim.id, measured)
    picture(claim.id, claim.draw, measured.numbers)


def record_variants(measured: Measured) -> None:
    """Keeps what was measured of the variants, and draws it."""
    keep("variants", measured)
    picture("variants", variants.draw_variants, measured.numbers, (10, 7))
    picture("encodings", variants.draw_encodings, measured.numbers, (12, 7))


def write_pages(claims: Iterable[Claim]) -> list[str]:
    """Of all that was measured. Returns what there is to say of numbers that are damaged."""
    found, damaged = [], []
    for claim in claims:
        try:
            found.append(judged(claim))
        except UserError as error:
            damaged.append(str(error))
    write_whole(DOCS / "claims.md", claims_page(filter(None, found)))
    try:
        if text := of_kept("variants", variants_page):
            write_whole(DOCS / "variants.md", text)
    except UserError as error:
        damaged.append(str(error))
    return damaged


def kept_in(name: str) -> Path:
    return DOCS / "claims" / f"{name}.json"


def keep(name: str, measured: Measured) -> None:
    kept_in(name).parent.mkdir(parents=True, exist_ok=True)
    kept = {"seconds": round(measured.seconds, 1), "machine": measured.machine, "numbers": measured.numbers}
    write_whole(kept_in(name), json.dumps(kept, ensure_ascii=False) + "\n")


def picture(name: str, draw: Callable[[Numbers, "Figure"], None], numbers: Numbers, inches=(8, 4.5)) -> None:
    """Draws docs/claims/NAME.png."""
    from matplotlib.figure import Figure

    figure = Figure(inches, layout="constrained")
    draw(numbers, figure)
    figure.savefig(DOCS / "claims" / f"{name}.png", dpi=100, format="png")


def of_kept(name: str, function: Callable[[Measured], T]) -> T | None:
    """Of what was measured last; None if nothing was. Raises `UserError` for numbers that are damaged, or of another
    version of the experiment."""
    if not kept_in(name).exists():
        return None
    try:
        kept = json.loads(kept_in(name).read_text("utf-8"))
        return function(Measured(kept["numbers"], float(kept["seconds"]), str(kept["machine"])))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        text = f"{kept_in(name)} is damaged, or of another version: python -m experiments {name} measures anew"
        raise UserError(text) from None


def judge(claim: Claim, measured: Measured) -> Judged:
    numbers = measured.numbers
    return Judged(claim, measured, claim.verdict(numbers), claim.finding(numbers), claim.table(numbers))


def judged(claim: Claim) -> Judged | None:
    """What was measured last. Raises `UserError` as `of_kept` does."""
    return of_kept(claim.id, partial(judge, claim))


def claims_page(found: Iterable[Judged]) -> str:
    """The whole page."""
    found = list(found)
    rows = [["ID", "claim", "주장", "verdict", "판정", "seconds"]]
    for claim, measured, verdict, *_ in found:
        link = f"[{claim.english}](#{claim.id.lower()})"
        rows.append([claim.id, link, claim.korean, verdict, KOREAN[verdict], f"{measured.seconds:,.0f}"])
    parts = [OPENING, summary(found), markdown(rows)]
    for letter, theme in THEMES.items():
        sections = [section(one) for one in found if one.claim.id[0] == letter]
        parts += [f"## {theme}\n", *sections] if sections else []
    return "\n".join(parts)


def summary(found: Sequence[Judged]) -> str:
    verdicts = [one.verdict for one in found]
    counts = ", ".join(f"{verdicts.count(verdict)} × *{verdict}*" for verdict in VERDICTS)
    minutes = sum(one.measured.seconds for one in found) / 60
    machines = " or ".join(sorted({one.measured.machine for one in found}))
    changed = [one.claim for one in found if one.claim.changed]
    lines = [
        f"{len(found)} claims: {counts}. They took {minutes:.0f} minutes on {machines}; of those that share a trained "
        "model the first is charged with the training."
    ]
    if changed:
        lines.append(f"\nOf {links(changed)} the experiment or the rule is not as it was first written; each says why.")
    for verdict in VERDICTS:
        if turned := [claim for claim in changed if claim.first_verdict == verdict]:
            lines.append(f"The first verdict on {links(turned)} was *{verdict}*.")
    return "\n".join(lines) + "\n"


def links(claims: Iterable[Claim]) -> str:
    return ", ".join(f"[{claim.id}](#{claim.id.lower()})" for claim in claims)


def section(one: Judged) -> str:
    claim, _, verdict, finding, table = one
    return "\n".join(
        [
            f"### {claim.id}\n",
            f"**{claim.english}** {claim.korean}\n",
            f"*Prediction.* {claim.prediction}\n",
            f"*Rule.* {claim.rule}.\n",
            *([f"*History.* {claim.changed}\n"] if claim.changed else []),
            markdown(table),
            f"![{claim.id}](claims/{claim.id}.png)\n",
            f"**{verdict}** ({KOREAN[verdict]}). {finding}\n",
        ]
    )


def variants_page(measured: Measured) -> str:
    return f"""{VARIANTS}
{measured.seconds / 60:.0f} minutes on {measured.machine}.

{markdown(variants.table(measured.numbers))}
![Bits per byte of every variant](claims/variants.png)

{variants.finding(measured.numbers)}

## The codes of positions

![Encodings](claims/encodings.png)
"""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    heading, *rest = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [heading, ["---"] * len(heading), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
