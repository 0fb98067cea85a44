"""Models in Hugging Face's layouts: GPT-2, Llama, Mistral (a sliding window) and Qwen3 (QK-norm)."""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from attention import rotary_angles
from config import ModelConfig, UserError
from model import Decoder

if TYPE_CHECKING:
    import transformers


class Pair(NamedTuple):
    """A module under both names, for its weight and, where it has one, its bias; * is the number of a layer."""

    ours: str  # [qkv]: three modules, in theirs one, with the rows of all three one below another
    theirs: str
    transposed: bool = False  # Conv1D keeps its matrix as (inputs, outputs)


GPT2 = (
    Pair("decoder.embed", "transformer.wte"),
    Pair("decoder.position", "transformer.wpe"),
    Pair("decoder.blocks.*.attention_norm", "transformer.h.*.ln_1"),
    Pair("decoder.blocks.*.attention.[qkv]_proj", "transformer.h.*.attn.c_attn", transposed=True),
    Pair("decoder.blocks.*.attention.o_proj", "transformer.h.*.attn.c_proj", transposed=True),
    Pair("decoder.blocks.*.feed_forward_norm", "transformer.h.*.ln_2"),
    Pair("decoder.blocks.*.feed_forward.up_proj", "transformer.h.*.mlp.c_fc", transposed=True),
    Pair("decoder.blocks.*.feed_forward.down_proj", "transformer.h.*.mlp.c_proj", transposed=True),
    Pair("decoder.norm", "transformer.ln_f"),
    Pair("lm_head", "lm_head"),
)
LLAMA = (  # Mistral and Qwen3 as well
    Pair("decoder.embed", "model.embed_tokens"),
    Pair("decoder.blocks.*.attention_norm", "model.layers.*.input_layernorm"),
    Pair("decoder.blocks.*.attention.q_proj", "model.layers.*.self_attn.q_proj"),
    Pair("decoder.blocks.*.attention.k_proj", "model.layers.*.self_attn.k_proj"),
    Pair("decoder.blocks.*.attention.v_proj", "model.layers.*.self_attn.v_proj"),
    Pair("decoder.blocks.*.attention.o_proj", "model.layers.*.self_attn.o_proj"),
    Pair("decoder.blocks.*.attention.q_norm", "model.layers.*.self_attn.q_norm"),
    Pair("decoder.blocks.*.attention.k_norm", "model.layers.*.self_attn.k_norm"),
    Pair("decoder.blocks.*.feed_forward_norm", "model.layers.*.post_attention_layernorm"),
    Pair("decoder.blocks.*.feed_forward.gate_proj", "model.layers.*.mlp.gate_proj"),
    Pair("decoder.blocks.*.feed_forward.up_proj", "model.layers.*.mlp.up_proj"),
    Pair("decoder.blocks.*.feed_forward.down_proj", "model.layers.*.mlp.down_proj"),
    Pair("decoder.norm", "model.norm"),
    Pair("lm_head", "lm_head"),
)

# Settings that only have another name.
GPT2_SETTINGS = {
    "vocab_size": "vocab_size", "max_seq_len": "n_positions", "n_layer": "n_layer", "n_head": "n_head",
    "d_model": "n_embd", "d_ff": "n_inner", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
LLAMA_SETTINGS = {
    "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "head_dim": "head_dim",
    "d_model": "hidden_size", "d_ff": "intermediate_size", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
ACTIVATIONS = {"relu": "relu", "gelu": "gelu_new", "swiglu": "silu"}


def to_hugging_face(model: Decoder) -> "transformers.PreTrainedModel":
    """The same model as one of `transformers`, in evaluation mode, with a copy of the weights, in their type and on
    their device. It has no special tokens.

    Raises ValueError for a setting that `transformers` cannot express, UserError if it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise UserError("a model in Hugging Face's layout needs a package: pip install transformers") from None
    c, head = model.config, model.lm_head.weight
    name = _name(c)
    config = getattr(transformers, f"{name}Config")(**_settings(c, name))
    with torch.random.fork_rng(devices=()):  # its first weights are drawn, then overwritten
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=head.dtype)
    if c.position == "rope":
        frequencies = rotary_angles(torch.tensor(1), c.head_dim, c.rope_theta, c.rope_scaling)
        if not torch.allclose(theirs.model.rotary_emb.inv_freq, frequencies, rtol=1e-4, atol=0):
            raise ValueError(f"model.rope_scaling ({c.rope_scaling}) gives other frequencies in transformers")
    theirs.load_state_dict(_renamed(model.state_dict(), GPT2 if name == "GPT2" else LLAMA, c.n_layer), strict=True)
    return theirs.to(head.device).eval()


def _parameters(table: tuple[Pair, ...], n_layer: int) -> Iterator[tuple[list[str], str, bool]]:
    """Of each parameter that a model can have: our names (more than one: joined, in this order), theirs, and whether
    theirs is transposed."""
    for ours, theirs, transposed in table:
        for layer, kind in product(range(n_layer) if "*" in ours else [0], ("weight", "bias")):
            our_name, their_name = (f"{name}.{kind}".replace("*", str(layer)) for name in (ours, theirs))
            parts = "qkv" if "[qkv]" in our_name else [""]
            yield [our_name.replace("[qkv]", part) for part in parts], their_name, transposed


def _renamed(weights: dict[str, torch.Tensor], table: tuple[Pair, ...], n_layer: int) -> dict[str, torch.Tensor]:
    weights, renamed = dict(weights), {}
    for ours, theirs, transposed in _parameters(table, n_layer):
        if ours[0] in weights:
            weight = torch.cat([weights.pop(name) for name in ours])
            renamed[theirs] = weight.t() if transposed else weight
    if weights:
        raise ValueError(f"{next(iter(weights))} has no name in Hugging Face's layout")
    return renamed


def _name(c: ModelConfig) -> str:
    """What `transformers` calls such a model. Raises ValueError where it has none."""
    allowed = {"kind": ["decoder"], "norm_position": ["pre"], "attention_scale": [c.head_dim**-0.5]}
    if c.norm == "layernorm":
        name = "GPT2"
        allowed |= {"position": ["learned"], "activation": ["gelu", "relu"], "bias": [True], "qk_norm": [False]}
        allowed |= {"window": [None], "n_kv_head": [c.n_head], "head_dim": [c.d_model / c.n_head]}
        allowed["attention_scale"].append(1.0)
    else:
        # Mistral without a window is a Llama whose width need not be a multiple of n_head.
        name = "Qwen3" if c.qk_norm else "Mistral" if c.window or c.d_model % c.n_head else "Llama"
        allowed |= {"position": ["rope"], "activation": ["swiglu"], "bias": [False]}
        if name == "Llama":
            allowed["bias"].append(True)
    for option, values in allowed.items():
        if (value := getattr(c, option)) not in values:
            only = " or ".join(map(str, values))
            raise ValueError(f"model.{option} = {value} cannot be expressed by transformers' {name}, only {only}")
    if c.window == 1:
        raise ValueError("model.window = 1 cannot be expressed by transformers: its cache would show more than that")
    return name


def _settings(c: ModelConfig, name: str) -> dict:
    """The arguments of its configuration."""
    table = GPT2_SETTINGS if name == "GPT2" else LLAMA_SETTINGS
    settings = {theirs: getattr(c, ours) for ours, theirs in table.items()}
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # a tokenizer's, not a model's
    if name == "GPT2":
        dropout = {"embd_pdrop": c.dropout, "resid_pdrop": c.dropout, "attn_pdrop": 0.0}
        settings |= {"activation_function": ACTIVATIONS[c.activation], "scale_attn_weights": c.attention_scale != 1}
        return settings | dropout
    settings |= {"hidden_act": ACTIVATIONS[c.activation], "rope_parameters": _rope_parameters(c)}
    if name == "Llama":
        return settings | {"attention_bias": c.bias, "mlp_bias": c.bias}
    if name == "Qwen3":  # has a window in the layers from max_window_layers on
        settings |= {"use_sliding_window": c.window is not None, "max_window_layers": 0}
    return settings | {"sliding_window": c.window}


def _rope_parameters(c: ModelConfig) -> dict:
    scaling, kind, theta = c.rope_scaling, c.rope_scaling.kind, c.rope_theta
    if kind == "ntk":  # is nothing but a larger base
        kind, theta = "none", theta * scaling.factor ** (c.head_dim / max(c.head_dim - 2, 1))
    options = [option for option, (_, kinds) in scaling.NEEDS.items() if kind in kinds]
    parameters = {name.replace("max_seq_len", "max_position_embeddings"): getattr(scaling, name) for name in options}
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta, **parameters}
