"""What the experiments share: the text, small models, their training, clocks, axes."""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from config.schema import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from data.loader import Batches
from data.prepare import Corpus, prepare
from loss import Loss, grade
from machine import Machine, choose_machine, keep_freed_memory, threads_in_words
from model import build_model
from optim import build_optimizer, learning_rate, set_learning_rate

HERE = Path(__file__).parent
CACHE = HERE / "cache"  # trained models; git ignores it
SEEDS = (0, 1, 2)
OPTIM = OptimConfig(name="muon", learning_rate=3e-3, matrix_learning_rate=0.02, warmup_steps=20)
STORIES = DataConfig(bpe_vocab_size=1024, max_tokens=1_500_000)
Batch = Callable[[int], tuple[Tensor, Tensor]]  # a step, from 0 -> inputs and targets (B, T)


def small(steps: int = 300, seed: int = 0, **model) -> Config:
    """A run of a few seconds on stories; `model` changes the options of [model]."""
    shape = {"n_layer": 4, "n_head": 4, "d_model": 128, "max_seq_len": 128} | model
    train = TrainConfig(steps=steps, batch_size=32, seed=seed, device="cpu", compile="off")
    return Config(model=ModelConfig(**shape), data=STORIES, optim=OPTIM, train=train)


@cache
def stories(data: DataConfig = STORIES) -> Corpus:
    return prepare(data)


@cache
def machine() -> Machine:
    keep_freed_memory()
    return choose_machine(small())


def machine_in_words() -> str:
    """What times, and the last digits of losses, depend on."""
    where = machine()
    dtype = str(where.dtype).removeprefix("torch.")
    return f"{where.device} ({platform.machine()}), {threads_in_words()}, {dtype}, torch {torch.__version__}"


def fresh_model(config: Config) -> nn.Module:
    """A model of this configuration for the stories, its weights drawn from the seed."""
    torch.manual_seed(config.train.seed)
    return build_model(config.model.resolve(stories(config.data).tokenizer.vocab_size)).to(machine().device)


def story_batches(config: Config) -> Batch:
    """Windows of stories, as train.py draws them."""
    corpus, train = stories(config.data), config.train
    end_id = corpus.tokenizer.end_id
    return Batches(corpus.train.tokens, config.model.max_seq_len, train.batch_size, train.seed, end_id).batch


def fit(model: nn.Module, batch: Batch, steps: int, optim: OptimConfig = OPTIM) -> list[float]:
    """Trains a model from tokens (B, T) to logits (B, T, V) as train.py does; returns each step's loss, in nats."""
    loss, optimizer = Loss(model, optim.label_smoothing).train(), build_optimizer(model, optim)
    losses = []
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(optim, step, steps))
        inputs, targets = (tensor.to(machine().device) for tensor in batch(step))
        with machine().autocast():
            nats = loss(inputs, targets) / (targets >= 0).sum()
        optimizer.zero_grad()
        nats.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or torch.inf)
        optimizer.step()
        losses.append(nats.item())
    model.eval()
    return losses


def trained(config: Config, change: Callable[[nn.Module], object] | None = None) -> nn.Module:
    """A model trained on stories, kept in the cache for the next claim that asks for it. `change` rebuilds parts of the
    fresh model first."""
    model = fresh_model(config)
    if change:
        change(model)
    steps, optim = config.train.steps, config.optim
    return kept(model, key_of(config, change), lambda: fit(model, story_batches(config), steps, optim))


def kept(model: nn.Module, key: str, train: Callable[[], object]) -> nn.Module:
    """The model with the weights that the cache has under `key`; if there are none, `train` makes them first."""
    file = CACHE / f"{key}.safetensors"
    try:
        load_model(model, file)
    except (FileNotFoundError, SafetensorError):  # not yet trained, or damaged
        train()
        CACHE.mkdir(exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        save_model(model, fresh)
        fresh.replace(file)  # whole or not at all
    return model.eval()


def key_of(config: Config, change: Callable | None) -> str:
    """Changes with what a trained model depends on."""
    sources = [HERE.parent / f"{name}.py" for name in ("attention", "model", "linear", "optim", "loss", "data/loader")]
    sources += sorted(HERE.glob("*.py")) if change else [Path(__file__)]
    said = [config.model_dump_json(), getattr(change, "__qualname__", ""), stories(config.data).key]
    said += [machine_in_words(), *(source.read_text("utf-8") for source in sources)]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]


def validate(model: nn.Module, context: int = 128) -> dict[str, float]:
    """Over the whole validation split of the stories: "loss" (nats per token), "bits_per_byte", "floor" (nats)."""
    corpus = stories()
    return grade(Loss(model), corpus.val, corpus, machine(), context, rows=64)


def in_turn(functions: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """The median seconds of each function; each is called once to warm up, then all in turn, so that what else the
    machine does falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)
    return {name: median(found) for name, found in seconds.items()}


def spread(values: Sequence[float]) -> float:
    """How far seeds are apart."""
    return max(values) - min(values)


def above(values: Sequence[float], others: Sequence[float]) -> bool:
    """On average larger, by more than either differs between seeds."""
    return mean(values) - mean(others) > max(spread(values), spread(others))


def told(values: Sequence[float], digits: int = 3) -> str:
    """Mean and half the spread of some seeds."""
    return f"{mean(values):.{digits}f} ± {spread(values) / 2:.{digits}f}"


def bar(axes, place: float, values: Sequence[float], colour: str, width: float = 0.8) -> None:
    """The mean of some seeds as a bar, and each as a dot."""
    axes.bar(place, mean(values), width, color=colour, alpha=0.4)
    axes.plot([place] * len(values), values, "o", color=colour, markersize=4)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power x**p that fits y best: the slope of log y against log x."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    return ((x @ y) / (x @ x)).item()


def plain_ticks(axis, values: Sequence[float]) -> None:
    """Ticks at these values of a logarithmic axis (`axes.xaxis`), written as plain numbers."""
    axis.set_ticks(list(values), [f"{value:,g}" for value in values])
    axis.set_ticks([], minor=True)
