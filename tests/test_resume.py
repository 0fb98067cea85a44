"""Runs that are killed, and run folders that are damaged: processes of their own, ended by SIGKILL as nothing can
prevent, and what the commands make of what is left."""

import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import train
from checkpoint import load_model, read_checkpoint, read_state
from config import UserError
from data.tokenizer import load_tokenizer
from tests.test_checkpoint import Malicious, empty, flip, resign, truncate, zeros
from tests.test_train import run_with_stops, signals  # noqa: F401 (a fixture)
from tests.training import Place, Stopper, assert_same_run, execute, kill_at, metrics, start

SMALL_LOG = {"interval": 2, "sample_tokens": 2}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of one's own, from which the processes start too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return Place(tmp_path)


def accumulating(**train) -> dict:
    """A preset in which everything is on: dropout, three micro-batches a step, saves, evaluations, samples."""
    intervals = {"eval_interval": 4, "checkpoint_interval": 3, "keep_checkpoints": 2}
    return {
        "model": {"dropout": 0.1},
        "train": {"batch_size": 6, "micro_batch_size": 2, **intervals, **train},
        "log": SMALL_LOG,
    }


def begin_or_resume(run: Path) -> list[str]:
    """The words that go on with a run; one that was killed before it had a configuration begins again."""
    if (run / "config.toml").exists():
        return ["--resume", run.name]
    shutil.rmtree(run, ignore_errors=True)
    return ["tiny.toml", "--train.run-dir", run.name]


# Killed


def kill_at_random(place, kills: int) -> None:
    """Runs are killed at random moments and resumed, until so many kills hit one; each ends as if it had not been."""
    place.write_preset(**accumulating(steps=60))
    rng, hits, before, run, runs = np.random.default_rng(0), 0, 0, Path("run-0"), 1
    code, said = execute(place.folder, "tiny.toml", "--train.run-dir", "whole")
    assert code == 0, said
    clock = time.perf_counter()
    assert execute(place.folder, "tiny.toml", "--train.run-dir", "again")[0] == 0
    limit = 0.6 * (time.perf_counter() - clock)
    while True:
        killing = hits < kills
        process = start(place.folder, *begin_or_resume(run))
        process.join(rng.uniform(0, limit) if killing else 120)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (place.folder / "said.txt").read_text("utf-8")
        if process.exitcode:
            assert killing, "it hangs"
            hits += 1
            before += not (run / "last").exists()
            continue
        assert_same_run(run, Path("whole"))
        assert [record["step"] for record in metrics(run)] == list(range(2, 61, 2))
        if not killing:
            break
        run, runs = Path(f"run-{runs}"), runs + 1
    assert hits == kills
    assert 0 < before < kills, "all kills came before the first checkpoint, or all after it"


def test_F49_a_run_killed_at_30_random_moments_ends_as_if_it_had_not_been(place):
    kill_at_random(place, 30)


@pytest.mark.slow
def test_F49_a_run_killed_at_200_random_moments_ends_as_if_it_had_not_been(place):
    kill_at_random(place, 200)


def kill_at_operations(place, stride: int) -> int:
    """A run is killed at every `stride`-th of its file operations and resumed; returns about how many there are."""
    place.write_preset(**accumulating(steps=6, keep_checkpoints=1))
    assert execute(place.folder, "tiny.toml", "--train.run-dir", "whole")[0] == 0
    for at in count(0, stride):
        run = Path(f"killed-{at}")
        code, said = execute(place.folder, "tiny.toml", "--train.run-dir", run.name, prepare=partial(kill_at, at))
        if code == 0:  # it has no such operation
            return at
        assert code == -signal.SIGKILL, said
        code, said = execute(place.folder, *begin_or_resume(run))
        assert code == 0, said
        assert_same_run(run, Path("whole"))
        assert not list(run.glob(".step-*"))
    raise AssertionError


def test_F49_a_run_killed_at_a_file_operation_ends_as_if_it_had_not_been(place):
    assert kill_at_operations(place, stride=13) > 50


@pytest.mark.slow
def test_F49_a_run_killed_at_any_file_operation_ends_as_if_it_had_not_been(place):
    assert kill_at_operations(place, stride=1) > 50


def test_F49_a_kill_while_a_killed_run_is_resumed_is_a_kill_like_others(place):
    place.write_preset(**accumulating(steps=6))
    assert execute(place.folder, "tiny.toml", "--train.run-dir", "whole")[0] == 0
    execute(place.folder, "tiny.toml", "--train.run-dir", "killed", prepare=partial(kill_in_evaluation, 4))
    for at in range(0, 30, 3):
        run = Path(f"killed-{at}")
        shutil.copytree("killed", run, symlinks=True)
        assert execute(place.folder, "--resume", run.name, prepare=partial(kill_at, at))[0] == -signal.SIGKILL
        code, said = execute(place.folder, "--resume", run.name)
        assert code == 0, said
        assert_same_run(run, Path("whole"))


def kill_in_evaluation(step: int) -> None:
    """At its end, of which nothing is on the disk yet."""
    evaluate = train.Trainer.evaluate

    def killed(trainer):
        values = evaluate(trainer)
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return values

    train.Trainer.evaluate = killed


@pytest.mark.parametrize("step", [4, 6])
def test_F45_an_evaluation_that_a_kill_ended_is_the_first_thing_of_the_resumed_run(place, step):
    place.write_preset(**accumulating(steps=6))
    assert execute(place.folder, "tiny.toml", "--train.run-dir", "whole")[0] == 0
    run = Path("killed")
    for _ in range(2):  # the second time it is the resumed run's
        code, said = execute(place.folder, *begin_or_resume(run), prepare=partial(kill_in_evaluation, step))
        assert code == -signal.SIGKILL, said
        state = read_state(run / "last")
        assert state["step"] == step
        assert state["ungraded"].keys() == {"loss", "learning_rate", "gradient_norm"}
    assert "· loss" not in said, "a step came before the evaluation"
    code, said = execute(place.folder, "--resume", "killed")
    assert code == 0, said
    assert_same_run(run, Path("whole"))
    assert [record["step"] for record in metrics(run)] == [2, 4, 6]


# Resumed, in this process


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("data", [{"tokenizer": "bytes"}, {"tokenizer": "bpe", "bpe_vocab_size": 280}], ids=str)
def test_F50_a_run_of_three_micro_batches_a_step_goes_on_bit_for_bit(place, monkeypatch, optimizer, data):
    stopper = Stopper(monkeypatch)
    place.write_preset(**{**accumulating(), "optim": {"name": optimizer}, "data": data})
    whole = run_with_stops(place, stopper, [], "whole")
    hashes, stopper.hashes = stopper.hashes, {}
    assert_same_run(run_with_stops(place, stopper, [2, 5], "stopped"), whole)
    assert stopper.hashes == hashes
    assert [len(seen) for _, seen in sorted(hashes.items())] == [1] * 8


def test_F46_a_float16_run_goes_on_bit_for_bit_with_its_loss_scaler(place, monkeypatch):
    """The scale grows after every other step, so one that began anew would be noticed at once."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=64.0, growth_interval=3))
    stopper = Stopper(monkeypatch)
    place.write_preset(**accumulating(dtype="float16"))
    whole = run_with_stops(place, stopper, [], "whole")
    stopped = run_with_stops(place, stopper, [2, 5], "stopped")
    assert_same_run(stopped, whole)
    scales = [read_state(run / "last")["scaler"] for run in (stopped, whole)]
    assert scales[0] == scales[1]
    assert scales[0]["scale"] == 64.0 * 4
    assert read_state(whole / "last")["machine"]["dtype"] == "float16"


# Damaged


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a preset, a text and a run of 8 steps, evaluated at 4 and 8; never to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("finished")
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        options = {"data": {"tokenizer": "bpe", "bpe_vocab_size": 280}, "log": SMALL_LOG}
        Place(folder).write_preset(train={"eval_interval": 4, "keep_checkpoints": 3}, **options)
        code, said = execute(folder, "tiny.toml")
        assert code == 0, said
    return folder


@pytest.fixture
def damaged(finished, tmp_path, monkeypatch):
    """A copy of that folder, which is the current one."""
    folder = shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(folder)
    return folder


RUN = Path("runs/tiny")
MORE = ("--resume", "runs/tiny", "--train.steps", "10")
SAMPLE = ("runs/tiny", "--max-new-tokens", "4")


def refused(folder: Path, pattern: str, *words: str, **options) -> None:
    """The command ends with exit code 2 and one sentence."""
    code, said = execute(folder, *words, **options)
    assert code == 2, said
    assert "Traceback" not in said
    (sentence,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(pattern, sentence), sentence


def recovered(folder: Path, pattern: str, *words: str, **options) -> str:
    """The command ends well and says in a note what it had to do."""
    code, said = execute(folder, *words, **options)
    assert code == 0, said
    assert any(re.search(pattern, line) for line in said.splitlines() if line.startswith(("note: ", "changed: "))), said
    return said


@pytest.mark.parametrize("damage", [truncate, empty, zeros, flip, os.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "state.json"])
def test_F49_a_damaged_file_is_named_and_the_checkpoint_before_it_is_gone_on_with(damaged, damage, name):
    damage(RUN / "step-000008" / name)
    if name != "state.safetensors":
        refused(
            damaged, rf"step-000008.*{name}|last/{name}|best/{name}", *SAMPLE, "--checkpoint", "last", program="sample"
        )
    said = recovered(
        damaged,
        rf"step-000008/{name} .*; set aside as step-000008.damaged, going back to the checkpoint before it",
        *MORE,
    )
    assert "from step 4" in said
    assert read_checkpoint(RUN / "last")[2]["step"] == 10
    assert [record["step"] for record in metrics(RUN)] == [2, 4, 6, 8, 10]
    load_model(RUN)


@pytest.mark.parametrize("file", ["tokenizer.json", "ranks.tiktoken"])
def test_a_tokenizer_with_any_byte_flipped_is_refused_and_written_again(damaged, file):
    path = RUN / "tokenizer" / file
    right, tokenizer = path.read_bytes(), load_tokenizer(RUN / "tokenizer")
    refusals, accepted = [], 0
    for place in range(0, len(right), 1 + len(right) // 200):
        path.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        try:
            _, loaded, _ = load_model(RUN)
        except UserError as error:
            refusals.append(str(error))
        else:  # the padding of base64 has bits that say nothing
            accepted += 1
            assert list(loaded.pieces) == list(tokenizer.pieces)
            assert loaded.pattern == tokenizer.pattern
    assert all(str(RUN / "tokenizer") in refusal for refusal in refusals)
    assert accepted < 20
    path.write_bytes(right[:-3] + bytes([right[-3] ^ 1]) + right[-2:])
    refused(damaged, "runs/tiny/tokenizer", *SAMPLE, program="sample")
    recovered(damaged, "runs/tiny/tokenizer was damaged, and is written again", *MORE)
    assert path.read_bytes() == right


def test_a_missing_tokenizer_is_refused_and_written_again(damaged):
    shutil.rmtree(RUN / "tokenizer")
    refused(damaged, "runs/tiny/tokenizer does not hold a tokenizer", *SAMPLE, program="sample")
    recovered(damaged, "runs/tiny/tokenizer was missing, and is written again", *MORE)
    load_model(RUN)


@pytest.mark.parametrize("file", ["weights.safetensors", "state.safetensors"])
@pytest.mark.parametrize("what", ["shape", "name"])
def test_tensors_of_another_shape_or_name_with_a_right_checksum_are_refused(damaged, file, what):
    path = RUN / "step-000008" / file
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
    tensors[name if what == "shape" else f"strange.{name}"] = torch.cat([tensors[name]] * 2)
    save_file(tensors, path)
    resign(RUN / "step-000008")
    refused(damaged, rf"step-000008 does not fit its config\.toml: .*{re.escape(name)}", *MORE)
    if file == "weights.safetensors":
        refused(damaged, "step-000008 does not fit", *SAMPLE, "--checkpoint", "last", program="sample")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors"])
def test_F48_a_pickle_instead_of_tensors_is_refused_and_not_executed(damaged, name, signed):
    for folder in RUN.glob("step-*"):
        torch.save({"a": Malicious()}, folder / name)
        if signed:
            resign(folder)
    refused(damaged, rf"{name} is damaged", *MORE)
    if name == "weights.safetensors":
        refused(damaged, rf"{name} is damaged", *SAMPLE, program="sample")
    assert not Path("executed").exists()


def test_F49_half_a_checkpoint_is_not_taken_for_one(damaged):
    shutil.copytree(RUN / "step-000008", RUN / ".step-000010.partial")
    truncate(RUN / ".step-000010.partial" / "weights.safetensors")
    (RUN / "step-000009").mkdir()
    shutil.copy(RUN / "step-000008/weights.safetensors", RUN / "step-000009")
    recovered(damaged, r"step-000009/state\.json cannot be read: No such file.*going back", *MORE)
    assert not list(RUN.glob(".step-*"))
    assert read_checkpoint(RUN / "last")[2]["step"] == 10


def edit(option: str, value: str) -> None:
    file = RUN / "config.toml"
    changed, n = re.subn(rf"(?m)^{option} = .*$", f"{option} = {value}", file.read_text("utf-8"))
    assert n == 1
    file.write_text(changed, "utf-8")


@pytest.mark.parametrize(("option", "value"), [("d_ff", "24"), ("rope_theta", "20000.0"), ("n_head", "4")])
def test_a_model_that_was_edited_is_refused_naming_both_values(damaged, option, value):
    edit(option, value)
    before = {"d_ff": 16, "rope_theta": 10000.0, "n_head": 2}[option]
    refused(damaged, rf"model\.{option} = {value} .*\b{before}", *MORE)
    refused(damaged, rf"model\.{option} = {value}, .*\b{before};", *SAMPLE, program="sample")


def test_a_learning_rate_that_was_edited_is_said_and_does_not_matter_to_samples(damaged):
    edit("learning_rate", "0.002")
    assert execute(damaged, *SAMPLE, program="sample")[0] == 0
    recovered(
        damaged, r"changed: optim\.learning_rate = 0\.002 \(it was 0\.01 when the checkpoint was written\)", *MORE
    )


def test_a_run_that_does_not_remember_its_configuration_and_tokenizer_can_be_read(damaged):
    for folder in RUN.glob("step-*"):
        state = {key: value for key, value in read_state(folder).items() if key not in ("config", "tokenizers")}
        checkpoint._write_state(folder, state)
    edit("rope_theta", "20000.0")
    model, _, _ = load_model(RUN)
    assert model.config.rope_theta == 20000.0


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "in the middle": lambda data: data[:40] + b"\0\xff{rubbish\n" + data[51:],
    "a line": lambda data: data.replace(b"\n", b"\n[]\n", 1),
    "a line twice": lambda data: data + data,
    "half of it": lambda data: data[: len(data) // 2],
    "zero bytes": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("how", GARBAGE)
def test_what_is_no_record_of_the_run_does_not_stay_in_its_metrics(damaged, how):
    file = RUN / "metrics.jsonl"
    before = metrics(RUN)
    file.write_bytes(GARBAGE[how](file.read_bytes()))
    if how == "a line twice":  # what follows the checkpoint's part is as if a kill had come
        assert execute(damaged, *MORE)[0] == 0
    else:
        recovered(damaged, r"runs/tiny/metrics\.jsonl has lost lines; [0-3] can still be read", *MORE)
    records = metrics(RUN)
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == 10
    assert all(record in before for record in records[:-1])


def limit_files(n: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [(500, "config.toml"), (30_000, r"step 8 could not be saved in full: .*File too large")],
    ids=["configuration", "weights"],
)
def test_F49_a_disk_that_takes_no_more_is_one_sentence(damaged, limit, sentence):
    refused(damaged, sentence, "tiny.toml", "--train.run-dir", "full", "--train.eval-interval", "0",
            "--model.d-ff", "512", prepare=partial(limit_files, limit))  # fmt: skip


def test_F49_a_disk_that_does_not_take_the_metrics_is_one_sentence_and_loses_nothing(damaged):
    expected = (RUN / "metrics.jsonl").read_bytes()
    words = ("--log.interval", "1", "--train.checkpoint-interval", "50", "--train.steps", "900")
    refused(damaged, r"runs/tiny/metrics\.jsonl cannot be written: File too large", *MORE[:2], *words,
            prepare=partial(limit_files, 70_000))  # fmt: skip
    step = read_checkpoint(RUN / "last")[2]["step"]
    assert step > 8
    assert (RUN / "metrics.jsonl").read_bytes().startswith(expected)
    code, said = execute(damaged, "--resume", "runs/tiny", "--train.steps", str(step + 2))
    assert code == 0, said
    assert [record["step"] for record in metrics(RUN)][-2:] == [step + 1, step + 2]


def become_nobody() -> None:
    load_model(RUN)  # what Python imports only now may lie where nobody reads
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


@pytest.fixture
def readable(damaged):
    """That folder, where somebody else may read it but not write."""
    for parent in damaged.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            os.chmod(parent, parent.stat().st_mode | 0o055)
    for path in (damaged, *damaged.rglob("*")):
        if not path.is_symlink() and path.name != "said.txt":
            path.chmod(0o555 if path.is_dir() else 0o444)
    (damaged / "said.txt").chmod(0o666)
    yield damaged
    for path in (damaged, *damaged.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)


def test_a_run_that_may_not_be_written_is_sampled_and_not_resumed(readable):
    code, said = execute(readable, *SAMPLE, program="sample", prepare=become_nobody)
    assert code == 0, said
    refused(readable, "runs/tiny cannot be written: Permission denied", *MORE, prepare=become_nobody)


@pytest.mark.parametrize("name", ["config.toml", "step-000008/weights.safetensors", "tokenizer/tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named(readable, name):
    (RUN / name).chmod(0)
    words = (*SAMPLE, "--checkpoint", "last")
    refused(readable, rf"{name.partition('/')[2] or name}|tokenizer", *words, program="sample", prepare=become_nobody)


def replace_by_folder(link: Path) -> None:
    target = link.resolve()
    link.unlink()
    shutil.copytree(target, link)


def dangle(link: Path) -> None:
    link.unlink()
    link.symlink_to("step-000099")


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_link_to_nothing_is_refused_and_put_right_by_resuming(damaged, name):
    best = os.readlink(RUN / "best")
    dangle(RUN / name)
    refused(damaged, rf"has no checkpoint {name}; checkpoints: step-000004, step-000008", *SAMPLE,
            "--checkpoint", name, program="sample")  # fmt: skip
    assert execute(damaged, "--resume", "runs/tiny")[0] == 0
    assert os.readlink(RUN / "best") == best
    assert os.readlink(RUN / "last") == "step-000008"


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_folder_in_the_place_of_a_link_is_refused_by_name(damaged, name):
    replace_by_folder(RUN / name)
    refused(damaged, rf"runs/tiny/{name} is a folder where a link to a checkpoint belongs", *MORE)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "8"},
        {"step": 7},
        {"machine": None},
        {"scaler": []},
        {"best_loss": "low"},
        {"torch": 2},
        {"corpus": ...},
    ],
    ids=str,
)
def test_a_state_that_training_did_not_write_is_not_gone_on_from(damaged, change):
    state = {**read_state(RUN / "step-000008"), **change}
    checkpoint._write_state(RUN / "step-000008", {name: value for name, value in state.items() if value is not ...})
    said = recovered(damaged, rf"step-000008/state.json is damaged: {next(iter(change))} is .*; set aside", *MORE)
    assert "from step 4" in said


def test_a_damaged_best_checkpoint_is_named_on_resuming_and_another_takes_its_place(damaged):
    os.truncate(RUN / "step-000004/weights.safetensors", 100)
    checkpoint._write_state(RUN / "step-000008", {**read_state(RUN / "step-000008"), "best_step": 4})
    recovered(damaged, r"step-000004/weights.safetensors is damaged: .*; that was the best checkpoint", *MORE)
    assert os.readlink(RUN / "best") == "step-000010"
    load_model(RUN)


def test_a_best_checkpoint_that_is_gone_is_said_and_another_takes_its_place(damaged):
    best = read_state(RUN / "last")["best_step"]
    assert best == 8, "the test removes the best, and goes back to the one before it"
    state = {**read_state(RUN / "step-000008"), "best_step": 2}
    checkpoint._write_state(RUN / "step-000008", state)
    recovered(damaged, "step-000002 is gone; that was the best checkpoint", *MORE)
    assert os.readlink(RUN / "best") == "step-000010"
    assert read_state(RUN / "last")["best_step"] == 10
