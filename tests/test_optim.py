"""Which parameters decay, what a step does to them, and the learning rate at each of its corners."""

import math

import numpy as np
import pytest
import torch

from config.schema import ModelConfig, OptimConfig
from model import build_model
from optim import build_optimizer, learning_rate, orthogonalise, parameter_groups, set_learning_rate

SCHEDULES = ["cosine", "wsd", "constant", "noam"]
SHAPE = {"vocab_size": 11, "n_layer": 1, "n_head": 2, "d_model": 8, "d_ff": 8, "max_seq_len": 8, "position": "learned"}
BIASED = {"bias": True, "norm": "layernorm", "activation": "gelu"}


def rates(steps: int, **options) -> list[float]:
    config = OptimConfig(**options)
    return [learning_rate(config, step, steps) for step in range(steps)]


# The learning rate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_F43_warmup_starts_above_zero_never_falls_and_reaches_the_peak_exactly(schedule):
    values = rates(100, schedule=schedule, learning_rate=1e-3, warmup_steps=10)
    assert values[0] == pytest.approx(1e-4, rel=1e-12)
    assert values[:10] == sorted(values[:10])
    assert values[9] == 1e-3 == max(values)


@pytest.mark.parametrize("peak", [1e-3, 3e-4, 6e-4, 1.5e-4, 3e-3])
def test_F43_the_peak_is_exact_for_every_length_of_warmup(peak):
    for warmup in range(1, 300):
        values = rates(300, schedule="constant", learning_rate=peak, warmup_steps=warmup)
        assert values[warmup - 1] == peak == max(values), f"warm-up {warmup}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("steps", "warmup"),
    [(100, 0), (100, 100), (100, 99), (100, 1), (1, 0), (1, 1), (2, 1), (100, 80)],  # the last: decay (40) is shorter
)
@pytest.mark.parametrize("minimum", [0.0, 1e-4, 1e-3])
def test_F44_degenerate_schedules_are_finite_and_between_minimum_and_peak(schedule, steps, warmup, minimum):
    minimum = 0.0 if schedule == "constant" else minimum  # which has none
    options = {"schedule": schedule, "learning_rate": 1e-3, "min_learning_rate": minimum, "warmup_steps": warmup}
    values = rates(steps, **options)
    config = OptimConfig(**options)
    values.append(learning_rate(config, steps, steps))  # a run that is asked for one step more
    assert all(math.isfinite(value) and value <= 1e-3 * (1 + 1e-12) for value in values)
    assert all(value > 0 for value in values[:steps]), "a step does nothing"
    assert all(value >= minimum * (1 - 1e-12) for value in values[warmup:])
    if warmup:
        assert values[warmup - 1] == 1e-3


def test_cosine_is_half_a_wave_from_peak_to_minimum():
    values = rates(110, schedule="cosine", learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=10)
    assert values[10] == pytest.approx(1e-3, rel=1e-12)
    assert values[60] == pytest.approx(5.5e-4, rel=1e-9)  # half-way
    assert values[35] == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4)), rel=1e-9)
    assert 1e-4 < values[109] < 1.01e-4
    assert values[10:] == sorted(values[10:], reverse=True)


def test_wsd_stays_and_then_falls_linearly_over_its_share_of_all_steps():
    values = rates(100, schedule="wsd", learning_rate=1e-3, warmup_steps=10, decay_fraction=0.4)
    assert values[10:61] == [1e-3] * 51
    assert values[80] == pytest.approx(5e-4)
    assert values[99] == pytest.approx(1e-3 / 40)


def test_constant_stays_at_its_peak_to_the_end():
    assert rates(50, schedule="constant", learning_rate=1e-3, warmup_steps=5)[4:] == [1e-3] * 46


def test_noam_is_the_formula_of_2017_scaled_to_its_peak():
    values = rates(400, schedule="noam", learning_rate=1e-3, warmup_steps=100)
    formula = [min((s + 1) ** -0.5, (s + 1) * 100**-1.5) for s in range(400)]
    assert values == pytest.approx([1e-3 * value / max(formula) for value in formula])
    assert values[399] == pytest.approx(5e-4)  # four times the steps, half the rate


def test_the_learning_rate_is_set_in_every_group():
    optimizer = build_optimizer(build_model(ModelConfig(**SHAPE)), OptimConfig())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


# Groups and decay


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("options", [{}, BIASED, {"qk_norm": True}], ids=["plain", "biased", "qk_norm"])
def test_F12_every_trainable_parameter_is_in_exactly_one_group(tied, kind, options):
    model = build_model(ModelConfig(**SHAPE, kind=kind, tie_embeddings=tied, **options))
    frozen = next(p for p in model.parameters() if p.dim() == 1)
    frozen.requires_grad_(False)
    grouped = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(grouped) == len(set(grouped)), "a parameter is in two groups"
    assert set(grouped) == trainable
    assert grouped.count(id(model.lm_head.weight)) == 1
    assert (model.lm_head.weight is model.decoder.embed.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("options", [{}, BIASED, {"qk_norm": True}], ids=["plain", "biased", "qk_norm"])
def test_F12_with_zero_gradients_decay_shrinks_matrices_alone(tied, name, options):
    model = build_model(ModelConfig(**SHAPE, tie_embeddings=tied, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rates = {"learning_rate": 1.0} | ({"matrix_learning_rate": 1.0} if name == "muon" else {})
    optimizer = build_optimizer(model, OptimConfig(name=name, weight_decay=0.1, **rates))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_vector = "norm" in name or name.endswith("bias")
        expected = before[name] if is_vector else before[name] * 0.9
        torch.testing.assert_close(parameter.detach(), expected, rtol=0 if is_vector else 2e-7, atol=0, msg=name)


def test_weight_decay_0_decays_nothing():
    groups = parameter_groups(build_model(ModelConfig(**SHAPE)), 0.0)
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]


# Steps


def test_adamw_is_its_published_equations_in_float64():
    generator = np.random.default_rng(0)
    start, gradients = generator.normal(size=(3, 4)), generator.normal(size=(5, 3, 4))
    config = OptimConfig(learning_rate=3e-3, betas=(0.8, 0.93), weight_decay=0.2)
    model = torch.nn.Linear(4, 3, bias=False)
    model.weight.data.copy_(torch.tensor(start))
    optimizer = build_optimizer(model, config)
    theta, m, v = start.copy(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        rate = 3e-3 / t  # another one at each step
        set_learning_rate(optimizer, rate)
        model.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.93 * v + 0.07 * gradient**2
        theta -= rate * 0.2 * theta
        theta -= rate * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.93**t)) + 1e-8)
    np.testing.assert_allclose(model.weight.detach().numpy(), theta, rtol=0, atol=1e-6)


def test_sgd_is_a_plain_step_down_the_gradient():
    model = torch.nn.Linear(4, 3, bias=False)
    before, gradient = model.weight.detach().clone(), torch.randn(3, 4)
    optimizer = build_optimizer(model, OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0))
    for _ in range(2):
        model.weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - gradient, rtol=0, atol=1e-6)


def test_a_run_that_ends_before_its_warm_up_still_reaches_the_peak():
    """As `max_minutes` may have it; typed, such a pair is refused."""
    config = OptimConfig(learning_rate=1e-3, warmup_steps=50)
    assert learning_rate(config, 29, 30) == 1e-3
    assert all(learning_rate(config, s, 30) < learning_rate(config, s + 1, 30) for s in range(29))


# Muon


def test_muon_moves_matrices_along_orthogonal_directions():
    """Against torch's own, which takes them one at a time; the rest is AdamW."""
    torch.manual_seed(0)
    config = OptimConfig(name="muon", learning_rate=3e-3, matrix_learning_rate=0.02, weight_decay=0.2)
    model = build_model(ModelConfig(**SHAPE, **BIASED))
    twin = build_model(ModelConfig(**SHAPE, **BIASED))
    twin.load_state_dict(model.state_dict())
    hidden = [name for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    assert len(hidden) == 6
    optimizer = build_optimizer(model, config)
    named = dict(twin.named_parameters())
    muon = torch.optim.Muon([named[name] for name in hidden], lr=0.02, weight_decay=0.2, momentum=0.95)
    rest = [{"params": [p for n, p in named.items() if n not in hidden and (p.dim() >= 2) == matrix],
             "weight_decay": 0.2 * matrix} for matrix in (True, False)]  # fmt: skip
    adamw = torch.optim.AdamW(rest, lr=3e-3, betas=config.betas)
    for step in range(4):
        set_learning_rate(optimizer, 3e-3 / (step + 1))
        for other, peak in ((muon, 0.02), (adamw, 3e-3)):
            for group in other.param_groups:
                group["lr"] = peak / (step + 1)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape) * (1 + len(name))
            q.grad = p.grad.clone()
        before = [p.detach().clone() for p in model.parameters()]
        for each in (optimizer, muon, adamw):
            each.step()
        for (name, p), old, q in zip(model.named_parameters(), before, twin.parameters(), strict=True):
            if name in hidden:  # in bfloat16 the iteration amplifies how its input was rounded
                moved, expected = (p - old).detach().flatten(), (q - old).detach().flatten()
                assert torch.cosine_similarity(moved, expected, dim=0) > 0.99, name
                assert moved.norm() == pytest.approx(expected.norm().item(), rel=0.03), name
                q.data.copy_(p.data)
            else:
                torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 12), (4, 12, 5)])
def test_orthogonalised_matrices_keep_their_singular_directions(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    scales = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert scales.min() > 0.6
    assert scales.max() < 1.3
    inside = u.mT @ orthogonalise(matrices).float() @ vt.mT  # diagonal, if the directions are the same
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 0.05
