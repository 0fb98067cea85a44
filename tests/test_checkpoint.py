"""Runs on disk: what is saved is what is loaded, whole or not at all, and nothing in it can execute code."""

import hashlib
import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import progress
import train
from checkpoint import (
    checkpoints,
    find_run,
    link,
    load_model,
    load_optimizer,
    load_weights,
    read_checkpoint,
    save_checkpoint,
)
from config import UserError
from config.schema import ModelConfig, OptimConfig
from model import build_model
from optim import build_optimizer
from tests.helpers import random_tokens
from tests.training import Failing, Place, byte_corpus, make_trainer, metrics, weights

SHAPE = {"vocab_size": 13, "n_layer": 1, "n_head": 2, "d_model": 8, "d_ff": 8, "max_seq_len": 8}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "loss_curve", lambda *arguments: None)
    monkeypatch.setattr(train.signal, "signal", lambda *arguments: None)
    place = Place(tmp_path)
    place.write_preset()
    return place


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of 8 steps with two evaluations, whole and never to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("finished")
        patch.chdir(folder)
        patch.setattr(train.signal, "signal", lambda *arguments: None)
        place = Place(folder)
        place.write_preset(train={"eval_interval": 4, "checkpoint_interval": 4}, log={"sample_tokens": 3})
        place.train()
    return folder / "runs" / "tiny"


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished_run, tmp_path / "copy", symlinks=True)


def tiny(seed: int = 0, name: str = "adamw", **options):
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = build_model(ModelConfig(**SHAPE, **options))
    return model, build_optimizer(model, OptimConfig(name=name, learning_rate=0.01))


def steps(model, optimizer, n: int, seed: int = 0) -> None:
    for step in range(n):
        model(random_tokens(2, 8, seed=seed + step, vocab_size=13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What is saved is what is loaded


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False, "bias": True}, {"kind": "encoder_decoder"}])
def test_a_loaded_optimizer_and_model_go_on_bit_for_bit(tmp_path, name, options):
    kind = options.get("kind")
    forward = (lambda m, t: m(t, t)) if kind else (lambda m, t: m(t))

    def go(model, optimizer, numbers):
        for number in numbers:
            forward(model, random_tokens(2, 8, seed=number, vocab_size=13)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = tiny(0, name, **options)
    go(model, optimizer, range(3))
    folder = save_checkpoint(tmp_path, model, optimizer, {"step": 3, "note": [1.5, None]}, keep=2)
    go(model, optimizer, range(3, 6))
    other, other_optimizer = tiny(1, name, **options)
    loaded, tensors, state = read_checkpoint(folder)
    load_weights(other, loaded, folder)
    load_optimizer(other, other_optimizer, tensors, tmp_path)
    assert state["step"] == 3
    assert state["note"] == [1.5, None]
    go(other, other_optimizer, range(3, 6))
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_the_optimizer_state_is_where_a_fused_kernel_needs_it():
    """A fused kernel reads the count of steps where the parameter is; elsewhere torch keeps it on the CPU."""
    model, _ = tiny()
    model.to("meta")
    name, _ = next(iter(model.named_parameters()))
    for fused, device in ((True, "meta"), (False, "cpu")):
        optimizer = torch.optim.AdamW(model.parameters(), fused=None)
        optimizer.defaults["fused"] = fused
        tensors = {f"{name}.step": torch.tensor(3.0), f"{name}.exp_avg": torch.zeros(13, 8)}
        load_optimizer(model, optimizer, tensors, Path())
        (state,) = optimizer.state.values()
        assert state["step"].device.type == device
        assert state["exp_avg"].device.type == "meta"


def test_load_model_gives_what_was_trained(finished_run):
    model, tokenizer, config = load_model(finished_run)
    saved = load_file(finished_run / "best" / "weights.safetensors")
    assert same(dict(model.named_parameters()), saved)
    assert not model.training
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    assert tokenizer.decode(tokenizer.encode("별 star")) == "별 star"
    assert config.model.vocab_size == tokenizer.vocab_size == 257
    assert config.model == model.config


def test_load_model_takes_best_last_or_a_step(run):
    link(run, "best", run / "step-000004")
    for name, folder in (("best", "step-000004"), ("last", "step-000008"), ("step-000008", "step-000008")):
        model, _, _ = load_model(run, name)
        assert same(dict(model.named_parameters()), load_file(run / folder / "weights.safetensors"))
    with pytest.raises(UserError, match=r"no checkpoint step-000005; checkpoints: step-000004, step-000008"):
        load_model(run, "step-000005")


def test_a_run_without_a_best_gives_its_last(run):
    (run / "best").unlink()
    model, _, _ = load_model(run)
    assert same(dict(model.named_parameters()), load_file(run / "last" / "weights.safetensors"))


def test_a_run_can_be_moved(run, tmp_path):
    moved = tmp_path / "elsewhere" / "별 run"
    moved.parent.mkdir()
    shutil.move(run, moved)
    model, tokenizer, _ = load_model(moved)
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("the cat")]))).all()
    assert not os.path.isabs(os.readlink(moved / "last"))


def test_a_run_without_a_checkpoint_and_a_folder_that_is_no_run_are_said(run, tmp_path):
    for name in ("best", "last"):
        (run / name).unlink()
    for folder in checkpoints(run):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_model(run)
    with pytest.raises(UserError, match=r"config\.toml"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_model(tmp_path / "nothing")


def test_without_a_name_the_newest_run_is_meant(finished_run, tmp_path):
    begun = tmp_path / "begun"  # and newer than all others, but there is nothing to sample from in it
    begun.mkdir()
    shutil.copy(finished_run / "config.toml", begun)
    with pytest.raises(UserError, match="no run with a checkpoint in"):
        find_run(None, tmp_path)
    for name, when in (("old", 1_000), ("new", 3_000), ("middle", 2_000)):
        shutil.copytree(finished_run, tmp_path / name, symlinks=True)
        for path in [*(tmp_path / name).rglob("*"), tmp_path / name]:
            os.utime(path, (when, when), follow_symlinks=False)
    assert find_run(None, tmp_path) == tmp_path / "new"


# When checkpoints are written


@pytest.mark.parametrize("n_steps", [7, 3])
def test_F45_the_last_step_is_always_saved(place, n_steps):
    place.write_preset(train={"steps": n_steps, "checkpoint_interval": 5})
    place.train()
    run = Path("runs/tiny")
    _, _, state = read_checkpoint(run / "last")
    assert state["step"] == n_steps
    expected = ["step-000005", "step-000007"] if n_steps == 7 else ["step-000003"]
    assert [folder.name for folder in checkpoints(run)] == expected
    model, tokenizer, _ = load_model(run, "last")
    assert train.generate(model, [tokenizer.encode("the")], max_new_tokens=3, vocab_size=257)


def test_F45_when_validation_only_worsens_best_and_last_are_separate(place, monkeypatch):
    monkeypatch.setattr(
        train.Trainer,
        "evaluate",
        lambda trainer: {"val_loss": float(trainer.state.step), "val_bits_per_byte": 1.0},
    )
    place.write_preset(train={"steps": 7, "eval_interval": 2, "checkpoint_interval": 5, "keep_checkpoints": 1})
    place.train()
    run = Path("runs/tiny")
    assert os.readlink(run / "best") == "step-000002"
    assert os.readlink(run / "last") == "step-000007"
    best, last = (dict(load_model(run, name)[0].named_parameters()) for name in ("best", "last"))
    assert not same(best, last)


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    model, optimizer = tiny()
    for step in range(1, 12):
        folder = save_checkpoint(tmp_path, model, optimizer, {"step": step}, keep=2)
        if step in (3, 8):
            link(tmp_path, "best", folder)
        names = [int(folder.name[5:]) for folder in checkpoints(tmp_path)]
        best = 0 if step < 3 else 3 if step <= 8 else 8  # the old best goes when the next one is saved
        assert names == sorted({best, step - 1, step} - {0}), f"after step {step}"
        assert os.readlink(tmp_path / "last") == folder.name


def test_checkpoints_are_ordered_by_step_even_past_a_million(tmp_path):
    for step in (1_000_000, 999_999, 20):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-000020", "step-999999", "step-1000000"]


# What is in a checkpoint


@pytest.mark.parametrize("tied", [True, False])
def test_F47_compiled_and_plain_runs_have_the_same_names(tmp_path, tied):
    names, corpus = {}, byte_corpus(tmp_path)
    for compile in (False, True):
        run = tmp_path / f"run-{compile}"
        run.mkdir()
        trainer = make_trainer(corpus, run, compile=compile, model={"tie_embeddings": tied})
        assert (trainer.training_loss is not trainer.loss) == compile
        trainer.training_loss = trainer.loss  # the wrapper stays in place, but compiles nothing here
        trainer.step()
        tensors, optimizer_tensors, _ = read_checkpoint(trainer.save())
        names[compile] = sorted(tensors), sorted(optimizer_tensors)
    assert names[True] == names[False]
    assert not [name for part in names[True] for name in part if "_orig_mod" in name or "module." in name]
    assert ("lm_head.weight" in names[True][0]) == (not tied)


@pytest.mark.parametrize("wrap_saved", [False, True])
@pytest.mark.parametrize("wrap_loaded", [False, True])
def test_F47_a_model_compiled_or_not_loads_what_a_model_compiled_or_not_saved(tmp_path, wrap_saved, wrap_loaded):
    model, optimizer = tiny()
    steps(model, optimizer, 1)
    wrapped = torch.compile(model) if wrap_saved else model
    folder = save_checkpoint(tmp_path, wrapped, optimizer, {"step": 1}, keep=1)
    loaded, tensors, _ = read_checkpoint(folder)
    assert sorted(loaded) == sorted(dict(model.named_parameters()))
    other, other_optimizer = tiny(1)
    target = torch.compile(other) if wrap_loaded else other
    load_weights(target, loaded, folder)
    load_optimizer(target, other_optimizer, tensors, tmp_path)
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert len(other_optimizer.state) == len(optimizer.state)


def test_F47_prefixed_names_are_refused_by_name_instead_of_ignored(tmp_path):
    model, _ = tiny()
    prefixed = {f"_orig_mod.{name}": p.detach() for name, p in model.named_parameters()}
    with pytest.raises(UserError, match="_orig_mod"):
        load_weights(model, prefixed, tmp_path)


def test_F48_a_run_holds_tensors_and_plain_values_only(finished_run, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("pickle was used")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    load_model(finished_run)
    files = [path for path in finished_run.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".jsonl", ".toml", ".png"}
    for path in files:
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path} may be a pickle or an archive"
    for folder in checkpoints(finished_run):
        assert load_file(folder / "weights.safetensors")
        json.loads((folder / "state.json").read_text("utf-8"), parse_constant=refuse)  # no NaN, no Infinity


def test_F48_the_best_score_survives_two_evaluations_and_a_save(finished_run):
    records = [record["val_loss"] for record in metrics(finished_run) if "val_loss" in record]
    _, _, state = read_checkpoint(finished_run / "last")
    assert len(records) == 2
    assert state["best_loss"] == min(records)
    assert type(state["best_loss"]) is float


def test_the_state_tells_versions_and_what_auto_became(finished_run):
    _, _, state = read_checkpoint(finished_run / "last")
    assert state["torch"] == torch.__version__
    assert state["machine"]["device"] == "cpu"
    assert "float32" in state["machine"]["dtype"]
    assert state["step"] == 8
    assert state["tokens"] == 8 * 4 * 16
    assert state["metrics_bytes"] == (finished_run / "metrics.jsonl").stat().st_size


def test_F46_the_loss_scaler_of_float16_is_saved_and_comes_back(tmp_path):
    corpus, run = byte_corpus(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(b"")
    trainer = make_trainer(corpus, run, train={"dtype": "float16"})
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 128.0, "growth_interval": 2})
    for _ in range(3):
        trainer.step()
    expected = trainer.scaler.state_dict()
    assert (expected["scale"], expected["_growth_tracker"]) == (256.0, 1)
    folder = trainer.save()
    assert read_checkpoint(folder)[2]["scaler"] == expected
    other = make_trainer(corpus, run, train={"dtype": "float16"})
    other.restore(folder, *read_checkpoint(folder))
    assert other.scaler.state_dict() == expected
    assert [trainer.step() for _ in range(4)] == [other.step() for _ in range(4)]
    for name, value in weights(trainer).items():
        assert torch.equal(value, weights(other)[name])


# A save that ends midway


def prepare_saves(folder: Path, again: bool):
    """A run with checkpoints 1 and 2 (best: 1), ready to save the third; `again`: after a kill right before `last`
    was pointed at a third one."""
    folder.mkdir()
    model, optimizer = tiny()
    for step in (1, 2):
        steps(model, optimizer, 1, seed=step)
        saved = save_checkpoint(folder, model, optimizer, {"step": step}, keep=1)
        if step == 1:
            link(folder, "best", saved)
    if again:
        shutil.copytree(saved, folder / "step-000003")
    steps(model, optimizer, 1, seed=3)
    return model, optimizer


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_F49_a_save_that_fails_at_any_operation_leaves_the_old_checkpoint_or_the_new(tmp_path, half, again):
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer = prepare_saves(tmp_path / "whole", again)
        failing = Failing(patch)
        save_checkpoint(tmp_path / "whole", model, optimizer, {"step": 3}, keep=1)
    assert failing.count >= 12, "the operations are not those that this test counts"
    expected = {step: load_file(tmp_path / "whole" / f"step-{step:06d}" / "weights.safetensors") for step in (1, 3)}
    seen = set()
    for at in range(failing.count):
        run = tmp_path / f"fails-at-{at}"
        model, optimizer = prepare_saves(run, again)
        second = load_file(run / "step-000002" / "weights.safetensors")
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, at, half)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(run, model, optimizer, {"step": 3}, keep=1)
        loaded, _, state = read_checkpoint(run / "last")
        seen.add(state["step"])
        assert same(loaded, {**expected, 2: second}[state["step"]]), f"operation {at}"
        assert same(read_checkpoint(run / "best")[0], expected[1])
        save_checkpoint(run, model, optimizer, {"step": 3}, keep=1)  # leftovers are no hindrance
        assert same(read_checkpoint(run / "last")[0], expected[3])
        assert sorted(path.name for path in run.iterdir()) == ["best", "last", "step-000001", "step-000003"]
    assert seen == {2, 3}


def test_F49_an_unfinished_save_is_not_taken_for_a_checkpoint(run):
    shutil.copytree(run / "step-000008", run / ".step-000012.partial")
    (run / ".step-000012.partial" / "weights.safetensors").write_bytes(b"")
    assert [folder.name for folder in checkpoints(run)] == ["step-000004", "step-000008"]
    load_model(run, "last")


# Damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def other_json(path: Path) -> None:
    path.write_text("[1, 2]")


def remove(path: Path) -> None:
    path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [truncate, empty, zeros, flip, other_json, remove, folder_instead]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", ["weights.safetensors", "state.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_one_sentence_that_names_the_file(run, file, damage):
    damage(run / "last" / file)
    with pytest.raises(UserError, match=rf"{file}") as error:
        read_checkpoint(run / "last")
    assert "\n" not in str(error.value)
    assert "step-000008" in str(error.value) or "last" in str(error.value)


@pytest.mark.parametrize("damage", [truncate, empty, zeros, other_json, remove], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", ["config.toml", "tokenizer/tokenizer.json"])
def test_a_damaged_configuration_or_tokenizer_is_one_sentence_that_names_it(run, file, damage):
    damage(run / file)
    with pytest.raises(UserError, match=file.partition("/")[0]):
        load_model(run, "last")


def test_a_configuration_that_lost_its_end_is_never_taken_for_a_shorter_one(run):
    """What is left of a table is a table too, and its missing options would get their defaults."""
    lines = (run / "config.toml").read_text("utf-8").splitlines(keepends=True)
    assert len(lines) > 50
    for n in range(len(lines)):
        (run / "config.toml").write_text("".join(lines[:n]), "utf-8")
        with pytest.raises(UserError, match=r"config\.toml"):
            load_model(run, "last")


def test_a_digit_changed_in_the_state_is_noticed(run):
    file = run / "last" / "state.json"
    changed = file.read_text("utf-8").replace('"step": 8', '"step": 9')
    assert changed != file.read_text("utf-8")
    file.write_text(changed, "utf-8")
    with pytest.raises(UserError, match=r"state\.json"):
        load_model(run, "last")


def resign(folder: Path) -> None:
    """Makes the checksums fit again, as somebody who means harm would."""
    state = json.loads((folder / "state.json").read_text("utf-8"))
    for name in ("weights.safetensors", "state.safetensors"):
        state["checksums"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state), "utf-8")


def test_weights_of_another_shape_are_refused_by_name(run):
    file = run / "last" / "weights.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "feed_forward" in name)
    save_file({**tensors, name: torch.cat([tensors[name]] * 2)}, file)
    resign(run / "last")
    with pytest.raises(UserError, match=r"feed_forward\S+ is \(\d+, \d+\), the model's \(\d+, \d+\)"):
        load_model(run, "last")


def test_missing_and_surplus_weights_are_refused_by_name(run):
    file = run / "last" / "weights.safetensors"
    tensors = load_file(file)
    name = "decoder.norm.weight"
    for changed in ({n: t for n, t in tensors.items() if n != name}, {**tensors, "surplus": torch.zeros(1)}):
        save_file(changed, file)
        resign(run / "last")
        with pytest.raises(UserError, match=next(iter(tensors.keys() ^ changed.keys()))):
            load_model(run, "last")


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors"])
def test_a_pickle_in_the_place_of_tensors_is_refused_and_not_executed(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Malicious()}, run / "last" / name)
    resign(run / "last")
    with pytest.raises(UserError, match=name):
        read_checkpoint(run / "last")
    assert not (tmp_path / "executed").exists()


def test_sampling_does_not_need_the_optimizer_s_state(run):
    truncate(run / "last" / "state.safetensors")
    load_model(run, "last")


def test_best_loss_of_a_run_without_validation_is_no_number_but_none(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    trainer = make_trainer(byte_corpus(tmp_path), run)
    (run / "metrics.jsonl").write_bytes(b"")
    trainer.step()
    folder = trainer.save()
    assert read_checkpoint(folder)[2]["best_loss"] is None
    trainer.restore(folder, *read_checkpoint(folder))
    assert trainer.state.best_loss == math.inf
