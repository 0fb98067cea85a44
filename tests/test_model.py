"""The models against a forward pass written by hand, and what no setting may change: who can see what."""

import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from attention import KERNELS, rotary_turns
from config.schema import ModelConfig, RopeScaling
from model import Dropout, KVCache, RMSNormByHand, build_model
from tests.helpers import (
    FAST_KERNELS,
    POSITIONS,
    POST_NORM,
    PRE_NORM,
    TINY,
    WINDOW,
    BruteForce,
    assert_close,
    assert_far,
    assert_gradients_close,
    build,
    gradients,
    random_tokens,
    variants,
)

SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "ntk": RopeScaling(kind="ntk", factor=3.0),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=12, beta_fast=2.0, beta_slow=0.2),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=16, high_freq_factor=3.0),
}
ENCODER_DECODER = {"kind": "encoder_decoder", "n_encoder_layer": 3}


def by_hand(model, tokens, **changes):
    return np.stack([BruteForce(model, **changes).logits(row) for row in tokens.tolist()])


# --- equal to the equations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", variants())
def test_decoder_equals_the_equations_by_hand(options):
    model, tokens = build(**options), random_tokens(2, 17)
    assert_close(model(tokens), by_hand(model, tokens))


@pytest.mark.parametrize("options", variants())
def test_encoder_decoder_equals_the_equations_by_hand(options):
    model, source, target = build(**ENCODER_DECODER, **options), random_tokens(1, 7), random_tokens(1, 11, seed=2)
    assert_close(model(source, target)[0], BruteForce(model).logits(target[0].tolist(), source[0].tolist()))


@pytest.mark.parametrize(
    "options",
    [
        *({"activation": a, "norm": n, "norm_position": p, "bias": b}
          for a, n, p, b in [("relu", "rmsnorm", "post", False), ("gelu", "layernorm", "pre", True),
                             ("relu2", "layernorm", "post", False), ("swiglu", "rmsnorm", "post", True),
                             ("gelu", "rmsnorm", "pre", False), ("relu2", "rmsnorm", "pre", True),
                             ("relu", "layernorm", "pre", False), ("swiglu", "layernorm", "pre", True)]),
        *({"rope_scaling": scaling, "head_dim": 16, "rope_theta": 500.0} for scaling in SCALINGS.values()),
        {"rope_scaling": SCALINGS["yarn"], "head_dim": 16, "qk_norm": True, "n_kv_head": 1},
        {"qk_norm": True}, {"qk_norm": True, "position": "learned", "n_kv_head": 2, **POST_NORM},
        {"tie_embeddings": False}, {"tie_embeddings": False, "position": "sinusoidal", **POST_NORM},
        {"attention_scale": 0.11}, {"attention_scale": 1.0, "qk_norm": True, "window": 3},
        {"head_dim": 6, "n_kv_head": 2}, {"rope_theta": 100.0}, {"norm_eps": 0.1}, {"norm_eps": 0.1, **POST_NORM},
        {"d_ff": None}, {"d_ff": None, "activation": "gelu"}, {"n_layer": 1, "window": 1},
    ],
    ids=lambda options: "-".join(str(getattr(v, "kind", v)) for v in options.values()),
)  # fmt: skip
def test_every_other_option_equals_the_equations_by_hand(options):
    model, tokens = build(**options), random_tokens(1, 17)
    assert_close(model(tokens), by_hand(model, tokens))


@pytest.mark.parametrize("options", [{"rope_scaling": SCALINGS["yarn"]}, {"attention_scale": 0.2}, {"qk_norm": True}])
def test_options_of_attention_equal_the_equations_in_an_encoder_decoder_too(options):
    model = build(**ENCODER_DECODER, **options, n_kv_head=2, tie_embeddings=False, head_dim=16)
    source, target = random_tokens(1, 7), random_tokens(1, 11, seed=2)
    assert_close(model(source, target)[0], BruteForce(model).logits(target[0].tolist(), source[0].tolist()))


class TiledHeads(BruteForce):
    def kv_head(self, h):
        return h % self.config.n_kv_head


class PositionsFromOne(BruteForce):
    def positions(self, n):
        return range(1, n + 1)


class ErfGelu(BruteForce):
    def gelu(self, x):
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


@pytest.mark.parametrize(
    ("options", "wrong", "changes"),
    [
        ({"activation": "gelu", "d_ff": 128}, ErfGelu, {}),
        ({"activation": "relu"}, BruteForce, {"activation": "relu2"}),
        ({"rope_theta": 10000.0}, BruteForce, {"rope_theta": 9000.0}),
        ({"window": WINDOW}, BruteForce, {"window": WINDOW + 1}),
        ({"n_kv_head": 2}, TiledHeads, {}),
        ({"position": "learned"}, PositionsFromOne, {}),
        ({"position": "sinusoidal"}, PositionsFromOne, {}),
        ({"norm_eps": 1e-5, "norm": "layernorm"}, BruteForce, {"norm": "rmsnorm"}),
        ({"norm_eps": 1e-5}, BruteForce, {"norm_eps": 1e-2}),
        ({"attention_scale": 32**-0.5}, BruteForce, {"attention_scale": 0.2}),
        ({"rope_scaling": SCALINGS["linear"]}, BruteForce, {"rope_scaling": RopeScaling()}),
        ({"rope_scaling": SCALINGS["ntk"]}, BruteForce, {"rope_scaling": SCALINGS["linear"]}),
    ],
)
def test_the_comparison_by_hand_notices_one_wrong_setting(options, wrong, changes):
    model, tokens = build(**options), random_tokens(1, 17)
    assert_far(model(tokens)[0], wrong(model, **changes).logits(tokens[0].tolist()))


# --- every kernel is the definition ---------------------------------------------------------------------------------


def test_every_kernel_can_be_chosen():
    assert set(ModelConfig.model_fields["kernel"].annotation.__args__) == set(KERNELS)


@pytest.mark.parametrize("kernel", FAST_KERNELS)
@pytest.mark.parametrize("options", variants())
def test_logits_and_gradients_of_every_kernel_are_those_of_the_definition(options, kernel):
    tokens = random_tokens(2, 17)
    definition, fast = build(**options, kernel="reference"), build(**options, kernel=kernel)
    expected, actual = definition(tokens), fast(tokens)
    assert_close(actual, expected)
    assert_gradients_close(gradients(fast, actual), gradients(definition, expected))


@pytest.mark.parametrize("kernel", FAST_KERNELS)
@pytest.mark.parametrize("options", variants())
def test_every_kernel_is_the_definition_in_an_encoder_decoder_with_padding(options, kernel):
    source, target, lengths = random_tokens(3, 7), random_tokens(3, 11, seed=2), torch.tensor([7, 3, 1])
    definition = build(**ENCODER_DECODER, **options, kernel="reference")
    fast = build(**ENCODER_DECODER, **options, kernel=kernel)
    expected, actual = definition(source, target, lengths), fast(source, target, lengths)
    assert_close(actual, expected)
    assert_gradients_close(gradients(fast, actual), gradients(definition, expected))


@pytest.mark.parametrize("kernel", FAST_KERNELS)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [({"window": WINDOW}, {"window": WINDOW + 1}), ({"rope_theta": 10000.0}, {"rope_theta": 9000.0})],
)
def test_the_comparison_of_kernels_notices_one_wrong_setting(right, wrong, kernel):
    tokens = random_tokens(2, 17)
    definition, fast = build(**right, kernel="reference"), build(**wrong, kernel=kernel)
    expected, actual = definition(tokens), fast(tokens)
    assert_far(actual, expected)
    expected, actual = gradients(definition, expected), gradients(fast, actual)
    assert_far(actual["decoder.embed.weight"], expected["decoder.embed.weight"])


# --- a row in a ragged batch is the row alone -----------------------------------------------------------------------


@pytest.mark.parametrize("options", variants())
def test_f11_a_row_in_a_ragged_batch_is_the_row_alone(options):
    model, tokens, lengths = build(**options), random_tokens(4, 17), [17, 9, 3, 1]
    logits = model(tokens, torch.tensor(lengths))
    for row, n in enumerate(lengths):
        assert_close(logits[row, :n], model(tokens[row : row + 1, :n])[0])


@pytest.mark.parametrize("options", variants())
def test_a_row_in_a_ragged_batch_of_pairs_is_the_pair_alone(options):
    model, source, target = build(**ENCODER_DECODER, **options), random_tokens(3, 9), random_tokens(3, 11, seed=2)
    source_lengths, target_lengths = [4, 9, 1], [11, 2, 6]
    logits = model(source, target, torch.tensor(source_lengths), torch.tensor(target_lengths))
    for row, (s, t) in enumerate(zip(source_lengths, target_lengths, strict=True)):
        assert_close(logits[row, :t], model(source[row : row + 1, :s], target[row : row + 1, :t])[0])


@pytest.mark.parametrize("position", POSITIONS)
def test_the_comparison_of_rows_notices_padding_on_the_left(position):
    model, row = build(position=position), random_tokens(1, 9)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), row), dim=1)
    assert_far(model(padded)[:, 4:], model(row))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("position", POSITIONS)
def test_f10_source_padding_never_matters(position, kernel):
    model = build(**ENCODER_DECODER, position=position, kernel=kernel, n_kv_head=2)
    source, target = random_tokens(2, 4), random_tokens(2, 6, seed=2)
    alone, lengths = model(source, target), torch.tensor([4, 4])
    for n_pad, seed in ((0, 3), (2, 3), (2, 4), (5, 5)):
        padded = torch.cat((source, random_tokens(2, n_pad, seed=seed)), dim=1)
        assert_close(model(padded, target, lengths), alone)
    assert_far(model(padded, target), alone)  # without lengths it does matter
    assert_far(model(padded, target, lengths + 1), alone)


@pytest.mark.parametrize("kernel", KERNELS)
def test_f02_rows_of_padding_stay_finite_and_alone(kernel):
    model = build(kernel=kernel, window=WINDOW)
    tokens, lengths = random_tokens(3, 6), torch.tensor([6, 1, 0])
    logits = model(tokens, lengths)
    assert_close(logits[0], model(tokens[:1])[0])
    real = torch.arange(6) < lengths.unsqueeze(1)
    logits[real].logsumexp(-1).sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("norm", [PRE_NORM, POST_NORM], ids=["pre", "post"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_f02_an_empty_source_stays_finite_forward_and_backward(kernel, norm):
    model = build(**ENCODER_DECODER, **norm, kernel=kernel, n_kv_head=1)
    source, target = random_tokens(2, 5), random_tokens(2, 6, seed=2)
    logits = model(source, target, torch.tensor([5, 0]))
    assert_close(logits[0], model(source[:1], target[:1])[0])
    logits.logsumexp(-1).sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# --- who can influence whom -----------------------------------------------------------------------------------------


def influence(model, stack: str, at: int, call) -> torch.Tensor:
    """(T,): how much the hidden state or logits at position `at` depend on each token of that stack, exactly."""
    embedded = []
    hook = getattr(model, stack).embed.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    output = call()[0, at]
    hook.remove()
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad((output * weight).sum(), embedded[0])[0][0].abs().sum(-1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", variants())
def test_the_future_and_what_left_the_window_have_no_influence_at_all(options, kernel):
    model, tokens, at = build(**options, kernel=kernel), random_tokens(2, 17), 13
    reached = influence(model, "decoder", at, lambda: model(tokens))
    first = at - model.config.n_layer * (WINDOW - 1) if options["window"] else 0
    assert first == (5 if options["window"] else 0)
    assert (reached[:first] == 0.0).all()
    assert (reached[first : at + 1] > 0.0).all()
    assert (reached[at + 1 :] == 0.0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", variants(windows=[None]))
def test_influence_in_an_encoder_decoder(options, kernel):
    model, lengths = build(**ENCODER_DECODER, **options, kernel=kernel), torch.tensor([5, 7])
    source, target, at = random_tokens(2, 7), random_tokens(2, 11, seed=2), 6
    on_target = influence(model, "decoder", at, lambda: model(source, target, lengths))
    on_source = influence(model, "encoder", at, lambda: model(source, target, lengths))
    assert (on_target[: at + 1] > 0.0).all()
    assert (on_target[at + 1 :] == 0.0).all()
    assert (on_source[:5] > 0.0).all()
    assert (on_source[5:] == 0.0).all()
    inside = influence(model, "encoder", 1, lambda: model.encode(source, lengths).hidden)
    assert (inside[:5] > 0.0).all()  # an encoder sees its whole source, what comes later included
    assert (inside[5:] == 0.0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n_layer", "first"), [(1, 6), (2, 3)])
def test_f07_a_window_of_four_counts_the_token_itself(n_layer, first, kernel):
    model, tokens = build(n_layer=n_layer, window=4, kernel=kernel), random_tokens(1, 10)
    before = model(tokens)[0, 9]
    for j in range(10):
        changed = tokens.clone()
        changed[0, j] = (changed[0, j] + 1) % TINY["vocab_size"]
        moved = (model(changed)[0, 9] - before).abs().max().item()
        assert moved > 1e-3 if j >= first else moved == 0.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n_kv_head", "ones"), [(1, [1, 1, 1, 1]), (2, [1, 1, 0, 0]), (4, [1, 0, 0, 0])])
def test_f04_query_heads_are_grouped_in_order(n_kv_head, ones, kernel):
    model = build(n_kv_head=n_kv_head, kernel=kernel)
    joined = []
    for block in model.decoder.blocks:
        block.attention.v_proj.register_forward_hook(
            lambda m, i, o: (torch.arange(o.shape[-1]) < 8).float().expand_as(o)
        )
        block.attention.o_proj.register_forward_hook(lambda m, i, o: joined.append(i[0]))
    for n in (1, 6):
        model(random_tokens(1, n))
        assert_close(joined[-1], torch.tensor(ones).repeat_interleave(8).expand(1, n, 32), 1e-6)


# --- the maps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"n_kv_head": 2, "window": WINDOW}, {"n_kv_head": 1, "qk_norm": True}, {"rope_scaling": SCALINGS["yarn"]}],
)
def test_observed_maps_of_a_decoder_equal_the_weights_by_hand(options, kernel):
    model, tokens, maps = build(**options, kernel=kernel), random_tokens(2, 9), {}
    features = model.features(tokens, observe=lambda layer, kind, weights: maps.update({(layer, kind): weights}))
    assert_close(features, model.features(tokens), 0.0)
    for row in range(2):
        reference = BruteForce(model)
        reference.logits(tokens[row].tolist())
        assert maps.keys() == reference.maps.keys() == {(0, "self"), (1, "self")}
        for key, weights in reference.maps.items():
            assert_close(maps[key][row], weights)


def test_observed_maps_of_an_encoder_decoder_equal_the_weights_by_hand():
    model, maps = build(**ENCODER_DECODER, n_kv_head=2, position="sinusoidal", **POST_NORM), {}
    source, target = random_tokens(2, 7), random_tokens(2, 9, seed=2)
    model(source, target, torch.tensor([7, 4]), observe=lambda layer, kind, w: maps.update({(layer, kind): w}))
    for row, n in enumerate((7, 4)):
        reference = BruteForce(model)
        reference.logits(target[row].tolist(), source[row, :n].tolist())
        assert maps.keys() == reference.maps.keys()
        assert len(maps) == 3 + 2 + 2
        for (layer, kind), weights in reference.maps.items():
            real = maps[layer, kind][row] if kind == "self" else maps[layer, kind][row][..., :n]
            assert_close(real[:, :n] if kind == "encoder" else real, weights)
            assert kind == "self" or (maps[layer, kind][row][..., n:] == 0).all()


def test_maps_are_refused_with_a_cache():
    model = build()
    with pytest.raises(ValueError, match="observe needs the whole text in one call"):
        model(random_tokens(1, 3), cache=KVCache.allocate(model.config, 1, 8), observe=print)


# --- where positions end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_token", [17, 40])
def test_f13_learned_positions_refuse_a_longer_text_and_name_the_limit(n_token):
    model = build(position="learned", max_seq_len=16)
    assert model(random_tokens(1, 16)).isfinite().all()
    with pytest.raises(ValueError, match=rf"max_seq_len = 16, asked for {n_token}$"):
        model(random_tokens(1, n_token))


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "none"])
def test_f13_other_positions_go_on_past_the_training_context(position):
    model, tokens = build(position=position, max_seq_len=16), random_tokens(1, 40)
    assert_close(model(tokens), by_hand(model, tokens))


def test_f06_sinusoidal_positions_refuse_an_odd_width():
    with pytest.raises(ValueError, match="position = sinusoidal needs an even d_model, it is 5"):
        ModelConfig(position="sinusoidal", d_model=5, n_head=1)


@pytest.mark.parametrize("pos", [256, 257, 4095])
def test_f05_a_bfloat16_model_rotates_by_float32_angles(pos):
    angles = build(head_dim=16).bfloat16().decoder.angles(torch.tensor([pos]))[0]
    exact = np.array([pos * 10000.0 ** (-2 * i / 16) for i in range(8)])
    assert angles.dtype == torch.float32
    assert_close(angles.cos(), np.cos(exact), 4e-3)
    assert_close(angles.sin(), np.sin(exact), 4e-3)


def test_f05_a_bfloat16_model_tells_257_from_256():
    attention = build(n_layer=1).bfloat16().decoder.blocks[0].attention
    x = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    angles = build().bfloat16().decoder.angles(torch.tensor([256, 257]))
    (first, _), (second, _) = (attention.keys_values(x, rotary_turns(angles[i : i + 1])) for i in range(2))
    assert first.dtype == torch.bfloat16
    assert_far(first, second)


# --- sizes and weights ----------------------------------------------------------------------------------------------


def count(**options) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(ModelConfig(**options)).parameters())


def test_gpt2_has_124439808_parameters():
    shape = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "d_model": 768, "max_seq_len": 1024}
    assert count(**shape, position="learned", norm="layernorm", activation="gelu", bias=True) == 124_439_808


def test_the_transformer_base_of_2017_has_63082496_parameters():
    shape = {"kind": "encoder_decoder", "vocab_size": 37000, "n_layer": 6, "n_head": 8, "d_model": 512, "d_ff": 2048}
    assert count(**shape, position="sinusoidal", **POST_NORM) == 63_082_496


@pytest.mark.parametrize("tie", [True, False])
def test_a_llama_shape_has_the_parameters_counted_by_hand(tie):
    attention, feed_forward, norms = 64 * 64 + 2 * 64 * 16 + 64 * 64, 3 * 64 * 160, 2 * 64
    assert count(vocab_size=100, n_layer=3, n_head=8, n_kv_head=2, d_model=64, d_ff=160, tie_embeddings=tie) == (
        100 * 64 * (1 if tie else 2) + 3 * (attention + feed_forward + norms) + 64
    )


@pytest.mark.parametrize(
    ("d_model", "activation", "hidden"), [(32, "gelu", 128), (32, "swiglu", 96), (384, "swiglu", 1024)]
)
def test_the_width_of_the_feed_forward_is_derived(d_model, activation, hidden):
    assert ModelConfig(d_model=d_model, n_head=4, activation=activation).resolve().d_ff == hidden


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_f12_tied_embeddings_are_one_parameter(kind):
    model = build(kind=kind, tie_embeddings=True)
    shared = [p for name, p in model.named_parameters(remove_duplicate=False) if p.shape == (31, 32)]
    assert len(shared) == (2 if kind == "decoder" else 3)
    assert len({p.data_ptr() for p in shared}) == 1
    assert sum(p.shape == (31, 32) for p in model.parameters()) == 1
    untied = build(kind=kind, tie_embeddings=False)
    assert sum(p.shape == (31, 32) for p in untied.parameters()) == len(shared)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("source_vocab_size", [31, 40])
def test_an_encoder_with_a_vocabulary_of_its_own_has_its_own_embedding(tie, source_vocab_size):
    """Also where the two happen to be as large as each other."""
    model = build(kind="encoder_decoder", tie_embeddings=tie, source_vocab_size=source_vocab_size)
    assert model.encoder.embed.weight.shape == (source_vocab_size, 32)
    assert model.encoder.embed.weight is not model.decoder.embed.weight
    assert (model.decoder.embed.weight is model.lm_head.weight) == tie
    source, target = torch.tensor([[source_vocab_size - 1, 3]]), random_tokens(1, 4)
    assert model(source, target).shape == (1, 4, 31)


def test_the_head_moves_with_a_tied_embedding():
    model, tokens = build(tie_embeddings=True), random_tokens(1, 4)
    unseen = next(i for i in range(31) if i not in tokens)
    before = model(tokens)
    with torch.no_grad():
        model.decoder.embed.weight[unseen] += 1.0
    moved = (model(tokens) - before).abs().amax(dim=(0, 1))
    assert moved[unseen] > 0.1
    assert moved.count_nonzero() == 1


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("options", [PRE_NORM, {"position": "learned", "qk_norm": True, **POST_NORM}, ENCODER_DECODER])
def test_building_on_the_meta_device_leaves_nothing_uninitialised(options, tie):
    config = ModelConfig(**{**TINY, **options, "tie_embeddings": tie})
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    torch.manual_seed(0)
    model.init_weights()
    assert not list(model.buffers())
    assert all(p.isfinite().all() for p in model.parameters())
    assert (model.lm_head.weight is model.decoder.embed.weight) == tie
    expected = build_model(config)
    torch.manual_seed(0)
    expected.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_initial_weights_have_the_documented_spread(position, tie, norm_position):
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "n_layer": 8, "n_head": 4, "d_model": 64, "d_ff": 256, "max_seq_len": 300}
    options = {"norm": "layernorm", "norm_position": norm_position, "qk_norm": True, "bias": True}
    model = build_model(ModelConfig(**shape, position=position, tie_embeddings=tie, **options))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            std = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            if norm_position == "post" and "_proj" in name:
                std = math.sqrt(2 / sum(parameter.shape))
            if "embed" in name and (position == "sinusoidal" or not tie):
                std = 64**-0.5 if position == "sinusoidal" else 0.2
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * std, name


def test_a_model_needs_a_vocabulary():
    with pytest.raises(ValueError, match=r"model\.vocab_size is needed"):
        build_model(ModelConfig())


# --- dropout, compilation, 16 bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_f03_dropout_is_off_in_eval_and_on_in_training(kind, kernel):
    model, plain = (build(kind=kind, dropout=dropout, kernel=kernel) for dropout in (0.5, 0.0))
    args = [random_tokens(1, 9)] * (1 if kind == "decoder" else 2)
    assert torch.equal(model(*args), model(*args))
    assert torch.equal(model(*args), plain(*args))
    model.train()
    assert_far(model(*args), model(*args))
    model.eval()
    assert torch.equal(model(*args), plain(*args))


def test_dropout_zeroes_its_share_and_nothing_inside_attention():
    model, weights = build(dropout=0.25, n_layer=1, norm_position="post").train(), []
    dropped = []
    for module in (model.decoder.dropout, model.decoder.blocks[0].dropout):
        module.register_forward_hook(lambda m, i, o: dropped.append((o == 0).float().mean().item()))
    model.features(random_tokens(64, 20), observe=lambda layer, kind, w: weights.append(w))
    assert dropped == pytest.approx([0.25, 0.25, 0.25], abs=0.02)  # embedding, attention, feed-forward
    assert_close(weights[0].sum(-1), torch.ones(64, 4, 20))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_each_number_with_the_same_chance_independently_and_scaled_up(share, dtype):
    torch.manual_seed(0)
    dropout, x = Dropout(share), torch.ones(1000, 4, 53, dtype=dtype, requires_grad=True)  # no multiple of its draws
    dropped = dropout(x)
    kept = (dropped != 0).double()
    assert dropped.dtype == dtype
    assert set(dropped.flatten().tolist()) == {0.0, torch.tensor(1 / (1 - share)).to(dtype).item()}
    deviation = math.sqrt(share * (1 - share) / x.numel())
    assert kept.mean().item() == pytest.approx(1 - share, abs=4 * deviation)
    for apart in (1, 2, 3, 4, 53, 212):  # numbers of one draw, of neighbours, of the rows below
        left = kept.flatten() - kept.mean()
        correlation = (left[:-apart] * left[apart:]).mean() / (share * (1 - share))
        assert abs(correlation.item()) < 5 / math.sqrt(x.numel())
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped)
    torch.manual_seed(0)
    assert torch.equal(Dropout(share)(x), dropped)


@pytest.mark.parametrize(("share", "expected"), [(1e-7, 1.0), (0.9999999, 0.0)])
def test_dropout_of_nearly_nothing_or_nearly_all(share, expected):
    torch.manual_seed(0)
    assert_close(Dropout(share)(torch.ones(100)), torch.full((100,), expected))


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5, 4), (1, 1)], ids=str)
def test_the_derivative_of_rms_norm_is_that_of_its_definition(shape):
    torch.manual_seed(0)
    x, gain = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    x, gain = x.requires_grad_(), gain.requires_grad_()
    torch.autograd.gradcheck(lambda x, gain: RMSNormByHand.apply(x, gain, 1e-2), (x, gain))
    by_definition = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * gain
    assert_close(RMSNormByHand.apply(x, gain, 1e-2), by_definition)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"window": WINDOW, "n_kv_head": 2}, ENCODER_DECODER], ids=str)
def test_a_model_is_one_graph(options, kernel):
    model = build(**options, kernel=kernel)
    args = [random_tokens(2, 12)] * (2 if model.config.kind == "encoder_decoder" else 1)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(*args), model(*args))


def test_a_model_with_dropout_is_one_graph():
    model, tokens = build(dropout=0.5).train(), random_tokens(2, 12)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    dropped = compiled(tokens)
    torch.manual_seed(0)
    assert torch.equal(compiled(tokens), dropped)
    assert_far(compiled(tokens), dropped)


@pytest.mark.parametrize("options", [{}, {"norm": "layernorm"}], ids=str)
def test_a_model_runs_on_the_meta_device_and_in_float64_under_autocast(options):
    model, tokens = build(**options), random_tokens(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.double()(tokens).dtype == torch.float64
    assert model.to("meta")(tokens.to("meta")).shape == (2, 12, model.config.vocab_size)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a compiler")
@pytest.mark.parametrize("options", [{}, {"window": WINDOW, "n_kv_head": 2}], ids=str)
def test_a_compiled_model_is_the_model(options):
    model, tokens = build(**options), random_tokens(2, 12)
    torch.compiler.reset()
    actual, expected = torch.compile(model, fullgraph=True)(tokens), model(tokens)
    assert_close(actual, expected)
    assert_gradients_close(gradients(model, actual), gradients(model, expected))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "n_kv_head": 2, "window": WINDOW}, ENCODER_DECODER], ids=str)
def test_a_model_runs_in_bfloat16_cast_or_under_autocast(options, kernel):
    model = build(**options, kernel=kernel)
    args = [random_tokens(2, 12)] * (2 if model.config.kind == "encoder_decoder" else 1)
    with torch.autocast("cpu", torch.bfloat16):
        model(*args).float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.bfloat16()(*args).isfinite().all()


@pytest.mark.parametrize("activation", ["relu", "gelu", "relu2", "swiglu"])
def test_a_model_has_no_state_but_its_parameters(activation):
    model = build(activation=activation)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    model(random_tokens(2, 9))
    model(random_tokens(2, 5), cache=KVCache.allocate(model.config, 2, 8))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not list(model.buffers())


def test_torch_s_own_transformer_of_2017_is_ours():
    """Post-norm and ReLU, without the norms that torch adds at the end of each stack."""
    ours = build(**ENCODER_DECODER, position="sinusoidal", **POST_NORM)
    theirs = nn.Transformer(32, 4, 3, 2, 24, dropout=0.0, batch_first=True).eval()
    theirs.encoder.norm = theirs.decoder.norm = None
    theirs.encoder.use_nested_tensor = False
    with torch.no_grad():
        for stack, layers in ((ours.encoder, theirs.encoder.layers), (ours.decoder, theirs.decoder.layers)):
            for block, layer in zip(stack.blocks, layers, strict=True):
                copy_block(block, layer)
        source, target, lengths = random_tokens(2, 7), random_tokens(2, 9, seed=2), torch.tensor([7, 4])
        padding = torch.arange(7) >= lengths.unsqueeze(1)
        expected = theirs(
            ours.encoder.embedding(source, torch.arange(7), 7),
            ours.decoder.embedding(target, torch.arange(9), 9),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(9),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        assert_close(ours.features(target, ours.encode(source, lengths)), expected, 1e-5)
        assert_far(ours.features(target, ours.encode(source)), expected)


def copy_block(block, layer):
    """Our weights into torch's layer, which keeps queries, keys and values in one matrix."""
    attentions = [(block.attention, layer.self_attn)]
    norms = [(block.attention_norm, layer.norm1)]
    if hasattr(layer, "multihead_attn"):
        attentions.append((block.cross_attention, layer.multihead_attn))
        norms += [(block.cross_norm, layer.norm2), (block.feed_forward_norm, layer.norm3)]
    else:
        norms.append((block.feed_forward_norm, layer.norm2))
    for ours, theirs in attentions:
        parts = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
        theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    linears = [(block.feed_forward.up_proj, layer.linear1), (block.feed_forward.down_proj, layer.linear2)]
    for ours, theirs in norms + linears:
        theirs.load_state_dict(ours.state_dict())


def test_many_heads_have_the_parameters_of_one():
    sizes = {
        n_head: sum(p.numel() for p in build_model(ModelConfig(vocab_size=31, d_model=64, n_head=n_head)).parameters())
        for n_head in (1, 4, 8)
    }
    assert len(set(sizes.values())) == 1, sizes
