"""python sample.py: what it prints where, and what it says to those who ask for the impossible.

A process costs seconds before its first line, so most tests run the same file as `__main__` in this one.
"""

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
from checkpoint import link, load_model, save_checkpoint
from config import Config, ModelConfig, to_toml
from data.tokenizer import ByteTokenizer, CharTokenizer, train_tokenizer
from generation import generate, stream
from tests.helpers import BruteForce, assert_close, build
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


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    """A folder whose one run says the alphabet from a to j, then ends."""
    folder = tmp_path_factory.mktemp("letters")
    save(folder / "runs" / "letters", alphabet_model(11), CharTokenizer("abcdefghij"))
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs sample.py as `__main__` in a folder: (exit code, standard output, standard error)."""

    def run(cwd: Path, *argv: str) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["sample.py", *argv])
        code = 0
        try:
            runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


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
    assert re.fullmatch(r"note: .*16 tokens.*\n", result.stderr)


def test_f31_korean_goes_in_and_out_whatever_the_console(workplace, command):
    argv = ["--prompt", "고양이 🎉", "--stop", "다", "--max-new-tokens", "40", "--temperature", "2"]
    result = process("sample.py", *argv, cwd=workplace, LC_ALL="C", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("고양이 🎉")
    assert (0, result.stdout, result.stderr) == command(workplace, *argv)


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


def test_the_first_sample_is_printed_as_it_comes_the_others_in_their_turn(capsys):
    tokenizer, printed = CharTokenizer("abc"), []

    def events():
        for event in [(0, 0, None), (1, 1, None), (0, 1, None), (1, 2, "length"), (0, 2, "length"), (2, 0, "length")]:
            yield *event[:2], 0.0, event[2]
            printed.append(capsys.readouterr().out)

    sample.print_text(events(), ["x", "y", "z"], tokenizer, [])
    assert printed == ["xa", "", "b", "", "c\n\nybc\n\nz", "a\n"]


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
    assert command(tmp_path, "moved", *argv) == there


def test_f13_the_notice_about_the_trained_length_comes_only_when_it_may_be_passed(workplace, command, tmp_path):
    assert command(workplace, "--prompt", "The", "--max-new-tokens", "13")[2] == ""
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
        (["runs/nowhere"], r"runs/nowhere does not exist; runs: runs/letters"),
        (["runs"], r"runs has no config\.toml, so it is no run; runs: runs/letters"),
        (["--checkpoint", "step-000009"], "runs/letters has no checkpoint step-000009; checkpoints: step-000001"),
        (["--prompt-file", "nowhere.txt"], r"--prompt-file nowhere\.txt cannot be read"),
        (["--prompt-file", "latin.txt"], r"--prompt-file latin\.txt cannot be read.*utf-8"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode()[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_sentence(letters, command, argv, says):
    (letters / "latin.txt").write_bytes("é".encode("latin-1"))
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
    one, two = (command(tmp_path, "--prompt", text, "--max-new-tokens", "5")[1] for text in ("abc", "de"))
    assert command(tmp_path, "--prompt-file", "sources.txt", "--max-new-tokens", "5")[1] == one + two


def test_a_source_longer_than_those_of_training_is_noted(tmp_path, command):
    model = build(kind="encoder_decoder", vocab_size=11, max_seq_len=8)
    save(tmp_path / "runs" / "pairs", model, CharTokenizer("abcdefghij"))
    for n, noted in ((7, False), (8, True)):
        _, _, err = command(tmp_path, "--prompt", "a" * n, "--max-new-tokens", "2")
        assert ("note: a source is longer than the 8 tokens that training had" in err) == noted


def test_a_text_without_its_option_is_told_where_it_belongs(letters, command):
    assert_refused(command(letters, "runs/letters", "Hello"), "Hello belongs to no option; a text comes after --prompt")


def test_an_encoder_decoder_needs_a_source(tmp_path, command):
    save(tmp_path / "runs" / "pairs", build(kind="encoder_decoder", vocab_size=11), CharTokenizer("abcdefghij"))
    assert_refused(command(tmp_path), "needs a source to translate: --prompt TEXT")


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
        ("step-000001", shutil.rmtree, r"runs/letters has no checkpoint best; checkpoints: none"),
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
    assert_refused(command(tmp_path, "runs/begun"), "runs/begun has no checkpoint best; checkpoints: none")


# --- attention maps -------------------------------------------------------------------------------------------------


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


def test_tokens_are_labelled_by_the_tokenizer_of_their_side():
    model = build(kind="encoder_decoder", vocab_size=4, source_vocab_size=257, n_layer=1, n_encoder_layer=1)
    maps = sample.maps_to_draw(model, [*b"cab", 256], [0, 1, 3], CharTokenizer("가나다"), ByteTokenizer())
    texts = {one.kind.split()[0]: (one.queries, one.keys) for one in maps}
    source, target = [*"cab", "<end>"], ["<start>", "가", "나"]
    assert texts == {
        "encoder": (source, source),
        "self-attention": (target, target),
        "cross-attention": (["가", "나", "<end>"], source),
    }


def test_the_best_of_beams_is_drawn(tmp_path, command):
    model = build(kind="encoder_decoder", vocab_size=11, seed=6)
    save(tmp_path / "runs" / "pairs", model, CharTokenizer("abcdefghij"))
    argv = ["--prompt", "abc", "--beams", "3", "--max-new-tokens", "6", "--attention", "maps.html", "--format", "jsonl"]
    _, out, _ = command(tmp_path, *argv)
    drawn = Page(tmp_path / "maps.html").data["maps"][-1]
    assert drawn["queries"] == [[*"abcdefghij", "<end>"][id] for id in json.loads(out)["tokens"]]


def test_a_long_text_is_drawn_as_far_as_it_is_legible(tmp_path, monkeypatch, capsys):
    """The weights are those of the whole text all the same: an encoder looks at what is not drawn, too."""
    monkeypatch.setattr("sample.MAPPED", 5)
    model, tokenizer = (
        build(kind="encoder_decoder", n_encoder_layer=1, vocab_size=11, seed=3),
        CharTokenizer("abcdefghij"),
    )
    prompt, new = [0, 1, 2, 3, 4, 5, 6, 10], [7, 6, 5, 4, 3, 2, 1]
    maps, reference = sample.maps_to_draw(model, prompt, new, tokenizer, tokenizer), BruteForce(model)
    reference.logits([10, *new[:-1]], prompt)
    assert [one.queries for one in maps if one.kind.startswith("cross")] == [list("hgfed")] * 2
    assert [one.queries for one in maps if one.kind == "self-attention"] == [["<start>", *"hgfe"]] * 2
    for one, (layer, kind) in zip(
        maps, [(0, "encoder"), (0, "self"), (0, "cross"), (1, "self"), (1, "cross")], strict=True
    ):
        assert_close(one.weights, reference.maps[layer, kind][:, :5, :5])
        assert one.keys == (["<start>", *"hgfe"] if kind == "self" else list("abcde"))
    assert sample.labels([10], tokenizer) == ["<end>"]  # an empty source
    sample.draw_attention(tmp_path / "maps.html", maps, "a title")
    assert "shows no more than 5 tokens" in capsys.readouterr().err


def test_parts_of_a_character_are_named_by_their_bytes(tmp_path, command):
    save(tmp_path / "runs" / "bytes", build(vocab_size=257, n_layer=1), ByteTokenizer())
    assert command(tmp_path, "--prompt", "a별", "--max-new-tokens", "1", "--attention", "maps.html")[0] == 0
    assert Page(tmp_path / "maps.html").data["maps"][0]["queries"] == ["a", "eb", "b3", "84"]


def test_a_picture_that_cannot_be_drawn_is_refused_in_a_sentence(letters, command):
    assert_refused(command(letters, "--attention", "maps.jpg"), r"--attention: maps\.jpg must end in \.html or \.png")
    assert_refused(command(letters, "--attention", "nowhere/maps.png"), "--attention: there is no folder nowhere")
