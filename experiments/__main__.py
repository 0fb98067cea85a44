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
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from interrupt import leave, on_interrupt

if __name__ == "__main__":
    on_interrupt(leave)

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py: read when torch is imported

from config.errors import UserError, command
from experiments import variants
from experiments.claim import Claim, Numbers
from experiments.lab import CACHE, machine_in_words
from experiments.page import DOCS, Measured, judge, judged, of_kept, record, record_variants, write_pages

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
            print(f"{claim.id:4}{known_verdict(claim):24}{claim.english}")
        print("\nvariants, all, page: see --help")
    elif names == ["page"]:
        draw_again()
    else:
        run(chosen(names), afresh=names == ["all"])


def known_verdict(claim: Claim) -> str:
    try:
        found = judged(claim)
    except UserError:
        return "damaged: run it"
    return found.verdict if found else "not yet run"


def chosen(names: Sequence[str]) -> list[str]:
    """The claims of these names, and "variants", in the page's order. Raises `UserError` for an unknown name."""
    known = [*CLAIMS, "variants"]
    if names == ["all"]:
        return known
    wanted = {name.lower() for name in names}
    if unknown := [name for name in names if name.lower() not in map(str.lower, known)]:
        alone = "all or page, which stand alone" if unknown[0] in ("all", "page") else "all, page"
        raise UserError(f"{unknown[0]} is none of the claims; give some of {', '.join(known)}, or {alone}")
    return [name for name in known if name.lower() in wanted]


def draw_again() -> None:
    """Pictures and pages of the numbers that are kept: after a change of words or of a rule."""
    for claim in CLAIMS.values():
        with suppress(UserError):  # which is told below
            if found := judged(claim):
                record(claim, found.measured)
    with suppress(UserError):
        of_kept("variants", record_variants)
    finish()


def finish() -> None:
    """Writes the pages. Raises `UserError` if there are numbers that cannot be read."""
    if damaged := write_pages(CLAIMS.values()):
        raise UserError("; ".join(damaged))


def run(names: Sequence[str], afresh: bool) -> None:
    begin, here = time.perf_counter(), machine_in_words()
    if afresh:
        shutil.rmtree(CACHE, ignore_errors=True)  # so that the time told is that of everything
    for name in names:
        if name == "variants":
            print("variants  every combination of positions, key/value heads, windows and norms", flush=True)
            found = measured(name, variants.measure, here, afresh)
            print_rows(variants.table(found.numbers))
            tell(variants.finding(found.numbers))
            record_variants(found)
            print(f"    {DOCS / 'variants.md'}\n", flush=True)
        else:
            run_claim(CLAIMS[name], here, afresh)
        write_pages(CLAIMS.values())
    what = "everything" if afresh else ", ".join(names)
    print(f"{what}: {(time.perf_counter() - begin) / 60:.1f} minutes")
    finish()


def run_claim(claim: Claim, here: str, afresh: bool) -> None:
    """Measures a claim, prints what was found, and then keeps it."""
    print(f"{claim.id}  {claim.english}", flush=True)
    tell(f"prediction: {claim.prediction}")
    tell(f"rule: {claim.rule}")
    found = judge(claim, measured(claim.id, claim.measure, here, afresh))
    print_rows(found.table)
    tell(f"{found.verdict}: {found.finding}")
    record(claim, found.measured)
    print(f"    {DOCS / 'claims' / claim.id}.png\n", flush=True)


def measured(name: str, measure: Callable[[], Numbers], here: str, afresh: bool) -> Measured:
    """The numbers as they are kept, so that what is judged is what is kept."""
    begin = time.perf_counter()
    numbers = json.loads(json.dumps(measure()))
    found = Measured(numbers, time.perf_counter() - begin, here)
    tell(f"measured in {found.seconds:.1f} s:")
    with suppress(UserError):
        before = None if afresh else of_kept(name, lambda kept: kept)
        if before and before.machine == here:  # the cache may have spared it the training
            return found._replace(seconds=max(found.seconds, before.seconds))
    return found


def tell(text: str) -> None:
    """A paragraph, without the page's emphasis."""
    width = min(shutil.get_terminal_size().columns, 120)
    print(textwrap.fill(text.replace("*", ""), width, initial_indent="    ", subsequent_indent="    "), flush=True)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
