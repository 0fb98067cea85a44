"""How well an encoder-decoder translates: its translations of pairs, beside the right ones."""

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from data.loader import Pairs
from data.tokenizer import Tokenizer
from generation import Hypothesis, beam_search
from linear import packed

ROWS = 128  # sources translated at a time


def translate(model: nn.Module, pairs: Pairs, tokenizer: Tokenizer, n: int, beams: int = 1) -> list[Hypothesis]:
    """The best hypothesis for each of the first `n` sources: greedy, or of so many `beams`.

    None is longer, in tokens, than twice the longest target of those of like length: what never ends is cut off soon.
    """
    order = pairs.by_length()
    order = order[order < n]
    found = {}
    with packed(model):
        for first in range(0, len(order), ROWS):
            rows = order[first : first + ROWS]
            sources = [pairs.source(row) for row in rows]
            ends = {"end_id": tokenizer.end_id, "vocab_size": tokenizer.vocab_size}
            limit = 2 * int(pairs.lengths[1, rows].max())
            hypotheses = beam_search(model, sources, beams=beams, max_new_tokens=limit, **ends)
            found |= {row: best for row, (best, *_) in zip(rows.tolist(), hypotheses, strict=True)}
    return [found[row] for row in sorted(found)]


def compare(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The share that is exactly right, and the corpus scores chrF (up to 6 characters, beta 2) and BLEU (up to 4 words
    or marks), from 0 to 100; BLEU is NaN where no reference has so many words."""
    import sacrebleu

    has_four = sacrebleu.corpus_bleu(references, [references]).totals[-1] > 0
    return {
        "exact": float(np.mean([text == reference for text, reference in zip(texts, references, strict=True)])),
        "chrf": sacrebleu.corpus_chrf(texts, [references]).score,
        "bleu": sacrebleu.corpus_bleu(texts, [references]).score if has_four else math.nan,
    }
