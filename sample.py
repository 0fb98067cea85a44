"""Generate text from a trained run, with the KV cache: python sample.py [RUN] [--prompt TEXT | --interactive] ...

The command around generation.py. Standard output is the text alone, as it comes: the prompt and what follows it, or of
an encoder-decoder the translation; everything else goes to standard error, and never into a line of the text.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from interrupt import leave, on_interrupt, raise_interrupt, until_interrupted

if __name__ == "__main__":
    on_interrupt(leave)

from config import UserError, command

WORTH_COMPILING = 20_000  # tokens: by then the time that it takes is saved again


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are `UserError`s, and which says what was probably meant."""

    hint = ""  # said of a word that belongs to no option

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_args(argv)
        if unknown:
            self.refuse(unknown[0])
        return options

    def refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            raise UserError(f"{word} belongs to no option{self.hint}")
        near = get_close_matches(word, self._option_string_actions, n=1)
        raise UserError(f"{word} is not an option" + (f"; did you mean {near[0]}?" if near else ""))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line of `python sample.py`."""
    parser = Parser(prog="sample.py", description="Generate text from a trained run.", allow_abbrev=False)
    parser.hint = "; a text comes after --prompt"
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
    add(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is a prompt, its last line end too, or a source a line; -: standard input; may be repeated",
    )
    add(
        "--interactive",
        action="store_true",
        help="answer each line of standard input; an empty one goes on where the last answer stopped",
    )
    number("--num-samples", int, 1, help="for each prompt (default: 1; without a prompt 3)")
    number("--max-new-tokens", int, 1, 2**31, default=256, help="length limit (default: 256)")
    number("--temperature", float, 0, help="0 is greedy (default: 0.8; for an encoder-decoder 0)")
    number("--top-k", int, 0, default=0, help="only the N likeliest; 0: off (default)")
    number("--top-p", float, 0, 1, above=True, default=0.95, help="only the nucleus (default: 0.95; 1: off)")
    number("--min-p", float, 0, 1, default=0.0, help="only X times the likeliest or more; 0: off (default)")
    number("--repetition-penalty", float, 0.01, 100, default=1.0, help="1: off (default)")
    add("--stop", action="append", type=_text, default=[], metavar="TEXT", help="end before this text; may be repeated")
    number("--seed", int, 0, 2**63 - 1, default=0, help="sample i, or answer i, draws with seed N + i (default: 0)")
    number("--beams", int, 1, 1000, help="the --num-samples best of a beam search this wide (default: off)")
    add("--no-cache", action="store_true", help="recompute everything at each token")
    add(
        "--compile",
        choices=["auto", "on", "off"],
        default="auto",
        help=f"steps of a prompt alone, on a CPU: takes seconds, then faster, and sums round differently; "
        f"auto (default): from --max-new-tokens {WORTH_COMPILING} on",
    )
    add("--checkpoint", default="best", metavar="NAME", help="best (default), last, or a step-NNNNNN of the run")
    add(
        "--attention", type=Path, metavar="FILE", help="draw what each head looks at, of the first sample (.html, .png)"
    )
    add("--format", choices=["text", "jsonl"], default="text", help="jsonl: one object a sample")
    add("--device", choices=["cpu", "cuda", "mps"], default="cpu", help="default: cpu")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights and the cache")
    options = parser.parse_args(argv)
    given = {word.partition("=")[0] for word in argv}

    def refuse(names: str, reason: str) -> None:
        if found := [name for name in names.split() if name in given]:
            parser.error(f"{reason} and takes no {', '.join(found)}")

    if options.interactive:
        asking = "--prompt --prompt-file --num-samples --attention"
        refuse(asking, "--interactive answers each line of standard input, once,")
    if options.beams:
        drawing = "--temperature --top-k --top-p --min-p --repetition-penalty --stop --seed"
        refuse(drawing, "--beams looks for the likeliest text")
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
from compiling import compiled, compiler_missing, compiler_works
from generation import Event, Hypothesis, beam_search, generate, stream  # noqa: F401 (generate is for importers)
from heads import draw_attention, maps_to_draw
from linear import packed
from printing import Prompt, Sample, Text, Writer, stops_at

ONE_ANSWER = "with --temperature 0 a prompt has one answer, which is generated once"


class Sampler:
    """A run, loaded once, that answers prompts; and what there is to say about its answers."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.run = options, find_run(options.run)
        self.model, self.tokenizer, config = load_model(self.run, options.checkpoint)
        self.model.to(check_device(options.device), getattr(torch, options.dtype))
        self.source_tokenizer = load_source_tokenizer(self.run, config)
        self.translating = config.model.kind == "encoder_decoder"
        if options.temperature is None:
            options.temperature = 0.0 if self.translating else 0.8
        self.limits = {"end_id": self.tokenizer.end_id, "vocab_size": self.tokenizer.vocab_size}
        self.limits |= {"max_new_tokens": options.max_new_tokens, "use_cache": not options.no_cache}
        self.greedy = options.temperature == 0 and not options.beams
        self.separator = "" if self.translating else "\n"
        self.n_answers, self.noted = 0, set()
        self.endings, self.n_tokens, self.seconds = Counter(), 0, 0.0  # since the last report

    def prompt(self, text: str) -> Prompt:
        """Raises `UserError` for what has no ids."""
        ids = self.source_tokenizer.encode(text)
        if self.translating:  # sources are read with their end, as in training
            return Prompt(text, (*ids, self.source_tokenizer.end_id), "")
        return Prompt(text, (*self.tokenizer.start, *ids), text)

    def going_on(self, sample: Sample | None) -> Prompt:
        """The prompt that goes on where this text stopped. Raises `UserError` for translations."""
        if self.translating:
            raise UserError("an empty line has nothing to translate")
        if sample is None:
            return self.prompt("")
        new = [id for id in sample.tokens if id != self.tokenizer.end_id]
        if sample.reason == "stop":
            new = self._before_stop(new)
        ids = (*sample.prompt.ids, *new)
        return Prompt(self.tokenizer.decode(ids[len(self.tokenizer.start) :]), ids, "", ids)

    def _before_stop(self, new: list[int]) -> list[int]:
        """These ids without what they stopped at, which may begin within one of them."""
        whole = self.tokenizer.decode_bytes(new)
        end = min(at for at in (whole.find(stop.encode()) for stop in self.options.stop) if at >= 0)
        kept = next(n for n in range(len(new), -1, -1) if len(self.tokenizer.decode_bytes(new[:n])) <= end)
        rest = whole[len(self.tokenizer.decode_bytes(new[:kept])) : end]
        return [*new[:kept], *self.tokenizer.encode(rest.decode(errors="ignore"))]

    def answer(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Prints what the model writes after each prompt. Raises `UserError` for what this model cannot take."""
        begin = time.perf_counter()
        with _refusals():
            samples, events = self._search(prompts) if self.options.beams else self._draw(prompts)
            Writer(samples, jsonl=self.options.format == "jsonl").write(until_interrupted(events))
        self.seconds += time.perf_counter() - begin
        self.n_answers += len(samples)
        generated = {sample.prompt.ids if self.greedy else place: sample for place, sample in enumerate(samples)}
        self.n_tokens += sum(len(sample.tokens) for sample in generated.values())
        for sample in samples:
            self.endings[self._ending(sample)] += 1
            self._note_lengths(sample)
        if self.greedy and len({prompt.ids for prompt in prompts}) < len(prompts):
            self.note(ONE_ANSWER)
        return samples

    def _draw(self, prompts: Sequence[Prompt]) -> tuple[list[Sample], Iterator[Event]]:
        """Samples of which nothing is written, and the events that are to fill them."""
        rows = {}  # which prompts each row of the batch is for
        for place, prompt in enumerate(prompts):
            rows.setdefault(prompt.ids if self.greedy else place, []).append(place)
        ids = [prompts[places[0]].ids for places in rows.values()]
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        settings = {name: getattr(self.options, name) for name in names} | self.limits
        stop, seed = stops_at(self.tokenizer, self.options.stop), self.options.seed + self.n_answers
        events = stream(self.model, ids, stop=stop, seed=seed, **settings)
        return self._samples(prompts), for_each(events, list(rows.values()))

    def _search(self, prompts: Sequence[Prompt]) -> tuple[list[Sample], Iterator[Event]]:
        """The same of a beam search, the best of each prompt."""
        found = beam_search(self.model, [prompt.ids for prompt in prompts], beams=self.options.beams, **self.limits)
        n = self.options.num_samples
        best = [(prompt, one) for prompt, hypotheses in zip(prompts, found, strict=True) for one in hypotheses[:n]]
        samples = self._samples([prompt for prompt, _ in best])
        for sample, (_, one) in zip(samples, best, strict=True):
            sample.score = one.score
        return samples, hypothesis_events([one for _, one in best], self.tokenizer.end_id)

    def _samples(self, prompts: Sequence[Prompt]) -> list[Sample]:
        return [
            Sample(prompt, Text(self.tokenizer, self.options.stop, prompt.before), self.separator if place else "")
            for place, prompt in enumerate(prompts, self.n_answers)
        ]

    def _ending(self, sample: Sample) -> str:
        """How it came to its end; it follows the word sample."""
        if sample.reason != "length":
            return {"end": "ended", "stop": "stopped at --stop"}.get(sample.reason, sample.reason)
        if len(sample.tokens) == self.options.max_new_tokens:
            return f"stopped at --max-new-tokens {self.options.max_new_tokens}"
        return f"stopped at the last position, max_seq_len = {self.model.config.max_seq_len}"

    def _note_lengths(self, sample: Sample) -> None:
        config, n_read = self.model.config, len(sample.prompt.ids)
        trained = math.inf if config.position == "learned" else config.max_seq_len
        if self.translating and n_read > trained:
            self.note(f"a source is longer than the {trained} tokens that training had")
        if sample.reason == "end" and len(sample.tokens) == 1:
            hint = "" if self.translating else "; does the prompt stop where a text would?"
            self.note(f"the model ended the text at once{hint}")
        if (1 if self.translating else n_read or 1) + len(sample.tokens) > trained:
            self.note(f"past {trained} tokens, the length the model was trained on")

    def note(self, sentence: str) -> None:
        """Says it on standard error, but once. For where a line of the text has ended."""
        if sentence not in self.noted:
            self.noted.add(sentence)
            print(f"note: {sentence}", file=sys.stderr)

    def report(self) -> None:
        """Says how the samples since the last report ended, and how fast they came."""
        if self.endings and self.options.format == "text":  # objects say it themselves
            how = [f"{n:,} {ending}" for ending, n in self.endings.most_common()]
            samples = counted(self.endings.total(), "sample")
            samples += ": " + ", ".join(how) if len(how) > 1 else f" {next(iter(self.endings))}"
            tokens = f"{counted(self.n_tokens, 'token')}, {self.n_tokens / self.seconds:,.0f} a second"
            print(f"{self.run}: {samples}; {tokens}", file=sys.stderr)
        self.endings, self.n_tokens, self.seconds = Counter(), 0, 0.0


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises `UserError` for what this model, or this machine, cannot take."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None
    except RuntimeError as error:  # torch has no class of its own for this on a CPU
        if "allocate memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError("there is not enough memory; lower --max-new-tokens, --num-samples or --beams") from None


def main(options: argparse.Namespace) -> None:
    sampler = Sampler(options)
    with packed(sampler.model), compiled(sampler.model) if to_be_compiled(sampler) else nullcontext():
        if options.interactive:
            converse(sampler)
        else:
            answer_once(sampler)


def to_be_compiled(sampler: Sampler) -> bool:
    """Whether the steps of a prompt alone are, and if so says it."""
    options = sampler.options
    if options.compile == "off":
        return False
    if options.compile == "auto":
        n_prompts = len(options.prompt or ()) + len(options.prompt_file)
        alone = options.interactive or (n_prompts == 1 and (sampler.greedy or (options.num_samples or 1) == 1))
        if options.max_new_tokens < WORTH_COMPILING or not alone:
            return False
    possible = not (sampler.translating or options.no_cache or options.beams or options.device != "cpu")
    works = possible and not compiler_missing() and compiler_works()
    if options.compile == "on" and not works:
        needs = "a C++ compiler that works, g++ or clang++" if possible else "a decoder, a CPU, the cache and no beams"
        raise UserError(f"--compile on needs {needs}")
    if works:
        sampler.note("compiled for the steps of a prompt alone, which takes some seconds first")
    return works


def answer_once(sampler: Sampler) -> None:
    """What the command line asks for."""
    options = sampler.options
    texts = read_prompts(options, sampler)
    n = options.num_samples or (1 if texts else 3)
    copies = 1 if sampler.greedy or options.beams else n  # a search itself finds several
    prompts = [sampler.prompt(text) for text in texts or [""] for _ in range(copies)]
    samples = sampler.answer(prompts)
    if sampler.greedy and (options.num_samples or 1) > 1:
        sampler.note(ONE_ANSWER)
    sampler.report()
    if any(sample.reason == "interrupted" for sample in samples):
        sys.exit(130)
    if options.attention:
        tokenizer, written = sampler.tokenizer, samples[0].tokens
        maps = maps_to_draw(sampler.model, prompts[0].ids, written, tokenizer, sampler.source_tokenizer)
        title = f"{texts[0]} → {tokenizer.decode(written)}" if sampler.translating else sampler.run.name
        draw_attention(options.attention, maps, title)


def converse(sampler: Sampler) -> None:
    """Answers each line of standard input. At a terminal Ctrl-C ends an answer, otherwise the program."""
    if sys.stdin is None:
        raise UserError("--interactive reads standard input, which is closed")
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    if terminal := sys.stdin.isatty():
        what = "source" if sampler.translating else "prompt, an empty one goes on"
        print(f"{sampler.run}: each line is a {what}; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
        sampler.separator = ""  # what is typed stands between two answers
    last, discarded, refused = None, False, False
    while True:
        try:
            if discarded:
                print("\nCtrl-D ends", file=sys.stderr)
                discarded = False
            line = ask() if terminal else input()
            (last,) = sampler.answer([sampler.prompt(line) if line else sampler.going_on(last)])
            if terminal:
                sampler.report()
            elif last.reason == "interrupted":
                raise KeyboardInterrupt
        except EOFError:
            break
        except UserError as error:
            refused = True
            print(f"error: {error}", file=sys.stderr)
            if sampler.options.format == "jsonl":  # so that each line has its object
                print(json.dumps({"prompt": line, "error": str(error)}, ensure_ascii=False), flush=True)
        except KeyboardInterrupt:
            if not terminal:
                sampler.report()
                raise
            discarded = True  # said above, where another Ctrl-C does no harm
    if terminal:
        print(file=sys.stderr)  # after the sign
    sampler.report()
    if refused and not terminal:
        sys.exit(2)


def ask() -> str:
    """A line that is typed, with a sign before it that is never in a file."""
    if not sys.stdout.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
        return input()
    with suppress(ImportError):  # without it the terminal edits
        import readline  # noqa: F401 (which makes `input` edit)
    return input("> ")


def read_prompts(options: argparse.Namespace, sampler: Sampler) -> list[str]:
    """The prompts asked for; of sources a blank line is one too, so that translations stand beside them."""
    prompts = list(options.prompt or [])
    for name in options.prompt_file:
        try:
            with open(0 if name == "-" else name, encoding="utf-8-sig") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            byte = f"byte {error.start} is 0x{error.object[error.start]:02X}"
            raise UserError(f"--prompt-file {name} cannot be read: it is not UTF-8 ({byte})") from None
        except OSError as error:
            raise UserError(f"--prompt-file {name} cannot be read: {error.strerror}") from None
        if not sampler.translating:
            prompts.append(text)
        elif text.strip():
            prompts += text.removesuffix("\n").split("\n")
    if sampler.translating and not prompts:
        newest, other = (
            ("", "") if options.run else (", the newest run,", ", or name another run: python sample.py RUN")
        )
        raise UserError(f"{sampler.run}{newest} needs a source to translate: --prompt TEXT{other}")
    return prompts


def for_each(events: Iterable[Event], places: Sequence[Sequence[int]]) -> Iterator[Event]:
    """The events of each row, for each of its `places` instead."""
    for row, *event in events:
        for place in places[row]:
            yield place, *event


def hypothesis_events(hypotheses: Sequence[Hypothesis], end_id: int) -> Iterator[Event]:
    """What `stream` would have said of these, one after another."""
    for row, (ids, log_probabilities, _, reason) in enumerate(hypotheses):
        steps = list(zip([*ids, end_id], log_probabilities, strict=False))
        for place, (id, log_probability) in enumerate(steps, 1):
            yield row, id, log_probability, reason if place == len(steps) else None


def check_device(name: str) -> str:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[name]:
        names = ", ".join(device for device in available if available[device])
        raise UserError(f"--device {name} is not available here; available: {names}")
    return name


if __name__ == "__main__":
    on_interrupt(raise_interrupt)
    command(main)(OPTIONS)
