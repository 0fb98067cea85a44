import pytest
import torch

from experiments import heads
from experiments.heads import CLAIMS, COUNTS
from tests.claims import cases, check_rule
from tests.helpers import build, random_tokens


def m1(**several: float) -> dict:
    """One head is right half the time, several as often as told for each task."""

    def of(accuracy: float, n: int) -> dict:
        return {"accuracy": [accuracy, accuracy + 0.01, accuracy - 0.01], "weights": [[0.6 / n, 0.3 / n]] * 3}

    found = {name: {str(n): of(0.5 if n == 1 else share, n) for n in COUNTS} for name, share in several.items()}
    return {"found": found, "blend": dict.fromkeys(several, 0.56)}


def m4(eight_loss: float, eight_patterns: float) -> dict:
    def of(loss: float, patterns: float, n: int) -> dict:
        return {"loss": [loss, loss + 0.01, loss], "patterns": [patterns] * 3} | {
            name: [64.0 / n] * 3 for name in ("rank", "rank_1_percent")
        }

    by = {str(n): of(2.0, 1.0, n) for n in COUNTS} | {"8": of(eight_loss, eight_patterns, 8)}
    return {"by_heads": by, "head_dim": {str(n): 64 // n for n in COUNTS}}


def m5(purity: float, after: float, without: float) -> dict:
    return {
        "with": [1.0, 1.01, 1.0],
        "without": [without] * 3,
        "error": [1e-16] * 3,
        "purity": [purity] * 3,
        "output": [1.0] * 3,
        "after": [after] * 3,
    }


NUMBERS = {
    "M1": {
        "holds": m1(two=0.9, four=0.8),
        "holds with a condition": m1(two=0.5, four=0.8),
        "does not hold": m1(two=0.5, four=0.45),
    },
    "M4": {
        "holds": m4(1.5, 7.6),
        "holds with a condition": m4(1.5, 3.0),
        "does not hold": m4(2.0, 7.6),
    },
    "M5": {
        "holds": m5(0.95, 0.95, 1.0),
        "holds with a condition": m5(0.4, 0.95, 1.0),
        "does not hold": m5(0.4, 0.6, 1.0),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (m5(0.4, 0.6, 1.0), "the parts do not stay where they were, and"),
        (m5(0.95, 0.6, 1.5), "Not so: doing without W_O costs more than seeds differ, and"),
        (m5(0.95, 0.95, 1.5), "The condition: doing without W_O costs more than seeds differ, but"),
        (m5(0.4, 0.6, 1.5), "where they were, doing without W_O costs more than seeds differ, and"),
    ],
)
def test_concatenation_says_which_half_failed(numbers, words):
    assert words in CLAIMS[2].finding(numbers)


def test_a_task_that_one_head_solves_shows_no_gain():
    numbers = m1(two=1.0, four=0.9)
    assert "unequal weights" not in CLAIMS[0].finding(numbers)
    numbers["found"]["two"]["1"]["accuracy"] = [1.0, 1.0, 0.999]
    assert "With two one head hardly errs, and several have" in CLAIMS[0].finding(numbers)


@pytest.mark.parametrize(
    ("eight", "words"), [(1.5, "clearly lower"), (2.0, "not clearly different"), (2.5, "clearly higher")]
)
def test_how_the_loss_of_eight_heads_compares(eight, words):
    assert f"With eight heads the loss is {words} (" in CLAIMS[1].finding(m4(eight, 3.0))
    assert ("lowest with 1 head)" in CLAIMS[1].finding(m4(eight, 3.0))) == (eight > 1.5)


@pytest.mark.parametrize(("n_value", "n_place", "n"), [(8, 8, 2), (2, 6, 4)])
def test_a_query_is_answered_by_the_values_at_its_places_in_its_order(n_value, n_place, n):
    inputs, targets = heads.lookups(n_value, n_place, n, seed=0, rows=3)(5)
    ways = [[]]
    for _ in range(n):
        ways = [[*way, place] for way in ways for place in range(n_place) if place not in way]
    assert (targets[:, :n_place] == -100).all()
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        for query, answer in zip(row[n_place:], answers[n_place:], strict=True):
            found = [row[place] for place in ways[query - n_value]]
            assert [answer // n_value**i % n_value for i in range(n)] == found


def test_answers_are_counted_and_the_weights_on_their_places_sorted(monkeypatch):
    inputs, targets = heads.lookups(8, 8, 2, seed=len(heads.SEEDS), rows=256)(0)
    weights = torch.zeros(256, 1, inputs.shape[1], inputs.shape[1])
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    for row, text in enumerate(inputs.tolist()):
        for query, token in enumerate(text[8:], start=8):
            a, b = pairs[token - 8]
            weights[row, 0, query, a], weights[row, 0, query, b] = 0.3, 0.7
    monkeypatch.setattr(heads, "attention_of", lambda model, tokens: [("self", 0, weights, None)])
    answers = torch.nn.functional.one_hot(targets.clamp(min=0), 64).float()
    answers[:64, 8:] = 0  # a quarter of the texts is answered by 0, which is right one time in 64
    right, found = heads.look_ups_found(lambda tokens: answers, (8, 8, 2))
    assert right == pytest.approx(0.75 + 0.25 / 64, abs=0.01)
    assert found == pytest.approx([0.7, 0.3])


def test_distinct_patterns_count_from_one_to_the_number_of_heads(monkeypatch):
    def shown(weights):
        monkeypatch.setattr(heads, "attention_of", lambda model, tokens: [("self", 0, weights, None)])
        return heads.distinct_patterns(None, None)

    alike = torch.full((2, 4, 4, 4), 0.25)
    assert shown(alike) == pytest.approx(1)
    apart = torch.eye(4).view(1, 4, 1, 4).expand(2, 4, 4, 4)  # head h looks at key h
    assert shown(apart) == pytest.approx(4)
    assert shown(torch.stack((apart[:, 0], apart[:, 0], apart[:, 1], apart[:, 1]), 1)) == pytest.approx(2)


def test_the_rank_of_scores_is_the_width_of_a_head():
    tokens = random_tokens(2, 40)
    assert heads.score_ranks(build(n_head=1, d_model=32), tokens)[0] == 32
    assert heads.score_ranks(build(n_head=4, d_model=32), tokens)[0] == 8


def test_the_parts_add_up_to_the_output_and_nothing_else_does():
    model = build(n_head=4).double()
    attention, found = model.decoder.blocks[0].attention, heads.streams(model, random_tokens(2, 9))[0]["heads"]
    written = heads.parts(attention.o_proj, found, 4)
    torch.testing.assert_close(written.sum(0), attention.o_proj(found))
    alone = found.clone()
    alone[:, 8:] = 0  # the first head of four, 8 wide
    torch.testing.assert_close(written[0], attention.o_proj(alone))


def test_streams_hold_what_is_before_and_after_the_output_projection():
    model = build(n_layer=1).double()
    found, tokens = heads.streams(model, random_tokens(2, 9))[0], random_tokens(2, 9)
    x = model.decoder.embed(tokens).flatten(0, 1)
    torch.testing.assert_close(found["after"], x + model.decoder.blocks[0].attention.o_proj(found["heads"]))


def test_without_an_output_projection_a_head_writes_its_own_coordinates():
    model = build(n_layer=1)
    heads.without_output_projection(model)
    found, tokens = heads.streams(model, random_tokens(2, 9))[0], random_tokens(2, 9)
    x = model.decoder.embed(tokens).flatten(0, 1).double()
    torch.testing.assert_close(found["after"] - x, found["heads"], atol=1e-6, rtol=0)


def test_what_is_linear_is_read_back_and_noise_is_not():
    generator = torch.Generator().manual_seed(0)
    features, noise = (torch.randn(400, n, generator=generator, dtype=torch.float64) for n in (6, 150))
    targets = features @ torch.randn(6, 3, generator=generator, dtype=torch.float64) + 2
    assert heads.read_back(features, targets) > 0.999
    assert heads.read_back(noise, targets) < 0.1  # fitted on what it is measured on, it would tell more than a third
