from itertools import product

import pytest
import torch

from experiments import variants
from experiments.variants import (
    KV_HEADS,
    NORMS,
    POSITIONS,
    WINDOWS,
    finding,
    name,
    singular,
    table,
    words_of_sinusoidal,
)
from tests.helpers import build, difference, random_tokens


def numbers(sinusoidal: float, later: float) -> dict:
    rows = {}
    for position, *rest, norm in product(POSITIONS, KV_HEADS, WINDOWS, NORMS):
        bits = sinusoidal if (position, norm) == ("sinusoidal", "pre") else 1.4
        rows[name(position, *rest, norm)] = dict.fromkeys(variants.COLUMNS, 1000) | {"bits": bits, "spread": 0.01}
    long = {"sinusoidal": {"bits": later, "spread": 0.02}, "none": {"bits": 0.6, "spread": 0.01}}
    return {"rows": rows, "start": {"bits": 1.65, "spread": 0.01}, "longer": long}


@pytest.mark.parametrize(
    ("later", "words"),
    [(0.7, "are still behind: 0.700"), (0.5, "are ahead: 0.500"), (0.63, "are as good as none: 0.630")],
)
def test_what_stands_out_and_what_becomes_of_it(later, words):
    said = finding(numbers(sinusoidal=1.7, later=later))
    assert "come last" in said
    assert "Of the difference of 0.300 the words alone make 0.250" in said
    assert f"{words} ± 0.020 against 0.600 ± 0.010" in said
    assert "come last" not in finding(numbers(sinusoidal=1.4, later=later))
    assert "the words alone" not in finding(numbers(sinusoidal=1.66, later=later))


def test_one_head_is_one_head():
    rows = [row[0] for row in table(numbers(sinusoidal=1.7, later=0.5))[1:]]
    assert sum("1 key/value head," in row for row in rows) == len(rows) / len(KV_HEADS)
    assert not any("1 key/value heads" in row for row in rows)
    assert singular("4 key/value heads") == "4 key/value heads"


def test_words_of_sinusoidal_positions_without_a_code():
    model, with_codes = build(position="none", d_model=64), build(position="sinusoidal", d_model=64)
    words_of_sinusoidal(model)
    assert model.decoder.embed.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert model.lm_head.weight is model.decoder.embed.weight
    with torch.no_grad():
        with_codes.decoder.embed.weight.copy_(model.decoder.embed.weight)
    tokens, pos = random_tokens(2, 9), torch.arange(9)
    codes = variants.sinusoidal_encoding(pos, 64)
    ours, theirs = (each.decoder.embedding(tokens, pos, 9) for each in (model, with_codes))
    assert difference(ours + codes, theirs) < 1e-5


def test_the_start_is_that_of_three_seeds(monkeypatch):
    asked = []
    monkeypatch.setattr(variants, "trained", lambda config, change: asked.append((config, change)))
    found = iter([1.0, 1.2, 1.4])
    monkeypatch.setattr(variants, "validate", lambda *_: {"bits_per_byte": next(found)})
    assert variants.start(steps=7) == pytest.approx({"bits": 1.2, "spread": 0.2})
    assert [(config.train.seed, config.train.steps) for config, _ in asked] == [(0, 7), (1, 7), (2, 7)]
    assert all(change is words_of_sinusoidal and config.model.position == "none" for config, change in asked)
