import pytest
import torch

from attention import rotary_angles
from config.schema import RopeScaling
from experiments.lengths import CLAIMS, KINDS, REMEDIES, TRAINED, loss_by_block, scaled
from tests.claims import cases, check_rule
from tests.helpers import build, difference, random_tokens


def losses(**rises: float) -> dict:
    found = {}
    for name in dict.fromkeys((*TRAINED, *REMEDIES)):
        rise = rises.get(name.replace(", ", "_"), 0.5)
        after = [1.4 + rise * place / 13 for place in range(14)]
        found[name] = [[2.0, 1.4 + noise] + ([] if name == "learned" else after) for noise in (0, 0.01, 0.02)]
    return {"losses": found}


NUMBERS = {
    "P8": {
        "holds": losses(sinusoidal=2.0, rotary=0.0),
        "holds with a condition": losses(sinusoidal=2.0, rotary=1.0, rotary_yarn=0.0),
        "does not hold": losses(sinusoidal=0.0, rotary=0.0),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_a_rotary_answer_that_never_answers_is_none():
    check_rule(CLAIMS, "P8", "does not hold", losses(sinusoidal=2.0, rotary=1.0))


def test_which_condition():
    claim = CLAIMS[0]
    for numbers, words in (
        (losses(sinusoidal=2.0, rotary=1.0, rotary_yarn=0.0), "with yarn scaling; plain"),
        (losses(sinusoidal=2.0, rotary=1.0, rotary_window=0.0), "with a window of 32; plain"),
    ):
        assert words in claim.finding(numbers)
        assert ("The window alone" in claim.finding(numbers)) == ("window" in words)
    both = losses(sinusoidal=2.0, sinusoidal_window=0.0, rotary=1.0, rotary_window=0.0)
    assert "The window alone" not in claim.finding(both)


def test_scaled_positions_keep_the_weights():
    model = build(position="rope")
    tokens, pos = random_tokens(1, 40), torch.arange(40)
    for kind in KINDS:
        longer = scaled(model, kind)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), longer.parameters(), strict=True))
        assert difference(longer(tokens), model(tokens)) > 0.01
    linear = scaled(model, "linear").decoder.angles(pos)
    assert difference(linear, rotary_angles(pos, 8) / 8) < 1e-5
    yarn = RopeScaling(kind="yarn", factor=8.0, original_max_seq_len=64)
    assert difference(scaled(model, "yarn").decoder.angles(pos), rotary_angles(pos, 8, scaling=yarn)) == 0


@pytest.mark.parametrize("position", ["none", "learned"])
def test_loss_by_block(position):
    """Against the loss of one token after another."""
    model, rows = build(position=position, max_seq_len=64), random_tokens(3, 129)
    found = loss_by_block(model, rows)
    assert len(found) == (2 if position == "learned" else 4)
    with torch.no_grad():
        logits = model(rows[:, :64]).float().log_softmax(-1)
    for block in range(2):
        places = range(32 * block, 32 * block + 32)
        by_hand = [-logits[row, place, rows[row, place + 1]].item() for row in range(3) for place in places]
        assert found[block] == pytest.approx(sum(by_hand) / len(by_hand), rel=0.02)  # autocast may round
