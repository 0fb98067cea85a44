import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
from config.schema import DataConfig
from data import prepare as module
from data import sources
from data.prepare import main
from data.sources import Document
from data.tokenizer import train_tokenizer
from tests.corpora import ROOT, TEXT, command, refusal, texts, written


@pytest.fixture
def three_stories(monkeypatch):
    """An endless source of three documents, over and over; the third is for validation."""

    def draws(seed, val_fraction):
        assert seed == 0  # whatever the run's
        while True:
            yield "train", SimpleNamespace(text="one", floor=(1.0, 0.5))
            yield "train", SimpleNamespace(text="two 둘", floor=(2.0, 0.25))
            yield "val", SimpleNamespace(text="third story", floor=(4.0, 0.125))

    stories = SimpleNamespace(SEED=0, files=dict, draws=draws, floor=lambda split, story: (*story.floor, 1.0))
    monkeypatch.setattr(data, "stories", stories, raising=False)


@pytest.fixture
def documents(monkeypatch):
    """Makes pydoc give other documents."""
    return lambda *given: monkeypatch.setattr(sources, "_pydoc", lambda: iter(given))


# What is written


def test_a_file_is_cut_by_position_as_tiny_shakespeare_is(prepare):
    corpus = prepare(("abcdefghij" * 111_540)[:1_115_394].encode(), tokenizer="chars")
    assert (len(corpus.train.tokens), len(corpus.val.tokens)) == (1_003_854, 111_540)  # int(n * 0.9), the classic split
    assert corpus.tokenizer.vocab_size == 11
    assert corpus.largest_id == 9  # a single file has no end-of-text id
    assert (corpus.train.tokens[:4].tolist(), corpus.val.tokens[:4].tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_a_corpus_is_the_text_and_its_counts(prepare, kind):
    corpus = prepare(TEXT.encode(), tokenizer=kind, val_fraction=0.25)
    cut = int(len(TEXT) * 0.75)
    halves = TEXT[:cut], TEXT[cut:]
    for tokens, text in zip((corpus.train.tokens, corpus.val.tokens), halves, strict=True):
        assert isinstance(tokens, np.memmap)
        assert not tokens.flags.writeable
        assert corpus.tokenizer.decode(tokens.tolist()) == text
        assert tokens.tolist() == corpus.tokenizer.encode(text)
    assert (corpus.train.n_bytes, corpus.val.n_bytes) == tuple(len(text.encode()) for text in halves)
    assert (corpus.documents, corpus.pairs, corpus.held_out, corpus.train.n_documents) == (False, False, None, 1)
    assert corpus.largest_id == max(corpus.train.tokens.max(), corpus.val.tokens.max())
    if kind == "bpe":
        assert corpus.tokenizer.ranks == train_tokenizer("bpe", [TEXT], 1024).ranks
    assert (corpus.folder / "train.bin").read_bytes() == corpus.train.tokens.astype("<u2").tobytes()


def test_a_tokenizer_that_is_given_is_taken_and_told_from_others(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    config = DataConfig(source=str(tmp_path / "text.txt"), tokenizer="bpe", bpe_vocab_size=300)
    given = [train_tokenizer("bpe", [text], 300) for text in (TEXT + "zebra" * 50, TEXT + "abacus" * 50)]
    corpora = [module.prepare(config, cache_dir=tmp_path / "cache", tokenizers={"tokenizer": one}) for one in given]
    corpora.append(module.prepare(config, cache_dir=tmp_path / "cache"))
    assert [corpus.tokenizer.fingerprint for corpus in corpora[:2]] == [one.fingerprint for one in given]
    assert len({corpus.key for corpus in corpora}) == 3
    for corpus, tokenizer in zip(corpora, given, strict=False):
        assert corpus.train.tokens.tolist() == tokenizer.encode(TEXT[: int(len(TEXT) * 0.9)])


def test_so_are_two_tokenizers_of_pairs(tmp_path):
    (tmp_path / "pairs.tsv").write_text("ab\tba\n" * 20, encoding="utf-8")
    config = DataConfig(source=str(tmp_path / "pairs.tsv"), tokenizer="chars", target_tokenizer="chars")
    given = {
        "tokenizer": train_tokenizer("chars", ["abx"], 0),
        "source_tokenizer": train_tokenizer("chars", ["abyz"], 0),
    }
    corpus = module.prepare(config, pairs=True, cache_dir=tmp_path / "cache", tokenizers=given)
    assert (corpus.tokenizer.alphabet, corpus.source_tokenizer.alphabet) == ("abx", "abyz")


def test_f26_ids_beyond_16_bits_come_back(prepare):
    text = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0xFEFF), *range(0x10000, 0x18000)]))
    corpus = prepare(text.encode(), tokenizer="chars")
    assert corpus.tokenizer.vocab_size > 70_000
    assert corpus.train.tokens.dtype == corpus.val.tokens.dtype == np.dtype("<u4")
    assert np.concatenate([corpus.train.tokens, corpus.val.tokens]).tolist() == list(range(len(text)))
    assert corpus.largest_id == len(text) - 1
    assert prepare(b"ab" * 9, tokenizer="chars").train.tokens.dtype == np.dtype("<u2")


def test_f33_the_end_of_text_follows_each_document(prepare, three_stories):
    corpus = prepare("stories", tokenizer="bytes", max_tokens=55)
    train, val = b"one|two \xeb\x91\x98|", b"third story|"  # 12 tokens each
    for split, expected in ((corpus.train, train * 3), (corpus.val, val * 2)):
        assert split.tokens.tolist() == [256 if byte == ord("|") else byte for byte in expected]
    assert corpus.documents  # 60 tokens: the first whole documents that reach max_tokens
    assert corpus.train[1:] == (3 * 10, 6, None, None)  # its entropy takes time, and nobody asks for it
    assert corpus.val[1:] == (2 * 11, 2, (8.0, 0.25, 2.0), None)


def test_a_source_may_hold_documents_out(prepare, monkeypatch, three_stories):
    stories = [(split, SimpleNamespace(text=split, floor=(1.0, 1.0))) for split in ("train", "held_out", "val")]
    data.stories.draws = lambda seed, val_fraction: iter(stories * 2)
    corpus = prepare("stories", tokenizer="bytes")
    assert texts(corpus, corpus.held_out) == ["held_out"] * 2
    assert corpus.held_out[1:] == (16, 2, (2.0, 2.0, 2.0), None)
    assert texts(corpus, corpus.val) == ["val"] * 2


@pytest.mark.parametrize("n_documents", [0, 1, 2, 3, 7])
def test_f28_few_documents_give_two_splits_or_a_refusal(prepare, documents, n_documents):
    given = [f"document {i}" for i in range(n_documents)]
    documents(*map(Document, given))
    if n_documents < 2:
        assert f"too few documents ({n_documents})" in refusal(prepare, "pydoc", tokenizer="bytes")
    else:
        corpus = prepare("pydoc", tokenizer="bytes")
        assert texts(corpus, corpus.val) == given[1:2]
        assert texts(corpus, corpus.train) == given[:1] + given[2:]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_validation_is_spread_evenly_over_the_documents(prepare, documents, share):
    documents(*(Document(str(i)) for i in range(100)))
    corpus = prepare("pydoc", tokenizer="bytes", val_fraction=share)
    chosen = [int(text) for text in texts(corpus, corpus.val)]
    gaps = np.diff(chosen)
    assert chosen[0] == 1
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    assert len(chosen) == pytest.approx(100 * share, abs=1)
    assert texts(corpus, corpus.train) == [str(i) for i in range(100) if i not in chosen]


def test_chars_on_an_endless_source_knows_every_character(prepare, three_stories):
    def draws(seed, val_fraction):
        for i in range(10**9):
            yield ("train", "val")[i % 2], SimpleNamespace(text=chr(0x10000 + i) * 10, floor=())

    data.stories.draws = draws
    corpus = prepare("stories", tokenizer="chars", max_tokens=1000)
    assert len(corpus.train.tokens) + len(corpus.val.tokens) == 1001
    assert corpus.val.floor == (corpus.val.n_documents,)


def test_stories_and_pydoc_are_deterministic(prepare, tmp_path):
    for source, options in {"stories": {"max_tokens": 20_000}, "pydoc": {}}.items():
        corpus = prepare(source, **options)
        splits = [split for split in (corpus.train, corpus.val, corpus.held_out) if split]
        assert sum(len(split.tokens) for split in splits) >= 20_000
        words = [source, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
        result = command(*words, cwd=tmp_path, PYTHONHASHSEED="7")
        assert result.returncode == 0, result.stderr
        assert written(tmp_path / "data" / "cache" / corpus.folder.name) == written(corpus.folder)


# How it streams


def test_a_long_text_has_the_ids_of_the_whole_and_the_same_bytes_whatever_the_workers(prepare, monkeypatch, tmp_path):
    """Cut into many parts and batches, a character or more at a time, at the first and the last place."""
    rng = random.Random(0)
    words = ["the", "cat's", "별", "123456", "\n\n", "  ", "...", "한글은", "中文没有空格，", "\t", "e\u0301", "🎉"]
    text = "".join(rng.choice(words) + rng.choice(["", " ", "\n"]) for _ in range(20_000))
    whole = prepare(text.encode(), val_fraction=0.3)
    ids = [whole.tokenizer.encode(part) for part in (text[: int(len(text) * 0.7)], text[int(len(text) * 0.7) :])]
    assert [whole.train.tokens.tolist(), whole.val.tokens.tolist()] == ids
    files = written(whole.folder)
    for workers, part, block in [(1, 2**16, 2**20), (2, 100, 10_000), (8, 1, 1000), (3, 7, 13)]:
        shutil.rmtree(tmp_path / "cache")
        monkeypatch.setattr(module, "WORKERS", workers)
        monkeypatch.setattr(module, "PART", part)
        monkeypatch.setattr(module, "BATCH", 3 * part)
        monkeypatch.setattr(sources, "BLOCK", block)
        assert written(prepare(tmp_path / "text.txt", val_fraction=0.3).folder) == files


@pytest.mark.parametrize(("kind", "longest"), [("bytes", 100), ("chars", 100), ("bpe", 5000)])
def test_only_a_bpe_waits_for_a_place_to_cut(prepare, monkeypatch, kind, longest):
    """A text without any, such as a genome, is one part to a bpe; else parts stay short whatever the text."""
    lengths, encode_all = [], module._write

    def write(folder, parts, *arguments):
        parts = list(parts)
        lengths.extend(len(part.text) for part in parts)
        return encode_all(folder, parts, *arguments)

    monkeypatch.setattr(module, "_write", write)
    monkeypatch.setattr(module, "PART", 100)
    corpus = prepare(b"acgt" * 2500, tokenizer=kind, val_fraction=0.5)
    assert max(lengths) == longest
    assert corpus.tokenizer.decode(corpus.train.tokens) == "acgt" * 1250


def test_long_documents_are_cut_too_and_end_once(prepare, documents, monkeypatch):
    long = "a word " * 1000
    documents(Document("first"), Document(long), Document(long[:3000], more=True), Document(long[3000:]), Document("x"))
    monkeypatch.setattr(module, "PART", 50)
    corpus = prepare("pydoc", val_fraction=0.5)
    assert texts(corpus, corpus.train) == ["first", long]
    assert texts(corpus, corpus.val) == [long, "x"]
    assert corpus.train.tokens.tolist() == [
        id for text in ("first", long) for id in [*corpus.tokenizer.encode(text), corpus.tokenizer.end_id]
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """The peak of a process of its own, for a text and for one four times as long."""
    code = (
        "import re, sys; from data import prepare; from config.schema import DataConfig\n"
        "prepare.SAMPLE_BYTES = 1_000_000\n"
        "prepare.prepare(DataConfig(source=sys.argv[1], bpe_vocab_size=300), cache_dir=sys.argv[2])\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    peaks = []
    for n in (1, 4):
        with (tmp_path / "text.txt").open("wb") as file:
            file.writelines([TEXT.encode()] * 4000 * n)  # 14 MB and 57 MB
        line = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(tmp_path / "cache")]
        result = subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
        peaks.append(int(result.stdout) >> 10)
    assert peaks[1] - peaks[0] < 15  # MB


def test_a_bpe_is_trained_on_a_sample_from_everywhere(monkeypatch):
    everything = [f"{i:04}" for i in range(1000)]
    assert module._evenly(everything, 4000) == everything
    for n_bytes in (3999, 1000, 100, 4):
        kept = module._evenly(everything, n_bytes)
        assert n_bytes / 2 <= 4 * len(kept) <= n_bytes
        assert len(set(np.diff([int(text) for text in kept]))) <= 1
        assert int(kept[-1]) >= 999 - 2 * 4000 / n_bytes


def test_progress_is_a_line_every_few_seconds_or_one_that_renews_itself(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    for terminal, expected in [
        (False, "data: 50\ndata: 100\n"),
        (True, "\r\x1b[Kdata: 10\r\x1b[Kdata: 12\r\x1b[Kdata: 14\r\x1b[K"),
    ]:
        now = 0.0
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        progress = module.Progress()
        for step in range(15 if terminal else 120):
            now = step / 10
            progress.show(str(step))
        progress.close()
        assert capsys.readouterr().err == expected


# The cache


def test_an_unchanged_corpus_is_reused(prepare, monkeypatch, capsys):
    first = prepare(TEXT.encode(), tokenizer="bpe")
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    again = prepare(TEXT.encode(), tokenizer="bpe", max_tokens=7)  # which does not matter to a file
    assert again.folder == first.folder
    assert again.train.tokens.tolist() == first.train.tokens.tolist()
    assert again.tokenizer.encode(TEXT) == first.tokenizer.encode(TEXT)
    assert capsys.readouterr().err.splitlines()[-1] == f"data: reusing {first.folder}"


def test_what_changes_the_corpus_is_noticed(prepare, tmp_path, three_stories):
    folders = [prepare(TEXT.encode(), tokenizer="chars").folder]
    stat = (tmp_path / "text.txt").stat()
    (tmp_path / "text.txt").write_bytes(TEXT.replace("cat", "cow").encode())
    os.utime(tmp_path / "text.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time, other text
    changed = prepare(tmp_path / "text.txt", tokenizer="chars")
    assert "cow" in changed.tokenizer.decode(changed.train.tokens)
    folders.append(changed.folder)
    folders += [prepare(tmp_path / "text.txt", tokenizer="bytes").folder]
    folders += [prepare(tmp_path / "text.txt", tokenizer="chars", val_fraction=0.2).folder]
    folders += [prepare(tmp_path / "text.txt", bpe_vocab_size=size).folder for size in (260, 270)]
    folders += [prepare("stories", tokenizer="bytes", max_tokens=n).folder for n in (50, 60)]
    assert len(set(folders)) == len(folders) == 8


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_preparation_leaves_nothing(prepare, monkeypatch, tmp_path, kind):
    def interrupt(*_):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(module, "_report", interrupt)  # everything is written by then
        with pytest.raises(kind):
            prepare(TEXT.encode(), tokenizer="chars")
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(prepare(TEXT.encode(), tokenizer="chars").train.tokens) == int(len(TEXT) * 0.9)


def test_a_killed_preparation_leaves_nothing_that_looks_finished(prepare, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    code = (
        "import os, sys; from config.schema import DataConfig; from data import prepare\n"
        "prepare._report = lambda *_: os._exit(9)\n"
        "prepare.prepare(DataConfig(source=sys.argv[1]), cache_dir=sys.argv[2])"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(line, env=environment, capture_output=True).returncode == 9
    left = [path.name[:11] for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert left == [".preparing-"]
    corpus = prepare(tmp_path / "text.txt")
    assert corpus.tokenizer.decode(corpus.train.tokens) == TEXT[: int(len(TEXT) * 0.9)]


def damage_tokens(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.write(b"\xff\xff")  # the size stays


@pytest.mark.parametrize(
    "damage",
    [
        damage_tokens,
        lambda folder: (folder / "val.bin").write_bytes(b""),
        lambda folder: (folder / "val.bin").unlink(),
        lambda folder: (folder / "meta.json").write_text("{"),
        lambda folder: (folder / "meta.json").write_text("[]"),
        lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text("{}"),
        lambda folder: [path.unlink() for path in folder.rglob("*") if path.is_file()],
    ],
)
def test_a_damaged_corpus_is_prepared_again(prepare, capsys, damage):
    first = prepare(TEXT.encode(), tokenizer="chars")
    tokens = first.train.tokens.tolist()
    damage(first.folder)
    again = prepare(TEXT.encode(), tokenizer="chars")
    assert again.folder == first.folder
    assert again.train.tokens.tolist() == tokens
    assert f"again, because {first.folder} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", [False, True])
def test_two_preparations_at_once_both_succeed(prepare, monkeypatch, tmp_path, damaged):
    if damaged:
        (prepare(TEXT.encode(), tokenizer="chars").folder / "val.bin").unlink()
    build, others = module._build, []

    def overtaken(*arguments):
        build(*arguments)
        monkeypatch.setattr(module, "_build", build)
        others.append(prepare(TEXT.encode(), tokenizer="chars"))  # another one starts and finishes meanwhile

    monkeypatch.setattr(module, "_build", overtaken)
    corpus = prepare(TEXT.encode(), tokenizer="chars")
    assert others[0].folder == corpus.folder
    assert others[0].train.tokens.tolist() == corpus.train.tokens.tolist()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [corpus.folder.name]


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "cache").write_text("a file")
    config = DataConfig(source=str(tmp_path / "text.txt"))
    assert "cannot be prepared" in refusal(module.prepare, config, cache_dir=tmp_path / "cache")


# The command


def test_the_command_says_what_it_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abab" * 100)
    main(["text.txt", "--bpe-vocab-size", "300", "--val-fraction", "0.5"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "data: preparing text.txt"
    assert "yields only 267 of 300 ids" in lines[1]
    assert "tokens to train on and" in lines[2]
    assert lines[3].endswith(" 66.67 bytes and 66.67 characters per token")
    [folder] = (tmp_path / "data" / "cache").iterdir()
    assert lines[4] == f"data: in {folder.relative_to(tmp_path)}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing.txt"], "there is no data.source = nothing.txt"),
        (["stories", "--val-fraction", "2"], "val_fraction = 2.0"),
        (["stories", "--bpe-vocab-size", "10"], "bpe_vocab_size = 10"),
        (["stories", "--max-tokens", "many"], "many"),
        (["stories", "--tokeniser", "chars"], "--tokeniser"),
        (["stories", "--tokenizer", "char"], "did you mean chars?"),
    ],
)
def test_mistakes_on_the_command_line_exit_with_2(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("old", "new"), [('"<u2"', '"<u4"'), ('"n_bytes": ', '"n_bytes": 1'), ('"train"', '"trayn"'), ("{", "{}, {")]
)
def test_a_changed_description_is_noticed(prepare, capsys, old, new):
    corpus = prepare(TEXT.encode())
    expected, meta = corpus.train.tokens.tolist(), corpus.folder / "meta.json"
    meta.write_text(meta.read_text("utf-8").replace(old, new, 1), "utf-8")
    again = prepare(TEXT.encode())
    assert again.train.tokens.tolist() == expected
    assert again.val.n_bytes == corpus.val.n_bytes
    assert "is damaged" in capsys.readouterr().err


def test_a_source_that_changes_while_it_is_read_is_refused(prepare, tmp_path, monkeypatch):
    path, survey = tmp_path / "text.txt", module._survey

    def late(*arguments):
        path.write_bytes(b"other words " * 50)
        return survey(*arguments)

    path.write_bytes(TEXT.encode())
    monkeypatch.setattr(module, "_survey", late)
    assert f"data.source = {path} has changed while it was read; try again" in refusal(prepare, path)
    assert not any((tmp_path / "cache").iterdir())


def test_what_killed_preparations_left_is_cleared_away_a_day_later(prepare, tmp_path):
    old, new = (tmp_path / "cache" / f".preparing-{age}" for age in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "train.bin").touch()
    for path in (old / "train.bin", old):
        os.utime(path, (0, 0))
    prepare(TEXT.encode())
    assert not old.exists()
    assert new.exists()
