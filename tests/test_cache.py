"""With the cache or without it, in whatever pieces, in whatever company: the same numbers."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attention import KERNELS, rotary_turns
from cache import KVCache
from config.schema import ModelConfig, RopeScaling
from model import build_model
from tests.helpers import (
    POSITIONS,
    POST_NORM,
    PRE_NORM,
    TINY,
    WINDOW,
    allocate,
    assert_close,
    assert_far,
    build,
    greedy,
    in_chunks,
    random_tokens,
    variants,
)

ENCODER_DECODER = {"kind": "encoder_decoder", "n_encoder_layer": 1}


def random_sizes(n: int, seed: int, most: int = 3 * WINDOW) -> list[int]:
    """Chunks of 1 to `most` tokens that add up to `n`."""
    generator, sizes = random.Random(seed), []
    while sum(sizes) < n:
        sizes.append(min(generator.randint(1, most), n - sum(sizes)))
    return sizes


def feed(model, cache, rows: list[list[int]], counts: list[int], width: int, pad_seed: int = 0, **memory) -> list:
    """One call with the next `counts` tokens of each row, right-padded with random ids; what each row's tokens gave."""
    tokens, old = random_tokens(len(rows), width, seed=pad_seed), cache.lengths.tolist()
    for row, (ids, start, n) in enumerate(zip(rows, old, counts, strict=True)):
        tokens[row, :n] = torch.tensor(ids[start : start + n], dtype=torch.long)
    call = model.decode if memory else model
    logits = call(tokens, lengths=torch.tensor(counts), cache=cache, **memory)
    assert cache.lengths.tolist() == [a + b for a, b in zip(old, counts, strict=True)]
    return [logits[row, :n] for row, n in enumerate(counts)]


# --- cached = uncached = any chunking -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", variants())
def test_f16_prefill_and_decode_equal_the_full_forward(options, kernel):
    model, tokens = build(**options, kernel=kernel), random_tokens(2, 23)
    assert_close(in_chunks(model, tokens, [9] + [1] * 14), model(tokens))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", variants())
def test_random_chunks_equal_the_full_forward(options, seed):
    model, tokens = build(**options, kernel=list(KERNELS)[seed]), random_tokens(2, 37)  # the window wraps seven times
    assert_close(in_chunks(model, tokens, random_sizes(37, seed)), model(tokens))


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=8)},
        {"qk_norm": True, "n_kv_head": 2},
        {"attention_scale": 0.2, "tie_embeddings": False},
        {"head_dim": 5, "position": "learned", "n_kv_head": 1},
        {"activation": "relu2", "norm_position": "post", "n_layer": 1},
        {"activation": "gelu", "norm": "layernorm", "bias": True},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_every_other_option_is_cached_too(window, options):
    model, tokens = build(**options, window=window), random_tokens(2, 37)
    assert_close(in_chunks(model, tokens, [9, 1, 1, 7, 1, 18]), model(tokens))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 36, 37, 38])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 36, 37])
def test_every_window_with_every_chunk(window, size):
    model, tokens = build(window=window, n_kv_head=2), random_tokens(1, 37)
    sizes = [size] * (37 // size) + [37 % size] * (37 % size > 0)
    assert_close(in_chunks(model, tokens, sizes, allocate(model, capacity=37)), model(tokens))


@pytest.mark.parametrize("norm", [PRE_NORM, POST_NORM], ids=["pre", "post"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("position", POSITIONS)
def test_f16_greedy_tokens_are_the_same_with_and_without_a_cache(position, window, norm):
    model = build(position=position, window=window, max_seq_len=80, **norm)
    assert greedy(model, [3, 1, 4], 64) == greedy(model, [3, 1, 4], 64, use_cache=False)


def test_f16_a_bfloat16_model_stays_finite_with_a_bfloat16_cache():
    model, tokens = build(window=WINDOW, n_kv_head=2).bfloat16(), random_tokens(2, 37)
    assert in_chunks(model, tokens, [9, 1, 1, 26], allocate(model, 2, dtype=torch.bfloat16)).isfinite().all()
    assert model(tokens).isfinite().all()


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_comparison_notices_a_position_off_by_one(window, position):
    model, tokens = build(window=window, position=position), random_tokens(1, 23)
    cache = allocate(model)
    model(tokens[:, :9], cache=cache)
    cache.row_lengths = [10]
    assert_far(model(tokens[:, 9:10], cache=cache), model(tokens[:, :10])[:, 9:])


@pytest.mark.parametrize("next_chunk", [1, 3])
def test_the_comparison_notices_a_slot_off_by_one(next_chunk):
    model, tokens = build(window=WINDOW), random_tokens(1, 23)
    cache = allocate(model)
    model(tokens[:, :9], cache=cache)
    cache.keys, cache.values = ([t.roll(1, dims=2) for t in kept] for kept in (cache.keys, cache.values))
    end = 9 + next_chunk
    assert_far(model(tokens[:, 9:end], cache=cache), model(tokens[:, :end])[:, 9:])


def test_the_comparison_notices_another_window():
    tokens = random_tokens(1, 23)
    assert_far(in_chunks(build(window=WINDOW), tokens, [9] + [1] * 14), build(window=WINDOW + 1)(tokens))


# --- faults of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_f01_cached_step_is_not_aligned_top_left(n_kv_head, kernel):
    model, tokens = build(n_kv_head=n_kv_head, kernel=kernel), random_tokens(1, 8)
    at_once = model(tokens)[:, -1]
    for sizes in ([7, 1], [5, 3]):
        assert_close(in_chunks(model, tokens, sizes)[:, -1], at_once)
        changed = tokens.clone()
        changed[0, sizes[0] - 1] = (changed[0, sizes[0] - 1] + 1) % TINY["vocab_size"]  # the newest past id
        assert_far(in_chunks(model, changed, sizes)[:, -1], at_once)


def test_f01_the_causal_flag_is_used_only_when_aligned(monkeypatch):
    model, tokens, calls = build(n_layer=1), random_tokens(1, 8), []

    def spy(q, k, v, attn_mask=None, is_causal=False, **options):
        calls.append((q.shape[2], k.shape[2], is_causal, attn_mask is not None))
        return fused(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for sizes in ([8], [7, 1], [5, 3]):
        in_chunks(model, tokens, sizes)
    at_once, step, chunk = (8, 8, True, False), (1, 8, False, False), (3, 8, False, True)
    assert calls == [at_once, (7, 7, True, False), step, (5, 5, True, False), chunk]
    calls.clear()
    build(n_layer=1, window=4)(tokens)
    model(tokens, lengths=torch.tensor([5]))
    assert calls == [(8, 8, False, True), (8, 8, True, False)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n_layer", "first"), [(1, 6), (2, 3)])
@pytest.mark.parametrize("sizes", [[1] * 10, [9, 1], [7, 3], [4, 6]], ids=str)
def test_f07_the_window_is_the_same_in_the_cache(sizes, n_layer, first, kernel):
    model, tokens = build(n_layer=n_layer, window=4, kernel=kernel), random_tokens(1, 10)
    before = in_chunks(model, tokens, sizes)[0, 9]
    for j in range(10):
        changed = tokens.clone()
        changed[0, j] = (changed[0, j] + 1) % TINY["vocab_size"]
        moved = (in_chunks(model, changed, sizes)[0, 9] - before).abs().max().item()
        assert moved > 1e-3 if j >= first else moved == 0.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_prompt", [3, 4, 5, 6])
def test_f08_the_cache_rolls_right_as_the_window_fills(n_prompt, kernel):
    model, tokens = build(window=4, kernel=kernel), random_tokens(1, n_prompt + 12)
    cache = allocate(model)
    for end in [n_prompt + step for step in range(13)]:
        logits = model(tokens[:, cache.row_lengths[0] : end], cache=cache)
        assert_close(logits[:, -1], model(tokens[:, :end])[:, -1])


@pytest.mark.parametrize("position", POSITIONS)
def test_f11_prompts_of_different_lengths_continue_as_they_do_alone(position):
    model, prompts = build(position=position), [[5, 2, 9], [1, 8, 3, 3, 7, 6, 2]]
    cache, rows = allocate(model, 2), [list(p) for p in prompts]
    counts, width = [3, 7], 7
    for _ in range(8):
        for row, logits in zip(rows, feed(model, cache, rows, counts, width), strict=True):
            row.append(logits[-1].argmax().item())
        counts, width = [1, 1], 1
    assert [row[len(p) :] for row, p in zip(rows, prompts, strict=True)] == [greedy(model, p, 8) for p in prompts]


@pytest.mark.parametrize("sizes", [[17], [15, 2], [16, 1], [1] * 17], ids=str)
def test_f14_learned_positions_count_what_is_in_the_cache(sizes):
    model, tokens = build(position="learned", max_seq_len=16), random_tokens(1, 17)
    cache = allocate(model)
    if sizes[1:]:
        in_chunks(model, tokens[:, : -sizes[-1]], sizes[:-1], cache)
    with pytest.raises(ValueError, match="max_seq_len = 16, asked for 17"):
        model(tokens[:, -sizes[-1] :], cache=cache)
    assert cache.lengths.tolist() == [17 - sizes[-1]]
    if cache.row_lengths[0] == 15:  # the refused call left everything as it was
        assert_close(model(tokens[:, 15:16], cache=cache), model(tokens[:, :16])[:, 15:])


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "none"])
def test_f14_other_positions_have_no_end(position):
    model, tokens = build(position=position, max_seq_len=16), random_tokens(1, 40)
    assert_close(in_chunks(model, tokens, [15, 1, 2, 22]), model(tokens))


def test_f14_padding_beyond_learned_positions_is_no_token():
    model, tokens = build(position="learned", max_seq_len=16), random_tokens(2, 16)
    cache = allocate(model, 2)
    rows = tokens.tolist()
    feed(model, cache, rows, [15, 4], 15)
    first, second = feed(model, cache, rows, [1, 12], 12)
    assert_close(first, model(tokens[:1])[0, 15:])
    assert_close(second, model(tokens[1:])[0, 4:])


@pytest.mark.parametrize("window", [None, WINDOW])
def test_f15_one_text_leaves_nothing_for_the_next(window):
    model = build(window=window)
    alone = greedy(model, [7, 7], 12)
    logits = in_chunks(model, random_tokens(1, 14), [2] + [1] * 12)
    greedy(model, random_tokens(1, 30, seed=5)[0].tolist(), 20)
    model(random_tokens(3, 40))
    assert greedy(model, [7, 7], 12) == alone
    assert torch.equal(in_chunks(model, random_tokens(1, 14), [2] + [1] * 12), logits)


# --- ragged rows ----------------------------------------------------------------------------------------------------


def ragged_schedule(width: int) -> list[list[int]]:
    """Unequal counts for four rows, one of them 0; each row has its turn at each of them."""
    counts = [width, max(width - 1, 1), 0, 1]
    return [counts[i:] + counts[:i] for i in range(4)] * 2


@pytest.mark.parametrize("width", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("options", variants())
def test_ragged_chunks_equal_each_row_alone(options, width):
    model = build(**options, max_seq_len=99, kernel=list(KERNELS)[width % len(KERNELS)])
    rows = random_tokens(4, 99).tolist()
    cache, logits = allocate(model, 4, 99), [[] for _ in rows]
    for call, counts in enumerate(ragged_schedule(width)):
        for row, new in enumerate(feed(model, cache, rows, counts, width, pad_seed=call)):
            logits[row].append(new)
    for row, ids in enumerate(rows):
        n = cache.row_lengths[row]
        assert_close(torch.cat(logits[row]), model(torch.tensor([ids[:n]]))[0])


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("width", [4, WINDOW, 17])
def test_a_chunk_may_be_padded_beyond_its_longest_row(width, window):
    model, rows = build(window=window), random_tokens(2, 30).tolist()
    cache = allocate(model, 2)
    for counts in ([3, 1], [1, 2], [4, 0], [1, 1]):
        old = cache.lengths.tolist()
        for row, start, new in zip(rows, old, feed(model, cache, rows, counts, width), strict=True):
            end = start + len(new)
            assert_close(new, model(torch.tensor([row[:end]]))[0, start:]) if end else None


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_padding_is_written_nowhere_and_only_the_last_window_of_each_row_is(window, width, kernel):
    model, rows = build(window=window, kernel=kernel), random_tokens(4, 99).tolist()
    one, other = allocate(model, 4, 99), allocate(model, 4, 99)
    for call, counts in enumerate(ragged_schedule(width)):
        before = one.select(range(4))
        first = feed(model, one, rows, counts, width, pad_seed=call)
        second = feed(model, other, rows, counts, width, pad_seed=call + 100)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        kept, same, old = (torch.cat(cache.keys + cache.values, dim=-1) for cache in (one, other, before))
        assert torch.equal(kept, same)
        for row, (start, n) in enumerate(zip(before.row_lengths, counts, strict=True)):
            changed = (kept[row] != old[row]).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
            assert set(changed) == {p % one.slots for p in range(start, start + n)[-one.slots :]}


class Writes(TorchDispatchMode):
    """Collects the indices of every indexed write: one tuple of numbers for each place written to."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_put_.default:
            indices = [index.tolist() for index in args[1] if index is not None]
            self.places.append(list(zip(*indices, strict=True)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n_seen", [0, 3, 9])
@pytest.mark.parametrize("width", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_no_slot_is_written_twice_in_a_call(width, n_seen):
    """Which of two such writes wins is undefined on a GPU, whatever happens here."""
    model = build(window=WINDOW)
    for counts in ([width] * 4, *ragged_schedule(width)):
        cache = allocate(model, 4)
        model(random_tokens(4, n_seen), cache=cache)
        with Writes() as writes:
            model(random_tokens(4, width), lengths=torch.tensor(counts), cache=cache)
        assert len(writes.places) in (0, 4)  # keys and values of two layers, or all of them as slices
        assert writes.places or counts == [width] * 4
        for places in writes.places:
            assert len(set(places)) == len(places) == sum(min(n, WINDOW) for n in counts)


@pytest.mark.parametrize("width", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_the_token_at_position_p_lies_in_slot_p_modulo_the_window(width):
    model, tokens = build(window=WINDOW, n_layer=1, n_kv_head=2), random_tokens(1, 37)
    cache = allocate(model)
    block, turns = model.decoder.blocks[0], rotary_turns(model.decoder.angles(torch.arange(37)))
    keys, values = block.attention.keys_values(block.attention_norm(model.decoder.embed(tokens)), turns)
    for piece in tokens.split(width, dim=1):
        model(piece, cache=cache)
        n = cache.row_lengths[0]
        for p in range(max(n - WINDOW, 0), n):
            assert_close(cache.keys[0][:, :, p % WINDOW], keys[:, :, p], 1e-5)
            assert_close(cache.values[0][:, :, p % WINDOW], values[:, :, p], 1e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_call_without_real_tokens_changes_nothing(width, window):
    model, rows = build(window=window), random_tokens(2, 30).tolist()
    cache = allocate(model, 2)
    feed(model, cache, rows, [0, 0], width)
    feed(model, cache, rows, [7, 2], 7)
    before = cache.select([0, 1])
    feed(model, cache, rows, [0, 0], width)
    assert all(torch.equal(a, b) for a, b in zip(cache.keys + cache.values, before.keys + before.values, strict=True))
    first, _ = feed(model, cache, rows, [1, 1], 1)
    assert_close(first, model(torch.tensor([rows[0][:8]]))[0, 7:])


def test_lengths_advance_once_after_the_last_layer():
    model, seen = build(window=WINDOW), []
    cache = allocate(model, 2)
    for block in model.decoder.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(cache.lengths.tolist()))
    model(random_tokens(2, 7), lengths=torch.tensor([7, 3]), cache=cache)
    model(random_tokens(2, 1), cache=cache)
    assert seen == [[0, 0]] * 2 + [[7, 3]] * 2
    assert cache.lengths.tolist() == [8, 4]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_select_drops_reorders_and_repeats_rows(window):
    model, rows = build(window=window), random_tokens(3, 20).tolist()
    cache = allocate(model, 3)
    feed(model, cache, rows, [9, 4, 6], 9)
    picked = [2, 0, 0]
    chosen = cache.select(torch.tensor(picked))
    assert chosen.lengths.tolist() == [6, 9, 9]
    rows_again = [rows[row] for row in picked]
    kept = [t.clone() for t in cache.keys]
    logits = feed(model, chosen, rows_again, [7, 1, 2], 7)
    for row, start, new in zip(rows_again, [6, 9, 9], logits, strict=True):
        assert_close(new, model(torch.tensor([row[: start + len(new)]]))[0, start:])
    assert cache.lengths.tolist() == [9, 4, 6]
    assert all(torch.equal(a, b) for a, b in zip(kept, cache.keys, strict=True))


# --- encoder-decoder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", variants())
def test_cached_cross_attention_equals_the_full_forward(options):
    model, source, target = build(**ENCODER_DECODER, **options), random_tokens(3, 7), random_tokens(3, 23, seed=2)
    lengths = torch.tensor([7, 2, 5])
    expected, memory = model(source, target, lengths), model.encode(source, lengths)
    for sizes in ([23], [9] + [1] * 14, random_sizes(23, 0, 8)):
        assert_close(in_chunks(model, target, sizes, memory=memory), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("position", POSITIONS)
def test_ragged_targets_equal_each_pair_alone(position, kernel):
    model = build(**ENCODER_DECODER, position=position, kernel=kernel, n_kv_head=2)
    source, rows, source_lengths = random_tokens(4, 7), random_tokens(4, 60, seed=2).tolist(), [7, 2, 5, 1]
    memory, cache = model.encode(source, torch.tensor(source_lengths)), allocate(model, 4)
    logits = [[] for _ in rows]
    for call, counts in enumerate(ragged_schedule(5)):
        for row, new in enumerate(feed(model, cache, rows, counts, 5, call, memory=memory)):
            logits[row].append(new)
    for row, n in enumerate(source_lengths):
        target = torch.tensor([rows[row][: cache.row_lengths[row]]])
        assert_close(torch.cat(logits[row]), model(source[row : row + 1, :n], target)[0])


def test_cross_attention_keys_and_values_are_computed_once():
    model = build(**ENCODER_DECODER)
    memory, cache, calls = model.encode(random_tokens(1, 7)), allocate(model), []
    for block in model.decoder.blocks:
        block.cross_attention.k_proj.register_forward_hook(lambda module, inputs, output: calls.append(module))
    in_chunks(model, random_tokens(1, 9), [4, 1, 1, 3], cache, memory)
    assert len(calls) == TINY["n_layer"]


def test_a_cache_refuses_a_second_source_and_a_new_cache_does_not_know_the_first():
    model, target = build(**ENCODER_DECODER), random_tokens(1, 9, seed=2)
    first, second = (model.encode(random_tokens(1, 7, seed=seed)) for seed in (3, 4))
    cache = allocate(model)
    model.decode(target[:, :4], first, cache=cache)
    with pytest.raises(ValueError, match="this cache belongs to another source; allocate a new one"):
        model.decode(target[:, 4:], second, cache=cache)
    assert_close(model.decode(target[:, 4:], first, cache=cache), model.decode(target, first)[:, 4:])
    assert_close(in_chunks(model, target, [4, 5], memory=second), model.decode(target, second))
    assert_far(model.decode(target, first), model.decode(target, second))


def test_select_takes_the_source_along():
    model, source, target = build(**ENCODER_DECODER), random_tokens(3, 7), random_tokens(3, 9, seed=2)
    lengths = torch.tensor([7, 2, 5])
    expected, cache = model(source, target, lengths), allocate(model, 3)
    model.decode(target[:, :4], model.encode(source, lengths), cache=cache)
    chosen = cache.select([2, 0])
    assert_close(model.decode(target[[2, 0], 4:], chosen.memory, cache=chosen), expected[[2, 0], 4:])


# --- size, errors, side effects -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "slots"), [(None, 40), (WINDOW, WINDOW), (64, 40)])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_the_cache_has_the_bytes_of_the_formula(n_kv_head, window, slots, dtype):
    model, width = build(n_kv_head=n_kv_head, window=window, n_layer=3).to(dtype), 32 // 4
    cache = allocate(model, batch_size=2, capacity=40, dtype=dtype)
    expected = 2 * 3 * n_kv_head * width * slots * 2 * (4 if dtype == torch.float32 else 2)
    assert cache.nbytes == expected
    in_chunks(model, random_tokens(2, 40), [9, 1, 1, 29], cache)
    assert cache.nbytes == expected
    assert sum(t.untyped_storage().nbytes() for t in cache.keys + cache.values) == expected  # nothing hidden behind it


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_the_bytes_of_the_source_come_on_top_after_the_first_decode(n_kv_head):
    model = build(**ENCODER_DECODER, n_kv_head=n_kv_head)
    cache, per_token = allocate(model, 2, 40), 2 * 2 * n_kv_head * 8 * 2 * 4
    assert cache.nbytes == per_token * 40
    model.decode(random_tokens(2, 3), model.encode(random_tokens(2, 7)), cache=cache)
    assert cache.nbytes == per_token * (40 + 7)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((2, 4), None, r"the cache holds 12 tokens a row, \[9, 9\] and \[4, 4\] are too many"),
        ((2, 4), [0, 4], r"the cache holds 12 tokens a row, \[9, 9\] and \[0, 4\] are too many"),
        ((3, 1), None, "the cache has 2 rows, tokens 3, lengths 3"),
        ((2, 1), [1], "the cache has 2 rows, tokens 2, lengths 1"),
        ((2, 2), [1, 3], r"lengths \[1, 3\] must be between 0 and the 2 tokens given"),
        ((2, 2), [-1, 2], r"lengths \[-1, 2\] must be between 0 and the 2 tokens given"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(shape, lengths, message, window):
    model, tokens = build(window=window), random_tokens(2, 12)
    cache = allocate(model, 2, 12)
    model(tokens[:, :9], cache=cache)
    before = cache.select([0, 1])
    with pytest.raises(ValueError, match=f"^{message}$"):
        model(random_tokens(*shape), lengths=None if lengths is None else torch.tensor(lengths), cache=cache)
    assert cache.row_lengths == [9, 9]
    assert all(torch.equal(a, b) for a, b in zip(cache.keys + cache.values, before.keys + before.values, strict=True))
    assert_close(model(tokens[:, 9:], cache=cache), model(tokens)[:, 9:])


@pytest.mark.parametrize("window", [None, WINDOW, 30])
def test_room_can_be_made_while_nothing_is_forgotten(window):
    model, tokens = build(window=window, n_kv_head=2), random_tokens(2, 40)
    small, large = allocate(model, 2, capacity=10), allocate(model, 2, capacity=50)
    for first, last, room in ((0, 7, 10), (7, 19, 20), (19, 20, 45), (20, 40, 45)):
        small.reserve(room)
        lengths = torch.tensor([last - first, last - first - (last == 40)])
        found, expected = (model(tokens[:, first:last], lengths, cache=cache) for cache in (small, large))
        for row, n in enumerate(lengths):
            assert_close(found[row, :n], expected[row, :n])
    assert (small.capacity, small.slots) == (45, min(window or 45, 45))
    small.reserve(3)
    assert small.capacity == 45


def test_a_cache_of_another_type_is_refused():
    model = build()
    message = "the cache holds torch.bfloat16, the model computes torch.float32: allocate it with that dtype"
    with pytest.raises(ValueError, match=f"^{message}$"):
        model(random_tokens(1, 3), cache=allocate(model, dtype=torch.bfloat16))


def test_a_cached_forward_records_no_gradients():
    model = build()
    cache = allocate(model)
    assert not model.features(random_tokens(1, 3), cache=cache).requires_grad
    assert not any(t.requires_grad for t in cache.keys + cache.values)
    assert torch.is_grad_enabled()
    assert model.features(random_tokens(1, 3)).requires_grad


def test_a_training_forward_allocates_no_cache(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a cache was made")

    monkeypatch.setattr(KVCache, "__init__", refuse)
    build().train()(random_tokens(2, 9)).sum().backward()
    build(**ENCODER_DECODER).train()(random_tokens(2, 9), random_tokens(2, 9)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"window": WINDOW}, {"n_kv_head": 1, "position": "learned"}], ids=str)
def test_generated_text_has_the_same_log_probabilities_when_it_is_read_back(options):
    model = build(**options)
    generator, tokens, cache = torch.Generator().manual_seed(0), random_tokens(2, 3), allocate(model, 2)
    fed, told = tokens, []
    for _ in range(30):
        logits = model(fed, cache=cache)[:, -1].log_softmax(-1)
        fed = torch.multinomial(logits.exp(), 1, generator=generator)
        told.append(logits.gather(1, fed))
        tokens = torch.cat((tokens, fed), dim=1)
    read = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[:, 2:, 0]
    assert_close(torch.cat(told, dim=1), read)


def test_caches_of_one_model_do_not_know_each_other():
    model, texts = build(window=WINDOW), [random_tokens(1, 20, seed=seed) for seed in (1, 2)]
    caches, logits = [allocate(model) for _ in texts], [[], []]
    for i, which in itertools.product(range(20), (0, 1)):
        logits[which].append(model(texts[which][:, i : i + 1], cache=caches[which]))
    for text, pieces in zip(texts, logits, strict=True):
        assert_close(torch.cat(pieces, dim=1), model(text))


def test_a_cache_of_another_model_is_refused():
    tokens = torch.randint(31, (1, 4))
    model = build_model(ModelConfig(**TINY, n_kv_head=2, window=3))
    for other in ({"n_kv_head": 2}, {"window": 3}, {"n_kv_head": 2, "window": 4}):
        with pytest.raises(ValueError, match=r"the cache is for .* the model has"):
            model(tokens, cache=KVCache.allocate(ModelConfig(**TINY, **other), 1, 8))
    deeper = ModelConfig(**{**TINY, "n_layer": 3}, n_kv_head=2, window=3)
    with pytest.raises(ValueError, match="the cache is for"):
        model(tokens, cache=KVCache.allocate(deeper, 1, 8))


def test_select_takes_a_boolean_mask_and_no_rows():
    config = ModelConfig(**TINY)
    model = build_model(config)
    cache = KVCache.allocate(config, 3, 8)
    model(torch.randint(31, (3, 3)), torch.tensor([1, 2, 3]), cache=cache)
    kept = cache.select(torch.tensor([True, False, True]))
    assert kept.lengths.tolist() == [1, 3]
    assert torch.equal(kept.keys[0], cache.keys[0][[0, 2]])
    assert cache.select([]).lengths.tolist() == []


def test_cached_logits_record_no_gradients():
    config = ModelConfig(**TINY)
    model = build_model(config)
    assert not model(torch.randint(31, (1, 3)), cache=KVCache.allocate(config, 1, 8)).requires_grad
    assert model(torch.randint(31, (1, 3))).requires_grad


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="at least one row and one token"):
        KVCache.allocate(ModelConfig(**TINY), 1, 0)
