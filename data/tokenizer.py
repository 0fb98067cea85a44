"""Text to ids and back.

A tokenizer is a table: `pieces[id]` holds the bytes that an id stands for. Decoding joins them, for every kind alike;
only encoding differs. bytes needs no training, chars takes its alphabet from the text, bpe learns its pieces from the
text (`rustbpe` learns, `tiktoken` encodes), and a published tiktoken encoding comes with its pieces.

Every tokenizer has one special id, the end of a text. It is the last one, except in published encodings, which put it
where they like. Text can spell "<|endoftext|>" as it can spell anything: only the program writes the real one.
"""

import base64
import codecs
import difflib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from config.errors import UserError

# As published with Llama 3, so that other programs can split text as we do.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()

# `\s+(?!\S)` backtracks through a run of white space, and near a million characters overflows the stack of the regular
# expression engine in both tiktoken and rustbpe. (Nothing else does: letters, digits and marks pass by the million.)
MAX_WHITE_SPACE = 100_000
_LONG_WHITE_SPACE = re.compile(rf"(?<!\s)\s{{{MAX_WHITE_SPACE + 1},}}")

# The last place before white space or a common mark that follows a letter or digit. All published patterns end a piece
# there, whatever comes after, and none looks back; so the ids of two parts cut there are the ids of the whole. (Before
# an apostrophe or an accent it would not do: o200k_base takes them into the word.)
_LAST_CUT = re.compile(r".*[^\W_](?=[\s.,;:!?。，、！？])", re.DOTALL)

ENCODINGS_HOST = "https://openaipublic.blob.core.windows.net"  # where tiktoken's loader goes
PATIENCE = 4  # seconds of silence before a download is asked whether it is alive


class Tokenizer:
    """What all kinds share. `name` is the kind, or the published encoding; `end_id` is the end of a text, and `start`
    what is read before a prompt (nothing, but by some imported models)."""

    name: str
    pieces: Sequence[bytes]
    end_id: int
    start: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode_array(self, text: str) -> np.ndarray:
        """The ids of `text` as an array of integers. Raises `UserError` for what has no ids."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; decoding them gives exactly `text` again. Raises `UserError` for what has no ids."""
        return self.encode_array(text).tolist()

    def piece(self, token_id: int) -> bytes:
        """The bytes of one id: none for the end of a text, U+FFFD for an id outside the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else UNKNOWN

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.piece, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer into `folder` as JSON and base64: the same tokenizer, the same bytes."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps({"name": self.name} | self._save(folder)), "utf-8")

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of all that text and ids depend on: tokenizers that differ have different ones."""
        parts = (self.name, self.end_id, getattr(self, "pattern", ""), list(self.pieces))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _save(self, folder: Path) -> dict:
        """What the kind needs beside its name: small things returned, large ones written into `folder`."""
        return {}


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text: 257 ids."""

    def __init__(self):
        self.name, self.pieces, self.end_id = "bytes", [*(bytes([byte]) for byte in range(256)), b""], 256

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8)


class CharTokenizer(Tokenizer):
    """The characters of an alphabet, numbered by code point."""

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.name, self.end_id = "chars", len(self.alphabet)
        self.pieces = [*(character.encode() for character in self.alphabet), b""]
        self._code_points = np.append(_code_points(self.alphabet), 0x110000)  # the last one: no character at all

    def encode_array(self, text: str) -> np.ndarray:
        code_points = _code_points(text)
        ids = np.searchsorted(self._code_points, code_points)
        strange = self._code_points[ids] != code_points
        if strange.any():
            character = text[int(strange.argmax())]
            raise UserError(
                f"the character {character!r} (U+{ord(character):04X}) is not one of the {len(self.alphabet)} that the "
                f"chars tokenizer was made from; leave it out, or train with data.tokenizer = bytes or bpe"
            )
        return ids

    def _save(self, folder: Path) -> dict:
        return {"alphabet": self.alphabet}


class BPETokenizer(Tokenizer):
    """Byte pair encoding, exactly as tiktoken does it with these ranks and this pattern.

    `hugging_face` is what an imported tokenizer has beside them, kept as it was (data/hub_tokenizer.py); its special
    tokens are read by their names, and never written by a text.
    """

    def __init__(
        self,
        name: str,
        ranks: dict[bytes, int],
        pattern: str,
        end_id: int,
        vocab_size: int,
        hugging_face: dict | None = None,
    ):
        import tiktoken

        self.name, self.ranks, self.pattern, self.end_id = name, ranks, pattern, end_id
        self.hugging_face = hugging_face
        self.pieces = [UNKNOWN] * vocab_size  # published encodings leave some ids without a meaning
        for piece, rank in ranks.items():
            self.pieces[rank] = piece
        if hugging_face:
            self.start = tuple(hugging_face["start"])
            for token in hugging_face["added_tokens"]:
                self.pieces[token["id"]] = token["content"].encode()
        self.pieces[end_id] = b""
        self._missing = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end_id}
        )

    def encode_array(self, text: str) -> np.ndarray:
        if self._lacks(text):  # (tiktoken would also replace what cannot be written, in silence)
            character = next(filter(self._lacks, text))
            raise UserError(
                f"the character {character!r} (U+{ord(character):04X}) has no id in the tokenizer, which was imported "
                f"without some bytes; leave it out"
            )
        parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _cut_white_space(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _lacks(self, text: str) -> bool:
        """Whether a byte of `text` has no id, as in a few published vocabularies."""
        encoded = _utf8(text)
        return bool(self._missing) and len(encoded.translate(None, self._missing)) < len(encoded)

    def _save(self, folder: Path) -> dict:
        lines = (b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in self.ranks.items())
        (folder / "ranks.tiktoken").write_bytes(b"".join(lines))
        kept = {"hugging_face": self.hugging_face} if self.hugging_face else {}
        return {"pattern": self.pattern, "end_id": self.end_id, "vocab_size": self.vocab_size, **kept}


class StreamDecoder:
    """Decodes ids one at a time, and holds back the bytes of a character until it is whole."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes, often none."""
        return self._decoder.decode(self._tokenizer.piece(token_id))

    def flush(self) -> str:
        """Ends the text: what is left of an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def train_tokenizer(kind: str, texts: Iterable[str], vocab_size: int, option: str = "data.tokenizer") -> Tokenizer:
    """A tokenizer of `kind`: bytes, chars, bpe, or the name of a tiktoken encoding.

    Only chars and bpe read `texts`, and only bpe minds `vocab_size` (end of text included): a small text may yield
    fewer ids. The same texts give the same tokenizer. Raises `UserError`, naming the `option`, for an unknown or
    unreachable kind.
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "chars":
        return CharTokenizer(_alphabet(texts))
    if kind == "bpe":
        return _train_bpe(texts, vocab_size)
    return _published(kind, option)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`; never needs a network. Raises `UserError` if it cannot be read."""
    folder = Path(folder)
    try:
        saved = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        name = saved.pop("name")
        if name == "bytes":
            return ByteTokenizer()
        if name == "chars":
            return CharTokenizer(saved["alphabet"])
        lines = (folder / "ranks.tiktoken").read_bytes().splitlines()
        ranks = {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, lines)}
        if not len(lines) == len(ranks) == len(set(ranks.values())):
            raise ValueError("a piece or an id comes twice")  # of which tiktoken would panic
        return BPETokenizer(name, ranks, **saved)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} does not hold a tokenizer that can be read ({reason})") from None


def _train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """The most frequent pair is merged first; of equals, the one with the smaller ids."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    parts = (part for text in texts for part in _cut_white_space(text))
    trainer.train_from_iterator(parts, vocab_size - 1, pattern=SPLIT_PATTERN)
    ranks: dict[bytes, int] = {}
    for piece, _ in trainer.get_mergeable_ranks():
        ranks.setdefault(bytes(piece), len(ranks))  # two ways to merge the same bytes are one piece
    return BPETokenizer("bpe", ranks, SPLIT_PATTERN, end_id=len(ranks), vocab_size=len(ranks) + 1)


def _published(name: str, option: str) -> BPETokenizer:
    import tiktoken

    names = ["bytes", "chars", "bpe", *tiktoken.list_encoding_names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{option} = {name!r} is unknown: {hint}there are {', '.join(names)}")
    try:
        encoding = _fetch_encoding(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{option} = {name} is downloaded once, and that failed ({type(error).__name__}): use it once where "
            f"there is a network with TIKTOKEN_CACHE_DIR set to a folder, bring that folder here and set it here too"
        ) from None
    return BPETokenizer(name, encoding._mergeable_ranks, encoding._pat_str, encoding.eot_token, encoding.n_vocab)


def _fetch_encoding(name: str):
    """tiktoken's encoding, from its cache or its host. tiktoken sets no time limit, so without a network it may hang:
    after a few silent seconds the host must answer, or `OSError` is raised; a slow line may take its time.
    """
    import requests
    import tiktoken

    encoding = _in_background(partial(tiktoken.get_encoding, name))
    try:
        return encoding.result(PATIENCE)
    except TimeoutError:
        _in_background(partial(requests.head, ENCODINGS_HOST, timeout=PATIENCE)).result(PATIENCE)
        return encoding.result()


def _in_background(call: Callable) -> Future:
    """The future result of `call`, in a thread that does not keep the program alive (an executor's would)."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def last_cut(text: str) -> int:
    """The last place where `text` can be cut and its parts encoded by themselves; 0 if there is none."""
    found = _LAST_CUT.match(text)
    return found.end() if found else 0


def _cut_white_space(text: str) -> Iterator[str]:
    """`text` in parts, cut only inside runs of more than MAX_WHITE_SPACE white-space characters."""
    if len(text) <= MAX_WHITE_SPACE:  # for speed only
        yield text
        return
    start = 0
    for run in _LONG_WHITE_SPACE.finditer(text):
        for cut in range(run.start() + MAX_WHITE_SPACE, run.end(), MAX_WHITE_SPACE):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _alphabet(texts: Iterable[str]) -> str:
    """The characters of `texts`, in order. (A set of them takes ten times as long.)"""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        seen[_code_points(text)] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def _code_points(text: str) -> np.ndarray:
    _utf8(text)
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a surrogate pair and no "
            f"character by itself (usually a byte that is not UTF-8): give the text as UTF-8"
        ) from None
