"""Measure a run: python bench.py loss, stories, translate or decode [RUN]; or a training step: python bench.py train

loss        the loss over a whole text, the run's validation split or another one, in nats per token and bits per byte,
            and by position in the window: what more context is worth.
stories     how well a model trained on the built-in stories knows them: its loss on new draws and on held-out
            combinations against the entropy of the grammar, what is right in stories it writes, and which of two
            continuations it finds likelier.
translate   how well an encoder-decoder translates, greedily and with beams: the pairs that its run kept from training,
            or others.
train       how fast a preset trains on this machine, what share of its matrix multiplications that is, and where the
            time goes. It takes the words that train.py takes, needs no text and writes nothing.
decode      how fast a run or a preset generates, with what share of the memory's bandwidth, beside Hugging Face's
            transformers with the same weights. After a preset it takes train.py's words too.
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from interrupt import leave, on_interrupt, raise_interrupt

if __name__ == "__main__":
    on_interrupt(leave)

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py: read when torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import checkpoints, find_run, load_model, load_source_tokenizer, read_state
from config import Config, UserError, command, load_config, override
from config.schema import DataConfig
from data.loader import IGNORE, Pairs, check_ids, document_ends
from data.prepare import Corpus, Split, encode_whole, prepare
from data.sources import open_source
from data.stories import check, minimal_pairs, tell
from data.tokenizer import Tokenizer
from generation import generate
from loss import Loss, grade, grade_pairs, korean_tokens
from machine import Machine, enough_memory, threads_in_words
from pretrained import run_tokenizers
from progress import translation_line, translation_marks
from sample import Parser, check_device
from speed import decoding, random_model, training
from train import pairs_of
from translation import compare
from translation import translate as translate_pairs

CPU = Machine("cpu", torch.float32, compile=False)
TOKENS = 4096  # graded at a time, where windows are no longer
LOGITS = 2**24  # in memory at a time


def loss(
    run: Path, checkpoint: str, source: str | None, text_field: str | None, max_tokens: int | None, context: int | None
) -> None:
    """Prints the loss of a run over what it kept from training, or over all of another source, and by position."""
    model, tokenizer, config = load_model(run, checkpoint)
    folder = run / checkpoint if (run / checkpoint).exists() else run / "last"  # as load_model does
    trained, pairs = config.model.max_seq_len, config.model.kind == "encoder_decoder"
    if pairs and (source or context):
        raise UserError(
            f"{run} is an encoder-decoder: --source and --context are for decoders; for other pairs: "
            f"python bench.py translate {run} --source {source or '…'}"
        )
    context = context or trained
    if context > trained and config.model.position == "learned":
        raise UserError(f"--context {context}: the learned positions of {run} end at model.max_seq_len = {trained}")
    if context > trained:
        print(f"note: --context {context:,} is longer than the {trained:,} tokens of training", file=sys.stderr)
    dtype = read_state(folder)["machine"]["dtype"]
    if dtype != "float32" and not source and context == trained:
        print(f"note: in float32; training logged what {dtype} gives, which may differ a little", file=sys.stderr)
    if source:
        corpus = encode_whole(data_of(config, source, text_field, max_tokens), tokenizer)
        check_ids(max(corpus.largest_id, tokenizer.end_id), config.model.vocab_size)
    else:
        corpus = corpus_of(run, config)
    what = "pairs" if pairs else f"windows of {context:,} tokens"
    print(f"{run}, {folder.resolve().name}{f', on {source}' if source else ''}: {what}, in float32\n")
    tell_loss(graded_splits(model, corpus, context, "whole text" if source else "validation"))


def data_of(config: Config, source: str, text_field: str | None, max_tokens: int | None) -> DataConfig:
    """How another source is read: as the run's was, unless told otherwise. Raises `ConfigError`."""
    if text_field is None and (source.startswith("hub:") or source.lower().endswith((".jsonl", ".parquet"))):
        text_field = config.data.text_field
    options = {"source": source, "text-field": text_field, "max-tokens": max_tokens or config.data.max_tokens}
    return override(config, [f"--data.{name}={value}" for name, value in options.items()]).data


class LossByPosition(Loss):
    """The loss, in float32, with few logits in memory at a time; it also adds up what the targets at each position of
    windows of at most T cost: `nats` and `n_targets`, (T,)."""

    def __init__(self, model: nn.Module, longest: int):
        super().__init__(model)
        self.nats = torch.zeros(longest, dtype=torch.float64)
        self.n_targets = torch.zeros(longest, dtype=torch.int64)

    def forward(self, *batch: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        *inputs, targets = batch
        if len(inputs) > 1:  # of pairs
            source, target, source_lengths = inputs
            inputs = target, self.model.encode(source, source_lengths)
        size = max(LOGITS // self.model.config.vocab_size, 1)
        pieces = zip(self.model.features(*inputs).flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
        options = {"ignore_index": IGNORE, "reduction": "none"}
        losses = torch.cat([F.cross_entropy(self.model.lm_head(x), wanted, **options) for x, wanted in pieces])
        length = targets.shape[1]
        self.nats[:length] += losses.view_as(targets).double().sum(0)
        self.n_targets[:length] += (targets != IGNORE).sum(0)
        return losses if reduction == "none" else losses.sum()


Graded = Iterator[tuple[str, dict[str, float], LossByPosition]]  # of each split: a title, what `grade` says, and where


def graded_splits(model: nn.Module, corpus: Corpus, context: int, title: str) -> Graded:
    for name, split in {title: corpus.val, "held-out combinations": corpus.held_out}.items():
        if not split:
            continue
        if corpus.pairs:
            pairs = pairs_of(split, corpus, context, name)
            longest = int(pairs.lengths.max())
        elif corpus.documents:
            longest = int(np.diff(document_ends(split.tokens, corpus.tokenizer.end_id), prepend=-1).max())
        else:
            longest = len(split.tokens) - 1
        longest = min(context, longest)
        by_position, rows = LossByPosition(model, longest), max(TOKENS // longest, 1)
        if corpus.pairs:
            yield name, grade_pairs(by_position, pairs, CPU, rows), by_position
        else:
            yield name, grade(by_position, split, corpus, CPU, longest, rows), by_position


def tell_loss(graded: Graded) -> None:
    """Prints a line for each split, beside the entropy of its text where that is known, then a table by position."""
    print(f"{'':24}{'targets':>12}{'nats per token':>18}{'bits per byte':>16}{'perplexity':>13}")
    parts = {}
    for name, values, parts[name] in graded:
        nats, bits, n_targets = values["loss"], values.get("bits_per_byte"), int(parts[name].n_targets.sum())
        lines = [(name, f"{n_targets:,}", nats, bits)]
        if "floor" in values:
            lines.append(("  entropy", "", values["floor"], bits * values["floor"] / nats))
        for title, count, value, of_bytes in lines:
            perplexity = math.exp(value) if value < 700 else math.inf
            bits = "–" if of_bytes is None else f"{of_bytes:.4f}"
            print(f"{title:24}{count:>12}{value:18.4f}{bits:>16}{perplexity:13.4g}", flush=True)
    print(f"\n{'position':12}" + "".join(f"{name:>30}" for name in parts))
    print(f"{'':12}" + f"{'targets':>14}{'nats per token':>16}" * len(parts))
    for first, last in position_ranges(max(int(part.n_targets.count_nonzero()) for part in parts.values())):
        line = f"{first if first == last else f'{first}-{last}':<12}"
        for part in parts.values():
            n_targets = int(part.n_targets[first - 1 : last].sum())
            nats = f"{part.nats[first - 1 : last].sum().item() / n_targets:.4f}" if n_targets else "–"
            line += f"{n_targets:14,}{nats:>16}"
        print(line)


def position_ranges(longest: int) -> list[tuple[int, int]]:
    """1, 2, 3-4, 5-8, 9-16 and so on: the first and the last position of each, as far as `longest`."""
    lasts = [*(2**power for power in range((longest - 1).bit_length())), longest]
    return list(zip([1, *(last + 1 for last in lasts)], lasts, strict=False))


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
    trained_on = read_state(checkpoints(run)[-1])["corpus"]
    if not trained_on:
        raise UserError(f"{run} was imported, not trained here: give a text with --source")
    own = run_tokenizers(run, config) if config.train.init_from else None
    corpus = prepare(config.data, pairs=config.model.kind == "encoder_decoder", tokenizers=own)
    if trained_on != corpus.key:
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
        values = grade(Loss(model), split, corpus, CPU, context, rows=16)
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
        values = grade_pairs(Loss(model), pairs, CPU, rows=64)
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


def decode(argv: Sequence[str]) -> None:
    """The command line of `bench.py decode`: of a preset the weights are random."""
    what = "Measure how fast a run, or a preset, generates."
    parser = Parser(prog="python bench.py decode", description=what, allow_abbrev=False)
    add = parser.add_argument
    add("model", nargs="?", metavar="RUN|PRESET", help="a run's folder (default: the newest), or config/NAME.toml")
    add("--checkpoint", default="best", metavar="NAME", help="of a run: best (default), last, or a step-NNNNNN")
    add("--prompt", type=int, default=64, metavar="N", help="tokens of the prompt (default: %(default)s)")
    add("--new", type=int, default=256, metavar="N", help="tokens to write after it (default: %(default)s)")
    add("--rows", type=int, default=1, metavar="N", help="prompts at once, of different lengths up to --prompt")
    add("--rounds", type=int, default=5, metavar="N", help="of which medians are told (default: %(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights and the cache")
    add("--device", choices=["cpu", "cuda", "mps"], default="cpu", help="default: cpu")
    add("--compile", action="store_true", help="measure compiled too, once it is")
    add("--recompute", action="store_true", help="measure without a cache too")
    add("--picture", type=Path, metavar="FILE.png", help="draw the time of each token against its position")
    preset = argv[:1] if argv and argv[0].endswith(".toml") else []
    if preset:  # whose words may be among the options
        options, words = parser.parse_known_args(argv)
        for word in words:
            if word.startswith("--") and "." not in word:
                parser.refuse(word)
    else:
        options, words = parser.parse_args(argv), []
    for name, least in {"prompt": 1, "new": 2, "rows": 1, "rounds": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, not {getattr(options, name)}")
    if options.picture and options.picture.suffix != ".png":
        parser.error(f"--picture {options.picture} must end in .png")
    if options.picture and not options.picture.parent.is_dir():
        parser.error(f"--picture: there is no folder {options.picture.parent}")
    if preset:
        config = load_config([*preset, *words], "python bench.py decode config/NAME.toml", what)
        model, name = random_model(config), options.model
    else:
        run = find_run(options.model)
        model, name = load_model(run, options.checkpoint)[0], f"{run}, {options.checkpoint}"
    model = model.eval().to(check_device(options.device), getattr(torch, options.dtype))
    print(
        f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {options.dtype} on {options.device}",
        end="",
    )
    print(f", {threads_in_words()}" if options.device == "cpu" else "")
    at_most = (
        f"{options.rows} prompts of at most {options.prompt}" if options.rows > 1 else f"a prompt of {options.prompt}"
    )
    print(f"{at_most} tokens, {options.new} new; medians of {options.rounds}, in turn\n", flush=True)
    try:
        ways = options.recompute, options.compile
        decoding(model, options.prompt, options.new, options.rows, options.rounds, *ways, options.picture)
    except ValueError as error:  # a prompt that this model cannot take
        raise UserError(str(error)) from None


@command
def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["decode"]:
        with enough_memory("--prompt, --new or --rows"):
            return decode(argv[1:])
    if argv[:1] == ["train"]:  # with options of its own
        config = load_config(argv[1:], "python bench.py train [config/NAME.toml]", "Measure a training step.")
        with enough_memory():
            return training(config)
    parser = argparse.ArgumentParser(prog="python bench.py", description="Measure a run, or a training step.")
    commands = parser.add_subparsers(dest="what", required=True)
    zero = commands.add_parser("loss", help="the loss over a whole text, and by position")
    zero.add_argument("--source", metavar="SOURCE", help="another text: what data.source can be (default: the run's)")
    zero.add_argument("--text-field", metavar="NAME", help="of its rows, the field that holds the text")
    zero.add_argument("--max-tokens", type=int, metavar="N", help="where a hub: source or stories end")
    zero.add_argument("--context", type=int, metavar="N", help="tokens of a window (default: as in training)")
    one = commands.add_parser("stories", help="a model of the built-in stories, against their grammar")
    one.add_argument("--stories", type=int, default=200, metavar="N", help="how many to write (default: %(default)s)")
    one.add_argument("--pairs", type=int, default=500, metavar="N", help="how many to compare (default: %(default)s)")
    one.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    two = commands.add_parser("translate", help="an encoder-decoder, against the right translations")
    commands.add_parser("train", help="a training step: its speed, and where the time goes")
    commands.add_parser("decode", help="generation: its speed, beside the memory's and transformers'")
    for each in (zero, one, two):
        each.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run (default: the newest)")
        each.add_argument("--checkpoint", default="best", metavar="NAME", help="best (default), last, or a step-NNNNNN")
    two.add_argument("--source", metavar="SOURCE", help="other pairs, such as a .tsv file (default: the run's)")
    two.add_argument("--pairs", type=int, default=1000, metavar="N", help="how many at most (default: %(default)s)")
    two.add_argument("--beams", type=int, default=4, metavar="N", help="beside greedy (default: %(default)s)")
    options = parser.parse_args(argv)
    for name in ("stories", "pairs", "beams", "max_tokens", "context"):
        if (value := getattr(options, name, None)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.what == "loss" and options.source is None and (options.text_field, options.max_tokens) != (None, None):
        parser.error("--text-field and --max-tokens are about another --source")
    if options.what == "loss" and options.max_tokens and not options.source.startswith(("hub:", "stories")):
        parser.error(f"--max-tokens is for a hub: source or stories; {options.source} is read whole")
    run = find_run(options.run)
    if options.what == "loss":
        with enough_memory("--context"):
            loss(run, options.checkpoint, options.source, options.text_field, options.max_tokens, options.context)
    elif options.what == "stories":
        stories(run, options.checkpoint, options.stories, options.pairs, options.seed)
    else:
        translate(run, options.checkpoint, options.source, options.pairs, options.beams)


if __name__ == "__main__":
    on_interrupt(raise_interrupt)
    main()
