"""Many processes compute what one does: real ones, forked from one that has loaded everything, on the CPU with gloo."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
import machine
import progress
import train
from config import ConfigError, errors
from data.loader import IGNORE
from distributed import ALONE, Processes, exchange, fair_threads, own_slice, slice_like, whole
from tests.training import (
    PAIRS,
    FixedBatch,
    Place,
    checkpoint_bytes,
    corpus_of,
    make_trainer,
    metrics,
    pair_corpus,
    settings,
)

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "tests.training"])
LIMIT = 120  # seconds after which processes hang


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Group:
    """Processes that call `function(rank, *arguments)` as torchrun's would; what it returns is a picklable value."""

    def __init__(self, folder: Path, function, *arguments, size: int = 2):
        self.folder, self.processes, self.pipes = folder, [], []
        port = free_port()
        for rank in range(size):
            pipe, end = FORKS.Pipe(duplex=False)
            work = (end, rank, size, port, str(folder / f"output-{rank}"), function, arguments)
            process = FORKS.Process(target=_work, args=work, daemon=True)
            process.start()
            end.close()
            self.processes.append(process)
            self.pipes.append(pipe)

    def results(self) -> list:
        """What each returned, in the order of ranks; None for one that ended without."""
        deadline, results = time.monotonic() + LIMIT, []
        try:
            for pipe, process in zip(self.pipes, self.processes, strict=True):
                assert pipe.poll(max(deadline - time.monotonic(), 0)), f"{process.name} hangs"
                try:
                    results.append(pipe.recv())
                except EOFError:
                    results.append(None)
            for process in self.processes:
                process.join(max(deadline - time.monotonic(), 0))
                assert process.exitcode is not None, f"{process.name} hangs"
        finally:
            for process in self.processes:
                process.kill()
        return results

    @property
    def codes(self) -> list[int]:
        return [process.exitcode for process in self.processes]

    def output(self, rank: int) -> str:
        """What a process printed, standard error too."""
        return (self.folder / f"output-{rank}").read_text("utf-8")


def _work(end, rank: int, size: int, port: int, output: str, function, arguments) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY), descriptor)
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    progress.loss_curve = lambda *arguments: None
    train.matmul_peak = lambda *_, **__: (1.0, 0)
    errors.PATIENCE = 0  # nobody ends the others here
    end.send(function(rank, *arguments))


def together(folder: Path, function, *arguments) -> list:
    """The results of two processes that ended well."""
    group = Group(folder, function, *arguments)
    results = group.results()
    assert group.codes == [0, 0], group.output(0) + group.output(1)
    return results


# The same steps


SGD = {"name": "sgd", "learning_rate": 0.3, "weight_decay": 0.1, "grad_clip": 0.5, "warmup_steps": 0}
ADAMW = {"name": "adamw", "learning_rate": 1e-2, "grad_clip": 0.5, "warmup_steps": 2}
MUON = {"name": "muon", "learning_rate": 1e-2, "grad_clip": 0.5, "warmup_steps": 2}
PIECES = {"steps": 40, "batch_size": 4, "micro_batch_size": 1}
COURSES = {
    "text": {"model": {"n_layer": 2}},
    "tied": {"model": {"tie_embeddings": True}},
    "untied": {"model": {"tie_embeddings": False, "position": "learned", "norm": "layernorm", "bias": True}},
    "pairs": {"model": PAIRS},
    "steady": {"model": {"dropout": 0.0}},  # what is compiled draws other dropout
    "three windows": {},  # to validate
    "F40": {},  # of very unequal numbers of targets
}


def targets_of_unequal_number() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (4, 16), of which 16, 1, 0 and 6 count."""
    inputs, targets = np.random.default_rng(0).integers(0, 256, (2, 4, 16))
    targets[np.arange(16) >= np.array([16, 1, 0, 6])[:, None]] = IGNORE
    return inputs, targets


def trainer_of(course: str, folder: Path, optim: dict, processes: Processes, **train_options) -> train.Trainer:
    sections = {"log": {"sample_tokens": 9}, **COURSES[course], "optim": optim, "train": {**PIECES, **train_options}}
    sections["model"] = {"dropout": 0.1, **sections.get("model", {})}
    if course == "pairs":
        folder.mkdir(exist_ok=True)
        corpus = pair_corpus(folder)
    else:
        n_graded = 16 * 3 + 1 if course == "three windows" else 200
        corpus = corpus_of(np.random.default_rng(1).integers(0, 256, 500), np.arange(n_graded) % 7)
    compile = train_options.get("compile") == "on"
    trainer = make_trainer(corpus, processes=processes, compile=compile, **sections)
    if course == "F40":
        trainer.batches = FixedBatch(*targets_of_unequal_number())
    return trainer


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: whole(tensor.detach()).numpy().copy() for name, tensor in tensors.items()}


def steps(trainer: train.Trainer, n: int) -> dict:
    """The losses of `n` steps, the gradients of the first (clipped), the weights after the last, and the tokens."""
    parameters, gradients = checkpoint.parameters_by_name(trainer.model), []
    check = trainer.check

    def recording_check(nats, norm):
        if not gradients:
            gradients.append(arrays({name: parameter.grad for name, parameter in parameters.items()}))
        check(nats, norm)

    trainer.check = recording_check
    values = [trainer.step() for _ in range(n)]
    return {
        "losses": np.array([value["loss"] for value in values]),
        "norms": np.array([value["gradient_norm"] for value in values]),
        "gradients": gradients[0],
        "weights": arrays(parameters),
        "tokens": trainer.state.tokens,
    }


def course(name: str, folder: Path, processes: Processes, strategy: str) -> dict[str, dict]:
    """5 steps of SGD and 20 of AdamW, and 20 of Muon."""
    return {
        optim["name"]: steps(trainer_of(name, folder, optim, processes, strategy=strategy), n)
        for optim, n in ((SGD, 5), (ADAMW, 20), (MUON, 20))
    }


def all_courses(rank: int, folder: Path, strategy: str) -> dict[str, dict]:
    processes = Processes.started()
    results = {name: course(name, folder / f"{name}-{rank}", processes, strategy) for name in COURSES}
    processes.end()
    return results


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The courses in one process."""
    folder = tmp_path_factory.mktemp("one")
    return {name: course(name, folder / name, ALONE, "ddp") for name in COURSES}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two(request, tmp_path_factory):
    """The courses in each of two processes."""
    return together(folder := tmp_path_factory.mktemp(request.param), all_courses, folder, request.param)


def differences(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name].astype(np.float64) - b[name]).max()) for name in a)


@pytest.mark.parametrize("name", COURSES)
def test_F40_F54_two_processes_compute_what_one_does(one, two, name):
    expected, (found, other) = one[name], (results[name] for results in two)
    for optimizer in ("sgd", "adamw", "muon"):
        assert differences(found[optimizer]["weights"], other[optimizer]["weights"]) == 0
        assert differences(found[optimizer]["gradients"], expected[optimizer]["gradients"]) < 1e-6
        assert found[optimizer]["tokens"] == expected[optimizer]["tokens"]
    assert expected["sgd"]["norms"].max() > 0.5, "nothing was clipped"
    assert differences(found["sgd"]["weights"], expected["sgd"]["weights"]) < 1e-6
    np.testing.assert_allclose(found["adamw"]["losses"], expected["adamw"]["losses"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(found["muon"]["losses"], expected["muon"]["losses"], atol=2e-3, rtol=0)


def wrong_switch(module, now):
    """The switch set after the forward pass, which so takes the one of the micro-batch before."""
    return exchange(module, not now)


class MeanOfMeans(train.Loss):
    """Micro-batches that weigh the same, whatever their numbers of targets: here four of 23 targets in all."""

    def forward(self, *batch, **options):
        return super().forward(*batch, **options) / (batch[-1] != IGNORE).sum().clamp(min=1) * 23 / 4


def wrong_course(rank: int, folder: Path, name: str, value, strategy: str) -> dict:
    setattr(train, name, value)
    return steps(trainer_of("F40", folder, SGD, Processes.started(), strategy=strategy), 5)


@pytest.mark.parametrize(
    ("name", "value", "strategy"),
    [("exchange", wrong_switch, "ddp"), ("exchange", wrong_switch, "fsdp"), ("Loss", MeanOfMeans, "ddp")],
)
def test_F40_F54_a_wrong_exchange_or_mean_would_be_noticed(tmp_path, one, name, value, strategy):
    found, other = together(tmp_path, wrong_course, tmp_path, name, value, strategy)
    assert differences(found["weights"], one["F40"]["sgd"]["weights"]) > 1e-3
    if name == "exchange" and strategy == "ddp":
        assert differences(found["weights"], other["weights"]) > 1e-3


def own_gradient(rank: int, folder: Path, strategy: str, changed: bool) -> dict[str, np.ndarray]:
    """What this process holds of the gradient, where the second process's rows are changed or not."""
    trainer = trainer_of("F40", folder, SGD, Processes.started(), strategy=strategy)
    inputs, targets = targets_of_unequal_number()
    inputs[1::2] += changed
    trainer.batches, gradient = FixedBatch(inputs, targets), {}
    parameters = checkpoint.parameters_by_name(trainer.model)
    trainer.check = lambda *_: gradient.update({n: own_slice(p.grad).numpy().copy() for n, p in parameters.items()})
    trainer.step()
    return gradient


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_one_process_reads_moves_the_gradient_of_the_other(tmp_path, strategy):
    before, after = (together(tmp_path, own_gradient, tmp_path, strategy, changed)[0] for changed in (False, True))
    assert before.keys() == after.keys()
    unmoved = [name for name in before if np.array_equal(before[name], after[name])]
    assert not unmoved
    if strategy == "fsdp":
        assert before["decoder.embed.weight"].shape == (129, 16), "this process holds more than its half of 257 rows"


# Evaluating, and sizes


def graded(rank: int, folder: Path, name: str, strategy: str) -> tuple[dict, str]:
    """What an evaluation and a sample give, twice, with a step between."""
    (own := folder / str(rank)).mkdir(exist_ok=True)
    trainer = trainer_of(name, own, ADAMW, Processes.started() if rank >= 0 else ALONE, strategy=strategy)
    first = trainer.evaluate(), trainer.sample()
    trainer.step()
    return first, (trainer.evaluate(), trainer.sample())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["three windows", "tied", "untied", "pairs"])
def test_F55_validation_and_samples_of_two_processes_are_those_of_one(tmp_path, name, strategy):
    expected = graded(-1, tmp_path, name, strategy)
    found, other = together(tmp_path, graded, tmp_path, name, strategy)
    for (values, sample), (wanted, text), (told, nothing) in zip(found, expected, other, strict=True):
        assert values["val_loss"] == pytest.approx(wanted["val_loss"], abs=1e-6) == told["val_loss"]
        assert values == pytest.approx(wanted, rel=1e-6, nan_ok=True)
        assert (sample, nothing) == (text, "")
        assert text


def test_F53_the_batch_is_shared_by_all_processes_or_refused():
    def size(batch_size: int, micro_batch_size: int | None, n: int = 2) -> int:
        options = {"batch_size": batch_size, "micro_batch_size": micro_batch_size}
        return machine.micro_batch_size(settings(train=options), Processes(size=n))

    assert (size(4, 1), size(4, 2), size(4, None), size(12, None, 3)) == (1, 2, 2, 4)
    with pytest.raises(ConfigError, match=r"train\.batch_size = 3 in micro-batches of 1 .* 2 processes; .*: 2 and 4$"):
        size(3, 1)
    with pytest.raises(ConfigError, match=r"train\.batch_size = 1 cannot .* by 2 processes; .*: 2$"):
        size(1, None)
    with pytest.raises(ConfigError, match=r"train\.batch_size = 12 in micro-batches of 4 .*: 8 and 16$"):
        size(12, 4)


def shared_steps(rank: int, folder: Path) -> tuple[int, int]:
    """How many forward passes two steps take in this process, and the tokens of all."""
    trainer, counted = trainer_of("text", folder, SGD, Processes.started()), []
    trainer.loss.register_forward_hook(lambda *_: counted.append(1))
    trainer.step()
    trainer.step()
    return len(counted), trainer.state.tokens


def test_F53_four_micro_batches_become_two_in_each_of_two_processes(tmp_path):
    assert together(tmp_path, shared_steps, tmp_path) == 2 * [(2 * 2, 2 * 4 * 16)]


def test_a_gpu_for_each_process_or_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"took GPU {device}"))
    processes = Processes(size=4, local_size=2, local_rank=1)
    with pytest.raises(ConfigError, match=r"starts 2 processes on a machine with 1 GPU.*--nproc-per-node 1"):
        machine.take_share(processes, "cuda")
    with pytest.raises(ConfigError, match=r"train\.device = mps"):
        machine.take_share(processes, "mps")
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    machine.take_share(processes, "cuda")
    assert taken == [1]


# The parts


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_equally_many_and_count_each_batch_once(n, size):
    shares = [list(Processes(rank, size).share(range(n))) for rank in range(size)]
    assert {len(share) for share in shares} == {-(-n // size)}
    assert sorted(batch for share in shares for batch, counts in share if counts) == list(range(n))
    assert list(Processes(0, size).share([])) == []


def test_threads_are_shared_unless_the_user_has_set_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun does
    assert [fair_threads(size) for size in (1, 2, 3, 7, 8)] == [None, 3, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert fair_threads(2) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert fair_threads(2) is None


def sliced(rank: int) -> list[tuple]:
    """Of matrices of 1 to 5 rows: what this process is given of a whole one, and all of it put together again."""
    mesh, found = init_device_mesh("cpu", (Processes.started().size,)), []
    for n_row in range(1, 6):
        tensor = torch.arange(3.0 * n_row).view(n_row, 3)
        parameter = distribute_tensor(torch.zeros(n_row, 3), mesh, [Shard(0)])
        mine = slice_like(tensor, parameter)
        assert mine.placements == parameter.placements
        found.append((own_slice(mine).numpy(), whole(mine).numpy()))
    return found


def test_a_slice_is_what_a_process_holds_and_all_slices_are_the_whole(tmp_path):
    for n_row, slices in enumerate(zip(*together(tmp_path, sliced), strict=True), 1):
        expected = np.arange(3.0 * n_row).reshape(n_row, 3)
        np.testing.assert_array_equal(np.concatenate([own for own, _ in slices]), expected)
        assert abs(len(slices[0][0]) - len(slices[1][0])) <= 1
        for _, together_again in slices:
            np.testing.assert_array_equal(together_again, expected)
    tensor = torch.zeros(2)
    assert all(function(tensor) is tensor for function in (whole, own_slice))
    assert slice_like(tensor, tensor) is tensor


# Whole runs: stopped, resumed, killed


RUN = {
    "model": {"n_layer": 2, "dropout": 0.1},
    "train": {
        "steps": 8,
        "batch_size": 4,
        "micro_batch_size": 1,
        "eval_interval": 4,
        "checkpoint_interval": 3,
        "keep_checkpoints": 9,
    },
    "log": {"interval": 1, "sample_tokens": 5},
}


def call(rank: int, folder: Path, words: list[str], signals: dict[tuple[int, int], int]) -> None:
    """`python train.py WORDS` in a process of which step and rank say when it sends itself which signal."""
    os.chdir(folder)
    step = train.Trainer.step

    def interrupted_step(trainer):
        values = step(trainer)
        if number := signals.get((trainer.state.step, rank)):
            os.kill(os.getpid(), number)
        return values

    train.Trainer.step = interrupted_step
    train.command(train.main)(train.command(train.read_request)(words))


def call_all(folder: Path, *words: str, size: int = 2, signals=None) -> Group:
    (output := folder / f"output-{len(os.listdir(folder))}").mkdir()
    group = Group(output, call, folder, list(words), signals or {}, size=size)
    group.results()
    return group


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of 8 steps: of one process (1), and of two with ddp and fsdp; and the same, stopped after step 5."""
    folder = tmp_path_factory.mktemp("runs")
    Place(folder).write_preset(**RUN)
    for name, size in {"1": 1, "ddp": 2, "fsdp": 2}.items():
        words = ["tiny.toml", f"--train.strategy={'fsdp' if name == 'fsdp' else 'ddp'}"]
        group = call_all(folder, *words, f"--train.run-dir=runs/whole-{name}", size=size)
        assert group.codes == [0] * size, group.output(0)
        signals = {(5, size - 1): signal.SIGTERM}
        group = call_all(folder, *words, f"--train.run-dir=runs/stopped-{name}", size=size, signals=signals)
        assert group.codes == [128 + signal.SIGTERM] * size, group.output(0)
        assert f"stopped at step 5, saved; go on with: python train.py --resume runs/stopped-{name}" in group.output(0)
    return folder


def resumed(place: Path, before: str, after: str, tmp_path: Path) -> tuple[Path, Group]:
    """The run that was stopped as one of `place`, ended as another."""
    run = place / f"runs/{before}-{after}"
    shutil.copytree(place / f"runs/stopped-{before}", run, symlinks=True)
    words = ["--resume", str(run), f"--train.strategy={'fsdp' if after == 'fsdp' else 'ddp'}"]
    size = 1 if after == "1" else 2
    group = call_all(place, *words, size=size)
    assert group.codes == [0] * size, group.output(0)
    return run, group


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_F55_a_signal_to_one_process_stops_all_and_they_go_on_bit_for_bit(place, tmp_path, strategy):
    whole_run = place / f"runs/whole-{strategy}"
    run, group = resumed(place, strategy, strategy, tmp_path)
    assert "instead of" not in group.output(0)
    assert group.output(1) == "", "the second process told something"
    assert [record["step"] for record in metrics(run)] == list(range(1, 9))
    assert (run / "metrics.jsonl").read_bytes() == (whole_run / "metrics.jsonl").read_bytes()
    for name in ("best", "last"):
        assert checkpoint_bytes(run / name) == checkpoint_bytes(whole_run / name)


@pytest.mark.parametrize(("before", "after"), [("1", "ddp"), ("ddp", "1"), ("ddp", "fsdp"), ("fsdp", "1")])
def test_a_run_goes_on_with_other_processes_and_says_so(place, tmp_path, before, after):
    run, group = resumed(place, before, after, tmp_path)
    n_before, n_after = (1 if name == "1" else 2 for name in (before, after))
    note = f"note: processes: {n_after} instead of {n_before}; sums may round differently"
    assert (note in group.output(0)) == (n_before != n_after)
    assert ("changed: train.strategy = fsdp (it was ddp)" in group.output(0)) == (after == "fsdp")
    for expected in (place / "runs/whole-1", place / f"runs/whole-{before}"):
        assert [record["step"] for record in metrics(run)] == [record["step"] for record in metrics(expected)]
        for found, wanted in zip(metrics(run), metrics(expected), strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
        weights = [load_file(folder / "last/weights.safetensors") for folder in (run, expected)]
        assert differences(*({name: tensor.numpy() for name, tensor in part.items()} for part in weights)) < 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("killed", [0, 1])
def test_F55_when_a_process_is_killed_the_other_ends_with_a_sentence(tmp_path, strategy, killed):
    Place(tmp_path).write_preset(**RUN)
    words = ["tiny.toml", f"--train.strategy={strategy}"]
    group = call_all(tmp_path, *words, signals={(5, killed): signal.SIGKILL})
    assert sorted(group.codes) == [-signal.SIGKILL, 2]
    left = group.output(1 - killed)
    sentence = f"process {1 - killed}: error: another process of this run has ended, or does not answer"
    (line,) = [line for line in left.splitlines() if "rror" in line]
    assert line.startswith(sentence)
    assert "Traceback" not in left
    assert checkpoint.read_checkpoint(tmp_path / "runs/tiny/last")[2]["step"] == 4


def test_F55_a_mistake_that_the_first_process_finds_is_one_sentence_of_all(tmp_path):
    Place(tmp_path).write_preset(**RUN)
    assert call_all(tmp_path, "tiny.toml", "--train.steps=2", size=1).codes == [0]
    (tmp_path / "runs/tiny/step-000002/weights.safetensors").write_bytes(b"")
    group = call_all(tmp_path, "--resume", "runs/tiny")
    assert group.codes == [2, 2]
    assert group.output(0).count("error: ") == 1
    assert "weights.safetensors is damaged" in group.output(0)
    assert "error" not in group.output(1)


def test_max_minutes_end_all_processes_at_the_same_step(tmp_path):
    Place(tmp_path).write_preset(**RUN)
    words = ["tiny.toml", "--train.steps=1000000", "--train.max-minutes=0.04", "--train.checkpoint-interval=0"]
    group = call_all(tmp_path, *words, "--train.eval-interval=0")
    assert group.codes == [0, 0], group.output(0)
    (*_, last) = metrics(tmp_path / "runs/tiny")
    assert 1 < last["step"] < 1_000_000
    assert "val_loss" in last
    assert checkpoint.read_checkpoint(tmp_path / "runs/tiny/last")[2]["step"] == last["step"]


# Names and compilation


def saved(rank: int, folder: Path, strategy: str, compile: bool) -> list[float]:
    """Trains two steps, compiled or not, and saves; the losses."""
    processes = Processes.started()
    trainer = trainer_of("steady", folder, ADAMW, processes, strategy=strategy, compile="on" if compile else "off")
    trainer.run = folder
    losses = [trainer.step()["loss"] for _ in range(2)]
    trainer.save()
    trainer.end()
    return losses


def loaded(rank: int, folders: list[Path], strategy: str, compile: bool) -> list[dict]:
    """The weights and AdamW's moments after loading each folder's checkpoint."""
    processes, found = Processes.started(), []
    for folder in folders:
        trainer = trainer_of("steady", folder, ADAMW, processes, strategy=strategy, compile="on" if compile else "off")
        weights, moments, _ = checkpoint.read_checkpoint(folder / "last")
        checkpoint.load_weights(trainer.model, weights, folder)
        checkpoint.load_optimizer(trainer.model, trainer.optimizer, moments, folder)
        parameters = checkpoint.parameters_by_name(trainer.model)
        found.append(arrays(parameters))
        for name, parameter in parameters.items():
            moment = whole(trainer.optimizer.state[parameter]["exp_avg"]).numpy()
            np.testing.assert_array_equal(moment, moments[f"{name}.exp_avg"].numpy())
    trainer.end()
    return found


KINDS = {"plain": ("ddp", False, 1), "ddp": ("ddp", False, 2), "fsdp": ("fsdp", False, 2)}
COMPILED = {"compiled": ("ddp", True, 1), "compiled ddp": ("ddp", True, 2), "compiled fsdp": ("fsdp", True, 2)}


def save_and_load(folder: Path, kinds: dict) -> dict[str, list[float]]:
    """Saves from each kind and loads all into each; the losses of each."""
    losses, folders = {}, [folder / name for name in kinds]
    for own, (strategy, compile, size) in zip(folders, kinds.values(), strict=True):
        own.mkdir()
        group = Group(own, saved, own, strategy, compile, size=size)
        losses[own.name], *others = group.results()
        assert group.codes == [0] * size, group.output(0)
        assert all(other == losses[own.name] for other in others)
    files = [load_file(own / "last/weights.safetensors") for own in folders]
    for file in files:
        assert list(file) == list(files[0])
        assert not any(word in name for name in file for word in ("_orig_mod", "module", "loss", "fsdp"))
    for strategy, compile, size in kinds.values():
        (place := folder / f"{strategy}-{compile}-{size}").mkdir()
        group = Group(place, loaded, folders, strategy, compile, size=size)
        for results in group.results():
            for found, file in zip(results, files, strict=True):
                assert differences(found, {name: tensor.numpy() for name, tensor in file.items()}) == 0
    return losses


def test_F47_each_kind_of_run_loads_what_each_saved(tmp_path):
    losses = save_and_load(tmp_path, KINDS)
    np.testing.assert_allclose(list(losses.values()), 3 * [losses["plain"]], atol=1e-5)


@pytest.mark.slow
def test_F47_compiled_runs_of_two_processes_load_and_lose_as_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 300)
    losses = save_and_load(tmp_path, KINDS | COMPILED)
    np.testing.assert_allclose(list(losses.values()), 6 * [losses["plain"]], atol=1e-3)


# torchrun


ROOT = Path(train.__file__).parent


def torchrun(folder: Path, *words: str, script: str | Path = ROOT / "train.py", flags: tuple[str, ...] = (), **options):
    """`torchrun --nproc-per-node 2 train.py WORDS`, ended."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), *flags]
    return subprocess.run(
        [*launcher, str(script), *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        **options,
    )


def test_F56_torchrun_on_a_machine_without_gpus_needs_no_option(tmp_path):
    Place(tmp_path).write_preset(**RUN)
    ended = torchrun(tmp_path, "tiny.toml", "--train.device=auto")
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    assert [record["step"] for record in metrics(tmp_path / "runs/tiny")] == list(range(1, 9))
    assert ended.stdout.count("\ndone in ") == 1
    if not torch.cuda.is_available() and hasattr(os, "sched_getaffinity"):
        share = max(len(os.sched_getaffinity(0)) // 2, 1)
        threads = f"{share} thread{'s' * (share > 1)}"
        assert f"device cpu, {threads} in each of 2 processes; ddp, the whole model in each" in ended.stdout


@pytest.mark.slow
def test_F56_torchrun_divides_the_model_when_asked(tmp_path):
    Place(tmp_path).write_preset(**RUN)
    ended = torchrun(tmp_path, "tiny.toml", "--train.strategy=fsdp", flags=("--rdzv-id", "mine"))
    assert ended.returncode == 0, ended.stderr
    assert "in each of 2 processes; fsdp, the model divided among them" in ended.stdout
    assert [record["step"] for record in metrics(tmp_path / "runs/tiny")] == list(range(1, 9))


KILLED_ONCE = """
import os, runpy, signal, sys
sys.argv.pop(0)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import optim  # what a step calls
    rates = []
    rate = optim.learning_rate
    def killing(*arguments):
        rates.append(arguments)
        if len(rates) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return rate(*arguments)
    optim.learning_rate = killing
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--train.run-dir=own"]], ids=["free", "own"])
def test_torchrun_restarts_a_killed_process_and_the_run_ends_as_if_it_had_lived(tmp_path, words):
    Place(tmp_path).write_preset(**RUN)
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    undisturbed = torchrun(tmp_path, "tiny.toml", "--train.run-dir=whole")
    assert undisturbed.returncode == 0, undisturbed.stderr
    arguments = [str(ROOT / "train.py"), "tiny.toml", *words]
    ended = torchrun(tmp_path, *arguments, script="killed_once.py", flags=("--max-restarts", "2"))
    run, expected = tmp_path / ("own" if words else "runs/tiny"), tmp_path / "whole"
    assert ended.returncode == 0, ended.stderr
    assert f"going on with {run.relative_to(tmp_path)} from step 4" in ended.stdout
    assert words or os.listdir(tmp_path / "runs") == ["tiny"]
    assert (run / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    for name in ("best", "last"):
        assert checkpoint_bytes(run / name) == checkpoint_bytes(expected / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tiny.toml", "--train.step=3"], "is not an option"),
        (["none.toml"], "there is no none.toml"),
        (["tiny.toml", "--data.source=none.txt"], "none.txt"),
        (["tiny.toml", "--train.batch-size=3"], "the nearest sizes that can: 2 and 4"),
        (["tiny.toml", "--train.device=mps"], "train.device = mps"),
    ],
)
def test_a_mistake_is_one_line_of_all_processes_that_torchrun_starts(tmp_path, words, sentence):
    Place(tmp_path).write_preset(**RUN)
    ended = torchrun(tmp_path, *words)
    (line,) = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert ended.returncode != 0
    assert line.startswith("process 0: error: ")
    assert sentence in line
    assert 'train.py", line' not in ended.stderr, "a traceback of ours"
