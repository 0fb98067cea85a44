"""What every head looks at in a text: the attention of a model as maps to draw."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from model import Decoder, EncoderDecoder, attention_of
from plots import AttentionMap, attention_maps

MAPPED = 256  # tokens whose attention is drawn; more would not be legible

HEADINGS = {  # of the kinds of attention; a row of cross-attention is told by what it led to
    "encoder": "encoder self-attention",
    "self": "self-attention",
    "cross": "cross-attention (rows: what is written)",
}


def maps_to_draw(
    model: Decoder | EncoderDecoder,
    prompt: Sequence[int],
    new: Sequence[int],
    tokenizer: Tokenizer,
    source_tokenizer: Tokenizer,
) -> list[AttentionMap]:
    """What every head looks at in a prompt, or a source, and in what was written after it; at most `MAPPED` tokens."""
    translating = isinstance(model, EncoderDecoder)
    start = [tokenizer.end_id] if translating or not prompt else prompt
    read = [*start, *new[:-1]][:MAPPED]  # the last id was never read
    written = labels([*start, *new][1 : MAPPED + 1], tokenizer)
    rows, columns = labels(read, tokenizer, "<start>"), labels(prompt[:MAPPED], source_tokenizer)
    texts = {"encoder": (columns, columns), "self": (rows, rows), "cross": (written, columns)}
    device = model.lm_head.weight.device
    # All of the source: an encoder sees what comes later, so that to read less of it would change what is drawn.
    tensors = [torch.tensor([ids], device=device) for ids in ([read, prompt] if translating else [read])]
    return [
        AttentionMap(
            HEADINGS[kind],
            layer,
            weights[0, :, :MAPPED, :MAPPED].float().cpu().numpy(),
            visible[:MAPPED, :MAPPED].cpu().numpy(),
            model.config.n_kv_head,
            *texts[kind],
        )
        for kind, layer, weights, visible in attention_of(model, *tensors)
    ]


def labels(ids: Sequence[int], tokenizer: Tokenizer, first: str = "<end>") -> list[str]:
    """A text for each id: parts of a character as bytes, the end of a text as <end>, at the beginning as `first`."""

    def label(place: int, id: int) -> str:
        if id == tokenizer.end_id:
            return "<end>" if place else first
        piece = tokenizer.piece(id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return piece.hex(" ")

    return [label(place, id) for place, id in enumerate(ids)]


def draw_attention(picture: Path, maps: list[AttentionMap], title: str) -> None:
    """Draws the maps, and says so."""
    if max(len(texts) for one in maps for texts in (one.queries, one.keys)) == MAPPED:
        print(f"note: {picture} shows no more than {MAPPED} tokens", file=sys.stderr)
    attention_maps(maps, picture, title if len(title) <= 200 else f"{title[:200]}…")
    print(f"attention: {picture}", file=sys.stderr)
