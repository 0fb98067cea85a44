"""What is written in Hugging Face's layouts computes there what it computes here; what cannot be is refused."""

import os
import socket
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F

import pretrained
from attention import rotary_angles
from config import UserError, read_toml
from config.schema import RopeScaling
from generation import generate
from model import build_model
from pretrained import to_hugging_face
from tests.helpers import TINY, assert_close, assert_far, build, random_tokens

transformers = pytest.importorskip("transformers")

GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
WINDOW = {"window": 5, "n_kv_head": 2}
SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "ntk": RopeScaling(kind="ntk", factor=3.0),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, beta_fast=2.0, beta_slow=0.2),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=16, high_freq_factor=3.0),
}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 of one head, untied": ("GPT2LMHeadModel", {**GPT2, "n_head": 1, "tie_embeddings": False}),
    "gpt2 with relu and another epsilon": ("GPT2LMHeadModel", {**GPT2, "activation": "relu", "norm_eps": 0.1}),
    "gpt2 unscaled": ("GPT2LMHeadModel", {**GPT2, "attention_scale": 1.0}),
    "llama": ("LlamaForCausalLM", {}),
    "llama, untied": ("LlamaForCausalLM", {"tie_embeddings": False}),
    "llama of 2": ("LlamaForCausalLM", {"n_kv_head": 2, "head_dim": 16}),
    "llama of 1": ("LlamaForCausalLM", {"n_kv_head": 1, "tie_embeddings": False}),
    "llama with biases": ("LlamaForCausalLM", {"bias": True, "n_kv_head": 2}),
    "llama of another base and epsilon": ("LlamaForCausalLM", {"rope_theta": 500.0, "norm_eps": 0.1}),
    **{
        f"llama, {kind}": ("LlamaForCausalLM", {"rope_scaling": scaling, "head_dim": 16, "n_kv_head": 2})
        for kind, scaling in SCALINGS.items()
    },
    "a width that is no multiple": ("MistralForCausalLM", {"d_model": 30, "head_dim": 8}),
    **{f"mistral, window {window}": ("MistralForCausalLM", {**WINDOW, "window": window}) for window in (2, 5, 22, 23)},
    "mistral, untied": ("MistralForCausalLM", {**WINDOW, "tie_embeddings": False, "head_dim": 16}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "n_kv_head": 2}),
    "qwen3, untied": ("Qwen3ForCausalLM", {"qk_norm": True, "tie_embeddings": False, "head_dim": 16}),
    "qwen3 with a window": ("Qwen3ForCausalLM", {"qk_norm": True, **WINDOW}),
}


def their_logits(theirs, tokens):
    with torch.no_grad():
        return theirs(tokens).logits


@pytest.mark.parametrize("case", CASES)
def test_theirs_has_our_logits_and_our_text(case):
    name, options = CASES[case]
    ours, tokens = build(**options), random_tokens(2, 23)
    theirs = to_hugging_face(ours)
    assert type(theirs).__name__ == name
    logits = their_logits(theirs, tokens)
    assert logits.abs().max() > 3  # numbers at which 1e-4 means something
    assert_close(ours(tokens), logits)
    text = theirs.generate(tokens[:1, :7], max_new_tokens=24, do_sample=False, use_cache=True)[0, 7:].tolist()
    assert [text] == generate(ours, tokens[:1, :7].tolist(), max_new_tokens=24)


def in_float64(theirs, ours):
    """Their norms compute in float32, whatever the type, and their frequencies round otherwise than ours."""
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            gain, eps = module.weight, module.variance_epsilon
            module.forward = lambda x, gain=gain, eps=eps: F.rms_norm(x, gain.shape, gain, eps)
    if ours.config.position == "rope":
        c = ours.config
        theirs.model.rotary_emb.inv_freq = rotary_angles(torch.tensor(1), c.head_dim, c.rope_theta, c.rope_scaling)
    return theirs


@pytest.mark.parametrize("case", [case for case in CASES if "yarn" not in case])  # its temperature is float32 as well
def test_in_float64_the_logits_are_equal_to_nine_places(case):
    ours, tokens = build(**CASES[case][1]).double(), random_tokens(2, 23)
    theirs = in_float64(to_hugging_face(ours), ours)
    assert_close(ours(tokens), their_logits(theirs, tokens), 1e-9)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, {"rope_theta": 9000.0}),
        ({}, {"norm_eps": 1e-3}),
        (GPT2, {**GPT2, "norm_eps": 1e-3}),
        (WINDOW, {**WINDOW, "window": 4}),
        (WINDOW, {**WINDOW, "window": 6}),
        ({"qk_norm": True, **WINDOW}, {"qk_norm": True, **WINDOW, "window": 6}),
        ({"rope_scaling": SCALINGS["llama3"]}, {}),
    ],
)
def test_the_comparison_notices_one_wrong_setting(options, wrong):
    tokens = random_tokens(2, 23)
    assert_far(build(**wrong)(tokens), their_logits(to_hugging_face(build(**options)), tokens))


def test_the_comparison_notices_the_other_form_of_gelu(monkeypatch):
    monkeypatch.setitem(pretrained.ACTIVATIONS, "gelu", "gelu")
    ours, tokens = build(**GPT2, d_ff=128), random_tokens(2, 23)
    assert_far(ours(tokens), their_logits(to_hugging_face(ours), tokens))


def test_the_comparison_notices_a_square_matrix_that_was_not_transposed(monkeypatch):
    table = [pair._replace(transposed=pair.transposed and "o_proj" not in pair.ours) for pair in pretrained.GPT2]
    monkeypatch.setattr(pretrained, "GPT2", tuple(table))
    ours, tokens = build(**GPT2), random_tokens(2, 23)
    assert_far(ours(tokens), their_logits(to_hugging_face(ours), tokens))


@pytest.mark.parametrize(("layout", "options"), [("GPT2", GPT2), ("LLAMA", {"bias": True}), ("LLAMA", {})])
def test_a_table_without_one_of_its_lines_is_refused(layout, options, monkeypatch):
    ours, table = build(**options), getattr(pretrained, layout)
    used = [pair for pair in table if "_norm" not in pair.ours or "attention." not in pair.ours]  # all but QK-norm's
    for missing in used:
        monkeypatch.setattr(pretrained, layout, tuple(pair for pair in table if pair != missing))
        with pytest.raises(ValueError, match="has no name"):
            to_hugging_face(ours)


@pytest.mark.parametrize(("layout", "options"), [("GPT2", GPT2), ("LLAMA", {"qk_norm": True, "n_kv_head": 2})])
def test_a_table_reads_in_both_directions(layout, options):
    ours = build(**options, tie_embeddings=False)
    theirs, back = to_hugging_face(ours).state_dict(), {}
    for names, name, transposed in pretrained._parameters(getattr(pretrained, layout), ours.config.n_layer):
        if name in theirs:
            weight = theirs.pop(name)
            back |= zip(names, (weight.t() if transposed else weight).chunk(len(names)), strict=True)
    assert theirs == {}
    build(seed=7, **options, tie_embeddings=False).load_state_dict(back, strict=True)
    assert all(torch.equal(back[name], weight) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_type_and_mode_and_everything_else_stays_what_it_was(dtype, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)  # there is no network
    ours = build(dropout=0.1).to(dtype).train()
    before, random = {name: tensor.clone() for name, tensor in ours.state_dict().items()}, torch.get_rng_state()
    theirs = to_hugging_face(ours)
    assert torch.equal(torch.get_rng_state(), random)
    assert ours.training
    assert not theirs.training
    assert {parameter.dtype for parameter in theirs.parameters()} == {theirs.dtype} == {dtype}
    assert theirs.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())


def test_settings_that_change_no_logits_here_come_along_too():
    theirs = to_hugging_face(build(**GPT2, dropout=0.25)).config
    assert (theirs.embd_pdrop, theirs.resid_pdrop, theirs.attn_pdrop, theirs.n_positions) == (0.25, 0.25, 0, 64)
    theirs = to_hugging_face(build()).config
    assert (theirs.max_position_embeddings, theirs.vocab_size) == (TINY["max_seq_len"], TINY["vocab_size"])
    assert theirs.bos_token_id is theirs.eos_token_id is theirs.pad_token_id is None


YARN_OUTSIDE = RopeScaling(kind="yarn", factor=4.0)
REFUSALS = {
    "kind = encoder_decoder": {"kind": "encoder_decoder", **GPT2},
    "norm_position = post": {**GPT2, "norm_position": "post"},
    "position = sinusoidal": {"position": "sinusoidal"},
    "position = none": {"position": "none"},
    "position = learned": {"position": "learned"},
    "position = rope": {**GPT2, "position": "rope"},
    "activation = relu2": {**GPT2, "activation": "relu2"},
    "activation = gelu": {"activation": "gelu"},
    "activation = swiglu": {**GPT2, "activation": "swiglu"},
    "bias = False": {**GPT2, "bias": False},
    "bias = True cannot be expressed by transformers' Mistral": {**WINDOW, "bias": True},
    "bias = True cannot be expressed by transformers' Qwen3": {"qk_norm": True, "bias": True},
    "qk_norm = True": {**GPT2, "qk_norm": True},
    "window = 5": {**GPT2, "window": 5},
    "window = 1": {"window": 1},
    "n_kv_head = 2": {**GPT2, "n_kv_head": 2},
    "head_dim = 16": {**GPT2, "head_dim": 16},
    "attention_scale = 1.0": {"attention_scale": 1.0},
    "attention_scale = 0.5": {**GPT2, "attention_scale": 0.5},
    "rope_scaling .kind='yarn' factor=4.0": {"rope_scaling": YARN_OUTSIDE, "rope_theta": 5.0},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_no_class_can_express_is_refused_by_name_and_value(message):
    with pytest.raises(ValueError, match=rf"^model\.{message}\b") as error:
        to_hugging_face(build(**REFUSALS[message]))
    assert "\n" not in str(error.value)


def test_without_the_package_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install transformers$"):
        to_hugging_face(build())


PRESETS = {
    "gpt2_124m": "GPT2LMHeadModel",
    "llama3_tiny": "LlamaForCausalLM",
    "mistral_tiny": "MistralForCausalLM",
    "own_text": "LlamaForCausalLM",
    "shakespeare_char": "Qwen3ForCausalLM",
    "shakespeare_char_quick": "Qwen3ForCausalLM",
    "stories": "Qwen3ForCausalLM",
    "tinystories": "LlamaForCausalLM",
    **dict.fromkeys(["numbers", "reverse", "transformer_base", "translate"], "kind = encoder_decoder"),
}


@pytest.mark.parametrize("preset", sorted((Path(__file__).parents[1] / "config").glob("*.toml")), ids=lambda p: p.stem)
def test_which_presets_can_be_expressed(preset):
    model = build_model(read_toml(preset).model.model_copy(update={"n_layer": 1, "vocab_size": 31}))
    expected = PRESETS[preset.stem]
    if " = " in expected:
        with pytest.raises(ValueError, match=expected):
            to_hugging_face(model)
    else:
        assert type(to_hugging_face(model)).__name__ == expected
