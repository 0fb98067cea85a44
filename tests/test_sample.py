"""python sample.py: what it prints where, and what it says to those who ask for the impossible.

A process costs seconds before its first line, so most tests run the same file as `__main__` in this one.
"""

import codecs
import io
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import compiling
import generation
from checkpoint import link, load_model, save_checkpoint
from config import Config, ModelConfig, to_toml
from data.tokenizer import ByteTokenizer, CharTokenizer, train_tokenizer
from generation import generate, stream
from model import Decoder, build_model
from tests.helpers import BruteForce, build
from tests.test_generation import chain
from tests.test_plots import Page

ROOT = Path(__file__).parents[1]
TEXT = "The cat sat. 고양이가 앉았다 🎉 déjà vu.\n"
TRAIN = """--data.source text.txt --data.tokenizer chars --train.steps 20 --optim.warmup-steps 1 --train.batch-size 4
    --train.device cpu --train.dtype float32 --train.compile off
    --model.n-layer 1 --model.n-head 2 --model.n-kv-head 1 --model.d-model 16 --model.max-seq-len 16"""


def process(
    script: str, *argv: str, cwd: Path, flags=(), input: bytes | None = None, **env
) -> subprocess.CompletedProcess:
    """`python script` as people run it, but from another folder, without a terminal and with nothing to read."""
    result = subprocess.run(
        [sys.executable, *flags, ROOT / script, *argv],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        timeout=120,
        **({"stdin": subprocess.DEVNULL} if input is None else {"input": input}),
    )
    result.stdout, result.stderr = result.stdout.decode(), result.stderr.decode()
    return result


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder in which people have just trained on a small text of their own."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "text.txt").write_text(TEXT * 100, "utf-8")
    result = process("train.py", *TRAIN.split(), cwd=folder)
    assert result.returncode == 0, result.stderr
    assert (folder / "runs" / "stories" / "best").is_dir()
    return folder


def save(run: Path, model: torch.nn.Module, tokenizer, step: int = 1) -> Path:
    """A run of this model, as training would have left it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(to_toml(Config(model=model.config)), "utf-8")
    tokenizer.save(run / "tokenizer")
    folder = save_checkpoint(run, model, torch.optim.SGD(model.parameters(), lr=1.0), {"step": step}, keep=5)
    if not (run / "best").exists():
        link(run, "best", folder)
    return run


def alphabet_model(n: int, stride: int = 1) -> torch.nn.Module:
    return chain(15 * torch.eye(n, dtype=torch.float64).roll(stride, dims=1))


def endless_alphabet() -> torch.nn.Module:
    return chain(15 * torch.eye(11, dtype=torch.float64)[[*range(1, 10), 0, 10]])


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    """A folder whose one run says the alphabet from a to j, then ends."""
    folder = tmp_path_factory.mktemp("letters")
    save(folder / "runs" / "letters", alphabet_model(11), CharTokenizer("abcdefghij"))
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs sample.py as `__main__` in a folder: (exit code, standard output, standard error)."""

    def run(cwd: Path, *argv: str, input: bytes | None = b"") -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["sample.py", *argv])
        stdin = None if input is None else io.TextIOWrapper(io.BytesIO(input), "ascii", newline="\n")
        monkeypatch.setattr(sys, "stdin", stdin)
        code = 0
        try:
            runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return code, *capsys.readouterr()

    return run


def without_speed(outcome: tuple[int, str, str]) -> tuple[int, str, str]:
    """The same but for what differs from time to time."""
    code, out, err = outcome
    return code, out, re.sub(r"[\d,]+ a second", "N a second", err)


def assert_refused(outcome: tuple[int, str, str], says: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert re.search(says, err), err


# --- what is printed ------------------------------------------------------------------------------------------------


def test_f57_standard_output_is_the_text_alone_prompt_first_and_notices_are_on_standard_error(workplace):
    result = process("sample.py", "--prompt", "The cat", "--prompt", "고양", "--seed", "5", cwd=workplace)
    model, tokenizer, _ = load_model(workplace / "runs" / "stories")
    prompts = [tokenizer.encode("The cat"), tokenizer.encode("고양")]
    settings = {"max_new_tokens": 256, "temperature": 0.8, "top_p": 0.95, "seed": 5}
    rows = generate(model, prompts, end_id=tokenizer.end_id, vocab_size=tokenizer.vocab_size, **settings)
    assert result.stdout == "\n\n".join(map(tokenizer.decode, map(list.__add__, prompts, rows))) + "\n"
    assert result.returncode == 0
    assert re.fullmatch(r"note: .*16 tokens.*\nruns/stories: 2 samples.* a second\n", result.stderr)


def test_f31_korean_goes_in_and_out_whatever_the_console(workplace, command):
    argv = ["--prompt", "고양이 🎉", "--stop", "다", "--max-new-tokens", "40", "--temperature", "2"]
    result = process("sample.py", *argv, cwd=workplace, LC_ALL="C", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("고양이 🎉")
    assert without_speed((0, result.stdout, result.stderr)) == without_speed(command(workplace, *argv))


def test_a_prompt_from_standard_input_loses_its_byte_order_mark_and_carriage_returns(workplace):
    argv = ["--prompt-file", "-", "--max-new-tokens", "1", "--format", "jsonl"]
    result = process("sample.py", *argv, cwd=workplace, input="\ufeff고양\r\nThe".encode())
    assert result.stderr == ""
    assert json.loads(result.stdout)["prompt"] == "고양\nThe"


def test_a_prompt_from_a_file(letters, command, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("\ufeffc".encode())
    assert command(letters, "--prompt-file", str(tmp_path / "prompt.txt"))[:2] == (0, "cdefghij\n")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--prompt", "c"], "cdefghij\n"),
        (["--prompt", "c", "--prompt", "i"], "cdefghij\n\nij\n"),  # the second ends first
        (["--prompt", "i", "--prompt", "c"], "ij\n\ncdefghij\n"),
        (["--prompt", "c", "--num-samples", "2"], "cdefghij\n\ncdefghij\n"),
        (["--prompt", "c", "--max-new-tokens", "2"], "cde\n"),
        (["--prompt", "c", "--stop", "gh"], "cdef\n"),
        (["--prompt", "c", "--stop", "hx", "--stop", "efg"], "cd\n"),
        (["--prompt", "c", "--stop", "jk"], "cdefghij\n"),  # j was held back
        (["--prompt", "c", "--stop", "cd"], "cdefghij\n"),  # the prompt is not part of it
        (["--prompt", "c", "--no-cache"], "cdefghij\n"),
        (["--prompt", "c", "--dtype", "bfloat16"], "cdefghij\n"),
        (["runs/letters", "--prompt", "c", "--temperature", "0"], "cdefghij\n"),
    ],
    ids=" ".join,
)
def test_samples_are_printed_one_after_another(letters, command, argv, text):
    code, out, _ = command(letters, *argv)
    assert (code, out) == (0, text)


@pytest.mark.parametrize("argv", [[], ["--prompt", "", "--num-samples", "3"]], ids=["none", "empty"])
def test_f21_without_a_prompt_three_samples_start_from_the_end_of_text(letters, command, argv):
    assert command(letters, *argv)[:2] == (0, "\n\n".join(["abcdefghij"] * 3) + "\n")


def test_f22_nothing_is_printed_past_the_end_of_text(letters, command):
    code, out, _ = command(letters, "--prompt", "i", "--format", "jsonl", "--max-new-tokens", "50")
    assert (code, json.loads(out)["tokens"], json.loads(out)["text"]) == (0, [9, 10], "j")


def test_jsonl_is_one_object_a_sample(letters, command):
    argv = [
        "--prompt",
        "c",
        "--prompt",
        "a",
        "--stop",
        "ef",
        "--max-new-tokens",
        "7",
        "--prompt",
        "h",
        "--format",
        "jsonl",
    ]
    code, out, _ = command(letters, *argv)
    c, a, h = map(json.loads, out.splitlines())
    assert code == 0
    assert [list(s) for s in (c, a, h)] == [["prompt", "text", "tokens", "reason", "log_probabilities"]] * 3
    assert [c[key] for key in ("prompt", "text", "tokens", "reason")] == ["c", "d", [3, 4, 5], "stop"]
    assert [a[key] for key in ("prompt", "text", "tokens", "reason")] == ["a", "bcd", [1, 2, 3, 4, 5], "stop"]
    assert [h[key] for key in ("prompt", "text", "tokens", "reason")] == ["h", "ij", [8, 9, 10], "end"]
    sure = torch.tensor([15.0] + [0.0] * 10, dtype=torch.float64).log_softmax(-1)[0].item()
    assert h["log_probabilities"] == pytest.approx([sure] * 3, rel=1e-3)
    _, out, _ = command(letters, "--prompt", "c", "--max-new-tokens", "1", "--format", "jsonl")
    assert json.loads(out)["reason"] == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 2.5},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.9},
        {"repetition_penalty": 5.0},
        {"seed": 9},
        {"max_new_tokens": 11},
    ],
    ids=str,
)
def test_every_option_of_choice_reaches_the_sampler(workplace, command, options):
    model, tokenizer, _ = load_model(workplace / "runs" / "stories")
    settings = {"max_new_tokens": 30, "temperature": 1.0, "top_p": 0.99}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in (settings | options).items()]
    _, out, _ = command(workplace, "--prompt", "The", "--format", "jsonl", *argv)
    rows = [
        generate(model, [tokenizer.encode("The")], end_id=tokenizer.end_id, vocab_size=tokenizer.vocab_size, **s)[0]
        for s in (settings | options, settings)
    ]
    assert [id for id in json.loads(out)["tokens"] if id != tokenizer.end_id] == rows[0]
    assert rows[0] != rows[1]


def test_f23_ids_beyond_the_tokenizer_never_come_out(tmp_path, command):
    save(tmp_path / "runs" / "wide", build(vocab_size=300), ByteTokenizer())
    code, out, _ = command(tmp_path, "--num-samples", "20", "--temperature", "5", "--top-p", "1", "--format", "jsonl")
    ids = [id for line in out.splitlines() for id in json.loads(line)["tokens"]]
    assert code == 0
    assert len(set(ids)) > 200
    assert max(ids) < 257


def test_f24_characters_of_many_tokens_are_printed_whole_and_as_they_come(tmp_path, monkeypatch, command):
    tokenizer, text = ByteTokenizer(), "a한🎉!"
    logits = torch.zeros(257, 257, dtype=torch.float64)
    path = [*text.encode(), 256]
    logits[path[:-1], path[1:]] = 15.0
    save(tmp_path / "runs" / "bytes", chain(logits), tokenizer)
    assert command(tmp_path, "--prompt", "a")[:2] == (0, text + "\n")
    assert command(tmp_path, "--prompt", "a", "--stop", "🎉")[:2] == (0, "a한\n")
    assert command(tmp_path, "--prompt", "a", "--max-new-tokens", "5")[:2] == (0, "a한\ufffd\n")


def test_f37_a_prompt_that_spells_the_end_of_text_is_ordinary_text(tmp_path, command):
    model, tokenizer = build(vocab_size=257), ByteTokenizer()
    save(tmp_path / "runs" / "bytes", model, tokenizer)
    prompt = "a<|endoftext|>"
    _, out, _ = command(
        tmp_path, "--prompt", prompt, "--temperature", "0", "--max-new-tokens", "5", "--format", "jsonl"
    )
    ids = list(prompt.encode())
    assert json.loads(out)["tokens"] == generate(model, [ids], max_new_tokens=5, end_id=256, vocab_size=257)[0]
    assert json.loads(out)["prompt"] == prompt


def test_f36_sampling_from_a_trained_bpe_touches_no_network(tmp_path, monkeypatch, command):
    tokenizer = train_tokenizer("bpe", [TEXT * 20], 300)
    save(tmp_path / "runs" / "bpe", build(vocab_size=tokenizer.vocab_size), tokenizer)

    def unplugged(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", unplugged)
    monkeypatch.setattr(socket.socket, "connect", unplugged)
    code, out, _ = command(tmp_path, "--prompt", "고양이 🎉", "--max-new-tokens", "30")
    assert code == 0
    assert out.startswith("고양이 🎉")


def test_an_encoder_decoder_writes_a_target_for_each_source(tmp_path, command):
    """A line each; a source is read with its end, as in training."""
    model, tokenizer = build(kind="encoder_decoder", vocab_size=11), CharTokenizer("abcdefghij")
    save(tmp_path / "runs" / "pairs", model, tokenizer)
    argv = ["--prompt", "abc", "--prompt", "e", "--max-new-tokens", "8", "--temperature", "1.5", "--top-p", "1"]
    code, out, _ = command(tmp_path, *argv)
    settings = {"max_new_tokens": 8, "temperature": 1.5, "end_id": 10, "vocab_size": 11}
    rows = generate(model, [[0, 1, 2, 10], [4, 10]], **settings)
    assert (code, out) == (0, f"{tokenizer.decode(rows[0])}\n{tokenizer.decode(rows[1])}\n")


# --- what is said about the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prompt", "c"], "1 sample ended; 8 tokens"),
        (["--prompt", "j"], "1 sample ended; 1 token"),
        (["--prompt", "c", "--num-samples", "2"], "2 samples ended; 16 tokens"),
        (["--prompt", "c", "--max-new-tokens", "3"], "1 sample stopped at --max-new-tokens 3; 3 tokens"),
        (["--prompt", "c", "--stop", "gh"], "1 sample stopped at --stop; 5 tokens"),
        (
            ["--prompt", "i", "--prompt", "a", "--prompt", "h", "--max-new-tokens", "3"],
            "3 samples: 2 ended, 1 stopped at --max-new-tokens 3; 8 tokens",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_how_the_samples_ended_is_said_in_one_line(letters, command, argv, says):
    code, _, err = command(letters, *argv)
    assert code == 0
    said = [line for line in err.splitlines() if not line.startswith("note:")]
    assert re.fullmatch(rf"runs/letters: {says}, [\d,]+ a second", said[0]), err
    assert len(said) == 1


def test_the_last_of_learned_positions_is_named_where_it_ended_a_sample(tmp_path, command):
    endless = endless_alphabet()
    learned = build_model(endless.config.model_copy(update={"position": "learned", "max_seq_len": 16}))
    learned.load_state_dict(endless.state_dict(), strict=False)
    with torch.no_grad():
        learned.decoder.position.weight.zero_()
    save(tmp_path / "runs" / "learned", learned, CharTokenizer("abcdefghij"))
    _, out, err = command(tmp_path, "--prompt", "abc", "--max-new-tokens", "99")
    assert out == "abcdefghijabcdefg\n"
    assert err.startswith("runs/learned: 1 sample stopped at the last position, max_seq_len = 16; 14 tokens, ")


def test_notes_are_said_where_a_line_of_the_text_has_ended(tmp_path, monkeypatch, command):
    save(tmp_path / "runs" / "endless", endless_alphabet(), CharTokenizer("abcdefghij"))
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # the same terminal
    _, out, _ = command(tmp_path, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "80")
    text = ("abcdefghij" * 10)[:82]
    one, blank, two, note, summary = out.splitlines()
    assert (one, blank, two) == (text[:81], "", text[1:])
    assert note == "note: past 64 tokens, the length the model was trained on"
    assert "2 samples stopped" in summary


@pytest.mark.parametrize(
    ("argv", "text", "n_rows", "noted"),
    [
        (["--prompt", "c"], "cdefghij\n", 1, False),
        (["--prompt", "c", "--num-samples", "3"], "cdefghij\n", 1, True),
        ([], "abcdefghij\n", 1, False),  # three only where they differ
        (["--prompt", "h", "--prompt", "i", "--prompt", "h"], "hij\n\nij\n\nhij\n", 2, True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_greedy_answer_to_a_prompt_is_generated_once(letters, monkeypatch, command, argv, text, n_rows, noted):
    rows, original = [], generation.stream
    monkeypatch.setattr(generation, "stream", lambda model, ids, **o: rows.extend(ids) or original(model, ids, **o))
    code, out, err = command(letters, *argv, "--temperature", "0")
    assert (code, out, len(rows)) == (0, text, n_rows)
    assert err.count("note: with --temperature 0 a prompt has one answer, which is generated once\n") == noted


def test_several_files_are_several_prompts(letters, command, tmp_path):
    (tmp_path / "one.txt").write_bytes("\ufeffb".encode())
    (tmp_path / "two.txt").write_bytes(b"")
    files = [
        "--prompt-file",
        str(tmp_path / "one.txt"),
        "--prompt-file",
        "-",
        "--prompt-file",
        str(tmp_path / "two.txt"),
    ]
    result = process("sample.py", *files, "--prompt", "i", cwd=letters, input=b"d")
    assert result.stdout == "ij\n\nbcdefghij\n\ndefghij\n\nabcdefghij\n"


def test_only_line_ends_divide_sources(tmp_path, command):
    """As in training: a page break or a line separator belongs to the sentence."""
    save(tmp_path / "runs" / "pairs", build(kind="encoder_decoder", vocab_size=257), ByteTokenizer())
    (tmp_path / "sources.txt").write_bytes("a\u2028b\fc\x85d\r\ne".encode())
    _, out, _ = command(tmp_path, "--prompt-file", "sources.txt", "--max-new-tokens", "1", "--format", "jsonl")
    assert [json.loads(line)["prompt"] for line in out.split("\n")[:-1]] == ["a\u2028b\fc\x85d", "e"]


# --- lines that are typed -------------------------------------------------------------------------------------------


def typed(command, cwd: Path, lines: bytes, *argv: str) -> tuple[list[dict], str]:
    """The objects that answer these lines, and what was said beside them."""
    code, out, err = command(cwd, "--interactive", "--format", "jsonl", *argv, input=lines)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == (2 if any("error" in answer for answer in answers) else 0)
    return answers, err


@pytest.fixture(scope="module")
def babble(tmp_path_factory) -> Path:
    """A folder whose one run writes bytes at random, most of them not UTF-8."""
    folder = tmp_path_factory.mktemp("babble")
    save(folder / "runs" / "babble", build(vocab_size=257), ByteTokenizer())
    return folder


def test_typed_lines_are_answered_as_prompts_are(babble, command):
    """Answer i draws as sample i does, and standard output is the same, without a prompt sign."""
    argv = ["--max-new-tokens", "9", "--temperature", "2", "--seed", "4", "--stop", "zz"]
    lines = "\ufeffone\r\n한글\nthree\none".encode()
    prompts = [word for text in ("one", "한글", "three", "one") for word in ("--prompt", text)]
    code, out, err = command(babble, "--interactive", *argv, input=lines)
    assert (code, out) == command(babble, *prompts, *argv)[:2]
    assert err.count("runs/babble: 4 samples") == len(err.splitlines()) == 1
    first, _, _, again = typed(command, babble, lines, *argv)[0]
    assert first["prompt"] == again["prompt"]
    assert first["tokens"] != again["tokens"]


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_typed_lines_are_answered_by_beams_and_for_translators(tmp_path, command, kind):
    save(tmp_path / "runs" / "tiny", build(kind=kind, vocab_size=11), CharTokenizer("abcdefghij"))
    for argv in ([], ["--beams", "3"]):
        few = [*argv, "--max-new-tokens", "6"]
        code, out, _ = command(tmp_path, "--interactive", *few, input=b"abc\ne\n")
        assert (code, out) == command(tmp_path, "--prompt", "abc", "--prompt", "e", *few)[:2]


def test_an_empty_line_goes_on_as_if_it_had_never_stopped(babble, command):
    """Also from within a character, which is ended then."""
    model, _, _ = load_model(babble / "runs" / "babble")
    objects, err = typed(command, babble, b"one\n\n\n\n", "--max-new-tokens", "7", "--temperature", "0")
    settings = {"max_new_tokens": 28, "end_id": 256, "vocab_size": 257}
    (ids,) = generate(model, [list(b"one")], **settings)
    assert len(ids) == 28
    assert [id for one in objects for id in one["tokens"]] == ids
    assert [len(one["tokens"]) for one in objects] == [7] * 4
    so_far = [bytes([*b"one", *ids[:n]]).decode("utf-8", "replace") for n in (0, 7, 14, 21)]
    assert [one["prompt"] for one in objects] == so_far
    assert err == ""


def test_a_character_that_a_limit_cut_in_two_is_whole_when_the_text_goes_on(tmp_path, command):
    text = "a한🎉!"
    logits = torch.zeros(257, 257, dtype=torch.float64)
    path = [*text.encode(), 256]
    logits[path[:-1], path[1:]] = 15.0
    save(tmp_path / "runs" / "bytes", chain(logits), ByteTokenizer())
    code, out, err = command(tmp_path, "--interactive", "--max-new-tokens", "2", input=b"a\n\n\n\n")
    assert (code, out) == (0, "a\ufffd\n\n한\ufffd\n\n\ufffd\n\n🎉!\n")
    assert "4 samples stopped at --max-new-tokens 2; 8 tokens" in err


def test_an_empty_line_goes_on_from_what_was_printed(letters, command):
    goes_on, _ = typed(command, letters, b"\nc\n\nb\n\n", "--stop", "gh", "--max-new-tokens", "20")
    told = [(one["prompt"], one["text"], one["reason"]) for one in goes_on]
    assert told == [
        ("", "abcdef", "stop"),  # at the very start there is nothing to go on from
        ("c", "def", "stop"),
        ("cdef", "", "stop"),  # before the text it stopped at
        ("b", "cdef", "stop"),
        ("bcdef", "", "stop"),
    ]
    code, out, err = command(letters, "--interactive", "--max-new-tokens", "3", input=b"f\n\n\n")
    assert (code, out) == (0, "fghi\n\nj\n\n\n")  # after an end this model ends again
    assert "note: the model ended the text at once" in err
    assert "3 samples: 2 ended, 1 stopped at --max-new-tokens 3; 6 tokens" in err


def test_a_line_that_cannot_be_is_refused_and_the_next_is_answered(letters, command):
    code, out, err = command(letters, "--interactive", input=b"i\nz\n\xff\nh\niii")
    assert (code, out) == (2, "ij\n\nhij\n\niiij\n")
    unknown, not_utf8, ended = err.splitlines()
    assert unknown.startswith("error: the character 'z' (U+007A) is not one of the 10")
    assert re.match(r"error: .*U\+DCFF.*UTF-8", not_utf8)
    assert ended.startswith("runs/letters: 3 samples ended; ")


def test_a_line_that_learned_positions_do_not_reach_is_refused_and_so_is_going_on(tmp_path, command):
    learned = build(position="learned", vocab_size=11, max_seq_len=16)
    save(tmp_path / "runs" / "learned", learned, CharTokenizer("abcdefghij"))
    argv = ["--interactive", "--temperature", "0", "--max-new-tokens", "1"]
    code, out, err = command(tmp_path, *argv, input=b"c" * 17 + b"\n" + b"c" * 16 + b"\n\nab\n")
    assert code == 2
    assert [block[:-1] for block in out.rstrip("\n").split("\n\n")] == ["c" * 16, "ab"]
    assert err.count("error: the prompt has 17 tokens, learned positions end at max_seq_len = 16\n") == 2


def test_it_goes_on_from_before_a_stop_in_the_bytes_that_there_are(tmp_path, command):
    logits = torch.zeros(257, 257, dtype=torch.float64)
    path = [*"a한!b".encode(), 256]
    logits[path[:-1], path[1:]] = 15.0
    save(tmp_path / "runs" / "bytes", chain(logits), ByteTokenizer())
    argv = ["--stop", "!", "--max-new-tokens", "2"]
    answers, _ = typed(command, tmp_path, b"a\n\n\n\n", *argv)
    assert (
        [(one["tokens"], one["reason"]) for one in answers]
        == [
            ([*"한".encode()[:2]], "length"),  # half a character
            ([*"한!".encode()[2:]], "stop"),
            ([*b"!"], "stop"),  # goes on after 한, whole
            ([*b"!"], "stop"),
        ]
    )
    assert answers[2]["prompt"] == "a한"


def test_equal_greedy_prompts_are_counted_once(letters, command):
    _, _, err = command(letters, "--temperature", "0", "--prompt", "a", "--prompt", "a", "--prompt", "h")
    assert "3 samples ended; 13 tokens" in err  # ten and three


def test_an_empty_line_is_no_source(tmp_path, command):
    save(tmp_path / "runs" / "pairs", build(kind="encoder_decoder", vocab_size=11), CharTokenizer("abcdefghij"))
    first, second, third = typed(command, tmp_path, b"\nabc\n\n", "--max-new-tokens", "3")[0]
    assert first == third == {"prompt": "", "error": "an empty line has nothing to translate"}
    assert second["prompt"] == "abc"
    _, err = typed(command, tmp_path, b"\nabc\n\n", "--max-new-tokens", "3")
    assert err == "error: an empty line has nothing to translate\n" * 2


def test_a_note_is_said_once_a_session(letters, command):
    _, _, err = command(letters, "--interactive", input=b"j\nj\nj\n")
    assert err.count("note: the model ended the text at once") == 1


def test_a_closed_standard_input_has_no_lines(letters, command):
    outcome = command(letters, "--interactive", input=None)
    assert_refused(outcome, "--interactive reads standard input, which is closed")


# --- at a terminal, and Ctrl-C --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """A folder whose one run says the alphabet again and again."""
    folder = tmp_path_factory.mktemp("endless")
    save(folder / "runs" / "endless", endless_alphabet(), CharTokenizer("abcdefghij"))
    return folder


class Terminal:
    """sample.py at a pseudo-terminal, its standard output there too or in a file."""

    def __init__(self, cwd: Path, *argv: str, stdout: Path | None = None):
        self.master, slave = pytest.importorskip("pty").openpty()
        tty = os.ttyname(slave)
        # A new session's first terminal is the one that sends its Ctrl-C.
        shell = f'exec "$0" "$@" <{tty} >{stdout or tty} 2>{tty}'
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", shell, sys.executable, ROOT / "sample.py", *argv],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
            start_new_session=True,
        )
        self.slave, self.unread, self.deadline = slave, "", time.monotonic() + 240
        # A read may end within a character, or between the two of a line end.
        self.decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, text: str, keys: str = "") -> str:
        """What comes up to this text, which is dropped. `keys` are pressed, and again after seconds of silence:
        readline misses a signal that comes while it takes a key."""
        self.send(keys)
        while text not in self.unread:
            assert time.monotonic() < self.deadline, self.unread[-2000:]
            if select.select([self.master], [], [], 5)[0]:
                self.unread += self.decoder.decode(os.read(self.master, 1 << 16))
            else:
                assert self.process.poll() is None, self.unread[-2000:]
                self.send(keys)
        before, _, self.unread = self.unread.partition(text)
        return before

    def exit_code(self) -> int:
        code = self.process.wait(max(0, self.deadline - time.monotonic()))
        os.close(self.slave)
        os.close(self.master)
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()


def letters_after(prompt: str, n: int) -> str:
    return (("abcdefghij" * (n // 10 + 2))["abcdefghij".index(prompt) :])[: n + 1]


def test_a_conversation_at_a_terminal(endless):
    with Terminal(endless, "--interactive", "--max-new-tokens", "100000") as terminal:
        assert "runs/endless: each line is a prompt, an empty one goes on" in terminal.read_until("> ")
        terminal.send("cx\x7f\n")
        terminal.read_until("\n")  # what was typed
        text = terminal.read_until("jab")
        terminal.send("\x03")
        text += "jab" + terminal.read_until("\nruns/endless: 1 sample interrupted; ").replace("^C", "")
        text, _, note = text.partition("\n")
        assert text == letters_after("c", len(text) - 1)
        assert note == ("note: past 64 tokens, the length the model was trained on" if len(text) > 64 else "")
        terminal.read_until("> ")
        terminal.send("\n")
        terminal.read_until("\n")
        more = terminal.read_until("jab")
        assert text + more + "jab" == letters_after("c", len(text + more) + 2)
        terminal.send("\x03")
        terminal.read_until("interrupted; ")
        terminal.read_until("> ")
        terminal.send("abc")
        terminal.read_until("abc")
        terminal.read_until("Ctrl-D ends\n> ", keys="\x03")  # discards the line
        terminal.send("한\n")
        terminal.read_until("error: the character '한' (U+D55C) is not one of the 10 ")
        terminal.read_until("> ")
        terminal.send("f\n")
        terminal.read_until("\n")
        assert terminal.read_until("jab") == "fghi"
        terminal.send("\x03")
        terminal.read_until("interrupted; ")
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.exit_code() == 0


def test_the_prompt_sign_is_never_in_a_file(letters, tmp_path):
    with Terminal(letters, "--interactive", stdout=tmp_path / "out.txt") as terminal:
        for line in ("i", "h"):
            terminal.read_until("> ")
            terminal.send(f"{line}\n")
            terminal.read_until("1 sample ended; ")
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.exit_code() == 0
    assert (tmp_path / "out.txt").read_text() == "ij\nhij\n"


def test_a_line_is_edited_with_readline(letters):
    pytest.importorskip("readline")
    with Terminal(letters, "--interactive") as terminal:
        terminal.read_until("> ")
        terminal.send("hi\x01g\n")  # Ctrl-A: to the beginning
        terminal.read_until("\n")
        assert terminal.read_until("\nruns/letters: 1 sample ended; ") == "ghij"
        terminal.read_until("> ")
        terminal.send("\x10\n")  # Ctrl-P: the line before
        terminal.read_until("\n")
        assert terminal.read_until("\nruns/letters: 1 sample ended; ") == "ghij"
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.exit_code() == 0


def ctrl_c(monkeypatch, owner, name: str, at: int = 1) -> None:
    """A real SIGINT at the `at`-th call of `owner.name`."""
    original, calls = getattr(owner, name), []

    def interrupted(*args, **options):
        calls.append(name)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("argv", [[], ["--format", "jsonl"], ["--beams", "2"], ["--interactive"]], ids=str)
@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "read_checkpoint"), (Decoder, "features")])
def test_ctrl_c_before_the_first_token_prints_nothing(endless, monkeypatch, command, owner, name, argv):
    ctrl_c(monkeypatch, owner, name)
    code, out, err = command(endless, *argv, input=b"a\nb\n")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_ctrl_c_ends_the_text_at_a_character_and_the_program(endless, monkeypatch, command, format, interactive):
    """Also where lines are typed, if not at a terminal: a pipe would go on for all its lines."""
    ctrl_c(monkeypatch, Decoder, "features", at=8)
    argv = ["--interactive"] if interactive else ["--prompt", "c"]
    code, out, err = command(endless, *argv, "--format", format, input=b"c\nd\ne\n")
    assert code == 130
    if format == "text":
        assert out == "cdefghij\n"  # of each call a token
        assert "runs/endless: 1 sample interrupted; 7 tokens" in err
    else:
        (one,) = map(json.loads, out.splitlines())
        assert (one["text"], one["reason"]) == ("defghij", "interrupted")


@pytest.mark.parametrize("interactive", [False, True])
def test_ctrl_c_is_not_lost_in_compiled_code(endless, monkeypatch, command, interactive):
    """A guard that cannot be evaluated is one that does not hold: whatever it raises is swallowed."""
    original, calls = Decoder.features, []

    def features(*args, **options):
        calls.append(args)
        if len(calls) == 8:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(Decoder, "features", features)
    argv = ["--interactive"] if interactive else ["--prompt", "c"]
    code, out, err = command(endless, *argv, input=b"c\nd\ne\n")
    assert (code, out) == (130, "cdefghij\n")
    assert "runs/endless: 1 sample interrupted; 7 tokens" in err


def test_ctrl_c_while_a_long_text_is_piped(endless):
    with subprocess.Popen(
        [sys.executable, ROOT / "sample.py", "--prompt", "d", "--max-new-tokens", "100000"],
        cwd=endless,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        text = program.stdout.read(20)
        program.send_signal(signal.SIGINT)
        text += program.stdout.read()
        said = program.stderr.read().decode()
        assert program.wait(120) == 130
    assert text.decode() == letters_after("d", len(text) - 2) + "\n"
    assert "1 sample interrupted" in said
    assert "Traceback" not in said


def test_a_closed_pipe_ends_in_silence(endless):
    with subprocess.Popen(
        [sys.executable, ROOT / "sample.py", "--prompt", "d", "--max-new-tokens", "100000", "--compile", "off"],
        cwd=endless,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        program.stdout.read(20)
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(120) == 141


# --- which run, which checkpoint ------------------------------------------------------------------------------------


def test_the_newest_run_and_the_best_checkpoint_unless_another_is_named(tmp_path, command):
    tokenizer = CharTokenizer("abcdefghij")
    for age, name in enumerate(["newest", "older"]):
        run = save(tmp_path / "runs" / name, alphabet_model(11), tokenizer)
        save(run, alphabet_model(11, stride=2 + age), tokenizer, step=2)
        for folder in run.glob("step-*"):
            os.utime(folder, (1e9 - age, 1e9 - age))
    ask = ["--prompt", "c", "--max-new-tokens", "3"]
    assert command(tmp_path, *ask)[1] == "cdef\n"
    assert command(tmp_path, *ask, "--checkpoint", "last")[1] == "cegi\n"
    assert command(tmp_path, *ask, "--checkpoint", "step-000002")[1] == "cegi\n"
    assert command(tmp_path, "runs/older", *ask, "--checkpoint", "last")[1] == "cfia\n"
    (tmp_path / "runs" / "newest" / "best").unlink()
    assert command(tmp_path, *ask)[1] == "cegi\n"


def test_a_run_can_be_moved_and_is_all_that_sampling_needs(workplace, tmp_path, command):
    argv = ["--prompt", "The", "--max-new-tokens", "20"]
    there = command(workplace, *argv)
    shutil.copytree(workplace / "runs" / "stories", tmp_path / "moved", symlinks=True)
    assert command(tmp_path, "moved", *argv)[:2] == there[:2]


def test_f13_the_notice_about_the_trained_length_comes_only_when_it_may_be_passed(workplace, command, tmp_path):
    assert "note" not in command(workplace, "--prompt", "The", "--max-new-tokens", "13")[2]
    assert "16 tokens" in command(workplace, "--prompt", "The", "--max-new-tokens", "14")[2]
    learned = build(position="learned", vocab_size=11, max_seq_len=16)
    save(tmp_path / "runs" / "learned", learned, CharTokenizer("abcdefghij"))
    code, out, err = command(tmp_path, "--prompt", "abc", "--max-new-tokens", "99", "--format", "jsonl")
    assert (code, err) == (0, "")
    assert json.loads(out)["reason"] == "end" or len(json.loads(out)["tokens"]) == 14


# --- refusals: one sentence, exit code 2 ----------------------------------------------------------------------------


def assert_process_refused(result: subprocess.CompletedProcess, says: str) -> None:
    assert_refused((result.returncode, result.stdout, result.stderr), says)


@pytest.mark.parametrize("argv", [["--help"], ["--tempature", "0"]], ids=" ".join)
def test_help_and_a_mistyped_option_are_answered_without_torch(argv, tmp_path):
    result = process("sample.py", *argv, cwd=tmp_path, flags=["-X", "importtime"])
    times = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in times}
    assert {"argparse", "config.errors"} <= imported
    assert not {"torch", "numpy", "safetensors"} & imported
    if argv == ["--help"]:
        assert result.returncode == 0
        assert all(option in result.stdout for option in ("--prompt TEXT", "--top-p X", "--no-cache", "default: 0.95"))
    else:
        said = "".join(line + "\n" for line in result.stderr.splitlines() if line not in times)
        assert_refused(
            (result.returncode, result.stdout, said), "--tempature is not an option; did you mean --temperature"
        )


def test_no_run_at_all_to_sample_from(tmp_path):
    assert_process_refused(
        process("sample.py", cwd=tmp_path), r"no run with a checkpoint in .*runs; .*python train\.py"
    )


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_closed_standard_input_is_refused_as_a_prompt(workplace):
    shell = 'exec "$0" "$1" --prompt-file - <&-'
    result = subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, ROOT / "sample.py"],
        cwd=workplace,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert_process_refused(result, "--prompt-file - cannot be read")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--top-x", "3"], "--top-x is not an option; did you mean --top-"),
        (["--zzz"], "--zzz is not an option$"),
        (["runs/letters", "extra"], "extra belongs to no option; a text comes after --prompt"),
        (["--prompt"], "--prompt: expected one argument"),
        (["--temperature", "-1"], "--temperature: -1 must be a number, at least 0"),
        (["--temperature", "nan"], "--temperature: nan must be"),
        (["--temperature", "inf"], "--temperature: inf must be"),
        (["--temperature", "warm"], "--temperature: warm must be a number"),
        (["--top-k", "-1"], "--top-k: -1 must be a whole number, at least 0"),
        (["--top-k", "2.5"], "--top-k: 2.5 must be a whole number"),
        (["--top-p", "0"], "--top-p: 0 must be a number, above 0 and at most 1"),
        (["--top-p", "1.1"], "--top-p: 1.1 must be a number, above 0 and at most 1"),
        (["--min-p", "1.1"], "--min-p: 1.1 must be a number, at least 0 and at most 1"),
        (["--repetition-penalty", "0"], "--repetition-penalty: 0 must be a number, at least 0.01 and at most 100"),
        (["--max-new-tokens", "0"], "--max-new-tokens: 0 must be a whole number, at least 1"),
        (["--num-samples", "0"], "--num-samples: 0 must be a whole number, at least 1"),
        (["--seed", "-1"], "--seed: -1 must be a whole number, at least 0"),
        (["--seed", "9" * 30], "--seed: 9+ must be a whole number, .*at most"),
        (["--format", "xml"], "--format: .*'xml'.*text.*jsonl"),
        (["--stop", ""], "--stop: .*must not be empty"),
        (["--stop", os.fsdecode(b"\xff")], "--stop: .*not UTF-8"),
        (["--prompt", os.fsdecode(b"a\xff")], "--prompt: .*not UTF-8"),
        (
            ["--interactive", "--prompt", "a", "--num-samples=2", "--prompt-file", "-", "--attention", "a.html"],
            "--interactive answers .* takes no --prompt, --prompt-file, --num-samples, --attention$",
        ),
        (["runs/nowhere"], r"runs/nowhere does not exist; runs: runs/letters"),
        (["runs"], r"runs has no config\.toml, so it is no run; runs: runs/letters"),
        (["--checkpoint", "step-000009"], "runs/letters has no checkpoint step-000009; checkpoints: step-000001"),
        (["--prompt-file", "nowhere.txt"], r"--prompt-file nowhere\.txt cannot be read"),
        (["--prompt-file", "runs"], "--prompt-file runs cannot be read: Is a directory"),
        (
            ["--prompt-file", "latin.txt"],
            r"--prompt-file latin\.txt cannot be read: it is not UTF-8 \(byte 1 is 0xE9\)",
        ),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode()[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_sentence(letters, command, argv, says):
    (letters / "latin.txt").write_bytes("bé".encode("latin-1"))
    assert_refused(command(letters, *argv), says)


def test_f25_a_character_the_tokenizer_never_saw_is_named(workplace, command):
    assert_refused(command(workplace, "--prompt", "The zebra"), "'z'.*U\\+007A.*chars")


def test_f13_a_prompt_longer_than_learned_positions_is_refused_naming_the_limit(tmp_path, command):
    learned = build(position="learned", vocab_size=11, max_seq_len=16)
    save(tmp_path / "runs" / "learned", learned, CharTokenizer("abcdefghij"))
    assert_refused(command(tmp_path, "--prompt", "c" * 17), "17 tokens.*max_seq_len = 16")
    assert command(tmp_path, "--prompt", "c" * 16)[0] == 0


def test_a_file_of_sources_has_one_in_each_line(tmp_path, command):
    save(tmp_path / "runs" / "pairs", build(kind="encoder_decoder", vocab_size=11), CharTokenizer("abcdefghij"))
    (tmp_path / "sources.txt").write_text("abc\n\nde\n")
    lines = ("abc", "", "de")  # a blank one too, so that each translation stands in the line of its source
    one, blank, two = (command(tmp_path, "--prompt", text, "--max-new-tokens", "5")[1] for text in lines)
    assert command(tmp_path, "--prompt-file", "sources.txt", "--max-new-tokens", "5")[1] == one + blank + two


def test_a_source_longer_than_those_of_training_is_noted(tmp_path, command):
    model = build(kind="encoder_decoder", vocab_size=11, max_seq_len=8)
    save(tmp_path / "runs" / "pairs", model, CharTokenizer("abcdefghij"))
    for n, noted in ((7, False), (8, True)):
        _, _, err = command(tmp_path, "--prompt", "a" * n, "--max-new-tokens", "2")
        assert ("note: a source is longer than the 8 tokens that training had" in err) == noted


def test_a_text_without_its_option_is_told_where_it_belongs(letters, command):
    assert_refused(command(letters, "runs/letters", "Hello"), "Hello belongs to no option; a text comes after --prompt")


def test_an_encoder_decoder_needs_a_source_and_says_how_another_run_is_chosen(tmp_path, command):
    save(tmp_path / "runs" / "pairs", build(kind="encoder_decoder", vocab_size=11), CharTokenizer("abcdefghij"))
    (tmp_path / "empty.txt").write_text("\n")
    newest = (
        r"runs/pairs, the newest run, needs a source .*: --prompt TEXT, or name another run: python sample\.py RUN$"
    )
    assert_refused(command(tmp_path), newest)
    assert_refused(command(tmp_path, "--prompt-file", "empty.txt"), newest)
    assert_refused(command(tmp_path, "runs/pairs"), "runs/pairs needs a source to translate: --prompt TEXT$")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_f57_a_device_that_is_not_there_is_refused(letters, command):
    assert_refused(command(letters, "--device", "cuda"), "--device cuda is not available here; available: cpu")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def replace(old: str, new: str):
    def edit(path: Path) -> None:
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")

    return edit


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("best/weights.safetensors", truncate, r"weights\.safetensors is damaged"),
        ("best/weights.safetensors", flip, r"weights\.safetensors is damaged: its checksum"),
        ("best/weights.safetensors", Path.unlink, r"weights\.safetensors"),
        ("best/state.json", truncate, r"state\.json is damaged"),
        ("best/state.json", Path.unlink, r"state\.json"),
        ("step-000001", shutil.rmtree, r"runs/letters has no checkpoint yet"),
        ("tokenizer", shutil.rmtree, r"runs/letters/tokenizer does not hold a tokenizer"),
        ("tokenizer/tokenizer.json", truncate, r"runs/letters/tokenizer does not hold a tokenizer"),
        ("config.toml", replace("[model]", "[model"), r"runs/letters/config\.toml"),
        ("config.toml", replace("d_model", "d_modle"), r"runs/letters/config\.toml.*d_modle"),
        ("config.toml", replace("d_ff = 4", "d_ff = 8"), r"does not fit its config\.toml.*feed_forward"),
        ("config.toml", replace("n_layer = 1", "n_layer = 2"), r"does not fit its config\.toml.*blocks\.1"),
    ],
)
def test_a_damaged_run_is_refused_naming_what_is_damaged(letters, tmp_path, command, file, damage, says):
    shutil.copytree(letters / "runs", tmp_path / "runs", symlinks=True)
    damage(tmp_path / "runs" / "letters" / file)
    assert_refused(command(tmp_path, "runs/letters", "--prompt", "c"), says)


def test_a_run_whose_weights_diverged_is_refused(tmp_path, command):
    model = build(vocab_size=11)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    save(tmp_path / "runs" / "diverged", model, CharTokenizer("abcdefghij"))
    assert_refused(command(tmp_path, "--prompt", "c", "--max-new-tokens", "3"), "logits are not finite")


def test_a_run_that_has_only_begun_has_no_checkpoint(tmp_path, command):
    run = tmp_path / "runs" / "begun"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(Config(model=ModelConfig(vocab_size=11).resolve())), "utf-8")
    assert_refused(
        command(tmp_path, "runs/begun"),
        "runs/begun has no checkpoint yet; it goes on with:",
    )


# --- attention maps ---------------------------------------------------------------------------------------------------


def mapped(model, page: Page, index: int, weights) -> None:
    """That a map of a page shows these weights (H, T, S), to the nearest of its levels, and hides what has none."""
    cells = page.cells(index)[:-1]  # the last is the mean over heads
    assert cells.shape == weights.shape
    assert abs(np.where(cells == 255, 0, cells) / 254 - np.sqrt(weights)).max() < 0.501 / 254


def test_a_decoder_is_drawn_from_its_prompt_to_the_last_token_it_read(tmp_path, command):
    model, tokenizer = build(vocab_size=11, n_kv_head=2, window=3), CharTokenizer("abcdefghij")
    save(tmp_path / "runs" / "letters", model, tokenizer)
    argv = ["--prompt", "abcdea", "--max-new-tokens", "4", "--temperature", "0", "--num-samples", "2"]
    code, _, err = command(tmp_path, *argv, "--attention", "maps.html", "--stop", "zz")
    (new,) = generate(model, [[0, 1, 2, 3, 4, 0]], max_new_tokens=4, end_id=10, vocab_size=11)
    assert (code, "attention: maps.html" in err) == (0, True)
    page, reference = Page(tmp_path / "maps.html"), BruteForce(model)
    read = [0, 1, 2, 3, 4, 0, *new[:3]]
    reference.logits(read)
    assert [(drawn["kind"], drawn["layer"], drawn["n_kv_head"]) for drawn in page.data["maps"]] == [
        ("self-attention", layer, 2) for layer in range(model.config.n_layer)
    ]
    for layer, drawn in enumerate(page.data["maps"]):
        assert drawn["queries"] == drawn["keys"] == list(tokenizer.decode(read))
        mapped(model, page, layer, reference.maps[layer, "self"])
        hidden = [[not 0 <= t - s < 3 for s in range(len(read))] for t in range(len(read))]
        assert ((page.cells(layer) == 255) == hidden).all()  # the window's edge


def test_an_encoder_decoder_is_drawn_with_its_source(tmp_path, command):
    model = build(kind="encoder_decoder", n_encoder_layer=1, vocab_size=11, n_kv_head=2, seed=3)
    save(tmp_path / "runs" / "pairs", model, CharTokenizer("abcdefghij"))
    argv = ["--prompt", "abc", "--prompt", "e", "--max-new-tokens", "5", "--attention", "maps.html"]
    assert command(tmp_path, *argv)[0] == 0
    source = [0, 1, 2, 10]
    new = [id for _, id, _, _ in stream(model, [source], max_new_tokens=5, end_id=10)]
    page, reference = Page(tmp_path / "maps.html"), BruteForce(model)
    reference.logits([10, *new[:-1]], source)
    found = [(drawn["kind"].partition(" (")[0], drawn["layer"]) for drawn in page.data["maps"]]
    layers = range(model.config.n_layer)
    assert found == [
        ("encoder self-attention", 0),
        *(("self-attention", layer) for layer in layers),
        *(("cross-attention", layer) for layer in layers),
    ]
    letters = [*"abcdefghij", "<end>"]
    for index, ((kind, layer), drawn) in enumerate(zip(found, page.data["maps"], strict=True)):
        short = {"encoder self-attention": "encoder", "self-attention": "self", "cross-attention": "cross"}[kind]
        mapped(model, page, index, reference.maps[layer, short])
        texts = {"encoder": [*"abc", "<end>"], "self": ["<start>", *(letters[id] for id in new[:-1])]}
        texts["cross"] = [letters[id] for id in new]  # beside each row, what is written next
        assert drawn["queries"] == texts[short]
        assert drawn["keys"] == texts["self" if short == "self" else "encoder"]


def test_the_best_of_beams_is_drawn(tmp_path, command):
    model = build(kind="encoder_decoder", vocab_size=11, seed=6)
    save(tmp_path / "runs" / "pairs", model, CharTokenizer("abcdefghij"))
    argv = ["--prompt", "abc", "--beams", "3", "--max-new-tokens", "6", "--attention", "maps.html", "--format", "jsonl"]
    _, out, _ = command(tmp_path, *argv)
    drawn = Page(tmp_path / "maps.html").data["maps"][-1]
    assert drawn["queries"] == [[*"abcdefghij", "<end>"][id] for id in json.loads(out)["tokens"]]


def test_parts_of_a_character_are_named_by_their_bytes(tmp_path, command):
    save(tmp_path / "runs" / "bytes", build(vocab_size=257, n_layer=1), ByteTokenizer())
    assert command(tmp_path, "--prompt", "a별", "--max-new-tokens", "1", "--attention", "maps.html")[0] == 0
    assert Page(tmp_path / "maps.html").data["maps"][0]["queries"] == ["a", "eb", "b3", "84"]


def test_a_picture_that_cannot_be_drawn_is_refused_in_a_sentence(letters, command):
    assert_refused(command(letters, "--attention", "maps.jpg"), r"--attention: maps\.jpg must end in \.html or \.png")
    assert_refused(command(letters, "--attention", "nowhere/maps.png"), "--attention: there is no folder nowhere")


# --- compilation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch) -> list:
    """What would have been compiled; compilers work."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: found.append(function) or function)
    monkeypatch.setattr(compiling, "compiler_missing", lambda: False)
    monkeypatch.setattr(compiling, "compiler_works", lambda: True)
    return found


@pytest.mark.parametrize(
    ("words", "compiles"),
    [
        ("", False),
        ("--max-new-tokens 19999", False),
        ("--max-new-tokens 20000 --prompt a", True),
        ("--max-new-tokens 20000 --interactive", True),
        ("--max-new-tokens 20000", False),  # three samples
        ("--max-new-tokens 20000 --prompt a --prompt b", False),
        ("--max-new-tokens 20000 --prompt a --num-samples 2", False),
        ("--max-new-tokens 20000 --prompt a --num-samples 2 --temperature 0", True),
        ("--max-new-tokens 20000 --prompt a --compile off", False),
        ("--max-new-tokens 20000 --prompt a --no-cache", False),
        ("--max-new-tokens 20000 --prompt a --beams 2", False),
        ("--compile on", True),
        ("--compile on --interactive", True),
    ],
)
def test_what_is_long_is_compiled_or_what_is_asked_for(words, compiles, letters, command, compilations):
    code, out, err = command(letters, "runs/letters", *words.split(), input=b"a\n")
    assert code == 0
    assert out.startswith("abcdefghij")
    assert ("note: compiled" in err) == compiles
    assert len(compilations) == compiles


@pytest.mark.parametrize(("missing", "works"), [(True, True), (False, False)])
def test_without_a_compiler_auto_goes_on_and_on_is_refused(missing, works, letters, command, compilations, monkeypatch):
    monkeypatch.setattr(compiling, "compiler_missing", lambda: missing)
    monkeypatch.setattr(compiling, "compiler_works", lambda: works)
    assert command(letters, "--max-new-tokens", "20000", "--prompt", "ab")[:2] == (0, "abcdefghij\n")
    assert_refused(command(letters, "--compile", "on"), r"needs a C\+\+ compiler that works, g\+\+ or clang\+\+")
    assert compilations == []


@pytest.mark.parametrize("words", ["--no-cache", "--beams 2"])
def test_what_cannot_be_compiled_is_refused(words, letters, command, compilations):
    says = "--compile on needs a decoder, a CPU, the cache and no beams"
    assert_refused(command(letters, "--compile", "on", *words.split()), says)
