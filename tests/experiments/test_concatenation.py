import math

import pytest
import torch

from attention import sinusoidal_encoding
from experiments.concatenation import ADD, ADD_WIDE, CLAIMS, PROJECT, WIDEN, WordAndPosition, algebra
from tests.claims import cases, check_rule
from tests.helpers import build, difference, random_tokens


def joining(project: float, widen: float, blocks: int = 4) -> dict:
    losses = {ADD: [1.40, 1.41, 1.42], PROJECT: [project] * 3, ADD_WIDE: [1.2, 1.21, 1.22], WIDEN: [widen] * 3}
    counts = {ADD: 100, PROJECT: 100, ADD_WIDE: 100 * blocks, WIDEN: 100 * blocks}
    return {
        "losses": losses,
        "parameters": {name: 2 * count for name, count in counts.items()},
        "block_weights": counts,
        "operations": {ADD: 1000, PROJECT: 1050, ADD_WIDE: 3000, WIDEN: 3000},
        "seconds": {ADD: 0.01, PROJECT: 0.011, ADD_WIDE: 0.02, WIDEN: 0.02},
    }


def injected(project: float, damage: float) -> dict:
    return {
        "algebra": {"error": 1e-15, "adding": 0.0},
        "losses": joining(project, 1.2)["losses"],
        "damage": {ADD: [0.8, 0.9, 1.0], PROJECT: [0.8] * 3, ADD_WIDE: [0.8, 0.8, 0.9], WIDEN: [damage] * 3},
    }


NUMBERS = {
    "P1": {
        "holds": joining(project=1.5, widen=1.25),
        "holds with a condition": joining(project=1.41, widen=1.25),
        "does not hold": joining(project=1.5, widen=1.1),
    },
    "P2": {
        "holds": injected(project=1.41, damage=0.1),
        "holds with a condition": injected(project=1.6, damage=0.8),
        "does not hold": injected(project=1.41, damage=0.8),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("id", "verdict", "numbers"),
    [
        ("P1", "does not hold", joining(project=1.5, widen=1.25, blocks=2)),
    ],
)
def test_each_part_of_a_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(("project", "word"), [(1.5, "worse than"), (1.41, "as good as"), (1.3, "better than")])
def test_how_good_projecting_is(project, word):
    assert f"is {word} adding: a loss of {project:.3f}" in CLAIMS[0].finding(joining(project, widen=1.25))


def test_concatenating_and_projecting_is_adding_with_two_matrices():
    tokens = random_tokens(2, 9)
    codes = sinusoidal_encoding(torch.arange(9), 16)
    joined = WordAndPosition(31, 16, "project")
    words = joined.word.weight[tokens] * 4  # √16
    by_hand = words @ joined.joint.weight[:, :16].T + codes @ joined.joint.weight[:, 16:].T
    assert difference(joined(tokens), by_hand) < 1e-5
    wide = WordAndPosition(31, 16, "widen")
    assert difference(wide(tokens)[..., :8], wide.word.weight[tokens] * math.sqrt(8)) < 1e-6
    assert difference(wide(tokens)[1, :, 8:], sinusoidal_encoding(torch.arange(9), 8)) == 0


def test_adding_is_what_the_trunk_does():
    trunk, own = build(position="sinusoidal"), WordAndPosition(31, 32, "add")
    own.word.weight = trunk.decoder.embed.weight
    tokens, pos = random_tokens(2, 9), torch.arange(9)
    assert difference(own(tokens), trunk.decoder.embedding(tokens, pos, 9)) < 1e-6
    own.order = torch.tensor([3, 1, 2, 0, 4, 5, 6, 7, 8, 9])  # of a longer text
    assert difference(own(tokens), trunk.decoder.embedding(tokens, own.order[:9], 9)) < 1e-6


def test_the_algebra_of_concatenation():
    found = algebra(width=32)
    assert found["error"] < 1e-13
    assert found["adding"] < 1e-13
