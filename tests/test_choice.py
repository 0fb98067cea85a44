"""The choice of the next token: which ids, how often, in which company."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import choice
from choice import Settings, choose, draw, penalize_repetition

PROBABILITIES = [0.45, 0.25, 0.2, 0.1]
LOGITS = np.log(PROBABILITIES)
NEVER = -math.inf
HIGHEST = 1 - 2.0**-53  # that a uniform can be


def ids_of(logits, uniforms, seen=None, **settings) -> torch.Tensor:
    """The choice from the same logits (V,) at each uniform."""
    rows = torch.as_tensor(logits, dtype=torch.float64).expand(len(uniforms), -1)
    seen = None if seen is None else torch.tensor(seen).expand(len(uniforms), -1)
    return choose(rows, Settings(**settings), torch.as_tensor(uniforms, dtype=torch.float64), seen)[0]


def shares(logits, n: int = 2000, **settings) -> np.ndarray:
    """Of each id, to 1/n: the choice at n uniforms, evenly spread."""
    ids = ids_of(logits, (np.arange(n) + 0.5) / n, **{"temperature": 1.0} | settings)
    return np.bincount(ids, minlength=len(logits)) / n


def support(logits, **settings) -> set[int]:
    return set(np.flatnonzero(shares(logits, **settings)).tolist())


def distribution(
    logits, seen=None, repetition_penalty=1.0, vocab_size=None, temperature=1.0, top_k=None, top_p=None, min_p=None
) -> list[float]:
    """What a choice should follow, in the documented order, from lists and loops."""
    z = list(logits)
    for id in set(seen or ()):
        z[id] = z[id] / repetition_penalty if z[id] > 0 else z[id] * repetition_penalty
    kept = sorted(range(len(z) if vocab_size is None else min(vocab_size, len(z))), key=lambda id: (-z[id], id))
    if temperature == 0:
        return [float(id == kept[0]) for id in range(len(z))]
    likeliest = z[kept[0]]
    weight = [math.exp((x - likeliest) / temperature) if x <= likeliest else math.nan for x in z]
    if top_k:
        kept = [id for id in kept if z[id] >= z[kept[min(top_k, len(kept)) - 1]]]
    if top_p:
        whole, enough = sum(weight[id] for id in kept), 0
        so_far = 0.0
        while enough == 0 or (so_far < (top_p - 1e-6) * whole and top_p < 1):
            so_far += weight[kept[enough]]
            enough += 1
        kept = kept if top_p == 1 else kept[:enough]
    if min_p:
        kept = [id for id in kept if weight[id] >= min_p]
    whole = sum(weight[id] for id in kept)
    return [weight[id] / whole if id in set(kept) else 0.0 for id in range(len(z))]


def log_softmax(logits) -> np.ndarray:
    shifted = np.asarray(logits) - max(logits)
    return shifted - math.log(math.fsum(np.exp(shifted)))


def cases(n: int, seed: int, largest: int = 300) -> Iterator[tuple[list[float], dict]]:
    """Logits of every kind and settings of every size, extremes included."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    for _ in range(n):
        size = int(rng.integers(1, largest + 1)) if rng.random() < 0.5 else int(largest ** rng.random())
        z = rng.normal(size=size) * 10 ** rng.uniform(-2, 2)
        kind = rng.integers(6)
        if kind == 0:
            z[rng.integers(size)] += 50
        elif kind == 1:
            z[:] = z[0]
        elif kind == 2:
            z = np.round(z * one_of(1, 4) / np.abs(z).max()) * one_of(0.01, 1, 9)  # many are equal
        elif kind == 3:
            z = torch.tensor(z).bfloat16().double().numpy()
        elif kind == 4:
            z *= 10 ** rng.uniform(0, 30) / np.abs(z).max()
        limit = one_of(None, None, int(rng.integers(1, size + 1)), size + 3)
        if rng.random() < 0.3:
            some = rng.random(size) < rng.random()
            some[rng.integers(min(size, limit or size))] = False
            z[some] = NEVER
        settings = {
            "repetition_penalty": one_of(1.0, 1.0, 10 ** rng.uniform(-2, 2), 0.01, 100.0),
            "vocab_size": limit,
            "temperature": one_of(0.0, 1.0, *10 ** rng.uniform(-1, 1, 6), 10 ** rng.uniform(-8, 6), 1e-8, 1e6),
            "top_k": one_of(None, None, 0, 1, size, size + 7, *rng.integers(1, size + 1, 4).tolist()),
            "top_p": one_of(None, 1.0, 1e-9, *rng.uniform(0.01, 1, 4), 1 - 10 ** rng.uniform(-9, -1)),
            "min_p": one_of(None, 0.0, 1.0, *rng.uniform(0, 1, 2), 10 ** rng.uniform(-6, -1)),
        }
        yield z.tolist(), settings | {"seen": rng.integers(size, size=rng.integers(1, 20)).tolist()}


# --- everything at once ---------------------------------------------------------------------------------------------


def test_every_choice_is_allowed_by_every_setting_and_its_log_probability_is_the_models_own():
    rng, n_several = np.random.default_rng(1), 0
    for logits, settings in cases(10_000, seed=0):
        expected, own = distribution(logits, **settings), log_softmax(logits)
        seen, others = settings["seen"], {name: value for name, value in settings.items() if name != "seen"}
        uniforms = torch.tensor([0.0, HIGHEST, *rng.random(3)], dtype=torch.float64)
        rows, seen = torch.tensor(logits, dtype=torch.float64).expand(5, -1), torch.tensor([seen] * 5)
        ids, log_probabilities = choose(rows, Settings(**others), uniforms, seen)
        assert all(expected[id] > 0 for id in ids.tolist()), (logits, settings, ids)
        assert log_probabilities.tolist() == pytest.approx(own[ids], rel=1e-12, abs=1e-12)
        n_several += sum(p > 0 for p in expected) > 1
    assert n_several > 3000


def test_each_share_is_the_expected_one(monkeypatch):
    monkeypatch.setattr(choice, "FIRST", 1)  # so that few of a row are looked at, more, and all
    n = 500
    for logits, settings in cases(1000, seed=2):
        expected = np.array(distribution(logits, **settings))
        # Evenly spread uniforms fall into each interval as often as it is long, give or take one.
        assert np.abs(shares(logits, n, **settings) - expected).max() <= 1.001 / n, (logits, settings)


def p_value(statistic: float, freedom: int) -> float:
    return torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()).item()


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, ids expected less than five times together; infinite when
    something impossible was seen."""
    if observed[expected == 0].any():
        return math.inf, 1
    expected = expected * observed.sum()
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 1], expected[expected > 1]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.fixture(scope="module")
def draws() -> list[tuple[list[float], dict, np.ndarray]]:
    """200 settings that leave several ids, and how often each came in 20,000 draws."""
    found, generator = [], torch.Generator().manual_seed(0)
    for logits, settings in cases(2000, seed=3, largest=24):
        if sum(p > 1e-3 for p in distribution(logits, **settings)) > 2 and len(found) < 200:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(choice, "FIRST", 1)
                ids = ids_of(logits, torch.rand(20_000, generator=generator, dtype=torch.float64), **settings)
            found.append((logits, settings, np.bincount(ids, minlength=len(logits))))
    assert len(found) == 200
    return found


def judge(draws, **wrong) -> tuple[float, float]:
    """The p-value of the most suspicious of these draws and that of all together, were the settings so `wrong`."""
    tests = []
    for logits, settings, observed in draws:
        changes = {name: change(settings[name]) if callable(change) else change for name, change in wrong.items()}
        tests.append(chi_square(observed, np.array(distribution(logits, **settings | changes))))
    tests = [(statistic, freedom) for statistic, freedom in tests if freedom > 0]
    together = p_value(sum(statistic for statistic, _ in tests), sum(freedom for _, freedom in tests))
    return min(p_value(*test) for test in tests), together


def test_draws_follow_the_distribution(draws):
    worst, together = judge(draws)
    assert worst > 4e-5 / len(draws)  # with the next line, a false alarm once in ten thousand seeds
    assert together > 4e-5


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": lambda temperature: 1.02 * temperature},
        {"temperature": lambda temperature: 0.98 * temperature},
        {"top_k": None, "top_p": None, "min_p": None},
        {"top_k": None},
        {"top_p": None},
        {"min_p": None},
        {"repetition_penalty": 1.0},
        {"vocab_size": None},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_draws_of_another_distribution_would_be_noticed(draws, wrong):
    assert min(judge(draws, **wrong)) < 1e-9


# --- in company -----------------------------------------------------------------------------------------------------

ALL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "vocab_size": 990}
STYLES = [{}, {"temperature": 1.3}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 7}, ALL]


def crowd(n_id: int, n_row: int = 12) -> torch.Tensor:
    """Rows from nearly certain to flat, of bfloat16's logits: many equal."""
    logits = (
        torch.randn(n_row, n_id, generator=torch.Generator().manual_seed(0)) * torch.logspace(2, -3, n_row)[:, None]
    )
    return logits.bfloat16().double()


@pytest.mark.parametrize("n_thread", [1, 2])
@pytest.mark.parametrize("n_id", [5, 1000, 50_257])
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_row_is_chosen_to_the_last_bit_as_if_it_were_alone(style, n_id, n_thread):
    logits, settings = crowd(n_id), Settings(**style)
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = torch.randint(n_id, (len(logits), 30), generator=torch.Generator().manual_seed(2))
    torch.set_num_threads(n_thread)
    try:
        together = choose(logits, settings, uniforms, seen)
        for row in range(len(logits)):
            one = slice(row, row + 1)
            alone = choose(logits[one].clone(), settings, uniforms[one], seen[one])
            assert torch.equal(alone[0], together[0][one])
            assert torch.equal(alone[1], together[1][one])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "style", [{"temperature": 0.8, "top_p": 0.95}, {"temperature": 9.0, "top_k": 30}, ALL], ids=str
)
def test_how_many_are_looked_at_first_changes_nothing(style, monkeypatch):
    logits, settings = crowd(1000, 60), Settings(**style)
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = torch.randint(1000, (len(logits), 30), generator=torch.Generator().manual_seed(2))
    expected = choose(logits, settings, uniforms, seen)[0]
    for first in (1, 2, 3, 100, 999, 1000, 5000):
        monkeypatch.setattr(choice, "FIRST", first)
        assert torch.equal(choose(logits, settings, uniforms, seen)[0], expected)


def test_a_likely_nucleus_is_found_without_sorting_the_vocabulary(monkeypatch):
    widths, sort = [], torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda self, *args, **kwargs: widths.append(self.shape[-1]) or sort(self, *args, **kwargs)
    )
    ids_of(-0.5 * np.arange(1000), [0.5], temperature=0.8, top_p=0.95)
    assert max(widths) <= 64
    ids_of(-1e-3 * np.arange(1000), [0.5], temperature=0.8, top_p=0.95)
    assert max(widths) == 1000


def test_logits_are_not_written_to():
    logits = crowd(1000)
    before = logits.clone()
    choose(logits, Settings(**ALL), torch.rand(12, dtype=torch.float64), torch.zeros(12, 1, dtype=torch.long))
    assert torch.equal(logits, before)


# --- equals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_id", [3, 20, 1000])
def test_of_equals_greedy_takes_the_smallest_id(n_id):
    assert ids_of([0.0] + [1.0] * n_id, [0.5]).tolist() == [1]
    assert ids_of([1.0] * n_id, [0.5], seen=[0, 1], repetition_penalty=1.5).tolist() == [2]


@pytest.mark.parametrize("n_id", [20, 400])
def test_of_equals_top_k_keeps_all_and_the_nucleus_the_smaller_ids(n_id):
    equal = [0.0] * n_id
    assert support(equal, n=3 * n_id, top_k=3) == set(range(n_id))
    assert support(equal, n=3 * n_id, top_p=0.25) == set(range(n_id // 4))
    assert support(equal, n=3 * n_id, top_k=3, top_p=0.25, min_p=1.0) == set(range(n_id // 4))


def test_in_a_crowd_of_equals_the_sets_are_those_of_a_stable_order():
    levels = np.random.default_rng(0).integers(4, size=500)  # 125 of each
    order = sorted(range(500), key=lambda id: (-levels[id], id))
    best = int((levels == 3).sum())
    for k in (1, 15, 17, best - 1, best):
        assert support(levels * 1e-4, top_k=k) == set(order[:best])
    assert support(levels * 1e-4, top_k=best + 1) == set(order[: int((levels >= 2).sum())])
    for n in (1, 15, 16, 17, best, best + 1, 300, 499):
        assert support(levels * 1e-9, top_p=n / 500) == set(order[:n])


def test_the_nucleus_is_a_share_of_all_that_top_k_keeps_the_many_equal_to_the_k_th_too():
    logits = [-1e-3 * id for id in range(20)] + [-1.0] * 200 + [-1.5] * 780
    expected = set(np.flatnonzero(distribution(logits, top_k=25, top_p=0.2)).tolist())
    assert len(expected) == 19  # 0.2 of 20 + 200 / e; of the 25 likeliest alone it would be five
    assert support(logits, top_k=25, top_p=0.2) == expected


# --- one by one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-8, 1e-300, 5e-324])
def test_f18_a_temperature_of_nearly_zero_takes_the_likeliest(temperature):
    assert support([1.0, 1.0 + 1e-6, -1e30, 0.0], temperature=temperature) == {1}
    assert support([NEVER, -1e300, 1e300, 0.0], temperature=temperature, top_p=0.9) == {2}


@pytest.mark.parametrize("off", [200, 11, 0])
def test_f17_top_k_of_the_vocabulary_or_more_and_zero_are_no_filter(off):
    logits = np.random.default_rng(0).normal(size=11)
    assert shares(logits, top_k=off).tolist() == shares(logits).tolist()
    assert len(support(logits, top_k=off)) == 11
    assert shares(logits, top_k=off, vocab_size=7).tolist() == shares(logits, vocab_size=7).tolist()


def test_top_k_keeps_the_k_likeliest():
    logits = [0.1, 0.4, 0.2, 0.3]
    assert [support(logits, top_k=k) for k in (1, 2, 3)] == [{1}, {1, 3}, {1, 2, 3}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.01, 1e-6, 1e-30])
def test_f19_the_nucleus_of_a_peak_is_the_peak(p, dtype):
    for peak in ([50.0, 0, 0, 0], [0, 0, 50.0, 0], [-3e4, -3e4, -3e4, 3e4]):
        logits = torch.tensor(peak, dtype=dtype)
        assert ids_of(logits, [0.0, 0.5, HIGHEST], temperature=1.0, top_p=p).unique().tolist() == [np.argmax(peak)]


def test_f19_the_nucleus_of_equals_is_never_empty():
    assert support([0.0] * 1000, top_p=1e-9) == {0}


def test_f20_the_token_that_crosses_the_threshold_is_kept():
    assert shares(LOGITS, top_p=0.6) == pytest.approx([0.45 / 0.7, 0.25 / 0.7, 0, 0], abs=1e-3)


def test_f20_an_exact_hit_keeps_no_token_more():
    for logits in np.log([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.125, 0.25]]):
        for rounded in (logits, logits.astype(np.float32)):
            assert sorted(shares(rounded, top_p=0.75)) == pytest.approx([0, 0, 1 / 3, 2 / 3], abs=1e-3)


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.1, 1), (0.45, 1), (0.451, 2), (0.7, 2), (0.701, 3), (0.9, 3), (0.901, 4), (1.0, 4)],
)
def test_f20_the_nucleus_is_the_smallest_set_that_reaches_p_wherever_its_tokens_lie(p, kept):
    assert support(LOGITS, top_p=p) == set(range(kept))
    assert support(LOGITS[[2, 0, 3, 1]], top_p=p) == {place for place, id in enumerate((2, 0, 3, 1)) if id < kept}


@pytest.mark.parametrize(("p", "kept"), [(0.0, 4), (0.2, 4), (0.23, 3), (0.5, 2), (0.56, 1), (1.0, 1)])
def test_min_p_keeps_tokens_at_least_that_share_of_the_likeliest(p, kept):
    assert support(LOGITS + 3, min_p=p) == set(range(kept))  # 0.45, 0.25, 0.2, 0.1: shares 1, .556, .444, .222
    assert support(LOGITS + 3, min_p=p, top_p=0.99) == set(range(kept))


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_tokens_that_occurred():
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0, 0.0], [1.0, 2.0, 3.0, 6.0, NEVER]])
    seen = torch.tensor([[1, 0, 4, 0], [4, 4, 4, 3]])
    assert penalize_repetition(logits, seen, 1.5).tolist() == [[2, -4.5, 3, -3, 0], [1, 2, 3, 4, NEVER]]


def test_f23_banned_ids_never_come():
    assert support([0.0, 1.0, 9.0, 9.0], vocab_size=2, temperature=50.0) == {0, 1}
    assert ids_of([0.0, 1.0, 2.0], [0.5], vocab_size=2).tolist() == [1]


def test_filters_follow_the_documented_order():
    assert support(LOGITS, temperature=0.5, top_p=0.6) == {0}  # temperature first: 0.643, then the nucleus
    assert support(LOGITS, temperature=2.0, top_p=0.65) == {0, 1, 2}
    assert support(LOGITS, top_k=2, top_p=0.64) == {0}  # top-k first: 0.643 of what is left
    assert support(LOGITS, temperature=2.0, min_p=0.6) == {0, 1, 2}  # temperature before min-p
    assert support(LOGITS, top_p=0.7, min_p=0.5) == {0, 1}  # top-p first: then min-p takes nothing more
    assert support([2.0, 1.9, 1.8, 0.0], top_k=1, seen=[0], repetition_penalty=2.0) == {1}  # the penalty before top-k
    assert support([2.0, 1.9, 1.8, 0.0], top_k=2, vocab_size=2) == {0, 1}  # and before ids are banned
    assert support([0.0, 1.9, 9.0, 9.0], top_p=0.5, vocab_size=2) == {1}


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, HIGHEST])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    rows = [[0, 0, 0.3, 0, 0.7, 0], [1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1.0], [0, 1.0, 1e-300, 0, 1e-300, 0]]
    weights = torch.tensor(rows, dtype=torch.float64)
    ids = draw(weights, torch.full((4,), uniform, dtype=torch.float64))
    assert (weights[range(4), ids] > 0).all()
    many = torch.rand(200, 999, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    many[:, 800:] = 0
    many /= many.sum(-1, keepdim=True)  # sums of rounded probabilities, some below one and some above
    assert draw(many, torch.full((200,), uniform, dtype=torch.float64)).max() < 800


def test_a_draw_inverts_the_distribution_function_in_the_order_of_ids_whatever_is_left_out():
    uniforms = [0.0, 0.449, 0.451, 0.699, 0.899, 0.901]
    assert ids_of(LOGITS, uniforms, temperature=1.0).tolist() == [0, 0, 1, 1, 2, 3]
    for place in ([2, 0, 3, 1], [3, 2, 1, 0]):  # the order of likelihood is another
        for uniform in (0.01, 0.3, 0.6, 0.98):
            all_of_them = ids_of(LOGITS[place], [uniform], temperature=1.0)
            assert torch.equal(ids_of(LOGITS[place], [uniform], temperature=1.0, top_p=0.999), all_of_them)
