"""What is told while a model trains: to people, to programs, and to Weights & Biases; by the first process alone."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from config import Config, ConfigError, UserError
from config.errors import from_torchrun
from data.prepare import Split
from plots import loss_curve


def say(text: str, end: str = "\n") -> None:
    """Prints, and goes on in silence when what reads the output has ended: training is not what was asked to stop."""
    if from_torchrun("RANK"):
        return
    try:
        print(text, end=end, flush=True)
    except OSError:  # a closed pipe, a terminal that is gone, a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Log:
    """Progress for people, metrics.jsonl for programs, loss.png for both, Weights & Biases on request."""

    def __init__(self, trainer, wandb):
        self.trainer, self.wandb = trainer, wandb
        self.file = self.metrics.open("a", encoding="utf-8") if trainer.leads else None
        self.live = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed

    @property
    def metrics(self) -> Path:
        return self.trainer.run / "metrics.jsonl"

    def record(self, values: dict[str, float]) -> None:
        """Adds a line for this step. Raises `UserError` where the disk takes none."""
        if self.file is None:
            return
        state = self.trainer.state
        values = {key: value if math.isfinite(value) else None for key, value in values.items()}  # JSON has no Infinity
        try:
            self.file.write(json.dumps({"step": state.step, **values, "tokens": state.tokens}) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.metrics} cannot be written: {error.strerror}") from None
        state.metrics_bytes = self.file.tell()
        if self.wandb:
            self.to_wandb(values)

    def to_wandb(self, values: dict[str, float]) -> None:
        """Steps are a value like others: after a kill some come twice, and by its own count it would drop them."""
        try:
            self.wandb.log({"step": self.trainer.state.step, **values, "tokens": self.trainer.state.tokens})
        except Exception as error:  # whatever it is, training goes on
            self.say(f"Weights & Biases: {_first_line(error)}; it is told no more, metrics.jsonl is")
            self.wandb = None

    def flush(self) -> None:
        """Waits until the disk has what was recorded."""
        if self.file:
            os.fsync(self.file.fileno())

    def progress(self, values: dict[str, float]) -> None:
        trainer, step, steps = self.trainer, self.trainer.state.step, self.trainer.planned_steps()
        speed = trainer.state.tokens / step / trainer.state.pace  # of a step, on average: batches of pairs differ
        share = f" ({speed * trainer.token_flops / trainer.peak:.0%} of peak)" if trainer.peak else ""
        line = (
            f"step {step:,}/{steps:,} · loss {values['loss']:.4f} · {speed:,.0f} tokens/s{share} · "
            f"{duration(trainer.seconds_left())} left"
        )
        self.say(line, end="" if self.live and step < steps else "\n")

    def say(self, text: str, end: str = "\n") -> None:
        say(f"\r\x1b[K{text}" if self.live else text, end)

    def draw(self) -> None:
        """Draws loss.png as far as it goes. A picture is no reason to stop."""
        if self.trainer.leads:
            try:
                loss_curve(self.metrics, self.trainer.run / "loss.png")
            except OSError as error:
                self.say(f"note: loss.png could not be written: {error.strerror}")

    def close(self) -> None:
        if self.file:
            with suppress(OSError):  # what the disk did not take was said
                self.file.close()
        if self.wandb:
            self.wandb.finish()


def duration(seconds: float) -> str:
    minutes = int(seconds + 0.5) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {int(seconds + 0.5) % 60} s" if minutes else f"{seconds:.0f} s"


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


def import_wandb(config: Config):
    """The package, if it is asked for."""
    if config.log.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        raise ConfigError(f"log.wandb = {config.log.wandb} needs a package: pip install wandb") from None
    return wandb


def start_wandb(wandb, trainer):
    """The Weights & Biases run, the one it had before if it is resumed, or None. Never asks for anything, and never
    waits for long: without a key, or a connection within seconds, it logs offline."""
    if wandb is None:
        return None
    for mode in ("online", "offline") if trainer.config.log.wandb == "online" else ("offline",):
        try:
            return _start(wandb, trainer, mode)
        except Exception as error:  # of many kinds, and none is a reason not to train
            then = "logging offline" if mode == "online" else "it is told nothing, metrics.jsonl is"
            say(f"Weights & Biases: {_first_line(error)}; {then}")
            wandb.teardown()  # or what could not start counts as running
    return None


def _start(wandb, trainer, mode: str):
    config, state = trainer.config, trainer.state
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        raise UserError("no key on this machine")
    run = wandb.init(
        mode=mode,
        project=config.log.wandb_project,
        name=trainer.run.name,
        dir=trainer.run,
        config=config.model_dump(),
        settings=wandb.Settings(console="off", silent=True, init_timeout=8, finish_timeout=60),
        id=state.wandb,
        resume="allow" if state.wandb else None,
    )
    state.wandb = run.id
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
