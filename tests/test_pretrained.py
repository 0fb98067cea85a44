"""What is written in Hugging Face's layouts computes there what it computes here; what cannot be is refused."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import bench
import pretrained
import progress
import sample
import train
from attention import rotary_angles
from checkpoint import load_model
from config import UserError, read_toml, to_toml
from config.schema import RopeScaling
from generation import generate
from model import build_model
from pretrained import from_hugging_face, main, open_source, read_arguments, to_hugging_face
from tests.data.test_hub_tokenizer import KINDS, random_texts, trained
from tests.helpers import TINY, assert_close, assert_far, build, enlarge, random_tokens
from tests.training import PAIRS, Killed, Place, Stopper, assert_same_run, settings, write_pairs

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")

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
    "continue_gpt2": "GPT2LMHeadModel",
    "continue_smollm2": "LlamaForCausalLM",
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


# The way in


LENGTH = 40
SMALL_GPT2 = {"vocab_size": 64, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
SMALL = {
    "vocab_size": 64, "max_position_embeddings": 128, "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def rope(kind: str, **options) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **options}, "num_key_value_heads": 2}


LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
THEIRS = {
    "gpt2": ("GPT2", {}),
    "gpt2, untied, unscaled, relu": (
        "GPT2",
        {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "relu", "n_inner": 24},
    ),
    **{
        f"llama {n} of {n_head}, {'tied' if tied else 'untied'}": (
            "Llama",
            {"num_attention_heads": n_head, "num_key_value_heads": n, "tie_word_embeddings": tied, "head_dim": 12},
        )
        for n_head, n, tied in [(1, 1, True), (4, 4, False), (4, 2, True), (4, 1, False)]
    },
    "llama, biases and epsilon": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1}),
    "llama, linear": ("Llama", rope("linear", factor=3.0)),
    "llama, llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama, yarn": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.2),
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral without a window": ("Mistral", {"sliding_window": None, "hidden_size": 30}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 with a window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
}


def theirs_of(case: str, seed: int = 0, **options):
    """A tiny model of `transformers` with weights at which nothing can hide."""
    name, changes = THEIRS[case]
    small = SMALL_GPT2 if name == "GPT2" else SMALL
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, f"{name}Config")(**small | special | changes | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    enlarge(model, seed)
    model.tie_weights()
    return model


def greedy(theirs, prompt: list[int], **options) -> list[int]:
    """The 64 tokens that they find likeliest."""
    ids = torch.tensor([prompt])
    options |= {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return theirs.generate(ids, **options)[0, len(prompt) :].tolist()


def saved(theirs, folder: Path, **options) -> Path:
    theirs.save_pretrained(folder, **options)
    return folder


@pytest.fixture(autouse=True)
def no_bars():
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("case", THEIRS)
def test_ours_has_their_logits_and_their_text_with_every_cache(case, tmp_path):
    theirs = theirs_of(case)
    ours, tokens = from_hugging_face(saved(theirs, tmp_path)), random_tokens(2, LENGTH, vocab_size=64)
    logits = their_logits(theirs, tokens)
    assert logits.abs().max() > 3
    assert_close(ours(tokens), logits)
    written = [greedy(theirs, tokens[0].tolist(), cache_implementation=cache) for cache in ("dynamic", "static")]
    prompts = tokens[:1].tolist()
    written += [generate(ours, prompts, max_new_tokens=64, use_cache=cached)[0] for cached in (True, False)]
    assert written == [written[0]] * 4
    assert len(written[0]) == 64
    assert len({*written[0]}) > 1


@pytest.mark.parametrize("case", THEIRS)
def test_what_came_in_goes_out_bit_for_bit(case, tmp_path):
    theirs = theirs_of(case)
    ours = from_hugging_face(theirs)
    again = to_hugging_face(ours)
    assert again.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in theirs.state_dict().items())
    back = from_hugging_face(saved(again, tmp_path))
    assert back.config == ours.config
    assert all(torch.equal(weight, back.state_dict()[name]) for name, weight in ours.state_dict().items())


def test_dropout_comes_along():
    theirs = theirs_of("gpt2", resid_pdrop=0.25, embd_pdrop=0.25)
    ours = from_hugging_face(theirs)
    assert ours.config.dropout == 0.25
    assert not ours.training


def old_gpt2_file(folder: Path, **more) -> None:
    """As the Hub has it: without the model's name before each weight, with the masks, without a head."""
    weights = {name.removeprefix("transformer."): w for name, w in load_file(folder / "model.safetensors").items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(2)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    save_file({**weights, **masks, **more}, folder / "model.safetensors")


def test_f60_gpt2s_transposed_matrices_and_old_mask_buffers(tmp_path):
    theirs, tokens = theirs_of("gpt2"), random_tokens(2, LENGTH, vocab_size=64)
    saved(theirs, tmp_path)
    old_gpt2_file(tmp_path)
    ours = from_hugging_face(tmp_path)
    assert_close(ours(tokens), their_logits(theirs, tokens))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(saved(to_hugging_face(ours), tmp_path / "out"))
    assert_close(their_logits(reloaded, tokens), their_logits(theirs, tokens))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {
        name for name, _ in theirs.named_parameters()
    }  # neither missing nor surplus


def test_f60_a_surplus_key_that_is_no_mask_is_refused(tmp_path):
    saved(theirs_of("gpt2"), tmp_path)
    old_gpt2_file(tmp_path, **{"h.0.attn.bias2": torch.ones(1)})
    with pytest.raises(UserError, match=r"transformer\.h\.0\.attn\.bias2 has no place"):
        from_hugging_face(tmp_path)


@pytest.mark.parametrize("kind", ["in", "out"])
def test_f61_the_rotary_layout_agrees_at_every_position(kind, tmp_path):
    tokens, places = random_tokens(1, LENGTH, vocab_size=64), [0, 1, 20, 39]
    theirs = theirs_of("llama 2 of 4, tied", head_dim=8)
    ours = from_hugging_face(saved(theirs, tmp_path))
    if kind == "out":
        theirs = to_hugging_face(ours)
    assert_close(ours(tokens)[:, places], their_logits(theirs, tokens)[:, places])
    with torch.no_grad():  # neighbouring pairs instead of halves: the first position is right all the same
        for block in ours.decoder.blocks:
            for projection in (block.attention.q_proj, block.attention.k_proj):
                rows = projection.weight.view(-1, 2, 4, 32).transpose(1, 2).reshape(projection.weight.shape)
                projection.weight.copy_(rows)
    assert_close(ours(tokens)[:, 0], their_logits(theirs, tokens)[:, 0])
    for place in places[1:]:
        assert_far(ours(tokens)[:, place], their_logits(theirs, tokens)[:, place])


@pytest.mark.parametrize("options", [GPT2, {}], ids=["gpt2", "llama"])
def test_f62_tied_matrices_are_stored_once_and_stay_tied(options, tmp_path):
    ours, tokens = build(**options), random_tokens(1, 20)
    saved(to_hugging_face(ours), tmp_path)
    n_bytes = 4 * sum(parameter.numel() for parameter in ours.parameters())
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(weight.nbytes for weight in stored.values()) == n_bytes
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    theirs, back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), from_hugging_face(tmp_path)
    for model in (theirs.eval(), back):
        head, embedding = (
            (model.lm_head, model.get_input_embeddings()) if model is theirs else (model.lm_head, model.decoder.embed)
        )
        assert head.weight is embedding.weight
    assert_close(their_logits(theirs, tokens), ours(tokens))
    with torch.no_grad():
        before = back(tokens)[..., 5]
        back.decoder.embed.weight[5] += 1
    assert_far(back(tokens)[..., 5], before)


def test_f62_a_head_in_the_file_of_a_tied_model_must_be_the_embedding(tmp_path):
    file = saved(theirs_of("qwen3"), tmp_path) / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, file)
    from_hugging_face(tmp_path)
    save_file({**weights, "lm_head.weight": head + 1}, file)
    with pytest.raises(UserError, match=r"tie_word_embeddings = True, but lm_head\.weight is not the embedding"):
        from_hugging_face(tmp_path)


def test_shards_and_16_bits_are_read_exactly(tmp_path):
    theirs = theirs_of("mistral").to(torch.bfloat16)
    saved(theirs, tmp_path, max_shard_size="8KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    ours = from_hugging_face(tmp_path)
    assert torch.equal(ours.decoder.embed.weight, theirs.model.embed_tokens.weight.float())
    expected = from_hugging_face(theirs).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
    assert {weight.dtype for weight in expected.values()} == {torch.float32}
    next(tmp_path.glob("*-00002-*")).unlink()
    with pytest.raises(UserError, match=r"has no model-00002-of-\d+\.safetensors"):
        from_hugging_face(tmp_path)


def test_llama_3s_own_spelling_of_its_scaling_is_read(tmp_path):
    saved(theirs_of("llama, llama3"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = config.pop("rope_parameters")
    config["rope_theta"] = found.pop("rope_theta")
    config["rope_scaling"] = {**found, "type": found["rope_type"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaling = from_hugging_face(tmp_path).config.rope_scaling
    assert scaling == RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=16, high_freq_factor=3.0)


CONFIG_REFUSALS = {
    "model_type = mamba is none of gpt2, llama, mistral, qwen3": ("llama, linear", {"model_type": "mamba"}),
    "quantization_config": ("llama, linear", {"quantization_config": {"quant_method": "x"}}),
    "mlp_bias = True, where Byeol has False": ("llama, linear", {"mlp_bias": True}),
    **{
        f"activation_function = {name}, where Byeol has gelu_new$": ("gpt2", {"activation_function": name})
        for name in ("gelu", "gelu_fast", "relu2", "silu", "swiglu")
    },
    **{
        f"hidden_act = {name}, where Byeol has silu$": ("qwen3", {"hidden_act": name})
        for name in ("gelu", "gelu_new", "relu", "relu2", "swiglu", "tanh")
    },
    "scale_attn_by_inverse_layer_idx = True": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "add_cross_attention = True": ("gpt2", {"add_cross_attention": True}),
    "attention_bias = True": ("qwen3", {"attention_bias": True}),
    r"layer_types = \['full_attention', 'sliding": (
        "qwen3 with a window",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "rope_scaling.kind = dynamic": ("llama, linear", rope("dynamic", factor=2.0)),
    "rope_parameters = .*attention_factor": ("llama, yarn", rope("yarn", factor=4.0, attention_factor=2.0)),
    "has no place in a model": ("llama, linear", {"num_hidden_layers": 1}),
    "has no model.layers.2.input_layernorm.weight": ("llama, linear", {"num_hidden_layers": 3}),
    r"q_proj.weight is \(32, 32\) of torch.float32, not \(16, 32\)": ("llama, linear", {"num_attention_heads": 2}),
    "tie_word_embeddings = True, but": ("llama, linear", {"tie_word_embeddings": True}),
    "has no lm_head.weight": ("qwen3", {"tie_word_embeddings": False}),
    "config.json cannot be read": ("gpt2", {"n_layer": "two"}),
}  # fmt: skip


@pytest.mark.parametrize("message", CONFIG_REFUSALS)
def test_what_is_not_ours_is_refused_by_its_name(message, tmp_path):
    case, changes = CONFIG_REFUSALS[message]
    saved(theirs_of(case), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as error:
        from_hugging_face(tmp_path)
    assert "\n" not in str(error.value)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


FILE_REFUSALS = {
    "neither a run's config.toml nor the config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json cannot be read": lambda folder: cut(folder / "config.json"),
    "weights in .* cannot be read": lambda folder: cut(folder / "model.safetensors"),
    "has no model.safetensors; weights are read from safetensors alone": lambda folder: (
        folder / "model.safetensors"
    ).rename(folder / "pytorch_model.bin"),
    "transformer.wpe.weight has numbers that are not finite": lambda folder: save_file(
        {
            name: weight.log() if "wpe" in name else weight  # of negative ones: NaN
            for name, weight in load_file(folder / "model.safetensors").items()
        },
        folder / "model.safetensors",
    ),
    "of torch.int64": lambda folder: save_file(
        {name: weight.long() for name, weight in load_file(folder / "model.safetensors").items()},
        folder / "model.safetensors",
    ),
}


@pytest.mark.parametrize("message", FILE_REFUSALS)
def test_missing_and_damaged_files_are_named(message, tmp_path):
    FILE_REFUSALS[message](saved(theirs_of("gpt2"), tmp_path))
    with pytest.raises(UserError, match=message):
        from_hugging_face(tmp_path)


def test_a_name_that_is_nowhere_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nobody/nothing", "a/b/c", "not a name"):
        with pytest.raises(UserError, match=rf"there is no folder {name}, and from the Hugging Face Hub") as error:
            from_hugging_face(name)
        assert "\n" not in str(error.value)


def test_a_name_of_the_hub_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    folder, asked = saved(theirs_of("gpt2"), tmp_path / "cached"), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.append(name) or str(folder))
    assert from_hugging_face("somebody/gpt2").config.d_model == 32
    assert asked == ["somebody/gpt2"]


SIZES = {"gpt2_124m": 124_439_808, "continue_gpt2": 124_439_808, "continue_smollm2": 134_515_008}


@pytest.mark.parametrize("preset", SIZES)
def test_presets_have_the_published_sizes(preset):
    config = read_toml(Path(__file__).parents[1] / "config" / f"{preset}.toml")
    with torch.device("meta"):
        model = build_model(config.model.resolve(50257))
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[preset]
    assert ("continue" in preset) == (config.train.init_from is not None)


# Runs


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(progress, "loss_curve", lambda *_: None)  # the picture takes longer than the training
    place = Place(tmp_path)
    place.write_preset()
    return place


STORIES = {
    "model": {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32, "d_ff": 48, "max_seq_len": 64, "qk_norm": True},
    "data": {"source": "stories", "tokenizer": "bpe", "bpe_vocab_size": 600, "max_tokens": 30_000},
    "train": {"steps": 30, "batch_size": 8, "eval_interval": 15},
}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A run that was trained on stories, never to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("stories")
        patch.chdir(folder)
        patch.setattr(train.signal, "signal", lambda *_: None)
        patch.setattr(progress, "loss_curve", lambda *_: None)
        place = Place(folder)
        place.write_preset(**STORIES)
        place.train()
    return folder / "runs" / "tiny"


def test_a_run_on_stories_is_the_same_model_in_transformers(stories, tmp_path, capsys):
    main(read_arguments(["export", str(stories), str(tmp_path / "out")]))
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours, tokenizer, config = load_model(stories)
    tokens = random_tokens(2, LENGTH, vocab_size=600)
    assert_close(ours(tokens), their_logits(theirs, tokens))
    texts = random_texts(1000, seed=2)
    ids = [tokenizer.encode(text) for text in texts]
    assert [their_tokenizer.encode(text) for text in texts] == ids
    prompt = tokenizer.encode("Once")
    written = greedy(theirs, prompt)
    (expected,) = generate(ours, [prompt], max_new_tokens=64, end_id=tokenizer.end_id)
    assert their_tokenizer.decode(written, skip_special_tokens=True) == tokenizer.decode(expected)
    special = theirs.config.bos_token_id, theirs.config.eos_token_id, theirs.generation_config.eos_token_id
    assert special == (tokenizer.end_id,) * 3
    again = open_source(str(tmp_path / "out"))
    assert again.tokenizers["tokenizer"].fingerprint == tokenizer.fingerprint
    assert again.model == config.model
    weights = again.weights()
    assert weights.keys() == dict(ours.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in ours.named_parameters())


def test_the_card_tells_the_measured_losses(stories, tmp_path):
    main(read_arguments(["export", str(stories), str(tmp_path / "out"), "--checkpoint", "step-000015"]))
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    lines = [json.loads(line) for line in (stories / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line for line in lines if line["step"] == 15 and "val_loss" in line]
    for value in ("val_loss", "val_bits_per_byte", "held_out_loss"):
        assert f"{measured[value]:.4f}" in card
    assert "after 15 steps" in card
    assert 'source = "stories"' in card


def test_the_card_tells_no_paths_of_this_machine(place, tmp_path):
    source = next(tmp_path.glob("*.txt"), None) or tmp_path / "book.txt"
    source.write_text("Once there was a book.\n" * 300, "utf-8")
    place.write_preset(data={"tokenizer": "bytes", "source": str(source)}, train={"steps": 1})
    place.train()
    main(read_arguments(["export", "runs/tiny", "out"]))
    card = Path("out", "README.md").read_text("utf-8")
    assert f'source = "{source.name}"' in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("kind", ["bytes", "chars"])
def test_runs_of_other_tokenizers_go_out_and_come_back(kind, place, tmp_path):
    place.write_preset(data={"tokenizer": kind}, train={"steps": 1})
    place.train()
    main(read_arguments(["export", "runs/tiny", "out"]))
    main(read_arguments(["import", "out", "runs/back"]))
    (ours, tokenizer, config), (back, their, imported) = load_model("runs/tiny"), load_model("runs/back")
    assert their.fingerprint == tokenizer.fingerprint
    assert (imported.model, imported.data.tokenizer) == (config.model, kind)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    assert theirs.encode("the cat sees é 별") == tokenizer.encode("the cat sees é 별")


def test_a_run_that_no_class_can_express_is_refused_and_leaves_nothing(place, tmp_path):
    place.write_preset(model={"activation": "relu2"}, train={"steps": 1})
    place.train()
    with pytest.raises(UserError, match=r"runs/tiny cannot be exported: model.activation = relu2"):
        pretrained.export(Path("runs/tiny"), tmp_path / "out")
    assert not [*tmp_path.glob("*out*")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: direction, SOURCE, TARGET"),
        (["exprt", "a", "b"], "invalid choice: 'exprt'"),
        (["export", "nothing", "b"], "nothing is no run"),
        (["import", "a", "b", "--checkpoint", "best"], "--checkpoint is of a run"),
        (["import", "a", "text.txt"], "text.txt is in use already"),
        (["import", "a", "b", "--best"], "unrecognized arguments: --best"),
    ],
)
def test_the_command_answers_mistakes_in_a_sentence(place, words, message):
    with pytest.raises(UserError, match=message):
        read_arguments(words)


# Runs that begin with another


@pytest.fixture
def hub_folder(tmp_path) -> Path:
    """A tiny GPT-2 with a tokenizer, as the Hub would have it."""
    folder = saved(theirs_of("gpt2", vocab_size=704, n_positions=16, eos_token_id=0), tmp_path / "hub")
    trained(KINDS["gpt2"]).save(str(folder / "tokenizer.json"))
    return folder


STILL = ["--optim.name", "sgd", "--optim.learning-rate", "1e-30", "--optim.weight-decay", "0", "--train.steps", "1"]


def bare_preset(name: str = "bare", **sections) -> None:
    """A preset that says nothing about architecture and tokenizer."""
    text = to_toml(settings(**sections))
    tables = [table for table in text.split("\n\n") if not table.startswith("[model")]
    tables = [table.replace('tokenizer = "bytes"\n', "").replace("bpe_vocab_size = 2048\n", "") for table in tables]
    Path(f"{name}.toml").write_text("\n\n".join(tables), "utf-8")


def test_a_run_begins_with_the_weights_and_the_tokenizer_of_a_folder(place, hub_folder):
    bare_preset()
    place.train("bare.toml", "--train.init-from", "hub", *STILL)
    ours, tokenizer, config = load_model("runs/bare")
    source = from_hugging_face(hub_folder)
    assert config.model == source.config
    assert config.train.init_from == "hub"
    assert (config.data.tokenizer, config.data.bpe_vocab_size, tokenizer.end_id) == ("bpe", 700, 0)
    assert config.model.vocab_size == 704  # rows of padding
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), source.parameters(), strict=True))


def test_a_run_begins_with_another_run_and_learns(place):
    place.train()
    place.write_preset("more", model={"dropout": 0.25, "max_seq_len": 8}, train={"init_from": "runs/tiny", "steps": 1})
    place.train("more.toml", *STILL)
    (first, _, _), (second, _, config) = load_model("runs/tiny"), load_model("runs/more")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert (config.model.dropout, config.model.max_seq_len) == (0.25, 8)  # of which the weights know nothing
    place.train("more.toml", "--train.steps", "20")
    losses = [json.loads(line)["loss"] for line in Path("runs/more-2/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("killed_after", [1, 3, 5])
def test_a_run_that_began_with_another_stands_alone_and_resumes_exactly(place, hub_folder, monkeypatch, killed_after):
    bare_preset(train={"checkpoint_interval": 2, "steps": 6}, model={"dropout": 0.1})
    words = ["bare.toml", "--train.init-from", "hub", "--model.dropout", "0.2", "--train.run-dir"]
    place.train(*words, "whole")
    stopper = Stopper(monkeypatch)
    stopper.error_after = killed_after
    with pytest.raises(Killed):
        place.train(*words, "killed")
    if killed_after > 1:  # there is a checkpoint: the source is needed no more
        shutil.rmtree(hub_folder)
    stopper.error_after = None
    place.train("--resume", "killed")
    assert_same_run(Path("killed"), Path("whole"))


def test_a_damaged_tokenizer_is_taken_from_the_source_again(place, hub_folder, capsys):
    bare_preset()
    place.train("bare.toml", "--train.init-from", "hub", "--train.steps", "1")
    kept = Path("runs/bare/tokenizer/ranks.tiktoken")
    whole = kept.read_bytes()
    swapped = whole.replace(b" 600\n", b" X\n").replace(b" 601\n", b" 600\n").replace(b" X\n", b" 601\n")
    for damaged in (b"x", swapped):
        kept.write_bytes(damaged)
        place.train("--resume", "runs/bare")
        assert kept.read_bytes() == whole
        assert "runs/bare/tokenizer was damaged, and is written again" in capsys.readouterr().out


def test_an_encoder_decoder_begins_with_both_tokenizers(place):
    write_pairs(place.folder / "pairs.tsv")
    data = {"source": "pairs.tsv", "tokenizer": "chars", "target_tokenizer": "bytes", "val_fraction": 0.2}
    place.write_preset(model=PAIRS, data=data, train={"steps": 1})
    place.train()
    place.train("tiny.toml", "--train.init-from", "runs/tiny", *STILL)
    (first, *_), (second, _, config) = load_model("runs/tiny"), load_model("runs/tiny-2")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert config.model.source_vocab_size < config.model.vocab_size == 257
    place.train("--resume", "runs/tiny-2", "--train.steps", "2")
    assert (Path("runs/tiny-2/source_tokenizer/tokenizer.json").read_bytes()) == Path(
        "runs/tiny/source_tokenizer/tokenizer.json"
    ).read_bytes()


CONTRADICTIONS = {
    "model.n_layer = 3 cannot be where train.init_from = hub, which has 2": ["--model.n-layer", "3"],
    "model.position = rope": ["--model.position=rope"],
    "model.max_seq_len = 8": ["--model.max_seq_len", "8"],  # the learned positions are weights
    "model.kind = encoder_decoder": ["--model.kind", "encoder_decoder"],
    "model.vocab_size = 700": ["--model.vocab-size", "700"],
    "model.window": ["--model.window", "4"],
    "data.tokenizer = bytes": ["--data.tokenizer", "bytes"],
    "data.bpe_vocab_size = 2048": ["--data.bpe-vocab-size", "2048"],
    "data.target_tokenizer = bytes": ["--data.target-tokenizer", "bytes"],
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_options_that_contradict_the_source_are_refused(place, hub_folder, message):
    bare_preset()
    words = ["bare.toml", "--train.init-from", "hub", *CONTRADICTIONS[message]]
    with pytest.raises(UserError, match=message) as error:
        place.train(*words)
    assert "\n" not in str(error.value)
    assert not Path("runs").exists()


def test_no_window_is_a_setting_too(place):
    place.write_preset(model={"window": 4}, train={"steps": 1})
    place.train()
    with pytest.raises(
        UserError, match=r"model.window = None cannot be where train.init_from = runs/tiny, which has 4"
    ):
        place.train("tiny.toml", "--train.init-from", "runs/tiny", "--model.window", "None")


def test_so_are_those_of_a_preset_and_what_agrees_passes(place, hub_folder):
    with pytest.raises(UserError, match=r"model\.\w+ = .* cannot be where train.init_from = hub"):
        place.train("--train.init-from", "hub")
    bare_preset()
    agreeing = [
        "--model.n-layer",
        "2",
        "--model.vocab-size",
        "None",
        "--data.bpe_vocab_size=700",
        "--model.d-ff",
        "None",
    ]
    place.train("bare.toml", "--train.init-from", "hub", *agreeing, "--train.steps", "1")


def test_the_source_cannot_change_in_a_resumed_run(place):
    place.train("--train.steps", "1")
    with pytest.raises(UserError, match=r"train.init_from = runs/other cannot change in a resumed run, it is None"):
        place.train("--resume", "runs/tiny", "--train.init-from", "runs/other")


def test_a_prompt_begins_as_it_would_there(place, hub_folder, capsys):
    file = hub_folder / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    theirs.save(str(file))
    main(read_arguments(["import", "hub", "runs/imported"]))
    sampler = sample.Sampler(sample.parse_options(["runs/imported", "--max-new-tokens", "2"]))
    prompt = sampler.prompt("the cat")
    assert list(prompt.ids) == transformers.AutoTokenizer.from_pretrained(hub_folder).encode("the cat")
    (answer,) = sampler.answer([prompt])
    going_on = sampler.going_on(answer)
    assert going_on.ids[: len(prompt.ids)] == prompt.ids
    assert going_on.text.startswith("the cat")
    assert sampler.prompt("").ids == (1,)


def test_rows_of_padding_are_never_written(place):
    place.write_preset(model={"vocab_size": 4000}, train={"steps": 1})
    place.train()
    main(read_arguments(["export", "runs/tiny", "out"]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    ours, tokenizer, _ = load_model("runs/tiny")
    (expected,) = generate(ours, [[65]], max_new_tokens=64, end_id=tokenizer.end_id, vocab_size=257)
    assert max(expected) < 257
    assert greedy(theirs, [65])[: len(expected)] == expected
    assert max(generate(ours, [[65]], max_new_tokens=64)[0]) >= 257  # which it would have written
    assert from_hugging_face("out").config.vocab_size == 4000


def test_an_imported_run_is_read_and_begun_with_but_not_resumed(place, hub_folder, capsys):
    main(read_arguments(["import", "hub", "runs/imported"]))
    assert "python sample.py runs/imported" in capsys.readouterr().out
    sample.main(sample.parse_options(["runs/imported", "--prompt", "The", "--max-new-tokens", "3"]))
    with pytest.raises(UserError, match="was imported, not trained; begin with it: --train"):
        place.train("--resume", "runs/imported")
    bare_preset()
    place.train("bare.toml", "--train.init-from", "runs/imported", *STILL)
    (first, *_), (second, *_) = load_model("runs/imported"), load_model("runs/bare")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(UserError, match="was imported, not trained here: give a text with --source"):
        bench.corpus_of(Path("runs/imported"), read_toml("runs/imported/config.toml"))
    corpus = bench.corpus_of(Path("runs/bare"), read_toml("runs/bare/config.toml"))
    assert corpus.tokenizer.vocab_size == 700
    main(read_arguments(["export", "runs/imported", "out"]))
    assert "not trained here" in Path("out/README.md").read_text("utf-8")


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(tmp_path):
    folder = saved(theirs_of("gpt2", vocab_size=699, eos_token_id=0), tmp_path)
    trained(KINDS["gpt2"]).save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="700 ids in its tokenizer, and 699 embeddings"):
        open_source(str(folder))
