"""A grammar whose sentences come in pairs, English and Korean, with the exact probability of all that it says.

A story is one derivation: a beat expands into one of its alternatives until only sentences are left, and each sentence
asks for the words of its roles, drawn when they are first needed. The Korean follows from the English and every choice
shows in the English, so the probability of a story is the product of the probabilities of its choices. `Grammar.derive`
draws a story; `Grammar.read` goes the other way, from lines to derivations.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

# Korean particles: after a final consonant (받침), and otherwise.
PARTICLES = {
    "은": ("은", "는"),
    "이": ("이", "가"),
    "을": ("을", "를"),
    "과": ("과", "와"),
    "으로": ("으로", "로"),
    "이었다": ("이었다", "였다"),
    "이라는": ("이라는", "라는"),
}
PRONOUNS = {"it", "그것"}  # in plain text
# Forms of a role that stand for it, or agree with it, rather than name it.
FORM_KINDS = {
    "he": "pronoun",
    "his": "pronoun",
    "it": "pronoun",
    "그": "pronoun",
    "그것": "pronoun",
    "was": "verb",
    "is": "verb",
}

BAR = re.compile(r"^\|$", re.MULTILINE)  # between the alternatives of a beat


def particle(noun: str, kind: str) -> str:
    """The form of a particle that follows a noun.

    `kind` is the form after a final consonant, a key of `PARTICLES`. The last syllable's code point tells: Unicode
    numbers Hangul syllables as 28 finals for each initial and vowel. 으로 drops its vowel after ㄹ, the eighth, too.
    Raises ValueError if the noun does not end in a Hangul syllable.
    """
    final = ord(noun[-1]) - ord("가")
    if not 0 <= final <= ord("힣") - ord("가"):
        raise ValueError(f"{noun!r} does not end in a Hangul syllable, so its particle is unknown")
    final %= 28
    closed = final != 0 and not (kind == "으로" and final == 8)
    return PARTICLES[kind][0 if closed else 1]


class Draw:
    """Makes every random choice and counts its log-probability, so that none can be forgotten.

    Uses `random.Random.random` alone, which is the same on every version of Python.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.log_prob = 0.0

    def pick(self, options: Sequence):
        """One of the options, all equally likely."""
        self.log_prob -= math.log(len(options))
        return options[int(self.rng.random() * len(options))]


class Form(NamedTuple):
    """A word as it stands in a sentence; `text[start:end]` is the word without article and particle."""

    text: str
    start: int
    end: int


class Word(NamedTuple):
    """An entry of a word list: its English name, the text of each form, and the keys shared by its list."""

    name: str
    forms: dict[str, Form]
    shared: dict[str, str]


class Slot(NamedTuple):
    """A place in a sentence that is more than plain text.

    `role` and `form` say which word to show; a slot without a role shows `text`. A slot with a `kind` is annotated:
    it points to what bears the label `target`.
    """

    role: str | None
    form: str
    text: str
    kind: str | None
    target: str

    @property
    def label(self) -> str:
        """What others point to it by: a mention by its role, a pronoun or a verb by how it is written."""
        if self.role is None:
            return self.text
        return self.form if self.kind else self.role


class Sentence(NamedTuple):
    """A pair of templates, each a sequence of plain strings and slots, and the roles that appear in them."""

    english: tuple[str | Slot, ...]
    korean: tuple[str | Slot, ...]
    roles: tuple[str, ...]


class Span(NamedTuple):
    """An arrow between two words of a story, as character offsets into its sentences.

    `kind` is "pronoun" (to its antecedent), "verb" (to its subject) or "modifier" (to its noun); `language` is
    "english" or "korean"; `sentence` and `target_sentence` count from 0.
    """

    kind: str
    language: str
    sentence: int
    start: int
    end: int
    target_sentence: int
    target_start: int
    target_end: int


@dataclass(frozen=True)
class Story:
    """A derivation, in both languages, and the natural logarithm of its probability.

    `held_out` tells whether its combination of who, what and where is kept from training.
    """

    sentences: tuple[Sentence, ...]
    cast: dict[str, Word]
    log_prob: float
    held_out: bool

    @cached_property
    def english(self) -> tuple[str, ...]:
        return tuple(render(sentence.english, self.cast) for sentence in self.sentences)

    @cached_property
    def korean(self) -> tuple[str, ...]:
        return tuple(render(sentence.korean, self.cast) for sentence in self.sentences)

    @property
    def text(self) -> str:
        """The document: each English line followed by its Korean line."""
        return "\n".join(line for pair in zip(self.english, self.korean, strict=True) for line in pair)

    @property
    def spans(self) -> tuple[Span, ...]:
        templates = {"english": [s.english for s in self.sentences], "korean": [s.korean for s in self.sentences]}
        return tuple(span for language, lines in templates.items() for span in annotate(lines, self.cast, language))


class Reading(NamedTuple):
    """A way to understand the lines read so far: what they say, who plays what, what may come next, and log p."""

    sentences: tuple[Sentence, ...]
    cast: dict[str, Word]
    agenda: tuple[str | Sentence, ...]
    log_prob: float


START = Reading((), {}, ("story",), 0.0)  # nothing read yet


class Grammar:
    """The words and beats of a corpus, read from two tables of the form of the TOML files beside this one.

    Raises ValueError for a mistake in the tables: a beat, role, form or target that is not there, a sentence whose two
    languages name different roles, a combination to hold out of what is not a plot.
    """

    def __init__(self, words: dict, plots: dict):
        self.roles = words.get("roles", {})
        self.lists = {name: read_list(table) for name, table in words.items() if name != "roles"}
        self._pools: dict[str, tuple[Word, ...]] = {}
        self.held_out = {plot: roles.split(", ") for plot, roles in plots.get("held_out", {}).items()}
        beats = {name: BAR.split(plot) for name, plot in plots.items() if isinstance(plot, str)}
        self.beats = {name: [self._alternative(text) for text in beat] for name, beat in beats.items()}
        self._check()

    def derive(self, draw: Draw) -> Story:
        """Draws a story."""
        sentences: list[Sentence] = []
        cast: dict[str, Word] = {}
        combination = None
        agenda: list[str | Sentence] = ["story"]
        while agenda:
            item = agenda.pop()
            if isinstance(item, str):
                chosen = draw.pick(self.beats[item])
                if item == "story":
                    combination = self.held_out.get(chosen[0]) if chosen else None
                agenda.extend(reversed(chosen))
                continue
            for role in item.roles:
                if role not in cast:
                    cast[role] = draw.pick(self.candidates(role, cast))
            sentences.append(item)
        held_out = combination is not None and self.is_held_out(combination, cast)
        return Story(tuple(sentences), cast, draw.log_prob, held_out)

    def candidates(self, role: str, cast: dict[str, Word]) -> list[Word]:
        """The words that may play a role beside those already cast."""
        taken = {word.name for word in cast.values()}
        return [word for word in self._pool(role, cast) if word.name not in taken]

    @cached_property
    def held_out_share(self) -> float:
        """The probability that a story is held out."""
        plots = [alternative[0] if alternative else None for alternative in self.beats["story"]]
        return sum(self._share(self.held_out[plot]) for plot in plots if plot in self.held_out) / len(plots)

    def _share(self, roles: Sequence[str]) -> float:
        """Of the combinations of different words for three roles, all equally likely: how many are held out."""
        pools = [[(place, word.name) for place, word in enumerate(self._pool(role, {}))] for role in roles]
        combinations = [words for words in product(*pools) if len({name for _, name in words}) == len(words)]
        return sum(sum(place for place, _ in words) % 10 == 0 for words in combinations) / len(combinations)

    def is_held_out(self, roles: Sequence[str], cast: dict[str, Word]) -> bool:
        """Whether the words of these roles are a combination kept from training, by their places in their lists: one in
        ten is, and any two of three words are still met together. Words that read alike have one place."""
        pools = {role: [word.name for word in self._pool(role, cast)] for role in roles}
        return sum(pools[role].index(cast[role].name) for role in roles) % 10 == 0

    def read(self, readings: Sequence[Reading], line: str) -> list[Reading]:
        """Goes on reading by one English line, in every possible way; none, if no story goes on like that."""
        return [
            Reading((*reading.sentences, sentence), cast, rest, log_prob + casting)
            for reading in readings
            for sentence, rest, log_prob in self._next(reading.agenda, reading.log_prob)
            for cast in self.match(sentence.english, line, reading.cast)
            if (casting := self._log_prob(sentence, reading.cast, cast)) is not None
        ]

    def derivations(self, lines: Sequence[str]) -> list[Reading]:
        """Every derivation of a whole story, given its English lines; their log-probabilities include the end."""
        readings = [START]
        for line in lines:
            readings = self.read(readings, line)
        ends = [(reading, self._probability_to_end(reading.agenda)) for reading in readings]
        return [reading._replace(log_prob=reading.log_prob + math.log(end)) for reading, end in ends if end]

    def nats(self, story: Story) -> tuple[float, float]:
        """-log p of a story in two parts: of its English and of its Korean lines, each with all lines before it known.

        The Korean is certain, but whether the story ends after it is not, and counts with it.
        """
        english = korean = 0.0
        readings, goes_on = [START], 1.0
        for number, line in enumerate(story.english, 1):
            before, readings = readings, self.read(readings, line)
            english += math.log(goes_on * _total(before) / _total(readings))
            ends = [self._probability_to_end(reading.agenda) for reading in readings]
            goes_on = 1 - _total(readings, ends) / _total(readings)
            korean -= math.log(goes_on if number < len(story.english) else 1 - goes_on)
        return english, korean

    def _probability_to_end(self, agenda: Sequence[str | Sentence]) -> float:
        """How probably nothing more is said."""
        return math.prod(self._silence[item] if isinstance(item, str) else 0.0 for item in agenda)

    @cached_property
    def _silence(self) -> dict[str, float]:
        """How probably each beat says nothing."""
        silence = dict.fromkeys(self.beats, 0.0)
        for _ in self.beats:  # no beat is nested deeper than there are beats
            for beat, alternatives in self.beats.items():
                ends = [math.prod(silence[i] if isinstance(i, str) else 0.0 for i in items) for items in alternatives]
                silence[beat] = math.fsum(ends) / len(ends)
        return silence

    def match(self, template: Sequence[str | Slot], line: str, cast: dict[str, Word]) -> Iterator[dict[str, Word]]:
        """Every cast, the given one with more roles filled, that makes a template this line."""
        if looks_like(line, template):
            for text in {line, line[0].lower() + line[1:]}:
                yield from (found for found in self._match(template, text, cast) if render(template, found) == line)

    def _match(self, parts: Sequence[str | Slot], text: str, cast: dict[str, Word]) -> Iterator[dict[str, Word]]:
        if not parts:
            yield from [cast] * (not text)
            return
        part = parts[0]
        if isinstance(part, str) or part.role is None:
            literal = part if isinstance(part, str) else part.text
            if text.startswith(literal):
                yield from self._match(parts[1:], text[len(literal) :], cast)
            return
        for word in [cast[part.role]] if part.role in cast else self._pool(part.role, cast):
            form = word.forms[part.form].text
            if text.startswith(form):
                yield from self._match(parts[1:], text[len(form) :], cast | {part.role: word})

    def _next(self, agenda: tuple, log_prob: float) -> Iterator[tuple[Sentence, tuple, float]]:
        """The sentences that may come first, with what may follow them and the log-probability of getting there."""
        if agenda and isinstance(agenda[0], Sentence):
            yield agenda[0], agenda[1:], log_prob
        elif agenda:
            alternatives = self.beats[agenda[0]]
            for alternative in alternatives:
                yield from self._next((*alternative, *agenda[1:]), log_prob - math.log(len(alternatives)))

    def _log_prob(self, sentence: Sentence, before: dict[str, Word], after: dict[str, Word]) -> float | None:
        """The log-probability of the words that a sentence adds to a cast; None if they cannot be drawn."""
        cast, log_prob = dict(before), 0.0
        for role in sentence.roles:
            if role not in cast:
                candidates = self.candidates(role, cast)
                if after[role] not in candidates:
                    return None
                log_prob -= math.log(len(candidates))
                cast[role] = after[role]
        return log_prob

    def _pool(self, role: str, cast: dict[str, Word]) -> tuple[Word, ...]:
        """The words that may play a role; where they depend on a word that is not cast yet, all that might."""
        source = self.roles.get(role, role)
        if "." in source:
            other, key = source.split(".")
            words = [cast[other]] if other in cast else self._pool(other, cast)
            source = " ".join(dict.fromkeys(word.shared[key] for word in words))
        if source not in self._pools:
            self._pools[source] = tuple(word for name in source.split() for word in self.lists[name])
        return self._pools[source]

    def _check(self) -> None:
        """Raises ValueError for names in the plots that mean nothing."""
        items = [item for alternatives in self.beats.values() for items in alternatives for item in items]
        if unknown := {item for item in items if isinstance(item, str)} - self.beats.keys():
            raise ValueError(f"there is no beat {min(unknown)}")
        if strays := self.held_out.keys() - {items[0] for items in self.beats.get("story", []) if items}:
            raise ValueError(f"[held_out] {min(strays)} is no plot: no alternative of story begins with it")
        for templates in zip(
            *[(item.english, item.korean) for item in items if isinstance(item, Sentence)], strict=True
        ):
            slots = [part for template in templates for part in template if isinstance(part, Slot)]
            labels = {slot.label for slot in slots}
            for slot in slots:
                if slot.kind and slot.target not in labels:
                    raise ValueError(f"{slot.target} is pointed to, and stands nowhere")
                for word in self._pool(slot.role, {}) if slot.role else ():
                    if slot.form not in word.forms:
                        raise ValueError(f"{{{slot.role}:{slot.form}}}: {word.name} has no such form")

    def _alternative(self, text: str) -> tuple[str | Sentence, ...]:
        """Reads one alternative of a beat: "@name" calls another beat, other lines come in pairs."""
        items: list[str | Sentence] = []
        lines = iter(text.strip().splitlines())
        for line in lines:
            items.append(line[1:] if line.startswith("@") else self._sentence(line, next(lines, "")))
        return tuple(items)

    def _sentence(self, english: str, korean: str) -> Sentence:
        templates = self._template(english, "en"), self._template(korean, "ko")
        slots = [[part for part in template if isinstance(part, Slot)] for template in templates]
        roles, korean_roles = [dict.fromkeys(slot.role for slot in part if slot.role) for part in slots]
        if roles.keys() != korean_roles.keys():
            raise ValueError(f"the two languages name different roles: {english!r} and {korean!r}")
        return Sentence(*templates, tuple(roles))

    def _template(self, line: str, language: str) -> tuple[str | Slot, ...]:
        parts: list[str | Slot] = re.split(r"\{(.*?)\}", line)
        parts[1::2] = [self._slot(code, language) for code in parts[1::2]]
        return tuple(part for part in parts if part)

    def _slot(self, code: str, language: str) -> Slot:
        body, _, target = code.partition(">")
        name, _, form = body.partition(":")
        if name in self.roles or name in self.lists:
            kind = FORM_KINDS.get(form, "modifier" if target else None)
            return Slot(name, form or language, "", kind, target or name)
        if not target or form:
            raise ValueError(f"{{{code}}} names no role, and does not point to one")
        return Slot(None, "", name, "pronoun" if name in PRONOUNS else "verb", target)


def read_list(table: dict) -> list[Word]:
    """Reads a word list: its columns, the computed forms (article and particles), and what its words share."""
    shared = {key: value for key, value in table.items() if key not in ("forms", "words")}
    columns = table.get("forms", "en, ko").split(", ")
    words = []
    for entry in table["words"]:
        row = dict(zip(columns, entry.split(", "), strict=True))
        forms = {key: Form(text, 0, len(text)) for key, text in (row | shared).items()}
        article = "an " if row["en"][0] in "aeiou" else "a "
        forms["a"] = Form(article + row["en"], len(article), len(article + row["en"]))
        for kind in PARTICLES:
            forms[kind] = Form(row["ko"] + particle(row["ko"], kind), 0, len(row["ko"]))
        words.append(Word(row["en"], forms, shared))
    return words


def render(template: Sequence[str | Slot], cast: dict[str, Word]) -> str:
    """The text of a sentence, its first letter a capital."""
    text = "".join([p if isinstance(p, str) else p.text or cast[p.role].forms[p.form].text for p in template])
    return text[0].upper() + text[1:]


def looks_like(line: str, template: tuple[str | Slot, ...]) -> bool:
    """Whether a line has the plain text of a template, with anything for its words and pronouns."""
    return len(line) <= 100 and bool(skeleton(template).fullmatch(line))  # on long lines `.+` takes its time


@cache
def skeleton(template: tuple[str | Slot, ...]) -> re.Pattern:
    parts = [part if isinstance(part, str) else part.text if part.kind == "verb" else None for part in template]
    return re.compile("".join(re.escape(part) if part else ".+" for part in parts), re.IGNORECASE)


def annotate(templates: Sequence[Sequence[str | Slot]], cast: dict[str, Word], language: str) -> list[Span]:
    """The spans of a story in one language."""
    places: dict[str, list[tuple[int, int, int]]] = {}  # label: where it stands, in reading order
    arrows: list[tuple[Slot, tuple[int, int, int]]] = []
    for number, template in enumerate(templates):
        offset = 0
        for part in template:
            if isinstance(part, str):
                offset += len(part)
                continue
            form = cast[part.role].forms[part.form] if part.role else Form(part.text, 0, len(part.text))
            place = (number, offset + form.start, offset + form.end)
            places.setdefault(part.label, []).append(place)
            if part.kind:
                arrows.append((part, place))
            offset += len(form.text)
    return [Span(slot.kind, language, *place, *find_target(slot, place, places[slot.target])) for slot, place in arrows]


def find_target(slot: Slot, place: tuple[int, int, int], targets: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Which mention a word points to: a modifier to the next one, a verb or pronoun to the last one before it.

    A verb before its subject, as in a question, points to the next one in its sentence.
    """
    before = [target for target in targets if target < place]
    after = [target for target in targets if target > place and target[0] == place[0]]
    if slot.kind == "verb":
        before = [target for target in before if target[0] == place[0]]
    return after[0] if slot.kind == "modifier" or not before else before[-1]


def _total(readings: Sequence[Reading], weights: Sequence[float] | None = None) -> float:
    """The probability of several readings together, each times its weight."""
    return math.fsum(math.exp(r.log_prob) * w for r, w in zip(readings, weights or [1.0] * len(readings), strict=True))
