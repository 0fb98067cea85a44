import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import jacobian

from attention import Mask
from config.schema import ModelConfig
from experiments.depth import (
    CLAIMS,
    DEPTHS,
    FULL,
    NEITHER,
    NO_NORM,
    NO_RESIDUAL,
    NO_SCALE,
    STARTS,
    STEPS,
    curvature,
    deep_model,
    derivative_norm,
    gradient_norms,
    kept,
    leave_out,
    linear_feed_forward,
    no_feed_forward,
    saturation,
    superposition,
)
from model import build_model
from tests.claims import cases, check_rule


def deep_runs(**losses):
    """Of each variant the losses at 2, 6 and 12 layers, from the small and then from the unit start."""
    runs = {}
    for variant, six in losses.items():
        found = [{"loss": loss, "curve": [6.0] * (STEPS // 10), "gradients": [0.1, 0.2], "rate": 0.01} for loss in six]
        halves = (found[:3], found[3:])
        name = variant.replace("_", " ")
        runs[name] = {s: dict(zip(map(str, DEPTHS), half, strict=True)) for s, half in zip(STARTS, halves, strict=True)}
    return runs


def scale_and_depth(peak, bare_at_12):
    bare = [3.0, 3.2, bare_at_12]
    seeds = {FULL: 3.0, NO_SCALE: bare_at_12}
    return {
        "widths": [64, 1024],
        "unscaled": [{"largest": 0.9, "derivative": 0.1}, {"largest": peak, "derivative": 1e-3}],
        "scaled": [{"largest": 0.1, "derivative": 0.15}] * 2,
        "runs": deep_runs(full=[3.0] * 6, no_scale=bare * 2, no_norm=[3.0] * 6, no_residual=[6.0] * 6),
        "seeds": {v: {start: [loss - 0.1, loss, loss + 0.1] for start in STARTS} for v, loss in seeds.items()},
        "unigram": 6.0,
    }


def add_and_norm(no_norm, no_residual):
    runs = deep_runs(full=[3.0] * 6, no_norm=no_norm, no_residual=no_residual, neither=[3.5] * 6)
    return {"runs": runs, "unigram": 6.0}


def non_linearity(full, linear, none, deeper):
    losses = {"full": full, "linear": linear, "none": none, "none, three times as deep": deeper}
    return {
        "loss": {name: [loss - 0.01, loss, loss + 0.01] for name, loss in losses.items()},
        "parameters": dict.fromkeys(losses, 300_000),
        "curvature": {"full": {"attention": 0.4, "feed-forward": 0.6}, "linear": {"attention": 0.4, "feed-forward": 0}},
    }


BROKEN, WHOLE = [3.0, 4.0, 5.9], [3.0, 3.0, 3.1]
NUMBERS = {
    "A9": {
        "holds": scale_and_depth(0.999, 5.5),
        "holds with a condition": scale_and_depth(0.999, 3.5),
        "does not hold": scale_and_depth(0.999, 3.1),
    },
    "F2": {
        "holds": add_and_norm(BROKEN * 2, BROKEN * 2),
        "holds with a condition": add_and_norm(WHOLE + BROKEN, BROKEN * 2),
        "does not hold": add_and_norm(WHOLE * 2, WHOLE * 2),
    },
    "F1": {
        "holds": non_linearity(2.0, 2.4, 2.5, 2.2),
        "holds with a condition": non_linearity(2.0, 2.4, 2.5, 1.9),
        "does not hold": non_linearity(2.0, 2.0, 2.5, 2.2),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_other_ways_to_refute_or_to_confirm_in_part():
    scale, non_linear, norms = (next(claim for claim in CLAIMS if claim.id == id) for id in ("A9", "F1", "F2"))
    assert scale.verdict(scale_and_depth(0.9, 5.5)) == "does not hold"  # no saturation
    assert non_linear.verdict(non_linearity(2.0, 2.1, 2.5, 2.2)) == "holds with a condition"  # mostly the parameters
    assert norms.verdict(add_and_norm([5.9] * 3 + WHOLE, WHOLE * 2)) == "does not hold"  # depth has no part in it


def test_kept_is_a_share_of_what_was_learned_beyond_frequencies():
    numbers = {"runs": deep_runs(full=[2.0] * 6, no_norm=[3.0] * 6), "unigram": 6.0}
    assert kept(numbers, NO_NORM, STARTS[0], 6) == pytest.approx(0.75)
    assert kept(numbers, FULL, STARTS[0], 6) == 1


def test_the_softmax_derivative_is_that_of_autograd():
    scores = 3 * torch.randn(5, 9, dtype=torch.float64)
    by_autograd = [torch.linalg.matrix_norm(jacobian(lambda s: s.softmax(-1), row)) for row in scores]
    torch.testing.assert_close(derivative_norm(scores.softmax(-1)), torch.stack(by_autograd))


def test_saturation_is_that_of_scores_of_the_same_deviation():
    scores = 8 * torch.randn(4000, 128, dtype=torch.float64)
    by_scores = scores.softmax(-1).amax(-1).median().item()
    assert saturation(64, 1.0)["largest"] == pytest.approx(by_scores, abs=0.1)
    assert saturation(64, 0.125)["largest"] < 0.2


def block_and_input(variant):
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 1, "d_model": 16, "head_dim": 32, "vocab_size": 20, "activation": "gelu"}
    block = build_model(ModelConfig(**shape, norm="layernorm", position="none")).decoder.blocks[0]
    for layer in block.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data *= 10
    leave_out(variant, block)
    return block, torch.randn(2, 5, 16)


@pytest.mark.parametrize("variant", [FULL, NO_SCALE, NO_NORM, NO_RESIDUAL, NEITHER])
def test_what_is_left_out_of_a_block(variant):
    block, x = block_and_input(variant)
    attention, norm = block.attention, variant not in (NO_NORM, NEITHER)

    def normed(x):
        return F.layer_norm(x, x.shape[-1:]) if norm else x

    y = normed(x)
    scores = attention.q_proj(y) @ attention.k_proj(y).mT / (1 if variant == NO_SCALE else 32**0.5)
    weights = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    stays = 0 if variant in (NO_RESIDUAL, NEITHER) else 1
    h = stays * x + attention.o_proj(weights @ attention.v_proj(y))
    up, down = block.feed_forward.up_proj, block.feed_forward.down_proj
    by_hand = stays * h + down(F.gelu(up(normed(h)), approximate="tanh"))
    torch.testing.assert_close(block(x, Mask(5, 5)), by_hand, rtol=1e-4, atol=1e-4)


def test_the_unit_start_gives_queries_and_keys_of_unit_variance():
    for start, low, high in ((STARTS[0], 0, 0.3), (STARTS[1], 0.9, 1.1)):
        model, batch = deep_model(FULL, start, 2, seed=0)
        block, (inputs, _) = model.decoder.blocks[0], batch(0)
        q, k, _ = block.attention.queries_keys_values(block.attention_norm(model.decoder.embed(inputs)))
        assert len(inputs) == 8
        assert low < q.std() < high
        assert low < k.std() < high


def test_no_norm_is_left_anywhere():
    model, _ = deep_model(NO_NORM, STARTS[0], 2, seed=0)
    assert not [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]


def test_gradient_norms_are_those_of_each_blocks_matrices():
    model, batch = deep_model(FULL, STARTS[0], 2, seed=0)
    inputs, targets = batch(0)
    found = gradient_norms(model, inputs, targets)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    for norm, block in zip(found, model.decoder.blocks, strict=True):
        matrices = [layer.weight for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
        gradients = torch.autograd.grad(loss, matrices, retain_graph=True)
        assert norm == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def small_model(change=None):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "d_model": 16, "vocab_size": 40, "activation": "gelu"}
    model = build_model(ModelConfig(**shape))
    for parameter in model.parameters():
        parameter.data *= 10
    if change:
        change(model)
    return model


def test_superposition_tells_linear_from_other_functions():
    x, matrix = torch.randn(3, 4), torch.randn(4, 4)
    assert superposition(lambda x: x @ matrix, x, torch.randn(3, 4)) < 1e-6
    assert superposition(torch.square, x, x) == pytest.approx(0.5)


def test_the_linear_feed_forward_is_linear_and_attention_is_not():
    tokens = torch.arange(24).view(4, 6)
    full, linear = curvature(small_model(), tokens), curvature(small_model(linear_feed_forward), tokens)
    assert linear["feed-forward"] < 1e-5 < 0.05 < full["feed-forward"]
    assert min(full["attention"], linear["attention"]) > 0.05


def test_without_feed_forward_a_block_is_its_attention():
    model, x = small_model(no_feed_forward), torch.randn(2, 6, 16)
    block = model.decoder.blocks[0]
    q, k, v = block.attention.queries_keys_values(block.attention_norm(x))
    torch.testing.assert_close(block(x, Mask(6, 6)), x + block.attention(q, k, v, Mask(6, 6)))
    assert not [name for name, _ in model.named_parameters() if "up_proj" in name]
