import os
import random
import re
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tiktoken
from tiktoken_ext import openai_public

from config.errors import UserError
from data import tokenizer as tokenizers
from data.tokenizer import SPLIT_PATTERN, StreamDecoder, last_cut, load_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[2]
AWKWARD = [
    "",
    "a",
    " leading",
    "two  spaces\n\n\nand a\ttab ",
    "before !",
    unicodedata.normalize("NFC", "é한글"),
    unicodedata.normalize("NFD", "é한글"),
    "🎉👨‍👩‍👧‍👦",
    "one\r\ntwo\rthree\n",
    "\ufeff\x00\x07\x1b\x85\u2028\U0010ffff",
    "<|endoftext|>",
]
TEXT = "The cat saw the cat that saw the other cat's 12345 mice.\n아버지가 방에 들어가신다.\n" * 20
KINDS = ["bytes", "chars", "bpe", "gpt2"]


@pytest.fixture
def make(monkeypatch):
    """Makes a tokenizer of any kind without a network; this gpt2 has few ids, and a hole among them as cl100k_base."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" ca": 259}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r"\s?\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260, "<|other|>": 262}
    )
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "gpt2", encoding)
    return lambda kind: train_tokenizer(kind, [TEXT, *AWKWARD], 300)


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [False, True])
def test_f38_round_trip_is_exact(make, kind, saved, tmp_path):
    tokenizer = make(kind)
    if saved:
        tokenizer.save(tmp_path)
        tokenizer, before = load_tokenizer(tmp_path), tokenizer
        assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_id) == (kind, before.vocab_size, before.end_id)
        assert tokenizer.encode(TEXT) == before.encode(TEXT)
    for text in [*AWKWARD, "".join(AWKWARD), TEXT]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert all(type(token_id) is int and 0 <= token_id < tokenizer.vocab_size for token_id in ids)


def test_sizes_and_the_end_of_text(make):
    alphabet = sorted(set(TEXT + "".join(AWKWARD)))
    assert (make("bytes").vocab_size, make("bytes").end_id) == (257, 256)
    assert (make("chars").vocab_size, make("chars").end_id) == (len(alphabet) + 1, len(alphabet))
    assert make("chars").encode("".join(alphabet)) == list(range(len(alphabet)))
    assert (make("bpe").vocab_size, make("bpe").end_id) == (300, 299)
    assert (make("gpt2").vocab_size, make("gpt2").end_id) == (263, 260)
    for kind in KINDS:
        assert make(kind).decode([make(kind).end_id]) == ""


def brute_force_bpe(text: str, ranks: dict[bytes, int]) -> list[int]:
    ids = []
    for word in regex.findall(SPLIT_PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def brute_force_training(text: str, n_merges: int) -> list[bytes]:
    """The pieces learnt: the most frequent pair first, of equals the one with the smaller ids."""
    pieces = [bytes([byte]) for byte in range(256)]
    words = [list(word.encode()) for word in regex.findall(SPLIT_PATTERN, text)]
    for _ in range(n_merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        pieces.append(pieces[pair[0]] + pieces[pair[1]])
        for word in words:
            for i in range(len(word) - 1):
                if tuple(word[i : i + 2]) == pair:
                    word[i : i + 2] = [len(pieces) - 1]
    return pieces[256:]


def test_bpe_ids_are_those_of_the_definition_and_of_tiktoken():
    rng = random.Random(0)
    text = "".join(rng.choice(["the ", "cat", "s ", "'s", "한글 ", "글", "12345", "\n", "  ", "!"]) for _ in range(800))
    tokenizer = train_tokenizer("bpe", [text], 320)
    reference = tiktoken.Encoding("x", pat_str=SPLIT_PATTERN, mergeable_ranks=tokenizer.ranks, special_tokens={})
    assert tokenizer.encode(text) == brute_force_bpe(text, tokenizer.ranks) == reference.encode_ordinary(text)
    assert max(tokenizer.encode(text)) > 256


def test_f39_training_is_deterministic_and_breaks_ties_by_id(tmp_path):
    text = "ab cd ef gh ij kl mn op qr st uv wx yz " * 5  # many equal pair counts
    tokenizer = train_tokenizer("bpe", [text], 263)
    assert list(tokenizer.ranks)[256:] == brute_force_training(text, 6)
    tokenizer = train_tokenizer("bpe", [TEXT], 277)
    assert list(tokenizer.ranks)[256:] == brute_force_training(TEXT, 20)

    code = "import sys; from data.tokenizer import train_tokenizer as t; t('bpe', [sys.argv[1]], 263).save(sys.argv[2])"
    saved = []
    for seed in "012":
        folder = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code, text, str(folder)], env=environment, check=True)
        saved.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert saved[0] == saved[1] == saved[2]
    assert saved[0].keys() == {"tokenizer.json", "ranks.tiktoken"}


def test_a_small_text_gives_a_small_vocabulary():
    tokenizer = train_tokenizer("bpe", ["abab"], 1000)
    assert tokenizer.vocab_size == 256 + 3  # ab, abab, end of text
    assert tokenizer.encode("abab") == [257]


@pytest.mark.parametrize("kind", KINDS)
def test_f23_ids_outside_the_vocabulary_do_not_break_decoding(make, kind):
    tokenizer = make(kind)
    for token_id in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1):
        assert tokenizer.decode([*tokenizer.encode("a"), token_id, *tokenizer.encode("a")]) == "a\ufffda"
        assert StreamDecoder(tokenizer).push(token_id) == "\ufffd"
    rng = random.Random(0)
    for length in range(50):
        tokenizer.decode([rng.randrange(tokenizer.vocab_size + 4) for _ in range(length)])


@pytest.mark.parametrize("kind", KINDS)
def test_f24_streaming_never_splits_a_character(make, kind):
    tokenizer = make(kind)
    text = "".join(AWKWARD[5:8])
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert decoder.flush() == ""


def test_f24_invalid_bytes_neither_stall_nor_get_lost(make):
    tokenizer, rng = make("bytes"), random.Random(0)
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(byte) for byte in b"\xff\xe2\x82a\xe2"] == ["\ufffd", "", "", "\ufffda", ""]
    assert decoder.flush() == "\ufffd"
    for _ in range(200):
        ids = [rng.choice([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF]) for _ in range(20)]
        decoder = StreamDecoder(tokenizer)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == bytes(ids).decode("utf-8", "replace")


def test_f25_an_unknown_character_is_named():
    tokenizer = train_tokenizer("chars", ["ab\nba\n"], 0)
    message = refusal(tokenizer.encode, "abz?")
    assert "'z' (U+007A)" in message
    assert " 3 " in message
    assert "U+1F389" in refusal(tokenizer.encode, "a🎉")
    assert "U+0000" in refusal(train_tokenizer("chars", [], 0).encode, "\0")


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_refused(make, kind):
    assert "U+D83C" in refusal(make(kind).encode, "a\ud83c")


@pytest.mark.parametrize("kind", KINDS)
def test_f37_a_spelt_out_special_token_is_ordinary_text(make, kind):
    tokenizer = make(kind)
    ids = tokenizer.encode("a<|endoftext|>b<|other|>")
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b<|other|>"


def test_f21_the_empty_text_has_no_ids(make):
    assert [make(kind).encode("") for kind in KINDS] == [[], [], [], []]


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_a_million_spaces_do_not_break_encoding(make, kind):
    tokenizer = make(kind)
    for text in ("a" + " " * 1_200_000 + "b", "\n" * 1_200_000 + "b", "a" * 1_200_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    run = "a" + " " * 100_000 + "b"  # not cut: exactly tiktoken's ids
    assert tokenizer.encode(run) == tokenizer._encoding.encode_ordinary(run)


def test_a_million_spaces_do_not_break_training():
    assert train_tokenizer("bpe", ["a" + " " * 1_200_000 + "b"], 260).vocab_size == 260


def test_f36_everything_but_published_encodings_works_offline(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise AssertionError("went to the network")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("socket.socket.connect", no_network)
    for kind in ("bytes", "chars", "bpe"):
        train_tokenizer(kind, [TEXT], 300).save(tmp_path / kind)
        assert load_tokenizer(tmp_path / kind).decode(load_tokenizer(tmp_path / kind).encode(TEXT)) == TEXT


@pytest.mark.parametrize("hangs", [False, True])
def test_f36_a_published_encoding_fails_soon_and_says_how_to_fill_the_cache(monkeypatch, tmp_path, hangs):
    over = threading.Event()

    def unreachable(*_, **__):
        if hangs:
            over.wait(60)
        raise ConnectionError

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("requests.get", unreachable)
    monkeypatch.setattr("requests.head", unreachable)
    monkeypatch.setattr(tokenizers, "PATIENCE", 0.2)
    begin = time.perf_counter()
    message = refusal(train_tokenizer, "p50k_base", [], 0)
    assert time.perf_counter() - begin < 2
    over.set()
    assert "p50k_base" in message
    assert "TIKTOKEN_CACHE_DIR" in message


def test_a_slow_but_living_download_is_waited_for(monkeypatch):
    encoding = tiktoken.Encoding("x", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={"<|endoftext|>": 1})

    def slow(name):
        time.sleep(0.5)
        return encoding

    monkeypatch.setattr("tiktoken.get_encoding", slow)
    monkeypatch.setattr("requests.head", lambda *_, **__: None)
    monkeypatch.setattr(tokenizers, "PATIENCE", 0.1)
    assert train_tokenizer("p50k_base", [], 0).vocab_size == 2


def test_an_unknown_kind_is_answered_with_a_near_one():
    assert "did you mean chars?" in refusal(train_tokenizer, "char", [], 0)
    message = refusal(train_tokenizer, "gtp2", [], 0)
    assert "gtp2" in message
    assert "did you mean gpt2?" in message
    assert "cl100k_base" in message


def test_a_damaged_tokenizer_is_named(tmp_path):
    assert str(tmp_path) in refusal(load_tokenizer, tmp_path)
    train_tokenizer("bpe", [TEXT], 300).save(tmp_path)
    (tmp_path / "ranks.tiktoken").write_bytes(b"AA== 0\nnonsense\n")
    assert str(tmp_path) in refusal(load_tokenizer, tmp_path)
    for broken in ("{", "[]", "{}", '{"name": "chars"}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        assert str(tmp_path) in refusal(load_tokenizer, tmp_path)


def published_patterns() -> dict[str, str]:
    """The patterns of tiktoken's encodings, which are code; only their ranks are downloaded."""
    patterns = {"llama3": SPLIT_PATTERN}
    with pytest.MonkeyPatch.context() as patch:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(openai_public, loader, lambda *_, **__: {})
        for name, make in openai_public.ENCODING_CONSTRUCTORS.items():
            patterns[name] = make()["pat_str"]
    return patterns


PATTERNS = published_patterns()
WORDS = "a Zz ſ ß é e\u0301 ǅ 한글 각 中文 が か\u3099 ไทย नी עב 0 12 1234 ½ Ⅳ ٣ 🎉 👨‍👩‍👧 👍🏽"
MARKS = "' 's 'S 'll 'ſ ’ ’s . , ... !? :// / - _ ( ) 「 。 ， 、 ！ <|endoftext|>"
NASTY = [*WORDS.split(), *MARKS.split(), *" \n\t\r\u00a0\u3000\u2028\u0085\x1c", "  ", "\n\n", "\r\n"]
NASTY += "\u200b\ufeff\0\u200d\ufe0f\U000e0001\ue000\U0010ffff\u0378"


def cuts(text: str) -> list[int]:
    """Every place where `last_cut` would ever cut `text`."""
    found = {last_cut(text[:end]) for end in range(len(text) + 1)}
    return sorted(found - {0})


@pytest.mark.parametrize("name", PATTERNS)
def test_ids_do_not_change_where_a_long_text_is_cut(name):
    """The whole text's pieces end at every such place, and are those of the parts; the ids therefore too."""
    rng, text = random.Random(0), "".join(NASTY)
    ranks = train_tokenizer("bpe", [text * 3, *(a + b for a in NASTY for b in NASTY)], 1500).ranks
    tokenizer = tokenizers.BPETokenizer(name, ranks, PATTERNS[name], len(ranks), len(ranks) + 1)
    pattern, n_cuts = regex.compile(PATTERNS[name]), 0
    for _ in range(1500):
        text = "".join(rng.choices(NASTY, k=rng.randrange(2, 40)))
        places = [0, *cuts(text), len(text)]
        parts = [text[start:end] for start, end in pairwise(places)]
        assert tokenizer.encode(text) == [token for part in parts for token in tokenizer.encode(part)], (text, parts)
        assert pattern.findall(text) == [piece for part in parts for piece in pattern.findall(part)], (text, parts)
        n_cuts += len(parts) - 1
    if n_cuts < 3000:
        pytest.fail(f"only {n_cuts} cuts")


@pytest.mark.parametrize(
    ("name", "careless"),
    [
        ("o200k_base", r".*\w(?=\W)"),  # also before an apostrophe or an accent
        *((name, cut) for name in ("llama3", "gpt2", "cl100k_base") for cut in (r".*\s(?=\S)", r".*\w(?=\w)")),
    ],
)
def test_ids_would_change_at_a_careless_cut(monkeypatch, name, careless):
    monkeypatch.setattr(tokenizers, "_LAST_CUT", re.compile(careless, re.DOTALL))
    with pytest.raises(AssertionError):
        test_ids_do_not_change_where_a_long_text_is_cut(name)


def test_a_cut_is_found_wherever_a_text_has_spaces_or_stops():
    text = "他走了很远的路，"
    assert last_cut("one two three") == 7
    assert last_cut(text + "天黑") == len(text) - 1
    assert last_cut("아버지가 방에") == 4
    assert [last_cut(text) for text in ("", "word", "   ", "'' ''", "中文没有空格")] == [0] * 5


def test_chars_are_those_of_all_texts():
    texts = ["ba", "", "\0é", "\U0010ffff한"]
    assert train_tokenizer("chars", iter(texts), 0).alphabet == "".join(sorted(set("".join(texts))))
