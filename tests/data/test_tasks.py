import random
import re
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from itertools import islice, pairwise

import pytest

from data.tasks import PHRASES, TASKS, draws, english_number, fraction, main, native, number_pair, sino

GAMES = ["copy", "reverse", "sort"]
# Of the first 1,000 draws.
PINNED = {
    "copy": "3960e2438d3719cb1d27829c40c7d375e2ef187268801be4de1aae5a73afdbe5",
    "reverse": "f71490675f1b31fcd0b5af80f8ec39012e2dbb2b918ad03ac34e1eaaacc713df",
    "sort": "55dbeaab74b97288ffb6b49e4b73765b7bb686fc4ad496a52d8270e893702b84",
    "numbers": "d47622c8f5fc4f6690ff83fd2b5b34a85dd6c786a90a904924e777a6a104e430",
}
# number, phrase: English, Korean
EXAMPLES = """
1, {three}: one, 일
3, {three}: three, 삼
10, {three}: ten, 십
11, {three}: eleven, 십일
20, {three}: twenty, 이십
21, {three}: twenty-one, 이십일
100, {three}: one hundred, 백
111, {three}: one hundred eleven, 백십일
1000, {three}: one thousand, 천
1110, {three}: one thousand one hundred ten, 천백십
2010, {three}: two thousand ten, 이천십
6006, {three}: six thousand six, 육천육
9999, {three}: nine thousand nine hundred ninety-nine, 구천구백구십구
10000, {three}: ten thousand, 만
11000, {three}: eleven thousand, 만 천
10001, {three}: ten thousand one, 만 일
20000, {three}: twenty thousand, 이만
110000, {three}: one hundred ten thousand, 십일만
123456, {three}: one hundred twenty-three thousand four hundred fifty-six, 십이만 삼천사백오십육
1000000, {three}: one million, 백만
10010010, {three}: ten million ten thousand ten, 천일만 십
1, {three} won: one won, 일 원
500, {three} won: five hundred won, 오백 원
1000, {three} won: one thousand won, 천 원
50000, {three} won: fifty thousand won, 오만 원
1, page {three}: page one, 일 쪽
16, page {three}: page sixteen, 십육 쪽
3, number {three}: number three, 삼 번
114, number {three}: number one hundred fourteen, 백십사 번
305, the year {three}: the year three hundred five, 삼백오 년
1443, the year {three}: the year one thousand four hundred forty-three, 천사백사십삼 년
1, {three} apples: one apple, 사과 한 개
3, {three} apples: three apples, 사과 세 개
5, {three} apples: five apples, 사과 다섯 개
10, {three} apples: ten apples, 사과 열 개
20, {three} apples: twenty apples, 사과 스무 개
21, {three} apples: twenty-one apples, 사과 스물한 개
32, {three} apples: thirty-two apples, 사과 서른두 개
43, {three} apples: forty-three apples, 사과 마흔세 개
54, {three} apples: fifty-four apples, 사과 쉰네 개
99, {three} apples: ninety-nine apples, 사과 아흔아홉 개
100, {three} apples: one hundred apples, 사과 백 개
101, {three} apples: one hundred one apples, 사과 백한 개
120, {three} apples: one hundred twenty apples, 사과 백스무 개
123, {three} apples: one hundred twenty-three apples, 사과 백스물세 개
200, {three} apples: two hundred apples, 사과 이백 개
1000, {three} apples: one thousand apples, 사과 천 개
1, {three} people: one person, 한 명
67, {three} people: sixty-seven people, 예순일곱 명
1002, {three} people: one thousand two people, 천두 명
10000, {three} people: ten thousand people, 만 명
10001, {three} people: ten thousand one people, 만 한 명
120034, {three} people: one hundred twenty thousand thirty-four people, 십이만 서른네 명
1, {three} dogs: one dog, 개 한 마리
2, {three} dogs: two dogs, 개 두 마리
78, {three} dogs: seventy-eight dogs, 개 일흔여덟 마리
1, {three} books: one book, 책 한 권
3, {three} books: three books, 책 세 권
80, {three} books: eighty books, 책 여든 권
1, count to {three}: count to one, 하나까지 세어라
3, count to {three}: count to three, 셋까지 세어라
20, count to {three}: count to twenty, 스물까지 세어라
21, count to {three}: count to twenty-one, 스물하나까지 세어라
40, count to {three}: count to forty, 마흔까지 세어라
100, count to {three}: count to one hundred, 백까지 세어라
104, count to {three}: count to one hundred four, 백넷까지 세어라
12345, count to {three}: count to twelve thousand three hundred forty-five, 만 이천삼백마흔다섯까지 세어라
"""


def first(task, n, val_fraction=0.1):
    return list(islice(draws(task, val_fraction), n))


@pytest.fixture(scope="module")
def letters():
    return first("sort", 40_000)


@pytest.fixture(scope="module")
def numbers():
    """All draws with the (number, phrase) that each one is."""
    meanings = {number_pair(n, phrase): (n, phrase) for n in range(1, 10_000) for phrase in PHRASES}
    found = [(split, *meanings[source, target]) for split, source, target in draws("numbers", 0.1)]
    assert {(n, phrase) for _, n, phrase in found} == set(meanings.values())
    assert len(found) == len(meanings) == 9999 * len(PHRASES)
    return found


@pytest.mark.parametrize("task", TASKS)
def test_draws_are_pinned(task):
    """Changes with any change to the pairs, their order or their splits: then look at samples and pin the new ones."""
    lines = ["\t".join(pair) for pair in first(task, 1000)]
    assert sha256("\n".join(lines).encode()).hexdigest() == PINNED[task]


@pytest.mark.parametrize("val_fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("task", TASKS)
def test_training_and_validation_both_have_something_from_the_start(task, val_fraction):
    assert [split for split, *_ in first(task, 2, val_fraction)] == ["train", "val"]


def test_hash_is_uniform():
    found = Counter(int(fraction(str(n)) * 100) for n in range(20_000))
    assert set(found) == set(range(100))
    assert all(count == pytest.approx(200, abs=70) for count in found.values())


# ---------------------------------------------------------------- letters


def test_targets():
    for task in GAMES:
        for _, source, target in first(task, 1000):
            if task == "sort":
                assert Counter(target) == Counter(source)
                assert all(one <= two for one, two in pairwise(target))
            else:
                assert list(target) == list(source if task == "copy" else reversed(source))
    sources = [[source for _, source, _ in first(task, 1000)] for task in GAMES]
    assert sources[0] == sources[1] == sources[2]


def test_lengths_and_letters_are_uniform(letters):
    lengths = Counter(len(source) for _, source, _ in letters)
    assert sorted(lengths) == list(range(2, 21))
    assert all(count == pytest.approx(40_000 / 19, rel=0.1) for count in lengths.values())
    characters = Counter(letter for _, source, _ in letters for letter in source)
    assert "".join(sorted(characters)) == "abcdefghijklmnopqrstuvwxyz"
    assert all(count == pytest.approx(40_000 * 11 / 26, rel=0.05) for count in characters.values())


def test_a_sequence_is_always_in_the_same_split(letters):
    splits = {}
    for split, source, _ in letters:
        assert splits.setdefault(source, split) == split
    assert len(splits) < len(letters) - 1000  # short ones are drawn again and again
    assert set(splits.values()) == {"train", "val"}


@pytest.mark.parametrize(("val_fraction", "error"), [(0.5, 0.02), (0.1, 0.01), (0.01, 0.005)])
def test_share_of_validation(val_fraction, error):
    found = first("copy", 20_000, val_fraction)
    for chosen in (found, [pair for pair in found if len(pair[1]) >= 12]):
        share = sum(split == "val" for split, *_ in chosen) / len(chosen)
        assert share == pytest.approx(val_fraction, abs=error)


def test_share_of_validation_among_the_shortest(letters):
    shortest = {source: split for split, source, _ in letters if len(source) == 2}
    assert len(shortest) > 600
    assert 0.05 < sum(split == "val" for split in shortest.values()) / len(shortest) < 0.15


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("example", EXAMPLES.strip().splitlines())
def test_examples(example):
    number, phrase, english, korean = re.fullmatch(r"(\d+), (.*): (.*), (.*)", example).groups()
    assert number_pair(int(number), phrase) == (english, korean)


def test_every_phrase_has_an_example():
    assert {re.search(", (.*):", example)[1] for example in EXAMPLES.strip().splitlines()} == set(PHRASES)


SINO_DIGITS = {"일": 1, "이": 2, "삼": 3, "사": 4, "오": 5, "육": 6, "칠": 7, "팔": 8, "구": 9}
PLACES = {"십": 10, "백": 100, "천": 1000, "만": 10_000}
ONES = "하나 둘 셋 넷 다섯 여섯 일곱 여덟 아홉", "한 두 세 네 다섯 여섯 일곱 여덟 아홉"
TENS = {"열": 10, "서른": 30, "마흔": 40, "쉰": 50, "예순": 60, "일흔": 70, "여든": 80, "아흔": 90}


def read_digits(text):
    """A Sino-Korean number below 만, digit by digit; 1 is not written before a place."""
    pattern = "".join(f"(?:([이삼사오육칠팔구]?)({place}))?" for place in "천백십") + "([일이삼사오육칠팔구]?)"
    *places, unit = re.fullmatch(pattern, text).groups()
    pairs = zip(places[::2], places[1::2], strict=True)
    return sum(SINO_DIGITS.get(digit, 1) * PLACES[place] for digit, place in pairs if place) + SINO_DIGITS.get(unit, 0)


def read_sino(text):
    high, ten_thousand, low = text.rpartition("만")
    assert high != "일"
    assert low.startswith(" ") == bool(ten_thousand and low)
    return (read_digits(high) or 1) * 10_000 * bool(ten_thousand) + read_digits(low.strip())


def read_native(text, attributive):
    ones = {one: value for value, one in enumerate(ONES[attributive].split(), 1)}
    tens = TENS | {"스물": 20} | ({"스무": 20} if attributive else {})
    hundreds, ten, one = re.fullmatch(f"(.*?)({'|'.join(tens)})?({'|'.join(ones)})?", text).groups()
    below = tens.get(ten, 0) + ones.get(one, 0)
    if attributive and 20 <= below < 30:
        assert (ten == "스무") == (below == 20)
    assert hundreds.endswith(" ") == (below > 0 and hundreds.strip().endswith("만"))
    above = read_sino(hundreds.strip()) if hundreds else 0
    assert above % 100 == 0
    return above + below


def read_english(text):
    small = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    values = {word: value for value, word in enumerate((small + " seventeen eighteen nineteen").split(), 1)}
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    values |= {word: 10 * value for value, word in enumerate(tens, 2)}
    assert text.count("-") == len(
        re.findall(f"({'|'.join(tens)})-(one|two|three|four|five|six|seven|eight|nine)", text)
    )
    total = group = 0
    for word in re.split("[ -]", text):
        if word in ("thousand", "million"):
            total, group = total + group * {"thousand": 1000, "million": 1_000_000}[word], 0
        else:
            group = group * 100 if word == "hundred" else group + values[word]
    return total + group


def test_numbers_are_read_back():
    rng = random.Random(3)
    beyond = [rng.randrange(10_000, 100_000_000) for _ in range(3000)]
    edges = [10**k * digit + rest for k in range(4, 8) for digit in (1, 2, 9) for rest in (0, 1, 20, 21, 100, 1000)]
    for n in [*range(1, 10_000), *beyond, *edges, 99_999_999]:
        assert read_english(english_number(n)) == n
        assert read_sino(sino(n)) == n
        assert read_native(native(n, False), False) == n
        assert read_native(native(n, True), True) == n


@pytest.mark.parametrize("n", [0, -1, 100_000_000])
def test_what_is_not_spelt(n):
    for spell in (english_number, sino, lambda n: native(n, True), lambda n: native(n, False)):
        with pytest.raises(ValueError, match="from 1 to 99,999,999"):
            spell(n)


def test_a_source_has_one_target():
    sources = [source for _, source, _ in draws("numbers", 0.1)]
    assert len(set(sources)) == len(sources)


def test_numbers_held_out_are_in_no_other_split(numbers):
    seen = {"train": set(), "val": set(), "held_out": set()}
    for split, n, _ in numbers:
        seen[split].add(n)
    assert not seen["held_out"] & (seen["train"] | seen["val"])
    assert not seen["held_out"] & set(range(1, 21))
    assert len(seen["held_out"]) == pytest.approx(1000, abs=100)
    assert max(Counter(n % 10 for n in seen["held_out"]).values()) < 140
    assert sum(split == "held_out" for split, *_ in numbers) == len(PHRASES) * len(seen["held_out"])


def test_shares_of_numbers(numbers):
    rest = [(split, phrase) for split, _, phrase in numbers if split != "held_out"]
    assert sum(split == "val" for split, _ in rest) / len(rest) == pytest.approx(0.1, abs=0.005)
    phrases = Counter(phrase for split, phrase in rest if split == "val")
    assert all(count == pytest.approx(900, abs=120) for count in phrases.values())


def test_numbers_come_in_a_random_order(numbers):
    early = [n for _, n, _ in numbers[:5000]]
    assert sum(early) / len(early) == pytest.approx(5000, abs=200)
    assert {phrase for _, _, phrase in numbers[:200]} == set(PHRASES)
    assert {split for split, *_ in numbers[:200]} == {"train", "val", "held_out"}


def test_every_word_is_trained_on():
    """In each phrase, English and Korean: also with half of the pairs kept for validation."""
    pairs = [(source, target) for split, source, target in draws("numbers", 0.5) if split == "train"]
    words = {word for source, _ in pairs for word in re.split("[ -]", source)}
    assert {word for n in range(1, 10_000) for word in re.split("[ -]", english_number(n))} < words
    for ending, attributive in (("까지 세어라", False), (" 마리", True)):
        counted = [target.removeprefix("개 ").removesuffix(ending) for _, target in pairs if target.endswith(ending)]
        for one in [*ONES[attributive].split(), *TENS, "스물", *(["스무"] if attributive else [])]:
            assert any(one in numeral for numeral in counted), one


# ---------------------------------------------------------------- the command


def test_command_prints_pairs_on_any_console():
    arguments = [sys.executable, "-m", "data.tasks", "numbers", "--sample", "3"]
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.run(arguments, env=environment, check=True, capture_output=True).stdout.decode()
    assert re.fullmatch("([a-z -]+\t[가-힣 ]+\n){3}", printed)


@pytest.mark.parametrize("task", TASKS)
def test_command_prints_as_many_as_asked(task, capsys):
    printed = []
    for arguments in ([], ["--seed", "0"], ["--seed", "1"], ["--sample", "1"]):
        main([task, *arguments])
        printed.append(capsys.readouterr().out)
    assert [text.count("\n") for text in printed] == [text.count("\t") for text in printed] == [10, 10, 10, 1]
    assert printed[0] == printed[1] != printed[2]
    assert printed[0].startswith(printed[3])
    if task != "numbers":
        assert printed[0].splitlines() == [f"{source}\t{target}" for _, source, target in first(task, 10)]


@pytest.mark.parametrize(("low", "high"), [(10_000, 99_999_999), (7, 7), (1, 2)])
def test_command_keeps_to_a_range(low, high, capsys):
    main(["numbers", "--from", str(low), "--to", str(high), "--sample", "200"])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    around = "^(page|number|the year|count to) | (won|apples?|person|people|dogs?|books?)$"
    found = [read_english(re.sub(around, "", source)) for source, _ in lines]
    assert low <= min(found) <= max(found) <= high
    assert len(set(found)) == min(high - low + 1, 200)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: TASK"),
        ("add", "invalid choice: 'add'"),
        ("copy --sample 0", "--sample must be at least 1, not 0"),
        ("copy --sample many", "invalid int value: 'many'"),
        ("copy --from 3", "--from and --to are for numbers, not for copy"),
        ("sort --to 0", "--from and --to are for numbers, not for sort"),
        ("numbers --from 7 --to 6", "--from 7 is above --to 6"),
        ("numbers --from 10000", "--from 10000 is above --to 9999"),
        ("numbers --from 0", "--from 0 --to 9999 must lie between 1 and 99999999"),
        ("numbers --to 100000000", "--from 1 --to 100000000 must lie between 1 and 99999999"),
    ],
)
def test_command_refuses_mistakes(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1]
    assert not printed.out
