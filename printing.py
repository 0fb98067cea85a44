"""Samples as they are printed: text without half characters or stop strings, in order, as it comes."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from data.tokenizer import StreamDecoder, Tokenizer


class Text:
    """One sample's text as it comes: never half a character, never the beginning of a stop string.

    A character is a code point: what joins several into one emoji comes as it comes. `before` are ids that the text
    goes on from, which may have stopped within a character.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], before: Sequence[int] = ()):
        self.decoder, self.stops, self.held = StreamDecoder(tokenizer), stops, ""
        for id in before:
            self.decoder.push(id)

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


class Prompt(NamedTuple):
    text: str
    ids: tuple[int, ...]  # what the model reads
    shown: str  # what is printed before the answer
    before: tuple[int, ...] = ()  # ids that the answer goes on from in the middle, perhaps of a character


class Sample:
    """What is written after one prompt. The reason is None while it grows, then end, stop, length or interrupted."""

    def __init__(self, prompt: Prompt, text: Text, separator: str = ""):
        self.prompt, self.stream = prompt, text
        self.text, self.tokens, self.reason, self.log_probabilities = "", [], None, []
        self.score: float | None = None  # of a beam search
        self.waiting = separator + prompt.shown  # what is not yet printed

    def add(self, id: int, log_probability: float, reason: str | None) -> None:
        self._extend(self.stream.add(id, reason), reason)
        self.tokens.append(id)
        self.log_probabilities.append(log_probability)

    def interrupt(self) -> None:
        """Ends it with the last whole character that has come."""
        self._extend(self.stream.held, "interrupted")

    def _extend(self, text: str, reason: str | None) -> None:
        self.text += text
        self.waiting += text
        self.reason = reason

    def to_json(self) -> str:
        names = ("text", "tokens", "reason", "log_probabilities", *(["score"] if self.score is not None else []))
        values = {"prompt": self.prompt.text} | {name: getattr(self, name) for name in names}
        return json.dumps(values, ensure_ascii=False)


class Writer:
    """Prints samples one after another: the first as it comes, the others in their turn; with `jsonl` an object each,
    as soon as it is whole."""

    def __init__(self, samples: Sequence[Sample], jsonl: bool = False):
        self.samples, self.jsonl, self.turn = samples, jsonl, 0
        self.begun: Sample | None = None  # to be seen in part

    def write(self, events: Iterable[tuple[int, int, float, str | None]]) -> None:
        """Prints what `generation.stream` yields. Ctrl-C interrupts the samples; of the unfinished ones only that one
        is printed whose beginning is to be seen."""
        try:
            for row, *event in events:
                self.samples[row].add(*event)
                self.print()
        except KeyboardInterrupt:
            kept = [sample for sample in self.samples if sample.reason or sample is self.begun]
            for sample in self.samples:
                if sample.reason is None:
                    sample.interrupt()
            self.samples = kept
            self.print()
        except (ValueError, RuntimeError):
            if self.begun and not self.jsonl:
                print()  # an error is told on a line of its own
            raise

    def print(self) -> None:
        """Prints all that has its turn."""
        while self.turn < len(self.samples):
            sample = self.samples[self.turn]
            if not self.jsonl:
                text, sample.waiting = sample.waiting, ""
                print(text, end="\n" if sample.reason else "", flush=True)
            elif sample.reason:
                print(sample.to_json(), flush=True)
            self.begun = None if sample.reason else sample
            if self.begun:
                return
            self.turn += 1
