"""Train a model: python train.py [config/NAME.toml] [--section.option VALUE ...], or --resume RUN to go on with one.

The file reads in the order in which things happen. Every number that a step depends on follows from the configuration,
the seed and the step, so a run that was stopped goes on exactly as if it had not been.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from interrupt import Interruption, leave, on_interrupt

if __name__ == "__main__":
    on_interrupt(leave)

from config import (
    Config,
    ConfigError,
    UserError,
    command,
    differences,
    flatten,
    given_options,
    load_config,
    override,
    read_toml,
    split_preset,
    to_toml,
)
from config.errors import OneProcessError, from_torchrun

PROGRAM = "python train.py [config/NAME.toml | --resume RUN]"
DESCRIPTION = """Train a model: config/stories.toml, or the preset that comes first.

With --resume RUN first, a run that was stopped goes on; options after it change it where that makes sense."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for: a configuration, and a new run of that name or an old one to go on with."""

    config: Config
    name: str
    resume: Path | None = None
    old: Config | None = None  # that of the run to go on with, as it was
    given: frozenset[str] = frozenset()  # the options that a preset or the command line names


def read_request(argv: Sequence[str]) -> Request:
    if argv and argv[0].partition("=")[0] == "--resume":
        run, words = argv[0].partition("=")[2], list(argv[1:])
        if not run and not words:
            raise ConfigError("--resume needs the folder of a run")
        run = Path(run or words.pop(0))
        if not (run / "config.toml").is_file():
            raise ConfigError(f"--resume {run}: there is no run in that folder; {other_runs(run)}")
        if (run / "step-000000").is_dir():  # training saves none of that name
            raise ConfigError(f"--resume {run}: it was imported, not trained; begin with it: --train.init-from {run}")
        old = read_toml(run / "config.toml", saved=True)
        new = override(old, words, PROGRAM, DESCRIPTION)
        tell_changes(old.model_dump(), new.model_dump())
        return Request(new, run.name, run, old, frozenset(option for option, _ in flatten(old.model_dump())))
    if any(word.partition("=")[0] == "--resume" for word in argv):
        raise ConfigError("--resume RUN comes first, before any other option")
    config = load_config(argv, PROGRAM, DESCRIPTION)
    return Request(config, split_preset(argv)[0].stem, given=frozenset(given_options(argv)))


def other_runs(run: Path) -> str:
    """What may have been meant instead of a run that is not there."""
    if (run.parent / "config.toml").is_file():
        return f"did you mean {run.parent}?"
    runs = {
        str(path.parent): None for folder in (run.parent, run, Path("runs")) for path in folder.glob("*/config.toml")
    }
    if near := get_close_matches(run.name, map(os.path.basename, runs), n=1):
        return f"did you mean {next(other for other in runs if os.path.basename(other) == near[0])}?"
    newest = sorted(runs, key=os.path.getmtime, reverse=True)
    return f"the newest runs: {', '.join(newest[:5]) or 'none'}"


# What makes a run that run; and what of that may change all the same. (A text may move: what it says is compared.)
FIXED = ("model.", "data.", "optim.name", "train.seed", "train.batch_size", "train.run_dir", "train.init_from")
FREE = ("data.source", "model.dropout", "model.kernel")


def tell_changes(old: dict, new: dict, where: str = "") -> None:
    """Says in what the options of a resumed run differ from those it had. Raises `ConfigError` for what may not."""
    found = list(differences(old, new))
    for option, before, after in found:
        if option == "train.run_dir":
            raise ConfigError(f"train.run_dir = {after} cannot change in a resumed run; move its folder instead")
        if option.startswith(FIXED) and option not in FREE:
            raise ConfigError(f"{option} = {after} cannot change in a resumed run, it is {before}{where}")
    for option, before, after in found if from_torchrun("RANK") == 0 else ():
        print(f"changed: {option} = {after} (it was {before}{where})")


if __name__ == "__main__":  # --help and mistakes are answered before torch takes its seconds to load
    REQUEST = command(read_request)(sys.argv[1:])

import gc
import math
import shlex
import textwrap
import time

# A thread that waits for the others should soon sleep: beside another busy program one that spins stalls for seconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from checkpoint import (
    Tensors,
    checkpoints,
    link,
    load_optimizer,
    load_weights,
    locked,
    parameters_by_name,
    prune,
    read_state,
    save_checkpoint,
    set_aside,
    settle_checkpoint,
    whole_tensors,
    write_whole,
)
from config.schema import ModelConfig
from data.loader import IGNORE, Batches, PairBatches, Pairs, check_ids, check_length
from data.prepare import Corpus, Split, prepare
from data.tokenizer import Tokenizer
from distributed import Processes, exchange, noticing_the_end_of_others, own_slice, whole
from generation import generate
from loss import Loss, grade, grade_pairs
from machine import Machine, choose_machine, enough_memory, keep_freed_memory, matmul_peak, step_flops
from model import Block, LanguageModel, build_model
from optim import build_optimizer, learning_rate, set_learning_rate
from pretrained import Source, inherit, open_source, run_tokenizers
from progress import Log, duration, evaluation_lines, import_wandb, say, start_wandb, translation_line
from run_folder import (
    check_free,
    cut_metrics,
    keep_tokenizer,
    mark_launch,
    new_run,
    newest_checkpoint,
    restarted_run,
    why_unreadable,
)
from translation import compare, translate

TRANSLATED = 1000  # pairs of a split that are translated at each evaluation
SHOWN = 4  # of these are shown
SKIPPED = 20  # steps in a row whose gradients float16 could not hold


@dataclass
class State:
    """What a checkpoint remembers besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training
    other_seconds: float = 0.0  # of evaluations and of saving
    pace: float = 0.0  # seconds a step, of late
    paced: int = 0  # how many steps that is the average of
    evaluation_seconds: float = 0.0  # of the last one, with what belongs to it
    skipped: int = 0  # steps in a row that the loss scaler left out
    best_loss: float = math.inf
    best_step: int = 0
    metrics_bytes: int = 0
    values: dict[str, float] | None = None  # what the last step gave
    ungraded: dict[str, float] | None = None  # the same, if its evaluation is still to come
    evaluated: int = 0  # the step of the last evaluation
    wandb: str | None = None

    def tick(self, seconds: float, window: int) -> None:
        """Counts a step that took so long. The pace is an average over about the last `window`; steps that take many
        times as long as one after them had something to prepare, such as compiling, and do not count."""
        self.seconds += seconds
        if seconds < self.pace / 8 or not self.paced:
            self.pace, self.paced = seconds, 1
        else:
            self.paced = min(self.paced + 1, window)
            self.pace += (seconds - self.pace) / self.paced


class Trainer:
    """Everything that a step needs, put together once."""

    peak = 0.0  # TFLOP/s that matrix products reach here at best, all processes together; 0: not measured

    def __init__(self, config: Config, run: Path | None, corpus: Corpus, machine: Machine):
        self.config, self.run, self.corpus, self.machine = config, run, corpus, machine
        self.processes, self.leads = machine.processes, machine.processes.leads
        torch.manual_seed(config.train.seed)
        self.model = build_model(config.model)
        self.divided = self.processes.size > 1 and config.train.strategy == "fsdp"
        if self.divided:
            blocks = [module for module in self.model.modules() if isinstance(module, Block)]
            self.processes.divide(self.model, blocks, machine.device)
        self.model.to(machine.device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.scaler = torch.amp.GradScaler(machine.device, enabled=machine.dtype == torch.float16)
        self.loss = Loss(self.model, config.optim.label_smoothing)
        self.training_loss = torch.compile(self.loss) if machine.compile else self.loss
        if self.processes.size > 1 and not self.divided:
            self.training_loss = self.processes.replicate(self.training_loss)
        self.graded = {"val": corpus.val} | ({"held_out": corpus.held_out} if corpus.held_out else {})
        size, seed, context = config.train.batch_size, config.train.seed, config.model.max_seq_len
        if corpus.pairs:
            splits = {"train": corpus.train, **self.graded}
            self.pairs = {name: pairs_of(split, corpus, context, name) for name, split in splits.items()}
            self.batches = PairBatches(self.pairs["train"], size, seed)
        else:
            end_id = corpus.tokenizer.end_id if corpus.documents else None
            self.batches = Batches(corpus.train.tokens, context, size, seed, end_id)
        self.state = State()

    def step(self) -> dict[str, float]:
        """One optimizer step: gradients of the mean over all targets of the batch, whatever the micro-batches and
        however many processes share them."""
        config, state, size = self.config, self.state, self.machine.micro_batch_size
        rate = learning_rate(config.optim, state.step, self.planned_steps())
        set_learning_rate(self.optimizer, rate)
        batch = self.batches.batch(state.step)  # the whole of it in each process: it costs little
        n_target = int((batch[-1] != IGNORE).sum())
        total = torch.zeros((), device=self.machine.device)
        own = range(self.processes.rank, config.train.batch_size // size, self.processes.size)
        for place in own:
            seed_everything(config.train.seed, state.step, place)  # dropout needs no saved state
            rows = (tensor[place * size : (place + 1) * size].to(self.machine.device) for tensor in batch)
            with exchange(self.training_loss, now=place == own[-1]):
                with self.machine.autocast():
                    loss = self.training_loss(*rows)
                # Gradients are averaged over processes, where their sum is wanted.
                self.scaler.scale(loss / (max(n_target, 1) / self.processes.size)).backward()
            total += loss.detach()
        (nats,) = self.processes.sum(total.item())
        self.scaler.unscale_(self.optimizer)
        limit = config.optim.grad_clip or math.inf
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), limit)).item()
        self.check(nats, norm)
        if n_target:  # without targets there is nothing to learn, and neither decay nor momentum may move a weight
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        state.step, state.tokens = state.step + 1, state.tokens + n_target
        return {"loss": nats / max(n_target, 1), "learning_rate": rate, "gradient_norm": norm}

    def check(self, nats: float, norm: float) -> None:
        """Ends the run before a loss or a gradient that is not finite reaches the weights. float16 skips such a
        gradient, and scales less the next time, which may not go on for ever."""
        state = self.state
        state.skipped = 0 if math.isfinite(norm) else state.skipped + 1
        if not math.isfinite(nats):
            self.fail(f"the loss is {nats}")
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            self.fail(f"the norm of the gradient is {norm}")
        if state.skipped >= SKIPPED:
            what = f"the gradients of {SKIPPED} steps in a row were too large for float16"
            self.fail(what, " or --train.dtype float32")

    def fail(self, what: str, remedy: str = "") -> None:
        """Ends the run, saying what to try; all processes come here. A checkpoint of this very step is useless, and is
        set aside: the weights in it gave what is wrong."""
        aside = set_aside(self.run, self.state.step, "diverged") if self.leads else None
        note = f" (its checkpoint is set aside as {aside.name})" if aside else ""
        saved = checkpoints(self.run)
        then = f"go on from {saved[-1].name}: {resume(self.run)}" if saved else "try again with"
        rate = self.config.optim.learning_rate / 3
        raise UserError(f"{what} at step {self.state.step}{note}; {then} --optim.learning-rate {rate:.0e}{remedy}")

    def planned_steps(self) -> int:
        """Where the schedule ends: `steps`, or sooner if `max_minutes` comes first at the present pace."""
        limit, state, config = self.config.train.max_minutes * 60, self.state, self.config.train
        if not limit or not state.pace:
            return config.steps
        each = state.pace + (self.expected_evaluation() / config.eval_interval if config.eval_interval else 0.0)
        left = limit - state.seconds - state.other_seconds - self.expected_evaluation()  # an evaluation ends the run
        return min(config.steps, state.step + max(int(left / each), 0))

    def expected_evaluation(self) -> float:
        """About how many seconds an evaluation takes."""
        return self.state.evaluation_seconds or self.state.pace * self.evaluation_steps()

    def evaluation_steps(self) -> float:
        """About as many steps as an evaluation takes before one was measured: a forward pass is a third of a step."""
        graded = sum(len(split.tokens) for split in self.graded.values())
        return graded / 3 * self.state.step / max(self.state.tokens, 1)

    def seconds_left(self) -> float:
        """About how long the rest takes, evaluations included."""
        step, last, interval = self.state.step, self.planned_steps(), self.config.train.eval_interval
        if step == last:
            return 0.0
        evaluations = last // interval - step // interval + (last % interval > 0) if interval else 1
        return (last - step) * self.state.pace + evaluations * self.expected_evaluation()

    def measure(self) -> None:
        """Finds what the processes could compute at best, and what a target costs, so that progress tells the share."""
        config, lengths = self.config.model, self.pairs["train"].lengths if self.corpus.pairs else None
        length = config.max_seq_len if lengths is None else round(float(lengths.mean()))
        self.token_flops = step_flops(self.model, 1, length) / length / 1e12
        self.peak = matmul_peak(self.machine, rounds=3)[0] * self.processes.size

    def evaluate(self) -> dict[str, float]:
        """The loss over the whole validation split, and over the held-out combinations where the corpus has them; of
        pairs also how well the first of each split are translated, which the first process tells."""
        config, context, grades = self.config, self.config.model.max_seq_len, {}
        # Many short windows at a time are faster.
        rows = config.train.micro_batch_size or max(self.machine.micro_batch_size, 4096 // context)
        for name, split in self.graded.items():
            if self.corpus.pairs:
                grades[name] = grade_pairs(self.loss, self.pairs[name], self.machine, rows)
            else:
                grades[name] = grade(self.loss, split, self.corpus, self.machine, context, rows)
            if not math.isfinite(grades[name]["loss"]):
                self.fail(f"the {name} loss is {grades[name]['loss']}")
        if self.divided:
            self.model.reshard()  # which a forward pass without a backward one leaves to be done
        if self.corpus.pairs:
            model = self.whole_model()
            for name in self.graded if self.leads else ():
                sources, texts, references = self.translations(name, model)
                grades[name] |= compare(texts, references)
                self.shown = list(zip(sources, texts, references, strict=True))[:SHOWN]
        return {f"{name}_{key}": value for name, values in grades.items() for key, value in values.items()}

    def sample(self) -> str:
        """A few words of the model's own, from the start token; of pairs some translations that were just graded. Only
        in the first process."""
        tokenizer = self.corpus.tokenizer
        if self.corpus.pairs:
            return "\n".join(map(translation_line, self.shown)) if self.leads else ""
        model = self.whole_model()
        if not self.leads:
            return ""
        (ids,) = generate(
            model,
            [[]],
            max_new_tokens=self.config.log.sample_tokens,
            temperature=0.8,
            top_p=0.95,
            end_id=tokenizer.end_id,
            vocab_size=tokenizer.vocab_size,
            seed=self.state.step,
        )
        return tokenizer.decode(ids)

    def translations(self, split: str, model: LanguageModel) -> tuple[list[str], list[str], list[str]]:
        """Of the first pairs of a split the sources, the model's greedy translations (in float32), and the targets."""
        pairs, tokenizer = self.pairs[split], self.corpus.tokenizer
        texts = [tokenizer.decode(best.ids) for best in translate(model, pairs, tokenizer, TRANSLATED)]
        sources = [self.corpus.source_tokenizer.decode(pairs.source(row)) for row in range(len(texts))]
        return sources, texts, [tokenizer.decode(pairs.target(row)) for row in range(len(texts))]

    def whole_model(self) -> LanguageModel:
        """The model with all its weights in the first process, in whose forward the others need not take part."""
        if not self.divided:
            return self.model
        weights = whole_tensors(parameters_by_name(self.model), self.leads)
        if not self.leads:
            return self.model
        with torch.random.fork_rng(devices=[]):
            model = build_model(self.config.model)
        load_weights(model, weights, self.run)
        model = model.to(self.machine.device)
        return model.train(self.model.training)

    def save(self, settled: bool = True) -> Path:
        """Writes a checkpoint; unless it is `settled`, its evaluation is to come, and until then the others stay.
        Raises `UserError` when the disk does not take it; the one before it stays whole."""
        if not self.finite():
            self.fail("a weight is not finite")
        keep = self.config.train.keep_checkpoints if settled else None
        with self.saving():
            folder = save_checkpoint(self.run, self.model, self.optimizer, self.remembered(), keep, self.leads)
        self.processes.wait()  # nobody goes on, and perhaps ends, before it is written
        return folder

    def finite(self) -> bool:
        """No weight has become infinite or NaN: what is saved can be gone on with."""
        bad = sum(not bool(own_slice(weight.detach()).isfinite().all()) for weight in self.model.parameters())
        return self.processes.sum(bad) == [0]

    def settle(self) -> None:
        """The newest checkpoint turned out well: notes what its evaluation gave, if any; older ones may go."""
        if self.leads:
            with self.saving():
                keep, state = self.config.train.keep_checkpoints, self.state
                if state.evaluated == state.step:
                    settle_checkpoint(self.run, self.remembered(), keep, best=state.best_step == state.step)
                else:
                    prune(self.run, keep)

    @contextmanager
    def saving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("I/O error: ")[2] or error
            raise UserError(
                f"step {self.state.step} could not be saved in {self.run}: {reason}; when that is mended, go on with: "
                f"{resume(self.run)}"
            ) from None

    def end(self) -> None:
        """Takes leave of the other processes. What exchanges gradients goes first: as the last to hold the connection,
        it would wait for a thread that waits for Python's lock, which it has."""
        self.training_loss = None
        gc.collect()
        self.processes.end()

    def remembered(self) -> dict:
        """state.json: the counters, and what the numbers depend on besides them."""
        machine = self.machine
        return {
            **vars(self.state),
            "best_loss": None if math.isinf(self.state.best_loss) else self.state.best_loss,
            "scaler": self.scaler.state_dict(),
            "machine": {
                "device": machine.device,
                "dtype": str(machine.dtype).removeprefix("torch."),
                "compile": "on" if machine.compile else "off",
                "micro_batch_size": machine.micro_batch_size,
            },
            "processes": self.processes.size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "corpus": self.corpus.key,
            "tokenizers": self.tokenizers(),
            "config": self.config.model_dump(),
        }

    def tokenizers(self) -> dict[str, str]:
        """Their fingerprints, by the folder of each."""
        own = {"source_tokenizer": self.corpus.source_tokenizer} if self.config.model.source_vocab_size else {}
        return {name: kept.fingerprint for name, kept in {"tokenizer": self.corpus.tokenizer, **own}.items()}

    def restore(self, folder: Path, weights: Tensors, tensors: Tensors, state: dict) -> None:
        """Goes back to a checkpoint: weights, optimizer, counters, and metrics.jsonl as long as it was then."""
        load_weights(self.model, weights, folder)
        load_optimizer(self.model, self.optimizer, tensors, folder)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.tell_differences({**state["machine"], **state})
        self.state = State(**{name: state[name] for name in vars(self.state) if name in state})
        self.state.best_loss = math.inf if self.state.best_loss is None else self.state.best_loss
        best = self.run / f"step-{self.state.best_step:06d}"
        gone = best != folder and self.state.best_step and self.processes.leader(lambda: why_unreadable(best))
        if gone:
            say(f"note: {gone}; that was the best checkpoint, and the best of those to come takes its place")
            self.state.best_loss, self.state.best_step = math.inf, 0
        if self.leads:
            cut_metrics(self.run, self.state.metrics_bytes, self.state.step - (self.state.ungraded is not None))
            link(self.run, "last", folder)  # a kill may have come between saving and linking
            if gone:
                (self.run / "best").unlink(missing_ok=True)
            elif self.state.best_step:
                link(self.run, "best", best)

    def tell_differences(self, before: dict) -> None:
        """Says on what else the numbers depend and is not as before."""
        now, before = self.remembered(), {"micro_batch_size": None, "processes": 1, **before}
        now |= now["machine"]
        for what in ("threads", "processes", "torch"):
            if now[what] != before[what]:
                say(f"note: {what}: {now[what]} instead of {before[what]}; sums may round differently")
        if before["micro_batch_size"] not in (None, now["micro_batch_size"]):
            rows = now["micro_batch_size"]
            say(f"note: micro-batches of {rows} instead of {before['micro_batch_size']}; dropout draws differently")


def pairs_of(split: Split, corpus: Corpus, context: int, name: str) -> Pairs:
    """The pairs of a split that fit into the context. Raises `UserError` if there are none."""
    end_ids = corpus.source_tokenizer.end_id, corpus.tokenizer.end_id
    return Pairs(split.sources, split.tokens, *end_ids, context, name)


def seed_everything(*numbers: int) -> None:
    """Seeds torch from a tuple of numbers, each of which counts."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))


def train(trainer: Trainer, log: Log) -> None:
    """The loop: step, save, evaluate, tell; until the steps, the time or the patience of the user end.

    What is saved before an evaluation says that it is still to come, and resuming begins with it: so nothing that
    happens meanwhile can lose a step.
    """
    config, state, processes = trainer.config, trainer.state, trainer.processes
    interruption, ended = Interruption(), 0
    if state.ungraded is not None:
        evaluate(trainer, log)
    total, unproven = trainer.planned_steps(), False
    while state.step < total and not ended:
        clock = time.perf_counter()
        state.values = values = trainer.step()
        taken, ended = processes.max(time.perf_counter() - clock, interruption.signal)
        state.tick(taken, window=max(20, total // 10))
        if unproven:  # the weights last saved gave a finite loss
            trainer.settle()
            unproven = False
        total = trainer.planned_steps()  # a slow step may have brought the end of max_minutes nearer
        evaluating = state.step >= total or due(state.step, config.train.eval_interval)
        if evaluating:
            state.ungraded = values
        elif due(state.step, config.log.interval):
            log.record(values)
            log.progress(values)
        if evaluating or ended or due(state.step, config.train.checkpoint_interval):
            clock = time.perf_counter()
            log.flush()
            trainer.save(settled=False)
            unproven = not evaluating
            state.other_seconds += processes.max(time.perf_counter() - clock)[0]
        if evaluating and not ended:
            evaluate(trainer, log)
            (ended,) = processes.max(interruption.signal)
    if ended and (state.step < total or state.ungraded):
        log.draw()
        log.say(f"stopped at step {state.step}, saved; go on with: {resume(trainer.run)}")
        trainer.end()
        sys.exit(128 + int(ended))


def evaluate(trainer: Trainer, log: Log) -> None:
    """Grades the checkpoint just written, and tells: of this step everything at once."""
    state, clock = trainer.state, time.perf_counter()
    values = state.ungraded | trainer.evaluate()
    better = values["val_loss"] < state.best_loss
    if better:
        state.best_loss, state.best_step = values["val_loss"], state.step
    for line in evaluation_lines(values, trainer.graded, state.step, better) if trainer.leads else ():
        log.say(line)
    if trainer.config.log.sample_tokens:
        log.say(textwrap.indent(trainer.sample().strip(), "  | "))
    log.record(values)
    state.ungraded, state.evaluated = None, state.step
    log.flush()
    log.draw()
    (state.evaluation_seconds,) = trainer.processes.max(time.perf_counter() - clock)
    state.other_seconds += state.evaluation_seconds
    trainer.settle()
    log.progress(values)


def resume(run: Path) -> str:
    """The command that goes on with a run."""
    return f"python train.py --resume {shlex.quote(str(run))}"


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


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
    say(f"peak, what matrix products reach here: {trainer.peak:.3g} TFLOP/s")
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


def as_before(config: Config, state: dict, processes: Processes) -> Config:
    """What auto became when the run began, where this machine has it: another choice would round differently."""
    before, train = state["machine"], config.train
    available = before["device"] == "cpu" or getattr(torch, before["device"]).is_available()
    if train.device == "auto" and not available:
        say(f"note: the run began on {before['device']}, which is not available here")
        return config
    asked = state.get("config", {}).get("train", {})
    auto = {}
    for name in ("device", "dtype", "compile"):
        if asked.get(name, "auto") == getattr(train, name) == "auto":
            auto[name] = before[name]
    size = before.get("micro_batch_size")
    was_auto = train.micro_batch_size is None and asked.get("micro_batch_size") is None
    if was_auto and size and train.batch_size % (size * processes.size) == 0:
        auto["micro_batch_size"] = size
    return config.model_copy(update={"train": train.model_copy(update=auto)})


def main(request: Request) -> None:
    with enough_memory(), noticing_the_end_of_others():
        run(request)


def run(request: Request) -> None:
    """From the request to a finished run, in order."""
    config = request.config
    keep_freed_memory()
    if request.resume is None and config.train.run_dir is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
        check_free(Path(config.train.run_dir))  # before the text is prepared, which may take long
    wandb = import_wandb(config)
    source, tokenizers = beginning(request)
    if source:
        config = inherit(config, request.given, source)
    corpus = prepare(config.data, pairs=config.model.kind == "encoder_decoder", tokenizers=tokenizers)
    config = config.model_copy(update={"model": resolve_model(config.model, corpus)})
    processes = Processes.started()
    if processes.leader(lambda: (corpus.key, config)) != (corpus.key, config):
        raise OneProcessError("this process was given another text or other options than the first one")
    (restarts,) = processes.max(from_torchrun("TORCHELASTIC_RESTART_COUNT"))
    resumed = request.resume or processes.leader(lambda: restarted_run(config) if restarts else None)
    if not corpus.documents:
        check_length(corpus.val.tokens, config.model.max_seq_len, "val")
    with ExitStack() as stack:
        saved = None
        if resumed:
            processes.leader(lambda: stack.enter_context(locked(resumed)))
            saved = newest_checkpoint(resumed, processes)
            if not saved:
                say(f"note: {resumed} has no checkpoint yet, and starts from the beginning")
        if saved:
            check_restored(request, resumed, config, corpus, saved[-1])
            machine = choose_machine(as_before(config, saved[-1], processes), "as before", processes)
        else:
            machine = choose_machine(config, processes=processes)
        trainer = Trainer(config, resumed, corpus, machine)
        if resumed is None:
            trainer.run = processes.leader(lambda: new_run(config, request.name))
            processes.leader(lambda: stack.enter_context(locked(trainer.run)))
            processes.leader(lambda: check_free(trainer.run))  # another process may have been faster
        begin(trainer, saved, source)
        resuming, saved = saved is not None, None  # which is as large as the model and its optimizer
        state = trainer.state
        if resuming and is_finished(trainer):
            more = "steps N" if state.step == config.train.steps else "max-minutes M"
            say(f"{trainer.run} is finished; to go on: {resume(trainer.run)} --train.{more}")
            return trainer.end()
        if trainer.leads:
            write_whole(trainer.run / "config.toml", to_toml(config))
        trainer.measure()
        describe(trainer)
        log = Log(trainer, start_wandb(wandb, trainer) if processes.leads else None)
        try:
            train(trainer, log)
        finally:
            log.close()
    best = f"best {state.best_loss:.4f} at step {state.best_step}"
    say(f"done in {duration(state.seconds)} of training; validation loss {best}")
    source = " --prompt TEXT" if corpus.pairs else ""
    say(f"read it: python sample.py {shlex.quote(str(trainer.run))}{source}")
    trainer.end()


def is_finished(trainer: Trainer) -> bool:
    """Nothing is left to be done of a resumed run. A step that was not its last, and is now, is to be evaluated."""
    state = trainer.state
    if state.step < trainer.planned_steps() or state.ungraded is not None:
        return False
    if state.evaluated == state.step or state.values is None:
        return True
    state.ungraded = state.values
    if trainer.leads:
        cut_metrics(trainer.run, state.metrics_bytes, state.step - 1)
    return False


def check_restored(request: Request, run: Path, config: Config, corpus: Corpus, state: dict) -> None:
    """Raises `UserError` for a checkpoint that this configuration and this text cannot go on from."""
    if state["corpus"] != corpus.key:
        raise UserError(
            f"data.source = {config.data.source} is another text than {run} was trained on; "
            f"give that text, or start a new run"
        )
    if "config" in state and request.old:  # config.toml may have been edited by hand
        tell_changes(state["config"], request.old.model_dump(), " when the checkpoint was written")
    if state["step"] > config.train.steps:
        raise ConfigError(f"train.steps = {config.train.steps}: the run is at step {state['step']} already")


def beginning(request: Request) -> tuple[Source | None, dict[str, Tokenizer] | None]:
    """What a run with `train.init_from` begins with, and the tokenizers that its text is read with: the source's. With
    a checkpoint it stands alone, and needs the source no more, unless a tokenizer in it is damaged."""
    run, name = request.resume, request.config.train.init_from
    if name is None:
        return None, None
    if not (run and checkpoints(run)):
        source = open_source(name)
        return source, source.tokenizers
    with suppress(UserError):
        tokenizers = run_tokenizers(run, request.config)
        if {folder: tokenizer.fingerprint for folder, tokenizer in tokenizers.items()} == remembered_tokenizers(run):
            return None, tokenizers
    return None, open_source(name).tokenizers


def remembered_tokenizers(run: Path) -> dict[str, str]:
    """The fingerprints in the newest checkpoint that can be read."""
    for folder in reversed(checkpoints(run)):
        with suppress(UserError):
            return read_state(folder)["tokenizers"]
    return {}


def begin(trainer: Trainer, saved: tuple[Path, Tensors, Tensors, dict] | None, source: Source | None = None) -> None:
    """Makes the folder a run that can be resumed whatever happens next; brings back what a checkpoint `saved`, or the
    weights of its `source`."""
    config, corpus, folder = trainer.config, trainer.corpus, trainer.run
    if trainer.leads:
        mark_launch(folder)
        if not (folder / "config.toml").exists():
            write_whole(folder / "config.toml", to_toml(config))
        keep_tokenizer(corpus.tokenizer, folder / "tokenizer")
        if config.model.source_vocab_size is not None:
            keep_tokenizer(corpus.source_tokenizer, folder / "source_tokenizer")
    if saved:
        trainer.restore(*saved)
        say(f"going on with {folder} from step {trainer.state.step}")
        return
    if source:
        load_weights(trainer.model, source.weights(), Path(source.name))
        say(f"beginning with the weights of {source.name}")
    if trainer.leads:
        (folder / "metrics.jsonl").write_bytes(b"")


if __name__ == "__main__":
    # Among many processes one that waits for others would not come to run a handler.
    on_interrupt(signal.SIG_DFL if "TORCHELASTIC_RUN_ID" in os.environ else signal.default_int_handler)
    command(main)(REQUEST)
