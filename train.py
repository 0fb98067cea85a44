"""Train a model: python train.py [config/NAME.toml] [--section.option VALUE ...], or --resume RUN to go on with one.

The file reads in the order in which things happen. Every number that a step depends on follows from the configuration,
the seed and the step, so a run that was stopped goes on exactly as if it had not been.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import Config, ConfigError, UserError, command, load_config, override, read_toml, split_preset, to_toml

PROGRAM = "python train.py [config/NAME.toml | --resume RUN]"
DESCRIPTION = """Train a model: config/stories.toml, or the preset that comes first.

With --resume RUN first, a run that was stopped goes on; options after it change it where that makes sense."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for: a configuration, and a new run of that name or an old one to go on with."""

    config: Config
    name: str
    resume: Path | None = None


def read_request(argv: Sequence[str]) -> Request:
    if argv and argv[0].partition("=")[0] == "--resume":
        run, words = argv[0].partition("=")[2], list(argv[1:])
        if not run and not words:
            raise ConfigError("--resume needs the folder of a run")
        run = Path(run or words.pop(0))
        if not (run / "config.toml").is_file():
            runs = ", ".join(sorted(str(path.parent) for path in run.parent.glob("*/config.toml"))) or "none"
            raise ConfigError(f"--resume {run}: there is no run in that folder; runs beside it: {runs}")
        old = read_toml(run / "config.toml", saved=True)
        return Request(resumed_config(old, override(old, words, PROGRAM, DESCRIPTION)), run.name, run)
    if any(word.partition("=")[0] == "--resume" for word in argv):
        raise ConfigError("--resume RUN comes first, before any other option")
    return Request(load_config(argv, PROGRAM, DESCRIPTION), split_preset(argv)[0].stem)


# What makes a run that run. (The text may move, so data.source may change: restoring compares what it says.)
FIXED = ("model.", "data.", "optim.name", "train.seed", "train.batch_size", "train.run_dir")


def resumed_config(old: Config, new: Config) -> Config:
    """`new`, if it may follow `old` in one run; says what differs. Raises `ConfigError` for what may not change."""
    before, after = dict(flatten(old.model_dump())), dict(flatten(new.model_dump()))
    changed = [option for option in after if before[option] != after[option]]
    for option in changed:
        if option.startswith(FIXED) and option != "data.source":
            raise ConfigError(f"{option} = {after[option]} cannot change in a resumed run, it is {before[option]}")
        print(f"changed: {option} = {after[option]} (it was {before[option]})")
    return new


def flatten(values: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested options under their full names."""
    for key, value in values.items():
        yield from flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


if __name__ == "__main__":  # --help and mistakes are answered before torch takes its seconds to load
    REQUEST = command(read_request)(sys.argv[1:])

import contextlib
import ctypes
import json
import math
import os
import shlex
import signal
import textwrap
import time

# A thread that waits for the others should soon sleep: beside another busy program one that spins stalls for seconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from checkpoint import Tensors, checkpoints, link, load_optimizer, load_weights, read_checkpoint, save_checkpoint
from compiling import compiler_missing, compiler_works
from config.schema import ModelConfig
from data.loader import IGNORE, Batches, PairBatches, Pairs, check_ids, check_length, validation_windows
from data.prepare import Corpus, Split, prepare
from data.tokenizer import Tokenizer
from generation import generate
from model import build_model
from optim import build_optimizer, learning_rate, set_learning_rate
from plots import loss_curve
from translation import compare, translate


def say(text: str, end: str = "\n") -> None:
    """Prints, and goes on in silence when what reads the output has ended: training is not what was asked to stop."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(frozen=True)
class Machine:
    """Where and how the run is computed; `auto` has been decided."""

    device: str
    dtype: torch.dtype
    compile: bool

    def autocast(self):
        return torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)


def choose_machine(config: Config, asked: str = "as asked") -> Machine:
    """Decides what is auto by what the machine has, never by a timing, and says it in a line."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = config.train.device
    if device == "auto":
        device = next(name for name in available if available[name])
    elif not available[device]:
        names = ", ".join(name for name in available if available[name])
        raise ConfigError(f"train.device = {device} is not available here; available: {names}")
    if config.train.dtype != "auto":
        dtype, why = getattr(torch, config.train.dtype), asked
    elif device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype, why = torch.bfloat16, "the GPU computes it natively"
    elif device == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        dtype, why = torch.bfloat16, "the processor multiplies it natively"
    else:
        dtype, why = torch.float32, "no units for bfloat16 here that would make it faster"
    compile, reason = choose_compile(config, device, asked)
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    say(f"device {device}{threads}; {str(dtype).removeprefix('torch.')} ({why}); {reason}")
    return Machine(device, dtype, compile)


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed for the next step instead of handing it back to the system.

    A step frees and takes the same large buffers again, and a page costs more to get than to use: without this a step
    on a CPU takes up to five times as long. Elsewhere than on Linux nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


WORTH_COMPILING = 100e12  # operations of a whole run on a CPU: some minutes, of which compiling costs half a one


def choose_compile(config: Config, device: str, asked: str) -> tuple[bool, str]:
    train = config.train
    if train.compile == "off":
        return False, f"not compiled, {asked}"
    installed = not compiler_missing()
    if train.compile == "auto" and device != "cuda" and installed:
        if device != "cpu":
            return False, "not compiled: not worth its half minute on this device (--train.compile on)"
        if config.model.kind != "decoder":
            return False, "not compiled: pairs are of many lengths, and each would take its time (--train.compile on)"
        if run_operations(config) < WORTH_COMPILING or 0 < train.max_minutes < 5:
            return False, "not compiled: not worth its half minute in a run so short (--train.compile on)"
    if installed and (device == "cuda" or compiler_works()):
        how = {"on": f", {asked}", "auto": "" if device == "cuda" else ", which takes the first half minute"}
        return True, f"compiled{how[train.compile]}"
    problem = "the C++ compiler does not work" if installed else "there is no C++ compiler"
    if train.compile == "on" and asked == "as asked":
        raise ConfigError(f"train.compile = on needs a C++ compiler, g++ or clang++: {problem}")
    return False, f"not compiled: {problem}" + ("; sums may round differently" if train.compile == "on" else "")


def run_operations(config: Config) -> float:
    """About how many a whole run takes: six for each parameter and token."""
    with torch.device("meta"):
        model = build_model(config.model.resolve(config.model.vocab_size or 1))
    tokens = config.train.steps * config.train.batch_size * config.model.max_seq_len
    return 6.0 * sum(parameter.numel() for parameter in model.parameters()) * tokens


TRANSLATED = 1000  # pairs of a split that are translated at each evaluation
SHOWN = 4  # of these are shown


class Loss(nn.Module):
    """The model and its loss in one module: what wraps it, compilation or many processes, sees one forward."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0):
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, *batch: Tensor, reduction: str = "sum") -> Tensor:
        """What the model's forward takes, in that order, then targets (B, T) -> the cross entropy in nats, float32, of
        all targets but IGNORE: their sum, or with reduction "none" each (B * T,)."""
        *inputs, targets = batch
        return F.cross_entropy(
            self.model(*inputs).flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORE,
            reduction=reduction,
            label_smoothing=self.label_smoothing if self.training else 0.0,
        )


@dataclass
class State:
    """What a checkpoint remembers besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    metrics_bytes: int = 0


class Trainer:
    """Everything that a step needs, put together once."""

    def __init__(self, config: Config, run: Path | None, corpus: Corpus, machine: Machine):
        self.config, self.run, self.corpus, self.machine = config, run, corpus, machine
        torch.manual_seed(config.train.seed)
        self.model = build_model(config.model).to(machine.device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.scaler = torch.amp.GradScaler(machine.device, enabled=machine.dtype == torch.float16)
        self.loss = Loss(self.model, config.optim.label_smoothing)
        self.training_loss = torch.compile(self.loss) if machine.compile else self.loss
        self.graded = {"val": corpus.val} | ({"held_out": corpus.held_out} if corpus.held_out else {})
        size, seed, context = config.train.batch_size, config.train.seed, config.model.max_seq_len
        if corpus.pairs:
            splits = {"train": corpus.train, **self.graded}
            self.pairs = {name: pairs_of(split, corpus, context, name) for name, split in splits.items()}
            self.batches = PairBatches(self.pairs["train"], size, seed)
        else:
            end_id = corpus.tokenizer.end_id if corpus.documents else None
            self.batches = Batches(corpus.train.tokens, context, size, seed, end_id)
        self.state, self.pace = State(), Pace()

    def step(self) -> dict[str, float]:
        """One optimizer step: gradients of the mean over all targets of the batch, whatever the micro-batches."""
        train, state = self.config.train, self.state
        rate = learning_rate(self.config.optim, state.step, self.planned_steps())
        set_learning_rate(self.optimizer, rate)
        batch = self.batches.batch(state.step)
        n_target = int((batch[-1] != IGNORE).sum())
        batch = [tensor.to(self.machine.device) for tensor in batch]
        size, total = train.micro_batch_size or train.batch_size, torch.zeros((), device=self.machine.device)
        for first in range(0, train.batch_size, size):
            seed_everything(train.seed, state.step, first // size)  # dropout needs no saved state
            with self.machine.autocast():
                loss = self.training_loss(*(tensor[first : first + size] for tensor in batch))
            self.scaler.scale(loss / max(n_target, 1)).backward()
            total += loss.detach()
        nats = total.item()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip or math.inf).item()
        if not math.isfinite(nats) or not (
            math.isfinite(norm) or self.scaler.is_enabled()
        ):  # the scaler skips the step
            raise UserError(self.diverged(nats, norm))
        if n_target:  # without targets there is nothing to learn, and neither decay nor momentum may move a weight
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        state.step, state.tokens = state.step + 1, state.tokens + n_target
        return {"loss": nats / max(n_target, 1), "learning_rate": rate, "gradient_norm": norm}

    def diverged(self, nats: float, norm: float) -> str:
        what = f"the loss is {nats}" if not math.isfinite(nats) else f"the norm of the gradient is {norm}"
        saved = checkpoints(self.run)
        then = f"go on from {saved[-1].name}: python train.py --resume {self.run}" if saved else "try again with"
        rate = self.config.optim.learning_rate / 3
        return f"{what} at step {self.state.step}; {then} --optim.learning-rate {rate:.0e}"

    def planned_steps(self) -> int:
        """Where the schedule ends: `steps`, or sooner if `max_minutes` comes first at the present pace."""
        limit, state = self.config.train.max_minutes * 60, self.state
        if not limit or not self.pace.seconds:
            return self.config.train.steps
        left = max(int((limit - state.seconds) / self.pace.seconds), 0)
        return min(self.config.train.steps, state.step + left)

    def evaluate(self) -> dict[str, float]:
        """The loss over the whole validation split, and over the held-out combinations where the corpus has them; of
        pairs also how well the first of each split are translated."""
        train, context = self.config.train, self.config.model.max_seq_len
        rows = train.micro_batch_size or max(train.batch_size, 4096 // context)  # many short windows at a time: faster
        grades = {}
        for name, split in self.graded.items():
            if self.corpus.pairs:
                grades[name] = grade_pairs(self.loss, self.pairs[name], self.machine, rows)
            else:
                grades[name] = grade(self.loss, split, self.corpus, self.machine, context, rows)
            if not math.isfinite(grades[name]["loss"]):
                raise UserError(self.diverged(grades[name]["loss"], 0.0))
            if self.corpus.pairs:
                sources, texts, references = self.translations(name)
                grades[name] |= compare(texts, references)
                self.shown = list(zip(sources, texts, references, strict=True))[:SHOWN]
        return {f"{name}_{key}": value for name, values in grades.items() for key, value in values.items()}

    def sample(self) -> str:
        """A few words of the model's own, from the start token; of pairs some translations that were just graded."""
        tokenizer = self.corpus.tokenizer
        if self.corpus.pairs:
            return "\n".join(map(translation_line, self.shown))
        (ids,) = generate(
            self.model,
            [[]],
            max_new_tokens=self.config.log.sample_tokens,
            temperature=0.8,
            top_p=0.95,
            end_id=tokenizer.end_id,
            vocab_size=tokenizer.vocab_size,
            seed=self.state.step,
        )
        return tokenizer.decode(ids)

    def translations(self, split: str) -> tuple[list[str], list[str], list[str]]:
        """Of the first pairs of a split the sources, the model's greedy translations (in float32), and the targets."""
        pairs, tokenizer = self.pairs[split], self.corpus.tokenizer
        texts = [tokenizer.decode(best.ids) for best in translate(self.model, pairs, tokenizer, TRANSLATED)]
        sources = [self.corpus.source_tokenizer.decode(pairs.source(row)) for row in range(len(texts))]
        return sources, texts, [tokenizer.decode(pairs.target(row)) for row in range(len(texts))]

    def save(self, best: bool = False) -> Path:
        """Writes a checkpoint. Raises `UserError` when the disk does not take it; the one before it stays whole."""
        state = {
            **vars(self.state),
            "best_loss": None if math.isinf(self.state.best_loss) else self.state.best_loss,
            "scaler": self.scaler.state_dict(),
            "machine": {
                "device": self.machine.device,
                "dtype": str(self.machine.dtype).removeprefix("torch."),
                "compile": "on" if self.machine.compile else "off",
            },
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "corpus": self.corpus.key,
        }
        try:
            keep = self.config.train.keep_checkpoints
            return save_checkpoint(self.run, self.model, self.optimizer, state, keep, best)
        except (OSError, SafetensorError) as error:
            raise UserError(f"step {self.state.step} could not be saved in {self.run}: {error}") from None

    def restore(self, folder: Path, weights: Tensors, tensors: Tensors, state: dict) -> None:
        """Goes back to a checkpoint: weights, optimizer, counters, and metrics.jsonl as long as it was then."""
        load_weights(self.model, weights, folder)
        load_optimizer(self.model, self.optimizer, tensors)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if state["threads"] != torch.get_num_threads():
            say(f"note: {torch.get_num_threads()} threads instead of {state['threads']}; sums may round differently")
        self.state = State(**{name: state[name] for name in vars(self.state)})
        self.state.best_loss = math.inf if self.state.best_loss is None else self.state.best_loss
        self.cut_metrics()
        link(self.run, "last", folder)  # a kill may have come between saving and linking
        if self.state.best_step == self.state.step:
            link(self.run, "best", folder)

    def cut_metrics(self) -> None:
        """Ends metrics.jsonl where the checkpoint was written; if it has lost lines since, after the last whole one."""
        file, size = self.run / "metrics.jsonl", self.state.metrics_bytes
        file.touch()
        if file.stat().st_size < size:
            say(f"note: {file} has lost lines")
            size = file.read_bytes().rfind(b"\n") + 1
        os.truncate(file, size)


@torch.no_grad()
def grade(loss: Loss, split: Split, corpus: Corpus, machine: Machine, context: int, rows: int) -> dict[str, float]:
    """The loss over a split, `rows` windows of `context` tokens at a time: nats per token, bits per byte of text.

    Where the entropy of the text under its grammar is known, it is the "floor", in nats per token, and the nats of a
    document are also told by language.
    """
    tokens, n_bytes, n_targets, end_id = split.tokens, split.n_bytes, len(split.tokens), corpus.tokenizer.end_id
    if not corpus.documents:  # the first token is not a target
        n_bytes, n_targets, end_id = n_bytes - len(corpus.tokenizer.piece(int(tokens[0]))), n_targets - 1, None
    is_korean = korean_tokens(tokens, corpus.tokenizer) if split.floor else None
    nats = korean = 0.0
    was_training = loss.training
    loss.eval()  # the model in it too: no dropout, no label smoothing
    for inputs, targets, places in validation_windows(tokens, context, rows, end_id):
        with machine.autocast():
            losses = loss(inputs.to(machine.device), targets.to(machine.device), reduction="none").cpu()  # 0 if padded
        nats += losses.sum().item()
        if is_korean is not None:
            korean += losses[torch.from_numpy(is_korean[places.numpy()]).flatten()].sum().item()
    loss.train(was_training)
    values = {"loss": nats / n_targets, "bits_per_byte": nats / math.log(2) / max(n_bytes, 1)}
    if split.floor:
        values["floor"] = sum(split.floor[:2]) / n_targets
        values["english"], values["korean"] = (nats - korean) / split.n_documents, korean / split.n_documents
    return values


@torch.no_grad()
def grade_pairs(loss: Loss, pairs: Pairs, machine: Machine, rows: int) -> dict[str, float]:
    """The loss over the targets of a split, `rows` pairs at a time, in nats per token."""
    nats, n_targets = torch.zeros((), dtype=torch.float64), 0
    was_training = loss.training
    loss.eval()
    order = pairs.by_length()
    for first in range(0, len(order), rows):
        batch = pairs.batch(order[first : first + rows])
        n_targets += int((batch[-1] != IGNORE).sum())
        with machine.autocast():
            nats += loss(*(tensor.to(machine.device) for tensor in batch)).double().cpu()
    loss.train(was_training)
    return {"loss": nats.item() / n_targets}


def pairs_of(split: Split, corpus: Corpus, context: int, name: str) -> Pairs:
    """The pairs of a split that fit into the context. Raises `UserError` if there are none."""
    end_ids = corpus.source_tokenizer.end_id, corpus.tokenizer.end_id
    return Pairs(split.sources, split.tokens, *end_ids, context, name)


def korean_tokens(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """For each token of some stories whether it stands in a Korean line: each second one, of an even number."""
    line_ends = np.array([piece.count(b"\n") for piece in tokenizer.pieces])
    line_ends[tokenizer.end_id] = 1
    ends = line_ends[tokens]
    return (np.cumsum(ends) - ends) % 2 == 1


def seed_everything(*numbers: int) -> None:
    """Seeds torch from a tuple of numbers, each of which counts."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))


class Interruption:
    """SIGINT and SIGTERM ask for an end after the step; a second one ends at once."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame) -> None:
        self.signal = signal.Signals(number)
        with contextlib.suppress(OSError):  # not print, which may be what was interrupted
            os.write(2, f"\n{self.signal.name}: finishing the step and saving; once more ends at once\n".encode())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


class Log:
    """Progress for people, metrics.jsonl for programs, Weights & Biases on request."""

    def __init__(self, trainer: Trainer, wandb):
        self.trainer, self.wandb = trainer, wandb
        self.file = (trainer.run / "metrics.jsonl").open("a", encoding="utf-8")
        self.live = sys.stdout.isatty()

    def record(self, values: dict[str, float]) -> None:
        state = self.trainer.state
        values = {key: value if math.isfinite(value) else None for key, value in values.items()}  # JSON has no Infinity
        self.file.write(json.dumps({"step": state.step, **values, "tokens": state.tokens}) + "\n")
        self.file.flush()
        state.metrics_bytes = self.file.tell()
        if self.wandb:
            self.wandb.log(values, step=state.step)

    def progress(self, values: dict[str, float]) -> None:
        trainer, step, steps = self.trainer, self.trainer.state.step, self.trainer.planned_steps()
        tokens = trainer.state.tokens / step  # of a step, on average: batches of pairs differ
        line = (
            f"step {step:,}/{steps:,} · loss {values['loss']:.4f} · {tokens / trainer.pace.seconds:,.0f} tokens/s · "
            f"{duration(trainer.pace.seconds * (steps - step))} left"
        )
        say(f"\r\x1b[K{line}" if self.live else line, end="" if self.live and step < steps else "\n")

    def say(self, text: str) -> None:
        say(f"\r\x1b[K{text}" if self.live else text)

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def duration(seconds: float) -> str:
    minutes = int(seconds + 0.5) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {int(seconds + 0.5) % 60} s" if minutes else f"{seconds:.0f} s"


def train(trainer: Trainer, log: Log) -> None:
    """The loop: step, tell, evaluate, save; until the steps, the time or the patience of the user end."""
    config, state = trainer.config, trainer.state
    interruption = Interruption()
    clock = time.perf_counter()
    while state.step < (total := trainer.planned_steps()) and interruption.signal is None:
        values = trainer.step()
        now = time.perf_counter()
        state.seconds, clock, taken = state.seconds + now - clock, now, now - clock
        trainer.pace.add(taken)
        last = state.step >= trainer.planned_steps()  # a slow step may have brought the end of max_minutes nearer
        evaluating = last or due(state.step, config.train.eval_interval)
        if last or due(state.step, config.log.interval) or evaluating:
            if evaluating:
                values |= evaluate(trainer, log)
            log.record(values)
            log.progress(values)
        best = evaluating and state.best_step == state.step
        if last or best or due(state.step, config.train.checkpoint_interval) or interruption.signal:
            trainer.save(best)
        clock = time.perf_counter()  # evaluation and saving are not training time
    if interruption.signal and state.step < total:
        log.say(f"stopped at step {state.step}, saved; go on with: python train.py --resume {trainer.run}")
        sys.exit(128 + interruption.signal)


def evaluate(trainer: Trainer, log: Log) -> dict[str, float]:
    """Validates, tells, and shows what the model writes by now."""
    values, state = trainer.evaluate(), trainer.state
    better = values["val_loss"] < state.best_loss
    if better:
        state.best_loss, state.best_step = values["val_loss"], state.step
    for line in evaluation_lines(values, trainer.graded, state.step, better):
        log.say(line)
    if trainer.config.log.sample_tokens:
        say(textwrap.indent(trainer.sample().strip(), "  | "))
    return values


def translation_marks(values: dict[str, float]) -> str:
    """The scores of translations in words, BLEU only where there is one."""
    marks = f"{values['exact']:.2%} exactly right, chrF {values['chrf']:.1f}"
    return marks if math.isnan(values["bleu"]) else f"{marks}, BLEU {values['bleu']:.1f}"


def translation_line(row: tuple[str, str, str]) -> str:
    """A source, its translation, and the right one if that is another."""
    source, text, right = row
    return f"{source} → {text}" + ("" if text == right else f"  (right: {right})")


def evaluation_lines(values: dict[str, float], splits: dict[str, Split], step: int, better: bool) -> Iterator[str]:
    """What an evaluation of some splits found, in lines."""
    indent, titles = " " * len(f"step {step:,} "), {"val": "validation", "held_out": "held-out combinations"}
    for name, split in splits.items():
        loss = values[f"{name}_loss"]
        line = f"{titles[name]} {loss:.4f} nats/token"
        if split.sources is not None:
            line += f", {translation_marks({key: values[f'{name}_{key}'] for key in ('exact', 'chrf', 'bleu')})}"
        else:
            bits = values[f"{name}_bits_per_byte"]
            line += f", {bits:.4f} bits/byte"
            if split.floor:
                floor = values[f"{name}_floor"]
                line += f" (floor {floor:.4f}, {bits * floor / loss:.4f})"
        if name == "val":
            yield f"step {step:,} · {line}{' · best so far' if better else ''}"
        else:
            yield f"{indent}· {line}"
        if split.floor:
            english, korean, knowing = (nats / split.n_documents for nats in split.floor)
            line = (
                f"nats per story: English {values[f'{name}_english']:.2f} (floor {english:.2f}), "
                f"Korean {values[f'{name}_korean']:.2f} ({korean:.2f})"
            )
            yield f"{indent}  {line}; {knowing:.2f} for one who knows what is held out"


class Pace:
    """Seconds a step, averaged over about the last twenty; the first, with its warming up, does not count for long."""

    def __init__(self):
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds = 0.95 * self.seconds + 0.05 * seconds if 0 < self.seconds < 2 * seconds else seconds


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def import_wandb(config: Config):
    """The package, if it is asked for."""
    if config.log.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        raise ConfigError(f"log.wandb = {config.log.wandb} needs a package: pip install wandb") from None
    return wandb


def start_wandb(wandb, config: Config, run: Path):
    """The Weights & Biases run, or None. Never asks for anything: without a key it logs offline."""
    if wandb is None:
        return None
    mode = config.log.wandb
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        say("Weights & Biases: no key on this machine, logging offline")
        mode = "offline"
    settings = wandb.Settings(console="off", silent=True, init_timeout=10)
    options = {"project": config.log.wandb_project, "name": run.name, "dir": run, "config": config.model_dump()}
    try:
        return wandb.init(mode=mode, settings=settings, **options)
    except wandb.Error as error:
        say(f"Weights & Biases: {error}; logging offline")
        return wandb.init(mode="offline", settings=settings, **options)


def check_free(run: Path) -> None:
    """Raises `ConfigError` if the folder of a new run holds anything."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        hint = f"go on with it: --resume {run}; or " if (run / "config.toml").exists() else ""
        raise ConfigError(f"train.run_dir = {run} is in use already; {hint}choose another")


def new_run(config: Config, name: str) -> Path:
    """Creates the folder of a new run: the one asked for, or the next free runs/NAME, runs/NAME-2, ..."""
    if config.train.run_dir is not None:
        run = Path(config.train.run_dir)
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"train.run_dir = {run} cannot be made: {error.strerror}") from None
        return run
    for number in range(1, 10_000):
        run = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir(parents=True)
            return run
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"the run folder {run} cannot be made: {error.strerror}") from None
    raise ConfigError(f"runs/{name} to runs/{name}-9999 are all in use; clear some away, or give train.run_dir")


def write_config(config: Config, run: Path) -> None:
    """Writes the run's config.toml, whole or not at all: without it the run could not be read any more."""
    fresh = run / ".config.toml"
    fresh.write_text(to_toml(config), "utf-8")
    fresh.replace(run / "config.toml")


def describe(trainer: Trainer) -> None:
    """Says what will happen before it does."""
    config, corpus = trainer.config, trainer.corpus
    scaled = config.model.rope_scaling.kind != "none"
    for section, values in config.model_dump(exclude_none=True).items():
        shown = ", ".join(f"{k} {v}" for k, v in flatten(values) if scaled or not k.startswith("rope_scaling."))
        say(textwrap.fill(f"{section}: {shown}", 118, subsequent_indent="  ", break_long_words=False))
    steps, size = config.train.steps, config.train.batch_size
    passes = trainer.batches.passes(steps)
    say(f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters; run folder {trainer.run}")
    if corpus.pairs:
        size, what = f"{size}", "pairs"
        n_train, n_val = len(trainer.pairs["train"]), len(trainer.pairs["val"])
    else:
        size, what = f"{size} x {config.model.max_seq_len}", "tokens"
        n_train, n_val = len(corpus.train.tokens), len(corpus.val.tokens)
    say(
        f"{steps:,} steps of {size} {what} = {passes:.1f} passes over {n_train:,} training {what}; "
        f"validation on {n_val:,}"
    )
    if corpus.pairs and any(pairs.n_left_out for pairs in trainer.pairs.values()):
        counts = ", ".join(f"{pairs.n_left_out:,} of {name}" for name, pairs in trainer.pairs.items())
        say(f"note: pairs longer than model.max_seq_len are left out: {counts}")
    if passes > 10:
        say(
            "note: more than about ten passes; expect the model to learn its text by heart, and use the best checkpoint"
        )


def resolve_model(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """The model's options with the vocabularies of the corpus. Raises `UserError` where one is too small for it."""
    own = corpus.pairs and corpus.source_tokenizer is not corpus.tokenizer  # the sources' tokenizer is another
    if model.source_vocab_size is not None and not own:
        raise ConfigError(
            f"model.source_vocab_size = {model.source_vocab_size} needs a data.target_tokenizer: without one, sources "
            f"and targets share one tokenizer and one model.vocab_size"
        )
    model = model.resolve(corpus.tokenizer.vocab_size, corpus.source_tokenizer.vocab_size if own else None)
    largest = {"": max(corpus.largest_id, corpus.tokenizer.end_id)}
    if own:
        largest["source_"] = max(corpus.largest_source_id, corpus.source_tokenizer.end_id)
    else:
        largest[""] = max(largest[""], corpus.largest_source_id)
    for prefix, largest_id in largest.items():
        check_ids(largest_id, getattr(model, f"{prefix}vocab_size"), prefix)
    return model


def as_before(config: Config, state: dict) -> Config:
    """What auto became when the run began, where this machine has it: another choice would round differently."""
    before = state["machine"]
    available = before["device"] == "cpu" or getattr(torch, before["device"]).is_available()
    if config.train.device == "auto" and not available:
        say(f"note: the run began on {before['device']}, which is not available here")
        return config
    auto = {name: before[name] for name in ("device", "dtype", "compile") if getattr(config.train, name) == "auto"}
    return config.model_copy(update={"train": config.train.model_copy(update=auto)})


def newest_checkpoint(run: Path) -> tuple[Path, Tensors, Tensors, dict] | None:
    """The newest checkpoint of a run that can be read, and what it holds; says which could not. None: there is none.

    Raises `UserError` when there are checkpoints and all are damaged.
    """
    for folder in reversed(checkpoints(run)):
        try:
            return folder, *read_checkpoint(folder)
        except UserError as error:
            say(f"note: {error}; going back to the checkpoint before it")
            damaged = error
    if checkpoints(run):
        raise damaged
    return None


@contextlib.contextmanager
def enough_memory(remedy: str = "train.micro_batch_size, or the sizes in [model]") -> Iterator[None]:
    """Raises `UserError` when there was not enough, saying what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for this on a CPU
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError(f"there is not enough memory; lower {remedy}") from None


def main(request: Request) -> None:
    with enough_memory():
        run(request)


def run(request: Request) -> None:
    """From the request to a finished run, in order."""
    config = request.config
    keep_freed_memory()
    if request.resume is None and config.train.run_dir is not None:
        check_free(Path(config.train.run_dir))
    wandb = import_wandb(config)
    corpus = prepare(config.data, pairs=config.model.kind == "encoder_decoder")
    saved = request.resume and newest_checkpoint(request.resume)
    if saved and saved[-1]["corpus"] != corpus.key:
        raise UserError(
            f"data.source = {config.data.source} is another text than {request.resume} was trained on; "
            f"give that text, or start a new run"
        )
    config = config.model_copy(update={"model": resolve_model(config.model, corpus)})
    machine = choose_machine(as_before(config, saved[-1]), "as before") if saved else choose_machine(config)
    if not corpus.documents:
        check_length(corpus.val.tokens, config.model.max_seq_len, "val")
    trainer = Trainer(config, request.resume, corpus, machine)
    if saved and saved[-1]["step"] > config.train.steps:
        raise ConfigError(f"train.steps = {config.train.steps}: the run is at step {saved[-1]['step']} already")
    folder = request.resume or new_run(config, request.name)
    write_config(config, folder)  # first, so that whatever happens next the folder is a run that can be resumed
    trainer.run = folder
    if saved:
        trainer.restore(*saved)
        if trainer.state.step == config.train.steps:
            say(f"{folder} is finished; to go on: python train.py --resume {folder} --train.steps N")
            return loss_curve(folder / "metrics.jsonl", folder / "loss.png")
        say(f"going on with {folder} from step {trainer.state.step}")
    else:
        corpus.tokenizer.save(folder / "tokenizer")
        if config.model.source_vocab_size is not None:
            corpus.source_tokenizer.save(folder / "source_tokenizer")
        (folder / "metrics.jsonl").write_bytes(b"")
    describe(trainer)
    log = Log(trainer, start_wandb(wandb, config, folder))
    try:
        train(trainer, log)
    finally:
        log.close()
        loss_curve(folder / "metrics.jsonl", folder / "loss.png")
    best = f"best {trainer.state.best_loss:.4f} at step {trainer.state.best_step}"
    say(f"done in {duration(trainer.state.seconds)} of training; validation loss {best}")
    source = " --prompt TEXT" if trainer.corpus.pairs else ""
    say(f"read it: python sample.py {shlex.quote(str(folder))}{source}")


if __name__ == "__main__":
    command(main)(REQUEST)
