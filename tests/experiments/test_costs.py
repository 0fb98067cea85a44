from copy import deepcopy

import pytest
import torch

from experiments import costs
from experiments.costs import CLAIMS
from tests.claims import cases, check_rule


def m2(flops: int, last: float) -> dict:
    costs = {"reference": [1.0, 1.0, last], "fused": [1.0, 1.0, 1.0]}
    return {
        "heads": [1, 8, 32],
        "parameters": [100, 100, 100],
        "flops": [1000, 1000, flops],
        "formula": 1000,
        "exponentials": [10, 80, 320],
        "seconds": deepcopy(costs),
        "bytes": {kernel: [int(100 * cost) for cost in of] for kernel, of in costs.items()},
    }


NUMBERS = {
    "M2": {
        "holds": m2(1000, 1.1),
        "holds with a condition": m2(1000, 5.0),
        "does not hold": m2(4000, 1.0),
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


def test_more_products_refute_the_free_lunch_and_more_time_does_not():
    claim = CLAIMS[0]
    assert claim.verdict(m2(1005, 1.0)) == "holds"  # half a percent
    assert claim.verdict(m2(1020, 1.0)) == "does not hold"


def test_the_definition_keeps_a_map_for_each_head_and_the_fused_kernel_none():
    x = torch.randn(1, 64, 32, requires_grad=True)
    kept = {
        (n, kernel): costs.bytes_kept(costs.attend, costs.attention_layer(n, 32, kernel), x)
        for n in (1, 4)
        for kernel in ("reference", "fused")
    }
    assert kept[4, "reference"] - kept[1, "reference"] >= 3 * 64 * 64 * 4
    assert kept[4, "fused"] - kept[1, "fused"] < 64 * 64 * 4
