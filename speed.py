"""How fast this machine trains and generates, and how near its limits that is: bench.py train and bench.py decode."""

import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from cache import KVCache
from compiling import compiled
from config import Config, ConfigError
from data.prepare import Corpus, Split
from generation import stream
from interrupt import until_interrupted
from linear import packed
from machine import Machine, choose_machine, keep_freed_memory, matmul_peak, now, seconds_of, step_flops
from model import EncoderDecoder, FeedForward, LanguageModel, MultiHeadAttention, build_model
from plots import decoding_times
from pretrained import to_hugging_face
from train import Trainer, resolve_model

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
    print(f"batch              {rows} x {text}, {machine.micro_batch_size} at a time", flush=True)
    steps = until_interrupted(range(WARM_UP + STEPS))
    seconds = sorted([seconds_of(trainer.step, machine) for _ in steps][WARM_UP:])
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


def random_model(config: Config) -> LanguageModel:
    """A preset's model with random weights."""
    torch.manual_seed(0)
    return build_model(resolve_model(config.model, random_corpus(config)))


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


Write = Callable[[int], list[float]]  # so many new tokens -> the seconds from the start to each, or to first and last


class Way(NamedTuple):
    """A way to write."""

    name: str
    write: Write
    usual: bool = True  # a step reads each weight and each visible key and value once
    warm_up: int = 2  # tokens


def decoding(
    model: LanguageModel,
    length: int,
    n_new: int,
    rows: int = 1,
    rounds: int = 5,
    recompute: bool = False,
    compile: bool = False,
    picture: Path | None = None,
) -> None:
    """Prints how fast a model continues random prompts, greedily, and how near the memory's bandwidth that comes.

    All ways are measured in turn, `rounds` times. Of several rows the prompts have different lengths, evenly up to
    `length`, and they are written one after another as well. `recompute` adds to do without the cache, `compile` to
    be compiled.
    """
    prompts = random_prompts(model, length, rows)
    ways = ways_to_write(model, prompts, n_new, recompute, compile)
    found, bandwidths = measure(ways, n_new, rounds, model.lm_head.weight.device)
    moved, bandwidth = bytes_per_step(model, prompts, n_new), median(bandwidths)
    print(f"{'':30}{'first token':>13}{'prefill':>12}{'decode':>12}{'in all':>12}{'of the':>12}")
    print(f"{'':30}{'ms':>13}{'tokens/s':>12}{'tokens/s':>12}{'tokens/s':>12}{'bandwidth':>12}")
    for way, seconds in zip(ways, found, strict=True):
        first, last = (median(times[place] for times in seconds) for place in (0, -1))
        step = (last - first) / (n_new - 1)
        speeds = sum(map(len, prompts)) / first, rows / step, rows * n_new / last
        print(f"{way.name:30}{1000 * first:13,.1f}{speeds[0]:12,.0f}{speeds[1]:12,.1f}{speeds[2]:12,.1f}", end="")
        print(f"{sum(moved) / step / bandwidth:12.1%}" if way.usual else "")
    slots = min(model.config.window or math.inf, max(starts(model, prompts)) + n_new - 1)
    cache = KVCache.allocate(model.config, rows, slots, model.lm_head.weight.dtype, "meta")
    print(f"\nbytes a step      {moved[0] / 1e6:,.2f} MB of weights, {moved[1] / 1e6:,.2f} MB of keys and values")
    limits = f"{min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f}"
    print(f"memory bandwidth  {bandwidth / 1e9:.1f} GB/s read ({limits})")
    print(f"cache             {cache.nbytes:,} bytes for {rows} x {slots} tokens in {model.config.n_layer} layers")
    if picture:
        each = {way.name: np.median(times, axis=0) for way, times in zip(ways, found, strict=True)}
        curves = {name: np.diff(times) for name, times in each.items() if len(times) == n_new}
        decoding_times(curves, length + 1, picture)


def measure(
    ways: list[Way], n_new: int, rounds: int, device: torch.device
) -> tuple[list[list[list[float]]], list[float]]:
    """Of each way and round what `write` gives, and of each round the memory's bandwidth."""
    found, bandwidths = [[] for _ in ways], []
    for way in ways:
        way.write(way.warm_up)
    for _ in range(rounds):
        bandwidths.append(memory_bandwidth(device))
        for way, seconds in zip(ways, found, strict=True):
            way.write(2)  # what others left in the processor's own memory is gone
            seconds.append(way.write(n_new))
    return found, bandwidths


def random_prompts(model: LanguageModel, length: int, rows: int) -> list[list[int]]:
    vocab_size, draw = model.config.source_vocab_size or model.config.vocab_size, torch.Generator().manual_seed(0)
    lengths = [max(length * row // rows, 1) for row in range(1, rows + 1)]
    return [torch.randint(vocab_size, (n,), generator=draw).tolist() for n in lengths]


def starts(model: LanguageModel, prompts: list[list[int]]) -> list[int]:
    """How many tokens the decoder reads before it writes."""
    return [1 if isinstance(model, EncoderDecoder) else len(prompt) for prompt in prompts]


def ways_to_write(
    model: LanguageModel, prompts: list[list[int]], n_new: int, recompute: bool, compile: bool
) -> list[Way]:
    """Those asked for: the last row's tokens tell the time. ValueError where learned positions do not reach so far."""
    config, last = model.config, max(starts(model, prompts)) + n_new - 1
    if config.position == "learned" and last > config.max_seq_len:
        end = f"learned ones end at max_seq_len = {config.max_seq_len}"
        raise ValueError(f"--new {n_new} needs {last} positions, {end}")
    start = {}
    if isinstance(model, EncoderDecoder):
        last = model.config.vocab_size - 1
        start = {"end_id": last, "vocab_size": last}  # starts with what it may not write, so that it never ends

    def write(n_new: int, prompts: list[list[int]] = prompts, **options) -> list[float]:
        with packed(model):  # which sample.py does once
            begin, times = time.perf_counter(), []
            steps = stream(model, prompts, max_new_tokens=n_new, **start, **options)
            for row, *_ in until_interrupted(steps):
                if row == len(prompts) - 1:
                    times.append(time.perf_counter() - begin)
        return times

    def write_compiled(n_new: int) -> list[float]:
        with compiled(model):
            return write(n_new)

    def write_one_by_one(n_new: int) -> list[float]:
        calls = [write(n_new, [prompt]) for prompt in prompts]
        return [sum(call[0] for call in calls), sum(call[-1] for call in calls)]

    ways = [Way("byeol", write)]
    if compile:
        ways.append(Way("byeol, compiled", write_compiled, warm_up=n_new))
    if recompute:
        ways.append(Way("byeol, recomputing everything", partial(write, use_cache=False), usual=False))
    if len(prompts) > 1:
        return [*ways, Way("byeol, one by one", write_one_by_one, usual=False)]
    return ways + transformers_ways(model, prompts[0])


def transformers_ways(model: LanguageModel, prompt: list[int]) -> dict[str, Callable[[int], list[float]]]:
    """The same of Hugging Face's `generate` on the same weights, if it is installed and has a class for the model."""
    try:
        other = to_hugging_face(model)
    except (ImportError, ValueError) as error:
        print(f"note: transformers is not measured: {error}", file=sys.stderr)
        return []
    import transformers

    transformers.logging.set_verbosity_error()  # it would remind of the trained length
    ids = torch.tensor([prompt], device=model.lm_head.weight.device)

    def write(n_new: int, **options) -> list[float]:
        times = []
        for n in (1, n_new):
            begin = time.perf_counter()
            options |= {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
            other.generate(ids, attention_mask=torch.ones_like(ids), **options)
            times.append(time.perf_counter() - begin)
        return times

    static = partial(write, cache_implementation="static")
    return [Way("transformers, dynamic cache", write), Way("transformers, static cache", static)]


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second of the fastest of several reads of a quarter of a gigabyte."""
    numbers, machine = torch.ones(2**26, device=device), Machine(device.type, torch.float32, compile=False)
    return numbers.nbytes / min(seconds_of(numbers.sum, machine) for _ in range(5))


def bytes_per_step(model: LanguageModel, prompts: list[list[int]], n_new: int) -> tuple[int, float]:
    """What must be read to write one more token of each row: weights; keys and values, on average over the steps.

    Each weight is read once, whatever the number of rows; of an embedding only a row is looked up, unless it is the
    head too. Activations and what is written stay in the processor's own memory and do not count.
    """
    config, size = model.config, model.lm_head.weight.element_size()
    looked_up = {
        model.decoder.embed.weight,
        *(p for name, p in model.decoder.named_parameters() if name == "position.weight"),
    } - {model.lm_head.weight}
    weights = {*model.decoder.parameters(), model.lm_head.weight} - looked_up
    a_token = 2 * config.n_layer * config.n_kv_head * config.head_dim * size
    ends = [start + n for start in starts(model, prompts) for n in range(1, n_new)]
    seen = sum(min(end, config.window or math.inf) for end in ends) / (n_new - 1)
    if isinstance(model, EncoderDecoder):
        used_once = [block.cross_attention.joint_layers for block in model.decoder.blocks]
        weights -= {parameter for layers in used_once for layer in layers for parameter in layer.parameters()}
        seen += sum(map(len, prompts))  # the sources'
    return sum(weight.nbytes for weight in weights), a_token * seen
