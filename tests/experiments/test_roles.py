import math

import pytest
import torch

from attention import rotary_turns
from config.schema import ModelConfig
from experiments.roles import (
    CLAIMS,
    N_SYMBOL,
    N_VALUE,
    ThreeRoles,
    ValuesCarryContent,
    all_tied,
    asymmetries,
    asymmetry,
    bigram_loss,
    constant_values,
    exchanged_scores,
    identity_values,
    parameters,
    place_values,
    scores,
    successor_batch,
    tied_queries_keys,
)
from model import build_model
from tests.claims import cases, check_rule


def values_carry(learned, identity, place, constant):
    names = ("V learned", "V = X", "V = where the key stands", "V constant")
    losses = (learned, identity, place, constant)
    loss = {name: [value - 0.01, value, value + 0.01] for name, value in zip(names, losses, strict=True)}
    return {"loss": loss, "parameters": dict.fromkeys(names, 300_000), "bigram": 3.1}


def three_roles(tied, free, bound, losses):
    names, kinds = ("untied", "Q = K", "Q = K = V"), ("without rotation", "rotated", "contents exchanged")
    return {
        "loss": {name: [value - 0.01, value, value + 0.01] for name, value in zip(names, losses, strict=True)},
        "parameters": dict.fromkeys(names, 300_000),
        "asymmetry": {name: dict.fromkeys(kinds, 1.4 if name == "untied" else tied) for name in names},
        "accuracy": {"untied": [free] * 3, "Q = K": [bound] * 3, "Q = K = V": [bound] * 3},
    }


NUMBERS = {
    "A5": {
        "holds": values_carry(2.2, 2.4, 2.9, 3.1),
        "holds with a condition": values_carry(2.2, 2.21, 2.9, 3.1),
        "does not hold": values_carry(2.2, 2.4, 2.21, 3.1),
    },
    "A6": {
        "holds": three_roles(0.0, 0.99, 0.6, (2.2, 2.3, 2.4)),
        "holds with a condition": three_roles(0.0, 0.99, 0.6, (2.2, 2.21, 2.4)),
        "does not hold": three_roles(0.0, 0.99, 0.95, (2.2, 2.3, 2.4)),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_without_symmetry_or_without_a_learner_there_are_no_three_roles():
    for numbers in (three_roles(0.2, 0.99, 0.6, (2.2, 2.3, 2.4)), three_roles(0.0, 0.7, 0.6, (2.2, 2.3, 2.4))):
        assert ThreeRoles().verdict(numbers) == "does not hold"


def test_one_tie_or_both_are_not_worse():
    for losses, words in (((2.2, 2.21, 2.4), "Q = K is not"), ((2.2, 2.21, 2.21), "Q = K and Q = K = V are not")):
        assert f"on language {words} clearly worse." in ThreeRoles().finding(three_roles(0.0, 0.99, 0.6, losses))


def tiny(change=None, **model):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_ff": 32, "vocab_size": 40}
    built = build_model(ModelConfig(**shape | model))
    for parameter in built.parameters():
        parameter.data *= 5  # at the start nothing would depend on the scores
    if change:
        change(built)
    return built


TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("change", [tied_queries_keys, all_tied])
def test_tied_scores_are_symmetric_and_stay_so_in_training(change):
    model = tiny(change)
    model(TOKENS).logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    found, untied = asymmetries(model, TOKENS), asymmetries(tiny(), TOKENS)
    assert max(found["without rotation"], found["rotated"]) < 1e-6 < 0.01 < found["contents exchanged"]
    assert min(untied.values()) > 0.5


def test_scores_are_those_of_the_projections():
    attention, x = tiny().decoder.blocks[0].attention, torch.randn(2, 12, 16)
    q, k = (layer.weight.view(2, 8, 16) for layer in (attention.q_proj, attention.k_proj))
    by_hand = torch.einsum("btc,hdc,hde,bse->bhts", x, q, k, x)
    torch.testing.assert_close(scores(attention, x), by_hand)


def test_exchanged_scores_are_those_of_exchanged_contents():
    model, x = tiny(), torch.randn(1, 6, 16)
    attention, angles = model.decoder.blocks[0].attention, model.decoder.angles(torch.arange(6))
    found = exchanged_scores(attention, x, angles)
    order = torch.tensor([0, 4, 2, 3, 1, 5])
    swapped = scores(attention, x[:, order], rotary_turns(angles))
    torch.testing.assert_close(found[..., 1, 4], swapped[..., 1, 4])
    torch.testing.assert_close(found[..., 4, 1], swapped[..., 4, 1])
    assert asymmetry(found, swapped) > 0.1  # elsewhere it is another exchange


def test_asymmetry_of_a_rotation():
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    assert asymmetry(turn, turn.mT) == pytest.approx(2.0)


def test_identity_values_hand_each_head_its_slice():
    attention = tiny(identity_values).decoder.blocks[0].attention
    x = torch.randn(2, 12, 16)
    _, v = attention.keys_values(x)
    assert torch.equal(v[:, 0], x[..., :8])
    assert torch.equal(v[:, 1], x[..., 8:])


@pytest.mark.parametrize(("change", "reads"), [(None, True), (identity_values, True), (constant_values, False)])
def test_with_constant_values_only_the_token_itself_is_read(change, reads):
    model, others = tiny(change), TOKENS.clone()
    others[:, :-1] = others[:, :-1].flip(1)
    changed = (model(TOKENS) - model(others))[:, -1].abs().max()
    assert changed > 1e-2 if reads else changed < 1e-5


def test_place_values_depend_on_the_place_and_not_on_the_content():
    layer = tiny(place_values).decoder.blocks[0].attention.v_proj
    v = layer(torch.randn(2, 12, 16))
    assert torch.equal(v[0], v[1])
    assert torch.equal(v, layer(torch.randn(2, 12, 16)))
    assert torch.pdist(v[0]).min() > 1e-3


def test_variants_have_nearly_the_same_parameters():
    for claim in (ValuesCarryContent, ThreeRoles):
        counts = parameters(claim.variants).values()
        assert max(counts) < 1.001 * min(counts)


def test_bigrams_are_counted():
    train, val = torch.tensor([0, 1, 0, 1, 0, 2]), torch.tensor([0, 1, 0])
    alone = [4 / 9, 3 / 9, 2 / 9]
    by_hand = [(2 + alone[1]) / 4, (2 + alone[0]) / 3]
    assert bigram_loss(train, val, 3) == pytest.approx(-sum(map(math.log, by_hand)) / 2)


def test_the_successor_is_asked_for_where_both_neighbours_stand_before():
    inputs, targets = successor_batch(3, rows=5)
    for row, asked in zip(inputs.tolist(), targets.tolist(), strict=True):
        seen = {}
        for token, target in zip(row, asked, strict=True):
            symbol, value = divmod(token, N_VALUE)
            first = symbol - symbol % 3
            after, before = first + (symbol + 1) % 3, first + (symbol + 2) % 3
            assert target == (seen[after] if {after, before} <= {*seen} else -100)
            seen[symbol] = value
        assert len(seen) == N_SYMBOL
    assert (targets >= 0).sum() == 5 * N_SYMBOL // 3
