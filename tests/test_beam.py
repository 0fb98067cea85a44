"""Beam search: what it finds against all there is, against the same search in plain lists, and never below greedy."""

import json
import math
from functools import cache
from itertools import product

import pytest
import torch

import generation
from data.tokenizer import CharTokenizer
from generation import Hypothesis, beam_search, generate
from model import KVCache
from tests.helpers import POST_NORM, WINDOW, BruteForce, random_tokens
from tests.test_generation import ENCODER_DECODER, always, build, chain, prompts_of, shapes_read
from tests.test_sample import assert_refused, command, save  # noqa: F401

CASES = {
    "rope": {},
    "grouped": {"n_kv_head": 2},
    "window": {"window": WINDOW, "n_kv_head": 1},
    "learned": {"position": "learned", "max_seq_len": 16},
    "learned-window": {"position": "learned", "max_seq_len": 16, "window": WINDOW},
    "post-norm": {"position": "sinusoidal", **POST_NORM},
    "encoder-decoder": {**ENCODER_DECODER, "position": "sinusoidal"},
    "encoder-decoder-learned": {**ENCODER_DECODER, "position": "learned", "max_seq_len": 16, "n_kv_head": 2},
    "encoder-decoder-grouped": {**ENCODER_DECODER, "position": "rope", "n_kv_head": 1},
}
FEW = 8  # ids, so that random models come to an end now and then
each_case = pytest.mark.parametrize("case", [{**case, "vocab_size": FEW} for case in CASES.values()], ids=CASES)
each_kind = pytest.mark.parametrize(
    "kind", [{"vocab_size": FEW}, {**ENCODER_DECODER, "vocab_size": FEW}], ids=["decoder", "encoder-decoder"]
)


def few(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Prompts of few ids."""
    return [random_tokens(n, seed=seed + place, vocab_size=FEW).tolist() for place, n in enumerate(lengths)]


def log_p_of(model, prompt, end_id):
    """A function of the new ids: the log-probabilities of the next one, by the full forward."""

    @cache
    @torch.no_grad()
    def log_p(ids: tuple[int, ...]) -> list[float]:
        if model.config.kind == "encoder_decoder":
            logits = model(torch.tensor([prompt]), torch.tensor([[end_id, *ids]]))
        else:
            logits = model(torch.tensor([[*prompt, *ids]]))
        return logits[0, -1].double().log_softmax(-1).tolist()

    return log_p


def score(log_probabilities, length_penalty) -> float:
    return math.fsum(log_probabilities) / ((5 + len(log_probabilities)) / 6) ** length_penalty


def in_order(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda one: (one.reason != "end", -one.score))


def everything(log_p, n_vocab, limit, length_penalty, end_id) -> list[Hypothesis]:
    """All that can be said within the limit, in the documented order."""
    found = []
    for length in range(1, limit + 1):
        for ids in product(range(n_vocab), repeat=length):
            if end_id in ids[:-1] or (ids[-1] != end_id and length < limit):
                continue
            path = [log_p(ids[:place])[id] for place, id in enumerate(ids)]
            ended = ids[-1] == end_id
            kept = list(ids[:-1] if ended else ids)
            found.append(Hypothesis(kept, path, score(path, length_penalty), "end" if ended else "length"))
    return in_order(found)


def plainly(log_p, n_vocab, beams, limit, length_penalty, end_id) -> list[Hypothesis]:
    """The documented search of one prompt, always up to the limit."""
    live, greedy, found = [()], (), []

    def path(ids):
        return [log_p(ids[:place])[id] for place, id in enumerate(ids)]

    for _ in range(limit):
        following = sorted(((*ids, id) for ids in live for id in range(n_vocab)), key=lambda ids: -sum(path(ids)))
        places = beams - 1
        reserved = []
        if greedy is not None:
            likeliest = max(range(n_vocab), key=lambda id: log_p(greedy)[id])
            reserved = [(*greedy, likeliest)]
            following.remove(reserved[0])
            greedy = None if likeliest == end_id else reserved[0]
        for ids in reserved + following[:places]:
            if ids[-1] == end_id:
                found.append(Hypothesis(list(ids[:-1]), path(ids), score(path(ids), length_penalty), "end"))
        live = [ids for ids in reserved if ids[-1] != end_id]
        live += [ids for ids in following if ids[-1] != end_id][:places]
    found += [Hypothesis(list(ids), path(ids), score(path(ids), length_penalty), "length") for ids in live]
    return in_order(found)[:beams]


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(one.ids, one.reason) for one in found] == [(one.ids, one.reason) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-4)


def garden(n: int, *arcs: tuple[int, int, float]) -> torch.nn.Module:
    """A model in which `a` is followed by `b` with probability p for each (a, b, p), and by all others alike."""
    p = torch.zeros(n, n, dtype=torch.float64)
    for a, b, probability in arcs:
        p[a, b] = probability
    left = (1 - p.sum(1, keepdim=True)) / (p == 0).sum(1, keepdim=True)
    return chain(torch.where(p == 0, left, p).log())


# --- what is found --------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize(("n_vocab", "limit"), [(6, 2), (5, 3)])
def test_wide_enough_it_finds_everything_in_order(kind, length_penalty, n_vocab, limit):
    for seed in range(4):
        model = build(**{**kind, "vocab_size": n_vocab}, seed=seed)
        prompt, end_id = random_tokens(3, seed=seed, vocab_size=n_vocab).tolist(), n_vocab - 1
        expected = everything(log_p_of(model, prompt, end_id), n_vocab, limit, length_penalty, end_id)
        assert sum(math.exp(sum(one.log_probabilities)) for one in expected) == pytest.approx(1)
        options = {"max_new_tokens": limit, "length_penalty": length_penalty, "end_id": end_id}
        (found,) = beam_search(model, [prompt], beams=n_vocab**limit, **options)
        assert_same(found, expected)


@pytest.mark.parametrize("n_vocab", [5, 6])
def test_as_many_beams_as_ids_are_enough_for_two_steps(n_vocab):
    for seed in range(8):
        model = build(vocab_size=n_vocab, seed=seed)
        expected = everything(log_p_of(model, [seed % n_vocab], None), n_vocab, 2, 0.6, None)[: n_vocab - 1]
        (found,) = beam_search(model, [[seed % n_vocab]], beams=n_vocab, max_new_tokens=2)
        assert_same(found[:-1], expected)  # the last may be greedy's
        assert all(one.reason == "length" for one in found)


@each_case
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_ragged_prompts_are_each_what_the_same_search_finds_alone_in_plain_lists(case, use_cache):
    n_ended = n_cut = 0
    for seed, beams, length_penalty in [(1, 2, 0.6), (2, 3, 0.0), (3, 4, 0.6), (4, 5, 2.0)]:
        model, prompts = build(**case, seed=seed), few(3, 9, 1, 12, 6, seed=seed)
        options = {"beams": beams, "length_penalty": length_penalty, "end_id": 4}
        together = beam_search(model, prompts, **options, max_new_tokens=8, vocab_size=7, use_cache=use_cache)
        for prompt, found in zip(prompts, together, strict=True):
            limit = 8
            if case.get("position") == "learned" and "kind" not in case:
                limit = min(8, 16 - len(prompt) + 1)
            assert_same(found, plainly(log_p_of(model, prompt, 4), 7, limit=limit, **options))
            n_ended += sum(one.reason == "end" for one in found)
            n_cut += sum(one.reason == "length" for one in found)
    assert min(n_ended, n_cut) > 10


@each_case
def test_company_and_cache_change_nothing(case):
    lengths = set()
    for seed in range(3):
        model, prompts = build(**case, seed=seed), few(2, 9, 5, 11, 3, seed=seed)
        options = {"beams": 3, "max_new_tokens": 20, "end_id": 4, "length_penalty": 1.0}
        together = beam_search(model, prompts, **options)
        for use_cache in (True, False):
            alone = [beam_search(model, [prompt], **options, use_cache=use_cache)[0] for prompt in prompts]
            for found, expected in zip(together, alone, strict=True):
                assert_same(found, expected)
        lengths |= {len(one.ids) for found in together for one in found}
    assert len(lengths) > 2


@each_kind
def test_one_beam_is_greedy(kind):
    reasons = set()
    for seed in range(12):
        model, prompts = build(**kind, seed=seed), few(4, 1, 9, seed=seed)
        options = {"max_new_tokens": 15, "end_id": 4, "vocab_size": 7}
        rows = beam_search(model, prompts, beams=1, **options)
        assert [[one.ids for one in found] for found in rows] == [[row] for row in generate(model, prompts, **options)]
        reasons |= {found[0].reason for found in rows}
    assert reasons == {"end", "length"}


@each_kind
@pytest.mark.parametrize("beams", [2, 3, 4])
def test_the_best_is_never_below_greedy(kind, beams):
    better = 0
    for seed in range(25):
        model, prompts = build(**kind, seed=seed), few(3, 1, 7, seed=seed)
        options = {"max_new_tokens": 10, "end_id": 4, "length_penalty": (0.0, 0.6, 2.0)[seed % 3]}
        found = [best[0] for best in beam_search(model, prompts, beams=beams, **options)]
        greedy = [best[0] for best in beam_search(model, prompts, beams=1, **options)]
        for one, other in zip(found, greedy, strict=True):
            assert (one.reason == "end", one.score + 1e-5) >= (other.reason == "end", other.score)
            better += one.ids != other.ids
    assert better > 5


def test_the_greedy_path_is_not_pruned_when_it_falls_behind():
    # What follows 1, the likeliest after 0, is less likely than both that follow 2; but then its end is certain.
    arcs = [(0, 1, 0.36), (0, 2, 0.32), (1, 4, 0.2), (2, 5, 0.5), (2, 6, 0.495), (4, 9, 0.99), (5, 9, 0), (6, 9, 0)]
    model, options = garden(10, *arcs), {"max_new_tokens": 12, "end_id": 9}
    assert generate(model, [[0]], **options) == [[1, 4]]
    for beams in (1, 2):
        best = beam_search(model, [[0]], beams=beams, **options)[0][0]
        assert (best.ids, best.reason) == ([1, 4], "end")
        assert best.score == pytest.approx(math.log(0.36 * 0.2 * 0.99) / (8 / 6) ** 0.6, abs=1e-3)


def test_equals_are_taken_as_greedy_takes_them():
    model = always([1.0, 2.0, 2.0, 2.0, 0.0])
    (found,) = beam_search(model, [[0]], beams=3, max_new_tokens=2)
    assert [one.ids for one in found] == [[1, 1], [1, 2], [1, 3]]
    assert generate(model, [[0]], max_new_tokens=2) == [[1, 1]]


def test_ids_beyond_the_vocabulary_never_come_out():
    model = build(vocab_size=64)
    ids = {
        n: {id for found in beam_search(model, prompts_of(3, 5, 8), vocab_size=n) for one in found for id in one.ids}
        for n in (40, None)
    }
    assert max(ids[40]) < 40 <= max(ids[None])
    (found,) = beam_search(always([0.0, 1.0, 2.0]), [[0]], max_new_tokens=1, vocab_size=2)
    assert [one.ids for one in found] == [[1], [0]]  # fewer than beams
    assert found[0].score == pytest.approx(torch.tensor([0.0, 1.0, 2.0]).log_softmax(0)[1].item(), abs=1e-4)


@each_case
def test_scores_are_those_of_the_model_in_float64(case):
    model, prompts = build(**case), few(3, 8)
    brute = BruteForce(model)
    for prompt, found in zip(prompts, beam_search(model, prompts, beams=3, max_new_tokens=6, end_id=4), strict=True):
        for one in found:
            new = one.ids + [4] * (one.reason == "end")
            if "kind" in case:
                logits = brute.logits([4, *new[:-1]], prompt)
            else:
                logits = brute.logits(prompt + new[:-1])[len(prompt) - 1 :]
            path = torch.tensor(logits).log_softmax(-1)[range(len(new)), new].tolist()
            assert one.log_probabilities == pytest.approx(path, abs=1e-4)
            assert one.score == pytest.approx(score(path, 0.6), abs=1e-4)


def test_without_an_end_it_is_what_transformers_finds_wherever_greedy_is_among_it():
    parity = pytest.importorskip("tests.test_parity")
    theirs = parity.llama()
    ours, n_same = parity.ours_of(theirs, tie_embeddings=False), 0
    for prompt in prompts_of(*[5] * 8):
        out = theirs.generate(
            torch.tensor([prompt]), num_beams=4, num_return_sequences=4, do_sample=False, max_new_tokens=6,
            length_penalty=0.0, early_stopping="never", return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        expected = out.sequences[:, 5:].tolist()
        if generate(ours, [prompt], max_new_tokens=6)[0] in expected:
            (found,) = beam_search(ours, [prompt], max_new_tokens=6, length_penalty=0.0)
            assert [one.ids for one in found] == expected
            assert [one.score for one in found] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
            n_same += 1
    assert n_same >= 4


# --- when it ends ---------------------------------------------------------------------------------------------------


def test_an_end_that_is_likely_at_once_wins_and_the_others_follow_by_score():
    model = always(torch.tensor([0.05, 0.03, 0.02, 0.9], dtype=torch.float64).log())
    (found,) = beam_search(model, [[0]], beams=3, max_new_tokens=20, end_id=3)
    assert [(one.ids, one.reason) for one in found] == [([], "end"), ([0], "end"), ([1], "end")]
    assert found[0].log_probabilities == pytest.approx([math.log(0.9)], abs=1e-4)
    assert found[1].score == pytest.approx(math.log(0.05 * 0.9) / (7 / 6) ** 0.6, abs=1e-3)


def test_an_early_end_does_not_win_against_a_better_long_one():
    arcs = [(0, 8, 0.4), (0, 1, 0.35), *((k, k + 1, 0.99) for k in range(1, 8))]
    model, options = garden(9, *arcs), {"max_new_tokens": 10, "end_id": 8}
    best = {penalty: beam_search(model, [[0]], beams=2, length_penalty=penalty, **options)[0] for penalty in (0, 0.6)}
    assert [one.ids for one in best[0]] == [[], [1, 2, 3, 4, 5, 6, 7]]
    assert [one.ids for one in best[0.6]] == [[1, 2, 3, 4, 5, 6, 7], []]
    assert beam_search(model, [[0]], beams=1, **options)[0][0].ids == []


def test_the_search_goes_on_while_any_hypothesis_may_pass_not_only_the_greedy_path():
    arcs = [(0, 1, 0.34), (0, 2, 0.33), (2, 9, 0.52), (2, 3, 0.47), (3, 9, 0.5), (3, 4, 0.49)]
    arcs += [(k, k + 1, 0.99) for k in range(4, 7)] + [(7, 9, 0.99)]
    (found,) = beam_search(garden(10, *arcs), [[0]], beams=2, max_new_tokens=8, end_id=9, length_penalty=1.0)
    assert [one.ids for one in found] == [[2, 3, 4, 5, 6, 7], [2]]


def test_what_never_ends_is_cut_off_and_comes_after_what_ended():
    never = always([5.0, 4.0, -20.0])
    (found,) = beam_search(never, [[0]], beams=2, max_new_tokens=4, end_id=2)
    # The 1 may come at any place: the last digits of the scores decide which.
    assert [(sorted(one.ids), one.reason) for one in found] == [([0] * 4, "length"), ([0, 0, 0, 1], "length")]
    # 0 repeats itself for ever; 1, half as likely, ends.
    loop = garden(4, (3, 0, 0.6), (3, 1, 0.3), (0, 0, 0.99), (1, 2, 0.8))
    (found,) = beam_search(loop, [[3]], beams=2, max_new_tokens=6, end_id=2)
    assert [(one.ids, one.reason) for one in found] == [([1], "end"), ([0] * 6, "length")]
    assert found[0].score < found[1].score


def test_hypotheses_that_end_take_no_places():
    # Of the three likeliest after 0 two end; the three likeliest that do not all go on.
    model = garden(6, (0, 5, 0.5), (0, 1, 0.2), (0, 2, 0.15), (0, 3, 0.1), (1, 5, 0.9), (2, 5, 0.8), (3, 5, 0.7))
    (found,) = beam_search(model, [[0]], beams=3, max_new_tokens=2, end_id=5, length_penalty=0.0)
    assert [one.ids for one in found] == [[], [1], [2]]
    (found,) = beam_search(model, [[0]], beams=4, max_new_tokens=2, end_id=5, length_penalty=0.0)
    assert [one.ids for one in found] == [[], [1], [2], [3]]


def test_the_limit_of_learned_positions_is_each_prompts_own():
    model = build(position="learned", max_seq_len=16)
    rows = beam_search(model, prompts_of(15, 3, 16), beams=3, max_new_tokens=10)
    assert [{len(one.ids) for one in found} for found in rows] == [{2}, {10}, {1}]
    assert {one.reason for found in rows for one in found} == {"length"}


def test_a_prompt_is_read_once_and_leaves_when_nothing_can_change(monkeypatch):
    sure = garden(6, (0, 5, 0.98), (1, 2, 0.98), (2, 3, 0.98), (3, 5, 0.98))
    shapes = shapes_read(sure, monkeypatch)
    options = {"beams": 2, "max_new_tokens": 30, "end_id": 5, "length_penalty": 0.0}
    first, second = (beam_search(sure, [prompt], **options)[0] for prompt in ([4, 4, 0], [1]))
    assert shapes == [(1, 3), (1, 1), (1, 1), (2, 1), (2, 1), (1, 1)]  # greedy's place closes with it
    assert [one.ids for one in first + second] == [[], [0], [2, 3], [2, 3, 0]]
    shapes.clear()
    for found, alone in zip(beam_search(sure, [[4, 4, 0], [1]], **options), (first, second), strict=True):
        assert_same(found, alone)
    assert shapes == [(2, 3), (1 + 2, 1), (2, 1), (1, 1)]


def test_rows_that_stay_where_they_are_are_not_copied(monkeypatch):
    calls, select = [], KVCache.select
    monkeypatch.setattr(KVCache, "select", lambda cache, rows: calls.append(rows) or select(cache, rows))
    beam_search(build(), prompts_of(3, 5), beams=1, max_new_tokens=6)
    assert calls == []
    beam_search(build(), prompts_of(3), beams=2, max_new_tokens=6)
    assert calls[0] == [0, 0]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_no_gradients_are_recorded(use_cache, monkeypatch):
    model, grad_modes = build(), []
    features = model.features
    monkeypatch.setattr(
        model, "features", lambda *a, **k: grad_modes.append(torch.is_grad_enabled()) or features(*a, **k)
    )
    beam_search(model, prompts_of(3), max_new_tokens=3, use_cache=use_cache)
    assert grad_modes == [False] * 3


def test_no_prompts_and_no_new_tokens():
    assert beam_search(build(), []) == []
    assert beam_search(build(), prompts_of(2, 3), max_new_tokens=0) == [[Hypothesis([], [], 0.0, "length")]] * 2


# --- errors, and the model afterwards -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("beams", 0), ("beams", -2), ("length_penalty", -0.1), ("length_penalty", float("nan")), ("max_new_tokens", -1)],
)
def test_settings_out_of_range_are_refused_in_one_line_that_names_them(option, value):
    with pytest.raises(ValueError, match=f"^{option} = {value} .+$"):
        beam_search(build(), [[1]], **{option: value})


@pytest.mark.parametrize("training", [True, False])
def test_what_cannot_be_is_refused_as_in_stream_and_the_model_left_in_its_mode(training):
    model = build(position="learned", max_seq_len=16, dropout=0.5).train(training)
    for prompts, says in [([[1], []], "empty prompt"), (prompts_of(17), "max_seq_len = 16"), ([[99]], "id 99 is not")]:
        with pytest.raises(ValueError, match=says):
            beam_search(model, prompts)
    expected = beam_search(model.eval(), prompts_of(3, 5), end_id=4)
    model.train(training)
    assert beam_search(model, prompts_of(3, 5), end_id=4) == expected
    assert {module.training for module in model.modules()} == {training}
    assert beam_search(model, [[]], end_id=7) == beam_search(model, [[7]], end_id=7)
    with pytest.raises(ValueError, match="needs an end_id"):
        beam_search(build(**ENCODER_DECODER), prompts_of(3))


def test_a_model_that_computes_no_numbers_is_refused():
    model = build()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        beam_search(model, [[1, 2]])


@pytest.mark.parametrize("k", [1, 3, 9, 40])
def test_the_likeliest_ids_are_the_first_of_a_stable_sort(k):
    torch.manual_seed(0)
    for levels in (2, 4, 1000):  # few: many ties
        logits = torch.randint(levels, (50, 9)).double()
        logits[0] = -torch.inf
        logits[1, 3:] = -torch.inf
        expected = logits.sort(stable=True, descending=True).indices[:, :k]
        assert torch.equal(generation._likeliest(logits, k), expected)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[{}, {"kind": "encoder_decoder"}], ids=["decoder", "encoder-decoder"])
def run(request, tmp_path_factory):
    """A folder with one run, its model and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("beams"), CharTokenizer("abcdefghij")
    model = build(**request.param, vocab_size=14, seed=9)
    save(folder / "runs" / "letters", model, tokenizer)
    return folder, model, tokenizer


def test_the_command_prints_the_best_of_each_prompt(run, command, monkeypatch):  # noqa: F811
    folder, model, tokenizer = run
    allocations, allocate = [], KVCache.allocate
    monkeypatch.setattr(KVCache, "allocate", lambda *args: allocations.append(args[1]) or allocate(*args))
    argv = ["--prompt", "abc", "--prompt", "e", "--beams", "3", "--max-new-tokens", "8"]
    options = {"beams": 3, "max_new_tokens": 8, "end_id": 10, "vocab_size": 11}
    translating = model.config.kind == "encoder_decoder"  # its sources have an end, and are not printed
    end, shown, between = ([10], ["", ""], "\n") if translating else ([], ["abc", "e"], "\n\n")
    rows = beam_search(model, [[0, 1, 2, *end], [4, *end]], **options)
    texts = [[prompt + tokenizer.decode(one.ids) for one in found] for prompt, found in zip(shown, rows, strict=True)]
    assert len({text for found in texts for text in found}) == 6
    for more in ([], ["--no-cache"]):
        allocations.clear()
        assert command(folder, *argv, *more)[:2] == (0, f"{texts[0][0]}{between}{texts[1][0]}\n")
        assert allocations == ([] if more else [2])  # one row a prompt
    assert command(folder, *argv, "--num-samples", "2")[1] == between.join(texts[0][:2] + texts[1][:2]) + "\n"
    _, out, _ = command(folder, *argv, "--num-samples", "3", "--format", "jsonl")
    for line, one in zip(out.splitlines(), rows[0] + rows[1], strict=True):
        said = json.loads(line)
        assert list(said) == ["prompt", "text", "tokens", "reason", "log_probabilities", "score"]
        assert said["tokens"] == one.ids + [10] * (one.reason == "end")
        assert (said["text"], said["reason"]) == (tokenizer.decode(one.ids), one.reason)
        assert said["log_probabilities"] == pytest.approx(one.log_probabilities)
        assert said["score"] == pytest.approx(one.score)


def test_without_a_prompt_there_is_one_and_never_more_than_was_found(run, command):  # noqa: F811
    folder, model, tokenizer = run
    if model.config.kind == "encoder_decoder":
        assert_refused(command(folder, "--beams", "2"), "needs a source")
        return
    (found,) = beam_search(model, [[]], beams=2, max_new_tokens=5, end_id=10, vocab_size=11)
    assert command(folder, "--beams", "2", "--max-new-tokens", "5")[1] == tokenizer.decode(found[0].ids) + "\n"
    argv = ["--prompt", "a", "--max-new-tokens", "1", "--beams", "40", "--num-samples", "30", "--format", "jsonl"]
    assert len(command(folder, *argv)[1].splitlines()) == 11


@pytest.mark.parametrize("option", ["temperature", "top-k", "top-p", "min-p", "repetition-penalty", "stop", "seed"])
def test_beams_refuse_what_draws_even_at_its_default(run, command, option):  # noqa: F811
    value = {"temperature": "0.8", "top-k": "0", "stop": "x", "seed": "0"}.get(option, "1")
    for words in ([f"--{option}", value], [f"--{option}={value}"]):
        assert_refused(command(run[0], "--prompt", "a", "--beams", "2", *words), f"--beams .*--{option}$")
        assert command(run[0], "--prompt", "a", "--max-new-tokens", "1", *words)[0] == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--beams", "0"], "--beams: 0 must be a whole number, at least 1"),
        (["--beams", "2.5"], "--beams: 2.5 must be a whole number"),
        (["--beams", "3", "--num-samples", "4"], "--num-samples: 4 must be at most --beams, 3"),
    ],
)
def test_impossible_beams_are_refused_in_one_sentence(run, command, argv, says):  # noqa: F811
    assert_refused(command(run[0], "--prompt", "a", *argv), says)


def test_the_default_temperature_is_the_models(run, command):  # noqa: F811
    folder, model, _ = run
    argv = ["--prompt", "abc", "--max-new-tokens", "20", "--top-p", "1"]
    default, drawn, greedy = (
        command(folder, *argv, *more)[1] for more in ([], ["--temperature", "0.8"], ["--temperature", "0"])
    )
    assert drawn != greedy
    assert default == (greedy if model.config.kind == "encoder_decoder" else drawn)
