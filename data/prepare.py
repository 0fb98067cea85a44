"""Any text to a prepared corpus: a folder of token files that are memory-mapped, with their tokenizer.

python -m data.prepare SOURCE [--tokenizer KIND] ...      train.py prepares by itself what is not prepared yet

After each document comes the tokenizer's end-of-text id; a single text has none. Documents go to validation evenly
spread, and of a single text the end does. The source is read twice, first for the tokenizer, then to encode it on all
cores, and never held in memory. A prepared corpus is found again by what went into it: text, tokenizer and settings.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ValidationError

from config.errors import ConfigError, UserError, command, from_torchrun
from config.schema import DataConfig
from data.sources import PAIR_SOURCES, Document, Source, checksum, open_source
from data.tokenizer import Tokenizer, last_cut, load_tokenizer, train_tokenizer

CACHE = Path("data/cache")
WAIT = 3  # seconds after which it is said that another process prepares
FORMAT = 3  # to be raised when the same text and settings come to mean other files
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PART = 2**16  # characters, about, of a long text that are encoded at a time
BATCH = 2**18  # characters, at least, that a thread is given at a time
SOURCES = ".sources"  # after the name of a split: what its targets belong to
SAMPLE_BYTES = 32_000_000  # of a long text, what a bpe is trained on


class Split(NamedTuple):
    """A part of a corpus. `n_bytes` is of the text alone, without end-of-text ids.

    Of pairs, all this is about the targets, and `sources` holds the tokens of as many sources, in the same order.
    `floor`, where the source knows it, holds the entropy of all documents in nats: of their English lines, of their
    Korean lines, and of both for one who knows which documents are in this split.
    """

    tokens: np.ndarray  # 1-D, memory-mapped, read-only
    n_bytes: int
    n_documents: int
    floor: tuple[float, ...] | None = None
    sources: np.ndarray | None = None  # 1-D, memory-mapped, read-only


@dataclass(frozen=True)
class Corpus:
    """A prepared text. Of pairs, tokenizer and largest id are those of the targets."""

    folder: Path
    tokenizer: Tokenizer
    largest_id: int
    train: Split
    val: Split
    held_out: Split | None = None
    documents: bool = False  # every document is followed by the end-of-text id
    source_tokenizer: Tokenizer | None = None  # of pairs; the very same object if both sides share one
    largest_source_id: int = 0

    @property
    def pairs(self) -> bool:
        return self.source_tokenizer is not None

    @property
    def key(self) -> str:
        """The same for the same text prepared in the same way, wherever it lies."""
        return self.folder.name.rpartition("-")[2]


def prepare(
    config: DataConfig,
    pairs: bool = False,
    cache_dir: str | Path = CACHE,
    tokenizers: dict[str, Tokenizer] | None = None,
) -> Corpus:
    """The corpus that `config` describes, from the cache if it is there; with `pairs`, of sources and targets.

    `tokenizers` that are there already, by the names of their folders, are taken instead of new ones. The corpus
    appears in the cache whole or not at all. Raises `UserError` for a text that cannot be read or is too short.
    """
    source = open_source(config, pairs)
    settings = {"format": FORMAT, "tokenizer": config.tokenizer, "val_fraction": config.val_fraction} | source.identity
    settings |= {"pairs": pairs, "target_tokenizer": config.target_tokenizer}
    if tokenizers:
        settings["fingerprints"] = {name: tokenizer.fingerprint for name, tokenizer in tokenizers.items()}
    elif "bpe" in (config.tokenizer, config.target_tokenizer):
        settings["bpe_vocab_size"] = config.bpe_vocab_size
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(cache_dir) / f"{source.name}-{key}"
    with _alone(folder):
        return _prepare_alone(config, pairs, source, settings, folder, tokenizers or {})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within, no other process prepares the same: of many that want it at once, one does, and the others find it."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"), is_singleton=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=WAIT)
        except Timeout:
            _say(f"another process prepares {folder}; waiting for it")
            lock.acquire()
    except (OSError, NotImplementedError):  # nowhere to write, and perhaps nothing to prepare; or no locks there
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def _prepare_alone(
    config: DataConfig, pairs: bool, source: Source, settings: dict, folder: Path, given: dict[str, Tokenizer]
) -> Corpus:
    damage = _damage(folder) if folder.exists() else "is not there"
    if damage is None:
        fetched = source.identity.keys() & {"url", "hub"}
        _say(f"reusing {folder}" + (", as it was fetched then (to fetch it anew, delete that)" if fetched else ""))
        return _open(folder)
    _say(f"preparing {config.source}" + (f" again, because {folder} {damage}" if folder.exists() else ""))
    if source.notice:
        _say(source.notice)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_away(folder.parent)
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / folder.name
            fresh.mkdir()
            _build(fresh, source, config, settings, given)
            if open_source(config, pairs).identity != source.identity:
                raise UserError(f"data.source = {config.source} has changed while it was read; try again")
            _publish(fresh, folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be prepared: {error.strerror or error}") from None
    return _open(folder)


def encode_whole(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """All of the text that `config` names as the one split `val`, in a `tokenizer` that is there already; in memory.

    Raises `UserError` for a text that cannot be read, has no ids (with the place), or is too short for one target.
    """
    source = open_source(config)
    if source.notice:
        _say(source.notice)
    find_cut = len if tokenizer.name in ("bytes", "chars") else last_cut
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    tally, encoded = Tally(), []
    n_lines = 1
    with closing(Progress()) as progress:
        for part in _in_parts(source.read(), find_cut):
            try:
                ids = tokenizer.encode_array(part.text)
            except UserError as error:
                line = n_lines + _line_without_ids(part.text, tokenizer)
                where = f"line {line:,}" if source.single else f"document {tally.n_documents + 1:,}"
                raise UserError(f"data.source = {config.source}, {where}: {error}") from None
            if not (source.single or part.more):
                ids = np.append(ids, tokenizer.end_id)
            encoded.append(ids.astype(dtype))
            tally.add(part, ids)
            n_lines += part.text.count("\n")
            progress.show(f"{tally.n_bytes / 1e6:,.0f} MB encoded")
            if source.max_tokens and not part.more and tally.n_tokens >= source.max_tokens:
                break
    if tally.n_tokens < (2 if source.single else 1):  # of a single text the first token is no target
        raise UserError(f"data.source = {config.source} holds {'one token' if tally.n_tokens else 'no text'}")
    split = Split(np.concatenate(encoded), tally.n_bytes, tally.n_documents)  # the floor is not that of all documents
    return Corpus(Path(), tokenizer, tally.largest_id, train=split, val=split, documents=not source.single)


def _line_without_ids(text: str, tokenizer: Tokenizer) -> int:
    """Which line of `text`, from 0, is the first that cannot be encoded, its end included."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        try:
            tokenizer.encode_array(line + "\n" * (number + 1 < len(lines)))
        except UserError:
            return number
    raise AssertionError("what has no ids is a character of some line")


def _clear_away(cache_dir: Path) -> None:
    """Removes what preparations left that were killed more than a day ago."""
    for scratch in cache_dir.glob(".preparing-*"):
        with suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*"))) > 24 * 3600:
                shutil.rmtree(scratch)


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


def _build(folder: Path, source: Source, config: DataConfig, settings: dict, given: dict[str, Tokenizer]) -> None:
    """Writes the token files, the tokenizers and meta.json, which describes them."""
    begin = time.perf_counter()
    kinds = {config.tokenizer, config.target_tokenizer or config.tokenizer}
    find_cut = len if kinds <= {"bytes", "chars"} else last_cut  # they go character by character
    with closing(Progress()) as progress:
        if config.target_tokenizer:
            own = given.get("tokenizer"), given.get("source_tokenizer")
            tokenizer, n_characters = _survey(
                source, config, config.target_tokenizer, find_cut, progress, False, own[0]
            )
            source_tokenizer, _ = _survey(source, config, config.tokenizer, find_cut, progress, True, own[1])
            source_tokenizer.save(folder / "source_tokenizer")
        else:
            own = given.get("tokenizer")
            tokenizer, n_characters = _survey(source, config, config.tokenizer, find_cut, progress, None, own)
            source_tokenizer = tokenizer
        tokenizer.save(folder / "tokenizer")
        documents = source.read()
        if source.single:
            documents = _cut(documents, _train_share(n_characters, config))
        else:
            documents = _assign(documents, config.val_fraction, source.group)
        if source.max_tokens and "chars" in kinds:  # it knows the characters of no more
            documents = _first(documents, 4 * source.max_tokens, source.group)
        tokenizers = {"text": tokenizer, "source": source_tokenizer}
        dtype = np.dtype("<u2" if max(t.vocab_size for t in tokenizers.values()) <= 2**16 else "<u4")
        tallies = _write(folder, _in_parts(documents, find_cut), source, tokenizers, dtype, progress)
    if not tallies.keys() >= {"train", "val"}:
        raise UserError(_too_few(config, source, tallies))
    meta = {"settings": settings, "dtype": dtype.str, "documents": not source.single, "pairs": source.pairs}
    meta["splits"] = {split: asdict(tally) for split, tally in sorted(tallies.items())}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    meta["files"] = {path.relative_to(folder).as_posix(): checksum(path) for path in files}
    meta["checksum"] = _meta_checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")
    _report(meta, tokenizers, config, time.perf_counter() - begin)


def _too_few(config: DataConfig, source: Source, tallies: dict[str, "Tally"]) -> str:
    what = "pairs" if source.pairs else "documents"
    n = sum(tally.n_documents for tally in tallies.values()) // source.group  # (of a source and a target)
    remedy = "raise data.max_tokens" if source.max_tokens and _full(tallies, source) else "give more"
    return f"data.source = {config.source} has too few {what} ({n}) to keep one for validation: {remedy}"


def _report(meta: dict, tokenizers: dict[str, Tokenizer], config: DataConfig, seconds: float) -> None:
    names = {tokenizers["source"]: "the text yields"}
    if tokenizers["source"] is not tokenizers["text"]:
        names = {tokenizers["source"]: "the sources yield", tokenizers["text"]: "the targets yield"}
    kinds = [f"{tokenizer.name}, {tokenizer.vocab_size:,} ids" for tokenizer in names]
    for tokenizer, what in names.items():
        if tokenizer.name == "bpe" and tokenizer.vocab_size < config.bpe_vocab_size:
            _say(f"{what} only {tokenizer.vocab_size} of {config.bpe_vocab_size} ids (data.bpe_vocab_size)")
    splits = meta["splits"]
    total = {name: sum(split[name] for split in splits.values()) for name in ("n_tokens", "n_bytes", "n_characters")}
    what, count = ("pairs", "n_documents") if meta["pairs"] else ("tokens", "n_tokens")
    _say(
        f"{splits['train'][count]:,} {what} to train on and {splits['val'][count]:,} to validate "
        f"({' to '.join(kinds)}) from {total['n_bytes'] / 1e6:.1f} MB in {seconds:.1f} s"
    )
    if len(names) == 1:
        n_bytes, n_characters = (total[name] / total["n_tokens"] for name in ("n_bytes", "n_characters"))
        _say(f"{n_bytes:.2f} bytes and {n_characters:.2f} characters per token")


# The first reading: the tokenizer


def _survey(
    source: Source,
    config: DataConfig,
    kind: str,
    find_cut: Callable,
    progress: "Progress",
    of_sources: bool | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Tokenizer, int]:
    """The tokenizer of a `kind`, trained if need be, or the one given; and how many characters a single text has. Of
    pairs, the tokenizer is made from sources alone or from targets alone, or from both (None)."""
    n_characters = n_bytes = 0
    documents = source.read()
    if source.max_tokens:
        enough = 4 * source.max_tokens
        documents = _first(documents, min(enough, SAMPLE_BYTES) if kind == "bpe" else enough, source.group)
    if of_sources is not None:
        documents = (document for document in documents if document.is_source == of_sources)

    def read() -> Iterator[str]:
        nonlocal n_characters, n_bytes
        for part in _in_parts(documents, find_cut):
            yield part.text
            n_characters += len(part.text)
            n_bytes += len(part.text.encode())
            progress.show(f"{n_bytes / 1e6:,.0f} MB read")

    texts = read()
    if tokenizer is None:
        sample = _evenly(texts, SAMPLE_BYTES) if kind == "bpe" else texts
        if kind == "bpe":
            progress.show(f"learning {config.bpe_vocab_size:,} ids", at_once=n_bytes > SAMPLE_BYTES / 4)
        option = "data.target_tokenizer" if of_sources is False else "data.tokenizer"
        tokenizer = train_tokenizer(kind, sample, config.bpe_vocab_size, option)
    if source.single:
        deque(texts, maxlen=0)  # counts what the tokenizer had no need of
    return tokenizer, n_characters


def _first(documents: Iterable[Document], n_bytes: int, group: int) -> Iterator[Document]:
    """The documents from the start that hold `n_bytes`, the last group of them whole."""
    n_documents = 0
    for document in documents:
        yield document
        n_bytes -= len(document.text.encode())
        n_documents += not document.more
        if n_bytes <= 0 and not document.more and n_documents % group == 0:
            return


def _evenly(texts: Iterable[str], n_bytes: int) -> list[str]:
    """At most `n_bytes` of `texts`, from all over them: whenever it is more, every other one is dropped."""
    kept, size, stride = [], 0, 1
    for number, text in enumerate(texts):
        if number % stride == 0:
            kept.append(text)
            size += len(text.encode())
        while size > n_bytes and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            size = sum(len(text.encode()) for text in kept)
    return kept


# The second reading: the tokens


@dataclass
class Tally:
    """What has been written of a split."""

    n_tokens: int = 0
    n_bytes: int = 0
    n_characters: int = 0
    n_documents: int = 0
    floor: tuple[float, ...] | None = None
    largest_id: int = 0

    def add(self, part: Document, ids: np.ndarray) -> None:
        self.n_tokens += len(ids)
        self.n_bytes += len(part.text.encode())
        self.n_characters += len(part.text)
        self.largest_id = max(self.largest_id, int(ids.max(initial=0)))
        if not part.more:
            self.n_documents += 1
            if part.floor:
                floor = part.floor()
                self.floor = tuple(map(sum, zip(self.floor or (0.0,) * len(floor), floor, strict=True)))


def _write(
    folder: Path,
    parts: Iterable[Document],
    source: Source,
    tokenizers: dict[str, Tokenizer],
    dtype: np.dtype,
    progress: "Progress",
) -> dict[str, Tally]:
    """Encodes `parts` of documents into a token file for each split, those of sources apart, and tells what each
    holds."""

    def encode(batch: list[Document]) -> list[np.ndarray]:
        return [encode_part(part, tokenizers["source" if part.is_source else "text"]) for part in batch]

    def encode_part(part: Document, tokenizer: Tokenizer) -> np.ndarray:
        ids = tokenizer.encode_array(part.text).astype(dtype)
        return ids if source.single or part.more else np.append(ids, dtype.type(tokenizer.end_id))

    tallies, files = {}, {}
    with ExitStack() as stack:
        encoded = stack.enter_context(closing(_on_all_cores(encode, _batches(parts))))
        for part, ids in (pair for batch, arrays in encoded for pair in zip(batch, arrays, strict=True)):
            name = part.split + SOURCES * part.is_source
            if name not in tallies:
                tallies[name] = Tally()
                files[name] = stack.enter_context((folder / f"{name}.bin").open("wb", 2**20))
            files[name].write(ids)
            tallies[name].add(part, ids)
            progress.show(f"{sum(tally.n_bytes for tally in tallies.values()) / 1e6:,.0f} MB encoded")
            if source.max_tokens and not part.more and _full(tallies, source):
                break
    return tallies


def _full(tallies: dict[str, Tally], source: Source) -> bool:
    """Whether an endless source has given all that is wanted of it."""
    n_documents = sum(tally.n_documents for tally in tallies.values())
    n_tokens = sum(tally.n_tokens for tally in tallies.values())
    return n_documents % source.group == 0 and n_tokens >= source.max_tokens


def _train_share(n: int, config: DataConfig) -> int:
    """How many of the `n` characters of a text are for training; neither split is empty."""
    if n < 2:
        raise UserError(f"data.source = {config.source} holds {'one character' if n else 'no text'}")
    return min(max(int(n * (1 - config.val_fraction)), 1), n - 1)


def _cut(parts: Iterable[Document], n_train: int) -> Iterator[Document]:
    """A single text as two documents: its first `n_train` characters are for training."""
    for part in parts:
        if n_train > 0:
            n_train -= len(part.text)
            head, tail = (part.text, "") if n_train >= 0 else (part.text[:n_train], part.text[n_train:])
            yield Document(head, "train", more=n_train > 0)
            part = part._replace(text=tail)
        if n_train <= 0:
            yield part._replace(split="val")


def _assign(documents: Iterable[Document], val_fraction: float, group: int) -> Iterator[Document]:
    """The documents with the split of each, the same for a whole group: what its source says, else the second is for
    validation and, from there on, a share of them evenly spread."""
    index = 0
    for document in documents:
        after = index // group - 1  # how many come after the first
        chosen = after == 0 or (after > 0 and int(after * val_fraction) > int((after - 1) * val_fraction))
        yield document._replace(split=document.split or ("val" if chosen else "train"))
        index += not document.more


def _in_parts(documents: Iterable[Document], find_cut: Callable[[str], int]) -> Iterator[Document]:
    """The documents, long ones in parts cut where ids cannot change. Where there is no such place a part grows."""
    held = []  # of the text since the last cut
    for document in documents:
        for start in range(0, max(len(document.text), 1), PART):
            piece = document.text[start : start + PART]
            more = document.more or start + PART < len(document.text)
            cut = find_cut(piece) if more else len(piece)
            if cut or not more:
                yield document._replace(text="".join([*held, piece[:cut]]), more=more)
                held = []
            held.append(piece[cut:])


def _batches(parts: Iterable[Document]) -> Iterator[list[Document]]:
    """Lists of parts, enough in each to be worth handing to a thread."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= BATCH or len(batch) == 1000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _on_all_cores(function: Callable, batches: Iterable) -> Iterator[tuple]:
    """(batch, function(batch)), in order. Threads will do, as tiktoken lets other threads run; they are kept busy and
    no more, so that memory stays flat."""
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(function, batch)))
            if len(waiting) > 2 * WORKERS:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()


# What is said


class Progress:
    """How far something long is: on a terminal a line that renews itself, else one every few seconds."""

    def __init__(self):
        self.terminal = sys.stderr.isatty()
        self.interval = 0.2 if self.terminal else 5.0
        self.due = time.monotonic() + (1.0 if self.terminal else 5.0)
        self.shown = False

    def show(self, line: str, at_once: bool = False) -> None:
        if not at_once and time.monotonic() < self.due:
            return
        before, after = ("\r\x1b[K", "") if self.terminal else ("", "\n")
        print(f"{before}data: {line}", end=after, file=sys.stderr, flush=True)
        self.due, self.shown = time.monotonic() + self.interval, True

    def close(self) -> None:
        if self.terminal and self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    if from_torchrun("LOCAL_RANK") == 0:
        print(f"data: {line}", file=sys.stderr)


# The folder


def _open(folder: Path) -> Corpus:
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    tallies = meta["splits"]
    tokens = {name: np.memmap(folder / f"{name}.bin", meta["dtype"], mode="r") for name in tallies}
    splits, largest = {}, {"text": 0, "source": 0}
    for name, tally in tallies.items():
        side = "source" if name.endswith(SOURCES) else "text"
        largest[side] = max(largest[side], tally["largest_id"])
        if side == "text":
            floor, sources = tally["floor"] and tuple(tally["floor"]), tokens.get(name + SOURCES)
            splits[name] = Split(tokens[name], tally["n_bytes"], tally["n_documents"], floor, sources)
    tokenizer = source_tokenizer = load_tokenizer(folder / "tokenizer")
    if (folder / "source_tokenizer").exists():
        source_tokenizer = load_tokenizer(folder / "source_tokenizer")
    return Corpus(
        folder,
        tokenizer,
        largest["text"],
        **splits,
        documents=meta["documents"],
        source_tokenizer=source_tokenizer if meta["pairs"] else None,
        largest_source_id=largest["source"],
    )


def _damage(folder: Path) -> str | None:
    """What is wrong with a prepared folder, or None. Reads every byte: about a second a gigabyte."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        damaged = (name for name, value in meta["files"].items() if checksum(folder / name) != value)
        name = "meta.json" if meta["checksum"] != _meta_checksum(meta) else next(damaged, None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "is damaged"
    return name and f"is damaged ({name} has changed)"


def _meta_checksum(meta: dict) -> str:
    """Of everything in meta.json but the checksum itself."""
    values = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@command
def main(argv: Sequence[str] | None = None) -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # --help is not ASCII, a console may be
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description=(__doc__ or "").partition("\n")[0])
    fields = dict(DataConfig.model_fields)
    parser.add_argument("source", metavar="SOURCE", help=fields.pop("source").description)
    for name, field in fields.items():
        default = "" if field.default is None else " (default: %(default)s)"
        text = f"{field.description}{default}".replace("\n", " ")
        kind = field.annotation if isinstance(field.annotation, type) else str
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=field.default, help=text)
    parser.add_argument("--pairs", action="store_true", help=f"pairs for an encoder-decoder: {PAIR_SOURCES}")
    values = vars(parser.parse_args(argv))
    pairs = values.pop("pairs")
    try:
        config = DataConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"data.{first['loc'][0]} = {first['input']}: " if first["loc"] else ""
        raise ConfigError(where + first["msg"].removeprefix("Value error, ")) from None
    _say(f"in {prepare(config, pairs).folder}")


if __name__ == "__main__":
    main()
