"""Every documented claim about attention, positions and heads, run: a prediction, a measurement, a picture, a verdict.

python -m experiments             lists the claims
python -m experiments A8 P6       runs some
python -m experiments variants    a table over the design's variants, without a verdict
python -m experiments all         runs everything, and writes docs/claims.md anew
python -m experiments page        draws and writes again what was measured, without measuring
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module

from interrupt import leave, on_interrupt

if __name__ == "__main__":
    on_interrupt(leave)

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py: read when torch is imported

from config.errors import UserError, command
from experiments import variants
from experiments.claim import Claim, Numbers
from experiments.lab import CACHE
from experiments.page import DOCS, record, record_variants, recorded, write_pages

NAMES = ["recurrence", "scores", "roles", "depth", "patterns", "order", "concatenation", "positions", "sinusoids"]
NAMES += ["lengths", "heads", "ensemble", "costs", "caches"]
THEMES = [import_module(f"experiments.{name}") for name in NAMES]
ORDER = "APMF"
CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in sorted(
        (claim for theme in THEMES for claim in theme.CLAIMS),
        key=lambda claim: (ORDER.index(claim.id[0]), int(claim.id[1:])),
    )
}


@command
def main(argv: Sequence[str] | None = None) -> None:
    names = sys.argv[1:] if argv is None else list(argv)
    if "-h" in names or "--help" in names:
        print((__doc__ or "").strip())
    elif not names:
        for claim in CLAIMS.values():
            kept = recorded(claim.id)
            print(f"{claim.id:4}{claim.verdict(kept[0]) if kept else 'not yet run':24}{claim.english}")
    elif names == ["page"]:
        draw_again()
    else:
        run(chosen(names), afresh="all" in names)


def chosen(names: Sequence[str]) -> list[str]:
    """The claims of these names, and "variants", in the page's order. Raises `UserError` for an unknown name."""
    known = [*CLAIMS, "variants"]
    wanted = {name.lower() for name in names}
    if unknown := [name for name in names if name.lower() not in {"all", *map(str.lower, known)}]:
        raise UserError(f"there is no claim {unknown[0]}: all, or some of {', '.join(known)}")
    return [name for name in known if "all" in wanted or name.lower() in wanted]


def draw_again() -> None:
    """Pictures and pages of the numbers that are kept: after a change of words or of a rule."""
    for claim in CLAIMS.values():
        if kept := recorded(claim.id):
            record(claim, *kept)
    if kept := recorded("variants"):
        record_variants(*kept)
    write_pages(CLAIMS.values())


def run(names: Sequence[str], afresh: bool) -> None:
    begin = time.perf_counter()
    if afresh:
        shutil.rmtree(CACHE, ignore_errors=True)  # so that the time told is that of everything
    for name in names:
        if name == "variants":
            numbers, seconds = measured(variants.measure)
            record_variants(numbers, seconds)
            write_pages(CLAIMS.values())
            print_rows(variants.table(numbers))
            print(f"    {seconds:.1f} s: {DOCS / 'variants.md'}\n", flush=True)
        else:
            run_claim(CLAIMS[name])
    print(f"{len(names)} of {len(CLAIMS) + 1} experiments: {(time.perf_counter() - begin) / 60:.1f} minutes")


def run_claim(claim: Claim) -> None:
    """Measures a claim, prints what was found and writes the page anew."""
    print(f"{claim.id}  {claim.english}\n    prediction: {claim.prediction}\n    rule: {claim.rule}", flush=True)
    numbers, seconds = measured(claim.measure)
    record(claim, numbers, seconds)
    write_pages(CLAIMS.values())
    print_rows(claim.table(numbers))
    print(f"    {claim.verdict(numbers)}: {claim.finding(numbers)}")
    print(f"    {seconds:.1f} s: {DOCS / 'claims' / claim.id}.png\n", flush=True)


def measured(measure: Callable[[], Numbers]) -> tuple[Numbers, float]:
    """The numbers as they are kept, so that what is judged is what is kept; and the seconds."""
    begin = time.perf_counter()
    numbers = json.loads(json.dumps(measure()))
    return numbers, time.perf_counter() - begin


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
