"""Tiny models with weights large enough to show a fault, and the forward pass again, by hand, to compare them with."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from attention import KERNELS
from config.schema import ModelConfig
from model import Decoder, EncoderDecoder, KVCache, build_model

TINY = {"vocab_size": 31, "n_layer": 2, "n_head": 4, "d_model": 32, "d_ff": 24, "max_seq_len": 64}
WINDOW = 5  # shorter than every text here

HEADS = [(1, 1), (4, 4), (4, 2), (4, 1)]  # single-head, multi-head, grouped-query, multi-query
POSITIONS = ["sinusoidal", "learned", "rope", "none"]
POST_NORM = {"norm": "layernorm", "norm_position": "post", "activation": "relu", "bias": True}  # as in 2017
PRE_NORM = {"norm": "rmsnorm", "norm_position": "pre", "activation": "swiglu", "bias": False}  # as in Llama
FAST_KERNELS = sorted({kernel: name for name, kernel in reversed(KERNELS.items()) if name != "reference"}.values())


def variants(windows=(None, WINDOW)) -> list:
    """Every combination of heads, window, positions and norms, as keyword arguments of `build`."""
    return [
        pytest.param(
            {"n_head": n_head, "n_kv_head": n_kv_head, "window": window, "position": position, **norm},
            id=f"{n_head}q{n_kv_head}kv-{f'window{window}' if window else 'full'}-{position}-{norm['norm_position']}",
        )
        for (n_head, n_kv_head), window, position, norm in product(HEADS, windows, POSITIONS, (POST_NORM, PRE_NORM))
    ]


def build(seed: int = 0, **options) -> Decoder | EncoderDecoder:
    """A tiny model in eval mode: matrices and biases from N(0, 0.3), norm gains from U(0.5, 1.5)."""
    model = build_model(ModelConfig(**{**TINY, **options}))
    enlarge(model, seed)
    return model.eval()


def enlarge(model: torch.nn.Module, seed: int = 0) -> None:
    """Random weights at which a wrong setting cannot hide, the same for every model with the same parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)


def random_tokens(*shape: int, seed: int = 1, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def difference(actual, expected) -> float:
    """The largest absolute difference; NaN counts as infinite."""
    actual, expected = (torch.as_tensor(x).detach().double() for x in (actual, expected))
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    return (actual - expected).abs().nan_to_num(torch.inf).max().item() if actual.numel() else 0.0


def assert_close(actual, expected, tolerance: float = 1e-4) -> None:
    assert difference(actual, expected) <= tolerance


def assert_far(actual, expected) -> None:
    """What a comparison must say when one setting is wrong: ten times more than it allows."""
    assert difference(actual, expected) > 1e-3


def gradients(model: torch.nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every parameter, for the logits' component in a fixed random direction."""
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = (logits * weight).sum() / weight.norm()
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_gradients_close(actual: dict, expected: dict) -> None:
    """Within 1e-4, of the largest entry where that is above one."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, gradient.abs().max().item())
        assert_close(actual[name] / scale, gradient / scale)


def allocate(model, batch_size: int = 1, capacity: int = 64, **options) -> KVCache:
    return KVCache.allocate(model.config, batch_size=batch_size, capacity=capacity, **options)


def in_chunks(model, tokens, sizes, cache=None, memory=None) -> torch.Tensor:
    """The logits of `tokens` (B, T), fed to a cache in pieces of these sizes."""
    cache = allocate(model, len(tokens)) if cache is None else cache
    call = model if memory is None else partial(model.decode, memory=memory)
    return torch.cat([call(piece, cache=cache) for piece in tokens.split(list(sizes), dim=1)], dim=1)


def greedy(model, row: list[int], n_new: int, use_cache: bool = True) -> list[int]:
    """The `n_new` most likely continuations of one row, one after the other."""
    tokens, cache = torch.tensor([row]), allocate(model, capacity=len(row) + n_new)
    for step in range(n_new):
        fed = tokens if step == 0 or not use_cache else tokens[:, -1:]
        logits = model(fed, cache=cache) if use_cache else model(fed)
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    return tokens[0, len(row) :].tolist()


class BruteForce:
    """The whole model once more: float64 numpy, one row at a time, no padding, no mask, no cache; loops, not tensors.

    Reads the weights and the configuration of a model (`changes` override the latter), nothing else of its code.
    `maps[layer, kind]` are the attention weights (H, T, S) of the last call.
    """

    def __init__(self, model, **changes):
        self.weights = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
        self.config = model.config.model_copy(update=changes)
        self.maps = {}

    def logits(self, tokens, source=None) -> np.ndarray:
        memory = None if source is None else self.stack("encoder", source)
        head = "decoder.embed" if self.config.tie_embeddings else "lm_head"
        return self.stack("decoder", tokens, memory) @ self.weights[f"{head}.weight"].T

    def stack(self, name, tokens, memory=None):
        c, n_layer = self.config, self.config.n_layer if name == "decoder" else self.config.n_encoder_layer
        x = self.weights[f"{name}.embed.weight"][np.asarray(tokens)]
        for row, pos in zip(x, self.positions(len(tokens)), strict=True):
            if c.position == "sinusoidal":
                angle = [pos / 10000 ** (2 * (i // 2) / c.d_model) for i in range(c.d_model)]
                row *= np.sqrt(c.d_model)
                row += [np.cos(a) if i % 2 else np.sin(a) for i, a in enumerate(angle)]
            elif c.position == "learned":
                row += self.weights[f"{name}.position.weight"][pos]
        for layer in range(n_layer):
            part, kind = f"{name}.blocks.{layer}", (layer, "self" if name == "decoder" else "encoder")
            x = self.add_norm(f"{part}.attention_norm", x, partial(self.attention, f"{part}.attention", kind, None))
            if memory is not None:
                cross = partial(self.attention, f"{part}.cross_attention", (layer, "cross"), memory)
                x = self.add_norm(f"{part}.cross_norm", x, cross)
            x = self.add_norm(f"{part}.feed_forward_norm", x, partial(self.feed_forward, f"{part}.feed_forward"))
        return self.norm(f"{name}.norm", x) if c.norm_position == "pre" else x

    def add_norm(self, name, x, sublayer):
        if self.config.norm_position == "pre":
            return x + sublayer(self.norm(name, x))
        return self.norm(name, x + sublayer(x))

    def norm(self, name, x, kind=None):
        centred = x - x.mean(-1, keepdims=True) if (kind or self.config.norm) == "layernorm" else x
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.norm_eps)
        return unit * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def feed_forward(self, name, x):
        up = self.linear(f"{name}.up_proj", x)
        if self.config.activation == "swiglu":
            gate = self.linear(f"{name}.gate_proj", x)
            return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self.linear(f"{name}.down_proj", getattr(self, self.config.activation)(up))

    def relu(self, x):
        return np.maximum(x, 0)

    def relu2(self, x):
        return np.maximum(x, 0) ** 2

    def gelu(self, x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def attention(self, name, kind, memory, x):
        c, y = self.config, x if memory is None else memory
        q, k, v = (self.linear(f"{name}.{part}_proj", z).reshape(len(z), -1, c.head_dim)
                   for part, z in (("q", x), ("k", y), ("v", y)))  # fmt: skip
        if c.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q, "rmsnorm"), self.norm(f"{name}.k_norm", k, "rmsnorm")
        if c.position == "rope" and kind[1] != "cross":
            q, k = self.rotate(q), self.rotate(k)
        heads, weights = np.zeros_like(q), np.zeros((c.n_head, len(x), len(y)))
        for h, t in product(range(c.n_head), range(len(x))):
            seen = [s for s in range(len(y)) if kind[1] != "self" or (s <= t and (not c.window or t - s < c.window))]
            score = np.array([q[t, h] @ k[s, self.kv_head(h)] * c.attention_scale for s in seen])
            score = np.exp(score - score.max())
            weights[h, t, seen] = score / score.sum()
            heads[t, h] = sum(weights[h, t, s] * v[s, self.kv_head(h)] for s in seen)
        self.maps[kind] = weights
        return self.linear(f"{name}.o_proj", heads.reshape(len(x), -1))

    def kv_head(self, h):
        return h // (self.config.n_head // self.config.n_kv_head)

    def positions(self, n):
        return range(n)

    def rotate(self, x):  # coordinates i and i + D/2 are one complex number; yarn also stretches it
        half, scaling = self.config.head_dim // 2, self.config.rope_scaling
        stretch = 0.1 * np.log(scaling.factor) + 1 if scaling.kind == "yarn" else 1.0
        turn = np.exp(1j * np.outer(self.positions(len(x)), [self.frequency(i) for i in range(half)]))[:, None]
        z = (x[..., :half] + 1j * x[..., half:]) * turn * stretch
        return np.concatenate((z.real, z.imag), axis=-1)

    def frequency(self, i):
        c, s = self.config, self.config.rope_scaling
        if s.kind == "ntk":
            return (c.rope_theta * s.factor ** (c.head_dim / (c.head_dim - 2))) ** (-2 * i / c.head_dim)
        plain = c.rope_theta ** (-2 * i / c.head_dim)
        if s.kind == "linear":
            return plain / s.factor
        if s.kind == "llama3":
            turns = s.original_max_seq_len * plain / (2 * np.pi)  # the context in wavelengths
            if turns > s.high_freq_factor:
                return plain
            if turns < s.low_freq_factor:
                return plain / s.factor
            smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            return (1 - smooth) * plain / s.factor + smooth * plain
        if s.kind == "yarn":
            fast, slow = (c.head_dim * np.log(s.original_max_seq_len / (2 * np.pi * beta)) / (2 * np.log(c.rope_theta))
                          for beta in (s.beta_fast, s.beta_slow))  # fmt: skip
            low, high = max(np.floor(fast), 0), min(np.ceil(slow), c.head_dim - 1)
            stretched = min(max((i - low) / (high - low), 0.0), 1.0)
            return plain * (1 - stretched) + plain / s.factor * stretched
        return plain
