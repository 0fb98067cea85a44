"""The Transformer as modules: attention, feed-forward, block, stack and the two models.

One `Block` and one `Stack` are a GPT, a Llama, a Mistral or the encoder-decoder of 2017 by `ModelConfig` alone. Modules
hold parameters and sizes; masks, positions, memories and caches are arguments. Shape letters: see attention.py.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import (
    KERNELS,
    Mask,
    attention_weights,
    rotary_angles,
    rotary_temperature,
    rotary_turns,
    sinusoidal_encoding,
    turn,
)
from cache import CacheStep, KVCache, Memory
from config.schema import ModelConfig
from linear import Linear, joint

Turns = tuple[Tensor, Tensor]  # attention.rotary_turns
Observer = Callable[[int, str, Tensor], None] | None  # layer, "self" | "cross" | "encoder", weights (B, H, T, S)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * gain (arXiv 1910.07467), in the precision of the gain, whatever autocast has made of x."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight
        wide = x if x.dtype == gain.dtype else x.to(gain.dtype)
        wide_enough = wide.dtype in (torch.float32, torch.float64)  # in 16 bits the sum of squares would suffer
        by_hand = wide.is_cpu and wide_enough and not torch.compiler.is_compiling()
        if by_hand and torch.is_grad_enabled():
            return RMSNormByHand.apply(wide, gain, self.eps).to(x.dtype)
        if by_hand and wide.numel() == gain.numel():
            # One row: four operations instead of eight, which would take a tenth of a small model's time.
            row = wide.flatten()
            scale = (row.dot(row).item() / len(row) + self.eps) ** -0.5
            return torch.mul(wide, gain).mul_(scale).to(x.dtype)
        return super().forward(wide).to(x.dtype)


class RMSNormByHand(torch.autograd.Function):
    """The same with its derivative written out: twice as fast on a CPU, where torch has no kernel for it."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).sqrt_()
        ctx.save_for_backward(x, gain, rms)
        return torch.div(x, rms).mul_(gain)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, rms = ctx.saved_tensors
        product = (gradient * x).flatten(0, -2)  # (rows, C)
        with torch.autocast("cpu", enabled=False):
            of_gain = product.T @ rms.reciprocal().flatten()
            along_x = (product @ gain).view_as(rms) / (rms.pow(3) * -x.shape[-1])
        return torch.mul(gradient, gain).div_(rms).addcmul_(x, along_x), of_gain, None


class Dropout(nn.Dropout):
    """Zeroes a share p (to 1/65536) in training and scales up the rest. On a CPU, where drawing takes time, a number
    of 64 random bits makes four draws, which is twice as fast."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or x.device.type != "cpu":
            return super().forward(x)
        draws = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),), device=x.device).view(torch.int16)
        kept = draws[: x.numel()].view(x.shape) >= min(round(self.p * 2**16), 2**16 - 1) - 2**15
        scale = kept.to(torch.promote_types(x.dtype, torch.float32)) / (1 - self.p)
        return (x * scale).to(x.dtype)


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_H) W_O, head_h = Attention(X W_Q, Y W_K, Y W_V) ("Attention Is All You Need", 3.2.2).

    Self-attention when Y is X, cross-attention when Y is another sequence; single-head, multi-head, grouped-query and
    multi-query by the numbers of heads.
    """

    def __init__(self, config: ModelConfig, scale: float, cross: bool = False):
        super().__init__()
        self.n_head, self.n_kv_head, self.scale = config.n_head, config.n_kv_head, scale
        self.kernel = KERNELS[config.kernel]
        query_width, key_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.q_proj = Linear(config.d_model, query_width, bias=config.bias)
        self.k_proj = Linear(config.d_model, key_width, bias=config.bias)
        self.v_proj = Linear(config.d_model, key_width, bias=config.bias)
        self.o_proj = Linear(query_width, config.d_model, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.cross = cross

    @property
    def joint_layers(self) -> tuple[nn.Module, ...]:
        """Those that read the same input."""
        return (self.k_proj, self.v_proj) if self.cross else (self.q_proj, self.k_proj, self.v_proj)

    def queries(self, x: Tensor, turns: Turns | None = None) -> Tensor:
        """What `x` (B, T, C) looks for, (B, H, T, D), rotated by `turns`."""
        return _heads(self.q_proj(x), self.n_head, self.q_norm, turns)

    def keys_values(self, y: Tensor, turns: Turns | None = None) -> tuple[Tensor, Tensor]:
        """What `y` (B, S, C) offers to be looked at: keys and values, (B, G, S, D) each, keys rotated by `turns`."""
        k, v = joint(y, (self.k_proj, self.v_proj))
        return _heads(k, self.n_kv_head, self.k_norm, turns), _heads(v, self.n_kv_head)

    def queries_keys_values(self, x: Tensor, turns: Turns | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """All three of the same `x` (B, T, C)."""
        q, k, v = joint(x, self.joint_layers)
        q, k = _heads(q, self.n_head, self.q_norm, turns), _heads(k, self.n_kv_head, self.k_norm, turns)
        return q, k, _heads(v, self.n_kv_head)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, observe=None) -> Tensor:
        """Queries (B, H, T, D) on keys and values (B, G, S, D) -> (B, T, C); `observe` is given the weights."""
        if observe is not None:
            observe(attention_weights(q, k, mask, self.scale))
        heads = self.kernel(q, k, v, mask, self.scale)
        return self.o_proj(heads.transpose(1, 2).flatten(2))  # (B, T, C)


def _heads(x: Tensor, n_head: int, norm: nn.Module | None = None, turns: Turns | None = None) -> Tensor:
    """(B, T, n_head * D) -> (B, n_head, T, D), normed and rotated where that is wanted."""
    x = x.view(*x.shape[:2], n_head, x.shape[2] // n_head).transpose(1, 2)
    if norm is not None:
        x = norm(x)
    return x if turns is None else turn(x, turns)


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
}


class FeedForward(nn.Module):
    """down(f(up(x))), or for swiglu down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.activation == "swiglu"
        if self.gated:
            self.gate_proj = Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up_proj = Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down_proj = Linear(config.d_ff, config.d_model, bias=config.bias)

    @property
    def joint_layers(self) -> tuple[nn.Module, ...]:
        return (self.gate_proj, self.up_proj) if self.gated else (self.up_proj,)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = joint(x, self.joint_layers)
            return self.down_proj(self.activation(gate) * up)
        return self.down_proj(self.activation(self.up_proj(x)))


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory, feed-forward; each with Add & Norm around it."""

    def __init__(self, config: ModelConfig, cross: bool):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.dropout = Dropout(config.dropout)
        self.attention = MultiHeadAttention(config, config.attention_scale * rotary_temperature(config.rope_scaling))
        self.attention_norm = _norm(config)
        if cross:
            self.cross_attention = MultiHeadAttention(config, config.attention_scale, cross=True)
            self.cross_norm = _norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = _norm(config)

    def forward(
        self, x, mask, turns=None, update=None, memory=None, memory_mask=None, recall=None, observe=None
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C). `update` files new keys and values in a cache and returns all that may be seen;

        `memory` (B, S, C) is the source, and `recall` has a cache keep what is computed from it; `observe(kind,
        weights)` sees the attention maps.
        """
        q, k, v = self.attention.queries_keys_values(self.before(x, self.attention_norm), turns)
        if update is not None:
            k, v = update(k, v)
        heads = self.attention(q, k, v, mask, observe and partial(observe, "self"))
        x = self.after(x, heads, self.attention_norm)
        if memory is not None:
            q = self.cross_attention.queries(self.before(x, self.cross_norm))
            keys_values = self.cross_attention.keys_values
            k, v = keys_values(memory) if recall is None else recall(keys_values)
            heads = self.cross_attention(q, k, v, memory_mask, observe and partial(observe, "cross"))
            x = self.after(x, heads, self.cross_norm)
        return self.after(x, self.feed_forward(self.before(x, self.feed_forward_norm)), self.feed_forward_norm)

    def before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """What a sublayer reads."""
        return _for_products(norm(x)) if self.pre_norm else x

    def after(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """Add & Norm: `x` and what a sublayer made of it."""
        x = x + (self.dropout(y) if self.dropout.training else y)
        return x if self.pre_norm else norm(x)


def _for_products(x: Tensor) -> Tensor:
    """`x` in the type in which autocast multiplies, so that it is not made anew for each of several matrices."""
    device = x.device.type
    if x.dtype == torch.float32 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps)


class Stack(nn.Module):
    """Embedding, positions, blocks and the final norm: an encoder or a decoder by `causal` and `cross`."""

    compiled_run: Callable | None = None  # `Stack.run_blocks` for steps of a single token: see compiling.py

    def __init__(self, config: ModelConfig, n_layer: int, causal: bool, cross: bool = False):
        super().__init__()
        self.config, self.causal = config, causal
        own = None if causal else config.source_vocab_size  # an encoder may read another vocabulary than the decoder
        self.embed = nn.Embedding(own or config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position = nn.Embedding(config.max_seq_len, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, cross) for _ in range(n_layer))
        self.norm = _norm(config) if config.norm_position == "pre" else nn.Identity()

    def forward(self, tokens: Tensor, lengths=None, memory: Memory | None = None, cache=None, observe=None) -> Tensor:
        """tokens (B, T) -> the last hidden states (B, T, C)."""
        n_query, step = tokens.shape[1], None
        if cache is not None:
            step = cache.plan(self.config, tokens, lengths)
            pos, end, mask = step.pos, step.end, step.mask
        else:
            if lengths is not None and lengths.shape != tokens.shape[:1]:
                raise ValueError(f"lengths {tuple(lengths.shape)} must be one number for each of {len(tokens)} rows")
            pos, end = torch.arange(n_query, device=tokens.device), n_query
            if self.causal:  # needs no lengths: no real token ever looks at the padding on its right
                mask = Mask(n_query, n_query, window=self.config.window, device=tokens.device)
            else:
                mask = _source_mask(lengths, n_query, n_query)
        x, angles = self.embedding(tokens, pos, end), self.angles(pos)
        turns = None if angles is None else rotary_turns(angles)
        run = Stack.run_blocks
        if self.compiled_run and memory is None and step is not None and step.is_single:
            run = self.compiled_run
        x = run(self, x, mask, turns, memory, step, observe)
        if cache is not None:
            step.finish()
        return x

    def run_blocks(self, x: Tensor, mask: Mask, turns: Turns | None, memory, step: CacheStep | None, observe) -> Tensor:
        """Embedded tokens (B, T, C) -> the last hidden states (B, T, C)."""
        memory_mask = None if memory is None else _source_mask(memory.lengths, x.shape[1], memory.hidden.shape[1])
        for layer, block in enumerate(self.blocks):
            x = block(
                x,
                mask,
                turns,
                update=None if step is None else partial(step.update, layer),
                memory=None if memory is None else memory.hidden,
                memory_mask=memory_mask,
                recall=None if memory is None or step is None else partial(step.cache.cross_keys_values, layer, memory),
                observe=observe and partial(observe, layer),
            )
        return self.norm(x)

    def embedding(self, tokens: Tensor, pos: Tensor, end: int) -> Tensor:
        """Tokens (B, T) at positions (T,) or (B, T), the last real one being `end` - 1 -> (B, T, C)."""
        x = self.embed(tokens)
        if self.config.position == "sinusoidal":
            x = x * math.sqrt(self.config.d_model) + sinusoidal_encoding(pos, self.config.d_model).to(x.dtype)
        elif self.config.position == "learned":
            if end > self.config.max_seq_len:
                raise ValueError(f"position = learned ends at max_seq_len = {self.config.max_seq_len}, asked for {end}")
            x = x + self.position(pos.clamp(max=self.config.max_seq_len - 1))  # only padding is ever clamped
        return self.dropout(x)

    def angles(self, pos: Tensor) -> Tensor | None:
        if self.config.position != "rope":
            return None
        return rotary_angles(pos, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)

    def init_weights(self) -> None:
        """Pre-norm: embeddings and matrices N(0, 0.02), those that write to the residual stream smaller by
        sqrt(2 layers) (GPT-2). Post-norm: matrices N(0, sqrt(2 / (inputs + outputs))) instead (Glorot, Bengio, 2010).

        With sinusoidal positions the embedding is N(0, 1/sqrt(d_model)), which the forward pass scales to one; with
        others and without `tie_embeddings` it is N(0, 0.2), which learns much faster (docs/speed.md).
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            elif name == "embed.weight" and self.config.position == "sinusoidal":
                nn.init.normal_(parameter, std=self.config.d_model**-0.5)
            elif name == "embed.weight" and not self.config.tie_embeddings:
                nn.init.normal_(parameter, std=0.2)
            elif name.endswith("_proj.weight") and self.config.norm_position == "post":
                nn.init.xavier_normal_(parameter)
            else:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if residual else 0.02)


def _source_mask(lengths: Tensor | None, n_query: int, n_key: int) -> Mask:
    """Every query sees the whole source, and none of its padding."""
    if lengths is None:
        return Mask(n_query, n_key, causal=False)
    pos = torch.arange(n_key, device=lengths.device)
    return Mask(n_query, n_key, causal=False, key_pos=torch.where(pos < lengths.unsqueeze(1), pos, -1))


class LanguageModel(nn.Module):
    """What both models share: a head over the vocabulary, tied to the embedding of each stack that reads it, or not."""

    def __init__(self, config: ModelConfig, **stacks: Stack):
        super().__init__()
        self.config = config
        for name, stack in stacks.items():
            self.add_module(name, stack)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        self.tie_weights()

    def stacks(self) -> list[Stack]:
        return [child for child in self.children() if isinstance(child, Stack)]

    def tie_weights(self) -> None:
        for stack in self.stacks() if self.config.tie_embeddings else ():
            if stack.causal or self.config.source_vocab_size is None:
                stack.embed.weight = self.lm_head.weight

    def init_weights(self) -> None:
        self.tie_weights()  # a model that was built on the meta device has lost it
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for stack in self.stacks():
            stack.init_weights()

    def run(self, tokens: Tensor, lengths, memory, cache, observe, head: bool) -> Tensor:
        """The decoder's last hidden states (B, T, C), or what the `head` makes of them, (B, T, V)."""
        if cache is not None and observe is not None:
            raise ValueError("observe needs the whole text in one call, without a cache")
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            hidden = self.decoder(tokens, lengths, memory, cache, observe)
            return self.lm_head(hidden) if head else hidden


class Decoder(LanguageModel):
    """A causal language model: GPT, Llama or Mistral by its configuration."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, decoder=Stack(config, config.n_layer, causal=True))

    def forward(
        self, tokens: Tensor, lengths: Tensor | None = None, cache: KVCache | None = None, observe: Observer = None
    ):
        """Token ids (B, T) -> logits (B, T, V). Arguments as in `features`."""
        return self.run(tokens, lengths, None, cache, observe, head=True)

    def features(
        self, tokens: Tensor, lengths: Tensor | None = None, cache: KVCache | None = None, observe: Observer = None
    ):
        """Token ids (B, T), rows right-padded -> the last hidden states (B, T, C).

        `lengths` (B,) counts each row's real tokens; what is computed at padding means nothing. With a `cache` the
        tokens follow those already in it, any number at a time, `lengths` counts the new ones (0 allowed) and no
        gradients are recorded. `observe(layer, kind, weights)` sees the maps (B, H, T, S) of every layer; they are laid
        out by position, so it takes no cache. Raises ValueError for both together, past the end of learned positions,
        and when the cache is full.
        """
        return self.run(tokens, lengths, None, cache, observe, head=False)


class EncoderDecoder(LanguageModel):
    """The Transformer of 2017: an encoder that sees its whole source, a decoder that also looks at it."""

    def __init__(self, config: ModelConfig):
        encoder = Stack(config, config.n_encoder_layer, causal=False)
        super().__init__(config, encoder=encoder, decoder=Stack(config, config.n_layer, causal=True, cross=True))

    def forward(self, source, target, source_lengths=None, target_lengths=None, observe: Observer = None):
        """Source ids (B, S), target ids (B, T), rows right-padded -> logits (B, T, V)."""
        return self.decode(target, self.encode(source, source_lengths, observe), target_lengths, observe=observe)

    def encode(self, source: Tensor, lengths: Tensor | None = None, observe: Observer = None) -> Memory:
        """Source ids (B, S), rows right-padded to `lengths` (B,) -> Memory(hidden (B, S, C), lengths)."""
        rename = observe and (lambda layer, kind, weights: observe(layer, "encoder", weights))
        return Memory(self.encoder(source, lengths, observe=rename), lengths)

    def decode(self, target, memory: Memory, lengths=None, cache: KVCache | None = None, observe: Observer = None):
        """Target ids (B, T) and an encoded source -> logits (B, T, V). Arguments as in `Decoder.features`."""
        return self.run(target, lengths, memory, cache, observe, head=True)

    def features(self, target, memory: Memory, lengths=None, cache: KVCache | None = None, observe: Observer = None):
        """As `decode`, but the last hidden states (B, T, C)."""
        return self.run(target, lengths, memory, cache, observe, head=False)


def build_model(config: ModelConfig) -> Decoder | EncoderDecoder:
    """A model of this shape with fresh weights. `vocab_size` must be given; what else is omitted is derived."""
    config = config.resolve()
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is needed to build a model")
    model = (Decoder if config.kind == "decoder" else EncoderDecoder)(config)
    model.init_weights()
    return model


@torch.no_grad()
def attention_of(
    model: Decoder | EncoderDecoder, target: Tensor, source: Tensor | None = None
) -> list[tuple[str, int, Tensor, Tensor]]:
    """What every head looks at while the model reads `target` (B, T), and an encoder-decoder its `source` (B, S).

    Of each layer, in order: its kind (encoder, self, cross), its number, the weights (B, H, T, S), and which keys a
    query may see, (T, S) bool.
    """
    maps = []

    def observe(layer: int, kind: str, weights: Tensor) -> None:
        n_query, n_key = weights.shape[2:]
        window = model.config.window if kind == "self" else None
        mask = Mask(n_query, n_key, causal=kind == "self", window=window, device=weights.device)
        maps.append((kind, layer, weights, mask.visible))

    if isinstance(model, EncoderDecoder):
        model.decode(target, model.encode(source, observe=observe), observe=observe)
    else:
        model.features(target, observe=observe)
    return maps
