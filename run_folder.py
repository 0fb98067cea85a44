"""The folder of a run: made or found again, and put in order before training goes on."""

import filecmp
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from checkpoint import LOCK, Tensors, checkpoints, read_checkpoint, set_aside, write_whole
from config import Config, ConfigError, UserError, read_toml
from data.tokenizer import Tokenizer
from distributed import Processes
from progress import say

MARK = ".torchrun"  # a file of the run that names who began it


def check_free(run: Path) -> None:
    """Raises `ConfigError` if the folder of a new run holds anything."""
    if run.exists() and (not run.is_dir() or any(path.name not in (LOCK, MARK) for path in run.iterdir())):
        hint = f"go on with it: --resume {run}; or " if (run / "config.toml").exists() else ""
        raise ConfigError(f"train.run_dir = {run} is in use already; {hint}choose another")


def new_run(config: Config, name: str) -> Path:
    """Creates the folder of a new run: the one asked for, or the next free runs/NAME, runs/NAME-2, ..."""
    if config.train.run_dir is not None:
        run = Path(config.train.run_dir)
        check_free(run)
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


def restarted_run(config: Config) -> Path | None:
    """The newest run that these processes began as configured now, where torchrun starts them again after a failure."""
    own = config.train.run_dir
    runs = [Path(own)] if own is not None else Path("runs").glob("*")
    marks = sorted((run / MARK for run in runs if (run / MARK).is_file()), key=lambda mark: mark.stat().st_mtime)
    for mark in reversed(marks):
        with suppress(OSError, ConfigError):
            if mark.read_text("utf-8") == launch() and read_toml(mark.with_name("config.toml"), saved=True) == config:
                return mark.parent
    return None


def launch() -> str:
    """What tells one call of torchrun from others: the name it was given or made up, or else its process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"process {os.getppid()}" if name == "none" else name


def mark_launch(run: Path) -> None:
    """Notes in a run which call of torchrun began it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        (run / MARK).write_text(launch(), "utf-8")


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Makes sure that the tokenizer in a run is the one of its text, as a damaged one would make sampling fail."""
    fresh = folder.with_name(f".{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    tokenizer.save(fresh)
    _, differing, missing = filecmp.cmpfiles(fresh, folder, os.listdir(fresh), shallow=False)
    if not differing + missing:
        return shutil.rmtree(fresh)
    if folder.is_dir() or checkpoints(folder.parent):
        say(f"note: {folder} was {'damaged' if folder.is_dir() else 'missing'}, and is written again")
        shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def newest_checkpoint(run: Path, processes: Processes) -> tuple[Path, Tensors, Tensors, dict] | None:
    """The newest checkpoint of a run that can be read, and what it holds. None: there is none. Those that cannot be
    read are named and set aside under another name.

    Raises `UserError` when there are checkpoints and all are damaged.
    """
    read = []

    def newest() -> Path | None:
        damaged = []
        for folder in reversed(checkpoints(run)):
            try:
                found = read_checkpoint(folder)
                check_state(folder, found[-1])
                read.append(found)
            except UserError as error:
                damaged.append((folder, error))
                continue
            for other, error in damaged:
                aside = set_aside(run, int(other.name[5:]), "damaged")
                say(f"note: {error}; set aside as {aside.name}, going back to the checkpoint before it")
            return folder
        if damaged:
            raise damaged[0][1]
        return None

    folder = processes.leader(newest)
    return folder and (folder, *(read or [read_checkpoint(folder)])[0])


REMEMBERED = {  # what a state.json holds at the least, and of which kind
    **dict.fromkeys(("step", "tokens", "best_step", "metrics_bytes", "threads"), int),
    **dict.fromkeys(("scaler", "machine"), dict),
    **dict.fromkeys(("torch", "corpus"), str),
    "seconds": float,
    "best_loss": float | None,
}


def check_state(folder: Path, state: dict) -> None:
    """Raises `UserError` for a state that training did not write."""
    for name, kind in REMEMBERED.items():
        if not isinstance(state.get(name, ...), kind) or (name == "step" and state["step"] != int(folder.name[5:])):
            raise UserError(f"{folder / 'state.json'} is damaged: {name} is {state.get(name, 'missing')!r}")


def why_unreadable(folder: Path) -> str | None:
    """What is wrong with a checkpoint, if anything is."""
    if not folder.is_dir():
        return f"{folder} is gone"
    try:
        read_checkpoint(folder, optimizer=False)
    except UserError as error:
        return str(error)
    return None


def cut_metrics(run: Path, size: int, last: int) -> None:
    """Ends metrics.jsonl at the `size` that it had at a checkpoint; if it is not as it was then, keeps what can be read
    of the steps up to `last`."""
    file = run / "metrics.jsonl"
    file.touch()
    written = file.read_bytes()[:size]
    kept = [line for line in written.splitlines(keepends=True) if 0 <= recorded_step(line) <= last]
    if sum(map(len, kept)) == size:
        os.truncate(file, size)
    else:
        say(f"note: {file} has lost lines; {len(kept)} can still be read")
        write_whole(file, b"".join(kept).decode())


def recorded_step(line: bytes) -> int:
    """The step that a line of metrics.jsonl is of; -1: it is none."""
    try:
        return int(json.loads(line.decode())["step"]) if line.endswith(b"\n") else -1
    except (ValueError, LookupError, TypeError):
        return -1
