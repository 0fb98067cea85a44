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
    assert text == page.claims_page(map(page.judged, CLAIMS.values()))
    for id, claim in CLAIMS.items():
        verdict = page.judged(claim).verdict
        turned = [other for other in VERDICTS if f"*{other}*" in claim.changed and other != verdict]
        assert turned == [claim.first_verdict] * bool(claim.first_verdict), id  # said at the head of the page, too
        assert re.search(rf"^\| {id} \| .* \| {verdict} \| {KOREAN[verdict]} \|", text, re.M), id
        assert (page.DOCS / "claims" / f"{id}.png").stat().st_size > 10_000, id


def test_the_page_of_variants_is_that_of_the_numbers():
    assert (page.DOCS / "variants.md").read_text("utf-8") == page.of_kept("variants", page.variants_page)


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A folder for the pages and numbers, in which nothing has been measured."""
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr("experiments.__main__.DOCS", tmp_path)
    return tmp_path


def refused(capsys, *names: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(names)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_claim_is_measured_judged_and_kept(docs, capsys):
    main(["a8"])
    assert "does not hold: " in capsys.readouterr().out
    assert "| does not hold |" in (docs / "claims.md").read_text("utf-8")
    assert (docs / "claims" / "A8.png").stat().st_size > 10_000
    file = docs / "claims" / "A8.json"
    kept = json.loads(file.read_text("utf-8"))
    kept["numbers"]["deviations"] = [2 ** (width / 64) for width in kept["numbers"]["widths"]]
    kept["seconds"] = 77.0
    file.write_text(json.dumps(kept), "utf-8")
    main(["page"])
    assert "| holds |" in (docs / "claims.md").read_text("utf-8")
    main(["A8"])  # it may find models in the cache: the seconds stay the most that it took
    assert "| does not hold | 성립하지 않음 | 77 |" in (docs / "claims.md").read_text("utf-8")
    assert f"torch {torch.__version__}" in (docs / "claims.md").read_text("utf-8")
    file.write_text(json.dumps(kept | {"machine": "another"}), "utf-8")
    main(["A8"])
    assert json.loads(file.read_text("utf-8"))["seconds"] < 77


DAMAGES = [b"", b'{"numbers": {"wid', b"[]", b'{"numbers": {}, "seconds": 1.0, "machine": ""}', b"\xff\xfe"]
DAMAGES += [b'{"numbers": [], "seconds": 1.0, "machine": ""}', b'{"numbers": {}, "seconds": null, "machine": ""}']
DAMAGES += ["correlation"]  # is gone, which the verdict needs not, but the words do


@pytest.mark.parametrize("damage", DAMAGES, ids=repr)
def test_damaged_numbers_are_told_and_measured_anew(docs, capsys, damage):
    main(["A7"])
    main(["A8"])
    file, other = docs / "claims" / "A7.json", docs / "claims" / "variants.json"
    whole = file.read_bytes()
    if isinstance(damage, str):
        damage = whole.replace(damage.encode(), b"other")
    for damaged in (file, other):
        damaged.write_bytes(damage)
    capsys.readouterr()
    main([])
    verdicts = {line[:3].strip(): line[4:28].strip() for line in capsys.readouterr().out.splitlines()}
    assert (verdicts["A7"], verdicts["A8"], verdicts["A9"]) == ("damaged: run it", "does not hold", "not yet run")
    for name in ("page", "A8"):  # of others nothing is lost
        said = refused(capsys, name)
        assert f"{file} is damaged" in said
        assert f"{other} is damaged" in said
        assert "| A8 |" in (docs / "claims.md").read_text("utf-8")
    other.unlink()
    main(["A7"])
    assert json.loads(file.read_bytes())["numbers"] == json.loads(whole)["numbers"]


def test_what_was_measured_is_told_before_it_is_kept(docs, capsys):
    (docs / "claims").write_text("a file, where the folder should be")
    with pytest.raises(SystemExit):
        main(["A8"])
    assert "does not hold: " in capsys.readouterr().out


def test_a_name_that_there_is_not(capsys):
    assert "A99" in refused(capsys, "A8", "A99")
    for name in ("all", "page"):
        assert f"{name} is none of the claims" in refused(capsys, "A8", name)


def test_without_names_the_claims_are_listed(capsys):
    main([])
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
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
    trainings = []
    monkeypatch.setattr(lab, "fit", lambda *args: trainings.append(args))
    again = trained(config)
    for name, weight in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    assert not trainings
    others = small(2, 1, n_layer=1, d_model=32, max_seq_len=32), small(3, n_layer=1, d_model=32, max_seq_len=32)
    for n, other in enumerate(others, 1):
        trained(other)
        assert len(trainings) == n
    trained(config, change=lambda model: None)
    assert len(trainings) == 3
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    trained(config)  # what is damaged is trained again
    assert len(trainings) == 4


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
