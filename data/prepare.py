"""Any text to a prepared corpus: a folder of token files that are memory-mapped, with their tokenizer.

python -m data.prepare SOURCE [--tokenizer KIND] ...      train.py prepares by itself what is not prepared yet

A source is a sequence of documents. After each one comes the tokenizer's end-of-text id, and the last of them are the
validation split; a single text file has no such id and is cut by position. All text arrives with LF line ends and
without a byte-order mark. A prepared corpus is found again by what went into it: the text, the tokenizer, the settings.
"""

import argparse
import ast
import codecs
import difflib
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from config.errors import ConfigError, UserError, command
from config.schema import DataConfig, TrainConfig
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

CACHE = Path("data/cache")
FORMAT = 1  # to be raised when the same text and settings come to mean other files
SPLITS = ("train", "val")

# The modules of the standard library that explain themselves at most length.
PYDOC_MODULES = """
_pydecimal argparse ast bdb codecs collections configparser datetime difflib doctest email/message enum ftplib
http/client http/cookiejar imaplib inspect ipaddress json logging logging/handlers mailbox optparse os pdb pickletools
re shutil smtplib socket socketserver statistics subprocess tarfile threading traceback turtle typing unittest/case
unittest/mock urllib/parse urllib/request xml/etree/ElementTree zipfile
"""


@dataclass(frozen=True)
class Corpus:
    """A prepared text. The counts of bytes are of the text alone, without end-of-text ids."""

    folder: Path
    tokenizer: Tokenizer
    train: np.ndarray  # 1-D, memory-mapped, read-only
    val: np.ndarray
    largest_id: int
    train_bytes: int
    val_bytes: int

    @property
    def key(self) -> str:
        """The same for the same text prepared in the same way, wherever it lies."""
        return self.folder.name.rpartition("-")[2]


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    name: str  # of the folder in the cache
    identity: dict  # equal for equal texts
    read: Callable[[], Iterator[str]]
    single: bool = False  # one text file, cut by position
    max_tokens: int | None = None  # where an endless source ends


def prepare(config: DataConfig, seed: int, cache_dir: str | Path = CACHE) -> Corpus:
    """The corpus that `config` describes, from the cache if it is there. `seed` is that of generated text.

    It appears in the cache whole or not at all. Raises `UserError` for a text that cannot be read or is too short.
    """
    source = _source(config, seed)
    settings = {"format": FORMAT, "tokenizer": config.tokenizer, "val_fraction": config.val_fraction} | source.identity
    if config.tokenizer == "bpe":
        settings["bpe_vocab_size"] = config.bpe_vocab_size
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(cache_dir) / f"{source.name}-{key}"
    damage = _damage(folder) if folder.exists() else "is not there"
    if damage is None:
        _say(f"reusing {folder}")
        return _open(folder)
    _say(f"preparing {config.source}" + (f" again, because {folder} {damage}" if folder.exists() else ""))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / folder.name
            fresh.mkdir()
            _build(fresh, source, config, settings)
            _publish(fresh, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be prepared: {error.strerror}") from None
    return _open(folder)


def _publish(fresh: Path, folder: Path) -> None:
    """Renames `fresh` to `folder`, unless another process was first; something damaged there makes room."""
    if folder.exists() and _damage(folder):
        with suppress(FileNotFoundError):
            folder.rename(fresh.parent / "damaged")
    try:
        fresh.rename(folder)
    except OSError:
        if not folder.exists() or _damage(folder):
            raise


def _build(folder: Path, source: Source, config: DataConfig, settings: dict) -> None:
    """Writes the token files, the tokenizer and meta.json, which describes them."""
    begin = time.perf_counter()
    documents = filter(None, source.read())
    if source.single:
        documents = iter(_cut(next(documents, ""), config))
    sample, documents = itertools.tee(documents)
    tokenizer = train_tokenizer(config.tokenizer, _first(sample, source.max_tokens), config.bpe_vocab_size)
    del sample  # or tee would keep every document
    tokenizer.save(folder / "tokenizer")

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    ids, n_bytes, n_tokens = [], [], 0
    for document in documents:
        encoded = tokenizer.encode_array(document).astype(dtype)
        ids.append(encoded if source.single else np.append(encoded, dtype.type(tokenizer.end_id)))
        n_bytes.append(len(document.encode()))
        n_tokens += len(ids[-1])
        if source.max_tokens and n_tokens >= source.max_tokens:
            break
    if len(ids) < 2:
        raise UserError(f"data.source = {config.source} has too few documents ({len(ids)}) to keep one for validation")

    n_train = 1 if source.single else _train_share(len(ids), config.val_fraction)
    meta = {"settings": settings, "dtype": dtype.str, "largest_id": max(int(array.max()) for array in ids)}
    for split, part in zip(SPLITS, (slice(None, n_train), slice(n_train, None)), strict=True):
        tokens = np.concatenate(ids[part])
        tokens.tofile(folder / f"{split}.bin")
        meta[split] = {"tokens": len(tokens), "bytes": sum(n_bytes[part])}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    meta["files"] = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
    meta["checksum"] = _meta_checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")
    _report(meta, tokenizer, config, time.perf_counter() - begin)


def _report(meta: dict, tokenizer: Tokenizer, config: DataConfig, seconds: float) -> None:
    if config.tokenizer == "bpe" and tokenizer.vocab_size < config.bpe_vocab_size:
        _say(f"the text yields only {tokenizer.vocab_size} of {config.bpe_vocab_size} ids (data.bpe_vocab_size)")
    n_bytes = sum(meta[split]["bytes"] for split in SPLITS)
    _say(
        f"{meta['train']['tokens']:,} tokens to train on and {meta['val']['tokens']:,} to validate "
        f"({tokenizer.name}, {tokenizer.vocab_size:,} ids) from {n_bytes / 1e6:.1f} MB in {seconds:.1f} s"
    )


def _train_share(n: int, val_fraction: float) -> int:
    """How many of `n` (at least 2) things are for training; neither split is empty."""
    return min(max(int(n * (1 - val_fraction)), 1), n - 1)


def _cut(text: str, config: DataConfig) -> list[str]:
    if len(text) < 2:
        raise UserError(f"data.source = {config.source} holds {'one character' if text else 'no text'}")
    cut = _train_share(len(text), config.val_fraction)
    return [text[:cut], text[cut:]]


def _first(documents: Iterable[str], max_tokens: int | None) -> Iterator[str]:
    """The documents a tokenizer is trained on: of an endless source, the first 4 bytes per token asked for.

    That is about what a bpe token holds, and no character is longer, so chars sees all that it will encode.
    """
    n_bytes = 0
    for document in documents:
        yield document
        n_bytes += len(document.encode())
        if max_tokens and n_bytes >= 4 * max_tokens:
            return


# The folder


def _open(folder: Path) -> Corpus:
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    return Corpus(
        folder=folder,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        largest_id=meta["largest_id"],
        **{split: np.memmap(folder / f"{split}.bin", meta["dtype"], mode="r") for split in SPLITS},
        **{f"{split}_bytes": meta[split]["bytes"] for split in SPLITS},
    )


def _damage(folder: Path) -> str | None:
    """What is wrong with a prepared folder, or None. Reads every byte: about a second a gigabyte."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        damaged = (name for name, checksum in meta["files"].items() if _checksum(folder / name) != checksum)
        name = "meta.json" if meta["checksum"] != _meta_checksum(meta) else next(damaged, None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "is damaged"
    return name and f"is damaged ({name} has changed)"


def _meta_checksum(meta: dict) -> str:
    """Of everything in meta.json but the checksum itself."""
    values = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(line: str) -> None:
    print(f"data: {line}", file=sys.stderr)


# Sources


def _source(config: DataConfig, seed: int) -> Source:
    kind, _, rest = config.source.partition(":")
    if config.source == "stories":
        return _stories(seed, config.max_tokens)
    if config.source == "pydoc":
        return Source("pydoc", {"pydoc": platform.python_version(), "modules": PYDOC_MODULES}, _pydoc)
    if kind == "hub":
        identity = {"hub": rest, "text_field": config.text_field, "max_tokens": config.max_tokens}
        return Source(_slug(rest), identity, lambda: _hub(rest, config.text_field), max_tokens=config.max_tokens)
    if kind in ("http", "https"):
        return Source(_slug(Path(rest).stem), {"url": config.source}, lambda: _web(config.source), single=True)
    path = Path(config.source)
    _check_file(path)
    return Source(_slug(path.stem), {"text": _checksum(path)}, lambda: iter([_read_text(path)]), single=True)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "text"


def _stories(seed: int, max_tokens: int) -> Source:
    def read() -> Iterator[str]:
        from data import stories

        return stories.documents(seed, n_bytes=64 * max_tokens)  # far more than enough: it ends at max_tokens

    # Neither the grammar's code nor its words may change unnoticed.
    files = {path.name: _checksum(path) for path in sorted(Path(__file__).parent.glob("stories*"))}
    return Source("stories", {"stories": files, "seed": seed, "max_tokens": max_tokens}, read, max_tokens=max_tokens)


def _pydoc() -> Iterator[str]:
    """The help topics and docstrings of Python itself: a document a topic or module, in an arbitrary but fixed order,
    so that training and validation read the same mixture."""
    from pydoc_data.topics import topics

    documents = [*topics.values(), *map(_docstrings, PYDOC_MODULES.split())]
    return iter(sorted(map(_normalise, documents), key=lambda text: hashlib.sha256(text.encode()).digest()))


def _docstrings(name: str) -> str:
    """All docstrings of a module, from its source: modules in memory may have been patched by whoever imported them."""
    path = Path(sysconfig.get_path("stdlib"), name)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))) + "\n"


def _hub(name: str, text_field: str) -> Iterator[str]:
    """A dataset of the Hugging Face Hub, NAME[:SUBSET], streamed."""
    name, _, subset = name.partition(":")
    for row in _rows(f"hub:{name}", path=name, name=subset or None, streaming=True):
        text = row.get(text_field)
        if not isinstance(text, str):
            raise UserError(f"hub:{name} has no text in data.text_field = {text_field}, only {', '.join(row)}")
        yield _normalise(text)


def _web(url: str) -> Iterator[str]:
    for row in _rows(url, path="text", data_files=url, sample_by="document"):  # whole, as a file on disk is read
        yield _normalise(row["text"])


def _rows(source: str, **dataset) -> Iterator[dict]:
    """The rows of a dataset. Whatever stops them becomes a `UserError`."""
    import datasets

    try:
        yield from datasets.load_dataset(**dataset, split="train")
    except Exception as error:  # from the network, the Hub, a parser: no common class, and all the user's to know
        cause = error.__cause__ or error  # `datasets` wraps what went wrong in "An error occurred"
        reason = (str(cause).splitlines() or [""])[0]
        raise UserError(
            f"{source} cannot be read ({type(cause).__name__}: {reason}); without a network, "
            f"fetch the text elsewhere and give its path as data.source"
        ) from None


def _check_file(path: Path) -> None:
    """Raises `UserError` unless `path` is a text file by its name."""
    if path.is_dir():
        raise UserError(f"data.source = {path} is a folder; join its texts into one .txt file")
    if not path.exists():
        names = ["stories", "pydoc", *(os.fspath(near) for near in path.parent.glob("*.txt"))]
        near = difflib.get_close_matches(os.fspath(path), names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        kinds = "stories, pydoc, a .txt file, https://….txt or hub:NAME"
        raise UserError(f"there is no data.source = {path}; {hint}it can be {kinds}")
    if path.suffix.lower() != ".txt":
        raise UserError(f"data.source = {path} is not a .txt file")
    if not os.access(path, os.R_OK):
        raise UserError(f"data.source = {path} may not be read by you")


def _read_text(path: Path) -> str:
    try:
        return _normalise(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path} is UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 {path} > utf8.txt") from None
        raise UserError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02X} at offset {error.start:,}; "
            f"save it as UTF-8, for example, if it is Latin-1, with iconv -f LATIN1 -t UTF-8 {path} > utf8.txt"
        ) from None


def _normalise(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


@command
def main(argv: Sequence[str] | None = None) -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # --help is not ASCII, a console may be
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description=(__doc__ or "").partition("\n")[0])
    fields = dict(DataConfig.model_fields)
    parser.add_argument("source", metavar="SOURCE", help=fields.pop("source").description)
    fields["seed"] = TrainConfig.model_fields["seed"]
    for name, field in fields.items():
        option = "--" + name.replace("_", "-")
        text = f"{field.description} (default: %(default)s)".replace("\n", " ")
        parser.add_argument(option, type=field.annotation, default=field.default, help=text)
    values = vars(parser.parse_args(argv))
    seed = values.pop("seed")
    try:
        config = DataConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"data.{first['loc'][0]} = {first['input']}: " if first["loc"] else ""
        raise ConfigError(where + first["msg"].removeprefix("Value error, ")) from None
    _say(f"in {prepare(config, seed).folder}")


if __name__ == "__main__":
    main()
