import pytest
import torch

from experiments import ensemble
from experiments.ensemble import CLAIMS
from experiments.heads import COUNTS
from tests.claims import cases, check_rule
from tests.helpers import build, random_tokens


def m3(average: float, worst: float) -> dict:
    """Two layers, each worth one nat; of n heads one costs `worst` of an equal part, all `average` of it."""

    def seeds(n: int) -> list[dict]:
        heads = [worst / n, *[(n * average - worst) / n / (n - 1)] * (n - 1)] if n > 1 else [1.0]
        return [{"heads": [heads, heads], "layers": [1.0, 1.0]}] * 3

    return {"damages": {how: {str(n): seeds(n) for n in COUNTS} for how in ("silent", "misled")}}


def m6(train: float, validation: float) -> dict:
    by = {str(n): {"train": [[7.0, 1.0]] * 3, "validation": [[7.0, 4.0], [7.0, 4.1], [7.0, 4.0]]} for n in COUNTS}
    eight = {"train": [[7.0, train]] * 3, "validation": [[7.0, validation]] * 3}
    return {"steps": [0, 60], "by_heads": by | {"8": eight}}


NUMBERS = {
    "M3": {
        "holds": m3(0.5, 0.9),
        "holds with a condition": m3(0.5, 3.0),
        "does not hold": m3(1.2, 1.5),
    },
    "M6": {
        "holds": m6(1.2, 3.0),
        "holds with a condition": m6(3.0, 4.0),
        "does not hold": m6(1.0, 4.05),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_a_share_is_of_its_own_layer_and_the_worst_that_of_any_seed():
    numbers = m3(0.5, 0.9)
    numbers["damages"]["silent"]["8"] = [{"heads": [[0.1] * 8, [0.4] * 8], "layers": [10.0, 4.0]}] * 2 + [
        {"heads": [[0.1] * 8, [0.4] * 7 + [1.2]], "layers": [10.0, 4.0]}
    ]
    assert "costs 5.9% on average and 30.0% at worst when silent" in CLAIMS[0].finding(numbers)


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (4.3, "Eight heads widen the gap. The gap is 3.300 ± 0.000 nats with eight and 3.033 ± 0.050 with one, more"),
        (4.05, "Eight heads do not change the gap clearly. The gap is 3.050 ± 0.000 nats with eight and 3.033"),
        (4.0, "with one, not more apart than seeds are"),
    ],
)
def test_what_eight_heads_do_to_the_gap(validation, words):
    assert words in CLAIMS[1].finding(m6(1.0, validation))


def test_only_this_heads_columns_are_silenced():
    model, tokens = build(n_head=4, n_kv_head=4), random_tokens(2, 9)
    with ensemble.failing(model.decoder.blocks[1].attention, [2], "silent"):
        silenced = model(tokens)
    after = model(tokens)
    weight = model.decoder.blocks[1].attention.o_proj.weight
    with torch.no_grad():
        weight[:, 16:24] = 0
        expected = model(tokens)
    torch.testing.assert_close(silenced, expected)
    assert not torch.allclose(silenced, after)


def test_a_misled_head_sees_what_it_found_in_another_text():
    model, tokens = build(n_layer=1), random_tokens(2, 9)
    every = list(range(4))
    with ensemble.failing(model.decoder.blocks[0].attention, every, "misled"):
        same = model(tokens[[0, 0]])
        other = model(tokens)
    torch.testing.assert_close(same, model(tokens[[0, 0]]))  # the other text is this one
    assert not torch.allclose(other, model(tokens))
