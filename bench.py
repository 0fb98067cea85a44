"""Measure a run: python bench.py stories [RUN], or translate [RUN]; or a training step: python bench.py train [PRESET]

stories     how well a model trained on the built-in stories knows them: its loss on new draws and on held-out
            combinations against the entropy of the grammar, what is right in stories it writes, and which of two
            continuations it finds likelier.
translate   how well an encoder-decoder translates, greedily and with beams: the pairs that its run kept from training,
            or others.
train       how fast a preset trains on this machine, what share of its matrix multiplications that is, and where the
            time goes. It takes the words that train.py takes, needs no text and writes nothing.
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py: read when torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import checkpoints, find_run, load_model, load_source_tokenizer, read_state
from config import Config, ConfigError, UserError, command, load_config
from config.schema import DataConfig
from data.loader import Pairs
from data.prepare import Corpus, Split, prepare
from data.sources import open_source
from data.stories import check, minimal_pairs, tell
from data.tokenizer import Tokenizer
from generation import generate
from model import FeedForward, LanguageModel, MultiHeadAttention
from train import (
    Loss,
    Machine,
    Trainer,
    choose_machine,
    enough_memory,
    grade,
    grade_pairs,
    keep_freed_memory,
    korean_tokens,
    pairs_of,
    resolve_model,
    translation_line,
    translation_marks,
)
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


PARTS = {
    "attention": "scores, softmax, values",
    "projections": "to queries, keys and values, and back",
    "feed-forward": "",
    "loss": "head and cross entropy",
    "optimizer": "clipping included",
    "rest": "norms, positions, residuals, embeddings, data",
}
WARM_UP, STEPS = 3, 7


def training(config: Config) -> None:
    """Prints how fast a preset trains here, and where the time of a step goes. Its text is random tokens."""
    corpus = random_corpus(config)
    config = config.model_copy(update={"model": resolve_model(config.model, corpus)})
    keep_freed_memory()
    machine = choose_machine(config)
    trainer = Trainer(config, Path(os.devnull), corpus, machine)
    rows, length = config.train.batch_size, row_length(config)
    text = f"{length} tokens" + (f" after sources of {length}" if corpus.pairs else "")
    print(f"parameters         {sum(parameter.numel() for parameter in trainer.model.parameters()):,}")
    print(f"batch              {rows} x {text}, {config.train.micro_batch_size or rows} at a time", flush=True)
    seconds = sorted([seconds_of(trainer.step, machine) for _ in range(WARM_UP + STEPS)][WARM_UP:])
    slow, middle, fast = (rows * length / seconds[place] for place in (-1, STEPS // 2, 0))
    print(f"tokens per second  {middle:,.0f}, the median of {STEPS} steps ({slow:,.0f} to {fast:,.0f})", flush=True)
    flops, (peak, size) = step_flops(trainer.model, rows, length) / 1e12, matmul_peak(machine)
    speed = flops / seconds[STEPS // 2]
    print(f"model operations   {flops:.4g} TFLOP a step, {speed:.4g} TFLOP/s")
    print(f"matrix products    {peak:.4g} TFLOP/s at best, of {size} x {size}")
    print(f"share of them      {speed / peak:.1%}", flush=True)
    found = step_parts(trainer)
    whole, how = sum(found.values()), (", not compiled", ", compiled") if machine.compile else ("", "")
    print(f"\nwhere the time goes ({1000 * whole:,.1f} ms a step with clocks in it{how[0]}; ", end="")
    print(f"{1000 * seconds[STEPS // 2]:,.1f} without{how[1]})")
    for part, what in PARTS.items():
        print(f"  {part:14}{found[part] / whole:7.1%}{1000 * found[part]:12,.1f} ms   {what}".rstrip())


def row_length(config: Config) -> int:
    """Tokens of a row: the context, which sources and targets share."""
    return max(config.model.max_seq_len // (1 if config.model.kind == "decoder" else 2), 1)


def random_corpus(config: Config) -> Corpus:
    """Random documents, or pairs, for a batch. Raises `ConfigError` where their vocabulary cannot be known."""
    data, pairs, generator = config.data, config.model.kind == "encoder_decoder", np.random.default_rng(0)
    sizes = {"bytes": 257, "chars": 66, "bpe": data.bpe_vocab_size}  # chars: as many as tiny Shakespeare has

    def tokenizer(name: str, option: str) -> SimpleNamespace:
        size = getattr(config.model, option) or sizes.get(name)
        if size is None:
            raise ConfigError(f"the tokenizer {name} alone knows how large its vocabulary is: give model.{option}")
        return SimpleNamespace(vocab_size=size, end_id=size - 1)

    def documents(end_id: int) -> np.ndarray:
        ids = generator.integers(max(end_id, 1), size=(config.train.batch_size + 1, row_length(config)))
        ids[:, -1] = end_id
        return ids.ravel()

    target = tokenizer(data.target_tokenizer or data.tokenizer if pairs else data.tokenizer, "vocab_size")
    source = tokenizer(data.tokenizer, "source_vocab_size") if pairs and data.target_tokenizer else target
    split = Split(documents(target.end_id), 0, config.train.batch_size + 1, None, documents(source.end_id))
    return Corpus(Path(), target, 0, split, split, documents=True, source_tokenizer=source if pairs else None)


def seconds_of(function: Callable[[], object], machine: Machine) -> float:
    begin = now(machine)
    function()
    return now(machine) - begin


def now(machine: Machine) -> float:
    if machine.device != "cpu":
        torch.accelerator.synchronize()  # what was begun is done
    return time.perf_counter()


def step_flops(model: LanguageModel, rows: int, length: int) -> int:
    """What the matrix products of a training step need: two operations a multiplication, once forward, twice backward.

    Counted are all linear layers, the head too, on each of their tokens, and scores and values for each pair of a query
    and a key that it may see, which is about half of a causal square, whatever the kernel computes. Nothing else is:
    looking up embeddings, norms, softmax, activations, the optimizer.
    """
    config = model.config  # sources are as long as targets, so each layer is on as many tokens
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    seen = config.n_layer * sum(min(place, config.window or place) for place in range(1, length + 1))
    if config.kind == "encoder_decoder":  # the encoder on itself, the decoder on the encoder
        seen += (config.n_encoder_layer + config.n_layer) * length**2
    return 6 * rows * (weights * length + 2 * seen * config.n_head * config.head_dim)


def matmul_peak(machine: Machine) -> tuple[float, int]:
    """TFLOP/s of the fastest of several products of square matrices, and their size."""
    size = 2048 if machine.device == "cpu" else 8192  # so large that starting one takes no time
    a, b = torch.randn(2, size, size, device=machine.device).to(machine.dtype)
    return 2e-12 * size**3 / min(seconds_of(lambda: a @ b, machine) for _ in range(8)), size


class Turn(torch.autograd.Function):
    """Passes tensors on. From here the time is that of the part `after`; on the way back, of the part `before`.

    autograd goes back through what was computed in exactly the opposite order, so whatever lies between two turns
    belongs to the same part in both directions.
    """

    @staticmethod
    def forward(ctx, turn: Callable[[str], None], before: str, after: str, *tensors: torch.Tensor):
        ctx.turn, ctx.before = turn, before
        turn(after)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.turn(ctx.before)
        return None, None, None, *gradients


def step_parts(trainer: Trainer) -> dict[str, float]:
    """The seconds of each part of a training step, on average, not compiled. The trainer keeps the clocks."""
    found, since = dict.fromkeys(PARTS, 0.0), ["rest", 0.0]

    def turn(part: str) -> None:
        moment = now(trainer.machine)
        found[since[0]] += moment - since[1]
        since[:] = part, moment

    def turning(function: Callable, part: str) -> Callable:
        return lambda *arguments, **options: (turn(part), function(*arguments, **options))[1]

    def watch(part: str, first: nn.Module, last: nn.Module) -> None:
        first.register_forward_pre_hook(lambda _, inputs: Turn.apply(turn, "rest", part, *inputs))
        last.register_forward_hook(lambda _, inputs, output: Turn.apply(turn, part, "rest", output)[0])

    def watched(kernel: Callable) -> Callable:
        def attend(q, k, v, *others):
            heads = kernel(*Turn.apply(turn, "rest", "attention", q, k, v), *others)
            return Turn.apply(turn, "attention", "rest", heads)[0]

        return attend

    for module in trainer.model.modules():
        if isinstance(module, MultiHeadAttention):
            module.kernel = watched(module.kernel)
            for projection in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
                watch("projections", projection, projection)
        elif isinstance(module, FeedForward):
            watch("feed-forward", module, module)
    watch("loss", trainer.model.lm_head, trainer.loss)
    trainer.scaler.unscale_ = turning(trainer.scaler.unscale_, "optimizer")  # what comes after the gradients
    trainer.optimizer.zero_grad = turning(trainer.optimizer.zero_grad, "rest")  # what comes after the optimizer
    trainer.training_loss = trainer.loss
    for step in range(1 + STEPS):
        trainer.step()
        turn("rest")
        if step == 0:  # to warm up
            found.update(dict.fromkeys(PARTS, 0.0))
    return {part: seconds / STEPS for part, seconds in found.items()}


@command
def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"]:  # with options of its own
        config = load_config(argv[1:], "python bench.py train [config/NAME.toml]", "Measure a training step.")
        with enough_memory():
            return training(config)
    parser = argparse.ArgumentParser(prog="python bench.py", description="Measure a run, or a training step.")
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("stories", help="a model of the built-in stories, against their grammar")
    one.add_argument("--stories", type=int, default=200, metavar="N", help="how many to write (default: %(default)s)")
    one.add_argument("--pairs", type=int, default=500, metavar="N", help="how many to compare (default: %(default)s)")
    one.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    two = commands.add_parser("translate", help="an encoder-decoder, against the right translations")
    commands.add_parser("train", help="a training step: its speed, and where the time goes")
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
