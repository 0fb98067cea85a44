import pytest
import torch
from matplotlib.figure import Figure

from experiments.order import CLAIMS, compare, cost_of_disorder, encoder, order_blind, shuffling_error
from tests.claims import cases, check_rule
from tests.helpers import build, difference, random_tokens


def order(none: float, blind: float, words: int, decoder: float, disorder: float = 0.5) -> dict:
    cuts = {"characters, no spaces": 1, "characters": 1, "pieces (BPE)": words, "words": words}
    return {
        "shuffled": {"none": none, "sinusoidal": blind},
        "pair": {name: {"same_bag": same, "distance": 1e-16 if same else 0.8} for name, same in cuts.items()},
        "losses": {
            "order-blind": [1.80, 1.81, 1.82],
            "no positions": [decoder, decoder + 0.01, decoder],
            "sinusoidal": [1.3, 1.31, 1.3],
            "rotary": [1.2, 1.2, 1.2],
        },
        "disorder": {
            "order-blind": [0.0] * 3,
            "no positions": [disorder, disorder + 0.02, disorder],
            "sinusoidal": [1.0] * 3,
            "rotary": [1.0] * 3,
        },
    }


NUMBERS = {
    "A3": {
        "holds": order(1e-15, 0.5, words=1, decoder=1.80),
        "holds with a condition": order(1e-15, 0.5, words=0, decoder=1.4),
        "does not hold": order(1e-3, 0.5, words=1, decoder=1.80),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("id", "verdict", "numbers"),
    [
        ("A3", "holds with a condition", order(1e-15, 0.5, words=1, decoder=1.4)),  # the decoder alone
        ("A3", "holds with a condition", order(1e-15, 0.5, words=0, decoder=1.80)),  # the pair alone
        ("A3", "holds", order(1e-15, 0.5, words=1, decoder=1.4, disorder=0.01)),  # it gains, but not by order
        ("A3", "does not hold", order(1e-15, 1e-5, words=1, decoder=1.80)),  # positions bring no order back
    ],
)
def test_each_part_of_a_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_no_difference_has_no_bar():
    numbers = order(1e-15, 0.5, words=0, decoder=1.4)
    numbers["pair"]["characters"]["distance"] = 0.0
    figure = Figure(layout="constrained")
    CLAIMS[0].draw(numbers, figure)
    axes = figure.axes[0]
    assert [bar.get_width() > 0 for bar in axes.patches] == [True, True, True, False, True, True]
    assert [text.get_position()[1] for text in axes.texts if text.get_text() == "exactly 0"] == [3]


def last_logits(model, tokens):
    with torch.no_grad():
        return model(tokens)[:, -1]


def test_an_order_blind_decoder_sees_a_bag():
    tokens = random_tokens(1, 20)
    shuffled = torch.cat((tokens[:, :19].flip(1), tokens[:, 19:]), dim=1)
    other = tokens.clone()
    other[0, 3] = (other[0, 3] + 1) % 31
    plain, blind = build(position="none"), build(position="none")
    order_blind(blind)
    assert difference(last_logits(blind, shuffled), last_logits(blind, tokens)) < 1e-4
    assert difference(last_logits(plain, shuffled), last_logits(plain, tokens)) > 0.1
    assert difference(last_logits(blind, other), last_logits(blind, tokens)) > 0.1  # but the whole bag
    rows = random_tokens(50, 21)
    assert abs(cost_of_disorder(blind, rows)) < 1e-4
    assert abs(cost_of_disorder(plain, rows)) > 1e-3


def test_shuffling_shows_in_an_encoder_with_positions_alone():
    assert shuffling_error(encoder("none"), rounds=2) < 1e-12
    assert shuffling_error(encoder("rope"), rounds=2) > 1e-2


def test_the_same_bag():
    same, other = compare(list("abcab"), list("bacba")), compare(list("aabb"), list("abbb"))
    assert same["same_bag"] == 1
    assert same["distance"] < 1e-12
    assert other["same_bag"] == 0
    assert other["distance"] > 1e-3
