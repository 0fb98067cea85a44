"""The relations annotated in the stories as places among tokens, and what the heads of a model make of them."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema import Config, DataConfig
from data.grammar import Draw, Slot, Story, render
from data.loader import Batches
from data.stories import draws, grammar, pronouns, sentences
from experiments.ensemble import failing
from experiments.lab import OPTIM, fit, fresh_model, kept, key_of, machine, small, stories
from model import attention_of

CORPUS = DataConfig(bpe_vocab_size=4096, max_tokens=2_000_000)  # words are few tokens
STEPS = (0, 15, 30, 60, 125, 250, 500)  # of training, at which the model is kept
AGREES = ("verb that agrees", "pronoun that agrees")
DECISIVE = (*AGREES, "noun after its modifier")
RELATIONS = DECISIVE + tuple(
    f"{kind}, {tongue}" for kind in ("verb", "pronoun", "modifier") for tongue in ("English", "Korean")
)
AGREEING = ("was", "is", "it")  # forms of a word of the story that its number decides
ROWS = 32  # stories at a time


# ---------------------------------------------------------------- the model


def setting(seed: int, **model) -> Config:
    config = small(STEPS[-1], seed, max_seq_len=144, tie_embeddings=False, **model)
    return config.model_copy(update={"data": CORPUS, "optim": OPTIM.model_copy(update={"learning_rate": 1e-2})})


@cache
def course(seed: int, n_stories: int | None = None) -> dict[int, nn.Module]:
    """The model at each of `STEPS`, trained on all stories or on the first `n_stories` again and again; kept in the
    cache."""
    config = setting(seed)
    models = nn.ModuleDict({str(step): fresh_model(config) for step in STEPS})

    def train() -> None:
        model, batch = fresh_model(config), first_stories(config, n_stories)

        def watched(step: int) -> tuple[Tensor, Tensor]:
            if step in STEPS:
                models[str(step)].load_state_dict(model.state_dict())
            return batch(step)

        fit(model, watched, STEPS[-1], config.optim)
        models[str(STEPS[-1])].load_state_dict(model.state_dict())

    kept(models, f"{key_of(config, first_stories)}-{n_stories or 'all'}", train)
    return {step: models[str(step)].eval() for step in STEPS}


def first_stories(config: Config, n_stories: int | None) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of all stories of the training text, or of its first."""
    corpus = stories(config.data)
    tokens, end_id = corpus.train.tokens, corpus.tokenizer.end_id
    if n_stories is not None:
        tokens = tokens[: np.flatnonzero(tokens == end_id)[n_stories - 1] + 1]
    return Batches(tokens, config.model.max_seq_len, config.train.batch_size, config.train.seed, end_id).batch


def silenced(model: nn.Module, head: int) -> AbstractContextManager[None]:
    """Without what one head writes; heads are counted through all layers."""
    layer, head = divmod(head, model.config.n_head)
    return failing(model.decoder.blocks[layer].attention, [head], "silent")


# ---------------------------------------------------------------- the places


class Site(NamedTuple):
    """A word that has to do with another word of the story. `DECISIVE`: the other one decides it, and `row`, the token
    that looks, is that before the word, which must predict it: a verb and its subject, "it" or "them" and its noun, a
    noun after its modifier and where it stood before. Else `row` is the word as it is read, and looks back: a verb at
    its subject, a pronoun at its noun, a noun at its modifier."""

    relation: str
    row: int
    word: range
    partner: list[int]  # the tokens of all its earlier mentions
    other: list[int]  # those of another thing: the one whose last mention is nearest to the partner's
    agreeing: list[int]  # those of earlier English words whose form the partner decided: was, is, it or plurals


class Told(NamedTuple):
    """A story, its tokens as training reads them (the end of the text before it, then its own), and its relations."""

    story: Story
    ids: list[int]
    sites: list[Site]


@cache
def tales(split: str, n: int, seed: int = 1, decisive: bool = False) -> tuple[Told, ...]:
    """The first stories of a split, perhaps of those alone that have a decisive relation. Training reads "train" of
    seed 0; what seed 1 tells is new to it."""
    told = map(tell, drawn(split, seed))
    return tuple(islice((t for t in told if not decisive or {site.relation for site in t.sites} & {*DECISIVE}), n))


def drawn(split: str, seed: int) -> Iterator[Story]:
    return (story for found, story in draws(seed, CORPUS.val_fraction) if found == split)


def tell(story: Story) -> Told:
    tokenizer = stories(CORPUS).tokenizer
    ids = [tokenizer.end_id, *tokenizer.encode(story.text)]
    ends = np.cumsum([len(tokenizer.piece(token)) for token in ids])
    lines = [f"{line}\n" for line in story.text.split("\n")]

    def tokens(language: str, sentence: int, start: int, end: int) -> range:
        number = 2 * sentence + (language == "korean")
        first, last = (len(("".join(lines[:number]) + lines[number][:cut]).encode()) for cut in (start, end))
        return range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1)

    return Told(story, ids, [site for language in ("english", "korean") for site in _sites(story, language, tokens)])


def _sites(story: Story, language: str, tokens: Callable[..., range]) -> Iterator[Site]:
    slots = dict(_slots(story, language))
    named: dict[str, list[range]] = {}  # by role
    agreeing: dict[str, list[range]] = {}
    for place, slot in slots.items():
        if slot.kind in (None, "modifier"):
            named.setdefault(slot.role, []).append(tokens(language, *place))
        elif slot.role and slot.form in AGREEING:
            agreeing.setdefault(slot.role, []).append(tokens(language, *place))

    def site(relation: str, word: range, row: int, role: str, also: str | None) -> Iterator[Site]:
        before = {name: [key for keys in found if keys[-1] < word[0] for key in keys] for name, found in named.items()}
        partner = before.pop(role, [])
        before.pop(also, None)
        others = [keys for keys in before.values() if keys]
        if partner and others and partner[-1] < row:
            forms = [key for keys in agreeing.get(role, ()) if keys[-1] < word[0] for key in keys]
            yield Site(relation, row, word, partner, min(others, key=lambda keys: abs(keys[-1] - partner[-1])), forms)

    for span in (span for span in story.spans if span.language == language):
        places = [(span.sentence, span.start, span.end), (span.target_sentence, span.target_start, span.target_end)]
        slot, target = (slots.get(place) for place in places)
        word = tokens(language, *max(places))
        relation = f"{span.kind}, {language.capitalize()}"
        if span.kind == "modifier":
            yield from site(relation, word, word[-1], slot.role, target.role)
            if language == "english":
                yield from site(DECISIVE[2], word, word[0] - 1, target.role, slot.role)
        elif target and target.kind is None and places[1] < places[0]:
            if language == "english" and slot.role and slot.form in AGREEING:
                relation = f"{span.kind} that agrees"
            row = word[0] - 1 if relation in DECISIVE else word[-1]
            yield from site(relation, word, row, target.role, None)


def _slots(story: Story, language: str) -> Iterator[tuple[tuple[int, int, int], Slot]]:
    """The slots of a story and where they stand: sentence, start and end."""
    for number, sentence in enumerate(story.sentences):
        offset = 0
        for part in getattr(sentence, language):
            if isinstance(part, Slot):
                role, form = part.role, part.form
                text, start, end = story.cast[role].forms[form] if role else (part.text, 0, len(part.text))
                yield (number, offset + start, offset + end), part
                offset += len(text)
            else:
                offset += len(part)


# ---------------------------------------------------------------- what heads look at


@torch.no_grad()
def look(model: nn.Module, told: Sequence[Told]) -> dict[str, Tensor]:
    """For each relation and head the mean attention to the partner, to the same distances elsewhere, to the other word
    and to what agrees with the partner, (4, heads); and the "entropy" of each head (`evenness`)."""
    found = {relation: [] for relation in RELATIONS}
    entropies = []
    for tale in told:
        maps = attention_of(model, torch.tensor([tale.ids], device=machine().device))
        weights = torch.cat([weights[0] for *_, weights, _ in maps]).double().cpu()  # (heads, T, T)
        entropies.append(evenness(weights))
        for relation, row, _, *keys in tale.sites:
            partner, other, agreeing = (weights[:, row, tokens].sum(-1) for tokens in keys)
            distance = sum(elsewhere(weights, row, key) for key in keys[0])
            found[relation].append(torch.stack((partner, distance, other, agreeing)))
    means = {relation: torch.stack(rows).mean(0) for relation, rows in found.items() if rows}
    return means | {"entropy": torch.stack(entropies).mean(0)}


def elsewhere(weights: Tensor, row: int, key: int) -> Tensor:
    """What each head gives, on the average of the text's other rows, to the key as far away as this: (heads,)."""
    diagonal = weights.diagonal(key - row, 1, 2)
    return (diagonal.sum(-1) - weights[:, row, key]) / max(diagonal.shape[-1] - 1, 1)


def evenness(weights: Tensor, first: int = 8) -> Tensor:
    """The entropy of the rows from `first` on, each as a share of the highest that its row allows: (heads,)."""
    visible = torch.arange(first, weights.shape[1], dtype=torch.float64) + 1
    return (torch.special.entr(weights[:, first:]).sum(-1) / visible.log()).mean(-1)


def excess(masses: Tensor) -> Tensor:
    """What the partner gets above both controls: (…, 4, heads) -> (…, heads)."""
    return masses[..., 0, :] - masses[..., 1:3, :].amax(-2)


@cache
def heads(seed: int) -> dict[str, int]:
    """The head of each relation in the trained model, found on stories that are used for nothing else."""
    seen = look(course(seed)[STEPS[-1]], samples()[0])
    return {relation: int(excess(seen[relation]).argmax()) for relation in RELATIONS}


def samples() -> tuple[tuple[Told, ...], tuple[Told, ...]]:
    """New stories to find heads on, and others to measure them on: half have a decisive relation."""
    some, any_ = tales("train", 400, 1, decisive=True), tales("train", 400, 2)
    return some[:200] + any_[:200], some[200:] + any_[200:]


# ---------------------------------------------------------------- what tokens cost


@torch.no_grad()
def nats(model: nn.Module, told: Sequence[Told], places: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """What the tokens of each story cost, and its end: number i is the cost of the token after `ids[i]`; of some
    `places` alone, if they are given, and NaN elsewhere."""
    end_id, found = stories(CORPUS).tokenizer.end_id, []
    for first in range(0, len(told), ROWS):
        texts = [[*tale.ids, end_id] for tale in told[first : first + ROWS]]
        longest = max(map(len, texts))
        tokens = torch.tensor([ids + [end_id] * (longest - len(ids)) for ids in texts], device=machine().device)
        wanted = places[first : first + ROWS] if places else [range(len(ids) - 1) for ids in texts]
        rows = torch.tensor([row for row, numbers in enumerate(wanted) for _ in numbers])
        columns = torch.tensor([column for numbers in wanted for column in numbers])
        logits = model.lm_head(model.features(tokens[:, :-1])[rows, columns])
        losses = torch.full(tokens[:, 1:].shape, torch.nan, dtype=torch.float64)
        losses[rows, columns] = F.cross_entropy(logits, tokens[rows, columns + 1], reduction="none").double().cpu()
        found += [row[: len(ids) - 1] for row, ids in zip(losses, texts, strict=True)]
    return found


def cost(model: nn.Module, told: Sequence[Told], head: int | None = None) -> dict[str, float]:
    """Nats per token of each relation, of its words and of the token after each; perhaps without a head."""
    graded = {relation: [] for relation in RELATIONS}
    places = [[range(site.word[0] - 1, site.word[-1] + 1) for site in tale.sites] for tale in told]
    with nullcontext() if head is None else silenced(model, head):
        losses = nats(model, told, [sorted({place for span in spans for place in span}) for spans in places])
    for tale, spans, found in zip(told, places, losses, strict=True):
        for site, span in zip(tale.sites, spans, strict=True):
            graded[site.relation].append(found[span.start : span.stop])
    return {relation: torch.cat(found).mean().item() for relation, found in graded.items() if found}


def continuations(story: Story) -> tuple[str, str, str] | None:
    """As `data.stories.minimal_pairs`, of any story: cut after "because it was too tired", or whatever it was, the line
    that follows, and the line that would if the pronoun stood for the other noun. None where there is no such place."""
    beats = [[items[:2] for items in beat if items and pronouns(items[0])] for beat in grammar().beats.values()]
    beats = [[start for start in starts if sentences()[start[0]]] for starts in beats]  # where one line always follows
    others = {one: other for starts in beats for one in starts for other in starts if one != other}
    for place in range(len(story.sentences) - 1):
        if other := others.get(story.sentences[place : place + 2]):
            cast, draw = dict(story.cast), Draw(random.Random(0))
            for role in other[1].roles:
                cast[role] = cast.get(role) or draw.pick(grammar().candidates(role, cast))
            before = "".join(f"{line}\n" for line in story.text.split("\n")[: 2 * place + 2])
            return before, story.english[place + 1], render(other[1].english, cast)
    return None


@torch.no_grad()
def prefers(model: nn.Module, told: Sequence[Told]) -> float:
    """Of the stories that can be cut like this: in how many the line that follows is likelier than the other."""
    tokenizer, right = stories(CORPUS).tokenizer, []
    for before, *lines in filter(None, (continuations(tale.story) for tale in told)):
        context, costs = [tokenizer.end_id, *tokenizer.encode(before)], []
        for line in lines:
            tokens = torch.tensor([[*context, *tokenizer.encode(f"{line}\n")]], device=machine().device)
            logits = model(tokens[:, :-1])[0, len(context) - 1 :]
            costs.append(F.cross_entropy(logits, tokens[0, len(context) :], reduction="sum").item())
        right.append(costs[0] < costs[1])
    return sum(right) / len(right)
