"""Texts to prepare, the command that prepares them, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.errors import UserError
from data.prepare import Corpus, Split

ROOT = Path(__file__).parents[1]
TEXT = "The cat saw the other cat.\n아버지가 방에 들어가신다. 🎉 é\n" * 50


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "hf")} | environment
    line = [sys.executable, "-m", "data.prepare", *words]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, timeout=60)


def texts(corpus: Corpus, split: Split) -> list[str]:
    """The documents of a split, or its one text, as its tokens say; of pairs each source, then its target."""
    if not corpus.documents:
        assert corpus.tokenizer.end_id not in split.tokens
        return [corpus.tokenizer.decode(split.tokens.tolist())]
    targets = documents(split.tokens.tolist(), corpus.tokenizer)
    if not corpus.pairs:
        return targets
    sources = documents(split.sources.tolist(), corpus.source_tokenizer)
    return [text for pair in zip(sources, targets, strict=True) for text in pair]


def documents(ids: list[int], tokenizer) -> list[str]:
    """The texts that ends of text close."""
    assert ids[-1] == tokenizer.end_id
    decoded, start = [], 0
    for i, token in enumerate(ids):
        if token == tokenizer.end_id:
            decoded.append(tokenizer.decode(ids[start:i]))
            start = i + 1
    return decoded


def written(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared corpus."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
