"""Tiny training runs: a preset, a text, the command in this process, and what it left behind."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import checkpoint
import machine
import progress
import sample
import train
from config import command
from config.schema import Config
from data.loader import Batches, PairBatches
from data.prepare import Corpus, Split, prepare
from distributed import ALONE, Processes

TINY = {
    "model": {"n_layer": 1, "n_head": 2, "d_model": 16, "d_ff": 16, "max_seq_len": 16},
    "data": {"source": "text.txt", "tokenizer": "bytes"},
    "optim": {"warmup_steps": 2, "learning_rate": 1e-2},
    "train": {
        "steps": 8,
        "batch_size": 4,
        "eval_interval": 0,
        "checkpoint_interval": 0,
        "device": "cpu",
        "dtype": "float32",
        "compile": "off",
    },
    "log": {"interval": 1, "sample_tokens": 0},
}


def text(n_words: int = 400) -> str:
    """Words in a random order, always the same; not only ASCII."""
    words = ["별", "star", "é", "the", "cat", "sees", "a", "bright", "sky", "\n"]
    return " ".join(np.random.default_rng(0).choice(words, n_words))


def settings(**sections: dict) -> Config:
    """The tiny configuration with some options changed: settings(train={"steps": 3})."""
    merged = {name: {**options, **sections.get(name, {})} for name, options in TINY.items()}
    config = Config.model_validate(merged)
    return config.model_copy(update={"model": config.model.resolve(257)})


PAIRS = {
    "kind": "encoder_decoder",
    "position": "sinusoidal",
    "norm": "layernorm",
    "norm_position": "post",
    "bias": True,
}


def write_pairs(file: Path, n: int = 60) -> list[tuple[str, str]]:
    """Words and what becomes of them, of many lengths, as a .tsv."""
    rng, words = np.random.default_rng(0), {"star": "별", "é": "e!", "the": "그", "cat": "고양이", "sees": "본다"}
    drawn = [rng.choice(list(words), rng.integers(1, 5)).tolist() for _ in range(n)]
    pairs = [(" ".join(row), " ".join(words[word] for word in row[::-1])) for row in drawn]
    file.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), "utf-8")
    return pairs


def pair_corpus(folder: Path, n: int = 60, **data) -> Corpus:
    """The prepared pairs of `write_pairs`."""
    write_pairs(folder / "pairs.tsv", n)
    config = settings(model=PAIRS, data={"source": str(folder / "pairs.tsv"), "val_fraction": 0.2, **data}).data
    return prepare(config, pairs=True, cache_dir=folder / "cache")


def corpus_of(train_ids, val_ids=None) -> Corpus:
    """A corpus of given ids that never touched the disk; bytes, so each id is one byte."""
    from data.tokenizer import ByteTokenizer

    train_ids, val_ids = (np.asarray(ids, np.uint16) for ids in (train_ids, train_ids if val_ids is None else val_ids))
    splits = [Split(ids, n_bytes=len(ids), n_documents=1) for ids in (train_ids, val_ids)]
    return Corpus(Path(), ByteTokenizer(), int(max(train_ids.max(), val_ids.max())), *splits)


def byte_corpus(tmp_path: Path, tokenizer: str = "bytes", n_words: int = 400) -> Corpus:
    """A prepared corpus of `text`."""
    file = tmp_path / "text.txt"
    file.write_bytes(text(n_words).encode())
    config = settings(data={"source": str(file), "tokenizer": tokenizer}).data
    return prepare(config, cache_dir=tmp_path / "cache")


def make_trainer(
    corpus: Corpus, run: Path = Path("/nonexistent"), compile: bool = False, processes: Processes = ALONE, **sections
) -> train.Trainer:
    config = settings(**sections)
    size = machine.micro_batch_size(config, processes)
    where = machine.Machine("cpu", getattr(torch, config.train.dtype), compile, size, processes)
    return train.Trainer(config, run, corpus, where)


class FixedBatch:
    """Instead of `Batches`: the same tensors, inputs and targets, at every step."""

    def __init__(self, *tensors):
        self.tensors = [torch.as_tensor(tensor) for tensor in tensors]

    def batch(self, step: int):
        return self.tensors


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


RESUMED = {
    "model": {"dropout": 0.1},
    "train": {"micro_batch_size": 2, "eval_interval": 2, "checkpoint_interval": 3, "keep_checkpoints": 3},
    "log": {"interval": 2, "sample_tokens": 4},
}


class Place:
    """A folder with a text and a preset in which `python train.py` is called, as a function."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write_preset(self, name: str = "tiny", **sections) -> None:
        """Writes the tiny preset with changes; the text is written once."""
        from config import to_toml

        merged = {key: {**options, **sections.get(key, {})} for key, options in TINY.items()}
        (self.folder / f"{name}.toml").write_text(to_toml(Config.model_validate(merged)), "utf-8")
        if not (self.folder / "text.txt").exists():
            (self.folder / "text.txt").write_bytes(text().encode())

    def train(self, *words: str) -> None:
        """`python train.py WORDS`; without a preset or --resume that of `write_preset`."""
        given = bool(words) and (words[0] == "--resume" or words[0].endswith(".toml"))
        train.main(train.read_request([*([] if given else ["tiny.toml"]), *words]))


class Stopper:
    """Makes `Trainer.step` end the run after given steps, by a signal as the system would or by an error as a kill
    would: at once, saving nothing."""

    def __init__(self, monkeypatch):
        self.signal_after, self.error_after, self.hashes = None, None, {}
        step = train.Trainer.step

        def stopping_step(trainer, *arguments, **options):
            values = step(trainer, *arguments, **options)
            if trainer.state.step == self.error_after:
                raise Killed
            if trainer.state.step == self.signal_after:
                os.kill(os.getpid(), signal.SIGTERM)
            return values

        def recording(batch):
            def recording_batch(batches, number):
                tensors = batch(batches, number)
                data = b"".join(tensor.numpy().tobytes() for tensor in tensors)
                self.hashes.setdefault(number, []).append(hashlib.sha256(data).hexdigest())
                return tensors

            return recording_batch

        monkeypatch.setattr(train.Trainer, "step", stopping_step)
        for kind in (Batches, PairBatches):
            monkeypatch.setattr(kind, "batch", recording(kind.batch))


class Killed(Exception):
    """The process ended here."""


def checkpoint_bytes(folder: Path) -> dict[str, bytes]:
    """The weights and the optimizer state of a checkpoint, as they lie on the disk."""
    return {name: (folder / name).read_bytes() for name in ("weights.safetensors", "state.safetensors")}


def assert_same_run(run: Path, expected: Path) -> None:
    assert checkpoint_bytes(run / "last") == checkpoint_bytes(expected / "last")
    assert (run / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert os.readlink(run / "best") == os.readlink(expected / "best")
    assert checkpoint_bytes(run / "best") == checkpoint_bytes(expected / "best")


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


OPERATIONS = [
    (os, "fsync"),
    (os, "truncate"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "symlink_to"),
    (Path, "unlink"),
    (Path, "write_bytes"),
    (Path, "write_text"),
    (progress.Log, "record"),
    (shutil, "rmtree"),
    (checkpoint, "save_file"),
]


class Failing:
    """Counts file operations and fails at the one numbered `at`, before it or half-way through its writing."""

    def __init__(self, monkeypatch, at=None, half=False, error=None):
        self.count, self.at, self.half, self.active = 0, at, half, True
        self.error = error or OSError(28, "No space left on device")
        for owner, name in OPERATIONS:
            monkeypatch.setattr(owner, name, self.wrap(name, getattr(owner, name)))

    def wrap(self, name, operation):
        def operate(*arguments, **options):
            if not self.active:
                return operation(*arguments, **options)
            self.count += 1
            if self.count - 1 != self.at:
                return operation(*arguments, **options)
            self.active = False
            if self.half and name == "save_file":
                operation(*arguments, **options)
                os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
            elif self.half and name in ("write_text", "write_bytes"):
                operation(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif self.half and name == "record" and (file := arguments[0].file):
                file.write('{"step": 4, "lo')
                file.flush()
            elif self.half and name == "rmtree" and arguments[0].exists():
                next(path for path in arguments[0].iterdir()).unlink()
            self.fail()

        return operate

    def fail(self) -> None:
        raise self.error


# Processes of their own


class Killing(Failing):
    """Kills the process instead, as nothing can prevent."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(at: int) -> None:
    """Every other time half-way through it."""
    Killing(SimpleNamespace(setattr=setattr), at, half=at % 2 == 1)


PROGRAMS = {"train": (train.main, train.read_request), "sample": (sample.main, sample.parse_options)}


def in_process(folder: Path, program: str, words: Sequence[str], prepare: Callable[[], None] | None) -> None:
    """`python PROGRAM.py WORDS` in `folder`, after `prepare`; what it says goes to its said.txt."""
    os.chdir(folder)
    with open("said.txt", "wb") as said:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(said.fileno(), number)
    torch.set_num_threads(1)
    progress.loss_curve = lambda *_: None  # the picture takes longer than the training,
    train.matmul_peak = lambda *_, **__: (1.0, 0)  # and so does what is printed alone
    if prepare:
        prepare()
    main, read = PROGRAMS[program]
    command(lambda: main(read(words)))()


FORKS = multiprocessing.get_context("forkserver")  # each child begins with torch imported
FORKS.set_forkserver_preload(["tests.training"])


def start(folder: Path, *words: str, program: str = "train", prepare: Callable[[], None] | None = None):
    """The process, which can be killed."""
    process = FORKS.Process(target=in_process, args=(folder, program, words, prepare))
    process.start()
    return process


def execute(folder: Path, *words: str, **options) -> tuple[int, str]:
    """The exit code of such a process, minus the signal that ended it, and what it said."""
    process = start(folder, *words, **options)
    process.join(120)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{words} hangs")
    return process.exitcode, (folder / "said.txt").read_text("utf-8", "replace")
