import pytest
import torch
from torch import nn

from experiments.recurrence import (
    ASK,
    CLAIMS,
    N_VALUE,
    Recurrent,
    gradients,
    language_model,
    longest_chain,
    misfit,
    reach,
    recall,
    step,
)
from tests.claims import cases, check_rule


def parallel(rnn: list[float], attention: list[float], projections: list[float], grown: int = 6155) -> dict:
    times = {"RNN": rnn, "LSTM": [0.01, 0.04], "attention": attention, "attention without scores": projections}
    chains = {"RNN": [203, grown], "LSTM": [523, 16395], "attention": [47, 47], "attention without scores": [27, 27]}
    return {"lengths": [64, 2048], "seconds": times, "chains": chains}


BACK, DISTANCES = [1, 2, 4, 8, 16, 32], [8, 128]


def far(attention: list[float], same: list[float] | None = None, recalled: float = 1.0, opened: float = 0.1) -> dict:
    fading = [0.6 ** (k - 1) for k in BACK]
    return {
        "back": BACK,
        "gradients": {"RNN": fading, "LSTM": fading, "attention": attention, "LSTM, gate open": fading},
        "same length": same or [1.0, 1.01, 0.99, 1.0, 1.0, 1.0],
        "distances": DISTANCES,
        "recalled": {
            "RNN": [[1.0, 0.9, 0.3], [0.1, 0.2, 0.1]],
            "LSTM": [[1.0, 1.0, 1.0], [0.1, 0.2, 0.3]],
            "LSTM, gate open": [[1.0, 1.0, 1.0], [opened] * 3],
            "attention": [[1.0, 1.0, 1.0], [1.0, recalled, 1.0]],
        },
    }


NUMBERS = {
    "A1": {
        "holds": parallel([0.01, 0.08], [0.02, 0.022], [0.01, 0.01]),
        "holds with a condition": parallel([0.01, 0.08], [0.02, 0.07], [0.01, 0.01]),
        "does not hold": parallel([0.01, 0.011], [0.02, 0.07], [0.01, 0.01]),
    },
    "A2": {
        "holds": far([1.0, 0.99, 1.0, 1.01, 0.98, 0.97]),
        "holds with a condition": far([2 / (k + 1) for k in BACK]),
        "does not hold": far([0.8 ** (k - 1) for k in BACK]),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("claim", "numbers"),
    [
        (CLAIMS[0], parallel([0.01, 0.08], [0.02, 0.022], [0.01, 0.01], grown=1000)),  # a chain that does not grow
        (CLAIMS[0], parallel([0.01, 0.08], [0.02, 0.022], [0.01, 0.02])),  # projections that do
        (CLAIMS[1], far([1.0] * 6, same=[1 / k for k in BACK])),  # distance matters in rows of one length
        (CLAIMS[1], far([1.0] * 6, recalled=0.2)),  # attention does not reach after all
    ],
)
def test_each_half_of_a_claim_can_refute_it(claim, numbers):
    assert claim.verdict(numbers) == "does not hold"


def test_the_better_lstm_counts():
    claim, level = CLAIMS[1], [1.0] * 6
    assert claim.verdict(far(level, opened=0.95)) == "does not hold"  # it reaches as far as attention
    for opened, verdict in ((0.1, "holds"), (0.5, "does not hold")):  # whose gradient lasts, and which recalls more
        numbers = far(level, opened=opened)
        numbers["gradients"]["LSTM, gate open"] = level
        assert claim.verdict(numbers) == verdict


def test_a_recurrent_step_that_grows_little_is_a_condition():
    waiting = parallel([0.01, 0.015], [0.02, 0.022], [0.01, 0.01])
    assert CLAIMS[0].verdict(waiting) == "holds with a condition"
    assert "The condition: the RNN's step does not take twice as long. " in CLAIMS[0].finding(waiting)


def test_how_far_a_value_is_recalled():
    told = CLAIMS[1].finding(far([1.0] * 6))
    assert "RNN 0; LSTM 8; LSTM, gate open 8; attention 128." in told
    assert "one bias" not in told
    told = CLAIMS[1].finding(far([1.0] * 6, opened=0.95))
    assert "LSTM, gate open 128; attention 128. So not distance alone" in told


def test_an_open_gate_is_a_bias_of_three_and_nothing_else():
    biases = []
    for name in ("LSTM", "LSTM, gate open"):
        torch.manual_seed(0)
        biases.append(language_model(name, 8, 4).body.bias_ih_l0.tolist())
    shut, opened = biases
    assert opened == shut[:4] + [3.0] * 4 + shut[8:]  # input, forget, cell, output


def test_the_longest_chain_counts_what_waits():
    x = torch.ones(3, requires_grad=True)
    assert longest_chain(x.sin().cos()) == 3  # and x itself
    assert longest_chain(x.sin() + x.cos() + x.tan()) == 4  # side by side: one of three, and two sums
    y = x
    for _ in range(5000):
        y = y.sin()
    assert longest_chain(y) == 5001


def test_models_have_about_eight_squared_widths_of_parameters_in_their_body():
    for name in ("RNN", "LSTM", "attention"):
        model = language_model(name, 16, 64)
        inside = [p for n, p in model.named_parameters() if not n.endswith(("embed.weight", "lm_head.weight"))]
        assert 0.7 * 8 * 64**2 < sum(p.numel() for p in inside) < 1.2 * 8 * 64**2


def test_a_recurrent_model_is_the_recurrence():
    torch.manual_seed(0)
    model = Recurrent(nn.RNN, 8, 4, 6)
    tokens, h = torch.randint(8, (2, 5)), torch.zeros(2, 6)
    body = model.body
    for t in range(5):
        x = model.embed.weight[tokens[:, t]]
        h = torch.tanh(x @ body.weight_ih_l0.T + body.bias_ih_l0 + h @ body.weight_hh_l0.T + body.bias_hh_l0)
        assert torch.allclose(model(tokens)[:, t], h @ model.lm_head.weight.T, atol=1e-5)


def test_without_scores_no_token_hears_of_another():
    torch.manual_seed(0)
    tokens = torch.randint(1, 16, (1, 6))
    other = tokens.clone()
    other[0, 0] = 0
    for name, hears in (("attention without scores", False), ("attention", True)):
        model = language_model(name, 16, 8)
        assert torch.equal(model(tokens)[:, 1:], model(other)[:, 1:]) != hears


def test_a_step_leaves_gradients():
    model = language_model("LSTM", 16, 8)
    step(model, torch.randint(16, (2, 6)))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_recall_asks_for_the_first_value_at_its_distance():
    tokens, targets = recall(distance=5, seed=1)(3)
    assert tokens.shape == (32, 6)
    assert (tokens[:, 0] < N_VALUE).all()
    assert (tokens[:, -1] == ASK).all()
    assert (tokens[:, 1:-1] > ASK).all()
    assert torch.equal(targets[:, -1], tokens[:, 0])
    assert (targets[:, :-1] == -100).all()
    assert not torch.equal(tokens, recall(5, 1)(4)[0])


def test_reach_is_the_gradient_by_differences():
    """Of a model whose last output is 0.5^k times the sum of the embedding k back."""

    class Fading(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 3)

        def forward(self, tokens):
            weights = 0.5 ** torch.arange(tokens.shape[1]).flip(0)
            return (self.embed(tokens).sum(-1) * weights).cumsum(1).unsqueeze(-1)

    found = reach(Fading().double(), length=6, rows=3)
    assert torch.allclose(found / found[-1], 0.5 ** torch.arange(6).flip(0).double())


def test_an_open_gate_forgets_more_slowly():
    shut, opened = (gradients(name, [1, 32])[-1] for name in ("LSTM", "LSTM, gate open"))
    assert opened > 1000 * shut


def test_distance_is_counted_from_the_end():
    assert gradients("RNN", [1, 8], length=12)[-1] < 0.1


def test_a_fresh_model_attends_to_all_alike():
    """So the gradient to any token is the same, and half as much in a row twice as long."""
    assert gradients("attention", [1, 8, 30], length=32) == pytest.approx([1, 1, 1], rel=0.25)
    assert gradients("attention", [7, 31])[-1] == pytest.approx(8 / 32, rel=0.25)


def test_misfit_tells_an_exponential_from_a_power():
    x = [1.0, 2.0, 4.0, 8.0]
    logs = torch.tensor(x).log().tolist()
    assert misfit(x, [0.5**value for value in x]) < 1e-12 < misfit(logs, [0.5**value for value in x])
    assert misfit(logs, [1 / value for value in x]) < 1e-6 < misfit(x, [1 / value for value in x])
