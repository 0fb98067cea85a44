import math

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.autograd.functional import jacobian

from attention import Mask
from config.schema import ModelConfig
from experiments import depth, lab
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


def deep_numbers(**losses):
    """Of each variant the losses at 2, 6 and 12 layers, from the small and then from the unit start."""
    runs = {}
    for variant, six in losses.items():
        found = [{"loss": loss, "curve": [6.0] * (STEPS // 10), "gradients": [0.1, 0.2], "rate": 0.01} for loss in six]
        halves = (found[:3], found[3:])
        name = variant.replace("_", " ")
        runs[name] = {s: dict(zip(map(str, DEPTHS), half, strict=True)) for s, half in zip(STARTS, halves, strict=True)}
    seeds = {v: {start: around(found["12"]["loss"]) for start, found in of.items()} for v, of in runs.items()}
    return {"runs": runs, "seeds": seeds, "unigram": 6.0, "nothing": math.log(1024)}


def around(loss):
    return [None if loss is None else loss + less for less in (-0.1, 0, 0.1)]


def scale_and_depth(small, unit, peak=0.999, gradients=(0.001, 0.001)):
    """Unscaled losses from the two starts, and the gradient of the first of 12 layers (the full models have 0.1)."""
    full = [3.0] * 6
    numbers = {
        "widths": [64, 1024],
        "unscaled": [{"largest": 0.9, "derivative": 0.1}, {"largest": peak, "derivative": 1e-3}],
        "scaled": [{"largest": 0.1, "derivative": 0.15}] * 2,
        **deep_numbers(full=full, no_scale=small + unit, no_norm=[*full[:5], None], no_residual=[6.0] * 6),
    }
    for start, gradient in zip(STARTS, gradients, strict=True):
        numbers["runs"][NO_SCALE][start]["12"] |= {"gradients": [gradient, 0.2]}
    return numbers


def add_and_norm(no_norm, no_residual):
    return deep_numbers(full=[3.0] * 6, no_norm=no_norm, no_residual=no_residual, neither=[3.5] * 6)


def non_linearity(full, linear, none, deeper):
    losses = {"full": full, "linear": linear, "none": none, "none, three times as deep": deeper}
    return {
        "loss": {name: [loss - 0.01, loss, loss + 0.01] for name, loss in losses.items()},
        "parameters": dict.fromkeys(losses, 300_000),
        "curvature": {"full": {"attention": 0.4, "feed-forward": 0.6}, "linear": {"attention": 0.4, "feed-forward": 0}},
    }


BROKEN, WHOLE, EARLY = [3.0, 4.0, 5.9], [3.0, 3.0, 3.1], [5.8, 5.9, 5.9]
NUMBERS = {
    "A9": {
        "holds": scale_and_depth(BROKEN, BROKEN),
        "holds with a condition": scale_and_depth(WHOLE, BROKEN),
        "does not hold": scale_and_depth(WHOLE, EARLY),
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


def claim(id):
    return next(claim for claim in CLAIMS if claim.id == id)


@pytest.mark.parametrize(
    ("id", "verdict", "numbers"),
    [
        ("A9", "does not hold", scale_and_depth(BROKEN, BROKEN, peak=0.9)),  # no saturation
        ("A9", "does not hold", scale_and_depth(BROKEN, BROKEN, gradients=(0.02, 9))),  # gradients do not vanish
        ("A9", "does not hold", scale_and_depth(WHOLE, BROKEN, gradients=(0.001, 9))),  # they do where nothing stalls
        ("A9", "does not hold", scale_and_depth([3.0, 3.0, 4.4], WHOLE)),  # worse, but more than half is learned
        ("A9", "holds", scale_and_depth(BROKEN, [3.0, 3.0, None])),
        ("F1", "holds with a condition", non_linearity(2.0, 2.1, 2.5, 2.2)),  # mostly the parameters
        ("F2", "does not hold", add_and_norm([5.9] * 3 + WHOLE, WHOLE * 2)),  # depth has no part in it
        ("F2", "does not hold", add_and_norm(WHOLE * 2, EARLY * 2)),  # nor here, though it grows worse
        ("F2", "holds", add_and_norm([3.0, 3.0, None] * 2, BROKEN * 2)),
    ],
)
def test_other_ways_to_refute_or_to_confirm(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_what_12_layers_do_must_be_more_than_seeds_differ():
    numbers = scale_and_depth(WHOLE, BROKEN)
    numbers["seeds"][NO_SCALE][STARTS[1]] = [3.0, 6.1, 6.2]
    assert claim("A9").verdict(numbers) == "does not hold"


def test_the_finding_tells_the_parts_of_the_claim_apart():
    said = claim("A9").finding(scale_and_depth(WHOLE, EARLY, gradients=(0.1, 9.8)))
    assert "gradients vanish from neither start: before training the first layer's is 1 and 98 times" in said
    assert "Learning stalls from the unit start, and depth is the reason from neither start" in said
    assert (
        "from the unit start 2 layers keep 7% and 12 keep 3%, so there the scale is needed at 2 layers already" in said
    )
    assert "its depth, here, does not" in said
    said = claim("A9").finding(scale_and_depth(WHOLE, BROKEN))
    assert said.startswith("The condition: every part is true from the unit start alone.")
    assert "needed for depth" in said
    assert "its depth, here, does not" not in said


def test_the_finding_judges_where_depth_breaks_and_the_gradients():
    numbers = add_and_norm([*WHOLE, 3.0, 3.0, None], EARLY * 2)
    said = claim("F2").finding(numbers)
    assert "depth is broken by no norm (unit start) alone. " in said
    assert "so that depth is not the reason: no residual (small start), no residual (unit start). " in said
    assert "12 layers without them keep 97%" in said
    assert "is not borne out: their ratio changes more than tenfold from 2 to 12 layers in none. A" in said
    numbers["runs"][NO_NORM][STARTS[1]]["12"]["gradients"] = [0.0001, 0.1]
    numbers["runs"][NEITHER][STARTS[0]]["12"]["gradients"] = [0.0, 0.0]
    said = claim("F2").finding(numbers)
    assert "is in part borne out: their ratio changes more than tenfold from 2 to 12 layers in no norm (unit " in said
    assert "cannot hold a gradient: neither (small start).) A" in said


def test_kept_is_a_share_of_what_was_learned_beyond_frequencies():
    numbers = deep_numbers(full=[2.0] * 6, no_norm=[3.0] * 6)
    assert kept(numbers, NO_NORM, STARTS[0], 6) == pytest.approx(0.75)
    assert kept(numbers, FULL, STARTS[0], 6) == 1
    numbers["seeds"][NO_NORM][STARTS[0]] = [3.0, 4.0, 5.0]  # the deepest has seeds
    assert kept(numbers, NO_NORM, STARTS[0], 12) == pytest.approx(0.5)


def test_what_diverged_has_no_number():
    numbers = deep_numbers(full=[2.0] * 6, no_norm=[3.0, None, None] * 2, no_residual=[6.0] * 6, neither=[6.0] * 6)
    numbers["seeds"][NO_RESIDUAL][STARTS[1]] = [6.0, None, None]
    told = {tuple(row[:3]): row[3:5] for row in claim("F2").table(numbers)}
    assert told[NO_NORM, STARTS[0], "6"] == told[NO_NORM, STARTS[0], "12"] == ["diverged", "diverged"]
    assert told[NO_RESIDUAL, STARTS[1], "12"] == ["2 of 3 diverged, else 6.00 ± 0.00", "-16% (2 of 3 diverged)"]
    assert told[NO_NORM, STARTS[0], "2"] == ["3.00", "75%"]
    assert kept(numbers, NO_NORM, STARTS[0], 6) == pytest.approx((6 - math.log(1024)) / 4)
    figure = Figure((8, 4.5), layout="constrained")
    claim("F2").draw(numbers, figure)
    drawn = next(line for line in figure.axes[0].lines if line.get_label() == NO_NORM).get_ydata()
    assert [math.isnan(value) for value in drawn] == [False, True, True]


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([3.0, 3.1, None], "from the unit start 12 layers keep 55% (1 of 3 diverged)"),
        ([3.0, None, None], "from the unit start 12 layers keep 13% (2 of 3 diverged)"),
        ([None] * 3, "from the unit start 2 layers keep 100% and 12 diverge, so there the scale is needed for depth."),
    ],
)
def test_the_finding_tells_how_many_diverged(seeds, words):
    numbers = scale_and_depth(WHOLE, BROKEN)
    numbers["seeds"][NO_SCALE][STARTS[1]] = seeds
    assert words in claim("A9").finding(numbers)


@pytest.mark.parametrize("gone", [6.0, None])
def test_where_the_full_model_learns_nothing_nothing_is_judged(gone):
    for id, numbers in (("A9", scale_and_depth(WHOLE, BROKEN)), ("F2", add_and_norm(WHOLE + BROKEN, EARLY * 2))):
        assert claim(id).verdict(numbers) == "holds with a condition"
        numbers["seeds"][FULL][STARTS[1]] = [gone] * 3
        assert claim(id).verdict(numbers) == "does not hold"
        assert "nothing beyond frequencies: 12 layers (unit start)." in claim(id).finding(numbers)
    told = {tuple(row[:3]): row[4] for row in claim("F2").table(numbers)}
    assert told[NO_NORM, STARTS[1], "12"] == "not judged"
    assert told[FULL, STARTS[1], "12"] == ("not judged" if gone else "diverged")


@pytest.mark.parametrize(("ends", "loss"), [(6.99, 6.99), (7.1, None), (math.nan, None), (math.inf, None)])
def test_a_run_that_ends_worse_than_knowing_nothing_diverged(monkeypatch, ends, loss):
    monkeypatch.setattr(lab, "fit", lambda *found: [6.0] * 10 + [math.nan] * (STEPS - 10))
    monkeypatch.setattr(depth, "Loss", lambda model: lambda inputs, targets: torch.tensor(ends * targets.numel()))
    monkeypatch.setattr(depth, "gradient_norms", lambda *found: [0.1, 0.3, 0.2])
    found = depth.run.__wrapped__(FULL, STARTS[0], 2, 0.01, 0)
    assert found["loss"] == pytest.approx(loss)
    assert found["curve"] == [6.0] + [None] * (STEPS // 10 - 1)
    assert found["gradients"] == [0.1, 0.2]


def test_the_better_rate_is_one_that_does_not_diverge(monkeypatch):
    monkeypatch.setattr(depth, "run", lambda v, s, n, rate, seed: {"loss": None if rate < 0.01 else 6.5, "rate": rate})
    monkeypatch.setattr(depth, "unigram_loss", lambda: 6.0)
    found = depth.deep_numbers(FULL)
    assert found["runs"][FULL][STARTS[0]]["2"] == {"loss": 6.5, "rate": 0.01}
    assert found["seeds"][FULL][STARTS[1]] == [6.5] * 3
    assert found["nothing"] == pytest.approx(math.log(1024))


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
