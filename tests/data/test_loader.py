import mmap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from config.errors import UserError
from data import loader
from data.loader import IGNORE, Batches, PairBatches, Pairs, check_ids, check_length, validation_windows


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
    assert five.passes(13) == pytest.approx(5 * 13 * 8 / 107)


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
        "val": lambda: check_length(tokens, 16, "val"),
    }.items():
        with pytest.raises(UserError) as caught:
            call()
        for part in (f"the {split} split", f"{n_tokens} tokens", "context of 16", "at least 17"):
            assert part in str(caught.value)


def test_f29_one_window_is_enough():
    tokens = np.arange(17)
    assert rows(Batches(tokens, 16, 2, 0), 5) == [tokens.tolist()] * 2
    [(inputs, targets, places)] = validation_windows(tokens, 16, 2)
    assert inputs.tolist() == [list(range(16))]
    assert targets.tolist() == places.tolist() == [list(range(1, 17))]


@pytest.mark.parametrize("n_tokens", [17, 18, 32, 33, 34, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_f42_validation_grades_every_target_once(n_tokens, batch_size):
    tokens = np.random.default_rng(0).integers(1, 500, n_tokens).astype(np.uint16)
    inputs_seen, targets_seen, row_count = [], [], 0
    for inputs, targets, places in validation_windows(tokens, 16, batch_size):
        assert inputs.shape == targets.shape == places.shape
        assert len(places) <= batch_size
        assert inputs.dtype == targets.dtype == places.dtype == torch.int64
        row_count += len(places)
        real = places >= 0
        inputs_seen += inputs[real].tolist()
        targets_seen += targets[real].tolist()
        assert targets[real].tolist() == tokens[places[real].numpy()].tolist()
        assert set(targets[~real].tolist()) <= {IGNORE}
        assert set(inputs[~real].tolist()) <= {0}
        assert (real[:, :-1] | ~real[:, 1:]).all()  # padded at the right
    assert inputs_seen == tokens[:-1].tolist()
    assert targets_seen == tokens[1:].tolist()
    assert row_count == -(-(n_tokens - 1) // 16)


END = 99


def documents(*lengths: int) -> np.ndarray:
    """Documents of so many tokens, each followed by the end; all other tokens are different."""
    tokens, start = [], 100
    for length in lengths:
        tokens += [*range(start, start + length), END]
        start += length
    return np.array(tokens, np.uint16)


@pytest.mark.parametrize("lengths", [(3, 1, 9), (0, 4, 0), (8,), (7, 8, 9, 16, 17, 0, 1, 30)])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_f42_validation_by_document_grades_every_token_once_and_crosses_no_end(lengths, batch_size):
    tokens = documents(*lengths)
    seen = []
    for inputs, targets, places in validation_windows(tokens, 8, batch_size, END):
        assert inputs.shape == targets.shape == places.shape
        assert inputs.shape[1] <= 8
        real = places >= 0
        assert (real.sum(1) > 0).all()
        assert (real[:, :-1] | ~real[:, 1:]).all()
        assert set(targets[~real].tolist()) <= {IGNORE}
        seen += places[real].tolist()
        assert targets[real].tolist() == tokens[places[real].numpy()].tolist()
        assert inputs[real].tolist() == [int(tokens[place - 1]) for place in places[real].tolist()]
        assert END not in inputs[:, 1:]  # but as the start
    assert sorted(seen) == list(range(len(tokens)))


def test_windows_begin_with_documents():
    tokens = documents(3, 20, 0, 11, 2, 40)
    batches = Batches(tokens, 8, 4, seed=1, end_id=END)
    text = [END, *tokens.tolist(), *tokens.tolist()]  # around the end and back to the start
    begins = [place for place in range(len(tokens)) if text[place] == END]
    expected = {(text[place : place + 9][0], *text[place + 1 : place + 9]) for place in begins}
    for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        expected |= {tuple(text[place : place + 9]) for place in range(begin, end, 8)}
    per_epoch = batches.n_windows
    assert per_epoch == sum(-(-(length + 1) // 8) for length in (3, 20, 0, 11, 2, 40))
    seen = [tuple(row) for step in range(per_epoch) for row in rows(batches, step)]  # four epochs
    assert set(seen) == expected
    assert all(seen.count(row) == 4 for row in expected)
    assert seen[:per_epoch] != seen[per_epoch : 2 * per_epoch]
    targets = {token for row in seen for token in row[1:]}
    assert targets == set(tokens.tolist())
    assert batches.passes(per_epoch) == pytest.approx(4 * 8 * per_epoch / len(tokens))


def test_document_windows_do_not_depend_on_the_block(monkeypatch):
    tokens = documents(*np.random.default_rng(0).integers(0, 30, 200))
    whole = loader.document_windows(tokens, 8, END).tolist()
    for block in (1, 7, 64):
        monkeypatch.setattr(loader, "BLOCK", block)
        assert loader.document_windows(tokens, 8, END).tolist() == whole


# Pairs


SOURCE_END, TARGET_END = 50, 60  # each is an ordinary id on the other side


def pair_arrays(*sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of these lengths, their ends not counted; all other ids differ."""
    sources, targets, id = [], [], 100
    for n_source, n_target in sizes:
        sources += [*range(id, id + n_source), SOURCE_END]
        targets += [*range(id + 500, id + 500 + n_target), TARGET_END]
        id += max(n_source, n_target)
    return np.array(sources, np.uint16), np.array(targets, np.uint16)


def make_pairs(*sizes: tuple[int, int], seq_len: int = 64) -> Pairs:
    return Pairs(*pair_arrays(*sizes), SOURCE_END, TARGET_END, seq_len, "train")


def test_pairs_as_tensors():
    pairs = Pairs(
        np.array([1, 2, 60, 50, 3, 50, 4, 5, 6, 7, 50]),
        np.array([8, 60, 50, 9, 60, 10, 60]),
        SOURCE_END,
        TARGET_END,
        9,
        "train",
    )
    source, inputs, lengths, targets = pairs.batch(np.array([2, 0, 1]))
    assert source.tolist() == [[4, 5, 6, 7, 50], [1, 2, 60, 50, 0], [3, 50, 0, 0, 0]]
    assert lengths.tolist() == [5, 4, 2]
    assert inputs.tolist() == [[60, 10, 0], [60, 8, 0], [60, 50, 9]]
    assert targets.tolist() == [[10, 60, IGNORE], [8, 60, IGNORE], [50, 9, 60]]
    assert all(tensor.dtype == torch.int64 for tensor in (source, inputs, lengths, targets))
    assert [pairs.source(i) for i in range(3)] == [[1, 2, 60, 50], [3, 50], [4, 5, 6, 7, 50]]
    assert [pairs.target(i) for i in range(3)] == [[8], [50, 9], [10]]


@pytest.mark.parametrize(("seq_len", "left"), [(7, [0, 1, 2, 3]), (6, [0, 1, 3]), (5, [0, 3]), (2, [0])])
def test_pairs_longer_than_the_context_are_left_out(seq_len, left):
    sizes = [(1, 1), (5, 1), (1, 6), (3, 4)]
    pairs, every = make_pairs(*sizes, seq_len=seq_len), make_pairs(*sizes)
    assert (len(pairs), pairs.n_left_out) == (len(left), 4 - len(left))
    assert [pairs.source(i) for i in range(len(pairs))] == [every.source(i) for i in left]
    assert [pairs.target(i) for i in range(len(pairs))] == [every.target(i) for i in left]


def test_when_all_pairs_are_too_long_that_is_said():
    with pytest.raises(UserError, match=r"all 2 pairs of the train split are longer than model\.max_seq_len = 3"):
        make_pairs((3, 1), (1, 3), seq_len=3)


def drawn_pairs(batches: PairBatches, steps: range) -> list[int]:
    """Which pairs some steps hold, by the first id of the source."""
    return [first for step in steps for first in batches.batch(step)[0][:, 0].tolist()]


@pytest.mark.parametrize(("n", "batch_size"), [(1, 3), (7, 3), (12, 4), (50, 8), (1000, 4)])
def test_every_epoch_has_every_pair_once(n, batch_size):
    sizes = np.random.default_rng(0).integers(1, 12, (n, 2)).tolist()
    batches = PairBatches(make_pairs(*sizes), batch_size, seed=5)
    steps = batches.pool * n  # so many pools end with an epoch
    counts = Counter(drawn_pairs(batches, range(steps)))
    assert len(counts) == n
    assert set(counts.values()) == {steps * batch_size // n}
    assert batches.passes(steps) == pytest.approx(steps * batch_size / n)
    size = batches.pool * batch_size
    sequence = np.concatenate([batches._order(epoch) for epoch in range(3 * size // n + 1)])
    for pool in range(3):  # a pool holds its share of the epochs' orders, one after another
        assert sorted(batches._batches(pool).flatten()) == sorted(sequence[pool * size : (pool + 1) * size])


def test_a_batch_of_pairs_follows_from_seed_and_step_alone():
    pairs = make_pairs(*np.random.default_rng(0).integers(1, 12, (300, 2)).tolist())
    one, other = (PairBatches(pairs, 4, seed=1) for _ in range(2))
    forwards = [drawn_pairs(one, range(step, step + 1)) for step in range(200)]
    backwards = [drawn_pairs(other, range(step, step + 1)) for step in reversed(range(200))]
    assert forwards == backwards[::-1]
    assert not np.array_equal(one._order(0), one._order(1))
    assert forwards[0] != drawn_pairs(PairBatches(pairs, 4, seed=2), range(1))


def test_hardly_any_batch_holds_a_pair_twice():
    """Only one that reaches from one epoch into the next can."""
    sizes = np.random.default_rng(0).integers(1, 12, (1000, 2)).tolist()
    batches = PairBatches(make_pairs(*sizes), 64, seed=0)
    steps = 10 * 1000 // 64
    doubled = [len(set(batch := drawn_pairs(batches, range(step, step + 1)))) < len(batch) for step in range(steps)]
    assert sum(doubled) <= 10


def test_pairs_of_a_batch_are_of_like_lengths_and_batches_are_not_sorted():
    sizes = np.random.default_rng(0).integers(1, 40, (2000, 1)).repeat(2, axis=1)
    batches = PairBatches(make_pairs(*sizes.tolist()), 8, seed=0)
    lengths = [batches.batch(step)[2] for step in range(100)]
    padding = sum((row.max() - row).sum().item() for row in lengths) / sum(row.sum().item() for row in lengths)
    assert padding < 0.05  # of pairs drawn at random it is about 0.8
    means = [row.float().mean().item() for row in lengths]
    assert abs(np.corrcoef(means, range(100))[0, 1]) < 0.3


def test_all_pairs_by_length():
    sizes = np.random.default_rng(0).integers(1, 9, (50, 2)).tolist()
    order = make_pairs(*sizes).by_length()
    assert sorted(order) == list(range(50))
    assert [sizes[i][1] for i in order] == sorted(size[1] for size in sizes)


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
