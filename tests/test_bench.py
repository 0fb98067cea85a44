"""What a run is measured by."""

import json
import math
import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import progress
from checkpoint import load_model
from data.prepare import prepare
from data.stories import minimal_pairs
from data.tokenizer import ByteTokenizer
from tests.corpora import documents
from tests.helpers import BruteForce, enlarge
from tests.training import PAIRS, Place, metrics, write_pairs
from tests.training import text as some_text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run on stories, and the folder it was trained in."""
    place = Place(tmp_path_factory.mktemp("bench"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        patch.setattr(progress, "loss_curve", lambda *arguments: None)
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
        (["lost"], "invalid choice"),
        (["loss"], "there is no run"),
        (["loss", "--context", "0"], "--context must be at least 1, not 0"),
        (["loss", "--source", "x.txt", "--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["loss", "--source", "x.txt", "--max-tokens", "9"], "--max-tokens is for a hub: source or stories; x.txt is"),
        (["loss", "--text-field", "body"], "--text-field and --max-tokens are about another --source"),
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
    monkeypatch.setattr(progress, "loss_curve", lambda *arguments: None)
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "loss_curve", lambda *arguments: None)
    return Place(tmp_path)


def small_run(place, monkeypatch, **sections) -> torch.nn.Module:
    """Trains runs/tiny for a step; `bench.py loss` then finds this model in it, whose weights hide no fault."""
    place.write_preset(**{"train": {"steps": 1}, **sections})
    place.train()
    model, tokenizer, config = load_model("runs/tiny")
    enlarge(model)
    monkeypatch.setattr(bench, "load_model", lambda *_: (model, tokenizer, config))
    return model


def measure(*words: str) -> dict[str, tuple[dict, bench.LossByPosition]]:
    """What `bench.py loss runs/tiny` would print, by split."""
    with pytest.MonkeyPatch.context() as patch:
        found = []
        patch.setattr(bench, "tell_loss", found.extend)
        bench.main(["loss", "runs/tiny", *words])
    return {title: (values, by_position) for title, values, by_position in found}


def nats_by_hand(model, rows, context: int) -> list[list[float]]:
    """What each target costs, by its position in the window: in float64, each from the start of its window anew. The
    first token of a row is no target."""
    brute, nats = BruteForce(model), [[] for _ in range(context)]
    for row in rows:
        for first in range(0, len(row) - 1, context):
            window = row[first : first + context + 1]
            for n in range(1, len(window)):
                logits = brute.logits(window[:n])[-1]
                log_total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
                nats[n - 1].append(log_total - logits[window[n]])
    return [column for column in nats if column]


def assert_as_by_hand(found, nats: list[list[float]], n_bytes: int) -> None:
    values, by_position = found
    n_targets = sum(map(len, nats))
    assert by_position.n_targets.tolist() == [len(column) for column in nats]
    assert by_position.nats.tolist() == pytest.approx([sum(column) for column in nats], rel=1e-4)
    assert values["loss"] == pytest.approx(sum(map(sum, nats)) / n_targets, rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(sum(map(sum, nats)) / n_bytes / math.log(2), rel=1e-5)


def table(out: str) -> tuple[dict[str, list[float]], list[list[str]]]:
    """The numbers of each split, and the rows by position."""
    first, second = out.split("\n\n")[1:]
    lines = [re.split(r"  +", line.strip()) for line in first.splitlines()[1:]]
    splits = {title: [float(x.replace(",", "")) for x in row if x != "–"] for title, *row in lines}
    return splits, [line.split() for line in second.splitlines()[2:]]


SHAPES = [
    ({"position": "rope"}, 16),
    ({"position": "rope"}, 5),
    ({"position": "rope", "window": 6}, 40),
    ({"position": "sinusoidal"}, 40),
    ({"position": "none"}, 1),
    ({"position": "learned"}, 7),
    ({"position": "learned"}, 16),
]


@pytest.mark.parametrize(("model", "context"), SHAPES)
def test_the_loss_of_a_text_is_that_computed_by_hand(model, context, place, monkeypatch, capsys):
    (place.folder / "text.txt").write_bytes(some_text(250).encode())
    model = small_run(place, monkeypatch, model=model)
    whole = some_text(250)
    kept = whole[int(len(whole) * 0.9) :].encode()
    assert (len(kept) - 1) % context or context == 1  # the last window is shorter
    capsys.readouterr()
    found = measure("--context", str(context))
    assert_as_by_hand(found["validation"], nats_by_hand(model, [list(kept)], context), len(kept) - 1)
    longer = "note: --context 40 is longer than the 16 tokens of training"
    assert (longer in capsys.readouterr().err) == (context > 16)


TEXTS = ["a bright star", "별", "the cat sees the sky, the cat sees the cat", "é"]


def write_rows(file, **fields) -> None:
    rows = ({name: value + line for name, value in fields.items()} for line in TEXTS)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


@pytest.mark.parametrize(
    ("field", "words"),
    [("text", []), ("body", ["--text-field", "body"])],
)
@pytest.mark.parametrize("context", [8, 16, 100])
def test_documents_of_another_source_are_all_graded_and_kept_apart(field, words, context, place, monkeypatch):
    model = small_run(place, monkeypatch)
    write_rows(place.folder / "other.jsonl", **{"title": "not this: ", field: ""})
    found = measure("--source", "other.jsonl", "--context", str(context), *words)
    rows = [[256, *line.encode(), 256] for line in TEXTS]  # each after an end of text, with its own to be foretold
    assert list(found) == ["whole text"]
    assert_as_by_hand(found["whole text"], nats_by_hand(model, rows, context), sum(len(row) - 2 for row in rows))


def test_the_run_s_text_field_is_used_where_there_are_fields(place, monkeypatch):
    write_rows(place.folder / "rows.jsonl", body="", title="x" * 40)
    small_run(place, monkeypatch, data={"source": "rows.jsonl", "text_field": "body"})
    n_bytes = sum(len(line.encode()) + 1 for line in TEXTS)
    write_rows(place.folder / "other.jsonl", title="z" * 40, body="")
    (place.folder / "other.txt").write_text("".join(f"{line}." for line in TEXTS), "utf-8")
    (place.folder / "others").mkdir()
    (place.folder / "others" / "one.md").write_text("one", "utf-8")
    for source, n_targets in (("other.jsonl", n_bytes), ("other.txt", n_bytes - 1), ("others", 2)):
        _, by_position = measure("--source", source)["whole text"]
        assert by_position.n_targets.sum() == n_targets


@pytest.mark.parametrize("tokenizer", ["bpe", "chars"])
def test_another_text_is_read_with_the_run_s_tokenizer_in_parts_as_in_one(tokenizer, place, monkeypatch):
    small_run(place, monkeypatch, data={"tokenizer": tokenizer, "bpe_vocab_size": 280})
    _, own, _ = bench.load_model()
    monkeypatch.setattr("data.prepare.PART", 50)
    rng = random.Random(0)
    other = "".join(rng.choice(["star", " ", "the", "cat", "\n", "é"]) for _ in range(1000))
    (place.folder / "other.txt").write_text(other, "utf-8")
    config = bench.data_of(load_model("runs/tiny")[2], "other.txt", None, None)
    corpus = bench.encode_whole(config, own)
    assert corpus.val.tokens.tolist() == own.encode(other)
    assert (corpus.val.n_bytes, corpus.documents, corpus.tokenizer) == (len(other.encode()), False, own)


def test_logits_are_held_a_piece_at_a_time_and_change_nothing(place, monkeypatch):
    model = small_run(place, monkeypatch)
    expected, by_position = measure()["validation"]
    n_logits, n_rows = [], []
    model.lm_head.register_forward_hook(lambda _, inputs, output: n_logits.append(output.numel()))
    model.decoder.register_forward_hook(lambda _, inputs, output: n_rows.append(len(output)))
    monkeypatch.setattr(bench, "LOGITS", 257 * 3 + 5)
    monkeypatch.setattr(bench, "TOKENS", 16 * 2)
    values, pieces = measure()["validation"]
    assert values == pytest.approx(expected, rel=1e-6)
    assert pieces.nats.tolist() == pytest.approx(by_position.nats.tolist(), rel=1e-6)
    assert max(n_logits) == 257 * 3
    assert max(n_rows) == 2


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({}, "float32"),
        ({}, "bfloat16"),
        ({"data": {"source": "stories", "bpe_vocab_size": 300, "max_tokens": 30_000, "tokenizer": "bpe"}}, "float32"),
        ({"data": {"source": "pairs.tsv"}, "model": PAIRS}, "float32"),
        ({"data": {"source": "pairs.tsv", "target_tokenizer": "chars"}, "model": PAIRS}, "float32"),
    ],
    ids=["text", "bfloat16", "stories", "pairs", "two tokenizers"],
)
def test_the_loss_is_what_training_logged_at_that_checkpoint(sections, dtype, place, capsys):
    write_pairs(place.folder / "pairs.tsv")
    place.write_preset(**sections, train={"steps": 6, "eval_interval": 3, "checkpoint_interval": 3, "dtype": dtype})
    place.train()
    logged = {line["step"]: line for line in metrics(place.folder / "runs/tiny") if "val_loss" in line}
    assert logged[3]["val_loss"] != pytest.approx(logged[6]["val_loss"], rel=1e-3)
    best = min(logged, key=lambda step: logged[step]["val_loss"])
    names = {"validation": "val", "held-out combinations": "held_out"}
    for checkpoint, step in {"step-000003": 3, "last": 6, "best": best}.items():
        capsys.readouterr()
        found = measure("--checkpoint", checkpoint)
        out, err = capsys.readouterr()
        assert out.startswith(f"runs/tiny, step-00000{step}: ")
        assert ("in float32; training logged what bfloat16 gives" in err) == (dtype == "bfloat16")
        assert len(found) == sum(key.endswith("_loss") for key in logged[step])
        for title, (values, by_position) in found.items():
            expected = {key: logged[step].get(f"{names[title]}_{key}") for key in values}
            assert values == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 1e-2)
            mean = by_position.nats.sum() / by_position.n_targets.sum()
            assert mean.item() == pytest.approx(values["loss"], rel=1e-6)


def test_the_loss_of_pairs_is_that_computed_by_hand(place, monkeypatch, capsys):
    pairs = [(target, source) for source, target in write_pairs(place.folder / "other.tsv")]  # the longer side first
    (place.folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs), "utf-8")
    data = {"source": "pairs.tsv", "val_fraction": 0.3}
    model = small_run(place, monkeypatch, model={**PAIRS, "max_seq_len": 40}, data=data)
    brute, nats = BruteForce(model), [[] for _ in range(40)]
    corpus = bench.corpus_of(Path("runs/tiny"), load_model("runs/tiny")[2])
    kept = documents(corpus.val.sources.tolist(), ByteTokenizer())
    for source in kept:
        target = [256, *dict(pairs)[source].encode(), 256]
        for n in range(1, len(target)):
            logits = brute.logits(target[:n], [*source.encode(), 256])[-1]
            nats[n - 1].append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target[n]])
    assert len({len(source) for source in kept}) > 3  # so that there is padding
    values, by_position = measure()["validation"]
    longest = max(map(len, nats))
    nats = [column for column in nats if column]
    assert by_position.n_targets.tolist()[: len(nats)] == [len(column) for column in nats]
    assert by_position.nats.tolist()[: len(nats)] == pytest.approx([sum(column) for column in nats], rel=1e-4)
    assert by_position.n_targets.sum() == sum(map(len, nats))
    assert values == {"loss": pytest.approx(sum(map(sum, nats)) / sum(map(len, nats)), rel=1e-5)}
    capsys.readouterr()
    bench.main(["loss", "runs/tiny"])
    splits, rows = table(capsys.readouterr().out)
    assert splits["validation"][0] == sum(map(len, nats))
    assert int(rows[0][1]) == longest == len(kept)
    assert rows[-1][0].endswith(str(len(nats)))


def test_stories_are_a_text_like_any_other_for_a_run_on_something_else(place, monkeypatch):
    small_run(place, monkeypatch)
    found = measure("--source", "stories", "--max-tokens", "3000")
    values, by_position = found.pop("whole text")
    assert not found
    assert values.keys() == {"loss", "bits_per_byte"}  # the entropy is that of held-out stories alone
    assert 3000 <= by_position.n_targets.sum() < 4000


def test_the_table_by_position_adds_up_to_the_whole(place, monkeypatch, capsys):
    small_run(place, monkeypatch)
    values, by_position = measure("--context", "13")["validation"]
    capsys.readouterr()
    bench.main(["loss", "runs/tiny", "--context", "13"])
    splits, rows = table(capsys.readouterr().out)
    n_targets = int(by_position.n_targets.sum())
    loss, bits = round(values["loss"], 4), round(values["bits_per_byte"], 4)
    assert splits == {"validation": [n_targets, loss, bits, pytest.approx(math.exp(loss), rel=1e-3)]}
    assert [row[0] for row in rows] == ["1", "2", "3-4", "5-8", "9-13"]
    counts, nats = ([float(row[place].replace(",", "")) for row in rows] for place in (1, 2))
    assert sum(counts) == n_targets
    assert np.average(nats, weights=counts) == pytest.approx(values["loss"], abs=1e-4)
    third = by_position.nats[2:4].sum() / by_position.n_targets[2:4].sum()
    assert nats[2] == pytest.approx(third.item(), abs=1e-4)


def test_splits_stand_side_by_side_with_their_entropy(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    bench.main(["loss", "--context", "100000000000000"])
    splits, rows = table(capsys.readouterr().out)
    values = metrics(run)[-1]
    n_targets = {name: splits[name][0] for name in ("validation", "held-out combinations")}
    floor = values["held_out_floor"]  # the last of the two
    in_bytes = values["held_out_bits_per_byte"] / values["held_out_loss"]
    assert splits["entropy"] == pytest.approx([floor, floor * in_bytes, math.exp(floor)], abs=1e-3)
    for column, n in ((1, n_targets["validation"]), (3, n_targets["held-out combinations"])):
        assert sum(int(row[column].replace(",", "")) for row in rows) == n
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 8, 9, 31, 1000])
def test_positions_are_told_in_powers_of_two(longest):
    ranges = bench.position_ranges(longest)
    assert [position for first, last in ranges for position in range(first, last + 1)] == list(range(1, longest + 1))
    assert all(last == 2 ** math.ceil(math.log2(first)) for first, last in ranges[:-1])
    assert longest <= 2 ** math.ceil(math.log2(ranges[-1][0]))


@pytest.mark.parametrize(
    ("sections", "words", "message"),
    [
        (
            {"model": {"position": "learned"}},
            ["--context", "17"],
            "--context 17: the learned positions of runs/tiny end",
        ),
        ({"model": PAIRS}, ["--source", "other.tsv"], "python bench.py translate runs/tiny --source other.tsv"),
        ({"model": PAIRS}, ["--context", "9"], "runs/tiny is an encoder-decoder"),
        ({"chars": True}, ["--source", "odd.txt"], "odd.txt, line 20,003: the character '&' (U+0026) is not one of"),
        ({"chars": True}, ["--source", "odd.jsonl"], "odd.jsonl, document 3: the character '&' (U+0026) is not one of"),
        ({}, ["--source", "empty.txt"], "data.source = empty.txt holds no text"),
        ({}, ["--source", "empty.jsonl"], "data.source = empty.jsonl holds no text"),
        ({}, ["--source", "one.txt"], "data.source = one.txt holds one token"),
        ({}, ["--source", "nowhere.txt"], "there is no data.source = nowhere.txt"),
        ({}, ["--source", "other.tsv"], "data.source = other.tsv holds pairs, for an encoder-decoder"),
        ({}, ["--source", "odd.txt", "--text-field", "body"], "data.text_field = body needs rows with fields"),
        ({}, ["--source", "odd.jsonl", "--text-field", "body"], "odd.jsonl, line 1 has no field body, only text"),
        ({}, ["--checkpoint", "step-7"], "runs/tiny has no checkpoint step-7"),
        ({"vocab_size": 38}, ["--source", "odd.txt"], "and model.vocab_size = 38 allows at most 37"),
    ],
)
def test_what_has_no_loss_is_refused_in_a_sentence(sections, words, message, place, monkeypatch, capsys):
    write_pairs(place.folder / "other.tsv")
    source = "other.tsv" if sections.get("model") == PAIRS else "text.txt"
    data = {"source": source, "tokenizer": "chars" if "chars" in sections else "bytes"}
    place.write_preset(train={"steps": 1}, data=data, model=sections.get("model", {}))
    place.train()
    if "vocab_size" in sections:  # less than its tokenizer's, as may be where the text needs few ids
        model, tokenizer, config = load_model("runs/tiny")
        config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 38})})
        monkeypatch.setattr(bench, "load_model", lambda *_: (model, tokenizer, config))
    lines = [*["the cat"] * 20_002, "a & the star"]
    (place.folder / "odd.txt").write_text("\n".join(lines), "utf-8")
    rows = (json.dumps({"text": line}) for line in lines[-3:])
    (place.folder / "odd.jsonl").write_text("\n".join(rows), "utf-8")
    (place.folder / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    (place.folder / "empty.jsonl").write_text('{"text": ""}\n\n', "utf-8")
    (place.folder / "one.txt").write_text("a", "utf-8")
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        bench.main(["loss", "runs/tiny", *words])
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert error.startswith("error: ")
