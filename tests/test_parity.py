"""The same weights in Hugging Face's modules and in ours give the same logits and the same text."""

import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from attention import rotary_angles, rotary_temperature
from config.schema import RopeScaling
from tests.helpers import assert_close, assert_far, build, enlarge, greedy, random_tokens

transformers = pytest.importorskip("transformers")

LLAMA_NAMES = {
    r"model\.embed_tokens\.": "decoder.embed.",
    r"model\.layers\.(\d+)\.self_attn\.": r"decoder.blocks.\1.attention.",
    r"model\.layers\.(\d+)\.mlp\.": r"decoder.blocks.\1.feed_forward.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"decoder.blocks.\1.attention_norm.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"decoder.blocks.\1.feed_forward_norm.",
    r"model\.norm\.": "decoder.norm.",
    r"lm_head\.": "lm_head.",
}
GPT2_NAMES = {
    r"transformer\.wte\.": "decoder.embed.",
    r"transformer\.wpe\.": "decoder.position.",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.": r"decoder.blocks.\1.attention.o_proj.",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.": r"decoder.blocks.\1.feed_forward.up_proj.",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.": r"decoder.blocks.\1.feed_forward.down_proj.",
    r"transformer\.h\.(\d+)\.ln_1\.": r"decoder.blocks.\1.attention_norm.",
    r"transformer\.h\.(\d+)\.ln_2\.": r"decoder.blocks.\1.feed_forward_norm.",
    r"transformer\.ln_f\.": "decoder.norm.",
    r"lm_head\.": "lm_head.",
}

TINY_HF = {
    "vocab_size": 31, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "head_dim": 8, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
TINY_GPT2 = {
    "vocab_size": 31, "n_embd": 32, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip


def theirs_of(name: str, **options):
    """A tiny random Hugging Face model with large weights."""
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    enlarge(model)
    return model.eval()


def llama(name="Llama", **options):
    rope = {"rope_type": "default", "rope_theta": 10000.0, **options.pop("rope_parameters", {})}
    return theirs_of(name, **{**TINY_HF, "tie_word_embeddings": False, **options, "rope_parameters": rope})


def gpt2(**options):
    return theirs_of("GPT2", **{**TINY_GPT2, **options})


def ours_of(theirs, **options):
    """Our model with their weights; every name of theirs must be one of ours and the other way round."""
    is_gpt2 = type(theirs).__name__.startswith("GPT2")
    weights = {}
    for name, tensor in theirs.state_dict().items():
        if is_gpt2 and re.search(r"(attn|mlp)\.c_\w+\.weight$", name):
            tensor = tensor.T  # Conv1D keeps its matrices as (in, out)
        if ".attn.c_attn." in name:
            layer, kind = re.search(r"h\.(\d+)\.attn\.c_attn\.(\w+)", name).groups()
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                weights[f"decoder.blocks.{layer}.attention.{part}_proj.{kind}"] = piece
            continue
        names = GPT2_NAMES if is_gpt2 else LLAMA_NAMES
        matches = [(old, new) for old, new in names.items() if re.match(old, name)]
        assert len(matches) == 1, name
        weights[re.sub(*matches[0], name)] = tensor
    ours = build(**options)
    ours.load_state_dict(weights, strict=True)
    return ours


GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}


def largest(logits) -> float:
    return logits.abs().max().item()


def assert_same_logits_and_text(ours, theirs, n_token=23):
    tokens = random_tokens(2, n_token)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert largest(expected) > 3  # numbers at which 1e-4 means something
        assert_close(ours(tokens), expected)
        text = theirs.generate(tokens[:1, :7], max_new_tokens=24, do_sample=False, use_cache=True)[0, 7:].tolist()
    assert greedy(ours, tokens[0, :7].tolist(), 24) == text


@pytest.mark.parametrize("n_head", [1, 2, 4])
def test_f60_gpt2_is_ours(n_head):
    theirs = gpt2(n_head=n_head)
    assert_same_logits_and_text(ours_of(theirs, n_head=n_head, **GPT2), theirs)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(1, 1), (4, 4), (4, 2), (4, 1)])
def test_f04_f61_llama_is_ours(n_head, n_kv_head, tie):
    theirs = llama(num_attention_heads=n_head, num_key_value_heads=n_kv_head, tie_word_embeddings=tie)
    ours = ours_of(theirs, n_head=n_head, n_kv_head=n_kv_head, head_dim=8, tie_embeddings=tie)
    assert_same_logits_and_text(ours, theirs)


def test_llama_with_another_base_and_epsilon_and_biases_is_ours():
    rope = {"rope_type": "default", "rope_theta": 500.0}
    theirs = llama(rope_parameters=rope, rms_norm_eps=0.1, attention_bias=True, mlp_bias=True)
    ours = ours_of(theirs, tie_embeddings=False, rope_theta=500.0, norm_eps=0.1, bias=True)
    assert_same_logits_and_text(ours, theirs)


SCALINGS = {
    "linear": (RopeScaling(kind="linear", factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    "ntk": (RopeScaling(kind="ntk", factor=3.0), {"rope_theta": 10000.0 * 3.0 ** (16 / 14)}),
    "yarn": (
        RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, beta_fast=2.0, beta_slow=0.2),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
         "beta_slow": 0.2},
    ),
    "llama3": (
        RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=16, high_freq_factor=3.0),
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
         "high_freq_factor": 3.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_llama_with_scaled_rotary_positions_is_ours(kind):
    scaling, parameters = SCALINGS[kind]
    theirs = llama(rope_parameters=parameters, head_dim=16, num_key_value_heads=2)
    ours = ours_of(theirs, rope_scaling=scaling, head_dim=16, n_kv_head=2, tie_embeddings=False)
    assert_same_logits_and_text(ours, theirs)


@pytest.mark.parametrize(("window", "n_kv_head"), [(2, 2), (5, 1), (5, 2), (5, 4), (22, 2), (23, 2)])
def test_f07_mistral_beyond_its_window_is_ours(window, n_kv_head):
    theirs = llama("Mistral", sliding_window=window, num_key_value_heads=n_kv_head)
    ours = ours_of(theirs, window=window, n_kv_head=n_kv_head, tie_embeddings=False)
    assert_same_logits_and_text(ours, theirs)


@pytest.mark.parametrize(("n_kv_head", "tie"), [(4, False), (2, True), (1, False)])
def test_qwen3_with_normalised_queries_and_keys_is_ours(n_kv_head, tie):
    theirs = llama("Qwen3", num_key_value_heads=n_kv_head, tie_word_embeddings=tie, head_dim=16)
    ours = ours_of(theirs, qk_norm=True, n_kv_head=n_kv_head, tie_embeddings=tie, head_dim=16)
    assert_same_logits_and_text(ours, theirs)


def tile_heads(ours):
    """The order of query heads in which key/value heads go 0, 1, 0, 1."""
    for block in ours.decoder.blocks:
        for projection, dim in ((block.attention.q_proj, 0), (block.attention.o_proj, 1)):
            pieces = projection.weight.data.chunk(4, dim)
            projection.weight.data = torch.cat([pieces[h] for h in (0, 2, 1, 3)], dim)


@pytest.mark.parametrize(
    ("theirs", "wrong"),
    [
        (lambda: gpt2(activation_function="gelu", n_inner=128), {**GPT2, "d_ff": 128}),
        (lambda: gpt2(layer_norm_epsilon=1e-3), GPT2),
        (lambda: llama(rope_parameters={"rope_theta": 9000.0}), {"tie_embeddings": False}),
        (lambda: llama(rms_norm_eps=1e-3), {"tie_embeddings": False}),
        (lambda: llama("Mistral", sliding_window=5, num_key_value_heads=2),
         {"window": 6, "n_kv_head": 2, "tie_embeddings": False}),
        (lambda: llama("Qwen3", num_key_value_heads=4),
         {"qk_norm": True, "attention_scale": 0.35, "tie_embeddings": False}),
    ],
    ids=["gelu", "layernorm epsilon", "theta", "rmsnorm epsilon", "window", "scale"],
)  # fmt: skip
def test_the_comparison_with_hugging_face_notices_one_wrong_setting(theirs, wrong):
    theirs, tokens = theirs(), random_tokens(2, 23)
    with torch.no_grad():
        assert_far(ours_of(theirs, **wrong)(tokens), theirs(tokens).logits)


def test_the_comparison_with_hugging_face_notices_tiled_heads():
    theirs, tokens = llama(num_key_value_heads=2), random_tokens(2, 23)
    ours = ours_of(theirs, n_kv_head=2, tie_embeddings=False)
    tile_heads(ours)
    with torch.no_grad():
        assert_far(ours(tokens), theirs(tokens).logits)


# --- rotary scalings, number by number ------------------------------------------------------------------------------

LLAMA_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 16.0, "original_max_position_embeddings": 4096}


def their_frequencies(kind, head_dim, seq_len=None, **parameters):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, **parameters},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"factor": 4.0}),
        ("yarn", YARN),
        ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", {**YARN, "factor": 1.5}),
        ("llama3", LLAMA_31),
        ("llama3", {**LLAMA_31, "factor": 32.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 512}),
    ],
)
def test_scaled_frequencies_are_hugging_faces(kind, parameters, head_dim, theta):
    expected, factor = their_frequencies(kind, head_dim, rope_theta=theta, **parameters)
    original = {"original_max_seq_len": parameters["original_max_position_embeddings"]} if kind != "linear" else {}
    rest = {name: value for name, value in parameters.items() if name != "original_max_position_embeddings"}
    scaling = RopeScaling(kind=kind, **rest, **original)
    frequencies = rotary_angles(torch.tensor([1]), head_dim, theta, scaling)[0]
    assert_close(frequencies / expected, torch.ones(head_dim // 2), 1e-5)
    assert rotary_temperature(scaling) == pytest.approx(factor**2)  # theirs on queries and keys, ours on scores


@pytest.mark.parametrize("factor", [2.0, 5.0])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_ntk_is_hugging_faces_dynamic_form_at_one_length(head_dim, factor):
    """At twice the context dynamic scaling by f - 1 grows theta as the static one by f does at any length."""
    expected, _ = their_frequencies("dynamic", head_dim, 8192, rope_theta=10000.0, factor=factor - 1)
    frequencies = rotary_angles(torch.tensor([1]), head_dim, 10000.0, RopeScaling(kind="ntk", factor=factor))[0]
    assert_close(frequencies / expected, torch.ones(head_dim // 2), 1e-5)
