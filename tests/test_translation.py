"""Encoder-decoders from pairs to translations: what is fed, what is graded, and what is said of the result."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from torch._dynamo.testing import CompileCounter

import bench
import progress
import sample
import train
from checkpoint import load_model, load_source_tokenizer
from config import UserError
from data.loader import IGNORE, Pairs
from data.prepare import prepare
from data.tokenizer import ByteTokenizer
from generation import beam_search, generate
from model import EncoderDecoder
from tests.helpers import BruteForce
from tests.test_train import cross_entropies, run_with_stops, signals, weights  # noqa: F401
from tests.training import (
    PAIRS,
    FixedBatch,
    Place,
    Stopper,
    assert_same_run,
    make_trainer,
    metrics,
    pair_corpus,
    write_pairs,
)
from translation import compare, translate

WIDE = {**PAIRS, "max_seq_len": 64}
BIG = {**WIDE, "n_layer": 2, "d_model": 32, "d_ff": 32}


@pytest.fixture
def corpus(tmp_path):
    return pair_corpus(tmp_path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "loss_curve", lambda *arguments: None)
    write_pairs(tmp_path / "pairs.tsv")
    return Place(tmp_path)


def pair_texts(pairs: Pairs, tokenizer, source_tokenizer) -> list[tuple[str, str]]:
    return [(source_tokenizer.decode(pairs.source(i)), tokenizer.decode(pairs.target(i))) for i in range(len(pairs))]


def rough(trainer, std: float = 0.3):
    """Weights that are not near their beginning, where much goes unnoticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.normal_(0, std)
    return trainer


def by_hand(model, source: list[int], target: list[int], end_id: int) -> np.ndarray:
    """The nats of each token of a target and of its end, in float64, of the pair alone."""
    logits = BruteForce(model).logits([end_id, *target], source)
    return cross_entropies(logits, [*target, end_id])


def test_a_step_grades_the_targets_of_each_pair_as_if_it_were_alone(corpus):
    trainer = rough(make_trainer(corpus, model=BIG))
    source, inputs, lengths, targets = trainer.batches.batch(0)
    assert (source == 0).any() or len(set(lengths.tolist())) == 1
    nats = []
    for row in range(4):
        n = int((targets[row] != IGNORE).sum())
        ids = targets[row, :n].tolist()
        assert ids[-1] == inputs[row, 0] == source[row, lengths[row] - 1] == 256  # the start is the end of a text
        assert inputs[row, 1:n].tolist() == ids[:-1]
        nats.append(by_hand(trainer.model, source[row, : lengths[row]].tolist(), ids[:-1], 256))
    values = trainer.step()
    assert values["loss"] == pytest.approx(np.concatenate(nats).mean(), rel=1e-5)
    assert trainer.state.tokens == sum(map(len, nats))


def test_what_pads_a_source_or_a_target_does_not_count(corpus):
    source, inputs = (
        torch.tensor([[5, 6, 256, 0, 0], [7, 256, 0, 0, 0]]),
        torch.tensor([[256, 1, 2, 0], [256, 3, 0, 0]]),
    )
    targets = torch.tensor([[1, 2, 256, IGNORE], [3, 256, IGNORE, IGNORE]])
    lengths, found = torch.tensor([3, 2]), []
    for filling in (0, 99):
        trainer = rough(make_trainer(corpus, model=BIG, optim={"name": "sgd", "warmup_steps": 0}))
        padded = torch.where(torch.arange(5) < lengths[:, None], source, filling)
        read = torch.where(torch.cat([torch.ones(2, 1, dtype=torch.bool), targets[:, :-1] >= 0], 1), inputs, filling)
        trainer.batches = FixedBatch(padded, read, lengths, targets)
        found.append((trainer.step()["loss"], weights(trainer)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("size", [1, 2])
def test_F40_pieces_of_a_batch_of_pairs_weigh_by_their_targets(corpus, size):
    options = {"model": BIG, "optim": {"name": "sgd", "warmup_steps": 0, "grad_clip": 0.0}}
    whole = rough(make_trainer(corpus, **options))
    pieces = rough(make_trainer(corpus, train={"micro_batch_size": size}, **options))
    for step in range(2):
        counts = (whole.batches.batch(step)[-1] != IGNORE).sum(1)
        values = [trainer.step()["loss"] for trainer in (whole, pieces)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert len(set(counts.tolist())) > 1  # or it would not matter
    for name, weight in weights(whole).items():
        assert torch.allclose(weights(pieces)[name], weight, atol=1e-4), name


def test_label_smoothing_spreads_each_target_over_the_vocabulary(corpus):
    plain, smooth = (rough(make_trainer(corpus, model=WIDE, optim={"label_smoothing": s})) for s in (0.0, 0.1))
    *inputs, targets = plain.batches.batch(0)
    logits = plain.model(*inputs).detach().double()
    real = targets != IGNORE
    log_probs = logits.log_softmax(-1)[real]
    picked = log_probs.gather(1, targets[real].unsqueeze(1)).squeeze(1)
    expected = -(0.9 * picked + 0.1 * log_probs.mean(-1)).mean().item()
    assert smooth.step()["loss"] == pytest.approx(expected, rel=1e-5)
    assert plain.step()["loss"] == pytest.approx(-picked.mean().item(), rel=1e-5)
    assert smooth.evaluate()["val_loss"] == pytest.approx(expected_loss(smooth), rel=1e-5)  # training only


def expected_loss(trainer, name: str = "val") -> float:
    pairs, end_id = trainer.pairs[name], trainer.corpus.tokenizer.end_id
    nats = [by_hand(trainer.model, pairs.source(i), pairs.target(i), end_id) for i in range(len(pairs))]
    return np.concatenate(nats).mean()


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_an_evaluation_is_the_loss_of_every_pair_and_its_greedy_translation(corpus, rows):
    trainer = rough(make_trainer(corpus, model=BIG, train={"batch_size": rows, "micro_batch_size": rows}), 0.2)
    values = trainer.evaluate()
    assert values["val_loss"] == pytest.approx(expected_loss(trainer), rel=1e-5)
    pairs, tokenizer = trainer.pairs["val"], corpus.tokenizer
    longest = 2 * max(len(pairs.target(i)) + 1 for i in range(len(pairs)))
    texts = []
    for i in range(len(pairs)):  # each alone, without a cache
        (ids,) = generate(trainer.model, [pairs.source(i)], max_new_tokens=longest, end_id=256, use_cache=False)
        texts.append(tokenizer.decode(ids))
    sources, references = zip(*pair_texts(pairs, tokenizer, tokenizer), strict=True)
    assert trainer.translations("val", trainer.model) == (list(sources), texts, list(references))
    assert values["val_exact"] == 0.0
    assert values["val_chrf"] == pytest.approx(sacrebleu.CHRF().corpus_score(texts, [references]).score)


def test_the_first_pairs_are_translated_wherever_their_length_puts_them(corpus):
    trainer = rough(make_trainer(corpus, model=WIDE))
    pairs = trainer.pairs["train"]
    longest = 2 * max(len(pairs.target(i)) + 1 for i in range(7))
    for beams in (1, 3):
        found = translate(trainer.model, pairs, corpus.tokenizer, 7, beams)
        options = {"beams": beams, "max_new_tokens": longest, "end_id": 256, "use_cache": False}
        alone = [beam_search(trainer.model, [pairs.source(i)], **options)[0][0] for i in range(7)]
        assert [one.ids for one in found] == [one.ids for one in alone]


def test_a_translation_never_has_ids_that_the_tokenizer_has_not(corpus):
    trainer = make_trainer(corpus, model={**WIDE, "vocab_size": 300})
    with torch.no_grad():
        trainer.model.lm_head.weight[257:] *= 100
    found = translate(trainer.model, trainer.pairs["val"], corpus.tokenizer, 5)
    assert all(id < 257 for one in found for id in one.ids)
    assert any(one.ids for one in found)


def test_scores_of_a_comparison():
    right = ["별이 높이 빛난다 오늘도.", "고양이가 그 별을 본다."]
    assert compare(right, right) == pytest.approx({"exact": 1.0, "chrf": 100.0, "bleu": 100.0})
    assert compare(["", "x"], right) == pytest.approx({"exact": 0.0, "chrf": 0.0, "bleu": 0.0}, abs=0.5)
    assert math.isnan(compare(["별", "두 별"], ["별", "두 별"])["bleu"])  # no four words in a row
    half = compare([right[0], "x"], right)
    assert half["exact"] == 0.5
    assert 20 < half["chrf"] < 80


def test_pairs_can_be_learnt_and_the_command_translates(place, capsys, monkeypatch):
    """From a file to a translation; the two sides have a tokenizer each."""
    write_pairs(Path("pairs.tsv"), 400)
    place.write_preset(
        model={**WIDE, "n_layer": 2, "d_model": 64, "d_ff": 64},
        data={"source": "pairs.tsv", "tokenizer": "bytes", "target_tokenizer": "chars", "val_fraction": 0.1},
        train={"steps": 300, "batch_size": 32},
        optim={"warmup_steps": 20, "learning_rate": 5e-3},
        log={"interval": 50, "sample_tokens": 60},
    )
    place.train()
    out = capsys.readouterr().out
    assert "300 steps of 32 pairs" in out
    assert "360 training pairs; validation on 40" in out
    assert "exactly right, chrF" in out
    assert " → " in out
    record = metrics(Path("runs/tiny"))[-1]
    assert record["val_exact"] > 0.5
    model, tokenizer, config = load_model("runs/tiny")
    source_tokenizer = load_source_tokenizer("runs/tiny", config)
    assert (source_tokenizer.name, tokenizer.name) == ("bytes", "chars")
    assert model.encoder.embed.weight.shape[0] == 257
    assert model.decoder.embed.weight.shape[0] == tokenizer.vocab_size
    sample.main(sample.parse_options(["runs/tiny", "--prompt", "star star", "--prompt", "the cat sees"]))
    said = capsys.readouterr().out.splitlines()
    rows = [[*source_tokenizer.encode(text), 256] for text in ("star star", "the cat sees")]
    options = {"max_new_tokens": 256, "end_id": tokenizer.end_id, "vocab_size": tokenizer.vocab_size}
    assert said == [tokenizer.decode(ids) for ids in generate(model, rows, **options)]
    assert said[0] == "별 별"


@pytest.mark.parametrize("target_tokenizer", [None, "chars"])
def test_training_and_sampling_begin_with_the_same_tokens(place, monkeypatch, target_tokenizer):
    """The first token that a decoder reads, and the last of a source, each of its own tokenizer."""
    fed = []
    data = {"source": "pairs.tsv"} | ({"target_tokenizer": target_tokenizer} if target_tokenizer else {})
    place.write_preset(model=WIDE, data=data, train={"steps": 1})
    for name in ("encode", "run"):
        monkeypatch.setattr(EncoderDecoder, name, recording(fed, name, getattr(EncoderDecoder, name)))
    place.train()
    training, fed[:] = dict(reversed(fed)), []
    sample.main(sample.parse_options(["runs/tiny", "--prompt", "cat", "--max-new-tokens", "3"]))
    sampling = dict(reversed(fed))  # of each, the first
    assert sampling["encode"].tolist() == [[*b"cat", 256]]
    start = load_model("runs/tiny")[1].end_id
    assert (start == 256) == (target_tokenizer is None)
    assert sampling["run"].tolist() == [[start]]
    assert training["run"][:, 0].tolist() == [start] * 4
    assert (training["encode"] == 256).sum(1).tolist() == [1] * 4


def recording(fed: list, name: str, method):
    def recorded(model, tokens, *arguments, **options):
        fed.append((name, tokens.clone()))
        return method(model, tokens, *arguments, **options)

    return recorded


@pytest.mark.parametrize(
    "options",
    [{}, {"data": {"target_tokenizer": "chars"}}, {"model": {**WIDE, "dropout": 0.1, "tie_embeddings": False}}],
    ids=["plain", "two-tokenizers", "dropout"],
)
def test_F50_a_stopped_run_on_pairs_goes_on_bit_for_bit(place, monkeypatch, options):
    stopper = Stopper(monkeypatch)
    resumed = {
        "model": WIDE,
        "data": {"source": "pairs.tsv", **options.get("data", {})},
        "train": {"eval_interval": 2, "checkpoint_interval": 3, "micro_batch_size": 2},
        "log": {"interval": 2, "sample_tokens": 4},
    }
    place.write_preset(**{**resumed, "model": options.get("model", WIDE)})
    whole = run_with_stops(place, stopper, [], "whole")
    hashes, stopper.hashes = stopper.hashes, {}
    assert sorted(hashes) == list(range(8))
    assert_same_run(run_with_stops(place, stopper, [3, 4], "stopped"), whole)
    assert stopper.hashes == hashes
    assert {"val_loss", "val_exact", "val_chrf", "val_bleu"} <= metrics(whole)[0].keys()


def test_pairs_that_are_too_long_are_left_out_and_counted(place, capsys):
    with Path("pairs.tsv").open("a", encoding="utf-8") as file:
        file.write("x" * 64 + "\ty\n" + "x\t" + "y" * 64 + "\n")
    place.write_preset(model=WIDE, data={"source": "pairs.tsv", "val_fraction": 0.02}, train={"steps": 1})
    place.train()
    assert "note: pairs longer than model.max_seq_len are left out: 2 of train, 0 of val" in capsys.readouterr().out


REFUSED = {
    "all too long": (
        ["--model.max-seq-len", "1"],
        r"all 54 pairs of the train split are longer than model\.max_seq_len",
    ),
    "all of a split too long": (
        ["--data.source", "uneven.tsv", "--model.max-seq-len", "9"],
        r"all 1 pairs of the val split are longer than model\.max_seq_len = 9",
    ),
    "no pairs": (["--data.source", "text.txt"], "has no pairs for an encoder-decoder"),
    "a text field": (["--data.text-field", "x"], r"data\.text_field = x needs rows"),
    "vocabulary too small": (["--model.vocab-size", "100"], r"model\.vocab_size = 100"),
    "source vocabulary too small": (
        ["--model.source-vocab-size", "100", "--data.target-tokenizer", "chars"],
        r"model\.source_vocab_size = 100",
    ),
    "source vocabulary alone": (["--model.source-vocab-size", "300"], r"needs a data\.target_tokenizer"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_start_on_pairs_is_one_sentence(place, reason):
    words, message = REFUSED[reason]
    Path("uneven.tsv").write_text("a\tb\n" + "a" * 20 + "\tb\n" + "a\tb\n" * 8, "utf-8")
    place.write_preset(model=WIDE, data={"source": "pairs.tsv"})
    with pytest.raises(UserError, match=message) as refused:
        place.train(*words)
    assert "\n" not in str(refused.value)
    assert not Path("runs").exists()


def test_a_run_that_diverged_says_so_instead_of_translating(place):
    place.write_preset(model=WIDE, data={"source": "pairs.tsv"}, train={"steps": 1}, optim={"learning_rate": 1e38})
    with pytest.raises(UserError, match=r"a weight is not finite at step 1; try again with --optim\.learning-rate"):
        place.train()


def test_batches_of_many_shapes_are_compiled_only_a_few_times(corpus):
    """Lengths differ from batch to batch: they must become symbols, not constants."""
    trainer, counter = make_trainer(corpus, model=WIDE), CompileCounter()
    trainer.training_loss = torch.compile(trainer.loss, backend=counter)
    shapes = set()
    for step in range(12):
        shapes.add(tuple(tensor.shape for tensor in trainer.batches.batch(step)))
        trainer.step()
    assert len(shapes) > 8
    assert counter.frame_count <= 3


def test_the_tokenizer_of_the_targets_is_learnt_from_them_alone(tmp_path):
    corpus = pair_corpus(tmp_path, tokenizer="chars", target_tokenizer="chars")
    assert set("star") & set(corpus.source_tokenizer.alphabet)
    assert not set("star") & set(corpus.tokenizer.alphabet)
    assert isinstance(pair_corpus(tmp_path).source_tokenizer, ByteTokenizer)
    assert json.loads((corpus.folder / "meta.json").read_text())["pairs"]


def test_a_uniform_guess_costs_the_logarithm_of_the_vocabulary(corpus):
    trainer = make_trainer(corpus, model=WIDE)
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    assert trainer.evaluate()["val_loss"] == pytest.approx(math.log(257), abs=1e-5)


@pytest.fixture
def trained(place, capsys):
    """A run that knows a little, in its folder."""
    write_pairs(Path("pairs.tsv"), 200)
    place.write_preset(
        model={**WIDE, "n_layer": 2, "d_model": 32, "d_ff": 64},
        data={"source": "pairs.tsv", "tokenizer": "bytes", "target_tokenizer": "chars", "val_fraction": 0.2},
        train={"steps": 100, "batch_size": 32},
        optim={"warmup_steps": 10, "learning_rate": 5e-3},
    )
    place.train()
    capsys.readouterr()
    return load_model("runs/tiny")


def test_the_bench_counts_what_is_right_greedily_and_with_beams(trained, capsys):
    model, tokenizer, config = trained
    bench.main(["translate", "runs/tiny", "--beams", "3"])
    out, last = capsys.readouterr().out, metrics(Path("runs/tiny"))[-1]
    corpus = prepare(config.data, pairs=True)
    assert f"new pairs: 40 of 40 pairs; {last['val_loss']:.4f} nats per token of all" in out
    assert f"greedy    {last['val_exact']:.2%} exactly right, chrF {last['val_chrf']:.1f}" in out
    pairs = train.pairs_of(corpus.val, corpus, 64, "val")
    longest = 2 * max(len(pairs.target(i)) + 1 for i in range(40))
    right = higher = 0
    for i in range(40):
        options = {"max_new_tokens": longest, "end_id": tokenizer.end_id, "vocab_size": tokenizer.vocab_size}
        (best, *_), (greedy, *_) = (
            beam_search(model, [pairs.source(i)], beams=beams, **options)[0] for beams in (3, 1)
        )
        right += best.ids == pairs.target(i)
        higher += (best.reason == "end", round(best.score, 5)) > (greedy.reason == "end", round(greedy.score, 5))
    assert right > 0
    assert f"3 beams   {right / 40:.2%} exactly right" in out
    assert f"3 beams score as greedy does or higher: 40 of 40, {higher} higher" in out
    wrong = re.findall(r"^    (.*) → (.*)  \(right: (.*)\)$", out, re.M)
    assert len(wrong) == min(5, 40 - right)
    assert all(text != target for _, text, target in wrong)


def test_the_bench_translates_other_pairs_with_the_tokenizers_of_the_run(trained, capsys):
    Path("other.tsv").write_text("star\t별\nthe cat\tx\nsees\ty\n".replace("x", "고양이 그"), "utf-8")
    with pytest.raises(SystemExit):
        bench.main(["translate", "runs/tiny", "--source", "other.tsv"])
    assert "the character 'y'" in capsys.readouterr().err
    Path("empty.tsv").write_text("")
    with pytest.raises(SystemExit):
        bench.main(["translate", "runs/tiny", "--source", "empty.tsv"])
    assert "--source empty.tsv holds no pairs" in capsys.readouterr().err
    bench.main(["translate", "runs/tiny", "--source", "other.tsv", "--pairs", "2", "--beams", "1"])
    out = capsys.readouterr().out
    assert out.startswith("other.tsv: 2 of 2 pairs; ")
    assert "beams" not in out


def test_the_bench_wants_an_encoder_decoder_and_the_pairs_it_was_trained_on(trained, place, capsys):
    Path("pairs.tsv").write_text("star\t별\n" * 20, "utf-8")
    with pytest.raises(SystemExit):
        bench.main(["translate", "runs/tiny"])
    assert "is no longer what runs/tiny was trained on" in capsys.readouterr().err
    place.write_preset("decoder", train={"steps": 1})
    place.train("decoder.toml")
    with pytest.raises(SystemExit):
        bench.main(["translate", "runs/decoder"])
    assert "runs/decoder is a decoder, and only an encoder-decoder translates" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["stories", "runs/tiny"])
    assert "runs/tiny is an encoder-decoder: python bench.py translate runs/tiny" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["translate", "runs/tiny", "--beams", "0"])
    assert "--beams must be at least 1, not 0" in capsys.readouterr().err
