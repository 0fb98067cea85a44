"""What every rule must withstand, shared by the tests in tests/experiments."""

import json

from experiments.claim import CONDITION, VERDICTS, Claim, Numbers

Cases = dict[str, dict[str, Numbers]]  # of each claim, for each verdict, numbers that must lead to it


def cases(numbers: Cases) -> list[tuple[str, str, Numbers]]:
    """For parametrize: (id, verdict, numbers)."""
    return [(id, verdict, found) for id, verdicts in numbers.items() for verdict, found in verdicts.items()]


def check_rule(claims: list[Claim], id: str, verdict: str, numbers: Numbers) -> None:
    """The rule gives this verdict, and the numbers can be kept, told, tabled and drawn."""
    from matplotlib.figure import Figure

    claim = next(claim for claim in claims if claim.id == id)
    assert verdict in VERDICTS
    assert json.loads(json.dumps(numbers)) == numbers, "numbers must be what JSON gives back"
    assert claim.verdict(numbers) == verdict
    heading, *rows = claim.table(numbers)
    assert rows
    assert all(len(row) == len(heading) and all(isinstance(cell, str) for cell in row) for row in rows)
    assert len(claim.finding(numbers)) > 40
    assert claim.finding(numbers).startswith("The condition: ") == (verdict == CONDITION)
    figure = Figure((8, 4.5), layout="constrained")
    claim.draw(numbers, figure)
    assert figure.axes
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes if axes.lines)
