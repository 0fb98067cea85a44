"""What is told while a model trains: the time that is left, durations, Weights & Biases."""

# ruff: noqa: F811

import io
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import progress
import train
from tests.test_train import ROOT, place, python, signals  # noqa: F401
from tests.training import Killed, Stopper, metrics


class Clock:
    """Time that passes only where something is computed."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("interval", [0, 30, 400])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_is_right_within_a_fifth_after_a_tenth(place, monkeypatch, capsys, interval, seed):
    """Steps of two seconds, give or take a half, the first of a minute (it compiles); evaluations of twelve."""
    clock, random = Clock(), np.random.default_rng(seed)
    step, evaluate, progress_line = train.Trainer.step, train.Trainer.evaluate, progress.Log.progress
    said = []

    def slow_step(trainer):
        clock.now += 60 if trainer.state.step == 0 else random.uniform(1.5, 2.5)
        return step(trainer)

    def slow_evaluate(trainer):
        clock.now += random.uniform(11, 13)
        return evaluate(trainer)

    def noted(log, values):
        progress_line(log, values)
        said.append((log.trainer.state.step, clock.now, log.trainer.seconds_left()))

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train.Trainer, "step", slow_step)
    monkeypatch.setattr(train.Trainer, "evaluate", slow_evaluate)
    monkeypatch.setattr(train.Trainer, "evaluation_steps", lambda trainer: 4.0)
    monkeypatch.setattr(progress.Log, "progress", noted)
    place.write_preset(train={"steps": 240, "eval_interval": interval}, log={"interval": 4})
    place.train()
    checked = [(left, clock.now - now) for step, now, left in said if 24 <= step <= 200]
    assert len(checked) >= 45
    for left, was in checked:
        assert left == pytest.approx(was, rel=0.2)
    assert said[-1][2] == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" left")]
    assert len(lines) == len(said)
    assert re.fullmatch(r"step 240/240 · loss [\d.]+ · [\d,]+ tokens/s \(\d+% of peak\) · 0 s left", lines[-1])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (119.7, "2 min 0 s"), (3599.6, "1 h 0 min"), (7260, "2 h 1 min")],
)
def test_durations_read_well(seconds, words):
    assert progress.duration(seconds) == words


# Weights & Biases


def test_F51_wandb_is_not_imported_unless_asked_for(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    place.write_preset(train={"steps": 2})
    place.train()


class WandbError(Exception):
    pass


class FakeWandb:
    """Records what is logged; `online` says whether a connection comes."""

    Error = WandbError

    def __init__(self, online: bool = True, key: str | None = None):
        self.online, self.started, self.logged, self.finished = online, [], [], False
        self.id, self.axes = "fake", {}
        self.api = SimpleNamespace(api_key=key)
        self.Settings = lambda **settings: settings

    def init(self, mode, **options):
        self.started.append((mode, options))
        if mode == "online" and not self.online:
            raise WandbError("no connection")
        return self

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values):
        self.logged.append(values)

    def teardown(self):
        self.started.append(("teardown", {}))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize(
    ("asked", "key", "online", "modes"),
    [
        ("offline", None, True, ["offline"]),
        ("online", None, True, ["teardown", "offline"]),
        ("online", "k" * 40, True, ["online"]),
        ("online", "k" * 40, False, ["online", "teardown", "offline"]),
    ],
)
def test_F51_wandb_falls_back_to_offline_without_a_key_or_a_connection(
    place, monkeypatch, capsys, asked, key, online, modes
):
    fake = FakeWandb(online, key)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    place.write_preset(train={"steps": 3})
    place.train("--log.wandb", asked)
    assert [mode for mode, _ in fake.started] == modes
    assert fake.started[-1][1]["settings"]["init_timeout"] <= 10
    assert ("logging offline" in capsys.readouterr().out) == (modes[-1] != asked)
    assert [values["step"] for values in fake.logged] == [1, 2, 3]
    assert fake.axes == {"step": None, "*": "step"}
    assert fake.logged[0]["loss"] == metrics(Path("runs/tiny"))[0]["loss"]
    assert fake.finished


def test_F52_after_a_kill_steps_come_again_in_the_same_run_and_none_is_lost(place, monkeypatch):
    fake = FakeWandb(key="k" * 40)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    stopper = Stopper(monkeypatch)
    stopper.error_after = 10
    place.write_preset(train={"steps": 12, "checkpoint_interval": 6})
    with pytest.raises(Killed):
        place.train("--log.wandb", "online")
    stopper.error_after = None
    place.train("--resume", "runs/tiny")
    # By its own count Weights & Biases drops what comes again: steps are a value like others, and the axis.
    steps = [values["step"] for values in fake.logged]
    assert steps == [*range(1, 10), *range(7, 13)]  # the tenth was killed before it was told
    again = {values["step"]: values["loss"] for values in fake.logged[9:]}
    assert all(values["loss"] == again.get(values["step"], values["loss"]) for values in fake.logged)
    assert [options["id"] for _, options in fake.started] == [None, "fake"]
    assert [options["resume"] for _, options in fake.started] == [None, "allow"]


def test_F51_a_logger_that_breaks_is_said_once_and_training_goes_on(place, monkeypatch, capsys):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def broken(values):
        fake.logged.append(values)
        raise BrokenPipeError("gone\nand more")

    monkeypatch.setattr(fake, "log", broken)
    place.write_preset(train={"steps": 3})
    place.train("--log.wandb", "offline")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "gone" in line]
    assert "metrics.jsonl" in line
    assert len(fake.logged) == 1
    assert [record["step"] for record in metrics(Path("runs/tiny"))] == [1, 2, 3]


@pytest.mark.slow
def test_F51_wandb_offline_needs_no_key_no_terminal_and_no_answer(place):
    place.write_preset(train={"eval_interval": 4})
    environment = {"HOME": str(place.folder), "WANDB_API_KEY": "", "NETRC": str(place.folder / "none")}
    script = str(ROOT / "train.py")
    result = python(script, "tiny.toml", "--log.wandb", "offline", cwd=place.folder, env=environment)
    assert result.returncode == 0, result.stderr
    (file,) = Path("runs/tiny").rglob("*.wandb")
    data = file.read_bytes()
    for record in metrics(Path("runs/tiny")):
        for name, value in record.items():
            assert name.encode() in data
            assert repr(value).encode() in data, f"{name} = {value} of step {record['step']}"
    assert not (place.folder / "wandb").exists()
    result = python(script, "--resume", "runs/tiny", "--train.steps", "12", cwd=place.folder, env=environment)
    assert result.returncode == 0, result.stderr
    files = list(Path("runs/tiny").rglob("*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "the resumed run is another one"


@pytest.mark.slow
def test_F51_wandb_online_without_a_network_falls_back_in_time_with_one_line(place):
    place.write_preset()
    environment = {"HOME": str(place.folder), "WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://localhost:1"}
    script, begin = str(ROOT / "train.py"), time.monotonic()
    python(script, "tiny.toml", cwd=place.folder, env=environment)
    without = time.monotonic() - begin
    result = python(script, "tiny.toml", "--log.wandb", "online", cwd=place.folder, env=environment)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - begin - 2 * without < 15  # ten seconds, and a busy machine
    (line,) = [line for line in result.stdout.splitlines() if "Weights & Biases" in line]
    assert line.endswith("; logging offline")
    assert list(Path("runs/tiny-2").rglob("offline-run-*/*.wandb"))
    result = python(script, "--resume", "runs/tiny-2", "--train.steps", "12", cwd=place.folder, env=environment)
    assert result.returncode == 0, result.stderr
    assert "; logging offline" in result.stdout
    (_,) = {file.name for file in Path("runs/tiny-2").rglob("offline-run-*/*.wandb")}
