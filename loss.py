"""The loss: of a batch in training, and of a whole split in validation."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE, Pairs, validation_windows
from data.prepare import Corpus, Split
from data.tokenizer import Tokenizer
from machine import Machine


class Loss(nn.Module):
    """The model and its loss in one module: what wraps it, compilation or many processes, sees one forward."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0):
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, *batch: Tensor, reduction: str = "sum") -> Tensor:
        """What the model's forward takes, in that order, then targets (B, T) -> the cross entropy in nats, float32, of
        all targets but IGNORE: their sum, or with reduction "none" each (B * T,)."""
        *inputs, targets = batch
        return F.cross_entropy(
            self.model(*inputs).flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORE,
            reduction=reduction,
            label_smoothing=self.label_smoothing if self.training else 0.0,
        )


@torch.no_grad()
def grade(loss: Loss, split: Split, corpus: Corpus, machine: Machine, context: int, rows: int) -> dict[str, float]:
    """The loss over a split, `rows` windows of `context` tokens at a time: nats per token, bits per byte of text.

    Where the entropy of the text under its grammar is known, it is the "floor", in nats per token, and the nats of a
    document are also told by language.
    """
    tokens, n_bytes, n_targets, end_id = split.tokens, split.n_bytes, len(split.tokens), corpus.tokenizer.end_id
    if not corpus.documents:  # the first token is not a target
        n_bytes, n_targets, end_id = n_bytes - len(corpus.tokenizer.piece(int(tokens[0]))), n_targets - 1, None
    is_korean = korean_tokens(tokens, corpus.tokenizer) if split.floor else None
    nats = korean = 0.0
    was_training = loss.training
    loss.eval()  # the model in it too: no dropout, no label smoothing
    for batch, counts in machine.processes.share(validation_windows(tokens, context, rows, end_id)):
        inputs, targets, places = batch
        with machine.autocast():
            losses = loss(inputs.to(machine.device), targets.to(machine.device), reduction="none").cpu()  # 0 if padded
        if counts:
            nats += losses.sum().item()
        if counts and is_korean is not None:
            korean += losses[torch.from_numpy(is_korean[places.numpy()]).flatten()].sum().item()
    loss.train(was_training)
    nats, korean = machine.processes.sum(nats, korean)
    values = {"loss": nats / n_targets, "bits_per_byte": nats / math.log(2) / max(n_bytes, 1)}
    if split.floor:
        values["floor"] = sum(split.floor[:2]) / n_targets
        values["english"], values["korean"] = (nats - korean) / split.n_documents, korean / split.n_documents
    return values


@torch.no_grad()
def grade_pairs(loss: Loss, pairs: Pairs, machine: Machine, rows: int) -> dict[str, float]:
    """The loss over the targets of a split, `rows` pairs at a time, in nats per token."""
    nats, n_targets = torch.zeros((), dtype=torch.float64), 0
    was_training = loss.training
    loss.eval()
    order = pairs.by_length()
    batches = (pairs.batch(order[first : first + rows]) for first in range(0, len(order), rows))
    for batch, counts in machine.processes.share(batches):
        with machine.autocast():
            found = loss(*(tensor.to(machine.device) for tensor in batch)).double().cpu()
        if counts:
            nats += found
            n_targets += int((batch[-1] != IGNORE).sum())
    loss.train(was_training)
    nats, n_targets = machine.processes.sum(nats.item(), n_targets)
    return {"loss": nats / n_targets}


def korean_tokens(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """For each token of some stories whether it stands in a Korean line: each second one, of an even number."""
    line_ends = np.array([piece.count(b"\n") for piece in tokenizer.pieces])
    line_ends[tokenizer.end_id] = 1
    ends = line_ends[tokens]
    return (np.cumsum(ends) - ends) % 2 == 1
