import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
from config.errors import UserError
from config.schema import DataConfig
from data import prepare as module
from data.prepare import Corpus, main
from data.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = "The cat saw the other cat.\n아버지가 방에 들어가신다. 🎉 é\n" * 50


@pytest.fixture
def prepare(tmp_path):
    """Prepares a source, or a text written to a file, with a cache of the test's own."""

    def run(source: str | bytes | Path, seed: int = 0, **options) -> Corpus:
        if isinstance(source, bytes):
            path = tmp_path / "text.txt"
            path.write_bytes(source)
            source = path
        return module.prepare(DataConfig(source=str(source), **options), seed, tmp_path / "cache")

    return run


@pytest.fixture
def three_stories(monkeypatch):
    """An endless source of three documents, over and over."""
    monkeypatch.setattr(data, "stories", SimpleNamespace(), raising=False)
    calls = []

    def documents(seed, n_bytes):
        calls.append(seed)
        while True:
            yield from (f"one {seed}", "two", "third story")

    data.stories.documents = documents
    return calls


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "hf")} | environment
    line = [sys.executable, "-m", "data.prepare", *words]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, timeout=60)


# What is written


def test_a_file_is_cut_by_position_as_tiny_shakespeare_is(prepare):
    corpus = prepare(("abcdefghij" * 111_540)[:1_115_394].encode(), tokenizer="chars")
    assert (len(corpus.train), len(corpus.val)) == (1_003_854, 111_540)  # int(n * 0.9), the classic split
    assert corpus.tokenizer.vocab_size == 11
    assert corpus.largest_id == 9  # a single file has no end-of-text id
    assert (corpus.train[:4].tolist(), corpus.val[:4].tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_a_corpus_is_the_text_and_its_counts(prepare, kind):
    corpus = prepare(TEXT.encode(), tokenizer=kind, val_fraction=0.25)
    cut = int(len(TEXT) * 0.75)
    texts = TEXT[:cut], TEXT[cut:]
    for tokens, text in zip((corpus.train, corpus.val), texts, strict=True):
        assert isinstance(tokens, np.memmap)
        assert not tokens.flags.writeable
        assert corpus.tokenizer.decode(tokens.tolist()) == text
        assert tokens.tolist() == corpus.tokenizer.encode(text)
    assert (corpus.train_bytes, corpus.val_bytes) == tuple(len(text.encode()) for text in texts)
    assert corpus.largest_id == max(corpus.train.max(), corpus.val.max())
    if kind == "bpe":
        assert corpus.tokenizer.ranks == train_tokenizer("bpe", [TEXT], 1024).ranks
    assert (corpus.folder / "train.bin").read_bytes() == corpus.train.astype("<u2").tobytes()


def test_f26_ids_beyond_16_bits_come_back(prepare):
    text = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0xFEFF), *range(0x10000, 0x18000)]))
    corpus = prepare(text.encode(), tokenizer="chars")
    assert corpus.tokenizer.vocab_size > 70_000
    assert corpus.train.dtype == corpus.val.dtype == np.dtype("<u4")
    assert np.concatenate([corpus.train, corpus.val]).tolist() == list(range(len(text)))
    assert corpus.largest_id == len(text) - 1
    assert prepare(b"ab" * 9, tokenizer="chars").train.dtype == np.dtype("<u2")


def test_f33_the_end_of_text_follows_each_document(prepare, three_stories):
    corpus = prepare("stories", seed=5, tokenizer="bytes", max_tokens=55, val_fraction=0.34)
    stream = b"one 5|two|third story|".replace(b"|", b"\0")
    expected = [256 if byte == 0 else byte for byte in stream * 3]
    tokens = np.concatenate([corpus.train, corpus.val]).tolist()
    assert tokens == expected[: len(tokens)]
    assert len(tokens) == 66  # the first whole documents that reach max_tokens
    assert len(corpus.val) == 22 + 12  # of 9 documents the last 4: int(9 * 0.66) = 5 are for training
    assert corpus.train[-1] == corpus.val[-1] == 256
    assert corpus.train_bytes + corpus.val_bytes == 3 * (5 + 3 + 11)


@pytest.mark.parametrize("n_documents", [1, 2, 3, 7])
def test_f28_few_documents_give_two_splits_or_a_refusal(prepare, monkeypatch, n_documents):
    documents = [f"document {i}" for i in range(n_documents)]
    monkeypatch.setattr(module, "_pydoc", lambda: iter(documents))
    if n_documents == 1:
        assert "too few documents (1)" in refusal(prepare, "pydoc", tokenizer="bytes")
    else:
        corpus = prepare("pydoc", tokenizer="bytes")
        assert len(corpus.train) == sum(len(text) + 1 for text in documents[:-1])
        assert len(corpus.val) == len(documents[-1]) + 1


def test_chars_on_an_endless_source_knows_every_character(prepare, monkeypatch, three_stories):
    data.stories.documents = lambda seed, n_bytes: (chr(0x10000 + i) * 10 for i in range(10**9))
    corpus = prepare("stories", tokenizer="chars", max_tokens=1000)
    assert len(corpus.train) + len(corpus.val) == 1001


def test_stories_and_pydoc_are_deterministic(prepare, tmp_path):
    for source, options in {"stories": {"max_tokens": 20_000}, "pydoc": {}}.items():
        corpus = prepare(source, **options)
        tokens = np.concatenate([corpus.train, corpus.val])
        assert len(tokens) >= 20_000
        words = [source, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
        result = command(*words, cwd=tmp_path, PYTHONHASHSEED="7")
        assert result.returncode == 0, result.stderr
        again = tmp_path / "data" / "cache" / corpus.folder.name
        for name in ("train.bin", "val.bin", "tokenizer/ranks.tiktoken"):
            assert (again / name).read_bytes() == (corpus.folder / name).read_bytes()


# What is read


def test_f32_line_ends_and_byte_order_mark_do_not_matter(prepare, tmp_path):
    lines = "one\ntwo\n세 번째\n".encode()
    variants = [lines, lines.replace(b"\n", b"\r\n"), lines.replace(b"\n", b"\r"), b"\xef\xbb\xbf" + lines]
    corpora = [prepare(variant, tokenizer="chars") for variant in variants]
    assert len({corpus.folder for corpus in corpora}) == 4
    for corpus in corpora:
        assert corpus.tokenizer.decode([*corpus.train, *corpus.val]) == lines.decode()
        assert corpus.tokenizer.alphabet == "".join(sorted(set(lines.decode())))


def test_f31_ids_do_not_depend_on_the_locale(tmp_path):
    (tmp_path / "text.txt").write_text("é 한글 🎉\n" * 30, encoding="utf-8")
    written = []
    for i, locale in enumerate([{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}]):
        cwd = tmp_path / str(i)
        cwd.mkdir()
        for kind in ("chars", "bpe"):
            result = command("../text.txt", "--tokenizer", kind, cwd=cwd, **locale)
            assert result.returncode == 0, result.stderr
        assert command("--help", cwd=cwd, **locale).returncode == 0
        cache = cwd / "data" / "cache"
        written.append({path.relative_to(cache): path.read_bytes() for path in cache.rglob("*") if path.is_file()})
    assert written[0] == written[1]
    assert len(written[0]) == 9


def test_f37_spelt_out_special_tokens_are_ordinary_text(prepare):
    corpus = prepare(("<|endoftext|>" * 20).encode(), bpe_vocab_size=258)
    tokens = [*corpus.train, *corpus.val]
    assert corpus.tokenizer.end_id not in tokens
    assert corpus.tokenizer.decode(tokens) == "<|endoftext|>" * 20


def test_unreadable_sources_are_refused_in_a_sentence(prepare, tmp_path):
    (tmp_path / "Corpus.txt").write_text("text")
    (tmp_path / "notes.jsonl").write_text("{}")
    assert "Corpus.txt?" in refusal(prepare, tmp_path / "corpsu.txt")
    assert "did you mean stories?" in refusal(prepare, "storys")
    assert "folder" in refusal(prepare, tmp_path)
    assert "notes.jsonl is not a .txt file" in refusal(prepare, tmp_path / "notes.jsonl")
    assert "no text" in refusal(prepare, b"")
    assert "no text" in refusal(prepare, b"\xef\xbb\xbf")
    assert "one character" in refusal(prepare, b"a")
    message = refusal(prepare, "é ok ".encode() * 300 + b"caf\xe9")
    assert "text.txt" in message
    assert "0xE9 at offset 1,803" in message
    assert "did you mean bytes?" in refusal(prepare, TEXT.encode(), tokenizer="byte")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("text")]


def test_f35_the_hub_offline_is_one_sentence(tmp_path):
    result = command("hub:someone/something", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    error = result.stderr.decode().splitlines()[-1]
    assert error.startswith("error: hub:someone/something cannot be read (")
    assert "fetch the text elsewhere and give its path" in error
    assert b"Traceback" not in result.stderr


def test_a_dataset_is_streamed_up_to_max_tokens(prepare, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"body": f"row {i}\r\n", "title": i} for i in range(100)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = prepare(f"hub:{folder}", tokenizer="bytes", text_field="body", max_tokens=60)
    stream = b"".join(b"row %d\n|" % i for i in range(9))
    tokens = [*corpus.train, *corpus.val]
    assert bytes(ord("|") if token == 256 else int(token) for token in tokens) == stream
    assert len(tokens) == 63
    assert "only body, title" in refusal(prepare, f"hub:{folder}")
    assert "only body, title" in refusal(prepare, f"hub:{folder}", text_field="title")


def test_a_text_is_fetched_from_a_url(prepare, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # this machine is no hub
    (tmp_path / "page.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    corpus = prepare(f"{url}/page.txt", tokenizer="chars")
    assert corpus.tokenizer.decode([*corpus.train, *corpus.val]) == TEXT
    assert len(corpus.train) == int(len(TEXT) * 0.9)
    assert "0xe9 in position 3" in refusal(prepare, f"{url}/latin.txt")
    assert "missing.txt cannot be read" in refusal(prepare, f"{url}/missing.txt")
    server.shutdown()
    server.server_close()


# The cache


def test_an_unchanged_corpus_is_reused(prepare, monkeypatch, capsys):
    first = prepare(TEXT.encode(), tokenizer="bpe")
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    again = prepare(TEXT.encode(), seed=1, tokenizer="bpe", max_tokens=7)  # neither matters to a file
    assert again.folder == first.folder
    assert again.train.tolist() == first.train.tolist()
    assert again.tokenizer.encode(TEXT) == first.tokenizer.encode(TEXT)
    assert capsys.readouterr().err.splitlines()[-1] == f"data: reusing {first.folder}"


def test_what_changes_the_corpus_is_noticed(prepare, tmp_path, three_stories):
    folders = [prepare(TEXT.encode(), tokenizer="chars").folder]
    stat = (tmp_path / "text.txt").stat()
    (tmp_path / "text.txt").write_bytes(TEXT.replace("cat", "cow").encode())
    os.utime(tmp_path / "text.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time, other text
    changed = prepare(tmp_path / "text.txt", tokenizer="chars")
    assert "cow" in changed.tokenizer.decode(changed.train)
    folders.append(changed.folder)
    folders += [prepare(tmp_path / "text.txt", tokenizer="bytes").folder]
    folders += [prepare(tmp_path / "text.txt", tokenizer="chars", val_fraction=0.2).folder]
    folders += [prepare(tmp_path / "text.txt", bpe_vocab_size=size).folder for size in (260, 270)]
    folders += [prepare("stories", seed, tokenizer="bytes", max_tokens=n).folder for seed in (0, 1) for n in (50, 60)]
    assert len(set(folders)) == len(folders) == 10


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_preparation_leaves_nothing(prepare, monkeypatch, tmp_path, kind):
    def interrupt(*_):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(module, "_report", interrupt)  # everything is written by then
        with pytest.raises(kind):
            prepare(TEXT.encode(), tokenizer="chars")
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(prepare(TEXT.encode(), tokenizer="chars").train) == int(len(TEXT) * 0.9)


def test_a_killed_preparation_leaves_nothing_that_looks_finished(prepare, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    code = (
        "import os, sys; from config.schema import DataConfig; from data import prepare\n"
        "prepare._report = lambda *_: os._exit(9)\n"
        "prepare.prepare(DataConfig(source=sys.argv[1]), 0, sys.argv[2])"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(line, env=environment, capture_output=True).returncode == 9
    assert [path.name[:11] for path in (tmp_path / "cache").iterdir()] == [".preparing-"]
    corpus = prepare(tmp_path / "text.txt")
    assert corpus.tokenizer.decode(corpus.train) == TEXT[: int(len(TEXT) * 0.9)]


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
    tokens = first.train.tolist()
    damage(first.folder)
    again = prepare(TEXT.encode(), tokenizer="chars")
    assert again.folder == first.folder
    assert again.train.tolist() == tokens
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
    assert others[0].train.tolist() == corpus.train.tolist()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [corpus.folder.name]


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "cache").write_text("a file")
    config = DataConfig(source=str(tmp_path / "text.txt"))
    assert "cannot be prepared" in refusal(module.prepare, config, 0, tmp_path / "cache")


# The command


def test_the_command_says_what_it_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abab" * 100)
    main(["text.txt", "--bpe-vocab-size", "300", "--val-fraction", "0.5"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "data: preparing text.txt"
    assert "yields only 266 of 300 ids" in lines[1]
    assert "tokens to train on and" in lines[2]
    [folder] = (tmp_path / "data" / "cache").iterdir()
    assert lines[3] == f"data: in {folder.relative_to(tmp_path)}"


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
    ("old", "new"), [('"<u2"', '"<u4"'), ('"bytes": ', '"bytes": 1'), ('"train"', '"trayn"'), ("{", "{}, {")]
)
def test_a_changed_description_is_noticed(prepare, capsys, old, new):
    corpus = prepare(TEXT.encode())
    expected, meta = corpus.train.tolist(), corpus.folder / "meta.json"
    meta.write_text(meta.read_text("utf-8").replace(old, new, 1), "utf-8")
    again = prepare(TEXT.encode())
    assert again.train.tolist() == expected
    assert again.val_bytes == corpus.val_bytes
    assert "is damaged" in capsys.readouterr().err
