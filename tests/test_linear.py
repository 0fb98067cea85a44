"""Packed layers compute what they say, notice when they must not be used, and leave nothing behind."""

import copy
import io

import pytest
import torch
from torch import nn

import linear
from generation import generate, stream
from linear import Linear, joint, packed
from tests.helpers import assert_close, assert_far, build, random_tokens

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch is without oneDNN", allow_module_level=True)

SIZES = [(1, 1), (5, 3), (64, 64), (384, 1152), (100, 1025)]


class Pair(nn.Module):
    def __init__(self, n_in: int, *n_out: int, bias: bool, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(Linear(n_in, n, bias=bias, dtype=dtype) for n in n_out)
        self.joint_layers = tuple(self.layers)


def by_hand(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    y = x.double() @ layer.weight.double().T
    return y if layer.bias is None else y + layer.bias.double()


def is_used(layer: Linear, monkeypatch, x: torch.Tensor) -> bool:
    """Whether the packed weights compute it: plain products fail for the moment."""

    def fail(*_):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", fail)
        try:
            layer(x)
        except AssertionError:
            return False
        return True


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_row", [1, 2, 9, 32, 300])
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@torch.no_grad()
def test_a_packed_layer_is_the_product(n_in, n_out, n_row, bias, monkeypatch):
    layer, x = Linear(n_in, n_out, bias=bias), torch.randn(2, n_row, n_in)[:1]
    with packed(layer):
        assert is_used(layer, monkeypatch, x)
        assert_close(layer(x), by_hand(layer, x))
        assert layer(x).shape == (1, n_row, n_out)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_row", [1, 3])
@torch.no_grad()
def test_layers_packed_together_are_each_their_own_product(n_row, bias, monkeypatch):
    pair, x = Pair(20, 8, 12, 4, bias=bias), torch.randn(2, n_row, 20)
    expected = [by_hand(layer, x) for layer in pair.layers]
    with packed(pair):
        monkeypatch.setattr(nn.Linear, "forward", None)  # is not called
        for found, right in zip(joint(x, pair.joint_layers), expected, strict=True):
            assert_close(found, right)
    monkeypatch.undo()
    for found, right in zip(joint(x, pair.joint_layers), expected, strict=True):
        assert_close(found, right)


@torch.no_grad()
def test_some_of_the_layers_packed_together_are_computed_alone():
    pair, x = Pair(20, 8, 12, 4, bias=True), torch.randn(1, 20)
    with packed(pair):
        for layers in (pair.joint_layers[:1], pair.joint_layers[:2], pair.joint_layers[1:]):
            for found, layer in zip(joint(x, layers), layers, strict=True):
                assert_close(found, by_hand(layer, x))


@torch.no_grad()
def test_bfloat16_is_packed_too(monkeypatch):
    layer, x = Linear(64, 32, dtype=torch.bfloat16), torch.randn(1, 64, dtype=torch.bfloat16)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16")
    with packed(layer):
        assert is_used(layer, monkeypatch, x)
        assert layer(x).dtype == torch.bfloat16
        assert_close(layer(x).float(), by_hand(layer, x).float(), 0.02)


CHANGES = {
    "weight": lambda layer: layer.weight.mul_(2),
    "bias": lambda layer: layer.bias.add_(1),
    "loaded": lambda layer: layer.load_state_dict(Linear(6, 4).state_dict()),
    "assigned": lambda layer: layer.load_state_dict(Linear(6, 4).state_dict(), assign=True),
    "data": lambda layer: setattr(layer.weight, "data", torch.randn(4, 6)),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(4, 6))),
    "converted": lambda layer: layer.bfloat16().float(),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_parameters_that_change_are_not_read_from_the_old_copy(change, alone, monkeypatch):
    model = Linear(6, 4) if alone else Pair(6, 4, 4, bias=True)
    layers, x = (model,) if alone else model.joint_layers, torch.randn(1, 6)
    with packed(model):
        before = joint(x, layers)
        CHANGES[change](layers[-1])
        for found, layer in zip(joint(x, layers), layers, strict=True):
            assert_close(found, by_hand(layer, x))
        if change != "converted":  # which changes little
            assert_far(joint(x, layers)[-1], before[-1])
        with packed(model):  # packs it anew
            monkeypatch.setattr(nn.Linear, "forward", None)
            for found, layer in zip(joint(x, layers), layers, strict=True):
                assert_close(found, by_hand(layer, x))


def test_what_an_optimizer_changed_is_not_read_from_the_old_copy():
    layer, x = Linear(6, 4), torch.randn(1, 6)
    with packed(layer):
        layer(x).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
        with torch.no_grad():
            assert_close(layer(x), by_hand(layer, x))


@torch.no_grad()
def test_other_parameters_for_a_call_are_those_of_the_call():
    layer, other, x = Linear(6, 4), Linear(6, 4), torch.randn(1, 6)
    with packed(layer):
        found = torch.func.functional_call(layer, dict(other.named_parameters()), x)
    assert_close(found, by_hand(other, x))


@torch.no_grad()
def test_hooks_are_called_and_replaced_layers_too():
    model, tokens, seen = build(bias=True).eval(), random_tokens(1, 5), []
    attention = model.decoder.blocks[0].attention
    handle = attention.v_proj.register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    with packed(model):
        expected = model(tokens)
        assert len(seen) == 1
        handle.remove()
        plain = attention.v_proj
        attention.v_proj = nn.Sequential(plain, nn.Identity())
        assert_close(model(tokens), expected)
        attention.v_proj[1] = nn.ReLU()
        assert_far(model(tokens), expected)
    assert_far(model(tokens), expected)


@torch.no_grad()
def test_a_copy_made_within_is_a_model_of_its_own():
    model, tokens = build().eval(), random_tokens(1, 5)
    with packed(model):
        other = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        expected = model(tokens)
        for parameter in model.parameters():
            parameter.zero_()
        assert_close(other(tokens), expected)


def test_a_model_made_for_inference_is_left_alone():
    with torch.inference_mode():
        model = build().eval()
        assert len(generate(model, [[1, 2]], max_new_tokens=20)[0]) == 20


@torch.no_grad()
def test_without_memory_nothing_is_packed_and_after_an_interruption_nothing_is_left(monkeypatch):
    model, tokens = build().eval(), random_tokens(1, 5)
    expected, reorder, calls = model(tokens), torch.ops.mkldnn._reorder_linear_weight, []

    def fail(weight):
        calls.append(weight)
        if len(calls) == 4:
            raise problem
        return reorder(weight)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", fail)
    problem = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with packed(model):
        assert linear._PACKS == {}
        assert_close(model(tokens), expected)
    calls.clear()
    problem = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), packed(model):
        pass
    assert linear._PACKS == {}


@torch.no_grad()
def test_without_onednn_nothing_is_packed(monkeypatch):
    layer, x = Linear(6, 4), torch.randn(1, 6)
    with torch.backends.mkldnn.flags(enabled=False), packed(layer):
        assert not is_used(layer, monkeypatch, x)


def test_gradients_go_through_the_plain_product():
    pair, x = Pair(6, 4, 4, bias=True), torch.randn(2, 6, requires_grad=True)
    with packed(pair):
        first, second = joint(x, pair.joint_layers)
        (first.sum() + 2 * second.sum()).backward()
    a, b = (layer.weight for layer in pair.layers)
    assert_close(x.grad, (a.sum(0) + 2 * b.sum(0)).expand(2, 6))
    assert_close(b.grad, 2 * x.sum(0).expand(4, 6))


@torch.no_grad()
def test_within_packed_it_stays_packed_and_after_an_error_nothing_is_left(monkeypatch):
    layer, x = Linear(6, 4), torch.randn(1, 6)

    def fail() -> None:
        with packed(layer):
            outer = linear._PACKS[layer]
            with packed(layer):
                assert linear._PACKS[layer] is outer
            assert linear._PACKS[layer] is outer
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert linear._PACKS == {}
    assert not is_used(layer, monkeypatch, x)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"activation": "gelu"}, {"tie_embeddings": False}])
@torch.no_grad()
def test_a_model_s_products_are_all_packed_once(options, monkeypatch):
    model, tokens = build(n_kv_head=2, **options).eval(), random_tokens(2, 9)
    expected, names = model(tokens), list(model.state_dict())
    sizes, reorder = [], torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda w: sizes.append(w.numel()) or reorder(w))
    with packed(model):
        assert len(sizes) == 2 * 4 + 1  # of two layers those that read one input together, and the head
        monkeypatch.setattr(nn.Linear, "forward", None)
        assert_close(model(tokens), expected)
        assert list(model.state_dict()) == names


def test_the_layers_of_cross_attention_that_read_the_source_are_packed_together():
    model = build(kind="encoder_decoder", n_encoder_layer=1)
    with packed(model):
        attention = model.decoder.blocks[0].cross_attention
        assert linear._PACKS[attention.q_proj].layers == (attention.q_proj,)
        assert linear._PACKS[attention.k_proj].layers == (attention.k_proj, attention.v_proj)


@torch.no_grad()
def test_few_different_numbers_of_rows_are_prepared_for(monkeypatch):
    layer, seen, product = Linear(6, 4), set(), torch.ops.mkldnn._linear_pointwise

    def record(x, *others):
        seen.add(len(x.flatten(0, -2)))
        return product(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", record)
    with packed(layer):
        for n in range(1, 513):
            x = torch.randn(n, 6)
            assert_close(layer(x), by_hand(layer, x))
            assert_close(layer(x.view(1, n, 6))[0], by_hand(layer, x))
    assert len(seen) <= 8 * 10
    assert max(seen) <= 512


@torch.no_grad()
def test_under_autocast_it_is_cast():
    layer, x = Linear(6, 4), torch.randn(1, 6)
    with packed(layer), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@torch.no_grad()
def test_small_layers_are_left_alone(monkeypatch):
    monkeypatch.setattr(linear, "WORTH_PACKING", 2**17)
    layer, small = Linear(512, 257), Linear(512, 256)
    with packed(layer), packed(small):
        assert list(linear._PACKS) == [layer]


def test_a_model_that_learns_between_two_tokens_is_read_as_it_is():
    model, tokens = build(n_layer=1), random_tokens(1, 5)
    written = stream(model, tokens.tolist(), max_new_tokens=40)
    next(written)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # changes weights without a new version
    model(tokens).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        found = model(tokens)
        written.close()
        assert_close(found, model(tokens))
