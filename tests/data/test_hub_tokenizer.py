"""Tokenizers in Hugging Face's layout give the ids that Hugging Face's library gives; what cannot is refused."""

import json
import os
import random
import shutil
import unicodedata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from config.errors import UserError
from data import hub_tokenizer
from data.hub_tokenizer import GPT2_PATTERN, read_tokenizer, special_ids, write_tokenizer
from data.tokenizer import END_OF_TEXT, SPLIT_PATTERN, BPETokenizer, load_tokenizer, train_tokenizer

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")

TEXT = (
    "The cat saw the cat that saw the other cat's 12345 mice.\n아버지가 방에 들어가신다.\n\n  aaa aaaa é 星 🎉 x=1;"
    * 20
)


def random_texts(n: int, seed: int = 0) -> list[str]:
    """Strings of characters from all of Unicode, of white space, digits, repetitions and what texts should not say."""
    draw = random.Random(seed)
    pieces = ["'s", "'LL", "123", "aaaa", "the ", END_OF_TEXT, "<|im_end|>", "ababab", "\r\n", "  ", "\t", "\u3000"]

    def character() -> str:
        while True:  # neither surrogates nor what no version of Unicode has named yet
            found = chr(draw.randint(0, 0x10FFFF))
            if unicodedata.category(found) not in ("Cs", "Cn"):
                return found

    kinds = [character, lambda: chr(draw.randint(32, 126)), lambda: chr(draw.randint(0xAC00, 0xD7A3)), lambda: " "]
    kinds.append(lambda: draw.choice(pieces))
    return ["".join(draw.choice(kinds)() for _ in range(draw.randint(0, 40))) for _ in range(n)]


TEXTS = random_texts(1000)


def trained(pre_tokenizer, **options) -> tokenizers.Tokenizer:
    """A byte-level BPE that their library has trained."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    theirs.pre_tokenizer = pre_tokenizer
    theirs.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    names = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    theirs.train_from_iterator([TEXT, *random_texts(200, seed=1)], trainer)
    return theirs


def byte_level(use_regex: bool = True, **options):
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex, **options)


def sequence(*parts):
    return tokenizers.pre_tokenizers.Sequence([*parts])


LLAMA3 = sequence(
    tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated", invert=False), byte_level(False)
)
KINDS = {
    "gpt2": byte_level(),
    "llama3": LLAMA3,
    "digits": sequence(tokenizers.pre_tokenizers.Digits(individual_digits=True), byte_level()),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One of each kind, with the files that lie beside it."""
    found = {}
    for kind, pre_tokenizer in KINDS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        trained(pre_tokenizer).save(str(found[kind] / "tokenizer.json"))
        config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": "{{ 1 + 1 }}"}
        (found[kind] / "tokenizer_config.json").write_text(json.dumps(config))
    return found


def opened(folder: Path):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_tokenizer_gives_their_ids(kind, folders):
    ours, theirs = read_tokenizer(folders[kind]), tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    theirs.encode_special_tokens = True  # in a text they are text
    assert ours.vocab_size == theirs.get_vocab_size() == 700
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_kept_on_the_way_through_a_run_and_out(kind, folders, tmp_path):
    ours = read_tokenizer(folders[kind])
    assert (ours.end_id, ours.piece(0), ours.piece(1), ours.piece(2)) == (2, END_OF_TEXT.encode(), b"<|im_start|>", b"")
    ours.save(tmp_path / "run")
    kept = load_tokenizer(tmp_path / "run")
    assert kept.fingerprint == ours.fingerprint
    write_tokenizer(kept, tmp_path)
    theirs = opened(tmp_path)
    assert (theirs.bos_token, theirs.eos_token_id, theirs.chat_template) == ("<|im_start|>", 2, "{{ 1 + 1 }}")
    assert theirs.encode("<|im_start|>cat<|im_end|>")[:1] == [1]
    assert special_ids(kept) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    plain = [text for text in TEXTS if "<|" not in text]
    assert [theirs.encode(text) for text in plain] == [ours.encode(text) for text in plain]
    again = read_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint
    assert again.hugging_face["added_tokens"] == ours.hugging_face["added_tokens"]


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_what_is_exported_gives_identical_ids_on_random_texts(kind, tmp_path):
    ours = train_tokenizer(kind, [TEXT, *TEXTS], vocab_size=600)
    write_tokenizer(ours, tmp_path)
    theirs = opened(tmp_path)
    assert [theirs.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert [theirs.decode(ours.encode(text)) for text in TEXTS] == TEXTS
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (ours.vocab_size, ours.end_id, ours.end_id)
    assert read_tokenizer(tmp_path).fingerprint == ours.fingerprint


def test_a_chat_template_in_a_file_of_its_own_is_kept(folders, tmp_path):
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ 2 + 2 }}")
    ours = read_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write_tokenizer(ours, tmp_path)
    assert opened(tmp_path).chat_template == "{{ 2 + 2 }}"


def test_what_is_put_before_a_prompt_is_kept(folders, tmp_path):
    theirs = tokenizers.Tokenizer.from_file(str(folders["llama3"] / "tokenizer.json"))
    template = tokenizers.processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    theirs.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = read_tokenizer(tmp_path, end_id=0)
    ours.save(tmp_path / "run")
    assert (ours.start, load_tokenizer(tmp_path / "run").start) == ((1,), (1,))
    assert [*ours.start, *ours.encode("the cat")] == theirs.encode("the cat").ids
    write_tokenizer(ours, tmp_path)
    assert opened(tmp_path).encode("the cat") == theirs.encode("the cat").ids
    assert read_tokenizer(folders["llama3"]).start == ()


def test_a_published_encoding_whose_ids_have_gaps_keeps_them(tmp_path):
    trained = train_tokenizer("bpe", [TEXT], vocab_size=400)
    ranks = trained.ranks | {b"zqxjk": 420}  # of which no merge makes anything
    ours = BPETokenizer("gpt2", ranks, GPT2_PATTERN, end_id=450, vocab_size=460)
    write_tokenizer(ours, tmp_path)
    theirs = opened(tmp_path)
    assert theirs.eos_token_id == 450
    assert theirs.encode("zqxjk") == ours.encode("zqxjk") == [420]
    assert [theirs.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_gpt2s_two_files_are_read_as_well(tmp_path):
    theirs = trained(byte_level())
    theirs.model.save(str(tmp_path))
    ours = read_tokenizer(tmp_path, end_id=0)
    assert (ours.end_id, ours.piece(0)) == (0, b"")
    theirs.encode_special_tokens = True
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    write_tokenizer(ours, tmp_path)
    assert (opened(tmp_path).eos_token_id, opened(tmp_path).encode(f"cat{END_OF_TEXT}")[-1]) == (0, 0)


def test_characters_whose_bytes_have_no_ids_are_named(folders, tmp_path):
    found = json.loads((folders["gpt2"] / "tokenizer.json").read_text("utf-8"))
    control = hub_tokenizer.LETTERS[4]
    found["model"]["merges"] = [pair for pair in found["model"]["merges"] if control not in "".join(pair)]
    names = {token["content"] for token in found["added_tokens"]}
    pieces = {*hub_tokenizer.LETTERS, *map("".join, found["model"]["merges"]), *names} - {control}
    found["model"]["vocab"] = {piece: id for piece, id in found["model"]["vocab"].items() if piece in pieces}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found), "utf-8")
    ours = read_tokenizer(tmp_path, end_id=0)
    assert ours.decode(ours.encode("cats é")) == "cats é"
    with pytest.raises(UserError, match=r"'\\x04' \(U\+0004\) has no id"):
        ours.encode("cats\x04")


def change(**changes):
    def changed(found: dict) -> None:
        for path, value in changes.items():
            *way, last = path.split("__")
            place = found
            for key in way:
                place = place[key]
            place[last] = value

    return changed


def swap_two_merges(found: dict) -> None:
    merges = found["model"]["merges"]
    merges[3], merges[9] = merges[9], merges[3]


def only(*merges: str, **options):
    """Their merges are these alone, and what has an id besides is what `options` name."""

    def changed(found: dict) -> None:
        pairs = [tuple(merge.split()) for merge in merges]
        names = [*hub_tokenizer.LETTERS, *map("".join, pairs), *options.pop("unmerged", ())]
        vocab = {token["content"]: token["id"] for token in found["added_tokens"]}
        found["model"] |= {"vocab": vocab | {name: 3 + n for n, name in enumerate(names)}, "merges": pairs} | options

    return changed


WRONG = {
    # b and c are merged before a is there to be: nothing is left that makes abc, but tiktoken takes a and bc.
    "never merges 'abc', which has an id": only("b c", "a b", "ab c"),
    "never merges 'cab', which has an id": only("a b", unmerged=["cab"], ignore_merges=True),
    "divides text otherwise": only(unmerged=["cab", "cxb"]),  # words to tiktoken, each where it stands alone
    # A special token that the vocabulary lacks is given the id after as many as there are: here another's.
    "two pieces of one id": lambda found: found["model"]["vocab"].pop("<|im_start|>"),
    "NFC": change(normalizer={"type": "NFC"}),
    "byte_fallback|Prepend": change(normalizer={"type": "Prepend", "prepend": "▁"}, pre_tokenizer=None),  # Llama 2
    "another order": swap_two_merges,
    "not byte-level: it has": change(model__vocab__星=700),
    "Whitespace": change(pre_tokenizer={"type": "Whitespace"}),
    "add_prefix_space": change(pre_tokenizer__add_prefix_space=True),
    "Metaspace": change(
        pre_tokenizer={"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    ),
}


def test_a_word_that_is_looked_up_needs_no_merges(folders, tmp_path):
    found = json.loads((folders["gpt2"] / "tokenizer.json").read_text("utf-8"))
    only("a b", unmerged=["cxb"], ignore_merges=True)(found)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found), "utf-8")
    ours, theirs = read_tokenizer(tmp_path, end_id=0), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [len(ours.encode(text)) for text in ("cxb", "cxbd")] == [1, 4]
    for text in ("cxb", "cxbd", "cxab"):
        assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("message", WRONG)
def test_what_tiktoken_cannot_do_is_refused(message, folders, tmp_path):
    found = json.loads((folders["gpt2"] / "tokenizer.json").read_text("utf-8"))
    WRONG[message](found)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found), "utf-8")
    with pytest.raises(UserError, match=message) as error:
        read_tokenizer(tmp_path, end_id=0)
    assert "\n" not in str(error.value)


def test_a_pattern_that_divides_otherwise_is_noticed(folders, monkeypatch):
    monkeypatch.setattr(hub_tokenizer, "GPT2_PATTERN", SPLIT_PATTERN)
    with pytest.raises(UserError, match="divides text otherwise"):
        read_tokenizer(folders["gpt2"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer.json", None, r"no tokenizer.json: Byeol reads byte-level BPE"),
        ("tokenizer_config.json", "{", r"tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "{}", "no end of text"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "no end of text"),
    ],
)
def test_missing_and_damaged_files_are_named(folders, tmp_path, file, content, message):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = content if name == file else (folders["gpt2"] / name).read_text("utf-8")
        if text is not None:
            (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UserError, match=message):
        read_tokenizer(tmp_path)
