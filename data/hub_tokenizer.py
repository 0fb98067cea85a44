"""Tokenizers in Hugging Face's layout, in and out: tokenizer.json, and tokenizer_config.json beside it.

Byte-level BPE (GPT-2's, Llama 3's) is what `tiktoken` does with the same pieces and the same pattern: it merges in the
order of ids and writes bytes as they are, where a tokenizer.json lists merges and writes each byte as a letter.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import UserError
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer

if TYPE_CHECKING:
    import tokenizers

# What the program of GPT-2 splits text with.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same where each digit was set apart before (SmolLM2): what stands before a digit stands at an end.
DIGITS_PATTERN = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Without a pattern of its own: only bytes to letters.
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

BESIDE = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
PROBE = "  1 23\n\n\t 4567 can't I'LL ſ'S\r\n a  b   \u3000별이 빛난다... <|endoftext|> é e\u0301 \u200d👩‍👧 x=1;  \n"


def _letters() -> list[str]:
    """The letter that GPT-2 writes for each byte: itself if it can be seen, else the next one from U+0100 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


LETTERS = _letters()
BYTE_OF = {letter: byte for byte, letter in enumerate(LETTERS)}


def read_tokenizer(folder: Path, end_id: int | None = None) -> Tokenizer:
    """The tokenizer in a folder of Hugging Face's layout: tokenizer.json, or GPT-2's vocab.json and merges.txt.

    `end_id` is the end of a text unless the tokenizer's own files name one. Raises `UserError` for what is no
    byte-level BPE that `tiktoken` encodes identically.
    """
    theirs = _open(folder)
    found = json.loads(theirs.to_str())
    config = _read_config(folder)
    model, added = found["model"], {token["content"]: token for token in found["added_tokens"]}
    end = config.get("eos_token") or (None if end_id is None else theirs.id_to_token(end_id))
    if end is None or theirs.token_to_id(end) is None:
        raise UserError(f"the tokenizer in {folder} has no end of text: tokenizer_config.json names no eos_token")
    end_id = theirs.token_to_id(end)
    added.setdefault(end, _added_token(end, end_id))
    config["eos_token"] = end
    vocab = {piece: id for piece, id in model.get("vocab", {}).items() if piece not in added}
    ids = theirs.get_vocab().values()
    if len({*ids}) < len(ids):
        raise UserError(f"the tokenizer in {folder} has two pieces of one id")
    if found["decoder"] == {"type": "Fuse"} and not model["merges"]:
        ours, alone = CharTokenizer(vocab), []
    else:
        pattern, ranks = _pattern(found, folder), _ranks(model, vocab, folder)
        kept = {"added_tokens": [*added.values()], "post_processor": found["post_processor"], "config": config}
        kept["start"] = _start(theirs)
        ours = BPETokenizer("bpe", ranks, pattern, end_id, max(ids) + 1, kept) if pattern else ByteTokenizer()
        # What is no word to the merges may be one to tiktoken, where it is all of a word.
        alone = [bytes(map(BYTE_OF.get, piece)).decode(errors="ignore") for piece in _unmerged(model, vocab)]
    _check_same(ours, theirs, end_id, folder, alone)
    return ours


def _open(folder: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        if (folder / "tokenizer.json").is_file():
            return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if not (folder / "merges.txt").is_file():
            raise UserError(
                f"{folder} has no tokenizer.json: Byeol reads byte-level BPE (GPT-2's, Llama 3's), no SentencePiece"
            )
        model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        theirs = tokenizers.Tokenizer(model)
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.decoder = tokenizers.decoders.ByteLevel()
        return theirs
    except UserError:
        raise
    except Exception as error:  # the library has no class of its own for what it cannot read
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}") from None


def _read_config(folder: Path) -> dict:
    """What `transformers` keeps beside a tokenizer.json: roles of special tokens, the template of a conversation."""
    config = {}
    for file in (folder / name for name in BESIDE):
        try:
            config |= json.loads(file.read_text("utf-8")) if file.is_file() else {}
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is damaged: {error}") from None
    if (folder / "chat_template.jinja").is_file():
        config["chat_template"] = (folder / "chat_template.jinja").read_text("utf-8")
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, dict):
            config[name] = value["content"]
    return {name: value for name, value in config.items() if name not in ("auto_map", "added_tokens_decoder")}


def _pattern(found: dict, folder: Path) -> str:
    """The regular expression that cuts a text into what is merged; "": nothing does."""
    parts = found["pre_tokenizer"] or {}
    parts = parts.get("pretokenizers", [parts])
    *before, last = [part | {"trim_offsets": True} if part.get("type") == "ByteLevel" else part for part in parts]
    whole, digits = BYTES | {"use_regex": True}, {"type": "Digits", "individual_digits": True}
    if found["normalizer"] is None and found["model"]["type"] == "BPE":
        if not before and last == whole:
            return GPT2_PATTERN
        if not before and last == BYTES and not found["model"]["merges"]:
            return ""
        if before == [digits] and last == whole:
            return DIGITS_PATTERN
        split = before[0] if len(before) == 1 and last == BYTES else {}
        if (split.get("type"), split.get("behavior"), split.get("invert")) == ("Split", "Isolated", False):
            return split["pattern"]["Regex"]
    what = found["normalizer"] or found["pre_tokenizer"] or found["model"]["type"]
    raise UserError(f"the tokenizer in {folder} is no byte-level BPE that tiktoken can encode: {json.dumps(what):.200}")


def _ranks(model: dict, vocab: dict[str, int], folder: Path) -> dict[bytes, int]:
    """The bytes of each piece and its id, which is the order of its merge."""
    ids = [vocab.get(first + second, -1) for first, second in model["merges"]]
    in_order = ids == sorted(ids) and -1 not in ids
    if not in_order or any(model.get(key) for key in ("dropout", "byte_fallback", "continuing_subword_prefix")):
        raise UserError(f"the tokenizer in {folder} merges in another order than that of its ids; tiktoken cannot")
    merges = {*map(tuple, model["merges"])}
    for piece in _unmerged(model, vocab):
        cuts = {(piece[:cut], piece[cut:]) for cut in range(1, len(piece))}
        if any({*pair} <= vocab.keys() for pair in cuts - merges):
            raise UserError(f"the tokenizer in {folder} never merges {piece!r}, which has an id; tiktoken would")
    try:
        return {bytes(BYTE_OF[letter] for letter in piece): id for piece, id in vocab.items()}
    except KeyError:
        raise UserError(f"the tokenizer in {folder} is not byte-level: it has pieces that are no bytes") from None


def _unmerged(model: dict, vocab: dict[str, int]) -> list[str]:
    """The pieces that are not made out of their own letters. (Where one is, it is made alike within any text.)"""
    import tokenizers

    theirs = tokenizers.models.BPE(vocab=model["vocab"], merges=[*map(tuple, model["merges"])])
    return [piece for piece, id in vocab.items() if [token.id for token in theirs.tokenize(piece)] != [id]]


def _start(theirs: "tokenizers.Tokenizer") -> list[int]:
    """What it puts before a text."""
    ids, (first, *_) = theirs.encode("a").ids, theirs.encode("a", add_special_tokens=False).ids
    return ids[: ids.index(first)]


def _check_same(ours: Tokenizer, theirs: "tokenizers.Tokenizer", end_id: int, folder: Path, alone: list[str]) -> None:
    """Encodes its own vocabulary and more with both, and what stands `alone`. Raises `UserError` where they differ."""
    theirs.encode_special_tokens = True  # a text may spell them
    text = PROBE + ours.decode_bytes(range(ours.vocab_size)).decode(errors="ignore")
    for part in (text, *alone):
        known = "".join(character for character in part if _has_ids(ours, character))
        if ours.end_id != end_id or ours.encode(known) != theirs.encode(known, add_special_tokens=False).ids:
            raise UserError(f"the tokenizer in {folder} divides text otherwise than tiktoken does with the same pieces")


def _has_ids(tokenizer: Tokenizer, text: str) -> bool:
    try:
        return len(tokenizer.encode(text)) > 0
    except UserError:
        return False


def _added_token(content: str, id: int) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **flags, "special": True}


# The way out


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which `AutoTokenizer` opens: the same ids for the same text.

    What an imported tokenizer had beside its pieces (special tokens, a chat template) goes out as it came in. In the
    others a text that spells the end of a text is but a text, as here.
    """
    kept = getattr(tokenizer, "hugging_face", None) or {
        "added_tokens": [_added_token(END_OF_TEXT, tokenizer.end_id)],
        "post_processor": None,
        "config": {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "split_special_tokens": True},
    }
    model = {"type": "BPE", "vocab": {}, "merges": []}
    parts, decoder = BYTES, BYTES
    if isinstance(tokenizer, CharTokenizer):
        model["vocab"] = {character: id for id, character in enumerate(tokenizer.alphabet)}
        parts, decoder = None, {"type": "Fuse"}
    elif isinstance(tokenizer, BPETokenizer):
        model["vocab"] = {_spelled(piece): id for piece, id in tokenizer.ranks.items()}
        model |= {"merges": _merges(tokenizer.ranks), "ignore_merges": True}
        split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
        parts = {"type": "Sequence", "pretokenizers": [split, BYTES]}
    else:
        model["vocab"] = {letter: byte for byte, letter in enumerate(LETTERS)}
    model["vocab"] |= {token["content"]: token["id"] for token in kept["added_tokens"]}
    whole = {"version": "1.0", "added_tokens": kept["added_tokens"], "normalizer": None, "pre_tokenizer": parts}
    whole |= {"post_processor": kept["post_processor"], "decoder": decoder, "model": model}
    config = {"clean_up_tokenization_spaces": False} | kept["config"] | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, values in {"tokenizer.json": whole, "tokenizer_config.json": config}.items():
        (folder / name).write_text(json.dumps(values, ensure_ascii=False, indent=1), "utf-8")


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids of special tokens as a model's configuration names them."""
    if (kept := getattr(tokenizer, "hugging_face", None)) is None:
        return {"bos_token_id": tokenizer.end_id, "eos_token_id": tokenizer.end_id, "pad_token_id": None}
    ids = {token["content"]: token["id"] for token in kept["added_tokens"]}
    roles = {f"{role}_token_id": ids.get(kept["config"].get(f"{role}_token")) for role in ("bos", "pad")}
    return {"eos_token_id": tokenizer.end_id, **roles}


def _spelled(piece: bytes) -> str:
    return "".join(LETTERS[byte] for byte in piece)


def _merges(ranks: dict[bytes, int]) -> list[list[str]]:
    """All ways to put a piece together from two, in the order of ids: tiktoken merges whatever makes a piece."""
    merges = []
    for piece in sorted(ranks, key=ranks.get):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = sorted((ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks)
        merges += [[_spelled(a), _spelled(b)] for _, _, a, b in pairs]
    return merges
