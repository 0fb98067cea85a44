"""Where documents come from: `data.source` names a source, and a source is a stream of documents.

stories and pydoc need nothing, a path is a file or a folder of files, https:// and hub: go through Hugging Face
`datasets`. Texts are files or fields of rows; pairs, for an encoder-decoder, are two fields of a row or the two
columns of a .tsv file. Whatever the source, text arrives with LF line ends and without a byte-order mark, and what
cannot be read is refused with the place where it is. Files are read in blocks: no text is ever held whole.
"""

import ast
import codecs
import difflib
import hashlib
import io
import json
import logging
import os
import platform
import re
import reprlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError
from config.schema import DataConfig
from data import tasks

BLOCK = 2**20  # bytes of a file that are read at a time
PAIR_FIELDS = ("source", "target")  # columns of a .tsv, and what fields of rows are called unless told otherwise
PAIR_SOURCES = (
    "stories, copy, reverse, sort, numbers, a .tsv (source, tab, target), a .jsonl or .parquet (fields source and "
    "target, or data.source_field and data.target_field), a folder of them, or hub:NAME"
)
TRANSLATE = "python train.py config/translate.toml --data.source …"
ELSEWHERE = "; without a network, fetch the text elsewhere and give its path as data.source"
MENDING = "save it as UTF-8 with iconv -t UTF-8 -f CP949 (if it is Korean) or -f LATIN1 (Western European)"

# The modules of the standard library that explain themselves at most length.
PYDOC_MODULES = """
_pydecimal argparse ast bdb codecs collections configparser datetime difflib doctest email/message enum ftplib
http/client http/cookiejar imaplib inspect ipaddress json logging logging/handlers mailbox optparse os pdb pickletools
re shutil smtplib socket socketserver statistics subprocess tarfile threading traceback turtle typing unittest/case
unittest/mock urllib/parse urllib/request xml/etree/ElementTree zipfile
"""


class Document(NamedTuple):
    """A text, or a part of a long one: while there is `more`, the next document goes on with it."""

    text: str
    split: str | None = None  # train, val or held_out, where the source decides it
    is_source: bool = False  # of a pair, whose target comes next
    floor: Callable[[], tuple[float, ...]] | None = None  # tells its entropy in nats, where that is known
    more: bool = False


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be read again and again."""

    name: str  # of the folder in the cache
    identity: dict  # equal for equal texts
    read: Callable[[], Iterator[Document]]
    single: bool = False  # one text: no end-of-text id, and cut by position
    pairs: bool = False  # every other document is the target of the one before it
    max_tokens: int | None = None  # where an endless source ends
    notice: str = ""  # what the user should know before it is read

    @property
    def group(self) -> int:
        """How many documents stay together."""
        return 2 if self.pairs else 1


def open_source(config: DataConfig, pairs: bool = False) -> Source:
    """The source that `config` names. Raises `UserError` for one that is not there, or has no `pairs` to give."""
    kind, _, rest = config.source.partition(":")
    if pairs and (config.source == "pydoc" or kind in ("http", "https")):
        raise UserError(f"data.source = {config.source} has no pairs for an encoder-decoder; give {PAIR_SOURCES}")
    if config.source in tasks.TASKS and not pairs:
        raise UserError(f"data.source = {config.source} gives pairs, for model.kind = encoder_decoder")
    _check_fields(config, pairs)
    if config.source == "stories":
        return _stories(config, pairs)
    if config.source in tasks.TASKS:
        return _task(config)
    if config.source == "pydoc":
        return Source("pydoc", {"pydoc": platform.python_version(), "modules": PYDOC_MODULES}, _pydoc)
    if kind == "hub":
        identity = {"hub": rest, "fields": _fields(config, pairs), "max_tokens": config.max_tokens}
        if (folder := Path(rest.partition(":")[0])).is_dir():
            identity["files"] = {
                os.fspath(path): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()
            }
        read = partial(_hub, rest, _fields(config, pairs))
        return Source(_slug(rest), identity, read, pairs=pairs, max_tokens=config.max_tokens)
    if kind in ("http", "https"):
        return Source(_slug(Path(rest).stem), {"url": config.source}, partial(_web, config.source), single=True)
    return _files(Path(config.source), _fields(config, pairs), pairs)


def _check_fields(config: DataConfig, pairs: bool) -> None:
    """Raises `UserError` for an option about pairs without pairs, or the other way round."""
    if pairs and config.text_field:
        raise UserError(
            f"data.text_field = {config.text_field}: the texts of pairs are in data.source_field and data.target_field"
        )
    for option in () if pairs else ("target_tokenizer", "source_field", "target_field"):
        if (value := getattr(config, option)) != DataConfig.model_fields[option].default:
            raise UserError(f"data.{option} = {value} is about pairs, for model.kind = encoder_decoder")


def _fields(config: DataConfig, pairs: bool) -> tuple[str, ...]:
    """Which fields of rows are read: both of a pair, the one with the text, or none yet, if it is to be found."""
    if pairs:
        return (config.source_field, config.target_field)
    return (config.text_field,) if config.text_field else ()


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "text"


def _normalise(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


# Built in


def _stories(config: DataConfig, pairs: bool) -> Source:
    def read() -> Iterator[Document]:
        for split, story in stories.draws(stories.SEED, config.val_fraction):
            floor = None if split == "train" else partial(stories.floor, split, story)
            yield Document(story.text, split, floor=floor)

    from data import stories

    if pairs:
        read = partial(_pairs, partial(stories.pairs, stories.SEED, config.val_fraction))

    # Neither the grammar's code nor its words may change unnoticed.
    files = {name: hashlib.sha256(data).hexdigest() for name, data in stories.files().items()}
    identity = {"stories": files, "max_tokens": config.max_tokens, "pairs": pairs}
    return Source("stories", identity, read, pairs=pairs, max_tokens=config.max_tokens)


def _task(config: DataConfig) -> Source:
    code = hashlib.sha256(Path(tasks.__file__).read_bytes()).hexdigest()
    identity = {"task": config.source, "code": code, "max_tokens": config.max_tokens}
    read = partial(_pairs, partial(tasks.draws, config.source, config.val_fraction))
    return Source(config.source, identity, read, pairs=True, max_tokens=config.max_tokens)


def _pairs(draws: Callable[[], Iterator[tuple[str, str, str]]]) -> Iterator[Document]:
    """Pairs, each with its split, as documents."""
    for split, source, target in draws():
        yield Document(source, split, is_source=True)
        yield Document(target, split)


def _pydoc() -> Iterator[Document]:
    """The help topics and docstrings of Python itself: a document a topic or module, in an arbitrary but fixed order,
    so that training and validation read the same mixture."""
    from pydoc_data.topics import topics

    documents = [*topics.values(), *map(_docstrings, PYDOC_MODULES.split())]
    documents = sorted(map(_normalise, documents), key=lambda text: hashlib.sha256(text.encode()).digest())
    return map(Document, documents)


def _docstrings(name: str) -> str:
    """All docstrings of a module, from its source: modules in memory may have been patched by whoever imported them."""
    path = Path(sysconfig.get_path("stdlib"), name)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))) + "\n"


# Files


def _files(path: Path, fields: tuple[str, ...], pairs: bool) -> Source:
    """A file, or all the files of a folder; a single text file is a text, everything else is documents."""
    _check_path(path, pairs)
    files, n_empty = _in_folder(path, pairs) if path.is_dir() else ([path], 0)
    for file in files:
        if not os.access(file, os.R_OK):
            raise UserError(f"data.source = {file} may not be read by you")
    kinds = ["text" if file.suffix.lower() in TEXT_SUFFIXES else file.suffix.lower() for file in files]
    if fields not in ((), ("text",), PAIR_FIELDS) and set(kinds) <= {"text", ".tsv"}:
        options = "data.source_field, data.target_field" if pairs else "data.text_field"
        raise UserError(f"{options} = {', '.join(fields)} needs rows with fields, and {path} has none")
    name = _slug(path.resolve().name if path.is_dir() else path.stem)
    notice = f"leaving out {_empty_files(n_empty)}" if n_empty else ""
    if kinds == ["text"]:
        return Source(name, {"text": checksum(files[0])}, partial(_text_file, files[0]), single=True, notice=notice)

    def read() -> Iterator[Document]:
        for file, kind in zip(files, kinds, strict=True):
            names = PAIR_FIELDS if kind == ".tsv" else fields
            yield from _text_file(file) if kind == "text" else _documents(ROWS[kind](file), names)

    texts = [(kind, checksum(file)) for file, kind in zip(files, kinds, strict=True)]
    return Source(name, {"files": texts, "fields": fields}, read, pairs=pairs, notice=notice)


def _check_path(path: Path, pairs: bool) -> None:
    """Raises `UserError` unless `path` is a folder or, by its name, a file that can be read."""
    suffix = path.suffix.lower()
    if not path.exists():
        siblings = path.parent.iterdir() if path.parent.is_dir() else ()
        names = [os.fspath(near) for near in siblings if near.is_dir() or near.suffix.lower() in ALL_SUFFIXES]
        near = difflib.get_close_matches(os.fspath(path), ["stories", "pydoc", *tasks.TASKS, *names], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        kinds = f"stories, pydoc, a file ({_suffixes_or(False)}), a folder of them, https://….txt or hub:NAME"
        raise UserError(f"there is no data.source = {path}; {hint}it can be {PAIR_SOURCES if pairs else kinds}")
    if path.is_dir() or suffix in _suffixes(pairs):
        return
    if suffix == ".tsv":
        raise UserError(
            f"data.source = {path} holds pairs, for an encoder-decoder ({TRANSLATE}); "
            f"a decoder reads {_suffixes_or(pairs)}"
        )
    if pairs:
        raise UserError(f"data.source = {path} has no pairs for an encoder-decoder; give {PAIR_SOURCES}")
    raise UserError(f"data.source = {path} is not a {_suffixes_or(pairs)} file, nor a folder of them")


def _in_folder(folder: Path, pairs: bool) -> tuple[list[Path], int]:
    """The files of `folder` and the folders in it that hold text, by their relative path, and how many are empty."""
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.suffix.lower() in _suffixes(pairs)}
    hidden = {name for name in paths if any(part.startswith(".") for part in name.parts)}
    names = sorted(paths.keys() - hidden, key=Path.as_posix)
    files = [paths[name] for name in names if paths[name].is_file()]
    full = [file for file in files if not _is_empty(file)]
    if not full:
        lack = f"only {_empty_files(len(files))}" if files else f"no {_suffixes_or(pairs)} file"
        raise UserError(f"data.source = {folder} holds {lack}, so there is no text in it")
    return full, len(files) - len(full)


def _is_empty(file: Path) -> bool:
    """Whether there is nothing in it, or a byte-order mark alone."""
    size = file.stat().st_size
    return size == 0 or (size == 3 and os.access(file, os.R_OK) and file.read_bytes() == codecs.BOM_UTF8)


def _suffixes_or(pairs: bool) -> str:
    *most, last = _suffixes(pairs)
    return f"{', '.join(most)} or {last}"


def _empty_files(n: int) -> str:
    return "1 empty file" if n == 1 else f"{n} empty files"


def _text_file(path: Path) -> Iterator[Document]:
    for block in _blocks(path):
        yield Document(block, more=True)
    yield Document("")


def _blocks(path: Path) -> Iterator[str]:
    """The text of a file, a block at a time. Raises `UserError` where it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)  # CR LF may stand across two blocks
    offset, at_start, data = 0, True, b"\n"
    with path.open("rb") as file:
        while data:
            data = file.read(BLOCK)
            n_held = len(decoder.getstate()[0])  # bytes of a character that the last block began
            try:
                text = line_ends.decode(decoder.decode(data, final=not data), final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, error.object[error.start :], offset - n_held + error.start) from None
            offset += len(data)
            if text:
                yield text.removeprefix("\ufeff") if at_start else text
                at_start = False


def _not_utf8(path: Path, data: bytes, offset: int) -> UserError:
    if offset == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return UserError(f"{path} is UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 {path} > utf8{path.suffix}")
    where = f"{path} is not UTF-8: byte 0x{data[0]:02X} at offset {offset:,}"
    return UserError(f"{where}; {MENDING} {path} > utf8{path.suffix}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not blank, each after the words that say where it is."""
    rest, number = "", 0
    for block in _blocks(path):
        *lines, rest = (rest + block).split("\n")
        for line in lines:
            number += 1
            if line.strip():
                yield f"{path}, line {number}", line
    if rest.strip():
        yield f"{path}, line {number + 1}", rest


# Rows


Rows = Iterable[tuple[str, dict]]  # where a row is, and its fields


def _documents(rows: Rows, fields: tuple[str, ...]) -> Iterator[Document]:
    """The texts in one field of `rows`, found if it is not given, or in the two of pairs. Rows without text do not
    count."""
    chosen = fields
    for where, row in rows:
        if not chosen and None in row.values() and not any(isinstance(value, str) for value in row.values()):
            continue
        if not chosen:  # in every row: where one has a null, another may have text
            fields = (_find_field(where, row, *fields),)
        texts = [_text(where, row, name) for name in fields]
        if all(texts):
            yield from (Document(text, is_source=place < len(texts) - 1) for place, text in enumerate(texts))


def _find_field(where: str, row: dict, before: str | None = None) -> str:
    """The field called text, else the only one that holds any, here and in the rows before."""
    if "text" in (before, *row):
        return "text"
    names = [before] if before else []
    names += [name for name, value in row.items() if isinstance(value, str) and name != before]
    if len(names) == 1:
        return names[0]
    if sorted(names) == sorted(PAIR_FIELDS):
        raise UserError(
            f"{where} is a pair (source, target), for an encoder-decoder ({TRANSLATE}); "
            f"to read one side alone, say which with data.text_field"
        )
    if names:
        raise UserError(f"{where} has several fields that hold text ({', '.join(names)}): choose with data.text_field")
    raise UserError(f"{where} has no field that holds text, only {_names(row)}")


def _text(where: str, row: dict, field: str) -> str:
    """The text in a field, empty if that is null; a.b is the field b in what a holds. Raises `UserError` if it is
    something else."""
    value, path = row, [field] if field in row else field.split(".")
    for name in path:
        if not isinstance(value, dict) or name not in value:
            there = _names(value if isinstance(value, dict) else row)
            hint = "; say which with data.source_field and data.target_field" if field in PAIR_FIELDS else ""
            raise UserError(f"{where} has no field {field}, only {there}{hint}")
        value = value[name]
    if not isinstance(value, str | None):
        raise UserError(f"{where} has no text in the field {field} but {reprlib.repr(value)}")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} has half of a surrogate pair (U+{ord(value[error.start]):04X}) in the field {field}, "
            f"which is no character by itself"
        ) from None
    return _normalise(value or "")


def _names(row: dict) -> str:
    return ", ".join(row) or "an empty row"


def _tsv(path: Path) -> Rows:
    for where, line in _lines(path):
        columns = line.split("\t")
        if len(columns) != 2:
            raise UserError(f"{where} has {len(columns) - 1} tabs, and a pair has one: source, tab, target")
        yield where, dict(zip(PAIR_FIELDS, columns, strict=True))


def _jsonl(path: Path) -> Rows:
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({getattr(error, 'msg', error)})") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object but {reprlib.repr(row)}; every line is to be one")
        yield where, row


def _parquet(path: Path) -> Rows:
    return _dataset(str(path), path="parquet", data_files=escape(os.fspath(path)))


def _hub(name: str, fields: tuple[str, ...]) -> Iterator[Document]:
    """A dataset of the Hugging Face Hub, NAME[:SUBSET][:SPLIT], or a folder that is one."""
    path, subset, split, *rest = [*name.split(":"), "", ""]
    if any(rest) or not path:
        raise UserError(f"data.source = hub:{name} must be hub:NAME, hub:NAME:SUBSET or hub:NAME:SUBSET:SPLIT")
    rows = _dataset(f"hub:{name}", ELSEWHERE, path=path, name=subset or None, split=split or "train")
    return _documents(rows, fields)


def _web(url: str) -> Iterator[Document]:
    # Not streamed, so that it is fetched once, and whole, as a file on disk is read.
    for where, row in _dataset(url, ELSEWHERE, path="text", data_files=url, sample_by="document", streaming=False):
        yield Document(_text(where, row, "text"))


def _dataset(source: str, hint: str = "", split: str = "train", streaming: bool = True, **dataset) -> Rows:
    """The rows of a dataset. Whatever stops them becomes a `UserError`, with the hint if it came from the network."""
    import datasets

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it would say what is raised as well
    try:
        rows = datasets.load_dataset(**dataset, split=split, streaming=streaming)
        yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))
    except Exception as error:  # from the network, the Hub, a parser: no common class, and all the user's to know
        cause = error.__cause__ or error  # `datasets` wraps what went wrong in "An error occurred"
        reason = (str(cause).splitlines() or [""])[0]
        hint = hint if isinstance(cause, OSError) else ""
        raise UserError(f"{source} cannot be read ({type(cause).__name__}: {reason}){hint}") from None


ROWS = {".jsonl": _jsonl, ".parquet": _parquet, ".tsv": _tsv}
TEXT_SUFFIXES = (".txt", ".md")
ALL_SUFFIXES = (*TEXT_SUFFIXES, *ROWS)


def _suffixes(pairs: bool) -> tuple[str, ...]:
    """Of the files that give pairs, or texts."""
    return (".tsv", ".jsonl", ".parquet") if pairs else (*TEXT_SUFFIXES, ".jsonl", ".parquet")
