"""The machine that trains: what it has, what `auto` becomes on it, and how much it can do at best."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from compiling import compiler_missing, compiler_works
from config import Config, ConfigError
from config.errors import OneProcessError
from distributed import ALONE, Processes, fair_threads
from model import LanguageModel, build_model
from progress import say


@dataclass(frozen=True)
class Machine:
    """Where and how the run is computed; `auto` has been decided."""

    device: str
    dtype: torch.dtype
    compile: bool
    micro_batch_size: int = 1
    processes: Processes = ALONE

    def autocast(self):
        return torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)


def choose_machine(config: Config, asked: str = "as asked", processes: Processes = ALONE) -> Machine:
    """Decides what is auto by what the machine has, never by a timing, and says it in a line."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = config.train.device
    if device == "auto":
        device = next(name for name in available if available[name])
    elif not available[device]:
        names = ", ".join(name for name in available if available[name])
        raise ConfigError(f"train.device = {device} is not available here; available: {names}")
    if processes.size > 1:
        take_share(processes, device)
    if config.train.dtype != "auto":
        dtype, why = getattr(torch, config.train.dtype), asked
    elif device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype, why = torch.bfloat16, "the GPU computes it natively"
    elif device == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        dtype, why = torch.bfloat16, "the processor multiplies it natively"
    else:
        dtype, why = torch.float32, "no units for bfloat16 here that would make it faster"
    compile, reason = choose_compile(config, device, asked)
    dtype, compile = processes.leader(lambda: (dtype, compile))  # or machines that differ would compute differently
    threads = f", {threads_in_words()}" if device == "cpu" else ""
    if processes.size > 1:
        how = {"ddp": "the whole model in each", "fsdp": "the model divided among them"}[config.train.strategy]
        threads += f" in each of {processes.size} processes; {config.train.strategy}, {how}"
    say(f"device {device}{threads}; {str(dtype).removeprefix('torch.')} ({why}); {reason}")
    return Machine(device, dtype, compile, micro_batch_size(config, processes), processes)


def threads_in_words() -> str:
    n = torch.get_num_threads()
    return f"{n} thread{'s' * (n > 1)}"


def take_share(processes: Processes, device: str) -> None:
    """Gives this process its GPU, or its share of the cores. Raises `ConfigError` where there are too few GPUs."""
    if device == "mps":
        raise ConfigError("train.device = mps is one device, for one process; for several give train.device = cpu")
    if device == "cuda":
        if processes.local_size > torch.cuda.device_count():
            raise ConfigError(
                f"torchrun starts {processes.local_size} processes on a machine with {torch.cuda.device_count()} GPUs: "
                f"give --nproc-per-node {torch.cuda.device_count()}, or --train.device cpu"
            )
        torch.cuda.set_device(processes.local_rank)
    elif threads := fair_threads(processes.local_size):
        torch.set_num_threads(threads)


def micro_batch_size(config: Config, processes: Processes = ALONE) -> int:
    """Sequences of one forward and backward pass, of which every process makes equally many in a step.

    Raises `ConfigError`, with the nearest batch sizes that can be shared, where it cannot.
    """
    train = config.train
    unit = (train.micro_batch_size or 1) * processes.size
    if over := train.batch_size % unit:
        pieces = f" in micro-batches of {train.micro_batch_size}" if train.micro_batch_size else ""
        nearest = " and ".join(str(n) for n in (train.batch_size - over, train.batch_size - over + unit) if n)
        raise ConfigError(
            f"train.batch_size = {train.batch_size}{pieces} cannot be shared equally by {processes.size} processes; "
            f"the nearest sizes that can: {nearest}"
        )
    return train.micro_batch_size or train.batch_size // processes.size


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
        how = f", {asked}" if train.compile == "on" else ""
        return True, f"compiled{how}, which takes the first half minute"
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


@contextlib.contextmanager
def enough_memory(remedy: str = "train.micro_batch_size, or the sizes in [model]") -> Iterator[None]:
    """Raises `OneProcessError` when there was not enough, saying what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for this on a CPU
        known = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not known:
            raise
        raise OneProcessError(f"there is not enough memory; lower {remedy}") from None


def seconds_of(function: Callable[[], object], machine: Machine) -> float:
    begin = now(machine)
    function()
    return now(machine) - begin


def now(machine: Machine) -> float:
    if machine.device != "cpu":
        torch.accelerator.synchronize()  # what was begun is done
    return time.perf_counter()


def step_flops(model: LanguageModel, rows: int, length: int) -> int:
    """What the matrix products of a training step need: two operations a multiplication, once forward, twice backward.

    Counted are all linear layers, the head too, on each of their tokens, and scores and values for each pair of a query
    and a key that it may see, which is about half of a causal square, whatever the kernel computes. Nothing else is:
    looking up embeddings, norms, softmax, activations, the optimizer.
    """
    config = model.config  # sources are as long as targets, so each layer is on as many tokens
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    seen = config.n_layer * sum(min(place, config.window or place) for place in range(1, length + 1))
    if config.kind == "encoder_decoder":  # the encoder on itself, the decoder on the encoder
        seen += (config.n_encoder_layer + config.n_layer) * length**2
    return 6 * rows * (weights * length + 2 * seen * config.n_head * config.head_dim)


def matmul_peak(machine: Machine, rounds: int = 8) -> tuple[float, int]:
    """TFLOP/s of the fastest of some products of square matrices, and their size: as large as takes no time to start,
    and not much longer."""
    size, largest, seconds = 256, 2048 if machine.device == "cpu" else 8192, 0.0
    while seconds < 0.02 and size < largest:
        size *= 2
        a, b = torch.randn(2, size, size, device=machine.device).to(machine.dtype)
        seconds = min(seconds_of(lambda: a @ b, machine) for _ in range(2))  # noqa: B023
    return 2e-12 * size**3 / min(seconds_of(lambda: a @ b, machine) for _ in range(rounds)), size
