"""Generate text from a trained run, with the KV cache: python sample.py [RUN] [--prompt TEXT] ...

The command around generation.py. Standard output is the text alone, as it comes: the prompt and what follows it, or of
an encoder-decoder the translation; everything else goes to standard error.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from config import UserError, command


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are `UserError`s, and which says what was probably meant."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_args(argv)
        if unknown:
            if not unknown[0].startswith("-"):
                raise UserError(f"{unknown[0]} belongs to no option; a text comes after --prompt")
            near = get_close_matches(unknown[0], self._option_string_actions, n=1)
            raise UserError(f"{unknown[0]} is not an option" + (f"; did you mean {near[0]}?" if near else ""))
        return options


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line of `python sample.py`."""
    parser = Parser(prog="sample.py", description="Generate text from a trained run.", allow_abbrev=False)
    add = parser.add_argument

    def number(name: str, kind: type, *limits: float, above: bool = False, **others) -> None:
        add(name, type=_number(kind, *limits, above=above), metavar="N" if kind is int else "X", **others)

    add("run", nargs="?", metavar="RUN", help="folder of the run (default: the newest in runs/)")
    add(
        "--prompt",
        action="append",
        type=_text,
        metavar="TEXT",
        help="what to continue or translate; may be repeated",
    )
    add("--prompt-file", metavar="FILE", help="a file that is a prompt, or a source each line; -: standard input")
    number("--num-samples", int, 1, help="for each prompt (default: 1; without a prompt 3)")
    number("--max-new-tokens", int, 1, 2**31, default=256, help="length limit (default: 256)")
    number("--temperature", float, 0, help="0 is greedy (default: 0.8; for an encoder-decoder 0)")
    number("--top-k", int, 0, default=0, help="only the N likeliest; 0: off (default)")
    number("--top-p", float, 0, 1, above=True, default=0.95, help="only the nucleus (default: 0.95; 1: off)")
    number("--min-p", float, 0, 1, default=0.0, help="only X times the likeliest or more; 0: off (default)")
    number("--repetition-penalty", float, 0.01, 100, default=1.0, help="1: off (default)")
    add("--stop", action="append", type=_text, default=[], metavar="TEXT", help="end before this text; may be repeated")
    number("--seed", int, 0, 2**63 - 1, default=0, help="sample i draws with seed N + i (default: 0)")
    number("--beams", int, 1, 1000, help="the --num-samples best of a beam search this wide (default: off)")
    add("--no-cache", action="store_true", help="recompute everything at each token")
    add("--checkpoint", default="best", metavar="NAME", help="best (default), last, or a step-NNNNNN of the run")
    add(
        "--attention", type=Path, metavar="FILE", help="draw what each head looks at, of the first sample (.html, .png)"
    )
    add("--format", choices=["text", "jsonl"], default="text", help="jsonl: one object a sample")
    add("--device", choices=["cpu", "cuda", "mps"], default="cpu", help="default: cpu")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights and the cache")
    options = parser.parse_args(argv)
    if options.beams:
        drawing = {"--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--stop", "--seed"}
        if given := [name for name in (word.partition("=")[0] for word in argv) if name in drawing]:
            parser.error(f"--beams looks for the likeliest text and takes no {given[0]}")
        options.num_samples = options.num_samples or 1
        if options.num_samples > options.beams:
            parser.error(f"--num-samples: {options.num_samples} must be at most --beams, {options.beams}")
    if options.attention and options.attention.suffix.lower() not in (".html", ".png"):
        parser.error(f"--attention: {options.attention} must end in .html or .png")
    if options.attention and not options.attention.parent.is_dir():
        parser.error(f"--attention: there is no folder {options.attention.parent}")
    if "" in options.stop:
        parser.error("--stop: the text to end before must not be empty")
    return options


def _text(argument: str) -> str:
    """An argument as UTF-8, whatever Python made of it in the console's encoding."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from None


def _number(kind: type, low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    limits = f"{'above' if above else 'at least'} {low}" + (f" and at most {high}" if high < math.inf else "")

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.inf
        if not low <= value <= high or value == math.inf or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text} must be a {'whole ' * (kind is int)}number, {limits}")
        return value

    return number


if __name__ == "__main__":  # --help and mistakes are answered before torch takes its seconds to load
    OPTIONS = command(parse_options)(sys.argv[1:])

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py: read when torch is imported

import torch

from checkpoint import find_run, load_model, load_source_tokenizer
from data.tokenizer import StreamDecoder, Tokenizer
from generation import Event, Hypothesis, beam_search, generate, stream  # noqa: F401 (generate is for importers)
from model import Decoder, EncoderDecoder, attention_of
from plots import AttentionMap, attention_maps

MAPPED = 256  # tokens whose attention is drawn; more would not be legible


class Text:
    """One sample's text as it comes: never half a character, never the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self.decoder, self.stops, self.held = StreamDecoder(tokenizer), stops, ""

    def add(self, id: int, reason: str | None) -> str:
        """What may be printed now that `id` has come."""
        if reason != "end":
            self.held += self.decoder.push(id)
        if reason is not None:
            self.held += self.decoder.flush()
            found = [at for at in map(self.held.find, self.stops) if at >= 0] if reason == "stop" else []
            return self.held[: min(found, default=len(self.held))]
        keep = max((n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        ready, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return ready


def stops_at(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[list[int]], bool]:
    """A `stop` for `stream`: whether a row's text has come to contain one of these, wherever tokens divide it."""
    patterns = [stop.encode() for stop in stops]
    longest = max(map(len, patterns), default=0)
    # A match ends in the newest token, and every token is at least one byte.
    return lambda new: any(p in tokenizer.decode_bytes(new[-longest:]) for p in patterns) if patterns else False


def main(options: argparse.Namespace) -> None:
    run = find_run(options.run)
    model, tokenizer, config = load_model(run, options.checkpoint)
    model.to(_device(options.device), getattr(torch, options.dtype))
    translating = config.model.kind == "encoder_decoder"
    prompts = read_prompts(options, config.model.kind)
    source_tokenizer = load_source_tokenizer(run, config)
    ids = [source_tokenizer.encode(prompt) for prompt in prompts]
    if translating:  # sources are read with their end, as in training
        ids = [[*source, source_tokenizer.end_id] for source in ids]
    if options.temperature is None:
        options.temperature = 0.0 if translating else 0.8
    settings = {
        name: getattr(options, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    }
    shared = {"end_id": tokenizer.end_id, "vocab_size": tokenizer.vocab_size, "use_cache": not options.no_cache}
    stop, scores = stops_at(tokenizer, options.stop), None
    try:
        if options.beams:
            n, length = options.num_samples, options.max_new_tokens
            found = beam_search(model, ids[::n], beams=options.beams, max_new_tokens=length, **shared)
            best = [(n * row, one) for row, hypotheses in enumerate(found) for one in hypotheses[:n]]
            prompts, ids = ([each[row] for row, _ in best] for each in (prompts, ids))
            scores = [one.score for _, one in best]
            events = hypothesis_events([one for _, one in best], tokenizer.end_id)
        else:
            events = stream(model, ids, stop=stop, **shared, **settings)
        trained = math.inf if config.model.position == "learned" else config.model.max_seq_len
        if translating and max(map(len, ids), default=0) > trained:
            print(f"note: a source is longer than the {trained} tokens that training had", file=sys.stderr)
        written = []  # by the first sample
        events = record(events, written)
        starts = [1 if translating else len(prompt) or 1 for prompt in ids]
        hint = "" if translating else "; does the prompt stop where a text would?"
        events = note_length(events, starts, trained, hint)
        if options.format == "jsonl":
            print_jsonl(events, prompts, tokenizer, options.stop, scores)
        else:
            print_text(events, [""] * len(prompts) if translating else prompts, tokenizer, options.stop, translating)
        if options.attention:
            maps = maps_to_draw(model, ids[0], written, tokenizer, source_tokenizer)
            title = f"{prompts[0]} → {tokenizer.decode(written)}" if translating else run.name
            draw_attention(options.attention, maps, title)
    except ValueError as error:  # a setting, or a prompt, that this model cannot take
        raise UserError(str(error)) from None
    except RuntimeError as error:  # torch has no class of its own for this on a CPU
        if "allocate memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError("there is not enough memory; lower --max-new-tokens, --num-samples or --beams") from None


def draw_attention(picture: Path, maps: list[AttentionMap], title: str) -> None:
    """Draws the maps, and says so."""
    if max(len(texts) for one in maps for texts in (one.queries, one.keys)) == MAPPED:
        print(f"note: {picture} shows no more than {MAPPED} tokens", file=sys.stderr)
    attention_maps(maps, picture, title if len(title) <= 200 else f"{title[:200]}…")
    print(f"attention: {picture}", file=sys.stderr)


def record(events: Iterator[Event], written: list[int]) -> Iterator[Event]:
    """The same events; the ids of the first row are `written` down."""
    for event in events:
        if event[0] == 0:
            written.append(event[1])
        yield event


HEADINGS = {  # of the kinds of attention; a row of cross-attention is told by what it led to
    "encoder": "encoder self-attention",
    "self": "self-attention",
    "cross": "cross-attention (rows: what is written)",
}


def maps_to_draw(
    model: Decoder | EncoderDecoder,
    prompt: list[int],
    new: list[int],
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


def _device(name: str) -> str:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[name]:
        names = ", ".join(device for device in available if available[device])
        raise UserError(f"--device {name} is not available here; available: {names}")
    return name


def read_prompts(options: argparse.Namespace, kind: str) -> list[str]:
    """The prompts asked for, each as often as it is to be continued."""
    prompts = list(options.prompt or [])
    if options.prompt_file:
        try:
            with open(0 if options.prompt_file == "-" else options.prompt_file, encoding="utf-8-sig") as file:
                text = file.read()
                prompts += [line for line in text.splitlines() if line.strip()] if kind == "encoder_decoder" else [text]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {options.prompt_file} cannot be read: {error}") from None
    if not prompts and kind == "encoder_decoder":
        raise UserError("an encoder-decoder needs a source to translate: --prompt TEXT")
    return [prompt for prompt in prompts or [""] for _ in range(options.num_samples or (1 if prompts else 3))]


def hypothesis_events(hypotheses: Sequence[Hypothesis], end_id: int) -> Iterator[Event]:
    """What `stream` would have said of these, one after another."""
    for row, (ids, log_probabilities, _, reason) in enumerate(hypotheses):
        steps = list(zip([*ids, end_id], log_probabilities, strict=False))
        for place, (id, log_probability) in enumerate(steps, 1):
            yield row, id, log_probability, reason if place == len(steps) else None


def note_length(events: Iterator[Event], lengths: list[int], trained: float, hint: str = "") -> Iterator[Event]:
    """The same events; says once when a text of these prompt `lengths` grows past what the model was `trained` on, and
    when nothing was written at all."""
    starts = list(lengths)
    noted = False
    for event in events:
        if event[3] == "end" and lengths[event[0]] == starts[event[0]]:
            print("note: the model ended the text at once" + hint, file=sys.stderr)
        lengths[event[0]] += 1
        if not noted and lengths[event[0]] > trained:
            noted = True
            print(f"note: past {trained} tokens, the length the model was trained on", file=sys.stderr)
        yield event


def print_text(
    events: Iterator[Event], prompts: list[str], tokenizer: Tokenizer, stops: Sequence[str], tight: bool = False
) -> None:
    """The samples one after another, a blank line between them unless `tight`: the first as it comes, the others in
    their turn."""
    texts, waiting, done = [Text(tokenizer, stops) for _ in prompts], list(prompts), [False] * len(prompts)
    turn = 0
    for row, id, _, reason in events:
        waiting[row] += texts[row].add(id, reason)
        done[row] = reason is not None
        while turn < len(prompts):
            print(waiting[turn], end="\n" if done[turn] else "", flush=True)
            waiting[turn] = ""
            if not done[turn]:
                break
            turn += 1
            if turn < len(prompts) and not tight:
                print()


def print_jsonl(events, prompts: list[str], tokenizer: Tokenizer, stops: Sequence[str], scores=None) -> None:
    """One object a sample, in order: prompt, text, tokens, stop reason, log-probability of each token, and the score
    where there are `scores`."""
    texts = [Text(tokenizer, stops) for _ in prompts]
    samples = [
        {"prompt": prompt, "text": "", "tokens": [], "reason": None, "log_probabilities": []} for prompt in prompts
    ]
    for row, id, log_probability, reason in events:
        sample = samples[row]
        sample["text"] += texts[row].add(id, reason)
        sample["tokens"].append(id)
        sample["log_probabilities"].append(log_probability)
        sample["reason"] = reason
    for row, sample in enumerate(samples):
        if scores:
            sample["score"] = scores[row]
        print(json.dumps(sample, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    command(main)(OPTIONS)
