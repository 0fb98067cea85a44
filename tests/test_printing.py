"""Samples as they are printed: which characters come when, and in which order."""

import json
import random
import re
from itertools import combinations, product

import pytest

from data.tokenizer import CharTokenizer, StreamDecoder, Tokenizer
from printing import Prompt, Sample, Text, Writer

# Bytes of every kind that UTF-8 knows: whole characters, first bytes, what may follow one, what may not, and none.
BYTES = [*b"a\x7f", 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC3, 0xDF, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF1]
BYTES += [0xF4, 0xF5, 0xFF]
FAMILY = "👩‍👩‍👧‍👦"  # four people and three joiners
EMOJI = ["👍🏽", "❤️", "1️⃣", "🏳️‍🌈", FAMILY, "🇰🇷"]


class Pieces(Tokenizer):
    """A tokenizer of given pieces, the last of which is the end of text."""

    def __init__(self, pieces: list[bytes]):
        self.name, self.pieces, self.end_id = "pieces", [*pieces, b""], len(pieces)


def streamed(pieces: list[bytes]) -> list[str]:
    """What is printed as each piece comes, and at the end."""
    decoder = StreamDecoder(Pieces(pieces))
    return [*map(decoder.push, range(len(pieces))), decoder.flush()]


def cuts(data: bytes) -> list[list[bytes]]:
    """Every way to divide these bytes into pieces."""
    places = range(1, len(data))
    chosen = [cut for n in range(len(data)) for cut in combinations(places, n)]
    return [[data[a:b] for a, b in zip([0, *cut], [*cut, len(data)], strict=True)] for cut in chosen]


def certain(data: bytes) -> str:
    """As much of the text as is the same whatever comes after: by trying what could."""
    after = [
        b"",
        b"a",
        *(bytes([byte, *rest]) for byte in (0x80, 0x90, 0xA0, 0xBF) for rest in ([], [0x80], [0x80] * 2)),
    ]
    texts = [(data + more).decode("utf-8", "replace") for more in after]
    n = next((n for n, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1), min(map(len, texts)))
    return texts[0][:n]


# --- characters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a한é", "🎉b", "é\ufffdé", "\ufeffa", "x\u200d\U0001f3fd"])
def test_f24_a_text_divided_anywhere_comes_whole(text):
    for pieces in cuts(text.encode()):
        parts = streamed(pieces)
        assert "".join(parts) == text
        assert parts[-1] == ""


def test_f24_random_bytes_divided_anywhere_are_what_they_are_as_a_whole():
    rng, n_bad = random.Random(0), 0
    for _ in range(300):
        data = bytes(rng.choice(BYTES) for _ in range(rng.randint(1, 7)))
        whole = data.decode("utf-8", "replace")
        n_bad += "\ufffd" in whole
        for pieces in cuts(data):
            assert "".join(streamed(pieces)) == whole, (data, pieces)
    assert n_bad > 200


def test_f24_nothing_is_held_back_that_can_only_become_one_thing():
    """No bad byte stalls the stream: after every byte all is printed that no other byte could change."""
    cases = [bytes(some) for n in (1, 2) for some in product(BYTES, repeat=n)]
    rng = random.Random(1)
    cases += [bytes(rng.choice(BYTES) for _ in range(rng.randint(3, 9))) for _ in range(3000)]
    for data in cases:
        # Half a surrogate, which no byte can mend, waits for one more all the same: Python has a way to let it pass.
        sure = data[:-1] if re.search(rb"\xed[\xa0-\xbf]\Z", data) else data
        assert "".join(streamed([bytes([byte]) for byte in data])[:-1]) == certain(sure), data
    assert certain(b"a\xed\x95") == "a"  # the reference itself: a beginning waits, what cannot be one does not
    assert certain(b"a\xed\xa0") == "a\ufffd\ufffd"


@pytest.mark.parametrize("emoji", EMOJI)
def test_f24_the_parts_of_a_joined_emoji_come_as_they_come(emoji):
    parts = streamed([bytes([byte]) for byte in emoji.encode()])
    assert [part for part in parts if part] == list(emoji)  # each code point when its last byte has come


@pytest.mark.parametrize("stops", [[], ["👧"], ["\u200d👧"], ["👩‍👩"]], ids=str)
def test_f24_a_stop_within_a_joined_emoji_ends_before_its_code_points(stops):
    tokenizer = Pieces([bytes([byte]) for byte in FAMILY.encode()])
    text, printed = Text(tokenizer, stops), ""
    for id in range(tokenizer.end_id):
        so_far = tokenizer.decode(range(id + 1))
        reason = "stop" if any(stop in so_far for stop in stops) else "length" if id == tokenizer.end_id - 1 else None
        printed += text.add(id, reason)
        assert "\ufffd" not in printed
        if reason:
            break
    assert printed == FAMILY[: min((FAMILY.find(stop) for stop in stops), default=len(FAMILY))]


def test_a_text_that_goes_on_ends_the_character_that_was_begun():
    data = "é한🎉".encode()
    pieces = [bytes([byte]) for byte in data]
    for n in range(len(data) + 1):
        text = Text(Pieces(pieces), [], before=range(n))
        rest = "".join(text.add(id, None) for id in range(n, len(data)))
        assert rest == data.decode()[len(data[:n].decode("utf-8", "ignore")) :]


# --- samples in order -----------------------------------------------------------------------------------------------

EVENTS = [(0, 0, None), (1, 1, None), (0, 1, None), (1, 2, "length"), (0, 2, "length"), (2, 0, "length")]


def samples(tokenizer=None, *prompts: str, stops=()) -> list[Sample]:
    """One for each prompt, apart by a blank line."""
    tokenizer = tokenizer or CharTokenizer("abc")
    return [
        Sample(Prompt(prompt, (), prompt), Text(tokenizer, stops), "\n" if place else "")
        for place, prompt in enumerate(prompts)
    ]


def written(capsys, samples, events, jsonl=False) -> list[str]:
    """What `Writer` prints at each event."""
    printed = []

    def watched():
        for row, id, reason in events:
            if reason == "Ctrl-C":
                raise KeyboardInterrupt
            yield row, id, -0.5, reason
            printed.append(capsys.readouterr().out)

    Writer(samples, jsonl).write(watched())
    return [*printed, capsys.readouterr().out]


def test_the_first_sample_is_printed_as_it_comes_the_others_in_their_turn(capsys):
    assert written(capsys, samples(None, "x", "y", "z"), EVENTS) == ["xa", "", "b", "", "c\n\nybc\n\nz", "a\n", ""]


def test_an_object_is_printed_as_soon_as_it_is_whole_and_has_its_turn(capsys):
    printed = written(capsys, samples(None, "x", "y", "z"), EVENTS, jsonl=True)
    assert [[json.loads(line)["text"] for line in part.splitlines()] for part in printed] == [
        [], [], [], [], ["abc", "bc"], ["a"], []
    ]  # fmt: skip
    assert json.loads(printed[4].splitlines()[1]) == {
        "prompt": "y",
        "text": "bc",
        "tokens": [1, 2],
        "reason": "length",
        "log_probabilities": [-0.5, -0.5],
    }


@pytest.mark.parametrize(
    ("n_events", "text", "reasons"),
    [
        (0, "", ["interrupted"] * 3),  # nothing is to be seen
        (3, "xab\n", ["interrupted"] * 3),
        (4, "xab\n\nybc\n", ["interrupted", "length", "interrupted"]),  # the second is whole
        (5, "xabc\n\nybc\n\nz\n", ["length", "length", "interrupted"]),
        (6, "xabc\n\nybc\n\nza\n", ["length", "length", "length"]),
    ],
)
def test_ctrl_c_leaves_what_was_seen_and_what_is_whole(capsys, n_events, text, reasons):
    events = [*EVENTS[:n_events], (0, 0, "Ctrl-C")]
    some = samples(None, "x", "y", "z")
    assert "".join(written(capsys, some, events)) == text
    assert [sample.reason for sample in some] == reasons
    some = samples(None, "x", "y", "z")
    objects = map(json.loads, "".join(written(capsys, some, events, jsonl=True)).splitlines())
    assert [(one["prompt"], one["reason"]) for one in objects] == [
        (sample.prompt.text, sample.reason) for sample in some if sample.prompt.text in text
    ]


def test_ctrl_c_prints_no_half_character_but_the_beginning_of_a_stop(capsys):
    tokenizer = Pieces([b"a", b"<", "한".encode()[:2]])
    events = [(0, 0, None), (0, 1, None), (0, 2, None), (0, 0, "Ctrl-C")]
    (sample,) = samples(tokenizer, "x", stops=["<END>", "<한>"])
    assert written(capsys, [sample], events) == ["xa", "", "", "<\n"]
    assert (sample.text, sample.tokens, sample.reason) == ("a<", [0, 1, 2], "interrupted")


@pytest.mark.parametrize("n_events", [0, 1, 5])
def test_an_error_is_told_on_a_line_of_its_own(capsys, n_events):
    def failing():
        for row, id, reason in EVENTS[:n_events]:
            yield row, id, 0.0, reason
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        Writer(samples(None, "x", "y", "z")).write(failing())
    assert capsys.readouterr().out == {0: "", 1: "xa\n", 5: "xabc\n\nybc\n\nz\n"}[n_events]
