import pytest
import torch

from attention import sinusoidal_encoding
from experiments.positions import CLAIMS, discriminant, separate, unscaled, widest
from tests.claims import cases, check_rule
from tests.helpers import build, difference, random_tokens


def probes(at_8: float, position: float, word: float) -> dict:
    return {
        "widths": [8, 64, 512],
        "word": [at_8, 0.9, word],
        "position": [at_8, 0.9, position],
        "trained": {"word": 0.9, "position": 0.8},
    }


def ratios(scaled: float, plain: float) -> dict:
    return {
        "widths": [32, 64, 512],
        "start": {"with √d_model": [scaled] * 3, "without": [plain] * 3},
        "trained": {"with √d_model": [scaled, scaled, scaled * 1.1], "without": [plain] * 3},
        "losses": {"with √d_model": [1.3, 1.31, 1.3], "without": [1.4, 1.41, 1.4]},
    }


NUMBERS = {
    "P3": {
        "holds": probes(at_8=0.1, position=0.99, word=0.99),
        "holds with a condition": probes(at_8=0.1, position=0.5, word=0.99),
        "does not hold": probes(at_8=0.1, position=0.5, word=0.5),
    },
    "P4": {
        "holds": ratios(scaled=0.1, plain=0.2),
        "holds with a condition": ratios(scaled=0.1, plain=3.0),
        "does not hold": ratios(scaled=0.7, plain=3.0),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("id", "verdict", "numbers"),
    [
        ("P3", "holds with a condition", probes(at_8=0.97, position=0.99, word=0.99)),  # width is not the reason
    ],
)
def test_each_part_of_a_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_which_condition():
    separable, faint = CLAIMS
    assert "the word alone. " in separable.finding(probes(at_8=0.1, position=0.5, word=0.99))
    assert "the position alone. " in separable.finding(probes(at_8=0.1, position=0.99, word=0.5))
    assert "width is not the reason" in separable.finding(probes(at_8=0.97, position=0.99, word=0.99))
    said = faint.finding(ratios(scaled=0.1, plain=3.0))
    assert "these cases alone: start, with √d_model; trained, with √d_model. " in said


def test_the_spread_is_within_a_variant():
    assert widest({"one": [1.0, 1.2], "other": [9.0, 9.1]}) == pytest.approx(0.2)


def test_without_the_factor_words_stay_as_they_are():
    model = build(position="sinusoidal")
    unscaled(model)
    tokens, pos = random_tokens(2, 9), torch.arange(9)
    by_hand = model.decoder.embed.weight[tokens] + sinusoidal_encoding(pos, 32)
    assert difference(model.decoder.embedding(tokens, pos, 9), by_hand) < 1e-6


def test_a_discriminant_chooses_the_nearest_mean():
    """Nearest by Mahalanobis' distance, computed one by one."""
    torch.manual_seed(0)
    label = torch.arange(600) % 3
    x = torch.randn(600, 4) @ torch.randn(4, 4) + 2 * torch.randn(3, 4)[label]
    means = torch.stack([x[label == i].mean(0) for i in range(3)]).double()
    within = torch.cat([x[label == i] - x[label == i].mean(0) for i in range(3)]).double()
    inverse = torch.linalg.inv(within.T @ within / 600)
    nearest = [min(range(3), key=lambda i: (row - means[i]) @ inverse @ (row - means[i])) for row in x.double()]
    weight, bias = discriminant(x, label, 3)
    assert ((x @ weight + bias).argmax(-1) == torch.tensor(nearest)).float().mean() > 0.99


def test_words_and_positions_are_told_apart_when_they_lie_in_different_directions():
    words, codes = torch.zeros(250, 40), torch.zeros(200, 40)
    words[:, :20], codes[:, 20:] = torch.randn(250, 20), torch.randn(200, 20)
    assert separate(words, codes) == {"word": 1.0, "position": 1.0}
    hidden = separate(words, torch.zeros(200, 40))
    assert hidden["word"] == 1.0
    assert hidden["position"] < 0.05
