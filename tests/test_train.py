"""Training: the loss, the step, validation, stopping and going on, and what is refused before anything is written."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checkpoint
import compiling
import machine
import progress
import train
from checkpoint import checkpoints, load_model, read_checkpoint
from config import Config, ConfigError, UserError
from data.loader import IGNORE, Batches
from data.prepare import prepare
from data.stories import grammar
from tests.training import (
    RESUMED,
    FixedBatch,
    Killed,
    Place,
    Stopper,
    assert_same_run,
    byte_corpus,
    checkpoint_bytes,
    corpus_of,
    make_trainer,
    metrics,
    settings,
    text,
    weights,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def signals():
    """Training takes over SIGINT and SIGTERM; the tests give them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def corpus(tmp_path):
    return byte_corpus(tmp_path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of one's own to train in; the picture is left out, because it takes longer than the training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "loss_curve", lambda *arguments: None)
    return Place(tmp_path)


def cross_entropies(logits, targets) -> np.ndarray:
    """Of each position, in float64, by the definition; 0 where there is no target."""
    logits = np.asarray(logits.detach() if torch.is_tensor(logits) else logits, np.float64)
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    picked = np.take_along_axis(logits, np.maximum(np.asarray(targets), 0)[..., None], -1)[..., 0]
    return np.where(np.asarray(targets) == IGNORE, 0.0, total - picked)


def step_with(corpus, inputs, targets, **sections) -> tuple[dict, dict]:
    """The values of one step on given tensors, and the weights after it."""
    trainer = make_trainer(corpus, **sections)
    trainer.batches = FixedBatch(inputs, targets)
    return trainer.step(), weights(trainer)


def differences(a: dict, b: dict) -> float:
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


SGD = {"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "grad_clip": 0.0, "warmup_steps": 0}


# The loss


def test_the_loss_is_the_cross_entropy_in_float64(corpus):
    trainer = make_trainer(corpus, model={"d_model": 32, "n_layer": 2})
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(4)
    inputs, targets = trainer.batches.batch(0)
    expected = cross_entropies(trainer.model(inputs), targets).mean()
    assert trainer.step()["loss"] == pytest.approx(expected, abs=1e-5)


def test_F09_the_step_grades_each_token_on_the_one_that_follows_in_the_text():
    ids = np.random.default_rng(0).integers(16, size=17)  # one window, so that its place is known
    trainer = make_trainer(corpus_of(ids), model={"vocab_size": 16}, train={"batch_size": 1})
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.normal_(0, 0.3)
    expected = cross_entropies(trainer.model(torch.tensor(ids[None, :16])), ids[None, 1:]).mean()
    assert trainer.step()["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_F09_loss_starts_at_the_logarithm_of_the_vocabulary_and_random_ids_cannot_be_learnt(tied):
    """Sinusoidal positions are left out: with tied embeddings their start is another."""
    ids = np.random.default_rng(0).integers(16, size=300 * 8 * 16 + 17)
    options = {"vocab_size": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32, "tie_embeddings": tied}
    trainer = make_trainer(corpus_of(ids), model=options, train={"steps": 300, "batch_size": 8})
    losses = [trainer.step()["loss"] for _ in range(300)]  # less than one pass: every window is fresh
    assert abs(losses[0] - math.log(16)) < 0.3
    smoothed = np.convolve(losses, np.ones(30) / 30, "valid")
    assert smoothed.min() > math.log(16) - 0.02
    assert smoothed[-1] < math.log(16) + 0.1


def test_a_loss_that_leaked_its_targets_would_be_noticed(monkeypatch):
    """What the test above would see if tokens were graded on themselves."""
    ids = np.random.default_rng(0).integers(16, size=100 * 8 * 16 + 17)
    trainer = make_trainer(corpus_of(ids), model={"vocab_size": 16, "d_model": 32}, train={"steps": 100})
    batch = trainer.batches.batch
    monkeypatch.setattr(trainer.batches, "batch", lambda step: (batch(step)[0], batch(step)[0]))
    assert [trainer.step()["loss"] for _ in range(100)][-1] < math.log(16) - 1


def test_label_smoothing_counts_in_training_alone(corpus):
    plain, smooth = (make_trainer(corpus, optim={"label_smoothing": share}) for share in (0.0, 0.3))
    for trainer in (plain, smooth):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(5)
    inputs, targets = plain.batches.batch(0)
    logits = plain.model(inputs).detach()
    uniform = -torch.log_softmax(logits.double(), -1).mean(-1).mean().item()
    expected = 0.7 * cross_entropies(logits, targets).mean() + 0.3 * uniform
    assert abs(plain.evaluate()["val_loss"] - smooth.evaluate()["val_loss"]) < 1e-6
    assert smooth.step()["loss"] == pytest.approx(expected, abs=1e-4)
    assert plain.step()["loss"] == pytest.approx(cross_entropies(logits, targets).mean(), abs=1e-5)


def test_one_batch_is_learnt_by_heart(corpus):
    trainer = make_trainer(corpus, model={"d_model": 32}, train={"steps": 200}, optim={"schedule": "constant"})
    trainer.batches = FixedBatch(*trainer.batches.batch(0))
    losses = [trainer.step()["loss"] for _ in range(200)]
    assert losses[-1] < 0.1 < 4 < losses[0]


# Accumulation


RAGGED = (torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(0)), torch.full((2, 8), IGNORE))
RAGGED[1][0, 2], RAGGED[1][1, :6] = 7, torch.arange(40, 46)  # one target, and six


def test_F40_pieces_weigh_by_their_targets(corpus):
    model = make_trainer(corpus).model
    by_row = cross_entropies(model(RAGGED[0]), RAGGED[1]).sum(1)
    results = [step_with(corpus, *RAGGED, optim=SGD, train={"batch_size": 2, "micro_batch_size": m}) for m in (2, 1)]
    for values, _ in results:
        assert values["loss"] == pytest.approx(by_row.sum() / 7, abs=1e-5)  # 9/7, not (3 + 1)/2
        assert abs(values["loss"] - (by_row[0] + by_row[1] / 6) / 2) > 1e-3
    assert differences(results[0][1], results[1][1]) < 1e-6


def test_F40_the_gradient_is_that_of_the_mean_over_all_targets(corpus):
    trainer = make_trainer(corpus)
    start = weights(trainer)
    logits = trainer.model(RAGGED[0]).double()
    log_p = torch.log_softmax(logits, -1)
    mean = -sum(log_p[row, t, RAGGED[1][row, t]] for row, t in (RAGGED[1] != IGNORE).nonzero().tolist()) / 7
    mean.backward()
    expected = {name: start[name] - p.grad for name, p in trainer.model.named_parameters()}
    _, after = step_with(corpus, *RAGGED, optim=SGD, train={"batch_size": 2, "micro_batch_size": 1})
    assert differences(after, expected) < 1e-6
    assert differences(after, start) > 1e-3


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("micro_batch_size", [2, 1])
def test_F41_a_step_without_targets_leaves_the_weights_alone(corpus, name, micro_batch_size):
    sizes = {"batch_size": 2, "micro_batch_size": micro_batch_size}
    trainer = make_trainer(corpus, train=sizes, optim={"name": name, "weight_decay": 0.5})
    trainer.batches = FixedBatch(*RAGGED)
    trainer.step()  # so that the optimizer has something to remember
    before = weights(trainer)
    trainer.batches = FixedBatch(RAGGED[0], torch.full((2, 8), IGNORE))
    values = trainer.step()
    assert values["loss"] == 0
    assert all(math.isfinite(value) for value in values.values())
    assert differences(before, weights(trainer)) == 0


def test_F41_a_piece_without_targets_weighs_nothing(corpus):
    targets = RAGGED[1].clone()
    targets[0] = IGNORE
    sizes = {"batch_size": 2, "micro_batch_size": 1}
    empty_piece, after = step_with(corpus, RAGGED[0], targets, optim=SGD, train=sizes)
    alone, expected = step_with(corpus, RAGGED[0][1:], targets[1:], optim=SGD, train={"batch_size": 1})
    assert empty_piece["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert differences(after, expected) < 1e-6


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_without_dropout_the_micro_batch_size_changes_nothing(corpus, name):
    results = []
    for micro_batch_size in (None, 4, 2, 1):
        optim = {"name": name, "learning_rate": 0.01}
        trainer = make_trainer(corpus, optim=optim, train={"micro_batch_size": micro_batch_size})
        results.append(([trainer.step()["loss"] for _ in range(4)], weights(trainer)))
    for losses, after in results[1:]:
        assert losses == pytest.approx(results[0][0], abs=1e-5)
        assert differences(after, results[0][1]) < (1e-6 if name == "sgd" else 1e-4)


def test_gradients_are_clipped_to_their_norm_after_accumulation(corpus):
    optim = {**SGD, "grad_clip": 0.01}
    trainer = make_trainer(corpus, optim=optim, train={"micro_batch_size": 1})
    before = weights(trainer)
    values = trainer.step()
    moved = math.sqrt(sum((before[name] - p).square().sum().item() for name, p in weights(trainer).items()))
    assert values["gradient_norm"] > 0.1  # told as it was
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_weights_alone(corpus):
    trainer = make_trainer(corpus)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = math.nan
    before = weights(trainer)
    with pytest.raises(UserError, match=r"nan at step 0"):
        trainer.step()
    assert all(torch.equal(p.nan_to_num(), before[name].nan_to_num()) for name, p in weights(trainer).items())


# Guards


@pytest.fixture
def half(corpus):
    """A trainer in float16 whose loss is scaled so much that its gradients overflow for the first thirty steps."""
    trainer = make_trainer(corpus, train={"dtype": "float16"})
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    return trainer


def test_float16_skips_steps_and_twenty_in_a_row_end_the_run(half):
    before = weights(half)
    for _ in range(19):
        half.step()
    with pytest.raises(UserError, match=r"20 steps in a row were too large for float16 at step 19; .*dtype float32"):
        half.step()
    assert differences(weights(half), before) == 0


def test_float16_counts_only_skipped_steps_in_a_row(half):
    half.scaler.load_state_dict({**half.scaler.state_dict(), "scale": 2.0**30})
    before, skipped = weights(half), []
    for _ in range(25):
        half.step()
        skipped.append(half.state.skipped)
    n = skipped.index(0)
    assert 5 < n < 19
    assert skipped == [*range(1, n + 1), *[0] * (25 - n)]
    assert differences(weights(half), before) > 0


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("fatal", [2, 6])
def test_a_validation_that_is_not_finite_takes_its_checkpoint_back(place, monkeypatch, fatal, keep):
    place.write_preset(train={"eval_interval": 2, "keep_checkpoints": keep})
    evaluate = train.grade

    def diverging(loss, *rest):
        values = evaluate(loss, *rest)
        return {**values, "loss": math.nan} if step[0] == fatal else values

    step = [0]
    monkeypatch.setattr(train, "grade", diverging)
    monkeypatch.setattr(train.Trainer, "save", counting(train.Trainer.save, step))
    aside = rf"\(its checkpoint is set aside as step-00000{fatal}.diverged\)"
    then = r"go on from step-000004: python train.py --resume runs/tiny" if fatal == 6 else "try again with"
    with pytest.raises(UserError, match=rf"the val loss is nan at step {fatal} {aside}; {then} --optim.learning-rate"):
        place.train()
    assert [folder.name for folder in checkpoints(Path("runs/tiny"))][-1:] == (["step-000004"] if fatal == 6 else [])
    assert Path("runs/tiny/last").is_symlink() == (fatal == 6)
    step[0], fatal = 0, 0
    place.train("--resume", "runs/tiny", "--optim.learning-rate", "1e-3")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 8
    assert [record["step"] for record in metrics(Path("runs/tiny"))] == list(range(1, 9))


@pytest.mark.parametrize("keep", [1, 2])
def test_weights_that_are_finite_but_useless_take_their_checkpoint_back_and_leave_a_good_one(place, monkeypatch, keep):
    """What ruins them shows one step later, when they are saved already."""
    place.write_preset(train={"checkpoint_interval": 1, "keep_checkpoints": keep})
    step = train.Trainer.step

    def ruining(trainer):
        values = step(trainer)
        if trainer.state.step == ruined:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.fill_(1e38)
        return values

    monkeypatch.setattr(train.Trainer, "step", ruining)
    ruined = 5
    message = r"at step 5 \(its checkpoint is set aside as step-000005.diverged\); go on from step-000004"
    with pytest.raises(UserError, match=message):
        place.train()
    assert os.readlink("runs/tiny/last") == "step-000004"
    ruined = None
    place.train("--resume", "runs/tiny", "--optim.learning-rate", "1e-3")
    assert [record["step"] for record in metrics(Path("runs/tiny"))] == list(range(1, 9))
    assert len(checkpoints(Path("runs/tiny"))) <= keep + 1


@pytest.mark.parametrize("more", [["--train.steps", "5"], ["--train.max-minutes", "1e-9"]], ids=str)
def test_a_run_that_ends_earlier_than_was_planned_is_evaluated_where_it_ends(place, monkeypatch, more):
    place.write_preset(log={"interval": 3, "sample_tokens": 0})
    stopper = Stopper(monkeypatch)
    stopper.signal_after = 5
    with pytest.raises(SystemExit):
        place.train()
    stopper.signal_after = None
    place.train("--resume", "runs/tiny", *more)
    records = metrics(Path("runs/tiny"))
    assert [record["step"] for record in records] == [3, 5]
    assert "val_loss" in records[-1]
    assert os.readlink("runs/tiny/best") == "step-000005"


def test_what_was_asked_for_and_now_is_auto_is_auto(place, stopped):
    place.train("--resume", "runs/tiny", "--train.micro-batch-size", "2", "--train.steps", "9")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["machine"]["micro_batch_size"] == 2
    place.train("--resume", "runs/tiny", "--train.micro-batch-size", "None", "--train.steps", "10")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["machine"]["micro_batch_size"] == 4


def counting(save, step):
    def counted(trainer, *arguments, **options):
        step[0] = trainer.state.step
        return save(trainer, *arguments, **options)

    return counted


def test_weights_that_are_not_finite_are_never_saved(corpus, tmp_path):
    trainer = make_trainer(corpus, tmp_path)
    good = trainer.save()
    before = checkpoint_bytes(good)
    trainer.state.step = 1
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = math.inf
    with pytest.raises(UserError, match=r"a weight is not finite at step 1; go on from step-000000"):
        trainer.save()
    assert checkpoints(tmp_path) == [good]
    assert checkpoint_bytes(tmp_path / "last") == before


def test_an_evaluation_that_fails_loses_no_step_and_comes_first_on_resuming(place, monkeypatch):
    place.write_preset(train={"eval_interval": 3})
    place.train("--train.run-dir", "runs/whole")
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "evaluate", lambda trainer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            place.train()
    assert [record["step"] for record in metrics(Path("runs/tiny"))] == [1, 2]
    state = read_checkpoint(Path("runs/tiny/last"))[2]
    assert state["step"] == 3
    assert state["ungraded"]["loss"] == metrics(Path("runs/whole"))[2]["loss"]
    place.train("--resume", "runs/tiny")
    assert_same_run(Path("runs/tiny"), Path("runs/whole"))
    assert read_checkpoint(Path("runs/tiny/last"))[2]["ungraded"] is None


@pytest.mark.parametrize("step", [3, 8])
def test_a_signal_does_not_wait_for_an_evaluation(place, monkeypatch, step):
    place.write_preset(train={"eval_interval": 3})
    place.train("--train.run-dir", "runs/whole")
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "evaluate", lambda trainer: 1 / 0 if trainer.state.step == step else VALUES)
        Stopper(patch).signal_after = step
        with pytest.raises(SystemExit) as ended:
            place.train()
    assert ended.value.code == 128 + signal.SIGTERM
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == step
    place.train("--resume", "runs/tiny")
    assert checkpoint_bytes(Path("runs/tiny/last")) == checkpoint_bytes(Path("runs/whole/last"))
    assert "val_loss" in next(record for record in metrics(Path("runs/tiny")) if record["step"] == step)


VALUES = {"val_loss": 5.0, "val_bits_per_byte": 5.0}


def test_a_run_that_another_process_trains_is_refused_until_that_ends(place, stopped):
    code = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True)"
    holder = [sys.executable, "-c", f"{code}; input()", "runs/tiny/.lock"]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=r"runs/tiny is being trained by another process"):
            place.train("--resume", "runs/tiny")
        other.kill()
    place.train("--resume", "runs/tiny")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 8


# Dropout and evaluation


def losses_with_dropout(corpus, steps=2, **train_options) -> list[float]:
    """On one fixed batch of equal rows, with a rate too small to matter."""
    size = train_options.get("batch_size", 4)
    optim = {**SGD, "learning_rate": 1e-12}
    trainer = make_trainer(corpus, model={"dropout": 0.5, "d_model": 32}, optim=optim, train=train_options)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(5)
    row = torch.arange(16) + 40
    trainer.batches = FixedBatch(row.repeat(size, 1), (row + 1).repeat(size, 1))
    return [trainer.step()["loss"] for _ in range(steps)]


def test_dropout_masks_follow_from_seed_step_and_micro_batch(corpus):
    losses = losses_with_dropout(corpus, micro_batch_size=1)
    torch.rand(7)  # whatever else draws random numbers
    assert losses_with_dropout(corpus, micro_batch_size=1) == losses
    assert losses[0] != losses[1]  # the step counts
    assert losses_with_dropout(corpus, micro_batch_size=1, seed=1) != losses
    one = losses_with_dropout(corpus, batch_size=1, micro_batch_size=1)
    assert abs(one[0] - losses[0]) > 1e-4  # equal rows, other masks: the micro-batch counts


def test_F03_validation_has_no_dropout_and_training_has_it_again_after_it(corpus):
    log = {"sample_tokens": 5}
    dropped, plain = (make_trainer(corpus, model={"dropout": share}, log=log) for share in (0.5, 0.0))
    values = dropped.evaluate()
    assert values == dropped.evaluate() == plain.evaluate()
    dropped.sample()
    assert all(module.training for module in dropped.model.modules())
    assert dropped.loss.training
    tokens = torch.arange(16)[None]
    torch.manual_seed(0)
    assert not torch.equal(dropped.model(tokens), dropped.model(tokens))


def test_evaluating_and_sampling_leave_the_random_state_and_the_weights_alone(corpus):
    trainer = make_trainer(corpus, model={"dropout": 0.5}, log={"sample_tokens": 5})
    trainer.step()
    state, before = torch.get_rng_state(), weights(trainer)
    trainer.evaluate()
    trainer.sample()
    assert torch.equal(torch.get_rng_state(), state)
    assert differences(before, weights(trainer)) == 0


def by_hand(trainer) -> tuple[float, float]:
    """Nats per token and bits per byte of the validation split: one window at a time, float64, written again."""
    ids, width = np.asarray(trainer.corpus.val.tokens, np.int64), trainer.config.model.max_seq_len
    trainer.model.eval()
    nats = 0.0
    for start in range(0, len(ids) - 1, width):
        window = ids[start : start + width + 1]
        nats += cross_entropies(trainer.model(torch.tensor(window[None, :-1])), window[None, 1:]).sum()
    trainer.model.train()
    n_bytes = sum(len(trainer.corpus.tokenizer.piece(int(token))) for token in ids[1:])
    return nats / (len(ids) - 1), nats / math.log(2) / n_bytes


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "chars"])
def test_F42_validation_is_the_whole_split_whatever_the_batch_size_and_the_seed(tmp_path, tokenizer):
    corpus = byte_corpus(tmp_path, tokenizer)
    assert (len(corpus.val.tokens) - 1) % 16, "the last window is to be shorter"
    model = {"dropout": 0.1, "vocab_size": corpus.tokenizer.vocab_size}
    trained = make_trainer(corpus, model=model)
    for _ in range(4):
        trained.step()
    loss, bits = by_hand(trained)
    for batch_size, micro_batch_size, seed in ((1, None, 0), (2, None, 1), (4, None, 2), (4, 1, 3), (64, None, 4)):
        sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "seed": seed}
        trainer = make_trainer(corpus, model=model, train=sizes)
        trainer.model.load_state_dict(trained.model.state_dict())
        values = trainer.evaluate()
        assert values["val_loss"] == pytest.approx(loss, abs=1e-5)
        assert values["val_bits_per_byte"] == pytest.approx(bits, abs=1e-5)


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_its_entropy(corpus):
    trainer = make_trainer(corpus)
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    values = trainer.evaluate()
    assert values["val_loss"] == pytest.approx(math.log(257), abs=1e-5)
    assert values["val_bits_per_byte"] == pytest.approx(math.log2(257), abs=1e-5)


@pytest.fixture(scope="module")
def story_corpus(tmp_path_factory):
    """A few of the built-in stories, in three splits."""
    config = settings(data={"source": "stories", "bpe_vocab_size": 400, "tokenizer": "bpe", "max_tokens": 40_000}).data
    return prepare(config, cache_dir=tmp_path_factory.mktemp("stories"))


@pytest.mark.parametrize(("context", "rows"), [(512, 1), (512, 7), (64, 5)])
def test_stories_are_graded_one_by_one_and_by_language(story_corpus, context, rows):
    """Against each story by itself after the end of a text, in windows, in float64."""
    corpus, tokenizer = story_corpus, story_corpus.tokenizer
    model = {"vocab_size": tokenizer.vocab_size, "max_seq_len": context}
    trainer = make_trainer(corpus, model=model, train={"batch_size": rows, "micro_batch_size": rows})
    trainer.step()
    values = trainer.evaluate()
    trainer.model.eval()
    for name, split in (("val", corpus.val), ("held_out", corpus.held_out)):
        nats, stories = {"english": 0.0, "korean": 0.0}, []
        for ids in np.split(split.tokens, np.flatnonzero(split.tokens == tokenizer.end_id) + 1)[:-1]:
            stories.append(tokenizer.decode(ids.tolist()))
            line = 0
            for start in range(0, len(ids), context):
                targets = ids[start : start + context].astype(np.int64)
                inputs = [tokenizer.end_id if start == 0 else int(ids[start - 1]), *targets[:-1].tolist()]
                losses = cross_entropies(trainer.model(torch.tensor([inputs])), targets[None])
                for target, loss in zip(targets.tolist(), losses.flatten().tolist(), strict=True):
                    nats["korean" if line % 2 else "english"] += loss
                    line += tokenizer.piece(target).count(b"\n")
            assert line % 2 == 1
        total, n = sum(nats.values()), len(stories)
        assert n == split.n_documents >= 3
        assert values[f"{name}_english"] == pytest.approx(nats["english"] / n, rel=1e-5)
        assert values[f"{name}_korean"] == pytest.approx(nats["korean"] / n, rel=1e-5)
        assert values[f"{name}_loss"] == pytest.approx(total / len(split.tokens), rel=1e-5)
        n_bytes = sum(len(story.encode()) for story in stories)
        assert values[f"{name}_bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-5)
        floor = -sum(grammar().derivations(story.split("\n")[::2])[0].log_prob for story in stories)
        assert values[f"{name}_floor"] == pytest.approx(floor / len(split.tokens), rel=1e-9)
        assert sum(split.floor[:2]) == pytest.approx(floor, rel=1e-9)


def test_the_losses_on_stories_are_told_beside_their_floors(story_corpus):
    values = {"val_loss": 2.0, "val_bits_per_byte": 0.5, "val_floor": 1.0, "val_english": 9.0, "val_korean": 0.5}
    values |= {key.replace("val", "held_out"): value for key, value in values.items()}
    splits = {"val": story_corpus.val, "held_out": story_corpus.held_out}
    lines = list(train.evaluation_lines(values, splits, 1234, True))
    english, korean, _ = (nats / story_corpus.val.n_documents for nats in story_corpus.val.floor)
    assert lines[0] == (
        "step 1,234 · validation 2.0000 nats/token, 0.5000 bits/byte (floor 1.0000, 0.2500) · best so far"
    )
    expected = f"nats per story: English 9.00 (floor {english:.2f}), Korean 0.50 ({korean:.2f})"
    assert lines[1].strip().startswith(expected)
    for line, split in ((lines[1], story_corpus.val), (lines[3], story_corpus.held_out)):
        assert line.endswith(f"; {split.floor[2] / split.n_documents:.2f} for one who knows what is held out")
    assert len(lines) == 4


def test_a_run_on_stories_chooses_its_best_on_new_draws(place, monkeypatch):
    """Not on the held-out combinations, whose loss here goes the other way."""
    losses = iter([3.0, 2.0, 2.5])
    grade = train.grade

    def fake(loss, split, corpus, *rest):
        values = grade(loss, split, corpus, *rest)
        if split is corpus.val:
            values["loss"] = fake.value = next(losses)
        else:
            values["loss"] = 10 - fake.value
        return values

    monkeypatch.setattr(train, "grade", fake)
    place.write_preset(
        data={"source": "stories", "max_tokens": 20_000}, train={"steps": 6, "eval_interval": 2}, model={"d_ff": 8}
    )
    place.train()
    run = place.folder / "runs/tiny"
    graded = {record["step"]: record for record in metrics(run) if "val_loss" in record}
    assert {step: record["held_out_loss"] for step, record in graded.items()} == {2: 7.0, 4: 8.0, 6: 7.5}
    assert (run / "best").resolve().name == "step-000004"
    assert graded[2]["val_floor"] > 0


# The schedule in the loop


def test_F43_the_first_step_moves_the_weights_at_the_first_rate_of_the_warmup(corpus):
    trainer = make_trainer(corpus, optim={"warmup_steps": 4, "learning_rate": 1e-3})
    before = weights(trainer)
    rates = [trainer.step()["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert differences(before, weights(trainer)) > 0
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3


# Stopping and going on


def run_with_stops(place, stopper, stops, name, *words: str) -> Path:
    """Trains `name`, stopped by a signal after each of `stops` and resumed."""
    run = Path("runs") / name
    for number, stop in enumerate([*stops, None]):
        stopper.signal_after = stop
        start = ["--resume", str(run)] if number else ["tiny.toml", "--train.run-dir", str(run), *words]
        if stop is None:
            place.train(*start)
        else:
            with pytest.raises(SystemExit) as ended:
                place.train(*start)
            assert ended.value.code == 128 + signal.SIGTERM
    return run


@pytest.mark.parametrize(
    "options",
    [
        {"data": {"tokenizer": "bytes"}},
        {"data": {"tokenizer": "bpe", "bpe_vocab_size": 280}},
        {"optim": {"name": "sgd"}},
        {"optim": {"name": "muon"}, "model": {"dropout": 0.1, "n_layer": 2}},
        {"train": {**RESUMED["train"], "micro_batch_size": None}},
        {"model": {"dropout": 0.1, "tie_embeddings": False, "position": "learned", "bias": True}},
        {"optim": {"schedule": "wsd", "label_smoothing": 0.1}},
    ],
    ids=["bytes", "bpe", "sgd", "muon", "one-piece", "learned", "wsd"],
)
def test_F50_a_stopped_run_goes_on_bit_for_bit(place, monkeypatch, options):
    stopper = Stopper(monkeypatch)
    place.write_preset(**{**RESUMED, **options})
    whole = run_with_stops(place, stopper, [], "whole")
    hashes = {step: stopper.hashes.pop(step) for step in list(stopper.hashes)}
    assert sorted(hashes) == list(range(8))
    stopped = run_with_stops(place, stopper, [4], "stopped")  # after an evaluation with a sample
    assert_same_run(stopped, whole)
    assert stopper.hashes == hashes, "a batch was skipped, doubled or changed"
    records = metrics(whole)
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    assert all("val_loss" in record for record in records)


@pytest.mark.parametrize("stops", [[1], [3, 6], [7], [1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_F50_it_does_not_matter_where_a_run_is_stopped(place, monkeypatch, stops):
    stopper = Stopper(monkeypatch)
    place.write_preset(**RESUMED)
    whole = run_with_stops(place, stopper, [], "whole")
    hashes, stopper.hashes = stopper.hashes, {}
    assert_same_run(run_with_stops(place, stopper, stops, "stopped"), whole)
    assert stopper.hashes == hashes


def test_another_seed_is_another_run(place, monkeypatch):
    stopper = Stopper(monkeypatch)
    place.write_preset(**RESUMED)
    first, again = (run_with_stops(place, stopper, [], name) for name in ("first", "again"))
    assert_same_run(again, first)
    other = run_with_stops(place, stopper, [], "other", "--train.seed", "1")
    assert checkpoint_bytes(other / "last") != checkpoint_bytes(first / "last")
    assert metrics(other)[0]["loss"] != metrics(first)[0]["loss"]
    assert stopper.hashes[0][2] != stopper.hashes[0][0]


@pytest.mark.parametrize("killed_after", [1, 4, 5, 7])
def test_a_killed_run_loses_only_the_steps_since_its_last_save(place, monkeypatch, killed_after):
    stopper = Stopper(monkeypatch)
    place.write_preset(**{**RESUMED, "log": {"interval": 1, "sample_tokens": 4}})
    whole = run_with_stops(place, stopper, [], "whole")
    stopper.error_after = killed_after
    with pytest.raises(Killed):
        place.train("tiny.toml", "--train.run-dir", "runs/killed")
    stopper.error_after, stopper.hashes = None, {}
    place.train("--resume", "runs/killed")
    assert_same_run(Path("runs/killed"), whole)
    assert min(stopper.hashes) >= killed_after - 3


def test_a_kill_between_saving_and_pointing_best_at_it_loses_no_best(place, monkeypatch):
    place.write_preset(train={"eval_interval": 2, "keep_checkpoints": 1})
    evaluate, link = train.Trainer.evaluate, checkpoint.link
    fall = {2: 3.0, 4: 2.0, 6: 4.0, 8: 5.0}
    monkeypatch.setattr(
        train.Trainer, "evaluate", lambda trainer: {**evaluate(trainer), "val_loss": fall[trainer.state.step]}
    )

    def killed_link(run, name, folder):
        if (name, folder.name) == ("best", "step-000004"):
            raise Killed
        link(run, name, folder)

    monkeypatch.setattr(checkpoint, "link", killed_link)
    with pytest.raises(Killed):
        place.train()
    monkeypatch.setattr(checkpoint, "link", link)
    place.train("--resume", "runs/tiny")
    assert os.readlink("runs/tiny/best") == "step-000004"
    assert read_checkpoint(Path("runs/tiny/best"))[2]["best_loss"] == 2.0


def test_F49_a_kill_before_the_first_checkpoint_is_last_loses_no_run(place, monkeypatch):
    place.write_preset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "link", lambda *arguments: killed())
        with pytest.raises(Killed):
            place.train()
    assert not Path("runs/tiny/last").exists()
    place.train("--resume", "runs/tiny")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 8


def killed():
    raise Killed


def test_resuming_a_run_without_a_checkpoint_starts_it_from_step_0(place, monkeypatch):
    stopper = Stopper(monkeypatch)
    place.write_preset(**RESUMED)
    whole = run_with_stops(place, stopper, [], "whole")
    stopper.error_after = 2
    with pytest.raises(Killed):
        place.train("tiny.toml", "--train.run-dir", "runs/killed")
    assert not (Path("runs/killed") / "last").exists()
    stopper.error_after = None
    place.train("--resume", "runs/killed")
    assert_same_run(Path("runs/killed"), whole)


def test_resuming_a_finished_run_changes_nothing(place):
    place.write_preset(**RESUMED)
    place.train()
    run = Path("runs/tiny")
    before = checkpoint_bytes(run / "last"), (run / "metrics.jsonl").read_bytes()
    place.train("--resume", "runs/tiny")
    assert (checkpoint_bytes(run / "last"), (run / "metrics.jsonl").read_bytes()) == before


def test_a_moved_run_can_be_resumed(place, monkeypatch):
    stopper = Stopper(monkeypatch)
    place.write_preset(**RESUMED)
    whole = run_with_stops(place, stopper, [], "whole")
    stopper.signal_after = 5
    with pytest.raises(SystemExit):
        place.train("tiny.toml", "--train.run-dir", "runs/old")
    stopper.signal_after = None
    shutil.move("runs/old", "moved")
    place.train("--resume", "moved")
    assert_same_run(Path("moved"), whole)
    assert not Path("runs/old").exists()


# What may change on resuming


@pytest.fixture
def stopped(place, monkeypatch):
    """A run of 8 steps that was stopped after 4."""
    stopper = Stopper(monkeypatch)
    place.write_preset()
    stopper.signal_after = 4
    with pytest.raises(SystemExit):
        place.train()
    stopper.signal_after = None
    return stopper


def test_steps_and_learning_rate_may_change_and_are_said(place, stopped, capsys):
    capsys.readouterr()
    place.train("--resume", "runs/tiny", "--train.steps", "12", "--optim.learning-rate", "0.02")
    said = capsys.readouterr().out
    assert re.search(r"train\.steps = 12 \(it was 8\)", said)
    assert re.search(r"optim\.learning_rate = 0\.02 \(it was 0\.01\)", said)
    records = metrics(Path("runs/tiny"))
    assert [record["step"] for record in records] == list(range(1, 13))
    config = settings(train={"steps": 12}, optim={"learning_rate": 0.02}).optim
    expected = [train.learning_rate(config, step, 12) for step in range(4, 12)]
    assert [record["learning_rate"] for record in records[4:]] == expected
    assert sorted(stopped.hashes) == list(range(12))


def test_what_changed_on_resuming_stays_changed(place, stopped):
    stopped.signal_after = 6
    with pytest.raises(SystemExit):
        place.train("--resume", "runs/tiny", "--train.steps", "12")
    stopped.signal_after = None
    place.train("--resume", "runs/tiny")
    assert metrics(Path("runs/tiny"))[-1]["step"] == 12


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model.d-model", "32"),
        ("model.n-layer", "2"),
        ("model.vocab-size", "300"),
        ("model.rope-scaling.kind", "ntk"),
        ("data.tokenizer", "chars"),
        ("train.seed", "1"),
        ("train.batch-size", "8"),
        ("optim.name", "sgd"),
    ],
)
def test_what_makes_a_run_that_run_may_not_change(place, stopped, option, value):
    before = checkpoint_bytes(Path("runs/tiny/last"))
    with pytest.raises(ConfigError) as refused:
        place.train("--resume", "runs/tiny", f"--{option}", value)
    assert option.replace("-", "_") in str(refused.value)
    assert "\n" not in str(refused.value)
    assert checkpoint_bytes(Path("runs/tiny/last")) == before


def test_a_text_that_changed_under_a_run_is_refused(place, stopped):
    file = place.folder / "text.txt"
    file.write_bytes(file.read_bytes().replace(b"cat", b"dog"))
    with pytest.raises(UserError, match=r"text|data"):
        place.train("--resume", "runs/tiny")


def test_another_number_of_threads_is_said(place, stopped, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    place.train("--resume", "runs/tiny")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "threads: 77 instead of" in line]
    assert "round" in line


def test_logging_and_micro_batches_may_change(place, stopped):
    place.train("--resume", "runs/tiny", "--log.interval", "4", "--train.micro-batch-size", "2")
    assert [record["step"] for record in metrics(Path("runs/tiny"))] == [1, 2, 3, 4, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "needs the folder of a run"),
        (["--resume", "nothing"], "nothing"),
        (["tiny.toml", "--resume", "runs/tiny"], "--resume RUN comes first"),
        (["--train.steps", "3", "--resume=runs/tiny"], "--resume RUN comes first"),
        (["--resume", "runs/tiny", "--train.stepz", "3"], "train.steps"),
    ],
)
def test_a_resume_that_cannot_be_is_one_sentence(place, words, message):
    place.write_preset()
    (place.folder / "runs/tiny").mkdir(parents=True)
    shutil.copy("tiny.toml", "runs/tiny/config.toml")
    with pytest.raises(ConfigError, match=message) as refused:
        train.read_request(words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("file", ["weights.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_resuming_a_damaged_checkpoint_is_one_sentence_that_names_the_file(place, stopped, file, damage):
    path = Path("runs/tiny/last") / file
    if damage == "truncate":
        os.truncate(path, 10)
    else:
        path.unlink()
    with pytest.raises(UserError, match=file):
        place.train("--resume", "runs/tiny")


def test_f49_resuming_goes_back_beyond_a_damaged_checkpoint(place, stopped, capsys):
    run = Path("runs/tiny")
    place.train("--resume", "runs/tiny", "--train.keep-checkpoints", "3", "--train.checkpoint-interval", "2")
    expected = checkpoint_bytes(run / "last")
    os.truncate(run / "last" / "state.safetensors", 10)
    damaged = (run / "last").resolve().name
    capsys.readouterr()
    place.train("--resume", "runs/tiny")
    said = capsys.readouterr().out
    assert f"{damaged}/state.safetensors is damaged" in said
    assert "from step 6" in said
    assert checkpoint_bytes(run / "last") == expected


@pytest.mark.parametrize("left", [None, 50], ids=["missing", "shorter"])
def test_metrics_that_were_lost_are_no_traceback_and_no_rubbish(place, stopped, left, capsys):
    file = Path("runs/tiny/metrics.jsonl")
    if left is None:
        file.unlink()
    else:
        os.truncate(file, left)
    place.train("--resume", "runs/tiny")
    assert "metrics.jsonl has lost lines" in capsys.readouterr().out
    assert [record["step"] for record in metrics(Path("runs/tiny"))][-4:] == [5, 6, 7, 8]


# Signals


def test_a_signal_is_answered_with_how_to_go_on(place, stopped, capsys):
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 4
    shutil.rmtree("runs/tiny")
    stopped.signal_after = 3
    with pytest.raises(SystemExit):
        place.train()
    assert "stopped at step 3, saved; go on with: python train.py --resume runs/tiny" in capsys.readouterr().out


def python(*words: str, cwd: Path, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_SIGTERM_saves_and_resuming_ends_as_if_nothing_had_happened(place):
    place.write_preset(**{**RESUMED, "train": {**RESUMED["train"], "steps": 1000, "eval_interval": 500}})
    script = str(ROOT / "train.py")
    whole = python(script, "tiny.toml", "--train.run-dir", "runs/whole", cwd=place.folder)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-u", script, "tiny.toml", "--train.run-dir", "runs/stopped"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=place.folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 1"):
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "go on with: python train.py --resume runs/stopped" in rest
    step = read_checkpoint(place.folder / "runs/stopped/last")[2]["step"]
    assert 0 < step < 1000
    resumed = python(script, "--resume", "runs/stopped", cwd=place.folder)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(place.folder / "runs/stopped", place.folder / "runs/whole")


# Time


class Clock:
    """A clock on which each look takes about a hundredth of a second, now and then more, near the end always."""

    def __init__(self, seed: int, slow_from: float):
        self.now, self.slow_from, self.random = 0.0, slow_from, np.random.default_rng(seed)

    def perf_counter(self) -> float:
        slow = self.now > self.slow_from or self.random.random() < 0.05
        self.now += 0.01 * (1 + self.random.random() + (10 if slow else 0))
        return self.now


@pytest.mark.parametrize(("seed", "slow_from"), [(0, 100), (1, 100), (2, 5), (3, 5.3), (4, 5.4), (5, 5.5), (6, 5.6)])
def test_max_minutes_ends_in_time_with_the_schedule_complete_and_everything_saved(place, monkeypatch, seed, slow_from):
    clock = Clock(seed, slow_from)
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=clock.perf_counter, time=clock.perf_counter))
    place.write_preset(train={"steps": 100_000, "max_minutes": 3 / 60}, log={"interval": 7})
    place.train()
    records = metrics(Path("runs/tiny"))
    _, _, state = read_checkpoint(Path("runs/tiny/last"))
    assert 50 < state["step"] < 300
    assert state["seconds"] < 3.3
    assert records[-1]["step"] == state["step"], "the last step was not measured"
    assert "val_loss" in records[-1], "the run ended without its validation"
    assert records[-1]["learning_rate"] < 0.1 * 1e-2
    load_model(Path("runs/tiny"))


def test_max_minutes_in_real_seconds(place):
    place.write_preset(train={"steps": 1_000_000, "max_minutes": 1 / 60}, log={"interval": 50})
    place.train()
    _, _, state = read_checkpoint(Path("runs/tiny/last"))
    assert 0.3 < state["seconds"] < 5
    assert "val_loss" in metrics(Path("runs/tiny"))[-1]


def test_a_run_that_max_minutes_ended_is_finished_until_it_is_given_more(place, capsys):
    place.write_preset(train={"steps": 1_000_000, "max_minutes": 0.5 / 60}, log={"interval": 50})
    place.train()
    before = checkpoint_bytes(Path("runs/tiny/last"))
    step = read_checkpoint(Path("runs/tiny/last"))[2]["step"]
    place.train("--resume", "runs/tiny")
    assert "runs/tiny is finished; to go on: python train.py --resume runs/tiny --train.max-minutes M" in (
        capsys.readouterr().out
    )
    assert checkpoint_bytes(Path("runs/tiny/last")) == before
    place.train("--resume", "runs/tiny", "--train.max-minutes", str(1 / 60))
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] > step


def test_max_minutes_counts_evaluations_too(place, monkeypatch):
    clock = Clock(0, 100)
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    evaluate = train.Trainer.evaluate

    def slow(trainer):
        clock.now += 0.5
        return evaluate(trainer)

    monkeypatch.setattr(train.Trainer, "evaluate", slow)
    place.write_preset(train={"steps": 100_000, "max_minutes": 3 / 60, "eval_interval": 20})
    place.train()
    state = read_checkpoint(Path("runs/tiny/last"))[2]
    assert state["other_seconds"] > 1.4
    assert 2.3 < state["seconds"] + state["other_seconds"] < 3.6
    assert metrics(Path("runs/tiny"))[-1]["learning_rate"] < 0.1 * 1e-2


def test_max_minutes_that_a_save_uses_up_still_end_with_an_evaluation(place, monkeypatch):
    clock = Clock(0, 100)
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    save = train.Trainer.save

    def slow(trainer, **options):
        clock.now += 0.2
        return save(trainer, **options)

    monkeypatch.setattr(train.Trainer, "save", slow)
    place.write_preset(train={"steps": 100_000, "max_minutes": 3 / 60, "checkpoint_interval": 1, "eval_interval": 0})
    place.train()
    assert "val_loss" in metrics(Path("runs/tiny"))[-1]
    assert os.readlink("runs/tiny/best") == os.readlink("runs/tiny/last")


def test_a_run_that_ends_before_its_max_minutes_is_the_run_without_a_limit(place):
    place.write_preset(**RESUMED)
    place.train("tiny.toml", "--train.run-dir", "runs/limited", "--train.max-minutes", "1000")
    place.train("tiny.toml", "--train.run-dir", "runs/free")
    assert_same_run(Path("runs/limited"), Path("runs/free"))


# The machine


def imitate(
    monkeypatch, cuda=False, mps=False, gpu_bf16=True, amx=False, avx512_bf16=False, compiler="works", **options
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu_bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(compiling.shutil, "which", lambda name, *arguments: f"/usr/bin/{name}" if compiler else None)
    monkeypatch.setattr(machine, "compiler_works", lambda: compiler == "works")
    auto = {"device": "auto", "dtype": "auto", "compile": "auto"}
    return train.choose_machine(settings(train={**auto, **options}))


@pytest.mark.parametrize(
    ("has", "device", "dtype"),
    [
        ({}, "cpu", torch.float32),
        ({"amx": True}, "cpu", torch.bfloat16),
        ({"avx512_bf16": True}, "cpu", torch.bfloat16),
        ({"cuda": True}, "cuda", torch.bfloat16),
        ({"cuda": True, "gpu_bf16": False}, "cuda", torch.float32),
        ({"cuda": True, "mps": True}, "cuda", torch.bfloat16),
        ({"mps": True}, "mps", torch.float32),
        ({"cuda": True, "amx": False, "device": "cpu"}, "cpu", torch.float32),
        ({"amx": True, "dtype": "float32"}, "cpu", torch.float32),
        ({"dtype": "bfloat16"}, "cpu", torch.bfloat16),
    ],
    ids=str,
)
def test_auto_is_what_the_machine_has_and_is_said_in_a_line(monkeypatch, capsys, has, device, dtype):
    def timing():
        raise AssertionError("auto looked at a clock")

    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=timing, time=timing, monotonic=timing))
    chosen = imitate(monkeypatch, **has)
    assert (chosen.device, chosen.dtype) == (device, dtype)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"device {device}" in line
    assert str(dtype).removeprefix("torch.") in line
    assert "compiled" in line


def test_without_a_compiler_auto_compiles_nothing_and_says_so_and_on_is_refused(monkeypatch, capsys):
    for cuda in (False, True):
        assert imitate(monkeypatch, cuda=cuda, compiler=None).compile is False
        assert "no C++ compiler" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"train.compile = on needs a C\+\+ compiler"):
        imitate(monkeypatch, compile="on", compiler=None)


def test_compile_is_on_and_off_as_asked(monkeypatch):
    assert imitate(monkeypatch, compile="on").compile is True
    assert imitate(monkeypatch, compile="off").compile is False
    assert imitate(monkeypatch, cuda=True).compile is True


LONG = {"steps": 10**9}  # some minutes, whatever the processor


def test_on_a_cpu_auto_compiles_what_runs_for_minutes_with_a_compiler_that_works(monkeypatch, capsys):
    assert imitate(monkeypatch, **LONG).compile is True
    for short in ({}, {**LONG, "max_minutes": 1.0}):
        assert imitate(monkeypatch, **short).compile is False
        assert "so short" in capsys.readouterr().out
    assert imitate(monkeypatch, compiler="broken", **LONG).compile is False
    assert "the C++ compiler does not work" in capsys.readouterr().out


def test_a_run_takes_six_operations_for_each_parameter_and_token(corpus):
    config = settings(model={"vocab_size": 300}, train={"steps": 7, "batch_size": 3})
    n_parameters = sum(parameter.numel() for parameter in train.build_model(config.model).parameters())
    assert machine.run_operations(config) == 6 * n_parameters * 7 * 3 * config.model.max_seq_len


@pytest.mark.parametrize("broken", [{"CXX": "/bin/false"}, {"TORCHINDUCTOR_CACHE_DIR": "/dev/null/no"}], ids=str)
def test_a_compiler_that_fails_is_noticed(broken, tmp_path):
    code = "import compiling; print(compiling.compiler_works())"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **broken}
    root = Path(train.__file__).parent
    ended = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr


@pytest.mark.parametrize("compiler", [None, "broken"])
def test_a_compiled_run_goes_on_uncompiled_where_there_is_no_compiler(monkeypatch, capsys, compiler):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(machine, "compiler_works", lambda: False)
    config = settings(train={"device": "cpu", "compile": "on"})
    assert train.choose_machine(config, "as before").compile is False
    assert "sums may round differently" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        train.choose_machine(config)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_by_name(monkeypatch, device):
    with pytest.raises(ConfigError, match=rf"train\.device = {device} is not available here; available: cpu"):
        imitate(monkeypatch, device=device)


def test_F57_the_default_device_here_is_what_there_is_and_an_explicit_cpu_asks_no_gpu(monkeypatch, capsys):
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert train.choose_machine(Config()).device == "cpu"

    def crash(*arguments, **options):
        raise RuntimeError("the driver is too old")

    for name in ("is_bf16_supported", "get_device_capability", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, crash)
    assert train.choose_machine(settings(train={"device": "cpu", "dtype": "auto"})).device == "cpu"


def test_F57_a_bare_import_touches_no_driver():
    code = "import train, torch; assert not torch.cuda.is_initialized(); print(torch.cuda._initialized)"
    result = python("-c", code, cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


# The folder of a run


def test_a_run_is_named_after_its_preset_and_takes_the_next_free_name(place):
    place.write_preset(train={"steps": 1}, optim={"warmup_steps": 0})
    (place.folder / "runs" / "tiny-3").mkdir(parents=True)
    for _ in range(3):
        place.train()
    assert sorted(path.parent.name for path in Path("runs").glob("*/config.toml")) == ["tiny", "tiny-2", "tiny-4"]


def test_an_explicit_folder_may_be_new_or_empty(place):
    place.write_preset(train={"steps": 1}, optim={"warmup_steps": 0})
    Path("empty").mkdir()
    for folder in ("empty", "deep/er/new"):
        place.train("--train.run-dir", folder)
        load_model(folder)


def test_a_folder_that_holds_a_run_is_refused_naming_resume(place):
    place.write_preset(train={"steps": 1}, optim={"warmup_steps": 0})
    place.train("--train.run-dir", "mine")
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("mine").rglob("*"))
    with pytest.raises(ConfigError, match=r"train\.run_dir = mine is in use already; .*--resume mine"):
        place.train("--train.run-dir", "mine")
    assert sorted((path, path.stat().st_mtime_ns) for path in Path("mine").rglob("*")) == before


@pytest.mark.parametrize("folder", ["file", "file/run", "full"])
def test_a_folder_that_is_something_else_is_refused(place, folder):
    place.write_preset()
    Path("file").write_text("mine")
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=rf"train\.run_dir = {folder}"):
        place.train("--train.run-dir", folder)
    assert Path("file").read_text() == Path("full/thesis.txt").read_text() == "mine"


REFUSED_STARTS = {
    "text too short": (["--model.max-seq-len", "4000"], "max_seq_len"),
    "validation too short": (["--model.max-seq-len", "300"], "val split"),
    "vocabulary too small": (["--model.vocab-size", "100"], "vocab_size = 100"),
    "no such text": (["--data.source", "nothing.txt"], "nothing.txt"),
    "no pairs": (["--model.kind", "encoder_decoder"], "text.txt has no pairs for an encoder-decoder"),
    "no such device": (["--train.device", "mps"], "train.device = mps"),
    "no wandb": (["--log.wandb", "offline"], "pip install wandb"),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("reason", REFUSED_STARTS)
def test_a_refused_start_is_one_sentence_and_leaves_nothing_behind(place, monkeypatch, reason, explicit):
    words, message = REFUSED_STARTS[reason]
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    place.write_preset()
    with pytest.raises(UserError, match=message) as refused:
        place.train(*words, *(["--train.run-dir", "mine"] if explicit else []))
    assert "\n" not in str(refused.value)
    assert {path.name for path in place.folder.iterdir()} <= {"tiny.toml", "text.txt", "data"}
    assert not list(place.folder.glob("data/cache/.*"))


def test_the_command_ends_with_one_line_and_exit_code_2(place):
    place.write_preset()
    result = python(str(ROOT / "train.py"), "tiny.toml", "--model.max-seq-len", "4000", cwd=place.folder)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "model.max_seq_len" in line


def test_a_run_folder_is_all_there(place, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(place.folder)
    place.write_preset(train={"eval_interval": 4})
    place.train()
    run = Path("runs/tiny")
    names = {"config.toml", "tokenizer", "metrics.jsonl", "loss.png", "best", "last", "step-000004", "step-000008"}
    assert {path.name for path in run.iterdir()} <= names
    assert {path.name for path in run.iterdir()} >= names - {"step-000004"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = train.read_toml(run / "config.toml")
    assert (config.model.vocab_size, config.model.n_kv_head, config.model.head_dim) == (257, 2, 8)


def test_auto_stays_auto_in_the_configuration_of_a_run(place):
    place.write_preset(train={"steps": 1, "device": "auto", "dtype": "auto"}, optim={"warmup_steps": 0})
    place.train()
    config = train.read_toml("runs/tiny/config.toml")
    assert (config.train.device, config.train.dtype) == ("auto", "auto")
    state = read_checkpoint(Path("runs/tiny/last"))[2]
    assert "auto" not in json.dumps(state["machine"])


# What is told


def test_what_will_happen_is_said_before_it_does(place, capsys):
    place.write_preset(train={"steps": 200, "eval_interval": 100}, log={"sample_tokens": 8, "interval": 50})
    place.train()
    said = capsys.readouterr().out
    tokens = len(text().encode())
    assert "200 steps of 4 x 16 tokens" in said
    passes = float(re.search(r"= ([\d.]+) passes", said)[1])
    assert passes == pytest.approx(200 * 4 * 16 / (0.9 * tokens), rel=0.1)
    assert "note: more than about ten passes" not in said or passes > 10
    assert said.index("passes over") < said.index("step 50/200")
    assert re.search(r"step 100 · validation \d\.\d{4} nats/token, \d\.\d{4} bits/byte", said)
    assert "\n  | " in said  # a sample
    assert re.search(r"tokens/s \(\d+% of peak\) · \d+ s left", said)
    assert "python sample.py runs/tiny" in said


def test_more_than_ten_passes_are_warned_of(place, capsys):
    place.write_preset(train={"steps": 300}, log={"interval": 150})
    place.train()
    assert "note: more than about ten passes" in capsys.readouterr().out


def test_metrics_hold_every_logged_step_and_count_tokens(place):
    place.write_preset(train={"steps": 7, "eval_interval": 4}, log={"interval": 3})
    place.train()
    records = metrics(Path("runs/tiny"))
    assert [record["step"] for record in records] == [3, 4, 6, 7]
    assert ["val_loss" in record for record in records] == [False, True, False, True]
    assert [record["tokens"] for record in records] == [64 * record["step"] for record in records]
    assert all({"loss", "learning_rate", "gradient_norm"} <= record.keys() for record in records)


# Seeds


def test_every_step_of_a_run_is_seeded_apart():
    """Seeds from (seed, step, micro-batch): none of the small ones meet."""
    drawn = set()
    for numbers in [(a, b, c) for a in range(3) for b in range(5) for c in range(3)]:
        train.seed_everything(*numbers)
        drawn.add(torch.rand(1, dtype=torch.float64).item())
    assert len(drawn) == 45


def test_batches_come_from_the_run_s_own_seed(corpus):
    for seed in (0, 5):
        trainer = make_trainer(corpus, train={"seed": seed})
        expected = Batches(corpus.train.tokens, 16, 4, seed).batch(3)
        assert all(torch.equal(a, b) for a, b in zip(trainer.batches.batch(3), expected, strict=True))


# Faults met in use


def test_a_closed_output_does_not_stop_training(place):
    place.write_preset()
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "tiny.toml"],
        cwd=place.folder, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 8


def test_a_vocabulary_without_room_for_the_end_of_text_is_refused(place):
    place.write_preset()
    with pytest.raises(UserError, match=r"256.*model.vocab_size = 256"):
        place.train("--model.vocab-size", "256")
    assert not Path("runs").exists()


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    trainer = make_trainer(byte_corpus(tmp_path), tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        UserError, match=r"the norm of the gradient is (nan|inf) at step 0.*--optim.learning-rate 3e-03"
    ):
        trainer.step()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_run_whose_text_has_moved_goes_on(place, stopped):
    Path("text.txt").rename("moved.txt")
    place.train("--resume", "runs/tiny", "--data.source", "moved.txt")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 8


def test_resuming_a_run_that_is_not_there_names_those_that_are(place, stopped):
    with pytest.raises(ConfigError, match=r"runs/nope: there is no run in that folder; the newest runs: runs/tiny"):
        place.train("--resume", "runs/nope")


def test_a_copied_checkpoint_folder_is_nobody_s_business(place, stopped):
    shutil.copytree("runs/tiny/step-000004", "runs/tiny/step-000004-copy")
    place.train("--resume", "runs/tiny")
    assert read_checkpoint(Path("runs/tiny/last"))[2]["step"] == 8


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(place, stopped, monkeypatch):
    before = checkpoint_bytes(Path("runs/tiny/last"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "save_checkpoint", full)
    with pytest.raises(UserError, match=r"step 8 could not be saved in runs/tiny: .*No space left"):
        place.train("--resume", "runs/tiny")
    assert checkpoint_bytes(Path("runs/tiny/last")) == before


def test_a_runs_that_is_a_file_is_one_sentence(place):
    place.write_preset()
    Path("runs").write_text("")
    with pytest.raises(ConfigError, match="runs"):
        place.train()


def test_what_auto_became_is_used_again(place, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    place.write_preset(train={"device": "auto", "dtype": "auto", "compile": "auto"})
    place.train()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    capsys.readouterr()
    place.train("--resume", "runs/tiny", "--train.steps", "9")
    assert "float32 (as before)" in capsys.readouterr().out
    place.train("--train.steps", "1")
    assert "bfloat16 (the processor" in capsys.readouterr().out


def test_keeping_one_checkpoint_keeps_one_when_it_is_the_best(place, monkeypatch):
    place.write_preset(train={"eval_interval": 1, "keep_checkpoints": 1})
    evaluate = train.Trainer.evaluate
    monkeypatch.setattr(
        train.Trainer, "evaluate", lambda trainer: {**evaluate(trainer), "val_loss": 1 / trainer.state.step}
    )
    place.train()
    assert [folder.name for folder in checkpoint.checkpoints(Path("runs/tiny"))] == ["step-000008"]
    assert os.readlink("runs/tiny/best") == os.readlink("runs/tiny/last") == "step-000008"


def test_fewer_steps_than_were_done_are_refused(place, stopped):
    config = Path("runs/tiny/config.toml").read_text()
    with pytest.raises(ConfigError, match=r"train\.steps = 2: the run is at step 4 already"):
        place.train("--resume", "runs/tiny", "--train.steps", "2")
    assert Path("runs/tiny/config.toml").read_text() == config


def test_a_run_that_was_killed_as_it_began_can_be_resumed(place, monkeypatch):
    place.write_preset()
    write_config = train.write_whole

    def killed_after(*arguments):
        write_config(*arguments)
        raise Killed

    monkeypatch.setattr(train, "write_whole", killed_after)
    with pytest.raises(Killed):
        place.train("--train.run-dir", "here")
    monkeypatch.undo()
    os.chdir(place.folder)
    monkeypatch.setattr(progress, "loss_curve", lambda *_: None)
    place.train("--resume", "here")
    assert read_checkpoint(Path("here/last"))[2]["step"] == 8


def test_more_than_the_memory_is_one_sentence(place):
    place.write_preset()
    with pytest.raises(UserError, match="not enough memory"):
        place.train("--model.vocab-size", "2147483647", "--model.d-model", "1048576")
