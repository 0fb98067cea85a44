"""A run on disk: written whole or not at all, checked when read, and loaded without executing anything.

RUN/config.toml              what was asked, model and tokenizer resolved
RUN/tokenizer/               what turns text into its ids (RUN/source_tokenizer/: sources, if they have their own)
RUN/metrics.jsonl, loss.png  what was measured
RUN/step-NNNNNN/             weights.safetensors, state.safetensors (optimizer, by parameter name), state.json
RUN/best, RUN/last           links to such folders
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from config import Config, UserError, read_toml
from data.tokenizer import Tokenizer, load_tokenizer
from model import Decoder, EncoderDecoder, build_model

Tensors = dict[str, torch.Tensor]  # by parameter name


def parameters_by_name(model: nn.Module) -> Tensors:
    """The model's parameters under the names they have in a checkpoint, each once: a tied head has none of its own,
    and what wraps the model (compilation, many processes) adds nothing."""
    return {name.replace("_orig_mod.", "").removeprefix("module."): p for name, p in model.named_parameters()}


def save_checkpoint(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, keep: int, best: bool = False
) -> Path:
    """Writes `run`/step-NNNNNN for `state["step"]`, points `last` (and `best`) at it, and drops all others but the
    newest `keep` and the best.

    The folder is filled under another name, flushed to the disk, then renamed: it appears whole or not at all.
    """
    folder = run / f"step-{state['step']:06d}"
    partial = run / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    parameters = parameters_by_name(model)
    names = {id(p): name for name, p in parameters.items()}
    tensors = {f"{names[id(p)]}.{key}": value for p, values in optimizer.state.items() for key, value in values.items()}
    _write_tensors(partial / "weights.safetensors", {n: p.detach() for n, p in parameters.items()})
    _write_tensors(partial / "state.safetensors", tensors)
    checksums = {path.name: _checksum(path) for path in sorted(partial.glob("*.safetensors"))}
    checksums["state.json"] = _state_checksum(state)
    (partial / "state.json").write_text(json.dumps({**state, "checksums": checksums}, indent=1), "utf-8")
    _flush(partial / "state.json")
    _flush(partial)
    if folder.exists():  # a damaged one, which resuming went back beyond
        shutil.rmtree(folder)
    partial.rename(folder)
    _flush(run)
    for name in ("last", "best") if best else ("last",):
        link(run, name, folder)
    _prune(run, keep)
    return folder


def link(run: Path, name: str, folder: Path) -> None:
    """Points `run`/`name` at one of its checkpoints. A rename, so that there is a link at every moment."""
    fresh = run / f".{name}.link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(run / name)


def _write_tensors(path: Path, tensors: Tensors) -> None:
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)
    _flush(path)


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


def _prune(run: Path, keep: int) -> None:
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
        whole = state["checksums"]["state.json"] == _state_checksum(state)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if not whole:
        raise UserError(f"{file} is damaged: it is not what was saved")
    return state


def load_weights(model: nn.Module, weights: Tensors, where: Path) -> None:
    """Copies weights into the model by name. Raises `UserError` unless names and shapes are exactly the model's."""
    parameters = parameters_by_name(model)
    if differing := sorted(parameters.keys() ^ weights.keys()):
        raise UserError(f"{where} does not fit its config.toml: {differing[0]} is in only one of them")
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise UserError(
                f"{where} does not fit its config.toml: {name} is {tuple(weights[name].shape)}, "
                f"the model's {tuple(parameter.shape)}"
            )
        parameter.data.copy_(weights[name])


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Gives every parameter the optimizer state that was saved under its name, on the parameter's device."""
    parameters = parameters_by_name(model)
    fused = optimizer.defaults.get("fused")
    for name, value in tensors.items():
        parameter_name, _, key = name.rpartition(".")
        parameter = parameters[parameter_name]
        keep = key == "step" and not fused  # torch counts steps on the CPU, but for fused kernels where they run
        optimizer.state[parameter][key] = value if keep else value.to(parameter.device)


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
    `UserError` for a folder that is no run, has no checkpoint yet, or is damaged.
    """
    run = find_run(run)
    config = read_toml(run / "config.toml", saved=True)
    if config.model.vocab_size is None:
        raise UserError(f"{run / 'config.toml'} is not what was saved: it has no model.vocab_size")
    folder = run / checkpoint
    if checkpoint == "best" and not folder.exists():
        folder = run / "last"
    if not folder.exists():
        there = ", ".join(path.name for path in checkpoints(run)) or "none"
        raise UserError(f"{run} has no checkpoint {checkpoint}; checkpoints: {there}")
    weights, _, _ = read_checkpoint(folder, optimizer=False)
    model = build_model(config.model)
    load_weights(model, weights, folder.resolve())
    return model.eval(), load_tokenizer(run / "tokenizer"), config


def load_source_tokenizer(run: str | Path, config: Config) -> Tokenizer:
    """What turns prompts and sources into ids: the run's tokenizer, unless sources have their own."""
    return load_tokenizer(
        find_run(run) / ("tokenizer" if config.model.source_vocab_size is None else "source_tokenizer")
    )
