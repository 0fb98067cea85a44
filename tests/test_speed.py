"""How fast this machine trains and generates: what is counted, by hand, and what is told."""

import re
import time

import pytest
import torch

import bench
import speed
import train
from model import build_model
from tests.training import PAIRS, settings, weights

SHAPE = {"vocab_size": 11, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "head_dim": 3, "d_model": 8, "d_ff": 10}
# In each row of 5 tokens, by hand. A layer: queries 8 x 6, keys and values 8 x 3 each, back 6 x 8; feed-forward two or
# (swiglu) three times 8 x 10; the head 8 x 11. A pair of query and key: 6 multiplications each for score and value.
ATTENTION, LOOK = 48 + 24 + 24 + 48, 2 * 6


@pytest.mark.parametrize(
    ("model", "multiplications"),
    [
        ({"activation": "gelu"}, 5 * (2 * (ATTENTION + 160) + 88) + 2 * 15 * LOOK),
        ({"activation": "swiglu", "tie_embeddings": False}, 5 * (2 * (ATTENTION + 240) + 88) + 2 * 15 * LOOK),
        ({"activation": "gelu", "window": 2}, 5 * (2 * (ATTENTION + 160) + 88) + 2 * 9 * LOOK),
        (  # an encoder of one layer; each layer of the decoder has two attentions, one causal
            {**PAIRS, "n_encoder_layer": 1, "activation": "relu"},
            5 * (ATTENTION + 160 + 2 * (2 * ATTENTION + 160) + 88) + (25 + 2 * (15 + 25)) * LOOK,
        ),
    ],
    ids=["decoder", "gated", "window", "encoder-decoder"],
)
def test_operations_are_those_counted_by_hand(model, multiplications):
    model = build_model(settings(model={**SHAPE, "position": "none", **model}).model)
    assert speed.step_flops(model, rows=3, length=5) == 3 * 2 * 3 * multiplications


def make_trainer(**sections) -> train.Trainer:
    config = settings(**sections)
    corpus = speed.random_corpus(config)
    config = config.model_copy(update={"model": train.resolve_model(config.model, corpus)})
    return train.Trainer(config, None, corpus, train.Machine("cpu", torch.float32, False))


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.03)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.05)
        return gradient


def slow(part: str, trainer: train.Trainer) -> None:
    """Makes one part of a trainer take 80 ms more a step: 30 forward, 50 backward."""
    block = trainer.model.decoder.blocks[0]
    if part == "attention":
        kernel = block.attention.kernel
        block.attention.kernel = lambda *arguments: Sleep.apply(kernel(*arguments))
    elif part == "projections":
        project = block.attention.k_proj.forward
        block.attention.k_proj.forward = lambda x: Sleep.apply(project(x))
    elif part == "feed-forward":
        activation = block.feed_forward.activation
        block.feed_forward.activation = lambda x: Sleep.apply(activation(x))
    elif part == "loss":
        head = trainer.model.lm_head.forward
        trainer.model.lm_head.forward = lambda x: Sleep.apply(head(x))
    elif part == "optimizer":
        trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(0.08))
    else:
        norm = block.feed_forward_norm.forward
        block.feed_forward_norm.forward = lambda x: Sleep.apply(norm(x))


@pytest.mark.parametrize("model", [{}, PAIRS], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("part", speed.PARTS)
def test_what_takes_long_is_found_in_its_part_forward_and_backward(part, model, monkeypatch):
    monkeypatch.setattr(speed, "STEPS", 2)
    trainer = make_trainer(model=model)
    slow(part, trainer)
    found = speed.step_parts(trainer)
    assert list(found) == list(speed.PARTS)
    assert found[part] >= 0.079
    assert found[part] > 2 * (sum(found.values()) - found[part])


@pytest.mark.parametrize("model", [{"n_kv_head": 1, "qk_norm": True}, PAIRS], ids=["decoder", "encoder-decoder"])
def test_turns_come_back_in_the_opposite_order_and_change_no_number(model, monkeypatch):
    monkeypatch.setattr(speed, "STEPS", 1)
    # With swiglu after "post" three gradients meet at one place, and two of them are added before: another rounding.
    sections = {"model": {**model, "n_layer": 3, "activation": "relu"}}
    one, other, turns = make_trainer(**sections), make_trainer(**sections), []
    forward, backward = speed.Turn.forward, speed.Turn.backward
    monkeypatch.setattr(speed.Turn, "forward", lambda ctx, *rest: (turns.append(rest[1:3]), forward(ctx, *rest))[1])
    monkeypatch.setattr(speed.Turn, "backward", lambda ctx, *rest: (turns.append(ctx.before), backward(ctx, *rest))[1])
    speed.step_parts(one)
    there = [turn for turn in turns if isinstance(turn, tuple)]
    back = [turn for turn in turns if isinstance(turn, str)]
    half = len(there) // 2  # of two steps
    assert back == [before for before, _ in reversed(there[:half])] * 2
    assert all(before != after and "rest" in (before, after) for before, after in there)
    for _ in range(2):
        other.step()
    for name, value in weights(other).items():
        assert torch.equal(value, weights(one)[name]), name


TINY = "--model.n-layer 1 --model.d-model 32 --model.n-head 2 --model.d-ff 32 --train.batch-size 4 --train.device cpu"


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ("--model.n-kv-head 1 --train.dtype bfloat16", "4 x 256 tokens, 4 at a time"),
        ("shakespeare_char --train.micro-batch-size 2", "4 x 1024 tokens, 2 at a time"),
        ("gpt2_124m --train.micro-batch-size 2 --model.vocab-size 300 --model.max-seq-len 1", "4 x 1 tokens, 2 at a"),
        ("numbers --data.bpe-vocab-size 258", "4 x 32 tokens after sources of 32, 4 at a time"),
        ("translate --data.bpe-vocab-size 258 --model.max-seq-len 7", "4 x 3 tokens after sources of 3, 4 at a time"),
    ],
)
def test_a_step_of_any_preset_is_measured_and_nothing_is_left_behind(words, batch, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bench.main(["train", *words.split(), *TINY.split(), "--train.compile", "off"])
    out = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert out.startswith("device cpu, ")
    assert f"batch              {batch}" in out
    assert re.search(r"\nparameters +[\d,]+\n", out)
    slow, fast = (int(number.replace(",", "")) for number in re.search(r"steps \((\S+) to (\S+)\)\n", out).groups())
    middle = int(re.search(r"\ntokens per second +(\S+), the median of 7", out)[1].replace(",", ""))
    assert 0 < slow <= middle <= fast
    measured, peak, share = re.search(
        r" a step, (\S+) TFLOP/s\n.* +(\S+) TFLOP/s at best.*\n.* +(\S+)%\n", out
    ).groups()
    assert float(share) == pytest.approx(100 * float(measured) / float(peak), abs=0.1)
    rows = re.findall(r"^  (\S+) +([\d.]+)% +[\d.,]+ ms", out, re.M)
    assert [part for part, _ in rows] == list(speed.PARTS)
    assert sum(float(share) for _, share in rows) == pytest.approx(100, abs=0.4)


# --- generation -----------------------------------------------------------------------------------------------------

# Two layers of the shape above: matrices of attention and of feed-forward (gated: three of 8 x 10), gains of 8.
WEIGHTS = 2 * (ATTENTION + 240 + 2 * 8) + 8 + 88


@pytest.mark.parametrize(
    ("model", "weights_read", "tokens_seen"),
    [  # prompts of 4 and 8 tokens, and what is read to write a second, third and fourth token
        ({}, WEIGHTS, [5 + 9, 6 + 10, 7 + 11]),
        ({"tie_embeddings": False}, WEIGHTS, [5 + 9, 6 + 10, 7 + 11]),
        ({"position": "learned", "max_seq_len": 16}, WEIGHTS, [5 + 9, 6 + 10, 7 + 11]),
        ({"window": 6}, WEIGHTS, [5 + 6, 6 + 6, 6 + 6]),
        (  # with biases; the source's keys and values were made once, and are looked at whole
            {**PAIRS, "n_encoder_layer": 1},
            2 * (ATTENTION + 20 + 48 + 6 + 48 + 8 + 240 + 28 + 3 * 16) + 88,
            [2 + 2 + 12, 3 + 3 + 12, 4 + 4 + 12],
        ),
    ],
    ids=["tied", "untied", "learned", "window", "encoder-decoder"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_step_are_those_counted_by_hand(model, weights_read, tokens_seen, dtype):
    model = build_model(settings(model={**SHAPE, "position": "none", **model}).model).to(dtype)
    found = speed.bytes_per_step(model, [[0] * 4, [0] * 8], n_new=4)
    size, a_token = dtype.itemsize, 2 * 2 * 1 * 3  # keys and values of a layer's only head
    assert found == (size * weights_read, pytest.approx(size * a_token * sum(tokens_seen) / 3))


def test_prompts_are_as_long_as_asked_and_others_evenly_shorter():
    model = build_model(settings(model={**SHAPE, "position": "none"}).model)
    assert [len(prompt) for prompt in speed.random_prompts(model, 64, 1)] == [64]
    assert [len(prompt) for prompt in speed.random_prompts(model, 64, 4)] == [16, 32, 48, 64]
    assert [len(prompt) for prompt in speed.random_prompts(model, 2, 4)] == [1, 1, 1, 2]


def decode(capsys, *words: str) -> tuple[dict[str, list[float]], str]:
    """What `bench.py decode` tells: the numbers of each way to write, by name, and all of it."""
    bench.main(["decode", *words])
    out = capsys.readouterr().out
    rows = re.findall(r"^((?:byeol|transformers).*?) {2,}([\d., %]+)$", out, re.M)
    return {name: [float(n.strip("%").replace(",", "")) for n in numbers.split()] for name, numbers in rows}, out


SMALL = (
    "--model.n-layer 2 --model.d-model 32 --model.n-head 2 --model.d-ff 48 --model.max-seq-len 64 "
    "--data.tokenizer bytes"
)


def test_a_preset_is_measured_beside_transformers_without_cache_and_drawn(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    picture, preset = tmp_path / "times.png", "config/llama3_tiny.toml"
    options = f"--prompt 10 --new 6 --rounds 2 --recompute --picture {picture}".split()
    rows, out = decode(capsys, preset, *SMALL.split(), "--model.n-kv-head", "1", *options)
    names = ["byeol", "byeol, recomputing everything", "transformers, dynamic cache", "transformers, static cache"]
    assert list(rows) == names
    for name, (first, prefill, step, in_all, *share) in rows.items():
        assert prefill == pytest.approx(10 / first * 1000, rel=0.2)  # of a time in tenths of milliseconds
        assert 1 / in_all == pytest.approx((first / 1000 + 5 / step) / 6, rel=0.2)
        assert bool(share) == (name != "byeol, recomputing everything")
    weights_mb, cache_mb = map(float, re.search(r"a step +([\d.]+) MB of weights, ([\d.]+) MB", out).groups())
    bandwidth = float(re.search(r"memory bandwidth +([\d.]+) GB/s", out)[1])
    share = (weights_mb + cache_mb) / 1000 * rows["byeol"][2] / bandwidth
    assert rows["byeol"][4] == pytest.approx(100 * share, rel=0.5, abs=0.06)  # of megabytes in tenths
    assert f"{2 * 2 * 1 * 16 * 15 * 4:,} bytes for 1 x 15 tokens in 2 layers" in out  # two, layers, heads, width, slots
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", ["config/mistral_tiny.toml --model.window 4", "config/numbers.toml"])
def test_many_rows_are_also_written_one_by_one(words, capsys):
    rows, out = decode(
        capsys, *words.split(), *SMALL.split(), *["--prompt", "9", "--new", "3", "--rows", "3", "--rounds", "1"]
    )
    assert list(rows) == ["byeol", "byeol, one by one"]
    assert [len(numbers) for numbers in rows.values()] == [5, 4]
    assert ("for 3 x 4 tokens" if "window" in words else "for 3 x 3 tokens") in out


def test_an_end_of_text_ends_no_measurement(capsys, monkeypatch):
    counts = []

    def count(model, prompts, **options):
        events = list(stream(model, prompts, **options))
        counts.append((options["max_new_tokens"], len(events)))
        return iter(events)

    stream = speed.stream
    monkeypatch.setattr(speed, "stream", count)
    rows, _ = decode(capsys, "config/reverse.toml", *SMALL.split(), *["--prompt", "5", "--new", "90", "--rounds", "1"])
    assert list(rows) == ["byeol"]
    assert all(asked == written for asked, written in counts)


def test_a_token_that_takes_long_is_found(capsys, monkeypatch):
    def slowly(*arguments, **options):
        for event in stream(*arguments, **options):
            time.sleep(0.05)
            yield event

    stream = speed.stream
    monkeypatch.setattr(speed, "stream", slowly)
    monkeypatch.setattr(speed, "transformers_ways", lambda *_: [])
    rows, _ = decode(capsys, "config/numbers.toml", *SMALL.split(), *["--new", "4", "--rounds", "1"])
    first, _, step, in_all, _ = rows["byeol"]
    assert first > 50
    assert max(step, in_all) < 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prompt 0", "--prompt must be at least 1, not 0"),
        ("config/stories.toml --device mps", "--device mps is not available here"),
        ("config/stories.toml --picture none/a.png", "there is no folder none"),
        (
            "config/gpt2_124m.toml --model.vocab-size 300 --model.n-layer 1 --prompt 64 --new 1000",
            "needs 1063 positions",
        ),
        ("--new 1", "--new must be at least 2, not 1"),
        ("--rows 0", "--rows must be at least 1"),
        ("--rounds 0", "--rounds must be at least 1"),
        ("--picture a.svg", "a.svg must end in .png"),
        ("runs/none", "runs/none"),
        ("runs/none --model.window 4", "--model.window is not an option"),
        ("config/stories.toml --ruonds 4", "--ruonds is not an option; did you mean --rounds?"),
        ("--model.window 4 config/stories.toml", "--model.window is not an option"),
        ("runs/none 4", "4 belongs to no option"),
        ("config/none.toml", "config/none.toml"),
        ("config/stories.toml --model.windw 4", "did you mean"),
        ("config/gpt2_124m.toml", "give model.vocab_size"),
        ("config/gpt2_124m.toml --model.vocab-size 300 --model.n-layer 1 --prompt 2000", "max_seq_len = 1024"),
    ],
)
def test_mistakes_of_decode_are_sentences(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["decode", *words.split()])
    assert stopped.value.code != 0
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert "usage" not in err
