"""How well an encoder-decoder translates: its translations of a split's pairs, beside those that are right."""

from collections.abc import Sequence

import numpy as np
from torch import nn

from data.loader import Pairs
from data.tokenizer import Tokenizer
from sample import generate

ROWS = 128  # sources translated at a time


def translate(model: nn.Module, pairs: Pairs, tokenizer: Tokenizer, n: int) -> tuple[list[str], list[str]]:
    """Greedy translations of the first `n` pairs, and the targets: (texts, references), in their order.

    No text is longer, in tokens, than the longest of those targets: what went on would be wrong all the more.
    """
    n = min(n, len(pairs))
    longest = int(pairs.lengths[1, :n].max())
    texts = [""] * n
    chosen = pairs.by_length()
    chosen = chosen[chosen < n]
    for first in range(0, n, ROWS):
        rows = chosen[first : first + ROWS]
        ids = generate(
            model,
            [pairs.source(row) for row in rows],
            max_new_tokens=longest,
            end_id=tokenizer.end_id,
            vocab_size=tokenizer.vocab_size,
        )
        for row, new in zip(rows, ids, strict=True):
            texts[row] = tokenizer.decode(new)
    return texts, [tokenizer.decode(pairs.target(row)) for row in range(n)]


def compare(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The share that is exactly right, and the corpus scores chrF (up to 6 characters, beta 2) and BLEU (up to 4 words
    or marks), from 0 to 100."""
    import sacrebleu

    return {
        "exact": float(np.mean([text == reference for text, reference in zip(texts, references, strict=True)])),
        "chrf": sacrebleu.corpus_chrf(texts, [references]).score,
        "bleu": sacrebleu.corpus_bleu(texts, [references]).score,
    }
