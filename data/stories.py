"""The built-in corpus: short stories told in English and Korean in parallel, drawn from a small grammar.

python -m data.stories --sample N [--seed S]      prints stories
python -m data.stories --check FILE               judges stories, blank lines between them: of a model, for example

`stories_words.toml` holds the words and `stories_plots.toml` the plots; `data/grammar.py` draws and reads. Training
never meets some combinations of who, what and where (`[held_out]` in the plots), so that a model can be asked what it
makes of them.
"""

import argparse
import math
import random
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import TypeVar

from config.errors import UserError, command
from data.grammar import PARTICLES, Draw, Grammar, Sentence, Slot, Story, Word, looks_like, particle, render

SEED = 0  # of the text that models are trained on; not the run's: runs of several seeds read the same stories
CORPUS = 60_000  # more stories than the default preset trains on
T = TypeVar("T")


@cache
def files() -> dict[str, bytes]:
    """What makes the stories what they are, as it was when they were first asked for: words, plots and code."""
    names = ("stories_words.toml", "stories_plots.toml", "stories.py", "grammar.py")
    return {name: Path(__file__).with_name(name).read_bytes() for name in names}


@cache
def grammar() -> Grammar:
    """The grammar in the two data files."""
    words, plots = (tomllib.loads(data.decode()) for data in list(files().values())[:2])
    return Grammar(words, plots)


def story(rng: random.Random) -> Story:
    """Draws one story."""
    return grammar().derive(Draw(rng))


def draws(seed: int, val_fraction: float) -> Iterator[tuple[str, Story]]:
    """Stories without end, each with its split; the same for a seed on every machine.

    One in 1 / val_fraction goes to "val", the others to "train"; "held_out" gets at most as many as "val", with
    combinations of words that neither of the two has.
    """
    rng = random.Random(seed)
    tales = iter(lambda: story(rng), None)
    return _split(((tale, tale.held_out) for tale in tales), val_fraction)


def pairs(seed: int, val_fraction: float) -> Iterator[tuple[str, str, str]]:
    """Sentences of the stories, each once: its split, its English and its Korean, which follows from the English alone.

    Splits are as in `draws`; here what is held out is one in ten of the combinations of the words in a sentence, where
    it has at least two. So no sentence of one split is in another.
    """
    return ((split, *pair) for split, pair in _split(_sentences(random.Random(seed)), val_fraction))


def _sentences(rng: random.Random) -> Iterator[tuple[tuple[str, str], bool]]:
    """The different sentences of many stories, in both languages, and whether each is held out."""
    seen = set()
    for tale in (story(rng) for _ in range(CORPUS)):
        for sentence, *pair in zip(tale.sentences, tale.english, tale.korean, strict=True):
            if pair[0] not in seen:
                seen.add(pair[0])
                yield tuple(pair), len(sentence.roles) > 1 and grammar().is_held_out(sentence.roles, tale.cast)


def _split(items: Iterable[tuple[T, bool]], val_fraction: float) -> Iterator[tuple[str, T]]:
    """Items and whether each is held out -> the split of each, and the item; of those held out, some are left out."""
    n_drawn = n_val = n_held_out = 0
    for item, held_out in items:
        if not held_out:
            n_drawn += 1
            validates = n_drawn > 1 and (n_drawn - 2) * val_fraction >= n_val  # the second, so that there is one
            n_val += validates
            yield "val" if validates else "train", item
        elif n_held_out < n_val:
            n_held_out += 1
            yield "held_out", item


def floor(split: str, tale: Story) -> tuple[float, float, float]:
    """What a story of a split costs in nats: its English, its Korean, and both for someone who knows the split's rule.

    The first two are of the whole grammar: who has also learnt what training leaves out can save the difference.
    """
    share = grammar().held_out_share if split == "held_out" else 1 - grammar().held_out_share
    english, korean = grammar().nats(tale)
    return english, korean, english + korean + math.log(share)


# ---------------------------------------------------------------- judging stories, whoever wrote them


def check(texts: Sequence[str], training: Collection[str]) -> dict[str, tuple[int, int]]:
    """What is right in some stories: how many, and of how many.

    A sentence is valid if it comes from a template of its language, and a translation right if the same words give both
    lines. A pronoun is resolved if its sentence and the translation agree with what follows from them. A particle is
    judged wherever it stands after a noun of the grammar. `training` holds the stories that the writer has read.
    """
    judged: dict[str, list[bool]] = {name: [] for name in ("valid sentences", "right translations", "valid stories")}
    judged |= {"right coreference": [], "right particles": []}
    for text in texts:
        lines = text.split("\n")
        pairs = list(zip_longest(lines[::2], lines[1::2], fillvalue=""))
        judged["valid stories"].append(is_story(lines))
        for number, (english, korean) in enumerate(pairs):
            meanings = list(read_line(english, "english"))
            judged["valid sentences"] += [bool(meanings), any(read_line(korean, "korean"))]
            translations = [render(sentence.korean, cast) for sentence, cast in meanings]
            judged["right translations"].append(korean in translations)
            if has_pronoun(english, meanings):
                judged["right coreference"].append(is_resolved(pairs[number:]))
            judged["right particles"] += judge_particles(korean)
    counts = {name: (sum(values), len(values)) for name, values in judged.items()}
    counts["distinct stories"] = len(set(texts)), len(texts)
    counts["copied from the training text"] = sum(text in training for text in texts), len(texts)
    return counts


def is_story(lines: Sequence[str]) -> bool:
    """Whether the grammar can tell exactly this story."""
    readings = grammar().derivations(lines[::2])
    korean = [[render(sentence.korean, reading.cast) for sentence in reading.sentences] for reading in readings]
    return list(lines[1::2]) in korean


@cache
def sentences() -> dict[Sentence, Sentence | None]:
    """Every sentence of the grammar, and the one that always follows it, if one does."""
    alternatives = [items for beat in grammar().beats.values() for items in beat]
    pairs = [(one, two) for items in alternatives for one, two in zip_longest(items, items[1:])]
    return {one: two if isinstance(two, Sentence) else None for one, two in pairs if isinstance(one, Sentence)}


def read_line(line: str, language: str) -> Iterator[tuple[Sentence, dict[str, Word]]]:
    """Every sentence that can read like this, with the words in it."""
    for sentence in sentences():
        for cast in grammar().match(getattr(sentence, language), line, {}):
            yield sentence, cast


def pronouns(item: Sentence | str) -> list[Slot]:
    """The pronouns of a sentence that stand for a word of the story."""
    parts = item.english if isinstance(item, Sentence) else ()
    return [part for part in parts if isinstance(part, Slot) and part.kind == "pronoun"]


def has_pronoun(line: str, meanings: Sequence[tuple[Sentence, dict[str, Word]]]) -> bool:
    """Whether a pronoun stands for a word in a line, given its meanings; without any, whether it looks like that."""
    if meanings:
        return any(pronouns(sentence) for sentence, _ in meanings)
    alike = any(pronouns(sentence) and looks_like(line, sentence.english) for sentence in sentences())
    return alike and bool(re.search(r"\b(it|them|he|she)\b", line))


def is_resolved(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether the first pair of lines is a sentence and its translation, and the next line follows from it."""
    (english, korean), *rest = pairs
    for sentence, cast in read_line(english, "english"):
        following = sentences()[sentence]
        follows = following is None or (rest and any(grammar().match(following.english, rest[0][0], cast)))
        if follows and render(sentence.korean, cast) == korean:
            return True
    return False


@cache
def nouns() -> set[str]:
    """The last words of all Korean forms that a particle can follow."""
    return {word.forms["ko"].text.split()[-1] for words in grammar().lists.values() for word in words}


def judge_particles(line: str) -> Iterator[bool]:
    """For each particle after a noun of the grammar: whether it has the form that the noun asks for."""
    kinds = {form: kind for kind, forms in PARTICLES.items() for form in forms}
    for word in re.findall("[가-힣]+", line):
        cuts = [cut for cut in range(1, len(word)) if word[:cut] in nouns() and word[cut:] in kinds]
        if cuts and word not in nouns():  # the longest noun: 소라는 is 소라 and 는, not 소 and 라는
            yield particle(word[: cuts[-1]], kinds[word[cuts[-1] :]]) == word[cuts[-1] :]


def minimal_pairs(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Held-out stories cut after "because it was too tired", or whatever it was: the story so far, the line that
    follows from it, and the line that would follow if the pronoun stood for the other noun."""
    twins = {}  # the first two sentences of an alternative: those of the alternatives beside it
    for beat in grammar().beats.values():
        starts = [items[:2] for items in beat if items and pronouns(items[0]) and sentences()[items[0]]]
        twins |= {one: two for one in starts for two in starts if one != two}
    while True:
        tale = story(rng)
        places = range(len(tale.sentences) - 1)
        place = next((place for place in places if tale.sentences[place : place + 2] in twins), None)
        if tale.held_out and place is not None:
            other, cast = twins[tale.sentences[place : place + 2]][1], dict(tale.cast)
            for role in other.roles:
                cast[role] = cast.get(role) or Draw(rng).pick(grammar().candidates(role, cast))
            lines = tale.text.split("\n")[: 2 * place + 2]
            yield "".join(f"{line}\n" for line in lines), tale.english[place + 1], render(other.english, cast)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.stories", description="Prints or judges built-in stories.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sample", type=int, metavar="N", help="print N stories")
    what.add_argument("--check", metavar="FILE", help="judge the stories in a file, blank lines between them")
    parser.add_argument("--seed", type=int, default=SEED, help="which stories to print (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.check is not None:
        stories = split_stories(Path(options.check))
        tell(check(stories, {tale.text for split, tale in islice(draws(SEED, 0.01), CORPUS) if split == "train"}))
    elif options.sample < 1:
        parser.error(f"--sample must be at least 1, not {options.sample}")
    else:
        rng = random.Random(options.seed)
        print("\n\n".join(story(rng).text for _ in range(options.sample)))


def split_stories(path: Path) -> list[str]:
    """The stories in a file. Raises `UserError` if it cannot be read or holds none."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"--check {path} is not UTF-8") from None
    stories = [story.strip("\n") for story in re.split(r"\n\s*\n", text) if story.strip()]
    if not stories:
        raise UserError(f"--check {path} holds no stories")
    return stories


def tell(counts: dict[str, tuple[int, int]]) -> None:
    """Prints what `check` found as a table."""
    for name, (right, total) in counts.items():
        share = f"{right / total:7.1%}" if total else "      –"
        print(f"{name:<30}{share}   {right:,} of {total:,}")


if __name__ == "__main__":
    main()
