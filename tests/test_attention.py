"""The mathematics, part by part, against numbers worked out another way."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import (
    KERNELS,
    Mask,
    apply_rotary,
    attention_weights,
    rotary_angles,
    rotary_temperature,
    scaled_dot_product_attention,
    sinusoidal_encoding,
)
from config.schema import RopeScaling
from tests.helpers import FAST_KERNELS, HEADS, assert_close, assert_far

W = 3


def qkv(n_query=7, n_key=7, n_head=4, n_kv_head=2, head_dim=8, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n_head, n_query), (n_kv_head, n_key), (n_kv_head, n_key))
    return [torch.randn(batch, *shape, head_dim, generator=generator).requires_grad_() for shape in shapes]


def with_gradients(kernel, q, k, v, mask, scale=None):
    output = kernel(q, k, v, mask, scale)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return output, *torch.autograd.grad((output * weight).sum(), (q, k, v))


# --- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
def test_weights_sum_to_one(n_head, n_kv_head, causal):
    q, k, _ = qkv(n_head=n_head, n_kv_head=n_kv_head)
    weights = attention_weights(q, k, Mask(7, 7, causal))
    assert weights.shape == (2, n_head, 7, 7)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(2, n_head, 7), 1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_causal_query_returns_the_first_value(kernel):
    q, k, v = qkv(n_kv_head=4)
    assert_close(KERNELS[kernel](q, k, v, Mask(7, 7))[:, :, 0], v[:, :, 0], 1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_of_one_returns_the_values(kernel):
    q, k, v = qkv(n_kv_head=4)
    assert_close(KERNELS[kernel](q, k, v, Mask(7, 7, window=1)), v, 1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_scores_return_the_mean_of_what_is_seen(kernel):
    q, k, v = qkv(n_kv_head=4)
    means = torch.stack([v[:, :, max(0, t - W + 1) : t + 1].mean(2) for t in range(7)], dim=2)
    assert_close(KERNELS[kernel](q, torch.ones_like(k), v, Mask(7, 7, window=W)), means, 1e-6)


@pytest.mark.parametrize("head_dim", [1, 4, 64])
def test_scores_scale_with_one_over_the_root_of_the_head_width(head_dim):
    q = torch.ones(1, 1, 1, head_dim)
    k = torch.stack((torch.ones(head_dim), torch.zeros(head_dim))).reshape(1, 1, 2, head_dim)
    one, zero = attention_weights(q, k, Mask(1, 2, causal=False)).flatten().tolist()
    assert math.log(one / zero) == pytest.approx(head_dim / math.sqrt(head_dim), rel=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_given_scale_replaces_it(kernel):
    q, k, v = qkv()
    given = KERNELS[kernel](q, k, v, Mask(7, 7), scale=0.7)
    assert_close(given, KERNELS[kernel](q * 0.7 * math.sqrt(8), k, v, Mask(7, 7)), 1e-5)
    assert_far(given, KERNELS[kernel](q, k, v, Mask(7, 7)))


@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
def test_the_definition_is_the_sum_written_out(n_head, n_kv_head, window):
    q, k, v = (x.detach().double() for x in qkv(n_head=n_head, n_kv_head=n_kv_head))
    expected = torch.zeros_like(q)
    for b, h, t in itertools.product(range(2), range(n_head), range(7)):
        group = h // (n_head // n_kv_head)
        seen = [s for s in range(7) if s <= t and (window is None or s > t - window)]
        weight = [math.exp(q[b, h, t] @ k[b, group, s] / math.sqrt(8)) for s in seen]
        expected[b, h, t] = sum(w * v[b, group, s] for w, s in zip(weight, seen, strict=True)) / sum(weight)
    assert_close(scaled_dot_product_attention(q, k, v, Mask(7, 7, window=window)), expected, 1e-12)


# --- the mask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, W, 99])
@pytest.mark.parametrize(
    ("query_pos", "key_pos"),
    [
        (None, None),
        (torch.tensor([4, 5, 6]), None),
        (torch.tensor([[0, 1, 2], [5, 6, 7]]), None),
        (torch.tensor([4, 5, 6]), torch.tensor([5, 6, 2, 3, -1])),
        (torch.tensor([[0, 1, 2], [5, 6, 7]]), torch.tensor([[0, 1, 2, -1, -1], [5, 6, 7, 3, 4]])),
    ],
)
def test_a_mask_is_the_rule_on_positions(query_pos, key_pos, window):
    mask = Mask(3, 5, True, window, query_pos, key_pos)
    queries = torch.arange(3) if query_pos is None else query_pos
    keys = torch.arange(5) if key_pos is None else key_pos
    queries, keys = (x if x.dim() == 2 else x.expand(2, -1) for x in (queries, keys))
    visible = mask.visible.expand(2, 1, 3, 5)
    for b, t, s in itertools.product(range(2), range(3), range(5)):
        p, j = queries[b, t].item(), keys[b, s].item()
        assert visible[b, 0, t, s].item() == (0 <= j <= p and (window is None or p - j < window))
    assert not mask.is_full
    assert not mask.is_plain_causal


def test_a_mask_without_causality_hides_only_missing_keys():
    assert Mask(2, 3, causal=False).is_full
    padded = Mask(2, 3, causal=False, key_pos=torch.tensor([[0, 1, -1], [-1, -1, -1]]))
    assert not padded.is_full
    assert padded.visible.tolist() == [[[[True, True, False]] * 2], [[[False] * 3] * 2]]


@pytest.mark.parametrize(
    ("mask", "plain"),
    [
        (Mask(5, 5), True),
        (Mask(5, 5, window=5), True),
        (Mask(5, 5, window=4), False),
        (Mask(1, 5), False),
        (Mask(3, 5), False),
        (Mask(5, 3), False),
        (Mask(5, 5, causal=False), False),
        (Mask(5, 5, query_pos=torch.arange(5)), False),
        (Mask(5, 5, key_pos=torch.arange(5)), False),
    ],
)
def test_f01_the_plain_case_is_known_and_only_when_aligned(mask, plain):
    assert mask.is_plain_causal == plain
    if plain:
        assert torch.equal(mask.visible, torch.ones(5, 5).tril().bool())


def test_a_window_without_causal_attention_is_refused():
    with pytest.raises(ValueError, match=r"a window \(4\) needs causal attention"):
        Mask(5, 5, causal=False, window=4)


# --- every kernel is the definition ---------------------------------------------------------------------------------

PER_ROW = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 11, 12]])
MASKS = {
    "causal": lambda: Mask(7, 7),
    "full": lambda: Mask(7, 7, causal=False),
    "window": lambda: Mask(7, 7, window=W),
    "widest window": lambda: Mask(7, 7, window=6),
    "window of all": lambda: Mask(7, 7, window=7),
    "window of more": lambda: Mask(7, 7, window=8),
    "padding": lambda: Mask(7, 7, causal=False, key_pos=torch.tensor([[0, 1, 2, 3, -1, -1, -1], [0] + [-1] * 6])),
    "causal padding": lambda: Mask(7, 7, key_pos=torch.tensor([[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]])),
    "window padding": lambda: Mask(7, 7, window=W, key_pos=torch.tensor([[0, 1, 2, 3, -1, -1, -1], [-1] * 7])),
    "positions per row": lambda: Mask(7, 7, query_pos=PER_ROW, key_pos=PER_ROW.roll(3, 1), window=W),
    "chunk": lambda: Mask(3, 7, query_pos=torch.tensor([4, 5, 6])),
    "window chunk": lambda: Mask(3, 7, window=W, query_pos=torch.tensor([4, 5, 6])),
    "unaligned": lambda: Mask(3, 7),
    "step": lambda: Mask(1, 7, causal=False),
    "step per row": lambda: Mask(1, 7, query_pos=torch.tensor([[3], [6]])),
    "window step": lambda: Mask(1, 7, window=W, query_pos=torch.tensor([[3], [6]])),
    "cross": lambda: Mask(3, 7, causal=False),
    "cross padding": lambda: Mask(3, 7, causal=False, key_pos=torch.tensor([[0, 1, -1, -1, -1, -1, -1], [-1] * 7])),
    "more queries than keys": lambda: Mask(9, 7, causal=False),
}


@pytest.mark.parametrize("scale", [None, 0.9])
@pytest.mark.parametrize("kernel", FAST_KERNELS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
def test_outputs_and_gradients_of_every_kernel_are_those_of_the_definition(n_head, n_kv_head, mask, kernel, scale):
    tensors = qkv(mask().n_query, 7, n_head, n_kv_head)
    expected = with_gradients(scaled_dot_product_attention, *tensors, mask(), scale)
    for a, b in zip(with_gradients(KERNELS[kernel], *tensors, mask(), scale), expected, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("kernel", FAST_KERNELS)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (Mask(7, 7, window=W), Mask(7, 7, window=W + 1)),
        (Mask(7, 7), Mask(7, 7, causal=False)),
        (Mask(3, 7, query_pos=torch.tensor([4, 5, 6])), Mask(3, 7)),
        (Mask(3, 7, query_pos=torch.tensor([4, 5, 6])), Mask(3, 7, query_pos=torch.tensor([3, 4, 5]))),
    ],
)
def test_the_comparison_of_kernels_notices_another_mask(right, wrong, kernel):
    tensors = qkv(right.n_query)
    expected = with_gradients(scaled_dot_product_attention, *tensors, right)
    for a, b in zip(with_gradients(KERNELS[kernel], *tensors, wrong), expected, strict=True):
        assert_far(a, b)


@pytest.mark.parametrize("n_query", [1, 7])
@pytest.mark.parametrize("kernel", KERNELS)
def test_grouped_queries_are_multi_head_attention_with_repeated_keys_in_llamas_order(kernel, n_query):
    q, k, v = qkv(n_query, 7, 4, 2)
    mask = Mask(n_query, 7, query_pos=torch.arange(7 - n_query, 7))
    grouped = KERNELS[kernel](q, k, v, mask)
    repeated, tiled = ([x[:, order] for x in (k, v)] for order in ([0, 0, 1, 1], [0, 1, 0, 1]))
    assert_close(grouped, KERNELS[kernel](q, *repeated, mask), 1e-6)
    assert_far(grouped, KERNELS[kernel](q, *tiled, mask))


@pytest.mark.parametrize("n_query", [1, 7])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n_kv_head", "ones"), [(1, [1, 1, 1, 1]), (2, [1, 1, 0, 0]), (4, [1, 0, 0, 0])])
def test_f04_value_heads_go_to_their_group(n_kv_head, ones, kernel, n_query):
    q, k, v = qkv(n_query, 7, 4, n_kv_head)
    v = torch.zeros_like(v)
    v[:, 0] = 1
    output = KERNELS[kernel](q, k, v, Mask(n_query, 7, causal=False))
    assert_close(output, torch.tensor(ones).reshape(4, 1, 1).expand(output.shape), 1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
@pytest.mark.parametrize(
    "mask",
    [
        Mask(4, 7, causal=False, key_pos=torch.tensor([list(range(7)), [-1] * 7])),
        Mask(4, 7, key_pos=torch.tensor([list(range(7)), [5, 6, -1, -1, -1, -1, -1]])),
        Mask(1, 7, causal=False, key_pos=torch.tensor([list(range(7)), [-1] * 7])),
        Mask(1, 7, window=2, query_pos=torch.tensor([[3], [30]])),
    ],
    ids=["no keys", "only later keys", "step without keys", "step past the window"],
)
def test_f02_a_query_that_sees_nothing_gets_zeros_forward_and_backward(mask, n_head, n_kv_head, kernel):
    q, k, v = qkv(mask.n_query, 7, n_head, n_kv_head)
    output, *gradients = with_gradients(KERNELS[kernel], q, k, v, mask)
    assert (output[1] == 0).all()
    assert (output[0] != 0).all()
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert (gradient[1] == 0).all()
    assert (attention_weights(q, k, mask)[1] == 0).all()
    assert_close(output[:1], KERNELS[kernel](q[:1], k[:1], v[:1], first_row(mask)), 1e-6)


def first_row(mask: Mask) -> Mask:
    query, key = (None if pos is None else pos[:1] for pos in (mask.query_pos, mask.key_pos))
    return Mask(mask.n_query, mask.n_key, mask.causal, mask.window, query, key)


@pytest.mark.parametrize("kernel", KERNELS)
def test_hidden_keys_have_no_gradient_at_all(kernel):
    q, k, v = qkv()
    output = KERNELS[kernel](q, k, v, Mask(7, 7, window=W))
    for gradient in torch.autograd.grad(output[:, :, 4].sum(), (k, v)):
        assert (gradient[:, :, :2] == 0).all()
        assert (gradient[:, :, 5:] == 0).all()
        assert (gradient[:, :, 2:5] != 0).all()


# --- the band of a window, block by block ---------------------------------------------------------------------------

BANDS = [(2, 1), (9, 1), (40, 2), (41, 3), (40, 8), (43, 8), (45, 9), (150, 64), (100, 99)]  # length, window


@pytest.fixture
def only_blocks(monkeypatch):
    """Whatever falls back to the other kernels fails."""
    for name in ("matmul_attention", "fused_attention"):
        monkeypatch.setattr(attention, name, None)


def compared(n, window, n_head=4, n_kv_head=2, head_dim=8, scale=None, off_by=0):
    """Output and gradients of the blocked kernel, each beside the definition's with a window wider by `off_by`."""
    tensors = qkv(n, n, n_head, n_kv_head, head_dim)
    actual = with_gradients(KERNELS["blocked"], *tensors, Mask(n, n, window=window), scale)
    expected = with_gradients(scaled_dot_product_attention, *tensors, Mask(n, n, window=window + off_by), scale)
    return zip(actual, expected, strict=True)


@pytest.mark.parametrize(("n", "window"), BANDS)
@pytest.mark.parametrize(("head_dim", "scale"), [(8, None), (64, None), (8, 0.9)])
@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
def test_blocks_of_every_length_and_window_are_the_definition(
    only_blocks, n, window, n_head, n_kv_head, head_dim, scale
):
    for a, b in compared(n, window, n_head, n_kv_head, head_dim, scale):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("off_by", [-1, 1])
@pytest.mark.parametrize(("n", "window"), [(n, window) for n, window in BANDS if window > 1])
def test_the_comparison_of_blocks_notices_a_window_one_wider_or_narrower(n, window, off_by):
    for a, b in compared(n, window, off_by=off_by):
        assert_far(a, b)


@pytest.mark.parametrize(("n", "window"), [(9, 1), (25, 2), (24, 7), (25, 8), (27, 26)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_of_a_band_sees_its_window_and_nothing_else(only_blocks, n, window, dtype):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv(n, n, batch=1))
    output = KERNELS["blocked"](q, k, v, Mask(n, n, window=window))
    for t in range(n):
        first = max(0, t - window + 1)
        gradients = torch.autograd.grad(output[:, :, t].sum(), (k, v), retain_graph=True)
        for x, gradient in zip("kv", gradients, strict=True):
            assert (gradient[:, :, :first] == 0).all()
            assert (gradient[:, :, t + 1 :] == 0).all()
            if x == "v" or first < t:  # a key alone has a weight of one, whatever it is
                assert (gradient[:, :, first : t + 1] != 0).any(-1).all()


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation returned, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            self.elements = max(self.elements, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result


def largest(kernel, n):
    with Largest() as seen:
        with_gradients(KERNELS[kernel], *qkv(n, n), Mask(n, n, window=16))
    return seen.elements


def test_memory_grows_with_length_times_window():
    rows = 2 * 4  # of the batch, of heads
    assert [largest("blocked", n) for n in (256, 512)] == [rows * n * 24 for n in (256, 512)]
    assert [largest("matmul", n) for n in (256, 512)] == [rows * n * n for n in (256, 512)]


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("window", "widest window")])
def test_what_is_no_band_is_left_to_the_kernel_that_is_best_there(monkeypatch, name):
    monkeypatch.setattr(attention, "best_attention", lambda *arguments: arguments)
    mask = MASKS[name]()
    arguments = (*qkv(mask.n_query), mask, 0.9)
    assert KERNELS["blocked"](*arguments) == arguments


# --- sinusoidal positions -------------------------------------------------------------------------------------------


def test_sinusoidal_positions_are_the_formula_of_2017():
    pos = np.arange(512)[:, None]
    angle = pos / 10000 ** (2 * (np.arange(24) // 2) / 24)
    expected = np.where(np.arange(24) % 2 == 0, np.sin(angle), np.cos(angle))
    assert_close(sinusoidal_encoding(torch.arange(512), 24), expected, 5e-5)
    assert_far(sinusoidal_encoding(torch.arange(1, 513), 24), expected)


def test_f06_sine_and_cosine_alternate():
    first, second = sinusoidal_encoding(torch.tensor([0, 1]), 4)
    assert first.tolist() == [0, 1, 0, 1]
    assert second.tolist() == pytest.approx([0.841471, 0.540302, 0.0099998, 0.99995], abs=1e-6)


def test_sinusoidal_positions_are_unique():
    table = sinusoidal_encoding(torch.arange(2048), 32)
    assert torch.cdist(table, table).fill_diagonal_(9.0).min() > 0.05


@pytest.mark.parametrize("k", [1, 7, 100])
def test_a_step_of_k_is_the_same_rotation_from_every_position(k):
    pos = torch.arange(300)
    before, after = (sinusoidal_encoding(p, 16).unflatten(-1, (8, 2)).double() for p in (pos, pos + k))
    turn = k * 10000.0 ** (-torch.arange(8).double() / 8)
    cos, sin = turn.cos(), turn.sin()
    rotation = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), -2)  # (8, 2, 2)
    assert_close(torch.einsum("pij,ikj->pik", before, rotation), after)


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_positions_keep_their_shape(shape):
    pos = torch.arange(math.prod(shape)).reshape(shape)
    assert sinusoidal_encoding(pos, 6).shape == (*shape, 6)
    assert rotary_angles(pos, 6).shape == (*shape, 3)
    assert sinusoidal_encoding(pos, 6).dtype == rotary_angles(pos, 6).dtype == torch.float32


# --- rotary positions -----------------------------------------------------------------------------------------------


def rotated(x, pos, **options):
    return apply_rotary(x, rotary_angles(torch.as_tensor(pos), x.shape[-1], **options))


def test_rotary_turns_the_halves_of_a_head():
    """By hand: width 4, position 2, theta 100: angles 2 and 0.2; coordinates 0 and 2 turn together, and 1 and 3."""
    turned = rotated(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), [2], theta=100.0).flatten().tolist()
    assert turned == pytest.approx([-3.144039, 1.165456, -0.339143, 4.317605], abs=1e-5)
    neighbours = [-2.234742, 0.077004, 2.145523, 4.516274]  # of the other layout (F61)
    assert max(abs(a - b) for a, b in zip(turned, neighbours, strict=True)) > 0.5


def test_rotary_equals_a_float64_table():
    x, pos = torch.randn(1, 2, 512, 16, generator=torch.Generator().manual_seed(0)), torch.arange(512)
    z = torch.complex(*x.double().chunk(2, dim=-1))
    angles = torch.outer(pos.double(), 10000.0 ** (-torch.arange(8).double() / 8))
    turn = torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat(((z * turn).real, (z * turn).imag), dim=-1)
    assert_close(rotated(x, pos), expected, 1e-4)
    assert_far(rotated(x, pos, theta=9999.0), expected)
    assert_far(rotated(x, pos + 1), expected)


def test_rotary_keeps_every_norm():
    x = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    assert_close(rotated(x, torch.arange(9) * 1000).norm(dim=-1), x.norm(dim=-1), 1e-5)
    assert_close(rotated(x, torch.zeros(9)), x, 0.0)


def score(q, k, at, of) -> float:
    return (rotated(q, [at]) * rotated(k, [of])).sum().item()


def test_f05_scores_depend_on_the_difference_of_positions_only():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    assert score(q, k, 0, 5) == pytest.approx(score(q, k, 4000, 4005), abs=1e-3)
    assert score(q, k, 3, 8) == pytest.approx(score(q, k, 0, 5), abs=1e-5)
    assert abs(score(q, k, 0, 5) - score(q, k, 0, 6)) > 0.01
    assert abs(score(q, k, 0, 5) - score(q, k, 5, 0)) > 0.01


@pytest.mark.parametrize("pos", [256, 257, 4095])
def test_f05_angles_are_float32_and_exact(pos):
    angles = rotary_angles(torch.tensor([pos]), 16)[0]
    exact = pos * 10000.0 ** (-np.arange(8) / 8)
    assert angles.dtype == torch.float32
    assert_close(angles.cos(), np.cos(exact), 4e-3)
    assert_close(angles.sin(), np.sin(exact), 4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_f05_rotation_happens_in_float32_and_returns_the_type_it_was_given(dtype):
    x = torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = rotated(x, [256, 4095])
    assert turned.dtype == dtype
    assert_close(turned, rotated(x.float(), [256, 4095]).to(dtype), 1e-6)


def test_rotary_takes_positions_per_row():
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    pos = torch.tensor([[0, 1, 2, 3], [9, 10, 11, 12]])
    both = rotated(x, pos)
    for row in range(2):
        assert_close(both[row : row + 1], rotated(x[row : row + 1], pos[row]), 0.0)


def test_linear_scaling_divides_positions_and_ntk_slows_the_slowest_pair_by_the_factor():
    pos, factor = torch.arange(64), 4.0
    plain = rotary_angles(pos, 16)
    linear = rotary_angles(pos, 16, scaling=RopeScaling(kind="linear", factor=factor))
    ntk = rotary_angles(pos, 16, scaling=RopeScaling(kind="ntk", factor=factor))
    assert_close(linear, plain / factor, 1e-5)
    assert_close(ntk[:, 0], plain[:, 0], 1e-5)
    assert_close(ntk[:, -1], plain[:, -1] / factor, 1e-5)


def test_only_yarn_changes_the_temperature():
    assert rotary_temperature(RopeScaling(kind="yarn", factor=4.0)) == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    assert all(rotary_temperature(RopeScaling(kind=kind, factor=4.0)) == 1 for kind in ("linear", "ntk", "llama3"))


def in_bfloat16(kernel, q, k, v, mask):
    """Output and gradients of a kernel on bfloat16 copies, as float64."""
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, k, v))
    output = kernel(q, k, v, mask)
    output.backward(torch.ones_like(output))
    return [t.double() for t in (output, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 8])
def test_bfloat16_differs_by_its_rounding_only(kernel, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n_head, 48, 16).bfloat16().double() for n_head in (4, 2, 2))
    expected = [t.clone() for t in (q, k, v)]
    for t in expected:
        t.requires_grad_()
    output = scaled_dot_product_attention(*expected, Mask(48, 48, window=window))
    output.backward(torch.ones_like(output))
    exact = [output, *(t.grad for t in expected)]

    def distance(values):
        return max((a - b).norm().item() / b.norm().item() for a, b in zip(values, exact, strict=True))

    assert distance(in_bfloat16(KERNELS[kernel], q, k, v, Mask(48, 48, window=window))) < 0.02
    assert distance(in_bfloat16(KERNELS[kernel], q, k, v, Mask(48, 48, window=7 if window else 24))) > 0.02


def chosen_by_auto(monkeypatch, q, k, mask) -> str:
    asked = []
    for name in ("matmul_attention", "fused_attention", "windowed_attention"):
        monkeypatch.setattr(attention, name, lambda q, *_, name=name: asked.append(name))
    KERNELS["auto"](q, k, k, mask)
    (name,) = asked
    return name


@pytest.mark.parametrize(
    ("dtype", "n_key", "training", "chosen"),
    [
        (torch.bfloat16, 512, True, "matmul_attention"),
        (torch.bfloat16, 513, True, "fused_attention"),
        (torch.bfloat16, 512, False, "fused_attention"),
        (torch.float32, 512, True, "fused_attention"),
    ],
)
def test_auto_is_matmul_only_to_train_in_bfloat16_on_a_cpu_while_weights_are_few(
    monkeypatch, dtype, n_key, training, chosen
):
    q, k = torch.zeros(1, 1, 1, 2, dtype=dtype, requires_grad=training), torch.zeros(1, 1, n_key, 2, dtype=dtype)
    assert chosen_by_auto(monkeypatch, q, k, Mask(1, n_key, causal=False)) == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "window", "device", "blocked"),
    [
        (256, 64, "cpu", True),
        (256, 65, "cpu", False),
        (255, 16, "cpu", False),
        (1024, 384, "cpu", True),
        (1024, 385, "cpu", False),
        (600, None, "cpu", False),
        (600, 64, "meta", False),
    ],
)
def test_auto_is_blocked_on_a_cpu_where_a_window_is_short_beside_a_long_text(
    monkeypatch, dtype, n, window, device, blocked
):
    q = torch.zeros(1, 1, n, 2, dtype=dtype, device=device)
    assert (chosen_by_auto(monkeypatch, q, q, Mask(n, n, window=window)) == "windowed_attention") == blocked
    cached = Mask(n, n, window=window, query_pos=torch.arange(n))
    assert chosen_by_auto(monkeypatch, q, q, cached) == "fused_attention"


def test_f02_float16_matmul_survives_a_negative_score_where_nothing_is_seen():
    q = torch.full((1, 1, 1, 4), 30.0, dtype=torch.float16, requires_grad=True)
    k = torch.full((1, 1, 2, 4), -30.0, dtype=torch.float16)
    mask = Mask(1, 2, causal=False, key_pos=torch.tensor([[-1, -1]]))
    output = KERNELS["matmul"](q, k, k, mask)
    output.sum().backward()
    assert output.abs().max() == 0
    assert q.grad.abs().max() == 0


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_dividing_by_the_root_of_the_width_keeps_the_variance_of_scores_at_one(head_dim):
    """Recovered from the weights: log ratios of two keys' weights are differences of scores, of variance two."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 20_000, head_dim), torch.randn(1, 1, 2, head_dim)
    k = k / k.norm(dim=-1, keepdim=True) * math.sqrt(head_dim)  # so that two keys stand for all

    def variance(scale):
        first, second = attention_weights(q.double(), k.double(), Mask(20_000, 2, causal=False), scale).log().unbind(-1)
        return ((first - second).var() / (2 * (1 - torch.cosine_similarity(*k[0, 0], dim=0)))).item()

    assert variance(None) == pytest.approx(1, abs=0.05)
    assert variance(1.0) == pytest.approx(head_dim, rel=0.05)
