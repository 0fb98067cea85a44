"""The mathematics of attention and of positions: pure functions on tensors, no parameters.

Shapes are written in these letters everywhere:
B batch, T query positions, S key positions, C model width (`d_model`), H query heads, G key/value heads, D head width,
V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from config.schema import RopeScaling


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query may see: a rule on absolute positions, rendered only when a kernel asks, once for all layers.

    A causal query at position p sees the keys at positions up to p; with a window of W those from p - W + 1 on, itself
    included. `query_pos` is (T,) or (B, T); `key_pos` is (S,) or (B, S) with -1 where there is no key. Left out, both
    count 0, 1, 2, ... and nothing is missing. Raises ValueError for a window without causal attention.
    """

    n_query: int
    n_key: int
    causal: bool = True
    window: int | None = None
    query_pos: Tensor | None = None
    key_pos: Tensor | None = None
    device: torch.device | str | None = None

    def __post_init__(self):
        if self.window is not None and not self.causal:
            raise ValueError(f"a window ({self.window}) needs causal attention")

    @property
    def is_full(self) -> bool:
        """Every query sees every key. Known without looking at a tensor, as is `is_plain_causal`."""
        return not self.causal and self.key_pos is None

    @property
    def is_plain_causal(self) -> bool:
        """Query i sees exactly keys 0 to i: the triangle that fused kernels know by a flag (F01: aligned, or never)."""
        return self.causal and self.is_aligned and (self.window is None or self.window >= self.n_key)

    @property
    def is_aligned(self) -> bool:
        """Query i and key i are at the same position, so that each query sees at least one key."""
        return self.query_pos is None and self.key_pos is None and self.n_query == self.n_key

    @property
    def is_band(self) -> bool:
        """Query i sees exactly keys i - W + 1 to i, and the last query not all of them: a band along the diagonal."""
        return self.causal and self.is_aligned and self.window is not None and self.window < self.n_key

    @property
    def visible(self) -> Tensor:
        """True where the query may see the key; (T, S), or (B, 1, T, S) when positions differ per row."""
        if "rendered" not in self.__dict__:  # what cached_property does, less a lock that torch.compile cannot trace
            self.__dict__["rendered"] = self._render()
        return self.__dict__["rendered"]

    def _render(self) -> Tensor:
        query = torch.arange(self.n_query, device=self.device) if self.query_pos is None else self.query_pos
        key = torch.arange(self.n_key, device=self.device) if self.key_pos is None else self.key_pos
        query, key = query.unsqueeze(-1), key.unsqueeze(-2)  # (…, T, 1), (…, 1, S)
        seen = (key >= 0).expand(*key.shape[:-2], self.n_query, self.n_key)
        if self.causal:
            seen = seen & (key <= query)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        return seen if seen.dim() == 2 else seen.unsqueeze(1)


def attention_weights(q: Tensor, k: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """softmax(QKᵀ / √d_k): how much each query takes from each key ("Attention Is All You Need", 3.2.1).

    q (B, H, T, D), k (B, G, S, D) -> (B, H, T, S), each row summing to one, or to zero where nothing may be seen.
    Query head h reads key head h // (H/G). `scale` replaces 1/√d_k.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scores = q @ k.transpose(-2, -1) * _scale(q, scale)  # (B, H, T, S)
    if mask.is_full:
        return scores.softmax(dim=-1)
    hidden = ~mask.visible
    # Filled again after the softmax: a row with nothing to see is 0/0 there, and becomes zeros, forward and backward.
    return scores.masked_fill(hidden, -math.inf).softmax(dim=-1).masked_fill(hidden, 0.0)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """softmax(QKᵀ / √d_k) V, the definition: q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D)."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, D)
    return attention_weights(q, k, mask, scale).to(v.dtype) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """The same through torch's fused kernels, which never hold all the weights in memory."""
    if q.shape[2] == 1 and k.shape[1] != q.shape[1]:
        # One query a row (decoding): the heads of a group are queries on shared keys, so nothing is copied.
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # (B, G, H/G, D)
        seen = None if mask.is_full else mask.visible
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen, scale=_scale(q, scale)).reshape(q.shape)
    plain = mask.is_full or mask.is_plain_causal
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if plain else mask.visible,
        is_causal=mask.is_plain_causal,
        scale=_scale(q, scale),
        **({"enable_gqa": True} if k.shape[1] != q.shape[1] else {}),  # a compiler's bool would be refused
    )


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """The same as two batched matrix products around a softmax, in the type of q; all weights are in memory at once.

    Training in bfloat16 on a CPU it is two to four times as fast as the fused kernel, which is slow backward there.
    """
    n_row, n_head, n_query, width = q.shape
    n_group = k.shape[1]
    queries = q.reshape(n_row * n_group, -1, width)  # (B·G, H/G·T, D): a group's heads share keys, nothing is copied
    keys, values = k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)  # (B·G, D, S), (B·G, S, D)
    hidden = torch.zeros(n_query, k.shape[2], dtype=torch.bool, device=q.device) if mask.is_full else ~mask.visible
    hidden = hidden.repeat(*[1] * (hidden.dim() - 2), n_head // n_group, 1)  # (…, H/G·T, S)
    if hidden.dim() == 4:
        hidden = hidden.expand(-1, n_group, -1, -1).flatten(0, 1)  # (B·G, H/G·T, S)
    with torch.autocast(q.device.type, enabled=False):  # it would compute the softmax in float32
        # Finite, so that a row with nothing to see is no 0/0; exp makes it exactly 0 beside anything that is seen.
        lowest = torch.finfo(q.dtype).min / 2  # half, or a negative score could make it infinite after all
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, lowest)
        scores = torch.baddbmm(bias.expand(len(queries), -1, -1), queries, keys, alpha=_scale(q, scale))
        weights = scores.softmax(dim=-1)
        if not mask.is_aligned:  # only then can there be such a row
            weights = weights.masked_fill(hidden, 0.0)
        return (weights @ values).view(q.shape)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """The same for a sliding window, of which it computes the band alone: time and memory grow with T·W, not with T·S.

    Queries are cut into N blocks of w = W // 2; each looks at the keys of its own block and of the two before it, which
    hold its window whatever its place in the block. Where the mask is not a band, `best_attention`.
    """
    if not mask.is_band:
        return best_attention(q, k, v, mask, scale)
    n_query, n_group, size = q.shape[2], k.shape[1], max(1, mask.window // 2)
    n_block = -(-n_query // size)
    missing = n_block * size - n_query  # the last block is filled up with zeros, after every real query

    def beside(x: Tensor) -> Tensor:  # (B, G, T, D) -> (B, G, N, 3w, D)
        x = F.pad(x, (0, 0, 2 * size, missing)).unflatten(2, (n_block + 2, size))
        return torch.cat([x[:, :, i : i + n_block] for i in range(3)], dim=3)

    start = torch.arange(0, n_block * size, size, device=q.device).unsqueeze(1)
    query_pos, key_pos = (start + torch.arange(first, size, device=q.device) for first in (0, -2 * size))
    hidden = ~Mask(size, 3 * size, True, mask.window, query_pos, key_pos).visible  # (N, 1, w, 3w)
    with torch.autocast(q.device.type, enabled=False):
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill(hidden, torch.finfo(q.dtype).min / 2)  # as in matmul_attention
        queries = F.pad(q * _scale(q, scale), (0, 0, 0, missing)).unflatten(2, (n_block, size))  # (B, H, N, w, D)
        queries = queries.unflatten(1, (n_group, -1)).transpose(2, 3).flatten(3, 4)  # (B, G, N, H/G·w, D)
        scores = (queries @ beside(k).transpose(-2, -1)).unflatten(3, (-1, size))  # (B, G, N, H/G, w, 3w)
        weights = (scores + bias).softmax(dim=-1).flatten(3, 4)
        heads = (weights @ beside(v)).unflatten(3, (-1, size)).transpose(2, 3)  # (B, G, H/G, N, w, D)
        return heads.flatten(1, 2).flatten(2, 3)[:, :, :n_query]


def best_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """The kernel that is fastest here. On a CPU: blocked where 256 keys or more are four windows, or two and 256 more;
    matmul to train in bfloat16 while its weights are few. Else, and on other devices: fused."""
    if q.device.type == "cpu" and mask.is_band:
        twice = 2 * mask.window
        if mask.n_key >= max(256, twice + min(twice, 256)):
            return windowed_attention(q, k, v, mask, scale)
    training = q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu" and k.shape[2] <= 512
    return (matmul_attention if training else fused_attention)(q, k, v, mask, scale)


KERNELS = {
    "auto": best_attention,
    "reference": scaled_dot_product_attention,
    "fused": fused_attention,
    "matmul": matmul_attention,
    "blocked": windowed_attention,
}


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def sinusoidal_encoding(pos: Tensor, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) ("Attention Is All You Need", 3.5).

    pos (…, T) -> (…, T, d_model), float32, sine and cosine alternating. `d_model` is even.
    """
    i = torch.arange(0, d_model, 2, device=pos.device, dtype=torch.float32)
    angle = pos.unsqueeze(-1).float() * 10000.0 ** (-i / d_model)  # (…, T, d_model/2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def rotary_angles(pos: Tensor, head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> Tensor:
    """The angle by which each pair of a head's coordinates turns at each position (RoFormer, arXiv 2104.09864).

    pos (…, T) -> (…, T, D/2) radians, float32 whatever the model is in: bfloat16 cannot tell position 257 from 256.
    """
    return pos.unsqueeze(-1).float() * _rotary_frequencies(head_dim, theta, scaling or RopeScaling(), pos.device)


def _rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """Radians per position of each of the D/2 pairs, fastest first."""
    if scaling.kind == "ntk":
        # A larger base leaves the fastest pair alone and slows the slowest by exactly `factor`.
        theta = theta * scaling.factor ** (head_dim / max(head_dim - 2, 1))
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = theta**-exponent  # (D/2,)
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = frequency * scaling.original_max_seq_len / (2 * math.pi)  # full turns within the original context
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    elif scaling.kind == "yarn":
        # Linear in the index of the pair, not in its frequency, between the two bounds ("YaRN", 3.2).
        low, high = (
            head_dim * math.log(scaling.original_max_seq_len / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (scaling.beta_fast, scaling.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
        pair = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        keep = 1 - ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    else:
        return frequency
    return frequency * keep + frequency / scaling.factor * (1 - keep)


def rotary_temperature(scaling: RopeScaling) -> float:
    """What YaRN multiplies the attention scores by: queries and keys each by 0.1 ln(factor) + 1 ("YaRN", 3.4)."""
    return (0.1 * math.log(scaling.factor) + 1) ** 2 if scaling.kind == "yarn" else 1.0


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turns coordinates i and i + D/2 of every head by angle i (half-split, Hugging Face's layout).

    x (B, H, T, D), angles (T, D/2) or (B, T, D/2) -> (B, H, T, D), rotated in float32 or better, in x's type.
    """
    return turn(x, rotary_turns(angles))


def rotary_turns(angles: Tensor) -> tuple[Tensor, Tensor]:
    """What `turn` multiplies by, the same in all layers: (cos, cos) and (-sin, sin) of angles (T, D/2) or (B, T, D/2),
    (T, D) or (B, 1, T, D) each."""
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """`apply_rotary` by the `rotary_turns` of its angles."""
    cos, sin = turns
    other = x.roll(x.shape[-1] // 2, dims=-1)  # of each coordinate the one that it turns with
    return torch.addcmul(x * cos, other, sin).to(x.dtype)
