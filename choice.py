"""The choice of the next token, from logits (N, V) in float64: pure functions, which `choose` composes.

A row's choice is the same in any company, to the last bit: softmax, log_softmax and cumsum go along each row for itself
(`sum` does not: it divides a long row among threads when that is alone).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 16  # how many of the likeliest ids are looked at first; changes nothing but the time


@dataclass(frozen=True)
class Settings:
    """In the order in which `choose` applies them. ValueError for one that is out of range."""

    repetition_penalty: float = 1.0  # 1: off
    vocab_size: int | None = None  # ids from here on are banned
    temperature: float = 0.0  # 0: the likeliest, and nothing of what follows
    top_k: int | None = None  # None, 0 or all there are: off
    top_p: float | None = None  # None, 1: off
    min_p: float | None = None  # None, 0: off

    def __post_init__(self):
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty} must be between 0.01 and 100 (1: off)")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size = {self.vocab_size} must be 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature} must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k} must be 0 (off) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} must be above 0 and at most 1 (off)")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p} must be between 0 (off) and 1")


def choose(
    logits: Tensor, settings: Settings, uniforms: Tensor | None = None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's id (N,) and its log-probability (N,) from logits (N, V), -inf allowed but not in all of a row.

    The order: repetition penalty on the ids of `seen` (N, S); ban; with temperature 0 the likeliest, of equals the
    smallest id; else temperature, top-k, top-p, min-p, and a draw at `uniforms` (N,) in [0, 1), never of what has
    probability zero. The log-probability is the model's own: at temperature 1, nothing penalized, banned or filtered.
    """
    choices = logits
    if settings.repetition_penalty != 1:
        choices = penalize_repetition(choices, seen, settings.repetition_penalty)
    choices = choices[:, : settings.vocab_size]
    if settings.temperature == 0:
        ids = choices.argmax(-1)
    else:
        # The likeliest becomes 0 before the division, which may then end at -inf, never at NaN.
        probabilities = ((choices - choices.amax(-1, keepdim=True)) / settings.temperature).softmax(-1)
        ids = draw_filtered(choices, probabilities, settings, uniforms)
    return ids, logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Makes the ids that occurred, `seen` (N, S), repeats allowed, less likely: divides their logits where positive,
    multiplies them where negative (CTRL, arXiv 1909.05858)."""
    old = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(old > 0, old / penalty, old * penalty))


def draw_filtered(logits: Tensor, probabilities: Tensor, settings: Settings, uniforms: Tensor) -> Tensor:
    """Ids (N,) drawn from what top-k, top-p and min-p leave of probabilities (N, V) in the order of logits (N, V)."""
    n = logits.shape[1]
    top_k = settings.top_k if settings.top_k and settings.top_k < n else None
    top_p = settings.top_p if settings.top_p and settings.top_p < 1 else None
    if top_k or top_p:
        return _draw_likeliest(logits, probabilities, top_k, top_p, settings.min_p, uniforms, FIRST + (top_k or 0))
    return draw(keep_min_p(probabilities, settings.min_p), uniforms)


def _draw_likeliest(logits, probabilities, top_k, top_p, min_p, uniforms, n: int) -> Tensor:
    """`draw_filtered` without sorting all of a row, where the n likeliest are enough.

    From the likeliest on, of equals the smaller id first, top-k and top-p keep the first so many. If these are among
    the n, the others need not be known; the rows in which they are not are drawn again with more.
    """
    if partly := 8 * n < logits.shape[1]:  # beyond, to sort all takes no longer
        ids = logits.topk(n, sorted=False).indices.sort(-1).values
    else:
        ids = torch.arange(logits.shape[1]).expand_as(logits)
    p = probabilities.gather(1, ids)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    mass = p.gather(1, order).cumsum(-1)
    n_top = count_top_k(values, top_k) if top_k else None
    n_kept = count_top_p(mass, top_p, n_top) if top_p else n_top
    # Back in the order of ids, in which a draw does not depend on what was left out.
    kept = torch.zeros_like(p).scatter(1, order, (torch.arange(p.shape[1]) < n_kept.unsqueeze(1)).to(p.dtype))
    place = draw(keep_min_p(kept.mul_(p), min_p), uniforms)
    drawn = ids.gather(1, place.unsqueeze(1)).squeeze(1)
    if partly:
        n_sure = (values > values[:, -1:]).sum(-1)  # of those equal to the last, topk may have left out any
        short = (n_top if top_k else n_kept) > n_sure
        if short.any():
            rows = logits[short], probabilities[short]
            drawn[short] = _draw_likeliest(*rows, top_k, top_p, min_p, uniforms[short], 16 * n)
    return drawn


def count_top_k(values: Tensor, k: int) -> Tensor:
    """How many the k likeliest are, and those equal to the k-th: of logits (N, n) in descending order, (N,)."""
    return (values >= values[:, k - 1 : k]).sum(-1)


def count_top_p(mass: Tensor, p: float, n: Tensor | None = None) -> Tensor:
    """How many the nucleus has, the fewest of the likeliest with a share p of all, or of the first n (N,): (N,).

    `mass` (N, n) is the probability of the first, the first two, ...; never none (arXiv 1904.09751).
    """
    whole = 1.0 if n is None else mass.gather(1, n.unsqueeze(1) - 1)
    return 1 + (mass < (p - 1e-6) * whole).sum(-1)  # what reaches p to the last digit of a float32 is enough


def keep_min_p(probabilities: Tensor, p: float | None) -> Tensor:
    """Zero for whatever is less than p times as likely as the likeliest (arXiv 2407.01082)."""
    return probabilities * (probabilities >= p * probabilities.amax(-1, keepdim=True)) if p else probabilities


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """A place in each row (N,), as likely as its weight (N, n) says, by inverting the distribution function at
    `uniforms` (N,) in [0, 1)."""
    distribution = weights.cumsum(-1)
    height = uniforms.unsqueeze(1) * distribution[:, -1:]  # below the top, where only impossible places are left
    return torch.searchsorted(distribution, height, right=True).squeeze(1)
