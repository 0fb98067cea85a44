"""What only an accelerator can show. Run with: pytest -m gpu"""

import subprocess
import sys

import pytest
import torch

import train
from attention import KERNELS
from cache import KVCache
from checkpoint import read_checkpoint
from config.schema import ModelConfig
from generation import beam_search, generate
from model import build_model
from tests.helpers import TINY
from tests.test_distributed import ROOT, torchrun
from tests.training import PAIRS, Place, byte_corpus, metrics, pair_corpus, settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_model(ModelConfig(**TINY, n_kv_head=2, window=5)).cuda().eval()


def test_every_kernel_is_the_definition(model):
    tokens = torch.randint(31, (2, 40), device="cuda")
    outputs = []
    for kernel in KERNELS:
        other = build_model(model.config.model_copy(update={"kernel": kernel})).cuda().eval()
        other.load_state_dict(model.state_dict())
        outputs.append(other(tokens))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-4, rtol=0)


def test_cached_is_uncached(model):
    tokens = torch.randint(31, (2, 40), device="cuda")
    cache = KVCache.allocate(model.config, 2, 40, device="cuda")
    pieces = [model(piece, cache=cache) for piece in tokens.split([3, 1, 5, 1, 30], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-4, rtol=0)


def test_greedy_text_is_that_of_the_cpu(model):
    prompts = [[1, 2, 3], [4]]
    assert generate(model, prompts, max_new_tokens=30) == generate(model.cpu(), prompts, max_new_tokens=30)


def test_bfloat16_trains():
    model = build_model(ModelConfig(**TINY)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = torch.randint(31, (4, 33), device="cuda")
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("options", [{"dtype": "auto"}, {"dtype": "float16"}, {"compile": "on"}], ids=str)
def test_a_run_goes_on_where_it_was_saved(tmp_path, options):
    config = settings(train={"device": "cuda", **options})
    corpus, machine = byte_corpus(tmp_path), train.choose_machine(config)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    first = train.Trainer(config, tmp_path, corpus, machine)
    for _ in range(3):
        first.step()
    folder = first.save()
    second = train.Trainer(config, tmp_path, corpus, machine)
    second.restore(folder, *read_checkpoint(folder))
    for _ in range(3):
        assert second.step()["loss"] == pytest.approx(first.step()["loss"], rel=1e-3)
    assert first.evaluate()["val_loss"] == pytest.approx(second.evaluate()["val_loss"], rel=1e-3)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_an_encoder_decoder_trains_is_graded_and_translates_as_on_the_cpu(tmp_path, compile):
    config = settings(model={**PAIRS, "max_seq_len": 64}, train={"device": "cuda", "compile": compile})
    corpus, losses = pair_corpus(tmp_path), []
    for machine in (train.choose_machine(config), train.Machine("cpu", torch.float32, False)):
        trainer = train.Trainer(config, tmp_path, corpus, machine)
        losses.append([*(trainer.step()["loss"] for _ in range(6)), trainer.evaluate()["val_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    source = [trainer.pairs["val"].source(0)]
    options = {"beams": 3, "max_new_tokens": 8, "end_id": 256}
    on_cpu = beam_search(trainer.model, source, **options)
    on_gpu = beam_search(trainer.model.cuda(), source, **options)
    assert [one.ids for one in on_gpu[0]] == [one.ids for one in on_cpu[0]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_compute_what_one_does(tmp_path, strategy):
    train_options = {"device": "cuda", "eval_interval": 4, "micro_batch_size": 2, "strategy": strategy}
    Place(tmp_path).write_preset(model={"dropout": 0.1}, train=train_options, log={"interval": 1, "sample_tokens": 4})
    words = ["tiny.toml", "--train.run-dir"]
    one = subprocess.run([sys.executable, ROOT / "train.py", *words, "one"], cwd=tmp_path, capture_output=True)
    assert one.returncode == 0, one.stderr
    two = torchrun(tmp_path, *words, "two")
    assert two.returncode == 0, two.stderr
    losses = [[record["loss"] for record in metrics(tmp_path / run)] for run in ("one", "two")]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
