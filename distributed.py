"""One process or many: those that torchrun starts train one model together, each on its share of every batch.

With DDP (arXiv 2006.15704) each process holds the whole model, and gradients are averaged; with FSDP2 (arXiv
2304.11277) each holds a slice of every weight, gradient and moment, and blocks are put together as they are computed
(autocast's copies of them in bfloat16 live until the backward pass).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from config.errors import OneProcessError, UserError, from_torchrun

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model; alone unless torchrun, or what sets its variables, says more.

    Each of its methods that takes part in an exchange must be called by all processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    local_size: int = 1

    @classmethod
    def started(cls) -> "Processes":
        """Meets the other processes, if there are any. Raises `OneProcessError` if they do not come."""
        if from_torchrun("WORLD_SIZE", 1) == 1:
            return cls()
        # What is said to each other goes from CPU to CPU by gloo, gradients the shortest way between GPUs.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        patience = timedelta(minutes=30)
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=patience))
            if from_torchrun("LOCAL_WORLD_SIZE", 1) == size:  # several machines need not have counted the same restarts
                # The store still knows where those processes were that torchrun has replaced.
                store = dist.PrefixStore(str(from_torchrun("TORCHELASTIC_RESTART_COUNT")), store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise OneProcessError(f"the processes cannot meet: {reason}; start them with torchrun") from None
        return cls(rank, size, from_torchrun("LOCAL_RANK"), from_torchrun("LOCAL_WORLD_SIZE", 1))

    def end(self) -> None:
        """Takes leave of the others."""
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """This is the first process: the one that writes and tells."""
        return self.rank == 0

    def leader(self, make: Callable[[], T]) -> T:
        """What `make` gives in the first process, in all of them; so too the `UserError` that it may raise."""
        found = None
        if self.leads:
            try:
                found = make()
            except UserError as error:
                found = error
        if self.size > 1:
            box = [found]
            dist.broadcast_object_list(box, src=0)
            found = box[0]
        if isinstance(found, UserError):
            found.said = not self.leads
            raise found
        return found

    def sum(self, *numbers: float) -> list[float]:
        """Of each number, the sum over all processes, in float64."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, *numbers: float) -> list[float]:
        """Of each number, the largest of all processes: the slowest clock, a signal that one of them was sent."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Until all are here."""
        self.sum()

    def _reduce(self, numbers: Iterable[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        values = torch.tensor([*numbers, 0], dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(values, operation)
        return values.tolist()[:-1]

    def share(self, batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Every `size`-th of them, and whether it counts: all processes get equally many, as those whose forward is an
        exchange must, so where they do not divide some get one that is another's."""
        batches = iter(batches)
        while group := list(islice(batches, self.size)):
            yield group[min(self.rank, len(group) - 1)], self.rank < len(group)

    def divide(self, model: nn.Module, blocks: Iterable[nn.Module], device: str) -> None:
        """FSDP2: leaves each process its slice of every parameter, on its device. `blocks` are put together one at a
        time."""
        mesh = init_device_mesh(device, (self.size,))
        for block in (*blocks, model):
            fully_shard(block, mesh=mesh)

    def replicate(self, module: nn.Module) -> nn.Module:
        """DDP: `module`, whose backward also averages gradients over the processes."""
        return DistributedDataParallel(module, gradient_as_bucket_view=True)


ALONE = Processes()


def exchange(module: nn.Module, now: bool) -> AbstractContextManager:
    """Around forward and backward of a micro-batch: whether gradients are exchanged, which the last one does for all.

    `module` is what `replicate` gave, or holds what `divide` divided; any other exchanges nothing.
    """
    if not dist.is_initialized():
        return nullcontext()
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if now else module.no_sync()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(now, recurse=False)
    return nullcontext()


def own_slice(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process may hold a slice. If so, that is an exchange."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def slice_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Of a whole tensor what this process holds of the parameter, which is all if that is not divided."""
    if not isinstance(parameter, DTensor):
        return tensor
    everywhere = DTensor.from_local(tensor, parameter.device_mesh, [Replicate()], run_check=False)
    return everywhere.redistribute(placements=parameter.placements)


def fair_threads(local_size: int) -> int | None:
    """How many threads are this process's share of the cores, where OMP_NUM_THREADS is 1, as torchrun sets it; None:
    leave them as they are."""
    if local_size == 1 or os.environ.get("OMP_NUM_THREADS") != "1":
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(cores // local_size, 1)


@contextmanager
def noticing_the_end_of_others() -> Iterator[None]:
    """Raises `OneProcessError` when another process is gone that this one waits for."""
    try:
        yield
    except RuntimeError as error:  # gloo's errors have no class of their own
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise OneProcessError(f"another process of this run has ended, or does not answer: {reason}") from None
