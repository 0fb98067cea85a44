"""What a run is measured by."""

import math
import random
import re
from itertools import islice

import numpy as np
import pytest
import torch

import bench
import train
from checkpoint import load_model
from data.prepare import prepare
from data.stories import minimal_pairs
from tests.training import Place, metrics


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
