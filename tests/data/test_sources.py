import io
import json
import os
import random
import sys
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from config.schema import DataConfig
from data import prepare as prepare_module
from data import sources
from data.sources import open_source
from tests.corpora import TEXT, command, refusal, texts, written

LATIN = "caf\u00e9".encode("latin-1")


def read(source, pairs: bool = False, **options) -> list[str]:
    """The documents of a source, whole."""
    opened = open_source(DataConfig(source=str(source), **options), pairs)
    whole, parts = [], []
    for document in opened.read():
        parts.append(document.text)
        if not document.more:
            whole.append("".join(parts))
            parts = []
    assert parts == []
    assert opened.pairs == pairs
    return whole


def write_rows(path: Path, *rows: dict) -> Path:
    """Writes rows in the format that the name says."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub, and a home for `datasets` that is the test's own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


# Text files


def test_f32_line_ends_and_byte_order_mark_do_not_matter(prepare, tmp_path):
    lines = "one\ntwo\n세 번째\n".encode()
    variants = [lines, lines.replace(b"\n", b"\r\n"), lines.replace(b"\n", b"\r"), b"\xef\xbb\xbf" + lines]
    corpora = [prepare(variant, tokenizer="chars") for variant in variants]
    assert len({corpus.folder for corpus in corpora}) == 4
    for corpus in corpora:
        assert corpus.tokenizer.decode([*corpus.train.tokens, *corpus.val.tokens]) == lines.decode()
        assert corpus.tokenizer.alphabet == "".join(sorted(set(lines.decode())))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 2**20])
def test_a_file_reads_the_same_whatever_the_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    data = "\ufeff\r\n\r\r\nab\r한글🎉\ufeff\u2028\n\rend\r".encode()
    (tmp_path / "text.txt").write_bytes(data)
    assert read(tmp_path / "text.txt") == ["\n\n\nab\n한글🎉\ufeff\u2028\n\nend\n"]
    universal = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()  # Python's own idea of it
    assert read(tmp_path / "text.txt") == [universal]
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" * 2 + b"a")
    assert read(tmp_path / "text.txt") == ["\ufeffa"]


@pytest.mark.parametrize("block", [1, 3, 100, 2**20])
def test_a_file_that_is_not_utf8_is_refused_with_the_offset_in_the_whole_file(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    path, rng = tmp_path / "text.txt", random.Random(0)
    for _ in range(20):
        good = "".join(rng.choice(["a", "é", "글", "🎉", "\r\n"]) for _ in range(rng.randrange(1, 2000))).encode()
        for bad, tail in [(0xE9, b" ok"), (0xFF, b""), (0xED, b"\xa0\x80"), (0xF0, b"\x9f\x8e"), (0xEA, b"")]:
            path.write_bytes(good + bytes([bad]) + tail)
            assert f"{path} is not UTF-8: byte 0x{bad:02X} at offset {len(good):,};" in refusal(read, path)


def test_utf16_is_recognised(tmp_path):
    for encoding in ("utf-16", "utf-16-be"):
        (tmp_path / "text.txt").write_bytes(("\ufeff" * (encoding != "utf-16") + TEXT).encode(encoding))
        assert "is UTF-16; save it as UTF-8: iconv" in refusal(read, tmp_path / "text.txt")


def test_f31_ids_do_not_depend_on_the_locale(tmp_path):
    (tmp_path / "text.txt").write_text("é 한글 🎉\n" * 30, encoding="utf-8")
    caches = []
    for i, locale in enumerate([{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}]):
        cwd = tmp_path / str(i)
        cwd.mkdir()
        for kind in ("chars", "bpe"):
            result = command("../text.txt", "--tokenizer", kind, cwd=cwd, **locale)
            assert result.returncode == 0, result.stderr
        assert command("--help", cwd=cwd, **locale).returncode == 0
        caches.append(written(cwd / "data" / "cache"))
    assert caches[0] == caches[1]
    assert len(caches[0]) == 9


def test_f37_spelt_out_special_tokens_are_ordinary_text(prepare):
    corpus = prepare(("<|endoftext|>" * 20).encode(), bpe_vocab_size=258)
    tokens = [*corpus.train.tokens, *corpus.val.tokens]
    assert corpus.tokenizer.end_id not in tokens
    assert corpus.tokenizer.decode(tokens) == "<|endoftext|>" * 20


def test_what_is_there_no_source_of_is_refused_in_a_sentence(prepare, tmp_path):
    (tmp_path / "Corpus.txt").write_text("text")
    (tmp_path / "novels").mkdir()
    (tmp_path / "notes.csv").write_text("a,b")
    assert "did you mean" in refusal(prepare, tmp_path / "corpsu.txt")
    assert "Corpus.txt?" in refusal(prepare, tmp_path / "corpsu.txt")
    assert "novels?" in refusal(prepare, tmp_path / "novel")
    assert "did you mean stories?" in refusal(prepare, "storys")
    assert "is not a .txt, .md, .jsonl or .parquet file" in refusal(prepare, tmp_path / "notes.csv")
    assert "no text" in refusal(prepare, b"")
    assert "no text" in refusal(prepare, b"\xef\xbb\xbf")
    assert "one character" in refusal(prepare, b"a")
    assert "0xE9 at offset 3" in refusal(prepare, LATIN)
    assert "did you mean bytes?" in refusal(prepare, TEXT.encode(), tokenizer="byte")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("text")]


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "text.txt").chmod(0)
    assert "may not be read by you" in refusal(read, tmp_path)


# Folders


def test_a_folder_is_its_files_in_the_order_of_their_paths(prepare, tmp_path, capsys):
    folder = tmp_path / "my texts"
    for name, data in {
        "b.txt": b"LF\nlines\n",
        "a/z.MD": b"CRLF\r\nlines\r\n",
        "a.txt": b"\xef\xbb\xbfCR and a mark\rlines\r",
        "c.jsonl": b'{"text": "row 1"}\n{"text": ""}\n{"text": "row 2"}\n',
        "d/empty.txt": b"",
        "d/mark.txt": b"\xef\xbb\xbf",
        ".hidden.txt": LATIN,
        ".git/text.txt": LATIN,
        "picture.png": LATIN,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    write_rows(folder / "e.parquet", {"text": "row 3", "n": 1})
    expected = ["CR and a mark\nlines\n", "CRLF\nlines\n", "LF\nlines\n", "row 1", "row 2", "row 3"]
    assert read(folder) == expected
    corpus = prepare(folder, tokenizer="chars")
    assert texts(corpus, corpus.val) == expected[1:2]
    assert texts(corpus, corpus.train) == expected[:1] + expected[2:]
    assert corpus.folder.name.startswith("my-texts-")
    assert capsys.readouterr().err.count("data: leaving out 2 empty files\n") == 1
    assert prepare(folder, tokenizer="chars").folder == corpus.folder
    assert "empty" not in capsys.readouterr().err  # said when it is prepared
    (folder / "b.txt").rename(folder / "0.txt")  # another order
    assert prepare(folder, tokenizer="chars").folder != corpus.folder
    (folder / "d" / "latin.txt").write_bytes(LATIN)
    assert f"{folder / 'd' / 'latin.txt'} is not UTF-8: byte 0xE9 at offset 3" in refusal(prepare, folder)


def test_a_folder_with_one_text_is_that_text(prepare, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "empty.txt").touch()
    assert "holds only 1 empty file, so" in refusal(prepare, folder)
    (folder / "text.txt").write_bytes(TEXT.encode())
    alone, inside = prepare(folder / "text.txt", tokenizer="chars"), prepare(folder, tokenizer="chars")
    assert alone.key == inside.key
    assert not inside.documents
    write_rows(folder / "rows.jsonl", {"text": "a row"})
    assert prepare(folder, tokenizer="chars").documents


def test_a_folder_without_text_is_refused(prepare, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"png")
    (tmp_path / "folder" / ".text.txt").write_bytes(b"hidden")
    message = refusal(prepare, tmp_path / "folder")
    assert "folder holds no .txt, .md, .jsonl or .parquet file, so there is no text in it" in message


# Rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "odd [1] *.parquet"])
def test_the_field_that_holds_the_text_is_found_or_chosen(prepare, tmp_path, offline, name):
    path, number = tmp_path / name, {"n": 1}
    where = f"{path}, {'line' if path.suffix == '.jsonl' else 'row'}"
    write_rows(path, {"title": "t", "text": "one\r\n\rtwo"} | number, {"title": "t", "text": None}, {"text": "\ufeffx"})
    assert read(path) == ["one\n\ntwo", "x"]
    if path.suffix == ".parquet":  # where each row has every field
        assert read(path, text_field="title") == ["t", "t"]
    else:
        assert f"{where} 3 has no field title, only text" in refusal(read, path, text_field="title")
    assert "1 has no field body, only " in refusal(read, path, text_field="body")
    assert f"{where} 1 has no text in the field n but 1" in refusal(read, path, text_field="n")
    write_rows(path, {"body": None}, {"body": "one"})
    assert read(path) == ["one"]
    write_rows(path, {"title": "t", "body": None}, {"title": None, "body": "one"})
    assert f"{where} 2 has several fields that hold text (title, body): choose with" in refusal(read, path)
    write_rows(path, {"body": "one"} | number, {"body": ""} | number, {"body": "two"} | number)
    assert read(path) == ["one", "two"]
    corpus = prepare(path, tokenizer="bytes")
    assert [texts(corpus, split) for split in (corpus.train, corpus.val)] == [["one"], ["two"]]
    write_rows(path, {"title": "t", "body": "one"})
    message = refusal(read, path)
    assert message == f"{where} 1 has several fields that hold text (title, body): choose with data.text_field"
    assert read(path, text_field="body") == ["one"]
    assert "too few documents (1)" in refusal(prepare, path, text_field="body")
    write_rows(path, number, {"n": 2})
    assert refusal(read, path) == f"{where} 1 has no field that holds text, only n"
    write_rows(path, {"source": "s", "target": "t"})
    assert "is a pair (source, target), for an encoder-decoder (python train.py config/translate.toml" in refusal(
        read, path
    )
    assert read(path, text_field="target") == ["t"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "cut', "line 3 is not JSON (Unterminated string"),
        ("plain words", "line 3 is not JSON (Expecting value"),
        ('["text"]', "line 3 is not a JSON object but ['text']"),
        ("[" * 100_000, "line 3 is not JSON ("),
        ('{"text": 17}', "line 3 has no text in the field text but 17"),
        ('{"text": ["a"]}', "line 3 has no text in the field text but ['a']"),
        ('{"txt": "a"}', "line 3 has no field text, only txt"),
        ("{}", "line 3 has no field text, only an empty row"),
        (r'{"text": "\ud83c"}', "line 3 has half of a surrogate pair (U+D83C) in the field text"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(prepare, tmp_path, line, expected):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one\\u00e9"}\r\n\r\n' + line.encode() + b'\r\n{"text": "\xc3\xa9"}')
    assert f"{path}, {expected}" in refusal(prepare, path)
    assert list((tmp_path / "cache").iterdir()) == []
    path.write_bytes(path.read_bytes().replace(line.encode(), b""))
    assert read(path) == ["oneé", "é"]


def test_a_broken_parquet_file_is_refused_once(tmp_path, offline, capfd):
    path = write_rows(tmp_path / "rows.parquet", *({"text": f"row {i}" * 100} for i in range(1000)))
    for broken in (
        b"PAR1 no",
        path.read_bytes()[:-2000],
        path.read_bytes()[:4] + bytes(3000) + path.read_bytes()[3004:],
    ):
        path.write_bytes(broken)
        message = refusal(read, path)
        assert message.startswith(f"{path} cannot be read (")
        assert "network" not in message
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_f34_workers_have_nothing_to_hash_or_to_pickle(prepare, tmp_path, monkeypatch, offline, capfd, workers):
    path = write_rows(tmp_path / "rows.parquet", *({"text": f"row {i} 한글", "n": i} for i in range(5)))
    monkeypatch.setattr(prepare_module, "WORKERS", workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = prepare(path, bpe_vocab_size=260)
        lines = capfd.readouterr().err.splitlines()
        again = prepare(path, bpe_vocab_size=260)
    assert all(line.startswith("data: ") for line in lines)
    assert capfd.readouterr().err == f"data: reusing {first.folder}\n"
    assert again.folder == first.folder
    assert [texts(first, split) for split in (first.train, first.val)] == [
        [f"row {i} 한글" for i in (0, 2, 3, 4)],
        ["row 1 한글"],
    ]
    monkeypatch.setattr(prepare_module, "WORKERS", 1)
    files = written(first.folder)
    (first.folder / "val.bin").unlink()
    assert written(prepare(path, bpe_vocab_size=260).folder) == files


def test_a_text_field_without_rows_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert "needs rows with fields" in refusal(read, tmp_path, text_field="body")
    write_rows(tmp_path / "b.jsonl", {"body": "b", "title": "t"})
    assert read(tmp_path, text_field="body") == ["a", "b"]


# Datasets


def test_f35_the_hub_offline_is_one_sentence(tmp_path):
    result = command("hub:someone/something", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    error = result.stderr.decode().splitlines()[-1]
    assert error.startswith("error: hub:someone/something cannot be read (")
    assert "fetch the text elsewhere and give its path" in error
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dataset_is_streamed_up_to_max_tokens(prepare, tmp_path, offline, kind):
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_rows(folder / f"train.{kind}", *({"body": f"row {i}\r\n", "title": i} for i in range(100)))
    write_rows(folder / f"test.{kind}", *({"body": f"test {i}"} for i in range(5)))
    corpus = prepare(f"hub:{folder}", tokenizer="bytes", max_tokens=60)
    assert len(corpus.train.tokens) + len(corpus.val.tokens) == 63
    assert texts(corpus, corpus.val) == ["row 1\n"]
    assert texts(corpus, corpus.train) == [f"row {i}\n" for i in (0, *range(2, 9))]
    assert len(read(f"hub:{folder}::train")) == 100
    assert read(f"hub:{folder}::test") == [f"test {i}" for i in range(5)]
    assert "has no field text, only body, title" in refusal(prepare, f"hub:{folder}", text_field="text")
    assert "row 1 has no text in the field title but 0" in refusal(prepare, f"hub:{folder}", text_field="title")
    message = refusal(prepare, f"hub:{folder}", tokenizer="bytes", max_tokens=1)
    assert "too few documents (1) to keep one for validation: raise data.max_tokens" in message
    for wrong in (f"hub:{folder}::tset", f"hub:{folder}:subset"):
        message = refusal(read, wrong)
        assert message.startswith(f"{wrong} cannot be read (ValueError: ")
        assert "network" not in message
    assert "must be hub:NAME, hub:NAME:SUBSET or hub:NAME:SUBSET:SPLIT" in refusal(read, f"hub:{folder}:a:b:c")
    assert "must be hub:NAME" in refusal(read, "hub:")


def test_a_stream_is_read_no_further_than_needed(prepare, monkeypatch):
    """Of more text than could ever be read, as of the largest data sets of the Hub."""
    import datasets

    taken = 0

    def rows():
        nonlocal taken
        while True:
            taken += 1
            yield {"text": f"row {taken % 1000} of very many\n" * 20}

    monkeypatch.setattr(datasets, "load_dataset", lambda **options: rows() if options["streaming"] else None)
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 100_000)
    for tokenizer in ("bytes", "chars", "bpe"):
        corpus = prepare("hub:someone/something", tokenizer=tokenizer, max_tokens=20_000)
        assert 20_000 <= len(corpus.train.tokens) + len(corpus.val.tokens) < 21_000
    assert taken < 20_000


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
    assert corpus.tokenizer.decode([*corpus.train.tokens, *corpus.val.tokens]) == TEXT
    assert len(corpus.train.tokens) == int(len(TEXT) * 0.9)
    assert "0xe9 in position 3" in refusal(prepare, f"{url}/latin.txt")
    assert "missing.txt cannot be read" in refusal(prepare, f"{url}/missing.txt")
    server.shutdown()
    server.server_close()


def test_datasets_is_imported_only_where_it_is_needed(prepare, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare(TEXT.encode(), tokenizer="chars").train.n_documents == 1
    assert read(write_rows(tmp_path / "rows.jsonl", {"text": "one"})) == ["one"]
    with pytest.raises(ImportError):
        read(write_rows(tmp_path / "rows.parquet", {"text": "one"}))


# Pairs


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.jsonl", "pairs.parquet", "hub"])
def test_pairs_alternate_and_stay_together(prepare, tmp_path, offline, name):
    given = [(f"source {i} 나", f"target {i}") for i in range(23)]
    path = tmp_path / name
    if name == "pairs.tsv":
        path.write_bytes("\r\n".join("\t".join(pair) for pair in [*given, ("", "no source")]).encode() + b"\r\n\r\n")
    else:
        rows = [{"n": 1, "target": target, "source": source} for source, target in [*given, ("no target", None)]]
        path = "hub:" + os.fspath(tmp_path / "set") if name == "hub" else path
        (tmp_path / "set").mkdir()
        write_rows(tmp_path / "set" / "train.jsonl" if name == "hub" else path, *rows)
    assert read(path, pairs=True) == [text for pair in given for text in pair]
    corpus = prepare(path, pairs=True, tokenizer="bytes", val_fraction=0.2)
    assert (corpus.pairs, corpus.documents) == (True, True)
    chosen = [i for i in range(1, 23) if i == 1 or int((i - 1) * 0.2) > int((i - 2) * 0.2)]
    assert texts(corpus, corpus.val) == [text for i in chosen for text in given[i]]
    assert texts(corpus, corpus.train) == [text for i in range(23) if i not in chosen for text in given[i]]
    assert corpus.val.n_documents == len(chosen)
    assert corpus.source_tokenizer is corpus.tokenizer


def test_a_stream_of_pairs_ends_with_a_whole_one(prepare, tmp_path, offline):
    pair = {"source": "🎉" * 20, "target": "🎊" * 20}  # as many bytes as a character can have
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.jsonl", *[pair] * 50)
    for tokenizer in ("bytes", "chars", "bpe"):
        for max_tokens in (180, 260, 300, 340):
            corpus = prepare(f"hub:{tmp_path / 'set'}", pairs=True, tokenizer=tokenizer, max_tokens=max_tokens)
            for split in (corpus.train, corpus.val):
                found = texts(corpus, split)
                assert found == [*pair.values()] * (len(found) // 2)


def test_what_has_no_pairs_is_refused(prepare, tmp_path):
    for source in ("pydoc", "https://example.org/a.txt"):
        assert "has no pairs for an encoder-decoder; give stories" in refusal(prepare, source, pairs=True)
    (tmp_path / "a.txt").write_text("a")
    assert "a.txt has no pairs for an encoder-decoder; give" in refusal(prepare, tmp_path / "a.txt", pairs=True)
    message = refusal(prepare, tmp_path, pairs=True)
    assert "holds no .tsv, .jsonl or .parquet file" in message
    (tmp_path / "pairs.tsv").write_text("a\tb\nc\td\n")
    message = refusal(prepare, tmp_path / "pairs.tsv")
    assert "holds pairs, for an encoder-decoder (python train.py config/translate.toml" in message
    assert ".txt, .md, .jsonl or .parquet" in message
    assert read(tmp_path, pairs=True) == ["a", "b", "c", "d"]
    for text, tabs in (("a\tb\nc d\n", 0), ("a\tb\nc\td\te", 2)):
        (tmp_path / "pairs.tsv").write_text(text)
        assert f"pairs.tsv, line 2 has {tabs} tabs, and a pair has one" in refusal(prepare, tmp_path, pairs=True)
    path = write_rows(tmp_path / "rows.jsonl", {"source": "a", "text": "b"})
    assert "line 1 has no field target, only source, text" in refusal(prepare, path, pairs=True)
    assert "data.source_field and data.target_field" in refusal(prepare, path, pairs=True, text_field="text")
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    assert "too few pairs (1)" in refusal(prepare, tmp_path / "pairs.tsv", pairs=True)
    message = refusal(prepare, tmp_path / "pairs.tsv", pairs=True, source_field="en")
    assert "data.target_field = en, target needs rows with fields" in message


@pytest.mark.parametrize("source", ["copy", "reverse", "sort", "numbers"])
def test_a_source_of_pairs_is_refused_where_there_are_none(prepare, source):
    assert f"data.source = {source} gives pairs, for model.kind = encoder_decoder" in refusal(prepare, source)


@pytest.mark.parametrize(("wrong", "meant"), [("revers", "reverse"), ("stores", "stories")])
def test_a_mistyped_source_of_pairs_is_told_what_gives_them(prepare, wrong, meant):
    message = refusal(prepare, wrong, pairs=True)
    assert f"did you mean {meant}? it can be stories, copy, reverse, sort, numbers, a .tsv" in message
    assert "pydoc" not in message


@pytest.mark.parametrize(("side", "option"), [("tokenizer", "tokenizer"), ("target_tokenizer", "target_tokenizer")])
def test_an_unknown_tokenizer_is_named_by_its_option(prepare, tmp_path, side, option):
    (tmp_path / "pairs.tsv").write_text("a\tb\nc\td\n")
    options = {"tokenizer": "bytes", "target_tokenizer": "chars", side: "cahrs"}
    message = refusal(prepare, tmp_path / "pairs.tsv", pairs=True, **options)
    assert message.startswith(f"data.{option} = 'cahrs' is unknown: did you mean chars?")


@pytest.mark.parametrize("option", ["target_tokenizer", "source_field", "target_field"])
def test_an_option_about_pairs_is_refused_where_there_are_none(prepare, option):
    message = refusal(prepare, TEXT.encode(), **{option: "bytes"})
    assert f"data.{option} = bytes is about pairs, for model.kind = encoder_decoder" in message


def test_fields_of_pairs_may_have_other_names_and_be_inside_others(prepare, tmp_path):
    rows = [{"en": {"text": f"one {i}", "note.": ""}, "ko": {"a": {"b": f"하나 {i}"}}} for i in range(9)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    fields = {"source_field": "ko.a.b", "target_field": "en.text"}
    assert read(path, pairs=True, **fields) == [text for i in range(9) for text in (f"하나 {i}", f"one {i}")]
    assert read(write_rows(tmp_path / "flat.jsonl", {"a.b": "x", "target": "x"}), pairs=True, source_field="a.b") == [
        "x",
        "x",
    ]
    corpus = prepare(path, pairs=True, tokenizer="bytes", **fields)
    assert texts(corpus, corpus.val)[:2] == ["하나 1", "one 1"]
    for wrong in ("ko.a.c", "ko.a.b.c", "en"):
        message = refusal(prepare, path, pairs=True, source_field=wrong, target_field="en.text")
        assert f"line 1 has no {'text in the ' * (wrong == 'en')}field {wrong}" in message
    message = refusal(prepare, path, pairs=True, source_field="ko.a.c", target_field="en.text")
    assert message.endswith("has no field ko.a.c, only b")
    message = refusal(prepare, path, pairs=True)
    assert message.endswith("has no field source, only en, ko; say which with data.source_field and data.target_field")


@pytest.mark.parametrize(("source_kind", "target_kind"), [("bpe", "chars"), ("chars", "bpe"), ("bytes", "chars")])
def test_each_side_of_pairs_may_have_its_own_tokenizer(prepare, tmp_path, source_kind, target_kind):
    given = [(f"the cat number {i}", f"고양이 {i}") for i in range(40)]
    (tmp_path / "pairs.tsv").write_text("\n".join("\t".join(pair) for pair in given), "utf-8")
    options = {"pairs": True, "bpe_vocab_size": 300} if "bpe" in (source_kind, target_kind) else {"pairs": True}
    corpus = prepare(tmp_path / "pairs.tsv", tokenizer=source_kind, target_tokenizer=target_kind, **options)
    assert (corpus.source_tokenizer.name, corpus.tokenizer.name) == (source_kind, target_kind)
    found = texts(corpus, corpus.train) + texts(corpus, corpus.val)
    assert sorted(found) == sorted(text for pair in given for text in pair)
    assert corpus.largest_id == max(split.tokens.max() for split in (corpus.train, corpus.val))
    assert corpus.largest_source_id == max(split.sources.max() for split in (corpus.train, corpus.val))
    if target_kind == "chars":  # learnt from the targets alone
        assert corpus.tokenizer.alphabet == " 0123456789고양이"
    shared = prepare(
        tmp_path / "pairs.tsv", tokenizer=source_kind, **options if source_kind == "bpe" else {"pairs": True}
    )
    assert shared.key != corpus.key


def test_every_file_of_a_local_dataset_counts(prepare, tmp_path, offline):
    """Also where several have the same name, each in a folder of its own."""
    folder = tmp_path / "dataset"
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        write_rows(folder / split / "data.jsonl", {"text": "one"}, {"text": "two"})
    before = prepare(f"hub:{folder}", tokenizer="bytes")
    write_rows(folder / "train" / "data.jsonl", {"text": "six"}, {"text": "ten"})
    after = prepare(f"hub:{folder}", tokenizer="bytes")
    assert (texts(before, before.train), texts(after, after.train)) == (["one"], ["six"])
