import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from config.errors import UserError
from data.loader import IGNORE, Batches, check_ids, check_length, validation_windows


def rows(batches: Batches, step: int) -> list[list[int]]:
    """Windows of tokens, targets included."""
    inputs, targets = batches.batch(step)
    return torch.cat([inputs, targets[:, -1:]], dim=1).tolist()


def epoch_rows(batches: Batches, epoch: int) -> list[list[int]]:
    assert batches.batch_size == 1
    return [rows(batches, epoch * batches.n_windows + i)[0] for i in range(batches.n_windows)]


def test_f09_targets_are_the_next_tokens():
    tokens = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint16)
    inputs, targets = Batches(tokens, seq_len=16, batch_size=4, seed=0).batch(3)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    everywhere = [tokens[i : i + 17].tolist() for i in range(1000 - 16)]
    assert all(row in everywhere for row in rows(Batches(tokens, 16, 4, 0), 3))


def test_f50_a_batch_depends_on_seed_and_step_alone():
    tokens = np.arange(1000)
    first = Batches(tokens, 8, 4, seed=3)
    forwards = [rows(first, step) for step in range(100)]
    second = Batches(tokens, 8, 4, seed=3)
    assert [rows(second, step) for step in reversed(range(100))][::-1] == forwards
    assert rows(Batches(tokens, 8, 4, seed=4), 0) != forwards[0]


def test_batches_are_cut_from_one_sequence_of_epochs():
    tokens = np.arange(107)
    one, five = Batches(tokens, 8, 1, seed=0), Batches(tokens, 8, 5, seed=0)
    assert one.n_windows == 13  # so that batches of five reach into the next epoch
    assert [rows(one, i)[0] for i in range(50)] == [row for i in range(10) for row in rows(five, i)]
    assert five.passes(13) == 5


@pytest.mark.parametrize("n_tokens", [17, 18, 24, 25, 100, 107])
def test_an_epoch_is_a_shifted_grid_in_another_order(n_tokens):
    seq_len = 8
    batches = Batches(np.arange(n_tokens), seq_len, 1, seed=1)
    orders = []
    for epoch in range(20):
        starts = [row[0] for row in epoch_rows(batches, epoch)]
        orders.append(starts)
        assert len(set(starts)) == len(starts) == (n_tokens - 1) // seq_len
        gaps = np.diff(sorted(starts))
        assert (gaps == seq_len).sum() >= len(gaps) - 2  # a grid, but for where it goes around the end
        seen = {target for start in starts for target in range(start + 1, start + seq_len + 1)}
        assert len(seen) > n_tokens - 1 - 2 * seq_len
    assert len({tuple(sorted(order)) for order in orders}) > (1 if n_tokens > 17 else 0)
    if n_tokens > 90:
        assert all(order != sorted(order) for order in orders)


@pytest.mark.parametrize("n_tokens", [17, 20, 32, 33, 50])
def test_every_token_but_the_first_is_a_target_sooner_or_later(n_tokens):
    batches = Batches(np.arange(n_tokens), 16, 64, seed=0)
    seen = {target for step in range(30) for target in batches.batch(step)[1].flatten().tolist()}
    assert seen == set(range(1, n_tokens))


@pytest.mark.parametrize("n_tokens", [0, 3, 16])
def test_f29_a_split_shorter_than_the_context_is_refused_at_once(n_tokens):
    tokens = np.arange(n_tokens)
    for split, call in {
        "train": lambda: Batches(tokens, 16, 2, 0),
        "val": lambda: validation_windows(tokens, 16, 2),
        "test": lambda: check_length(tokens, 16, "test"),
    }.items():
        with pytest.raises(UserError) as caught:
            call()
        for part in (f"the {split} split", f"{n_tokens} tokens", "context of 16", "at least 17"):
            assert part in str(caught.value)


def test_f29_one_window_is_enough():
    tokens = np.arange(17)
    assert rows(Batches(tokens, 16, 2, 0), 5) == [tokens.tolist()] * 2
    [(inputs, targets, lengths)] = validation_windows(tokens, 16, 2)
    assert inputs.tolist() == [list(range(16))]
    assert targets.tolist() == [list(range(1, 17))]
    assert lengths.tolist() == [16]


@pytest.mark.parametrize("n_tokens", [17, 18, 32, 33, 34, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_f42_validation_grades_every_target_once(n_tokens, batch_size):
    tokens = np.random.default_rng(0).integers(1, 500, n_tokens).astype(np.uint16)
    inputs_seen, targets_seen, row_count = [], [], 0
    for inputs, targets, lengths in validation_windows(tokens, 16, batch_size):
        assert inputs.shape == targets.shape == (len(lengths), 16)
        assert len(lengths) <= batch_size
        assert inputs.dtype == targets.dtype == lengths.dtype == torch.int64
        row_count += len(lengths)
        for row, length in enumerate(lengths.tolist()):
            inputs_seen += inputs[row, :length].tolist()
            targets_seen += targets[row, :length].tolist()
            assert set(targets[row, length:].tolist()) <= {IGNORE}
            assert set(inputs[row, length:].tolist()) <= {0}
    assert inputs_seen == tokens[:-1].tolist()
    assert targets_seen == tokens[1:].tolist()
    assert row_count == -(-(n_tokens - 1) // 16)


def test_f27_ids_beyond_the_vocabulary_are_refused():
    check_ids(largest_id=299, vocab_size=300)
    with pytest.raises(UserError, match=r"largest id in the data is 300.*vocab_size = 300"):
        check_ids(largest_id=300, vocab_size=300)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_f30_resident_memory_does_not_grow_with_the_file(tmp_path):
    def mapped_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssFile"))

    path = tmp_path / "tokens.bin"
    np.arange(32 << 20, dtype="<u2").tofile(path)  # 64 MB
    tokens = np.memmap(path, "<u2", mode="r")
    assert isinstance(tokens.base, mmap.mmap)
    batches = Batches(tokens, 64, 32, seed=0)
    batches.batch(0)
    before = mapped_bytes()
    for step in range(1000):
        batches.batch(step)
    for _ in zip(range(1000), validation_windows(tokens, 256, 32), strict=False):
        pass
    assert mapped_bytes() - before < 16 << 20
