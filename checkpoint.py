"""A run on disk: written whole or not at all, checked when read, and loaded without executing anything.

RUN/config.toml              what was asked, model and tokenizer resolved
RUN/tokenizer/               what turns text into its ids (RUN/source_tokenizer/: sources, if they have their own)
RUN/metrics.jsonl, loss.png  what was measured
RUN/step-NNNNNN/             weights.safetensors, state.safetensors (optimizer, by parameter name), state.json
RUN/best, RUN/last           links to such folders
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from config import Config, UserError, differences, read_toml
from data.tokenizer import Tokenizer, load_tokenizer
from distributed import slice_like, whole
from model import Decoder, EncoderDecoder, build_model

Tensors = dict[str, torch.Tensor]  # by parameter name
LOCK = ".lock"  # a file of the run that the process which trains it holds


def parameters_by_name(model: nn.Module) -> Tensors:
    """The model's parameters under the names they have in a checkpoint, each once: a tied head has none of its own,
    and what wraps the model (compilation, many processes) adds nothing."""
    return {name.replace("_orig_mod.", "").removeprefix("module."): p for name, p in model.named_parameters()}


def save_checkpoint(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, keep: int | None = None, leads=True
) -> Path:
    """Writes `run`/step-NNNNNN for `state["step"]`, points `last` at it and drops all others but the newest `keep` and
    the best (None: drops none).

    The folder is filled under another name, flushed to the disk, then renamed: it appears whole or not at all. All
    processes that hold slices of the model must call this; only the one that leads writes.
    """
    folder = run / f"step-{state['step']:06d}"
    partial = run / f".{folder.name}.partial"
    parameters = parameters_by_name(model)
    names = {id(p): name for name, p in parameters.items()}
    moments = {f"{names[id(p)]}.{key}": value for p, values in optimizer.state.items() for key, value in values.items()}
    weights, moments = whole_tensors(parameters, leads), whole_tensors(moments, leads)
    if not leads:
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, tensors in (("weights.safetensors", weights), ("state.safetensors", moments)):
        save_file(tensors, partial / name)
        (partial / name).chmod(partial.stat().st_mode & 0o666)  # readable for whom other files are
        _flush(partial / name)
    _write_state(partial, {**state, "checksums": {path.name: _checksum(path) for path in partial.iterdir()}})
    if folder.exists():  # a damaged one, which resuming went back beyond
        shutil.rmtree(folder)
    partial.rename(folder)
    _flush(run)
    link(run, "last", folder)
    if keep is not None:
        prune(run, keep)
    return folder


def settle_checkpoint(run: Path, state: dict, keep: int, best: bool) -> None:
    """After the evaluation of the checkpoint of `state["step"]`: its state is now this one, it may be the best, and
    older ones may go."""
    folder = run / f"step-{state['step']:06d}"
    checksums = read_state(folder)["checksums"]
    _write_state(folder, {**state, "checksums": checksums})
    if best:
        link(run, "best", folder)
    prune(run, keep)


def set_aside(run: Path, step: int, why: str) -> Path | None:
    """Renames the checkpoint of a step, if there is one, so that it is none any more, and lets `last` (and `best`) not
    point at it."""
    folder = run / f"step-{step:06d}"
    if not folder.exists():
        return None
    aside = folder.with_name(f"{folder.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    others = [other for other in checkpoints(run) if other != folder]
    for name in ("last", "best"):
        if (run / name).is_symlink() and os.readlink(run / name) == folder.name:
            if name == "last" and others:
                link(run, name, others[-1])
            else:
                (run / name).unlink()
    folder.rename(aside)
    return aside


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Within, no other process can train this run; a lock ends with its process. Raises `UserError` if one does."""
    lock = FileLock(run / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{run} is being trained by another process; wait for it, or stop it") from None
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):  # a file system without locks
            raise UserError(f"{run} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        # While it is held: whoever waits for it notices that it is gone, and makes another.
        with suppress(OSError):
            (run / LOCK).unlink()
        lock.release()


def link(run: Path, name: str, folder: Path) -> None:
    """Points `run`/`name` at one of its checkpoints. A rename, so that there is a link at every moment."""
    fresh = run / f".{name}.link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    try:
        fresh.replace(run / name)
    except IsADirectoryError:
        raise UserError(f"{run / name} is a folder where a link to a checkpoint belongs; move it away") from None


def write_whole(file: Path, text: str) -> None:
    """Writes a small file whole or not at all, whatever happens meanwhile."""
    fresh = file.with_name(f".{file.name}")
    try:
        fresh.write_text(text, "utf-8")
        _flush(fresh)
        fresh.replace(file)
        _flush(file.parent)
    except OSError as error:
        error.filename = error.filename or str(file)  # which a full disk leaves out
        raise


def _write_state(folder: Path, state: dict) -> None:
    state["checksums"]["state.json"] = _state_checksum(state)
    write_whole(folder / "state.json", json.dumps(state, indent=1))


def whole_tensors(tensors: Tensors, leads: bool) -> Tensors:
    """Whole tensors on the CPU, an exchange where each process has a slice; only the one that leads keeps them."""
    found = {}
    for name, tensor in tensors.items():
        tensor = whole(tensor.detach())
        if leads:
            found[name] = tensor.contiguous().cpu()
    return found


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_checksum(state: dict) -> str:
    """Of everything in state.json but the checksums themselves."""
    values = {key: value for key, value in state.items() if key != "checksums"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def prune(run: Path, keep: int) -> None:
    """Drops all checkpoints but the newest `keep`, the last and the best."""
    linked = {(run / name).resolve() for name in ("best", "last")}
    for folder in checkpoints(run)[:-keep]:
        if folder.resolve() not in linked:
            shutil.rmtree(folder)


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    folders = (folder for folder in run.glob("step-*") if folder.name[5:].isdecimal())
    return sorted(folders, key=lambda folder: int(folder.name[5:]))


def read_checkpoint(folder: Path, optimizer: bool = True) -> tuple[Tensors, Tensors, dict]:
    """Weights, optimizer tensors (none unless asked for) and state. Raises `UserError` naming a damaged file."""
    tensors, checksums = [{}, {}], (state := read_state(folder))["checksums"]
    try:
        for place, name in enumerate(["weights.safetensors", "state.safetensors"][: 1 + optimizer]):
            file = folder / name
            if _checksum(file) != checksums[name]:
                raise UserError(f"{file} is damaged: its checksum is not the one in state.json")
            tensors[place] = load_file(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    return *tensors, state


def read_state(folder: Path) -> dict:
    """What a checkpoint remembers besides tensors. Raises `UserError` if it is damaged."""
    file = folder / "state.json"
    try:
        state = json.loads(file.read_text("utf-8"))
        unchanged = state["checksums"]["state.json"] == _state_checksum(state)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if not unchanged:
        raise UserError(f"{file} is damaged: it is not what was saved")
    return state


def load_weights(model: nn.Module, weights: Tensors, where: Path) -> None:
    """Copies weights into the model by name. Raises `UserError` unless names and shapes are exactly the model's."""
    parameters = parameters_by_name(model)
    if differing := sorted(parameters.keys() ^ weights.keys()):
        raise UserError(f"{where} does not fit its config.toml: {differing[0]} is in only one of them")
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape or not weights[name].is_floating_point():
            raise UserError(
                f"{where} does not fit its config.toml: {name} is {tuple(weights[name].shape)}, "
                f"the model's {tuple(parameter.shape)}"
            )
        parameter.data.copy_(slice_like(weights[name].to(parameter.device), parameter))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors, where: Path) -> None:
    """Gives every parameter the optimizer state that was saved under its name, on the parameter's device. Raises
    `UserError` for state of no parameter, or of another shape."""
    parameters = parameters_by_name(model)
    fused = optimizer.defaults.get("fused")
    for name, value in tensors.items():
        parameter_name, _, key = name.rpartition(".")
        parameter = parameters.get(parameter_name)
        fits = parameter is not None and value.dtype == torch.float32
        if not fits or value.shape != (() if key == "step" else parameter.shape):
            raise UserError(f"{where} does not fit its config.toml: the model has no {name} of {tuple(value.shape)}")
        if key == "step":  # torch counts steps on the CPU, but for fused kernels where they run
            value = value.to(parameter.device) if fused else value
        else:
            value = slice_like(value.to(parameter.device), parameter)
        optimizer.state[parameter][key] = value


def find_run(run: str | Path | None, root: Path = Path("runs")) -> Path:
    """The run folder that is meant: the one named, or without a name that of the newest checkpoint under `root`.

    Raises `UserError`.
    """
    if run is None:
        newest = [checkpoints(path.parent)[-1] for path in root.glob("*/config.toml") if checkpoints(path.parent)]
        if not newest:
            raise UserError(f"there is no run with a checkpoint in {root.absolute()}; train one with: python train.py")
        return max(newest, key=lambda folder: folder.stat().st_mtime).parent
    run = Path(run)
    if not (run / "config.toml").is_file():
        what = "has no config.toml, so it is no run" if run.exists() else "does not exist"
        others = ", ".join(sorted(str(path.parent) for path in root.glob("*/config.toml"))) or "none"
        raise UserError(f"{run} {what}; runs: {others}")
    return run


def load_model(run: str | Path, checkpoint: str = "best") -> tuple[Decoder | EncoderDecoder, Tokenizer, Config]:
    """A trained model in evaluation mode (float32, CPU), its tokenizer and the configuration of its run.

    `checkpoint` is best, last, or the name of a step folder; a run that has no best yet gives its last. Raises
    `UserError` for a folder that is no run, has no checkpoint yet, is damaged, or was changed by hand.
    """
    run = find_run(run)
    config = read_toml(run / "config.toml", saved=True)
    if config.model.vocab_size is None:
        raise UserError(f"{run / 'config.toml'} is not what was saved: it has no model.vocab_size")
    folder = run / checkpoint
    if checkpoint == "best" and not os.path.lexists(folder):
        folder = run / "last"
    if not folder.exists():
        if not (there := ", ".join(path.name for path in checkpoints(run))):
            raise UserError(f"{run} has no checkpoint yet; it goes on with: python train.py --resume {run}")
        raise UserError(f"{run} has no checkpoint {checkpoint}; checkpoints: {there}")
    weights, _, state = read_checkpoint(folder, optimizer=False)
    tokenizer = load_tokenizer(run / "tokenizer")
    check_run(run, config, state, tokenizer)
    model = build_model(config.model)
    load_weights(model, weights, folder.resolve())
    return model.eval(), tokenizer, config


def check_run(run: Path, config: Config, state: dict, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if the model's options or a tokenizer are not those the checkpoint was written with."""
    old = {"model": state.get("config", {}).get("model", {})}
    for option, before, after in differences(old, {"model": config.model.model_dump()}):
        if option not in ("model.dropout", "model.kernel"):  # of these the weights know nothing
            raise UserError(f"{run / 'config.toml'} was changed: {option} = {after}, the model has {before}; undo that")
    for name, fingerprint in state.get("tokenizers", {}).items():
        if (tokenizer if name == "tokenizer" else load_tokenizer(run / name)).fingerprint != fingerprint:
            raise UserError(
                f"{run / name} is damaged: it is not the tokenizer of the model; python train.py --resume {run} "
                f"writes it again"
            )


def load_source_tokenizer(run: str | Path, config: Config) -> Tokenizer:
    """What turns prompts and sources into ids: the run's tokenizer, unless sources have their own."""
    return load_tokenizer(
        find_run(run) / ("tokenizer" if config.model.source_vocab_size is None else "source_tokenizer")
    )
