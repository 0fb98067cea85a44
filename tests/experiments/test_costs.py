from copy import deepcopy

import pytest
import torch

from experiments import costs
from experiments.costs import CLAIMS
from tests.claims import cases, check_rule


def m2(flops: int, last: float, products: float = 1.0, wide: float = 4.0) -> dict:
    costs = {"reference": [1.0, 1.0, last], "fused": [1.0, 1.0, 1.0]}
    return {
        "heads": [1, 8, 32],
        "parameters": [100, 100, 100],
        "flops": [1000, 1000, flops],
        "formula": 1000,
        "exponentials": [10, 80, 320],
        "seconds": deepcopy(costs),
        "bytes": {kernel: [int(100 * cost) for cost in of] for kernel, of in costs.items()},
        "parts": {"products": [1.0, 1.0, products], "fused attention": [1.0, 1.0, 3.0], "softmax": [0.1, 0.5, 1.0]},
        "twice as wide": {"products": 2.0, "fused attention": wide},
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


def test_what_makes_many_heads_slow_is_said_from_the_numbers():
    slow = CLAIMS[0].finding(m2(1000, 5.0, products=3.0, wide=2.0))
    assert "the products alone, of equal FLOPs, by +2000.0: it is more the products." in slow
    assert "So with heads of width 8 each FLOP of products and of fused attention takes longer." in slow
    quick = CLAIMS[0].finding(m2(1000, 5.0, wide=6.0))
    assert "it is more the softmax." in quick
    assert "does not explain" in quick
    assert "it is more" not in CLAIMS[0].finding(m2(1000, 1.1, products=3.0))  # nothing is to be explained
    faster = m2(1000, 5.0, products=0.5)
    faster["parts"]["softmax"] = [0.1, 0.5, 0.5]
    assert "it is more" not in CLAIMS[0].finding(faster)


def test_the_parts_are_those_of_the_definition():
    counted = {}
    for width in (4, 8):
        for name, run in costs.parts(2, 16, width).items():
            with costs.FlopCounterMode(display=False) as counter:
                run()
            counted[name, width] = counter.get_total_flops()
    assert counted["products", 4] == 6 * 2 * 2 * 16 * 16 * 4  # six products, forward and backward, of two heads
    assert counted["products", 8] == 2 * counted["products", 4]
    assert counted["softmax", 4] == 0
    assert set(costs.PARTS) == {name for name, _ in counted}
