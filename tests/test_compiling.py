"""A compiled step of one token is the step; and only such steps are compiled."""

import copy

import pytest
import torch

import compiling
from compiling import compiled
from generation import generate, stream
from tests.helpers import WINDOW, allocate, assert_close, build, random_tokens

LLAMA = {"n_kv_head": 2, "window": WINDOW, "qk_norm": True, "tie_embeddings": False}
GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
VASWANI = {"position": "sinusoidal", "norm": "layernorm", "norm_position": "post", "activation": "relu", "bias": True}
slow = pytest.mark.slow


@pytest.mark.skipif(compiling.compiler_missing(), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (LLAMA, torch.float32),
        pytest.param(GPT2, torch.float32, marks=slow),
        pytest.param(VASWANI, torch.float32, marks=slow),
        pytest.param({"n_kv_head": 1, "position": "none", "activation": "relu2"}, torch.float32, marks=slow),
        pytest.param(LLAMA, torch.bfloat16, marks=slow),
    ],
)
def test_a_compiled_step_is_the_step(options, dtype):
    model, tokens = build(**options).to(dtype).eval(), random_tokens(1, 3 * WINDOW)
    plain, cache = (allocate(model, dtype=dtype) for _ in range(2))
    with compiled(model), torch.no_grad():
        model(tokens[:, :3], cache=cache)
        found = [model(tokens[:, i : i + 1], cache=cache) for i in range(3, tokens.shape[1])]
    with torch.no_grad():
        model(tokens[:, :3], cache=plain)
        expected = [model(tokens[:, i : i + 1], cache=plain) for i in range(3, tokens.shape[1])]
    largest = max(logits.abs().max() for logits in expected)
    assert_close(torch.cat(found), torch.cat(expected), 1e-4 if dtype == torch.float32 else 0.05 * float(largest))
    if dtype == torch.float32:
        assert model.decoder.compiled_run is None
        text = generate(model, tokens[:, :5].tolist(), max_new_tokens=20)
        with compiled(model):  # which was compiled above: of the same shapes, but for the room in the cache
            assert generate(model, tokens[:, :5].tolist(), max_new_tokens=20) == text


@pytest.fixture
def steps(monkeypatch):
    """The positions of the steps that would have been compiled."""
    found = []

    def record(run_blocks, **_):
        def compiled_run(stack, x, mask, turns, memory, step, observe):
            assert x.shape[:2] == (1, 1)
            found.append(step.end)
            return run_blocks(stack, x, mask, turns, memory, step, observe)

        return compiled_run

    monkeypatch.setattr(torch, "compile", record)
    return found


def test_only_steps_of_one_token_with_a_cache_are_compiled(steps):
    model, one, other = build(window=WINDOW), *random_tokens(2, 4).tolist()
    with compiled(model):
        generate(model, [one], max_new_tokens=5)
        assert steps == [5, 6, 7, 8]
        steps.clear()
        generate(model, [one[:1]], max_new_tokens=4)
        assert steps == [2, 3, 4]  # of the first token there is nothing to look at but itself
        steps.clear()
        generate(model, [one, other], max_new_tokens=5)
        generate(model, [one[:1]], max_new_tokens=5, use_cache=False)
        model(torch.tensor([one[:1]]))
        assert steps == []
    generate(model, [one], max_new_tokens=5)
    assert steps == []


def test_a_row_that_is_left_alone_is_compiled_and_an_encoder_decoder_never(steps):
    with compiled(model := build()):
        ends = [next(iter(generate(model, [prompt], max_new_tokens=1)))[0] for prompt in ([1, 2], [3, 4])]
        steps.clear()
        rows = [row for row, *_ in stream(model, [[1, 2], [3, 4]], max_new_tokens=4, end_id=ends[0])]
        assert ends[0] != ends[1]
        assert rows == [0, 1, 1, 1, 1]
        assert steps == [3, 4, 5]
    steps.clear()
    pairs = build(kind="encoder_decoder", n_encoder_layer=1, position="sinusoidal")
    with compiled(pairs):
        generate(pairs, [[1, 2, 3]], max_new_tokens=4, end_id=0)
    assert steps == []


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights_and_contexts_nest(steps):
    model = build()
    with compiled(model):
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
        with compiled(model):
            pass
        found = generate(other, [[1, 2, 3]], max_new_tokens=6)
        assert steps == [4, 5, 6, 7, 8]
        assert model.decoder.compiled_run is not None
    other.decoder.compiled_run = None
    assert generate(other, [[1, 2, 3]], max_new_tokens=6) == found
    assert model.decoder.compiled_run is None
