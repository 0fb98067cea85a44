"""What a decoder remembers between calls: its encoded source, and the keys and values of every token so far.

Owned by the caller and passed to each forward, never attached to a model. Shape letters: see attention.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import Mask
from config.schema import ModelConfig


class Memory(NamedTuple):
    """An encoded source: hidden states (B, S, C) and how many of each row are real (B,), None when all are."""

    hidden: Tensor
    lengths: Tensor | None

    def select(self, rows: list[int] | Tensor) -> "Memory":
        """These rows, in this order, repeats allowed."""
        return Memory(self.hidden[rows], None if self.lengths is None else self.lengths[rows])


class KVCache:
    """The keys and values of every token so far, owned by the caller and passed to each forward.

    `keys` and `values` hold one (B, G, slots, D) tensor a layer. The token at position p lies in slot p % slots: with a
    window W there are W slots and the oldest is overwritten, without one there are `capacity`. Attention does not care
    about the order of keys, only about their positions, which follow from each row's length. Cross-attention keys and
    values are computed at the first decode of a source and kept with it.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], window: int | None, capacity: int, lengths: list[int]):
        self.keys, self.values, self.window, self.capacity, self.row_lengths = keys, values, window, capacity, lengths
        self.memory: Memory | None = None
        self.cross: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def allocate(cls, config: ModelConfig, batch_size: int, capacity: int, dtype=None, device=None) -> "KVCache":
        """Room for `capacity` tokens a row, in the model's `dtype` and on its `device` (float32 on the CPU)."""
        config = config.resolve()
        if batch_size < 1 or capacity < 1:
            raise ValueError(f"a cache needs at least one row and one token, not {batch_size} and {capacity}")
        shape = (batch_size, config.n_kv_head, min(capacity, config.window or capacity), config.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)] for _ in range(2)
        )
        return cls(keys, values, config.window, capacity, [0] * batch_size)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row has seen, (B,)."""
        return torch.tensor(self.row_lengths, device=self.keys[0].device)

    @property
    def nbytes(self) -> int:
        """2 · layers · G · D · slots · B · bytes per number; the source's keys and values come on top."""
        return sum(t.nbytes for t in (*self.keys, *self.values, *(t for pair in self.cross for t in pair)))

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` tokens a row, if there is less; what was remembered stays."""
        if capacity <= self.capacity:
            return
        missing = min(capacity, self.window or capacity) - self.slots
        if missing > 0:  # no slot was used twice yet
            self.keys, self.values = ([F.pad(t, (0, 0, 0, missing)) for t in each] for each in (self.keys, self.values))
        self.capacity = capacity

    def select(self, rows: list[int] | Tensor) -> "KVCache":
        """A new cache of these rows, in this order, repeats allowed: drop finished rows, reorder beams, fan out.

        With an encoded source, decode with the new cache's `memory`: its rows are selected too.
        """
        rows = torch.arange(len(self.row_lengths), device=self.keys[0].device)[rows]  # so that a boolean mask will do
        lengths = [self.row_lengths[row] for row in rows.tolist()]
        keys, values = [k[rows] for k in self.keys], [v[rows] for v in self.values]
        new = KVCache(keys, values, self.window, self.capacity, lengths)
        new.memory = self.memory and self.memory.select(rows)
        new.cross = [(k[rows], v[rows]) for k, v in self.cross]
        return new

    def cross_keys_values(self, layer: int, memory: Memory, compute) -> tuple[Tensor, Tensor]:
        """The keys and values of the source, computed once. Raises ValueError for another source."""
        if self.memory is None:
            self.memory = memory
        if memory.hidden is not self.memory.hidden:
            raise ValueError("this cache belongs to another source; allocate a new one, or pass cache.memory")
        if layer == len(self.cross):
            self.cross.append(compute(memory.hidden))
        return self.cross[layer]

    def plan(self, config: ModelConfig, tokens: Tensor, lengths: Tensor | None) -> "CacheStep":
        """Where a call's tokens (B, T) go. Raises ValueError if they do not fit, or the model is another."""
        shape = (len(self.keys), self.keys[0].shape[1], self.keys[0].shape[3], self.window)
        if shape != (wanted := (config.n_layer, config.n_kv_head, config.head_dim, config.window)):
            raise ValueError(f"the cache is for (layers, heads, width, window) = {shape}, the model has {wanted}")
        n_row, n_new = tokens.shape
        new = [n_new] * n_row if lengths is None else lengths.tolist()
        if n_row != len(self.row_lengths) or len(new) != n_row:
            raise ValueError(f"the cache has {len(self.row_lengths)} rows, tokens {n_row}, lengths {len(new)}")
        if not all(0 <= n <= n_new for n in new):
            raise ValueError(f"lengths {new} must be between 0 and the {n_new} tokens given")
        if max(old + n for old, n in zip(self.row_lengths, new, strict=True)) > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, {self.row_lengths} and {new} are too many")
        return CacheStep(self, n_new, new)


class CacheStep:
    """One forward's use of the cache, planned once and followed by every layer.

    Usually the new tokens are written first and the slots read as one slice. A chunk that would overwrite what its own
    first tokens still see (a window, more than one token) instead looks at the old slots and at itself, then writes.
    """

    def __init__(self, cache: KVCache, n_new: int, new: list[int]):
        self.cache, self.n_new = cache, n_new
        self.old_lengths, self.lengths = cache.row_lengths, [a + b for a, b in zip(cache.row_lengths, new, strict=True)]
        self.end, self.device = max(self.lengths), cache.keys[0].device
        self.uniform = len(set(self.old_lengths)) == 1 and set(new) == {n_new}
        self.start = self.old_lengths[0] if self.uniform else self._column(self.old_lengths)  # int, or (B, 1)
        self.pos = self.start + torch.arange(n_new, device=self.device)  # (T,), or (B, T)
        rolling = cache.slots < cache.capacity
        self.read_first = rolling and n_new > 1
        self.n_read = min(max(self.old_lengths) if self.read_first else self.end, cache.slots)
        self.slot = self.into = self.taken = None
        if self.uniform and n_new == 1:
            self.slot = self.pos % cache.slots  # (1,), a tensor: to a compiler a number would be another one each time
        else:
            self.into, self.taken = self._writes(new)
        self.mask = self._mask(rolling)

    @property
    def is_single(self) -> bool:
        """One token of one row, after others."""
        return self.slot is not None and len(self.lengths) == 1 and self.n_read > 1

    def _column(self, lengths: list[int]) -> Tensor:
        return torch.tensor(lengths, device=self.device).unsqueeze(1)  # (B, 1)

    def _mask(self, rolling: bool) -> Mask:
        if self.uniform and self.n_new == 1:
            return Mask(1, self.n_read, causal=False)  # the newest token sees everything that was kept
        window = self.cache.slots if rolling else None
        if not any(self.old_lengths) and self.n_new > 1:
            n_key = self.n_new if rolling else self.n_read
            return Mask(self.n_new, n_key, window=window, device=self.device)  # the first chunk: itself alone
        if not rolling:
            return Mask(self.n_new, self.n_read, query_pos=self.pos, device=self.device)  # slot s holds position s
        # Slot s holds the last position before `length` that is s modulo the number of slots, if there was one.
        length = self.start if self.read_first else self._column(self.lengths)
        slot = torch.arange(self.n_read, device=self.device)
        key_pos = (length - 1 - (length - 1 - slot) % self.cache.slots).clamp(min=-1)  # (slots,), or (B, slots)
        if self.read_first:
            key_pos = torch.cat((key_pos, self.pos), dim=-1)
        return Mask(self.n_new, key_pos.shape[-1], True, window, self.pos, key_pos, self.device)

    def _writes(self, new: list[int]) -> tuple[tuple, tuple | None]:
        """Which slots take which new tokens: indices into (B, G, slots, D), and into (B, G, T, D) if not all."""
        every, n_slot = slice(None), self.cache.slots
        if self.uniform and self.start % n_slot + self.n_new <= n_slot:  # one piece, the same in every row
            begin = self.start % n_slot
            return (every, every, slice(begin, begin + self.n_new)), None
        # Of each row the real tokens, and of those the last that fit.
        wanted = [(row, token) for row, n in enumerate(new) for token in range(max(n - n_slot, 0), n)]
        slots = [(self.old_lengths[row] + token) % n_slot for row, token in wanted]
        rows, tokens = ([pair[i] for pair in wanted] for i in (0, 1))
        row, token, slot = torch.tensor([rows, tokens, slots], dtype=torch.long, device=self.device)
        return (row, every, slot), (row, every, token)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Files new keys and values (B, G, T, D) and returns those the new queries look at, (B, G, S, D)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if k.dtype != keys.dtype:
            raise ValueError(f"the cache holds {keys.dtype}, the model computes {k.dtype}: allocate it with that dtype")
        # Views: what is written now is seen too.
        seen_keys, seen_values = keys[:, :, : self.n_read], values[:, :, : self.n_read]
        if self.read_first:
            seen_keys, seen_values = torch.cat((seen_keys, k), dim=2), torch.cat((seen_values, v), dim=2)
        if self.slot is not None:
            keys.index_copy_(2, self.slot, k)
            values.index_copy_(2, self.slot, v)
        elif self.taken is None:
            keys[self.into], values[self.into] = k, v
        else:
            keys[self.into], values[self.into] = k[self.taken], v[self.taken]
        return seen_keys, seen_values

    def finish(self) -> None:
        """The tokens count as seen only after the last layer."""
        self.cache.row_lengths = self.lengths
