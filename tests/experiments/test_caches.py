import pytest
import torch

from config.schema import ModelConfig
from experiments import caches
from experiments.caches import CLAIMS
from tests.claims import cases, check_rule
from tests.helpers import build, random_tokens


def m7(width: float, length: float, batch: float) -> dict:
    """Growth with these powers."""
    heads, lengths = [1, 2, 4, 8, 16, 32], [512, 1024, 2048]
    return {
        "heads": heads,
        "fixed_width": [1e6 * n**width for n in heads],
        "fixed_head": [1e6 * n for n in heads],
        "formula": [1e6 * n for n in heads],
        "lengths": lengths,
        "by_length": [1e3 * n**length for n in lengths],
        "batches": [1e6 * n**batch for n in lengths],
    }


def m8(mqa_loss: float, gqa_loss: float, growth: float, far: float) -> dict:
    def of(loss: float, share: float, growth: float = 2.0, far: float = 1.0) -> dict:
        return {
            "loss": [loss, loss + 0.01, loss],
            "parameters": 1000,
            "bytes_per_token": 800 * share,
            "growth": growth,
            "milliseconds": [0.5 + share, 0.6 + share, 0.5 + share],
            "recall": [1.0] * 31 + [far] * 33,
        }

    variants = {"MHA": of(2.0, 1), "GQA": of(gqa_loss, 1 / 4), "MQA": of(mqa_loss, 1 / 8)}
    variants["SWA"] = of(2.0, 1 / 4, growth, far)
    return {"variants": variants, "reach": 30, "window": 16, "context": 64, "length": 8192}


def m9(*techniques: list[str], saving: float = 4.0) -> dict:
    model = {
        "source": "https://example.org",
        "n_layer": 2,
        "n_head": 4,
        "n_kv_head": 1,
        "head_dim": 8,
        "max_seq_len": 64,
    }
    found = {f"model {i}": model | {"techniques": used} for i, used in enumerate(techniques)}
    return {"models": {name: of | {"bytes": 1000, "bytes_mha": 1000 * saving} for name, of in found.items()}}


NUMBERS = {
    "M7": {
        "holds": m7(width=1, length=1, batch=-1),
        "holds with a condition": m7(width=0, length=1, batch=-1),
        "does not hold": m7(width=1, length=0.5, batch=-1),
    },
    "M8": {
        "holds": m8(mqa_loss=2.1, gqa_loss=2.01, growth=1.0, far=0.95),
        "holds with a condition": m8(mqa_loss=2.1, gqa_loss=2.01, growth=1.0, far=0.125),
        "does not hold": m8(mqa_loss=2.1, gqa_loss=2.2, growth=1.0, far=0.95),
    },
    "M9": {
        "holds": m9(["MQA"], ["GQA", "SWA"]),
        "holds with a condition": m9(["GQA"], ["GQA", "SWA"]),
        "does not hold": m9(["MQA"], ["GQA", "SWA"], []),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_a_difference_within_what_seeds_or_repetitions_differ_is_no_finding():
    claim, numbers = CLAIMS[1], m8(mqa_loss=2.1, gqa_loss=2.01, growth=1.0, far=0.95)
    assert "GQA's 2.013 ± 0.005: higher by more" in claim.finding(numbers)
    numbers["variants"]["MQA"]["milliseconds"] = [0.6, 0.8, 0.6]  # GQA: 0.75, 0.85, 0.75
    assert "faster than GQA in each of 3 repetitions" in claim.finding(numbers)
    numbers["variants"]["MQA"]["milliseconds"] = [0.6, 0.9, 0.6]
    assert "these times do not tell" in claim.finding(numbers)
    assert "not higher by more" in claim.finding(m8(mqa_loss=2.015, gqa_loss=2.01, growth=1.0, far=0.95))


def test_the_parts_that_fail_are_told_first():
    said = CLAIMS[1].finding(m8(mqa_loss=2.1, gqa_loss=2.2, growth=1.0, far=0.125))
    assert said.startswith("What fails of the five parts: *frugal*, *balance*, *reach*. ")


def test_one_fast_repetition_is_not_fast():
    numbers = m8(mqa_loss=2.1, gqa_loss=2.01, growth=1.0, far=0.95)
    for times, verdict in (
        ([1.4, 1.5, 1.4], "does not hold"),
        ([0.1, 1.5, 1.4], "does not hold"),
        ([1.3] * 3, "holds"),
    ):
        numbers["variants"]["MQA"]["milliseconds"] = times  # MHA: 1.5, 1.6, 1.5
        assert CLAIMS[1].verdict(numbers) == verdict


def test_a_cache_that_grows_refutes_the_window_and_a_small_saving_the_published_models():
    assert CLAIMS[1].verdict(m8(mqa_loss=2.1, gqa_loss=2.01, growth=2.0, far=1.0)) == "does not hold"
    assert CLAIMS[2].verdict(m9(["MQA"], ["GQA", "SWA"], saving=1.5)) == "does not hold"


def test_storages_on_the_meta_device_are_as_large_as_real_ones():
    config = ModelConfig(n_layer=3, n_head=4, n_kv_head=2, d_model=64, window=10)
    for length in (7, 50):
        expected = 2 * 3 * 2 * 16 * min(length, 10) * 5 * 2
        assert caches.stored(config, 5, length) == caches.stored(config, 5, length, device="meta") == expected


@pytest.mark.parametrize("memory", [1000, 5 * 4096, 5 * 4096 - 1, 100_000])
def test_the_largest_batch_is_the_last_that_fits(memory):
    config = ModelConfig(n_layer=2, n_head=2, head_dim=16, d_model=32)
    row = 2 * 2 * 2 * 16 * 16 * 2  # bytes of 16 tokens
    assert caches.largest_batch(config, 16, memory) == memory // row


def test_the_message_is_asked_for_from_where_it_stands_on():
    tokens, targets = caches.one_of_the_past(0, length=20, rows=50)(3)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        (place,) = [i for i, token in enumerate(row) if token < 8]
        assert wanted == [-100] * place + [row[place]] * (20 - place)


def test_a_window_reaches_layers_times_one_less_than_its_length():
    model, tokens = build(n_layer=2, window=5), random_tokens(1, 20)
    other = tokens.clone()
    other[0, 3] = (tokens[0, 3] + 1) % 31
    changed = (model(tokens) != model(other)).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(3, 3 + 2 * (5 - 1) + 1))


def test_a_full_cache_decodes_on_from_its_last_token(monkeypatch):
    monkeypatch.setattr(caches, "LONG", 32)
    for name, slots in (("MHA", 32 + 256), ("SWA", 8)):
        model, cache = caches.decoding(name)
        assert cache.slots == slots
        for _ in range(100):  # more than the cache has room for, were it not for the same length each time
            caches.decode(model, cache, tokens=3)
            assert cache.row_lengths == [35]


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ({"n_head": 4}, []),
        ({"n_head": 4, "n_kv_head": 4}, []),
        ({"n_head": 4, "n_kv_head": 2}, ["GQA"]),
        ({"n_head": 4, "n_kv_head": 1}, ["MQA"]),
        ({"n_head": 4, "n_kv_head": 2, "window": 8}, ["GQA", "SWA"]),
        ({"n_head": 1}, []),
    ],
)
def test_techniques_are_told_from_the_configuration(shape, used):
    assert caches.techniques(ModelConfig(d_model=32, **shape)) == used


def test_recall_tells_a_share_for_every_distance():
    found = torch.tensor(caches.recall("MHA", steps=2))
    assert found.shape == (caches.CONTEXT,)
    assert ((found >= 0) & (found <= 1)).all()
