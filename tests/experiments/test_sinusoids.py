import math

import pytest
import torch

from attention import sinusoidal_encoding
from experiments.sinusoids import (
    CLAIMS,
    closest,
    exact_codes,
    explained,
    position_part,
    shift,
    text_scores,
    unexplained,
)
from model import attention_of
from tests.claims import cases, check_rule
from tests.helpers import build, difference, random_tokens


def distances(narrow: float, wide: float) -> dict:
    return {
        "widths": [2, 512],
        "exact": [narrow, wide],
        "apart": [710, 1],
        "float32": [narrow, wide],
        "float32_apart": [710, 1],
        "typical": [1.4, 22.6],
        "rounding": [1e-7, 2e-6],
    }


def shifts(float64: float, rounding: float, random: float = 1.0) -> dict:
    return {
        "ends": [10, 1000],
        "float64": [float64, float64],
        "float32": [1e-3, 2e-3],
        "of_rounding": [rounding, rounding / 2],
        "left": {"sinusoidal": 1e-20, "random": random},
    }


def shares(trained: float, random: float = 0.2, law: float = 1.0) -> dict:
    found = {"sinusoidal, random": [random, random + 0.05, random], "sinusoidal, trained": [trained, trained, trained]}
    for position in ("learned", "rope"):
        found |= {f"{position}, random": [0.1, 0.1, 0.1], f"{position}, trained": [0.3, 0.3, 0.4]}
    texts = {f"{position}, words too": [0.1, 0.1, 0.2] for position in ("sinusoidal", "learned", "rope")}
    return {
        "law": law,
        "uneven": 1e-16,
        "products": {"1": [0.5, 1.0, 0.5], "2": [0.1, 0.5, 1.0]},
        "shares": found | texts,
        "best_head": {name: max(values) for name, values in found.items()},
    }


NUMBERS = {
    "P5": {
        "holds": distances(narrow=1e-4, wide=3.0),
        "holds with a condition": distances(narrow=1e-6, wide=3.0),
        "does not hold": distances(narrow=1e-4, wide=1e-4),
    },
    "P6": {
        "holds": shifts(float64=1e-11, rounding=0.5),
        "holds with a condition": shifts(float64=1e-11, rounding=1.5),
        "does not hold": shifts(float64=1e-6, rounding=0.5),
    },
    "P7": {
        "holds": shares(trained=0.7),
        "holds with a condition": shares(trained=0.4),
        "does not hold": shares(trained=0.24),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("id", "verdict", "numbers"),
    [
        ("P6", "holds with a condition", shifts(float64=1e-11, rounding=0.5, random=0.1)),  # any code would do
        ("P7", "does not hold", shares(trained=0.7, law=0.9)),
    ],
)
def test_each_part_of_a_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_which_condition():
    unique, linear, _ = CLAIMS
    assert "any width but 2. " in unique.finding(distances(narrow=1e-6, wide=3.0))
    assert "condition: float64. " in linear.finding(shifts(float64=1e-11, rounding=1.5))
    assert "a matrix fits at least half of random codes too" in linear.finding(
        shifts(float64=1e-11, rounding=0.5, random=0.1)
    )


@pytest.mark.parametrize("width", [2, 6, 32])
def test_the_closest_two_of_all_pairs(width):
    n = 800
    pos = torch.arange(n)
    angles = [[p / 10000 ** (2 * i / width) for i in range(width // 2)] for p in range(n)]
    codes = torch.tensor([[f(a) for a in row for f in (math.sin, math.cos)] for row in angles], dtype=torch.float64)
    exact, k, float32, k32, *_ = closest(width, n)
    for table, smallest, apart in ((codes, exact, k), (sinusoidal_encoding(pos, width).double(), float32, k32)):
        between = torch.cdist(table, table, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
        assert smallest == pytest.approx(between.min().item(), rel=1e-3)
        assert apart == abs(int(between.argmin()) // n - int(between.argmin()) % n)


def test_a_shift_is_one_rotation_for_all_positions():
    pos = torch.arange(50)
    matrix = shift(7, 16)
    assert difference(sinusoidal_encoding(pos, 16).double() @ matrix.T, sinusoidal_encoding(pos + 7, 16)) < 1e-4
    assert difference(matrix @ matrix.T, torch.eye(16)) < 1e-12
    assert difference(shift(-3, 16) @ shift(10, 16), matrix) < 1e-12


def test_only_codes_of_one_rule_have_a_matrix():
    torch.manual_seed(0)
    assert unexplained(exact_codes(torch.arange(400), 8), 5) < 1e-9
    assert unexplained(torch.randn(400, 8, dtype=torch.float64), 5) > 0.8


def test_what_distance_explains():
    """Against two least-squares fits: with a constant for each query, and with one for each distance as well."""
    torch.manual_seed(0)
    pos = torch.arange(12)
    distance = pos.unsqueeze(1) - pos
    by_query, by_key, by_distance = torch.randn(12, 1), torch.randn(12), torch.randn(23)[distance + 11]
    assert explained(by_distance + 5 * by_query) == pytest.approx(1)
    mixed = by_distance + by_key + by_query
    assert explained(torch.stack((mixed, by_distance))).tolist() == pytest.approx([float(explained(mixed)), 1])
    pairs = [(i, j) for i in range(12) for j in range(i + 1)]
    y = torch.tensor([mixed[i, j] for i, j in pairs], dtype=torch.float64)
    queries = torch.eye(12, dtype=torch.float64)[[i for i, _ in pairs]]
    both = torch.cat((queries, torch.eye(12, dtype=torch.float64)[[i - j for i, j in pairs]]), dim=1)
    left = [(y - x @ torch.linalg.pinv(x) @ y).square().sum() for x in (queries, both)]
    assert float(explained(mixed)) == pytest.approx(float(1 - left[1] / left[0]))
    assert 0.05 < float(explained(mixed)) < 0.95


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope"])
def test_scores_are_those_of_the_model(position):
    model, tokens = build(position=position), random_tokens(2, 20)
    scores = text_scores(model, tokens)
    weights = (scores * model.decoder.blocks[0].attention.scale).masked_fill(torch.ones(20, 20).triu(1) > 0, -torch.inf)
    assert difference(weights.softmax(-1), attention_of(model, tokens)[0][2]) < 1e-5


def test_the_position_part_of_scores():
    model = build(position="learned", d_model=64)
    block, table = (
        model.decoder.blocks[0],
        model.decoder.position.weight * model.decoder.blocks[0].attention_norm.weight,
    )
    q, k = (table @ getattr(block.attention, name).weight.T for name in ("q_proj", "k_proj"))
    by_hand = torch.stack([q[:, 16 * h : 16 * h + 16] @ k[:, 16 * h : 16 * h + 16].T for h in range(4)])
    assert difference(position_part(model), by_hand) < 1e-3
    rotary = position_part(build(position="rope", d_model=64))
    assert explained(rotary).min() > 0.999
    assert rotary.shape == (4, 64, 64)
