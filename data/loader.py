"""Token arrays to batches. Which tokens a batch holds follows from (seed, step) and nothing else."""

import mmap
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from config.errors import UserError

IGNORE = -100  # a target that is not graded: what torch's cross_entropy ignores


class Batches:
    """Training batches: each epoch takes the windows of a grid in a random order.

    Epoch e shifts the grid by an offset drawn from (seed, e), around the end and back to the start, and permutes it by
    a permutation drawn from (seed, e). Every epoch has the same number of windows, so step s simply takes the
    `batch_size` windows from s * batch_size on; a batch may reach into the next epoch. Whatever the length of the text,
    every token but the first is a target sooner or later.

    tokens: 1-D array, any integer type, memory-mapped or not. Raises `UserError` if it is too short for one window.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, batch_size: int, seed: int, split: str = "train"):
        check_length(tokens, seq_len, split)
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.n_windows = (len(tokens) - 1) // seq_len
        self._starts = lru_cache(maxsize=2)(self._draw_starts)  # remembered for speed only

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of `step` (from 0), int64, each (B, T); targets are the inputs' next tokens."""
        first = step * self.batch_size
        places = (divmod(place, self.n_windows) for place in range(first, first + self.batch_size))
        starts = np.array([self._starts(epoch)[index] for epoch, index in places])  # (B,)
        windows = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)]  # (B, T + 1)
        windows = torch.from_numpy(windows.astype(np.int64))
        _release(self.tokens)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def passes(self, steps: int) -> float:
        """How often `steps` steps go over the text."""
        return steps * self.batch_size / self.n_windows

    def _draw_starts(self, epoch: int) -> np.ndarray:
        """Where the windows of `epoch` start, in their order: (n_windows,), all different."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch))))
        places = len(self.tokens) - self.seq_len  # where a window can start
        grid = generator.integers(places) + np.arange(self.n_windows) * self.seq_len
        return generator.permutation(grid % places)


def validation_windows(
    tokens: np.ndarray, seq_len: int, batch_size: int, split: str = "val"
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """All of `tokens` once, in order: windows back to back, the last one shorter, so that every token but the first is
    a target exactly once.

    Yields (inputs, targets, lengths), int64: (B, T), (B, T), (B,). The last batch may have fewer rows; past its length
    a row has inputs 0 and targets IGNORE. Raises `UserError` at once if `tokens` is too short for one window.
    """
    check_length(tokens, seq_len, split)
    starts = range(0, len(tokens) - 1, seq_len)
    return (_right_padded(tokens, starts[i : i + batch_size], seq_len) for i in range(0, len(starts), batch_size))


def check_length(tokens: np.ndarray, seq_len: int, split: str) -> None:
    """Raises `UserError` unless one window and its targets fit."""
    if len(tokens) <= seq_len:
        raise UserError(
            f"the {split} split has {len(tokens):,} tokens, and a context of {seq_len:,} (model.max_seq_len) needs at "
            f"least {seq_len + 1:,}: give more text, a shorter context, or another data.val_fraction"
        )


def check_ids(largest_id: int, vocab_size: int) -> None:
    """Raises `UserError` unless a model of `vocab_size` ids knows them all."""
    if largest_id >= vocab_size:
        raise UserError(
            f"the largest id in the data is {largest_id}, and model.vocab_size = {vocab_size} allows at most "
            f"{vocab_size - 1}: leave model.vocab_size out (it is the tokenizer's then), or give {largest_id + 1}"
        )


def _right_padded(tokens: np.ndarray, starts: range, seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = torch.zeros(len(starts), seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    lengths = torch.tensor([min(seq_len, len(tokens) - 1 - start) for start in starts])
    for row, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
        window = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        inputs[row, :length], targets[row, :length] = window[:-1], window[1:]
    _release(tokens)
    return inputs, targets, lengths


def _release(tokens: np.ndarray) -> None:
    """Lets go of the pages of a mapped file that were read: each stays in the page cache, where it can be dropped, but
    no longer counts as this process's memory, which would otherwise grow to the size of the file.
    """
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        tokens.base.madvise(mmap.MADV_DONTNEED)
