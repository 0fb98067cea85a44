"""What a run is measured by."""

import math
import random
import re
import time
from itertools import islice

import numpy as np
import pytest
import torch

import bench
import train
from checkpoint import load_model
from data.prepare import prepare
from data.stories import minimal_pairs
from model import build_model
from tests.training import PAIRS, Place, metrics, settings, weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run on stories, and the folder it was trained in."""
    place = Place(tmp_path_factory.mktemp("bench"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        patch.setattr(train, "loss_curve", lambda *arguments: None)
        data = {"source": "stories", "tokenizer": "bpe", "bpe_vocab_size": 500, "max_tokens": 30_000}
        place.write_preset(data=data, model={"max_seq_len": 64}, train={"steps": 20, "eval_interval": 20})
        place.train()
        yield place.folder / "runs/tiny"


def test_the_report_has_the_run_s_own_losses(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    bench.main(["stories", str(run), "--stories", "3", "--pairs", "4"])
    out = capsys.readouterr().out
    values = metrics(run)[-1]
    lines = out.splitlines()
    for name, title in (("val", "new stories"), ("held_out", "held-out combinations")):
        first = next(number for number, line in enumerate(lines) if line.startswith(title))
        rows = [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in lines[first + 1 : first + 4]]
        (english, english_floor, *_), (korean, korean_floor, *_), both = rows
        assert (english, korean) == pytest.approx((values[f"{name}_english"], values[f"{name}_korean"]), abs=0.01)
        assert both[0] == pytest.approx(english + korean, abs=0.02)
        assert both[1] == pytest.approx(english_floor + korean_floor, abs=0.02)
        assert both[2:4] == pytest.approx([values[f"{name}_loss"], values[f"{name}_floor"]], abs=1e-4)
        assert both[4] == pytest.approx(values[f"{name}_bits_per_byte"], abs=1e-4)
        assert both[6] == pytest.approx(100 * (both[0] / both[1] - 1), rel=1e-3)
        # the two languages together are all: tokens and bytes weigh them
        assert min(rows[0][2], rows[1][2]) < both[2] < max(rows[0][2], rows[1][2])
        assert min(rows[0][4], rows[1][4]) < both[4] < max(rows[0][4], rows[1][4])
    assert re.search(r"valid stories +0.0%   0 of 3\n", out)
    assert re.search(r"the right line likelier +[\d.]+%   [0-4] of 4\n", out)


def test_the_training_text_is_read_back_as_documents(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    _, tokenizer, config = load_model(run)
    corpus = prepare(config.data)
    texts = [tokenizer.decode(document.tolist()) for document in bench.documents(corpus, corpus.train)]
    assert len(texts) == corpus.train.n_documents
    whole = tokenizer.decode(corpus.train.tokens.tolist())
    assert all(text in whole for text in texts)
    assert sum(len(text.encode()) for text in texts) == corpus.train.n_bytes


class Oracle(torch.nn.Module):
    """Bytes that follow the right (or the wrong) continuation of a minimal pair with certainty, nearly."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def forward(self, tokens):
        text = bytes(id for id in tokens[0].tolist() if id < 256)
        known = next((known for known in self.texts if known.startswith(text[:200]) and text[:-9] in known), None)
        logits = torch.zeros(1, tokens.shape[1], 257)
        if known:
            for place in range(min(tokens.shape[1], len(known))):
                logits[0, place, known[place]] = 5.0
        return logits


@pytest.mark.parametrize(("choice", "expected"), [(1, 20), (2, 0)])
def test_the_likelier_continuation_is_counted(choice, expected):
    from data.tokenizer import ByteTokenizer

    pairs = list(islice(minimal_pairs(random.Random(3)), 20))
    texts = [(pair[0] + pair[choice] + "\n").encode() for pair in pairs]
    assert bench.count_preferred(Oracle(texts), ByteTokenizer(), 20, seed=3) == expected


def test_log_probabilities_are_those_of_the_second_text(run):
    model, tokenizer, _ = load_model(run)
    pairs = [("Mina was happy.\n", "미나는 행복했다.\n"), ("One.\n", "둘.\n셋.\n")]
    found = bench.log_probs(model, tokenizer, pairs)
    for (context, text), value in zip(pairs, found.tolist(), strict=True):
        first, second = tokenizer.encode(context), tokenizer.encode(text)
        expected = 0.0
        for n in range(len(second)):  # one token at a time, in float64
            logits = model(torch.tensor([[tokenizer.end_id, *first, *second[:n]]]))[0, -1].detach().numpy()
            logits = logits.astype(np.float64)
            expected += logits[second[n]] - math.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required"),
        (["stories", "--stories", "0"], "--stories must be at least 1, not 0"),
        (["stories", "nowhere"], "nowhere does not exist"),
        (["loss"], "invalid choice"),
        (["train", "--train.batch-sise", "2"], "did you mean --train.batch-size?"),
        (["train", "nowhere.toml"], "there is no nowhere.toml"),
        (["train", "gpt2_124m"], "the tokenizer gpt2 alone knows how large its vocabulary is: give model.vocab_size"),
        (["train", "numbers", "--data.tokenizer", "gpt2"], "is: give model.source_vocab_size"),
        (["train", "numbers", "--data.target-tokenizer", "gpt2"], "is: give model.vocab_size"),
        (["train", "translate", "--model.source-vocab-size", "9"], "needs a data.target_tokenizer"),
        (["train", "--model.vocab-size", "2147483647", "--model.d-model", "1048576"], "not enough memory"),
    ],
)
def test_mistakes_are_sentences(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        bench.main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_on_another_text_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "loss_curve", lambda *arguments: None)
    place = Place(tmp_path)
    place.write_preset(train={"steps": 1})
    place.train()
    with pytest.raises(SystemExit):
        bench.main(["stories", "runs/tiny"])
    assert "data.source = text.txt; name a run on stories" in capsys.readouterr().err


def test_a_run_on_other_stories_is_refused(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    monkeypatch.setattr(bench, "read_state", lambda *_: {"corpus": "of other words"})
    with pytest.raises(SystemExit):
        bench.main(["stories", str(run)])
    assert "is no longer what" in capsys.readouterr().err


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
    assert bench.step_flops(model, rows=3, length=5) == 3 * 2 * 3 * multiplications


def make_trainer(**sections) -> train.Trainer:
    config = settings(**sections)
    corpus = bench.random_corpus(config)
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
@pytest.mark.parametrize("part", bench.PARTS)
def test_what_takes_long_is_found_in_its_part_forward_and_backward(part, model, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", 2)
    trainer = make_trainer(model=model)
    slow(part, trainer)
    found = bench.step_parts(trainer)
    assert list(found) == list(bench.PARTS)
    assert found[part] >= 0.079
    assert found[part] > 2 * (sum(found.values()) - found[part])


@pytest.mark.parametrize("model", [{"n_kv_head": 1, "qk_norm": True}, PAIRS], ids=["decoder", "encoder-decoder"])
def test_turns_come_back_in_the_opposite_order_and_change_no_number(model, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", 1)
    # With swiglu after "post" three gradients meet at one place, and two of them are added before: another rounding.
    sections = {"model": {**model, "n_layer": 3, "activation": "relu"}}
    one, other, turns = make_trainer(**sections), make_trainer(**sections), []
    forward, backward = bench.Turn.forward, bench.Turn.backward
    monkeypatch.setattr(bench.Turn, "forward", lambda ctx, *rest: (turns.append(rest[1:3]), forward(ctx, *rest))[1])
    monkeypatch.setattr(bench.Turn, "backward", lambda ctx, *rest: (turns.append(ctx.before), backward(ctx, *rest))[1])
    bench.step_parts(one)
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
    speed, peak, share = re.search(r" a step, (\S+) TFLOP/s\n.* +(\S+) TFLOP/s at best.*\n.* +(\S+)%\n", out).groups()
    assert float(share) == pytest.approx(100 * float(speed) / float(peak), abs=0.1)
    rows = re.findall(r"^  (\S+) +([\d.]+)% +[\d.,]+ ms", out, re.M)
    assert [part for part, _ in rows] == list(bench.PARTS)
    assert sum(float(share) for _, share in rows) == pytest.approx(100, abs=0.4)
