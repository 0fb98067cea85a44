"""Measure a run: python bench.py stories [RUN], or translate [RUN]

stories     how well a model trained on the built-in stories knows them: its loss on new draws and on held-out
            combinations against the entropy of the grammar, what is right in stories it writes, and which of two
            continuations it finds likelier.
translate   how well an encoder-decoder translates, greedily and with beams: the pairs that its run kept from training,
            or others.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import checkpoints, find_run, load_model, load_source_tokenizer, read_state
from config import Config, UserError, command
from config.schema import DataConfig
from data.loader import Pairs
from data.prepare import Corpus, Split, prepare
from data.sources import open_source
from data.stories import check, minimal_pairs, tell
from data.tokenizer import Tokenizer
from generation import generate
from train import Loss, Machine, grade, grade_pairs, korean_tokens, pairs_of, translation_line, translation_marks
from translation import compare
from translation import translate as translate_pairs


def stories(run: Path, checkpoint: str, n_stories: int, n_pairs: int, seed: int) -> None:
    """Prints all that the stories corpus can tell about a run."""
    model, tokenizer, config = load_model(run, checkpoint)
    if config.model.kind != "decoder":
        raise UserError(f"{run} is an encoder-decoder: python bench.py translate {run}")
    if config.data.source != "stories":
        raise UserError(f"{run} was trained on data.source = {config.data.source}; name a run on stories")
    corpus = corpus_of(run, config)
    tell_losses(model, corpus, config.model.max_seq_len)
    print(f"\n{n_stories} stories written (temperature 0.8, top-p 0.95, seed {seed})")
    training = documents(corpus, corpus.train)
    longest = max(map(len, training)) + 1
    if config.model.position == "learned":
        longest = min(longest, config.model.max_seq_len)
    texts = write(model, tokenizer, n_stories, longest, seed)
    tell(check(texts, {tokenizer.decode(document.tolist()) for document in training}))
    print(f"\n{n_pairs} held-out stories cut after what a pronoun needed, such as 'because it was too tired'")
    tell({"the right line likelier": (count_preferred(model, tokenizer, n_pairs, seed), n_pairs)})


def corpus_of(run: Path, config: Config) -> Corpus:
    """The prepared corpus that a run was trained on. Raises `UserError` if it is another by now."""
    corpus = prepare(config.data, pairs=config.model.kind == "encoder_decoder")
    if read_state(checkpoints(run)[-1])["corpus"] != corpus.key:
        raise UserError(
            f"data.source = {config.data.source} is no longer what {run} was trained on: its text, or the code that "
            f"makes it, has changed"
        )
    return corpus


def tell_losses(model: nn.Module, corpus: Corpus, context: int) -> None:
    """Prints the losses on both splits beside the entropy of their stories."""
    print(f"{'loss / entropy':26}{'nats per story':>18}{'nats per token':>20}{'bits per byte':>20}{'above':>12}")
    sizes = np.array([len(piece) for piece in corpus.tokenizer.pieces])
    for name, split in {"new stories": corpus.val, "held-out combinations": corpus.held_out}.items():
        if not split:
            continue
        values = grade(Loss(model), split, corpus, Machine("cpu", torch.float32, False), context, rows=16)
        is_korean, n_bytes = korean_tokens(split.tokens, corpus.tokenizer), sizes[split.tokens]
        english, korean, knowing = (nats / split.n_documents for nats in split.floor)
        print(f"{name} ({knowing:.2f} nats per story would do for one who knows what is held out)")
        for title, nats, least, chosen in (
            ("English", values["english"], english, ~is_korean),
            ("Korean", values["korean"], korean, is_korean),
            ("both", values["english"] + values["korean"], english + korean, np.ones_like(is_korean)),
        ):
            print(f"  {title:24}{nats:9.2f} / {least:6.2f}", end="")
            for count in (chosen.sum(), n_bytes[chosen].sum() * math.log(2)):
                scale = split.n_documents / count
                print(f"{nats * scale:11.4f} / {least * scale:6.4f}", end="")
            print(f"{nats / least - 1:12.1%}" if least else f"{'–':>12}")


def documents(corpus: Corpus, split: Split) -> list[np.ndarray]:
    """The tokens of each document, its end included."""
    tokens = np.asarray(split.tokens)
    *found, _ = np.split(tokens, np.flatnonzero(tokens == corpus.tokenizer.end_id) + 1)  # nothing after the last
    return found


def write(model: nn.Module, tokenizer: Tokenizer, n: int, longest: int, seed: int) -> list[str]:
    """Stories of the model's own, with the settings that `sample.py` has by default."""
    options = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": longest, "seed": seed}
    rows = generate(model, [[]] * n, end_id=tokenizer.end_id, vocab_size=tokenizer.vocab_size, **options)
    return [tokenizer.decode(row) for row in rows]


def count_preferred(model: nn.Module, tokenizer: Tokenizer, n: int, seed: int) -> int:
    """For how many minimal pairs the right continuation has the higher probability."""
    pairs = list(islice(minimal_pairs(random.Random(seed)), n))
    right, wrong = (
        log_probs(model, tokenizer, [(pair[0], pair[choice] + "\n") for pair in pairs]) for choice in (1, 2)
    )
    return int((right > wrong).sum())


@torch.no_grad()
def log_probs(model: nn.Module, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """The log-probability of each second text after the first, which begins a document: (n,)."""
    found = []
    for context, text in pairs:
        ids, new = [tokenizer.end_id, *tokenizer.encode(context)], tokenizer.encode(text)
        logits = model(torch.tensor([[*ids, *new[:-1]]]))[0, len(ids) - 1 :]
        found.append(-F.cross_entropy(logits, torch.tensor(new), reduction="sum"))
    return torch.stack(found)


def translate(run: Path, checkpoint: str, source: str | None, n: int, beams: int) -> None:
    """Prints how many of at most `n` pairs a run translates right: of each split, or of another source."""
    model, tokenizer, config = load_model(run, checkpoint)
    if config.model.kind != "encoder_decoder":
        raise UserError(f"{run} is a decoder, and only an encoder-decoder translates: name another run")
    source_tokenizer = load_source_tokenizer(run, config)
    for title, pairs in pairs_to_translate(run, config, source, n, tokenizer, source_tokenizer):
        values = grade_pairs(Loss(model), pairs, Machine("cpu", torch.float32, False), rows=64)
        print(f"{title}: {min(n, len(pairs)):,} of {len(pairs):,} pairs; {values['loss']:.4f} nats per token of all")
        right = [tokenizer.decode(pairs.target(row)) for row in range(min(n, len(pairs)))]
        found = {}
        for width in dict.fromkeys((1, beams)):
            begin = time.perf_counter()
            found[width] = translate_pairs(model, pairs, tokenizer, n, width)
            seconds, texts = time.perf_counter() - begin, [tokenizer.decode(one.ids) for one in found[width]]
            title = "greedy" if width == 1 else f"{width} beams"
            print(f"  {title:10}{translation_marks(compare(texts, right))}, {seconds:.1f} s")
        if beams > 1:
            # Rounded: the same text may differ in its last digits, from a batch of another shape.
            greedy, best = (
                [(one.reason == "end", round(one.score, 4)) for one in found[width]] for width in (1, beams)
            )
            same = [a.ids == b.ids for a, b in zip(found[1], found[beams], strict=True)]
            higher = [not same[row] and best[row] > greedy[row] for row in range(len(same))]
            as_high = [same[row] or best[row] >= greedy[row] for row in range(len(same))]
            counts = f"{sum(as_high):,} of {len(same):,}, {sum(higher):,} higher"
            print(f"  {beams} beams score as greedy does or higher: {counts}")
        wrong = [row for row, text in enumerate(texts) if text != right[row]]
        for row in wrong[:5]:
            print("    " + translation_line((source_tokenizer.decode(pairs.source(row)), texts[row], right[row])))


def pairs_to_translate(
    run: Path, config: Config, source: str | None, n: int, tokenizer: Tokenizer, source_tokenizer: Tokenizer
) -> Iterator[tuple[str, Pairs]]:
    """What the run kept from training, or the first `n` pairs of another source."""
    context = config.model.max_seq_len
    if source is None:
        corpus = corpus_of(run, config)
        for title, split in {"new pairs": corpus.val, "held-out combinations": corpus.held_out}.items():
            if split:
                yield title, pairs_of(split, corpus, context, title)
        return
    names = () if source.endswith(".tsv") else ("source_field", "target_field")
    fields = {name: getattr(config.data, name) for name in names}
    documents = open_source(DataConfig(source=source, **fields), pairs=True).read()
    ids = {True: [], False: []}
    for document in islice((document for document in documents if document.split != "train"), 2 * n):
        reader = source_tokenizer if document.is_source else tokenizer
        ids[document.is_source] += [*reader.encode(document.text), reader.end_id]
    if not ids[True]:
        raise UserError(f"--source {source} holds no pairs")
    ends = source_tokenizer.end_id, tokenizer.end_id
    yield source, Pairs(np.array(ids[True]), np.array(ids[False]), *ends, context, source)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python bench.py", description="Measure a run.")
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("stories", help="a model of the built-in stories, against their grammar")
    one.add_argument("--stories", type=int, default=200, metavar="N", help="how many to write (default: %(default)s)")
    one.add_argument("--pairs", type=int, default=500, metavar="N", help="how many to compare (default: %(default)s)")
    one.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    two = commands.add_parser("translate", help="an encoder-decoder, against the right translations")
    for each in (one, two):
        each.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run (default: the newest)")
        each.add_argument("--checkpoint", default="best", metavar="NAME", help="best (default), last, or a step-NNNNNN")
    two.add_argument("--source", metavar="SOURCE", help="other pairs, such as a .tsv file (default: the run's)")
    two.add_argument("--pairs", type=int, default=1000, metavar="N", help="how many at most (default: %(default)s)")
    two.add_argument("--beams", type=int, default=4, metavar="N", help="beside greedy (default: %(default)s)")
    options = parser.parse_args(argv)
    for name in ("stories", "pairs", "beams"):
        if getattr(options, name, 1) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    run = find_run(options.run)
    if options.what == "stories":
        stories(run, options.checkpoint, options.stories, options.pairs, options.seed)
    else:
        translate(run, options.checkpoint, options.source, options.pairs, options.beams)


if __name__ == "__main__":
    main()
