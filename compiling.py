"""Whether code can be compiled here, and a model whose single tokens are."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model import LanguageModel, Stack


def compiler_missing() -> bool:
    """No C++ compiler is installed under a name that torch looks for."""
    return not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl")))


def compiler_works() -> bool:
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1))
    except Exception:  # of many kinds: no header files, no OpenMP, nowhere to write
        return False
    return True


@contextmanager
def compiled(model: LanguageModel) -> Iterator[None]:
    """Within, a decoder's steps of one token with a cache are compiled; all others are as ever.

    A step of a small model is mostly small operations, and compiled it takes about half the time; sums may round
    differently. To compile takes five to ten seconds at the second token, and as long again where the cache is first
    read whole.
    """
    stack = model.decoder
    before, stack.compiled_run = stack.compiled_run, torch.compile(Stack.run_blocks, dynamic=True)
    try:
        yield
    finally:
        stack.compiled_run = before
