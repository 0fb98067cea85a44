from pathlib import Path

import pytest

from config.schema import DataConfig
from data import prepare as module


@pytest.fixture
def prepare(tmp_path):
    """Prepares a source, or a text written to a file, with a cache of the test's own."""

    def run(source: str | bytes | Path, pairs: bool = False, **options) -> module.Corpus:
        if isinstance(source, bytes):
            path = tmp_path / "text.txt"
            path.write_bytes(source)
            source = path
        return module.prepare(DataConfig(source=str(source), **options), pairs, tmp_path / "cache")

    return run
