"""The built-in corpus: short stories told in English and Korean in parallel, drawn from a small grammar.

`stories_words.toml` holds the words and `stories_plots.toml` the plots; this file draws, inflects and annotates.
A story is one derivation: a beat expands into one of its alternatives until only sentences are left, and each sentence
asks for the words of its roles, drawn when they are first needed. The Korean follows from the English and every choice
shows in the English, so the probability of a story is the product of the probabilities of its choices.
"""

import argparse
import math
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

from config.errors import command

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
FORM_KINDS = {"he": "pronoun", "it": "pronoun", "그": "pronoun", "그것": "pronoun", "was": "verb", "is": "verb"}

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
    """A story in both languages, sentence by sentence, and the natural logarithm of its probability."""

    english: tuple[str, ...]
    korean: tuple[str, ...]
    log_prob: float
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        """The document: each English line followed by its Korean line."""
        return "\n".join(line for pair in zip(self.english, self.korean, strict=True) for line in pair)


class Grammar:
    """The words and beats of a corpus, read from two tables of the form of the TOML files beside this one.

    Raises ValueError for braces that neither name a role nor point to one, and for a sentence whose two languages name
    different roles.
    """

    def __init__(self, words: dict, plots: dict[str, str]):
        self.roles = words.get("roles", {})
        self.lists = {name: read_list(table) for name, table in words.items() if name != "roles"}
        self.beats = {name: [self._alternative(text) for text in BAR.split(plot)] for name, plot in plots.items()}
        self._pools: dict[str, tuple[Word, ...]] = {}

    def derive(self, draw: Draw, beat: str = "story") -> tuple[list[Sentence], dict[str, Word]]:
        """Draws a story: its sentences, and the word that plays each role."""
        sentences: list[Sentence] = []
        cast: dict[str, Word] = {}
        agenda = [beat]
        while agenda:
            item = agenda.pop()
            if isinstance(item, str):
                agenda.extend(reversed(draw.pick(self.beats[item])))
                continue
            for role in item.roles:
                if role not in cast:
                    cast[role] = draw.pick(self.candidates(role, cast))
            sentences.append(item)
        return sentences, cast

    def candidates(self, role: str, cast: dict[str, Word]) -> list[Word]:
        """The words that may play a role beside those already cast."""
        source = self.roles.get(role, role)
        if "." in source:
            other, key = source.split(".")
            source = cast[other].shared[key]
        if source not in self._pools:
            self._pools[source] = tuple(word for name in source.split() for word in self.lists[name])
        taken = {word.name for word in cast.values()}
        return [word for word in self._pools[source] if word.name not in taken]

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


@cache
def grammar() -> Grammar:
    """The grammar in the two data files."""
    files = Path(__file__).with_name("stories_words.toml"), Path(__file__).with_name("stories_plots.toml")
    return Grammar(*(tomllib.loads(file.read_text(encoding="utf-8")) for file in files))


def story(rng: random.Random) -> Story:
    """Draws one story."""
    draw = Draw(rng)
    sentences, cast = grammar().derive(draw)
    english, korean = [s.english for s in sentences], [s.korean for s in sentences]
    return Story(
        english=tuple(render(template, cast) for template in english),
        korean=tuple(render(template, cast) for template in korean),
        log_prob=draw.log_prob,
        spans=(*annotate(english, cast, "english"), *annotate(korean, cast, "korean")),
    )


def documents(seed: int, n_bytes: int) -> Iterator[str]:
    """Story texts, as many as it takes to reach `n_bytes` of UTF-8; the same for a seed on every machine."""
    rng = random.Random(seed)
    while n_bytes > 0:
        # The text alone, without annotations, which take as long again.
        sentences, cast = grammar().derive(Draw(rng))
        text = "\n".join(render(template, cast) for s in sentences for template in (s.english, s.korean))
        n_bytes -= len(text.encode())
        yield text


class Drawn(NamedTuple):
    """A story's text, and the entropy in nats of its (English, Korean) lines."""

    text: str
    floor: tuple[float, float]


def draws(seed: int, val_fraction: float) -> Iterator[tuple[str, Drawn]]:
    """Stories without end, each with its split; the same for a seed on every machine."""
    rng = random.Random(seed)
    for i in count():
        drawn = story(rng)
        validation = i == 1 or (i > 1 and int((i - 1) * val_fraction) > int((i - 2) * val_fraction))
        yield "val" if validation else "train", Drawn(drawn.text, (-drawn.log_prob, 0.0))


@command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data.stories", description="Prints built-in stories.")
    parser.add_argument("--sample", type=int, required=True, metavar="N", help="how many stories to print")
    parser.add_argument("--seed", type=int, default=0, help="which stories (default: %(default)s)")
    options = parser.parse_args()
    if options.sample < 1:
        parser.error(f"--sample must be at least 1, not {options.sample}")
    rng = random.Random(options.seed)
    print("\n\n".join(story(rng).text for _ in range(options.sample)))


if __name__ == "__main__":
    main()
