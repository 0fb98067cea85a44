import math
import random
import re
import subprocess
import sys
import unicodedata
import zlib
from collections import Counter
from hashlib import sha256
from itertools import pairwise

import pytest

from data.stories import Draw, Grammar, Slot, documents, grammar, particle, story

PINNED = "685a30bd3c0df59b00d25d996be1c806eff3a4d96b89120f03766e54cf761897"
# Lists whose words are not nouns.
OTHERS = {"trait", "home", "village", "weather", "colour", "nature", "day", "weary", "unwell", "needy", "good", "glad"}
OTHERS |= {
    "road_trouble",
    "water_trouble",
    "long_bulk",
    "round_bulk",
    "tight",
    "salty",
    "hobby",
    "fun",
    "tone",
    "manner",
}
OTHERS |= {"when", "later", "sum"}
# A particle, and whether a final consonant comes before it.
PARTICLES = {"은": 1, "는": 0, "이": 1, "가": 0, "을": 1, "를": 0, "과": 1, "와": 0, "으로": 1, "로": 0}
PARTICLES |= {"이었다": 1, "였다": 0, "이라는": 1, "라는": 0}
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}


def names(*lists):
    """The English of all words of some lists, as a regular expression."""
    return "(" + "|".join(re.escape(word.name) for name in lists for word in grammar().lists[name]) + ")"


@pytest.fixture(scope="module")
def stories():
    rng = random.Random(11)
    return [story(rng) for _ in range(4000)]


@pytest.fixture(scope="module")
def corpus():
    """Twenty thousand stories as lists of (English, Korean) lines."""
    lines = [text.split("\n") for text in documents(12, 12_500_000)]
    assert len(lines) > 20_000
    return [list(zip(story[::2], story[1::2], strict=True)) for story in lines]


# ---------------------------------------------------------------- the same everywhere


def test_same_text_in_every_process():
    code = (
        "from hashlib import sha256; from data.stories import documents; "
        "print(sha256(chr(0).join(documents(7, 200_000)).encode()).hexdigest())"
    )
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1")
    ]
    assert digests == [sha256("\0".join(documents(7, 200_000)).encode()).hexdigest()] * 2
    assert next(documents(7, 1)) != next(documents(8, 1))


def test_text_is_pinned():
    """Changes with any change to the words or plots: then look at samples and pin the new text."""
    assert sha256("\0".join(documents(0, 50_000)).encode()).hexdigest() == PINNED


def test_documents_stop_at_the_first_story_past_the_limit():
    texts = list(documents(3, 10_000))
    sizes = [len(text.encode()) for text in texts]
    assert sum(sizes[:-1]) < 10_000 <= sum(sizes)
    rng = random.Random(3)
    assert texts == [story(rng).text for _ in texts]


# ---------------------------------------------------------------- Korean


@pytest.mark.parametrize(
    ("noun", "forms"),
    [
        ("나무", "는 가 를 와 로 였다 라는"),
        ("사람", "은 이 을 과 으로 이었다 이라는"),
        ("옷", "은 이 을 과 으로 이었다 이라는"),
        ("닭", "은 이 을 과 으로 이었다 이라는"),
        ("길", "은 이 을 과 로 이었다 이라는"),  # ㄹ takes 로
    ],
)
def test_particle(noun, forms):
    assert [particle(noun, kind) for kind in ("은", "이", "을", "과", "으로", "이었다", "이라는")] == forms.split()


@pytest.mark.parametrize("noun", ["road", "길 ", "ㄹ"])
def test_particle_needs_a_syllable(noun):
    with pytest.raises(ValueError, match="Hangul"):
        particle(noun, "은")


def test_particles_in_text(stories):
    """Reads nouns and particles back from the text, and decides by the decomposed last syllable."""
    words = [word for name, words in grammar().lists.items() if name not in OTHERS for word in words]
    nouns = {word.forms["ko"].text.split()[-1] for word in words}
    found = Counter()
    for line in (line for tale in stories[:2000] for line in tale.korean):
        for token in re.findall(r"[가-힣]+", line):
            for ending, closed in PARTICLES.items():
                noun = token.removesuffix(ending)
                if noun == token or noun not in nouns or token in nouns:
                    continue
                jamo = unicodedata.normalize("NFD", noun[-1])
                final = len(jamo) == 3 and not (ending in ("으로", "로") and jamo[2] == "\u11af")
                assert final == bool(closed), f"{token} in {line}"
                found[ending] += 1
                if ending == "로" and len(jamo) == 3:
                    found["ㄹ로"] += 1
    assert min(found[kind] for kind in [*PARTICLES, "ㄹ로"]) > 5
    assert sum(found.values()) > 10_000


def test_spaces_change_the_meaning(corpus):
    pairs = dict(pair for tale in corpus for pair in tale)
    assert pairs["Father went into the room."] == "아버지가 방에 들어가셨다."
    bags = [ko for en, ko in pairs.items() if en.endswith(" went into Father's bag.")]
    assert bags
    assert all(ko.endswith(" 아버지 가방에 들어갔다.") for ko in bags)


# ---------------------------------------------------------------- one wording per meaning


def test_sentences_translate_one_to_one(corpus):
    to_korean, to_english = {}, {}
    for english, korean in (pair for tale in corpus for pair in tale):
        assert to_korean.setdefault(english, korean) == korean
        assert to_english.setdefault(korean, english) == english
    assert len(to_korean) > 50_000


def test_word_lists_are_one_to_one():
    lists = grammar().lists
    unions = [source.split() for source in grammar().roles.values() if "." not in source]
    for union in [*([name] for name in lists), *unions]:
        words = [word for name in union for word in lists[name]]
        keys = ("en", "part", "rest"), ("ko", "일부", "나머지")
        for language in keys if union == ["sum"] else (("en",), ("ko",)):
            assert len({tuple(word.forms[key].text for key in language) for word in words}) == len(words), union


def derivations(lines, agenda=("story",), cast=None):
    """Every way to derive the English lines, as the number of options of each choice."""
    cast = cast or {}
    if not agenda:
        yield from [()] * (not lines)
        return
    item, rest = agenda[0], agenda[1:]
    if isinstance(item, str):
        for alternative in grammar().beats[item]:
            for choices in derivations(lines, (*alternative, *rest), cast):
                yield (len(grammar().beats[item]), *choices)
    elif lines:
        for line in {lines[0], lines[0][0].lower() + lines[0][1:]}:
            for extended, first in readings(item.english, line, cast):
                for choices in derivations(lines[1:], rest, extended):
                    yield (*first, *choices)


def readings(parts, text, cast):
    """Every way to read a line as a template: the cast, and the number of candidates for each new role."""
    if not parts:
        yield from [(cast, ())] * (not text)
        return
    part = parts[0]
    if isinstance(part, str) or part.role is None:
        literal = part if isinstance(part, str) else part.text
        if text.startswith(literal):
            yield from readings(parts[1:], text[len(literal) :], cast)
        return
    candidates = [cast[part.role]] if part.role in cast else grammar().candidates(part.role, cast)
    for word in candidates:
        form = word.forms[part.form].text
        if text.startswith(form):
            new = () if part.role in cast else (len(candidates),)
            for extended, choices in readings(parts[1:], text[len(form) :], cast | {part.role: word}):
                yield extended, (*new, *choices)


def test_one_derivation_with_the_same_log_probability(stories):
    for tale in stories[:400]:
        found = list(derivations(tale.english))
        assert len(found) == 1, tale.text
        assert tale.log_prob == pytest.approx(-sum(math.log(n) for n in found[0]), abs=1e-9)


# ---------------------------------------------------------------- log-probabilities


class Enumerator(Draw):
    """Walks through all outcomes: the choices on `tape`, then the first option each time."""

    def __init__(self, tape):
        super().__init__(random.Random(0))
        self.tape, self.widths = tape, []

    def pick(self, options):
        index = self.tape[len(self.widths)] if len(self.widths) < len(self.tape) else 0
        self.widths.append(len(options))
        self.rng = type("Fixed", (), {"random": lambda _: (index + 0.5) / len(options)})()
        chosen = super().pick(options)
        assert chosen is options[index]
        return chosen


def outcomes(tiny):
    tape = []
    while True:
        draw = Enumerator(tape)
        sentences, cast = tiny.derive(draw)
        yield sentences, cast, draw.log_prob
        tape = [*tape, *[0] * (len(draw.widths) - len(tape))]
        while tape and tape[-1] == draw.widths[len(tape) - 1] - 1:
            tape.pop()
        if not tape:
            return
        tape[-1] += 1


def test_probabilities_of_a_whole_grammar_sum_to_one():
    words = {
        "roles": {"friend": "pet", "mood": "pet.mood"},
        "pet": {"words": ["cat, 고양이", "dog, 개", "ox, 소"], "mood": "quiet"},
        "quiet": {"words": ["calm, 차분했", "still, 조용했"]},
    }
    plots = {
        "story": "@meet\n|\nThe {pet} was {mood}.\n{pet:은} {mood}다.\n@meet\n|\n",
        "meet": "{pet:a} saw {friend:a}.\n{pet:이} {friend:을} 보았다.",
    }
    found = list(outcomes(Grammar(words, plots)))
    assert len(found) == 3 * 2 + 3 * 2 * 2 + 1
    assert sum(math.exp(log_prob) for *_, log_prob in found) == pytest.approx(1, abs=1e-12)
    assert {round(math.exp(-log_prob)) for *_, log_prob in found} == {3, 18, 36}


def test_log_prob_is_the_frequency_of_a_choice(corpus):
    """The race is one plot of 16, and its first word one of 20."""
    share = sum(" ran a race to the " in tale[0][0] for tale in corpus) / len(corpus)
    assert share == pytest.approx(1 / len(grammar().beats["story"]), rel=0.1)
    noon = sum(tale[0][0].startswith("At noon, ") and " ran a race " in tale[0][0] for tale in corpus) / len(corpus)
    assert noon == pytest.approx(1 / len(grammar().beats["story"]) / len(grammar().lists["when"]), rel=0.5)


# ---------------------------------------------------------------- spans


def test_spans_point_at_words(stories):
    words = [word for listed in grammar().lists.values() for word in listed]
    known = {"english": {word.name for word in words}, "korean": {word.forms["ko"].text for word in words}}
    seen = Counter()
    for tale in stories:
        for kind, language, *place in tale.spans:
            sentence, start, end, target_sentence, target_start, target_end = place
            lines = getattr(tale, language)
            source, target = lines[sentence][start:end], lines[target_sentence][target_start:target_end]
            seen[kind, language] += 1
            if kind == "pronoun":
                assert source in {"it", "them", "he", "she", "그것", "그것들", "그", "그녀"}
                assert target in known[language]
                assert (target_sentence, target_end) < (sentence, start)
                between = [*lines[target_sentence:sentence], lines[sentence][:start]]  # no later mention of it
                between[0] = between[0][target_end:]
                assert not any(re.search(rf"\b{target}\b", line) for line in between), tale.text
            elif kind == "verb":
                assert sentence == target_sentence
                assert re.fullmatch(r"[\w ]+", source), source
                assert target in known[language] | {"it", "he", "she", "그것", "그", "그녀"}, target
            else:
                assert {source, target} <= known[language]
                assert lines[sentence][end:target_start] == " "
    assert min(seen[kind, "english"] for kind in ("pronoun", "verb", "modifier")) > 1000
    assert all(seen[kind, "english"] == seen[kind, "korean"] for kind in ("pronoun", "modifier"))


def pronouns(tale, language):
    for span in tale.spans:
        if span.kind == "pronoun" and span.language == language:
            lines = getattr(tale, language)
            yield span, lines[span.sentence], lines[span.target_sentence][span.target_start : span.target_end]


def test_pronouns_are_resolved_by_sense(stories):
    """Decides from the verb and the adjective in the text alone what "it" must be, in both languages."""
    first_if = {"cross": names("weary"), "eat": names("unwell"), "fit in": names("long_bulk", "round_bulk")}
    korean = {word.name: word.forms["ko"].text for words in grammar().lists.values() for word in words}
    checked = Counter()
    for tale in stories:
        both = zip(pronouns(tale, "english"), pronouns(tale, "korean"), strict=True)
        for (_, line, antecedent), (*_, korean_antecedent) in both:
            assert korean_antecedent == korean[antecedent], line
            match = re.match(r"The (.+) did not (cross|eat|fit in) the (.+) because it was too (.+)\.", line)
            if match:
                first, verb, second, why = match.groups()
                assert antecedent == (first if re.fullmatch(first_if[verb], why) else second), line
                checked[verb, antecedent == first] += 1
            match = re.match(r"(\w+) helped (\w+) because (?:he|she) was (\w+)\.", line)
            if match:
                assert antecedent == match[1 if re.fullmatch(names("good"), match[3]) else 2], line
                checked["help", antecedent == match[1]] += 1
    assert len(checked) == 8
    assert min(checked.values()) > 50


def test_he_and_she_agree_with_the_name(stories):
    girls = {word.name for word in grammar().lists["girl"]}
    for tale in stories:
        for span, line, antecedent in pronouns(tale, "english"):
            pronoun = line[span.start : span.end]
            if pronoun in ("he", "she"):
                assert (pronoun == "she") == (antecedent in girls)


def test_half_of_the_antecedents_are_not_the_nearest_noun(stories):
    noun = re.compile(r"\b" + names(*(name for name in grammar().lists if name not in OTHERS)) + r"\b")
    far = []
    for tale in stories:
        for span, line, antecedent in pronouns(tale, "english"):
            far.append(noun.findall(line[: span.start])[-1] != antecedent)
    assert len(far) > 1000
    assert sum(far) / len(far) == pytest.approx(0.5, abs=0.05)


def test_verbs_agree_across_an_attractor(stories):
    many, owners = names("many_things"), names("many_owners")
    seen = Counter()
    for tale in stories:
        for line in tale.english:
            match = re.search(r"The ([\w ]+) of the ([\w ]+) (was|were|is|are) (?:on|under)", line)
            if match:
                plural = bool(re.fullmatch(many, match[1]))
                assert plural == (match[3] in ("were", "are")), line
                seen[plural, bool(re.fullmatch(owners, match[2]))] += 1
    assert len(seen) == 4
    assert min(seen.values()) > 50


# ---------------------------------------------------------------- facts stated early and needed late


def test_colour_tells_the_owner(stories):
    checked = 0
    for tale in stories:
        text = "\n".join(tale.english)
        had = re.search(r"(\w+) had an? ([\w-]+) ([\w ]+), and (\w+) had an? ([\w-]+) \3\.", text)
        if had and " something was lost." in text:
            hero, colour, thing, friend, other = had.groups()
            found = re.search(rf"found an? ({colour}|{other}) {thing} under", text)[1]
            assert f"gave the {thing} back to {hero if found == colour else friend}." in text
            checked += 1
    assert checked > 100


def test_sums_are_right(stories):
    checked = 0
    for tale in stories:
        match = re.search(r"bought (\w+) (\w+) .* gave (\w+) \2 .* had (\w+) \2 left", " ".join(tale.english))
        if match:
            assert NUMBERS[match[1]] == NUMBERS[match[3]] + NUMBERS[match[4]]
            checked += 1
    assert checked > 100


def test_things_are_found_where_they_were_put(stories):
    checked = 0
    for tale in stories:
        text = " ".join(tale.english)
        asked = re.search(r'"Where is the ([\w ]+)\?" \w+ asked \w+\. "(In|Under) the ([\w ]+)," said', text)
        if asked:
            thing, where, place = asked.groups()
            assert re.search(rf"(put|hid) the {thing} {where.lower()} the {place}\.", text), text
            assert text.endswith(f"the {place} and found the {thing}.")
            checked += 1
    assert checked > 100


# ---------------------------------------------------------------- size


def test_articles_are_right(corpus):
    for english, _ in (pair for tale in corpus for pair in tale):
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n (?!hour)[^aeiou]|\b[Aa]n? (honest|uni|use|one)", english), english


def test_every_word_and_pattern_is_reached():
    rng, words, patterns = random.Random(4), set(), set()
    for _ in range(12_000):
        sentences, cast = grammar().derive(Draw(rng))
        patterns.update(sentences)
        words.update(id(word) for word in cast.values())
    missing = [word.name for listed in grammar().lists.values() for word in listed if id(word) not in words]
    assert not missing
    items = [item for beat in grammar().beats.values() for alternative in beat for item in alternative]
    assert patterns == {item for item in items if not isinstance(item, str)}
    assert len(patterns) >= 40


def test_rich(stories):
    lists = grammar().lists
    for language in ("en", "ko"):
        assert len({word.forms[language].text for words in lists.values() for word in words}) >= 400
    uses, rng = Counter(), random.Random(6)
    for _ in range(4000):
        sentences, cast = grammar().derive(Draw(rng))
        slots = [part for item in sentences for part in item.english if isinstance(part, Slot) and part.role]
        uses.update(cast[slot.role].name for slot in slots)
    total = sum(uses.values())
    assert math.exp(-sum(n / total * math.log(n / total) for n in uses.values())) >= 200
    assert 5 <= sum(len(tale.english) for tale in stories) / len(stories) <= 7
    assert max(len(line.split()) for tale in stories for line in tale.english) <= 20


def test_compresses_at_most_six_to_one():
    raw = "\n\n".join(documents(0, 2_000_000)).encode()
    assert len(raw) / len(zlib.compress(raw, 9)) < 6


def test_sentences_are_aligned_and_clean(stories):
    for tale in stories:
        assert len(tale.english) == len(tale.korean)
        assert tale.text.split("\n") == [line for pair in zip(tale.english, tale.korean, strict=True) for line in pair]
        for english, korean in zip(tale.english, tale.korean, strict=True):
            assert re.fullmatch(r"[A-Z\"][A-Za-z ,.?'\"-]+[.\"]", english), english
            assert re.fullmatch(r"[가-힣 ,.?\"]+[.\"]", korean), korean
            assert "  " not in english + korean
        assert all(one != two for one, two in pairwise(tale.english))


# ---------------------------------------------------------------- the command and mistakes in the data


def command(*arguments, **env):
    line = [sys.executable, "-m", "data.stories", *arguments]
    return subprocess.run(line, env=env, capture_output=True, encoding="utf-8")


def test_command_prints_stories_on_any_console():
    done = command("--sample", "2", "--seed", "5", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    rng = random.Random(5)
    assert done.stdout == f"{story(rng).text}\n\n{story(rng).text}\n"
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [(), ("--sample", "0"), ("--sample", "many"), ("--samples", "2", "--see")])
def test_command_refuses_mistakes(arguments):
    done = command(*arguments)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4


@pytest.mark.parametrize("line", ["The {cat} ran.\n{cat:은} 뛰었다.", "The {pet} ran.\n개는 뛰었다.", "The {pet} ran."])
def test_grammar_refuses_bad_sentences(line):
    with pytest.raises(ValueError):
        Grammar({"pet": {"words": ["dog, 개"]}}, {"story": line})
