import math

import pytest
import torch

from attention import KERNELS, Mask
from experiments.scores import CASES, CLAIMS, Transposed, attending, peak_bytes, runs, untransposed
from tests.claims import cases, check_rule

WIDTHS = [16, 32, 64, 128, 256, 512, 1024]
LARGEST = {"QKᵀ": [0.6] * 7, "QKᵀ / √d_k": [0.1] * 7}
LENGTHS = [256, 512, 1024, 2048]


def square(definition: float = 2, fused_bytes: float = 2, difference: float = 0.0) -> dict:
    """Costs that grow with these exponents, from 1 ms and 1 MB on."""
    exponents = dict.fromkeys(CASES, 1.0) | {"attention, definition": definition, "attention, fused": 2.0}
    seconds = {case: [1e-3 * (length / 256) ** p for length in LENGTHS] for case, p in exponents.items()}
    memory = {case: [1e6 * (length / 256) ** p for length in LENGTHS] for case, p in exponents.items()}
    memory["attention, fused"] = [1e6 * (length / 256) ** fused_bytes for length in LENGTHS]
    return {"lengths": LENGTHS, "pairs": 4096, "difference": difference, "seconds": seconds, "bytes": memory}


def transposed(runs: list[int], error: float = 0.9) -> dict:
    numbers = {"sizes": [8, 16], "runs without": runs, "runs with": [1, 1, 1, 1], "error": error}
    return numbers | {"correlation": 0.02, "leaks": [0.0, 0.1], "scores": [[1.0, 2.0], [0.5, -1.0]]}


NUMBERS = {
    "A4": {
        "holds": square(),
        "holds with a condition": square(fused_bytes=1),
        "does not hold": square(definition=1),
    },
    "A7": {
        "holds": transposed([0, 0, 0, 0]),
        "holds with a condition": transposed([1, 0, 0, 1]),
        "does not hold": transposed([1, 1, 0, 1]),
    },
    "A8": {
        "holds": {"widths": WIDTHS, "deviations": [2 ** (d / 64) for d in WIDTHS], "largest": LARGEST},
        "holds with a condition": {"widths": WIDTHS, "deviations": [d**1.5 for d in WIDTHS], "largest": LARGEST},
        "does not hold": {"widths": WIDTHS, "deviations": [d**0.5 for d in WIDTHS], "largest": LARGEST},
    },
}


@pytest.mark.parametrize(("id", "verdict", "numbers"), cases(NUMBERS))
def test_the_rule_decides(id, verdict, numbers):
    check_rule(CLAIMS, id, verdict, numbers)


@pytest.mark.parametrize(
    ("claim", "numbers"),
    [
        (CLAIMS[0], square(difference=1e-6)),  # not the pairs' own products
        (CLAIMS[0], square(definition=3)),  # more than the square
        (CLAIMS[1], transposed([1, 0, 0, 1], error=0.01)),  # it runs, and is right
        (CLAIMS[1], transposed([0, 0, 0, 0]) | {"runs with": [1, 0, 1, 1]}),  # the transposition does not help
    ],
)
def test_each_half_of_a_claim_can_refute_it(claim, numbers):
    assert claim.verdict(numbers) == "does not hold"


def test_that_less_must_be_held_is_said_where_memory_does_not_grow_with_the_square():
    for power, apart, fixed in ((2, False, False), (1.75, False, False), (1, True, False), (0.5, True, True)):
        said = CLAIMS[0].finding(square(fused_bytes=power))
        assert ("need not be held all at once" in said) == apart
        assert ("from 512 tokens on part of the fused kernel's memory does not depend" in said) == fixed


def test_where_the_square_takes_over():
    numbers = square()
    numbers["seconds"]["block without scores"] = [3e-3 * length / 256 for length in LENGTHS]
    assert CLAIMS[0].takes_over(numbers, "definition") == "at about 768"
    numbers["seconds"]["block without scores"] = [1.0] * 4
    assert CLAIMS[0].takes_over(numbers, "definition") == "above 2,048"
    numbers["seconds"]["block without scores"] = [1e-4] * 4
    assert CLAIMS[0].takes_over(numbers, "definition") == "below 256"


def test_peak_bytes_is_what_is_held_at_once():
    one, size = torch.zeros(1000), 4000
    taken = peak_bytes(
        {
            "two": lambda: (one + one) * one,
            "in turn": lambda: [(one + one).sum() for _ in range(9)],
            "kept": lambda: [one + one for _ in range(9)],
        }
    )
    assert taken["two"] == 2 * size
    assert size <= taken["in turn"] < 1.1 * size
    assert taken["kept"] == 9 * size


def test_the_definition_holds_the_square_and_the_fused_kernel_does_not():
    taken = peak_bytes({case: attending(case, 256) for case in CASES})
    weights = 2 * 256 * 256 * 4  # bytes of a (1, H, T, S)
    assert taken["attention, definition"] > 2 * weights
    assert taken["attention, fused"] < weights
    assert taken["block without scores"] < taken["block, fused"] < taken["block, definition"]


def test_cases_compute_what_they_say():
    """Of attention alone and of a block the gradients of what goes in, by either kernel the same."""
    for what in ("attention", "block"):
        found = []
        for kernel in ("definition", "fused"):
            torch.manual_seed(0)
            found.append(attending(f"{what}, {kernel}", 16)()[0])
        assert torch.allclose(*found, atol=1e-5)
    torch.manual_seed(0)
    assert not torch.allclose(attending("block without scores", 16)()[0], found[0], atol=1e-3)


def test_untransposed_is_the_definition_without_its_transposition():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 5, dtype=torch.float64)
    weights = torch.tensor([[math.exp(q[0, 0, i] @ k[0, 0, :, j] / 5**0.5) for j in range(5)] for i in range(5)])
    expected = (weights / weights.sum(1, keepdim=True)).double() @ v[0, 0]
    assert torch.allclose(untransposed(q, k, v, Mask(5, 5, causal=False))[0, 0], expected, atol=1e-6)
    right = KERNELS["fused"](q, k, v, Mask(5, 5, causal=False))[0, 0]
    assert not torch.allclose(right, expected, atol=1e-2)


def test_runs_tells_a_refused_product():
    assert runs(lambda q, k: q @ k.mT, 3, 4) == 1
    assert runs(lambda q, k: q @ k, 3, 4) == 0
    assert runs(lambda q, k: q @ k, 4, 4) == 1


def test_only_without_the_transposition_the_mask_leaks():
    right, wrong = Transposed().measure()["leaks"]
    assert right == 0
    assert wrong > 0.01
