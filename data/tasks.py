"""Built-in pairs for encoder-decoders: three games with letters, and numbers put from English into Korean.

python -m data.tasks TASK [--sample N] [--seed S] [--from A --to B]     prints pairs: source, tab, target

copy, reverse and sort are endless: a source is 2 to 20 random letters, and the target the same letters, backwards, or
in order. numbers is finite: phrases with a number from 1 to 9,999 in words. Korean has two sets of numerals, and the
phrase decides between them: prices and pages take 삼, while counting says 셋, and 세 before what is counted. One number
in ten is kept from training in every phrase, so that a model can be asked whether it has learnt how numbers are made.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from string import ascii_lowercase

from config.errors import command
from data.grammar import Draw

SEED = 0  # of the pairs that models are trained on; not the run's: runs of several seeds read the same pairs
SEQUENCES = {"copy": str, "reverse": lambda source: source[::-1], "sort": lambda source: "".join(sorted(source))}
TASKS = (*SEQUENCES, "numbers")
LENGTHS = range(2, 21)
LEARNT = range(1, 10_000)  # the numbers of the corpus; some are held out of training
SPELT = range(1, 100_000_000)  # the numbers that can be put into words

SIZES = {1_000_000: "million", 1000: "thousand", 100: "hundred"}
ENGLISH = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ENGLISH += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
ENGLISH_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SINO = ["", "일", "이", "삼", "사", "오", "육", "칠", "팔", "구"]
NATIVE = ["", "하나", "둘", "셋", "넷", "다섯", "여섯", "일곱", "여덟", "아홉"]
NATIVE_TENS = ["", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔"]
ATTRIBUTIVE = ["", "한", "두", "세", "네", *NATIVE[5:]]

# What is said of three: in its place, in either language, comes any other number.
PHRASES = {
    "{three}": "{삼}",
    "{three} won": "{삼} 원",
    "page {three}": "{삼} 쪽",
    "number {three}": "{삼} 번",
    "the year {three}": "{삼} 년",
    "{three} apples": "사과 {세} 개",
    "{three} people": "{세} 명",
    "{three} dogs": "개 {세} 마리",
    "{three} books": "책 {세} 권",
    "count to {three}": "{셋}까지 세어라",
}
SINGULAR = {"apples": "apple", "people": "person", "dogs": "dog", "books": "book"}


def english_number(n: int) -> str:
    """A number in English words."""
    _check(n)
    for size, name in SIZES.items():
        if n >= size:
            return f"{english_number(n // size)} {name}" + (f" {english_number(n % size)}" if n % size else "")
    if n < 20:
        return ENGLISH[n]
    return ENGLISH_TENS[n // 10] + ("-" + ENGLISH[n % 10] if n % 10 else "")


def sino(n: int) -> str:
    """A number in Sino-Korean: a space after 만, and no 일 before 십, 백, 천, nor before a first 만."""
    _check(n)
    if n >= 10_000:
        high, low = divmod(n, 10_000)
        return ("" if high == 1 else sino(high)) + "만" + (f" {sino(low)}" if low else "")
    digits = zip(map(int, f"{n:04}"), ("천", "백", "십", ""), strict=True)
    return "".join(("" if digit == 1 and place else SINO[digit]) + place for digit, place in digits if digit)


def native(n: int, attributive: bool) -> str:
    """A number in native Korean, as it stands before a counter if `attributive`; its hundreds have only Sino-Korean."""
    _check(n)
    rest = n % 100
    if rest == 0:
        return sino(n)
    hundreds = sino(n - rest) if n > rest else ""
    gap = " " if hundreds.endswith("만") else ""
    tens = "스무" if attributive and rest == 20 else NATIVE_TENS[rest // 10]
    return hundreds + gap + tens + (ATTRIBUTIVE if attributive else NATIVE)[rest % 10]


def _check(n: int) -> None:
    if n not in SPELT:
        raise ValueError(f"{n} is not a number from 1 to {SPELT[-1]:,}")


def number_pair(n: int, phrase: str) -> tuple[str, str]:
    """A phrase of `PHRASES` with the number n, and the Korean for it."""
    source = phrase.format(three=english_number(n))
    if n == 1:
        source = " ".join(SINGULAR.get(word, word) for word in source.split())
    return source, PHRASES[phrase].format(삼=sino(n), 셋=native(n, False), 세=native(n, True))


def random_pair(task: str, draw: Draw, numbers: range = LEARNT) -> tuple[str, str]:
    """Random letters and what a task makes of them, or one of `numbers` in a random phrase."""
    if task == "numbers":
        return number_pair(draw.pick(numbers), draw.pick(list(PHRASES)))
    source = "".join(draw.pick(ascii_lowercase) for _ in range(draw.pick(LENGTHS)))
    return source, SEQUENCES[task](source)


def fraction(text: str) -> float:
    """A number from 0 up to 1: for a text always the same, over many texts uniform."""
    return int.from_bytes(sha256(text.encode()).digest()[:6], "big") / 2**48


def is_held_out(n: int) -> bool:
    """Whether a number is kept from training: one in ten; up to twenty none, since each has a word of its own."""
    return n > 20 and fraction(str(n)) < 0.1


def draws(task: str, val_fraction: float) -> Iterator[tuple[str, str, str]]:
    """The (split, source, target) of a task's pairs, the same on every machine.

    The source alone decides the split, so that training never meets what is validated: a share `val_fraction` goes to
    "val", the others to "train". All pairs with a number held out go to "held_out".
    """
    draw = Draw(random.Random(SEED))
    if task == "numbers":
        # Not `shuffle`, which may change with the version of Python.
        drawn = sorted(((n, phrase) for n in LEARNT for phrase in PHRASES), key=lambda _: draw.rng.random())
        pairs = ((is_held_out(n), *number_pair(n, phrase)) for n, phrase in drawn)
    else:
        pairs = ((False, *random_pair(task, draw)) for _ in count())
    first: dict[str, str] = {}  # a source for each split, so that there is one whatever the fraction
    for held_out, source, target in pairs:
        if len(first) < 2 and not held_out:
            first.setdefault(source, "val" if first else "train")
        split = first.get(source) or ("val" if fraction(source) < val_fraction else "train")
        yield "held_out" if held_out else split, source, target


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.tasks", description="Prints pairs of a built-in task.")
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--sample", type=int, default=10, metavar="N", help="how many pairs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="which pairs to print (default: %(default)s)")
    parser.add_argument("--from", type=int, dest="low", metavar="A", help=f"smallest number (default: {LEARNT[0]})")
    parser.add_argument("--to", type=int, dest="high", metavar="B", help=f"largest number (default: {LEARNT[-1]})")
    options = parser.parse_args(argv)
    low, high = options.low, options.high
    if options.sample < 1:
        parser.error(f"--sample must be at least 1, not {options.sample}")
    if options.task != "numbers" and (low, high) != (None, None):
        parser.error(f"--from and --to are for numbers, not for {options.task}")
    low, high = LEARNT[0] if low is None else low, LEARNT[-1] if high is None else high
    if low > high:
        parser.error(f"--from {low} is above --to {high}")
    if low not in SPELT or high not in SPELT:
        parser.error(f"--from {low} --to {high} must lie between 1 and {SPELT[-1]}")
    draw = Draw(random.Random(options.seed))
    for _ in range(options.sample):
        print(*random_pair(options.task, draw, range(low, high + 1)), sep="\t")


if __name__ == "__main__":
    main()
