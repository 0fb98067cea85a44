"""Generate ids from a model, with the KV cache: `generate`, `stream` as they come, and `beam_search`.

Shape letters: see attention.py; here N counts the rows that are still being written.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cache import KVCache, Memory
from choice import Settings, choose
from linear import pack, using
from model import Decoder, EncoderDecoder

PREFILL = 512  # tokens of a prompt read at a time, which bounds the memory a long one takes
WORTH_PACKING = 16  # tokens: so many save the time that it takes to pack the weights
LITTLE_WORK = 2**22  # numbers to read, of weights for each token and of keys and values
ROOM = 256  # tokens beyond the prompts for which a cache has room at first; it doubles when that is full


class _Reader:
    """Feeds tokens to the model, new ones only with a cache, everything again without, and returns the last logits."""

    def __init__(self, model, prompts: list[list[int]], memory: Memory | None, capacity: int, use_cache: bool):
        self.model, self.memory = model, memory
        self.n_weights = sum(parameter.numel() for parameter in model.parameters())
        worth = self.n_weights > LITTLE_WORK and capacity - min(map(len, prompts)) >= WORTH_PACKING
        self.packs = pack(model) if worth else {}
        weight = model.lm_head.weight
        self.device = weight.device
        self.texts = [[] for _ in prompts]
        self.cache, self.capacity = None, capacity
        if use_cache:
            at_first = min(capacity, max(map(len, prompts)) + ROOM)
            self.cache = KVCache.allocate(model.config, len(prompts), at_first, weight.dtype, weight.device)

    def read(self, new: list[list[int]]) -> Tensor:
        """Each row's new ids -> the logits (N, V) after the last of them, in float64 on the CPU."""
        if self.model.training:  # another stream on this model has ended since
            self.model.eval()
        if self.cache is None:
            self.texts = new = [text + ids for text, ids in zip(self.texts, new, strict=True)]
        elif max(old + len(ids) for old, ids in zip(self.cache.row_lengths, new, strict=True)) > self.cache.capacity:
            self.cache.reserve(min(2 * self.cache.capacity, self.capacity))
        width = PREFILL if self.cache is not None else max(map(len, new))
        last = [None] * len(new)
        # Between two of these calls the model is its owner's, and may learn.
        with using(self.packs), self._threads(new):
            for begin in range(0, max(map(len, new)), width):
                pieces = [ids[begin : begin + width] for ids in new]
                hidden = self._features(pieces)
                for row, piece in enumerate(pieces):
                    if piece and begin + len(piece) == len(new[row]):
                        last[row] = hidden[row, len(piece) - 1]
            logits = self.model.lm_head(torch.stack(last)).cpu().double()
        if not logits.sum().isfinite():  # float64, so that no finite logits add up to infinity
            raise ValueError("the model's logits are not finite: its weights are damaged or its training diverged")
        return logits

    @contextmanager
    def _threads(self, new: list[list[int]]) -> Iterator[None]:
        """One thread for little work: others would take longer to wake up, far longer on a busy machine."""
        seen = 0
        if self.cache is not None:
            seen = sum(self.cache.row_lengths) * self.cache.keys[0][0, :, 0].numel() * 2 * len(self.cache.keys)
        if sum(map(len, new)) * self.n_weights + seen > LITTLE_WORK:  # another number makes oneDNN prepare anew
            yield
            return
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(n_threads)

    def _features(self, pieces: list[list[int]]) -> Tensor:
        lengths = [len(piece) for piece in pieces]
        longest = max(lengths)
        tokens = torch.tensor([piece + [0] * (longest - len(piece)) for piece in pieces], device=self.device)
        ragged = None if min(lengths) == longest else torch.tensor(lengths, device=self.device)
        if self.memory is None:
            return self.model.features(tokens, ragged, cache=self.cache)
        return self.model.features(tokens, self.memory, ragged, cache=self.cache)

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows, in this order, repeats allowed."""
        if rows == list(range(len(self.texts))):
            return
        self.texts = [self.texts[row] for row in rows]
        if self.cache is not None:
            self.cache = self.cache.select(rows)
            self.memory = self.cache.memory
        elif self.memory is not None:
            self.memory = self.memory.select(rows)


Event = tuple[int, int, float, str | None]
Stop = Sequence[Sequence[int]] | Callable[[list[int]], bool]


@torch.no_grad()
def stream(
    model: Decoder | EncoderDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Stop = (),
    end_id: int | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[Event]:
    """Yields (row, id, log-probability, reason) as tokens come; reason is None until a row's last token.

    `prompts` are lists of ids (for an encoder-decoder the sources; the target starts with `end_id`); an empty one
    starts with `end_id`. `choice.choose` says how ids are chosen, from `temperature` to `repetition_penalty`; ids from
    `vocab_size` on never are. Row i draws from its own generator, seeded seed + i; equal prompts are read once. The
    log-probability is that of the model's own distribution, at temperature 1, nothing filtered.
    Reasons: end (`end_id`), stop (the row's new ids end with a sequence of `stop`, or `stop` says so of them), length
    (`max_new_tokens`, or the last of learned positions: a prompt of n ids yields at most max_seq_len - n + 1).
    ValueError for an empty prompt without `end_id`, one longer than learned positions, and settings out of range.
    """
    settings = Settings(repetition_penalty, vocab_size, temperature, top_k, top_p, min_p)
    with _evaluation(model):
        different = list(dict.fromkeys(map(tuple, prompts)))
        texts, limits, reader = _begin(model, different, end_id, max_new_tokens, use_cache)
        if reader is None:
            return
        # The rows of equal prompts part after what they share was read.
        places = {prompt: place for place, prompt in enumerate(different)}
        feed, shared = texts, [places[tuple(prompt)] for prompt in prompts]
        texts, limits = ([each[place] for place in shared] for each in (texts, limits))
        generators = [torch.Generator().manual_seed(seed + row) for row in range(len(texts))]
        longest, seen = max(map(len, texts)), None
        if repetition_penalty != 1:  # rows of one length: to have seen an id twice changes nothing
            seen = torch.tensor([text + text[:1] * (longest - len(text)) for text in texts])
        rows, new = list(range(len(texts))), [[] for _ in texts]
        while rows:
            logits = reader.read(feed)
            if shared:
                reader.select(shared)
                logits, shared = logits[shared], None
            uniforms = None
            if temperature > 0:
                uniforms = torch.cat([torch.rand(1, generator=generators[row], dtype=torch.float64) for row in rows])
            ids, log_probabilities = choose(logits, settings, uniforms, seen)
            chosen, going = zip(rows, ids.tolist(), log_probabilities.tolist(), strict=True), []
            for place, (row, id, log_probability) in enumerate(chosen):
                new[row].append(id)
                reason = _reason(new[row], stop, end_id, limits[row])
                if reason is None:
                    going.append(place)
                yield row, id, log_probability, reason
            if going:
                reader.select(going)
                seen = None if seen is None else torch.cat((seen, ids.unsqueeze(1)), dim=1)[going]
            rows = [rows[place] for place in going]
            feed = [new[row][-1:] for row in rows]


def generate(model: Decoder | EncoderDecoder, prompts: Sequence[Sequence[int]], **options) -> list[list[int]]:
    """Each row's new ids, without the stop sequence and the end. Options and errors are those of `stream`.

    With a function as `stop` the ids it stopped at are kept: it alone knows which of them belong to the stop.
    """
    rows = [[] for _ in prompts]
    stop = options.get("stop", ())
    for row, id, _, reason in stream(model, prompts, **options):
        if reason != "end":
            rows[row].append(id)
        if reason == "stop" and not callable(stop):
            del rows[row][-max(len(s) for s in stop if rows[row][-len(s) :] == list(s)) :]
    return rows


class Hypothesis(NamedTuple):
    ids: list[int]  # new ids, without the end
    log_probabilities: list[float]  # of each id, the end included: the model's own distribution at temperature 1
    score: float  # sum of log-probabilities / length penalty
    reason: str  # end | length


@torch.no_grad()
def beam_search(
    model: Decoder | EncoderDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 0.6,
    end_id: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> list[list[Hypothesis]]:
    """Each prompt's best `beams` continuations found, best first: by score those that end with `end_id`, then by score
    those that the limit cut off (a loop that never ends must not win).

    The score of y is log p(y) / ((5 + |y|) / 6)^length_penalty, where |y| counts the end (arXiv 1609.08144, eq. 14);
    0.6 as in "Attention Is All You Need", 0 for the plain sum. At each step, of the `beams` likeliest continuations
    those that end are finished, and the `beams` likeliest of all others go on. One of these places is the greedy
    path's, however unlikely it has become, and closes when that path ends: in the order above the best is never below
    greedy's, and with one beam it is greedy's. A prompt is done when it has `beams` finished hypotheses that no live
    one can pass, even if all that it adds were certain and its length the limit: stopping changes nothing. `end_id`,
    `vocab_size`, the start, the limit and errors are as in `stream`.
    """
    if beams < 1:
        raise ValueError(f"beams = {beams} must be 1 or more")
    if not 0 <= length_penalty <= 10:
        raise ValueError(f"length_penalty = {length_penalty} must be between 0 (the plain sum) and 10")
    with _evaluation(model):
        feed, limits, reader = _begin(model, prompts, end_id, max_new_tokens, use_cache)
        if reader is None:
            return [[Hypothesis([], [], 0.0, "length")] for _ in limits]
        searches = going = [_Search(beams, limit, length_penalty, end_id) for limit in limits]
        while going:
            logits = reader.read(feed)
            # Of one hypothesis no more can be kept than `beams` that go on and one that ends.
            ids = _likeliest(logits[:, :vocab_size], beams + 1)
            choices = zip(ids.tolist(), logits.log_softmax(-1).gather(1, ids).tolist(), strict=True)
            rows, n_read = [], 0
            for search in going:
                n_live = len(search.live)
                search.grow([list(zip(*next(choices), strict=True)) for _ in range(n_live)])
                rows += [n_read + path.parent for path in search.live]
                n_read += n_live
            going = [search for search in going if search.live]
            feed = [path.ids[-1:] for search in going for path in search.live]
            if going:
                reader.select(rows)
    return [search.found for search in searches]


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """The k likeliest ids of each row (N, V), best first, of equals the smaller, as argmax has it: (N, k).

    To sort all of a row would do as well, and take ten times as long.
    """
    k = min(k, logits.shape[1])
    kth = logits.topk(k).values[:, -1:]
    n = int((logits >= kth).sum(-1).max())  # with those that equal the k-th
    ids = logits.topk(n).indices.sort(-1).values
    order = logits.gather(1, ids).sort(dim=-1, stable=True, descending=True).indices[:, :k]
    return ids.gather(1, order)


class _Path(NamedTuple):
    log_p: float
    ids: list[int]
    log_probabilities: list[float]
    parent: int  # its place among the live paths of the step before


class _Search:
    """The search of one prompt: the paths that still grow, the greedy one first while it does, and the best found."""

    def __init__(self, beams: int, limit: int, length_penalty: float, end_id: int | None):
        self.beams, self.limit, self.length_penalty, self.end_id = beams, limit, length_penalty, end_id
        self.live, self.greedy, self.found = [_Path(0.0, [], [], 0)], True, []

    def grow(self, choices: list[list[tuple[int, float]]]) -> None:
        """One step with the likeliest ids of each live path and their log-probabilities."""
        grown = [
            _Path(path.log_p + log_p, [*path.ids, id], [*path.log_probabilities, log_p], parent)
            for parent, path in enumerate(self.live)
            for id, log_p in choices[parent]
        ]
        greedy = grown[: int(self.greedy)]
        ranked = greedy + sorted(grown[len(greedy) :], key=lambda path: path.log_p, reverse=True)
        others = self.beams - 1
        self.keep([path for path in ranked[: len(greedy) + others] if path.ids[-1] == self.end_id], "end")
        self.greedy = self.greedy and ranked[0].ids[-1] != self.end_id
        self.live = [path for path in ranked if path.ids[-1] != self.end_id][: int(self.greedy) + others]
        if self.live and len(self.live[0].ids) == self.limit:
            self.keep(self.live, "length")
            self.live = []
        elif len(self.found) == self.beams:
            within_reach = max((path.log_p for path in self.live), default=-math.inf) / self.penalty(self.limit)
            self.live = self.live if within_reach > self.found[-1].score else []

    def keep(self, paths: list[_Path], reason: str) -> None:
        for log_p, ids, log_probabilities, _ in paths:
            score = log_p / self.penalty(len(ids))
            self.found.append(Hypothesis(ids[:-1] if reason == "end" else ids, log_probabilities, score, reason))
        self.found = sorted(self.found, key=lambda one: (one.reason == "end", one.score), reverse=True)[: self.beams]

    def penalty(self, length: int) -> float:
        return ((5 + length) / 6) ** self.length_penalty


@contextmanager
def _evaluation(model) -> Iterator[None]:
    """Without dropout; afterwards the model is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _begin(model, prompts, end_id, max_new_tokens, use_cache) -> tuple[list[list[int]], list[int], _Reader | None]:
    """What the decoder reads first, how many tokens each row may get, and a reader, if there is any token to come."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} must be 0 or more")
    texts, memory = _starts(model, prompts, end_id)
    limits = [min(max_new_tokens, _room(model, len(text))) for text in texts]
    if max(limits, default=0) == 0:
        return texts, limits, None
    capacity = max(len(text) + limit - 1 for text, limit in zip(texts, limits, strict=True))
    return texts, limits, _Reader(model, texts, memory, capacity, use_cache)


def _starts(model, prompts, end_id: int | None) -> tuple[list[list[int]], Memory | None]:
    """What the decoder reads first, and the encoded sources of an encoder-decoder."""
    prompts = [list(prompt) or ([] if end_id is None else [end_id]) for prompt in prompts]
    vocab_size = model.config.source_vocab_size or model.config.vocab_size
    if strange := [id for prompt in prompts for id in prompt if not 0 <= id < vocab_size]:
        raise ValueError(f"id {strange[0]} is not one of the model's {vocab_size}")
    if not all(prompts) or (end_id is None and isinstance(model, EncoderDecoder)):
        raise ValueError("an empty prompt, or the target of an encoder-decoder, needs an end_id to start from")
    for prompt in prompts:
        if _room(model, len(prompt)) < 1:
            limit = model.config.max_seq_len
            raise ValueError(f"the prompt has {len(prompt)} tokens, learned positions end at max_seq_len = {limit}")
    if isinstance(model, Decoder) or not prompts:
        return prompts, None
    lengths, device = [len(prompt) for prompt in prompts], model.lm_head.weight.device
    source = torch.tensor([p + [0] * (max(lengths) - len(p)) for p in prompts], device=device)
    ragged = None if min(lengths) == max(lengths) else torch.tensor(lengths, device=device)
    return [[end_id] for _ in prompts], model.encode(source, ragged)


def _room(model, n_prompt: int) -> float:
    """How many tokens can follow a prompt; the last one is never read, so it needs no position."""
    learned = model.config.position == "learned"
    return model.config.max_seq_len - n_prompt + 1 if learned else math.inf


def _reason(new: list[int], stop: Stop, end_id: int | None, limit: float) -> str | None:
    if new[-1] == end_id:
        return "end"
    if stop(new) if callable(stop) else any(new[-len(s) :] == list(s) for s in stop):
        return "stop"
    return "length" if len(new) >= limit else None
