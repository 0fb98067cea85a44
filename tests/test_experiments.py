"""The claims as a whole: all are there, each rule decides, and the page says what the rules make of the numbers."""

import importlib
import json
import re

import pytest
import torch

from experiments import lab, page
from experiments.__main__ import CLAIMS, THEMES, main
from experiments.claim import FAILS, HOLDS, KOREAN, VERDICTS
from experiments.lab import fit, fresh_model, in_turn, slope, small, stories, story_batches, trained
from train import Trainer, resolve_model

IDS = [f"A{n}" for n in range(1, 13)] + [f"P{n}" for n in range(1, 9)] + [f"M{n}" for n in range(1, 10)] + ["F1", "F2"]


def test_every_claim_is_there():
    assert list(CLAIMS) == IDS


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.__name__)
def test_every_rule_is_shown_to_confirm_and_to_refute(theme):
    numbers = importlib.import_module(f"tests.experiments.test_{theme.__name__.rpartition('.')[2]}").NUMBERS
    assert set(numbers) == {claim.id for claim in theme.CLAIMS}
    for id, verdicts in numbers.items():
        assert {HOLDS, FAILS} <= set(verdicts) <= set(VERDICTS), id


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=str)
def test_the_words_of_a_claim(claim):
    assert re.search("[가-힣]", claim.korean)
    assert len(re.findall("[a-z]", claim.english)) > len(re.findall("[가-힣]", claim.english))
    assert all(word in claim.rule for word in ("holds", "does not hold"))
    assert len(claim.prediction) > 60


def test_the_page_says_what_the_rules_make_of_the_numbers():
    text = (page.DOCS / "claims.md").read_text("utf-8")
    assert text == page.claims_page(CLAIMS.values())
    for id, claim in CLAIMS.items():
        numbers, _ = page.recorded(id)
        verdict = claim.verdict(numbers)
        assert re.search(rf"^\| {id} \| .* \| {verdict} \| {KOREAN[verdict]} \|", text, re.M), id
        assert (page.DOCS / "claims" / f"{id}.png").stat().st_size > 10_000, id


def test_the_page_of_variants_is_that_of_the_numbers():
    assert (page.DOCS / "variants.md").read_text("utf-8") == page.variants_page(page.recorded("variants")[0])


def test_a_claim_is_measured_judged_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr("experiments.__main__.DOCS", tmp_path)
    main(["a8"])
    assert "does not hold: " in capsys.readouterr().out
    assert "| does not hold |" in (tmp_path / "claims.md").read_text("utf-8")
    assert (tmp_path / "claims" / "A8.png").stat().st_size > 10_000
    file = tmp_path / "claims" / "A8.json"
    kept = json.loads(file.read_text("utf-8"))
    kept["numbers"]["deviations"] = [2 ** (width / 64) for width in kept["numbers"]["widths"]]
    file.write_text(json.dumps(kept), "utf-8")
    main(["page"])
    assert "| holds |" in (tmp_path / "claims.md").read_text("utf-8")


def test_a_name_that_there_is_not(capsys):
    with pytest.raises(SystemExit) as end:
        main(["A8", "A99"])
    assert end.value.code == 2
    assert "A99" in capsys.readouterr().err


def test_without_names_the_claims_are_listed(capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == IDS


def test_fit_trains_as_train_does():
    config = small(3, n_layer=1, d_model=32, max_seq_len=32)
    losses = fit(model := fresh_model(config), story_batches(config), 3)
    config = config.model_copy(update={"model": resolve_model(config.model, stories())})
    trainer = Trainer(config, None, stories(), lab.machine())
    trainer.model.load_state_dict(fresh_model(config).state_dict())
    assert [trainer.step()["loss"] for _ in range(3)] == pytest.approx(losses, rel=1e-5)
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-3, atol=1e-5)


def test_a_trained_model_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "CACHE", tmp_path / "cache")
    config = small(2, n_layer=1, d_model=32, max_seq_len=32)
    first = trained(config)
    monkeypatch.setattr(lab, "fit", None)  # a second training would fail
    again = trained(config)
    for name, weight in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    for other in (small(2, 1, n_layer=1, d_model=32, max_seq_len=32), small(3, n_layer=1, d_model=32, max_seq_len=32)):
        with pytest.raises(TypeError):
            trained(other)
    with pytest.raises(TypeError):
        trained(config, change=lambda model: None)


def test_functions_are_called_in_turn():
    calls = []
    found = in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=2)
    assert "".join(calls) == "ab" + "abab"
    assert set(found) == {"a", "b"}


def test_a_difference_smaller_than_that_between_seeds_does_not_count():
    assert lab.above([2.0, 2.1], [1.8, 1.9])
    assert not lab.above([2.0, 2.3], [1.8, 1.9])
    assert not lab.above([2.0, 2.1], [1.6, 1.9])
    assert not lab.above([1.8, 1.9], [2.0, 2.1])


def test_the_slope_is_the_exponent():
    assert slope([1, 2, 4, 8], [3 * x**1.7 for x in (1, 2, 4, 8)]) == pytest.approx(1.7)
