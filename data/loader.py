"""Token arrays to batches. Which tokens, or which pairs, a batch holds follows from (seed, step) and nothing else."""

import mmap
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from config.errors import UserError

BLOCK = 1 << 24  # tokens looked at in one go
POOL = 100  # batches of pairs that are sorted by length together
IGNORE = -100  # a target that is not graded: what torch's cross_entropy ignores


class Batches:
    """Training batches: each epoch takes all windows in a random order.

    The windows of a text are a grid, which epoch e shifts by an offset drawn from (seed, e), around the end and back to
    the start. With the `end_id` that ends each document, a window begins with every document, and in a long one every
    `seq_len` tokens: nothing in it then depends on words that were cut off, and short documents are seen with those
    that follow. Every epoch has the same number of windows, so step s simply takes the `batch_size` windows from
    s * batch_size on; a batch may reach into the next epoch. Every token is a target sooner or later (of a text all but
    the first).

    tokens: 1-D array, any integer type, memory-mapped or not. Raises `UserError` if it is too short for one window.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, batch_size: int, seed: int, end_id: int | None = None):
        check_length(tokens, seq_len, "train")
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self._documents = None if end_id is None else document_windows(tokens, seq_len, end_id)
        self.n_windows = (len(tokens) - 1) // seq_len if end_id is None else len(self._documents)
        self._starts = lru_cache(maxsize=2)(self._draw_starts)  # remembered for speed only

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of `step` (from 0), int64, each (B, T); targets are the inputs' next tokens."""
        first = step * self.batch_size
        places = (divmod(place, self.n_windows) for place in range(first, first + self.batch_size))
        starts = np.array([self._starts(epoch)[index] for epoch, index in places])  # (B,)
        windows = self.tokens[(starts[:, None] + np.arange(self.seq_len + 1)) % len(self.tokens)]  # (B, T + 1)
        windows = torch.from_numpy(windows.astype(np.int64))
        _release(self.tokens)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def passes(self, steps: int) -> float:
        """How often `steps` steps go over the text."""
        return steps * self.batch_size * self.seq_len / len(self.tokens)

    def _draw_starts(self, epoch: int) -> np.ndarray:
        """Where the windows of `epoch` start, in their order: (n_windows,), all different."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch))))
        if self._documents is not None:
            return generator.permutation(self._documents)
        places = len(self.tokens) - self.seq_len  # where a window can start
        grid = generator.integers(places) + np.arange(self.n_windows) * self.seq_len
        return generator.permutation(grid % places)


class Pairs:
    """The pairs of a split as tensors. Each source comes with its end of text; each target follows an end of text, its
    start, and ends with one.

    sources, targets: 1-D arrays, memory-mapped or not, of as many documents that end with `source_end_id` or `end_id`.
    Pairs of which either is longer than `seq_len` are left out, `n_left_out` of them. Raises `UserError`, naming the
    `split`, if all are.
    """

    def __init__(
        self, sources: np.ndarray, targets: np.ndarray, source_end_id: int, end_id: int, seq_len: int, split: str
    ):
        self.sources, self.targets = sources, targets
        ends = np.stack([document_ends(sources, source_end_id), document_ends(targets, end_id)])  # (2, n)
        before = np.concatenate([np.full((2, 1), -1), ends[:, :-1]], axis=1)
        fitting = (ends - before <= seq_len).all(axis=0)
        self.starts, self.lengths = before[:, fitting], (ends - before)[:, fitting]
        self.n_left_out = int((~fitting).sum())
        if len(self) == 0:
            raise UserError(
                f"all {self.n_left_out:,} pairs of the {split} split are longer than model.max_seq_len = {seq_len} "
                f"tokens; the shortest has {(ends - before).max(axis=0).min()}"
            )

    def __len__(self) -> int:
        return self.lengths.shape[1]

    def batch(self, pairs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sources (B, S), inputs (B, T), source lengths (B,), targets (B, T)) of these pairs, int64, right-padded."""
        source, target = ((self.starts[side, pairs], self.lengths[side, pairs]) for side in (0, 1))
        inputs, targets, _ = _right_padded(self.targets, *target)
        sources = _rows(self.sources, source[0] + 1, source[1], 0)
        return sources, inputs, torch.from_numpy(source[1]), targets

    def source(self, pair: int) -> list[int]:
        """The ids of a source, its end included."""
        return self._ids(0, pair)

    def target(self, pair: int) -> list[int]:
        """The ids of a target, without its end."""
        return self._ids(1, pair)[:-1]

    def _ids(self, side: int, pair: int) -> list[int]:
        first = self.starts[side, pair] + 1
        return (self.sources, self.targets)[side][first : first + self.lengths[side, pair]].tolist()

    def by_length(self) -> np.ndarray:
        """All pairs, those of like lengths beside each other."""
        return np.lexsort(self.lengths)


class PairBatches:
    """Training batches of pairs of like lengths, so that little of them is padding.

    Each epoch takes all pairs in a random order, and step s could take the `batch_size` pairs from s * batch_size on.
    Instead that sequence is cut into pools of many batches; in a pool pairs are sorted by length, and batches shuffled.
    """

    def __init__(self, pairs: Pairs, batch_size: int, seed: int):
        self.pairs, self.batch_size, self.seed = pairs, batch_size, seed
        self.pool = min(POOL, max(len(pairs) // batch_size, 1))  # batches; no more than an epoch has
        self._order = lru_cache(maxsize=2)(self._draw_order)  # remembered for speed only
        self._batches = lru_cache(maxsize=1)(self._draw_batches)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `Pairs.batch` gives, of `step` (from 0)."""
        pool, place = divmod(step, self.pool)
        return self.pairs.batch(self._batches(pool)[place])

    def passes(self, steps: int) -> float:
        """How often `steps` steps go over the pairs."""
        return steps * self.batch_size / len(self.pairs)

    def _draw_order(self, epoch: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch))))
        return generator.permutation(len(self.pairs))

    def _draw_batches(self, pool: int) -> np.ndarray:
        """The pairs of each batch of a pool: (pool, B)."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, pool, 1))))
        n = self.pool * self.batch_size
        places = (divmod(place, len(self.pairs)) for place in range(pool * n, (pool + 1) * n))
        epochs, pairs = np.array([(epoch, self._order(epoch)[index]) for epoch, index in places]).T
        # One epoch after the other, or the two places of a pair would be beside each other.
        order = np.lexsort((generator.random(n), *self.pairs.lengths[:, pairs], epochs))
        return generator.permutation(pairs[order].reshape(-1, self.batch_size))


def document_ends(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """Where each document ends: (n_documents,)."""
    blocks = range(0, len(tokens), BLOCK)
    ends = np.concatenate([first + np.flatnonzero(tokens[first : first + BLOCK] == end_id) for first in blocks])
    _release(tokens)
    return ends


def document_windows(tokens: np.ndarray, seq_len: int, end_id: int) -> np.ndarray:
    """Where windows start so that each document begins one, with the end of the document before it (of the first: the
    end of the last), and goes on in others every `seq_len` tokens."""
    ends = document_ends(tokens, end_id)
    begins = np.concatenate([[-1], ends[:-1]])
    counts = -(-(ends - begins) // seq_len)  # windows of each document
    firsts = np.repeat(begins, counts)
    return firsts + seq_len * (np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts))


def validation_windows(
    tokens: np.ndarray, seq_len: int, batch_size: int, end_id: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Every token as a target exactly once, in windows back to back, the last one shorter.

    With the `end_id` that ends each document, windows begin anew with each, and its first token follows the end of the
    one before (or the last, for the first); otherwise the first token of the text is no target.

    Yields (inputs, targets, places), int64, each (B, T): `places` tells where in `tokens` the targets stand. Rows are
    padded at their right with inputs 0, targets IGNORE and places -1. Batches of documents hold rows of like lengths.
    """
    if end_id is None:
        starts = np.arange(0, len(tokens) - 1, seq_len)
        lengths = np.minimum(seq_len, len(tokens) - 1 - starts)
    else:
        starts = document_windows(tokens, seq_len, end_id)
        ends = document_ends(tokens, end_id)
        lengths = np.minimum(seq_len, ends[np.searchsorted(ends, starts + 1)] - starts)
        order = np.argsort(lengths, kind="stable")
        starts, lengths = starts[order], lengths[order]
    for row in range(0, len(starts), batch_size):
        yield _right_padded(tokens, starts[row : row + batch_size], lengths[row : row + batch_size])


def check_length(tokens: np.ndarray, seq_len: int, split: str) -> None:
    """Raises `UserError` unless one window and its targets fit."""
    if len(tokens) <= seq_len:
        raise UserError(
            f"the {split} split has {len(tokens):,} tokens, and a context of {seq_len:,} (model.max_seq_len) needs at "
            f"least {seq_len + 1:,}: give more text, a shorter context, or another data.val_fraction"
        )


def check_ids(largest_id: int, vocab_size: int, prefix: str = "") -> None:
    """Raises `UserError` unless a model of `vocab_size` ids knows them all."""
    if largest_id >= vocab_size:
        raise UserError(
            f"the largest id in the data is {largest_id}, and model.{prefix}vocab_size = {vocab_size} allows at most "
            f"{vocab_size - 1}: leave that out (it is the tokenizer's then), or give {largest_id + 1}"
        )


def _right_padded(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Windows that start at `starts` (B,), with `lengths` targets each (B,)."""
    offsets = np.arange(lengths.max())
    places = np.where(offsets < lengths[:, None], starts[:, None] + offsets + 1, -1)  # (B, T)
    inputs = _rows(tokens, starts, lengths, 0)  # before the first token: the last one
    return inputs, _rows(tokens, starts + 1, lengths, IGNORE), torch.from_numpy(places)


def _rows(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, padding: int) -> torch.Tensor:
    """The `lengths` (B,) tokens from each of `starts` (B,) on, right-padded: (B, T), int64."""
    offsets = np.arange(lengths.max())
    real = offsets < lengths[:, None]
    rows = np.where(real, tokens[np.where(real, starts[:, None] + offsets, 0)].astype(np.int64), padding)
    _release(tokens)
    return torch.from_numpy(rows)


def _release(tokens: np.ndarray) -> None:
    """Lets go of the pages of a mapped file that were read: each stays in the page cache, where it can be dropped, but
    no longer counts as this process's memory, which would otherwise grow to the size of the file.
    """
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        tokens.base.madvise(mmap.MADV_DONTNEED)
