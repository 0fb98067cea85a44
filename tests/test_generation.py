"""The sampler as a library: which ids come, from which distribution, until when; and the text they become."""

import copy
import random

import numpy as np
import pytest
import torch

import generation
from choice import Settings, choose
from config.schema import ModelConfig
from data.tokenizer import ByteTokenizer, Tokenizer
from generation import generate, stream
from model import build_model
from sample import Text, stops_at
from tests import helpers
from tests.helpers import POSITIONS, POST_NORM, WINDOW, greedy, random_tokens

ENCODER_DECODER = {"kind": "encoder_decoder", "n_encoder_layer": 2, **POST_NORM}


def build(**options) -> torch.nn.Module:
    """Tiny, with a head of its own: tied to large embeddings it would only repeat the newest token."""
    return helpers.build(tie_embeddings=False, **options)


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    return [random_tokens(n, seed=seed + place).tolist() for place, n in enumerate(lengths)]


def chain(logits) -> torch.nn.Module:
    """A real decoder whose logits are `logits[newest id]` (V, V): one-hot embeddings, and blocks that add nothing."""
    logits = torch.as_tensor(logits, dtype=torch.float64)
    n = len(logits)
    shape = {"vocab_size": n, "n_layer": 1, "n_head": 1, "d_model": n, "d_ff": 4, "max_seq_len": 64}
    model = build_model(ModelConfig(**shape, position="none", tie_embeddings=False, norm_eps=1e-12)).eval()
    with torch.no_grad():
        model.decoder.embed.weight.copy_(torch.eye(n))
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.lm_head.weight.copy_(logits.T / n**0.5)  # the final norm makes the one-hot vector this much longer
    return model


def always(logits) -> torch.nn.Module:
    """The same logits (V,) at every step."""
    return chain(torch.as_tensor(logits, dtype=torch.float64).repeat(len(logits), 1))


def counting(n: int = 12) -> torch.nn.Module:
    """After k comes k + 1, by far the likeliest."""
    return chain(9 * torch.eye(n, dtype=torch.float64).roll(1, dims=1))


def shapes_read(model, monkeypatch) -> list[tuple[int, int]]:
    """The shapes of all tokens that the model is given from now on."""
    shapes, features = [], model.features

    def recording(tokens, *args, **kwargs):
        shapes.append(tuple(tokens.shape))
        return features(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "features", recording)
    return shapes


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-308])
def test_f18_temperature_zero_or_nearly_takes_the_likeliest_of_the_full_forward(position, temperature):
    model, (prompt,) = build(position=position), prompts_of(5)
    expected = greedy(model, prompt, 12, use_cache=False)
    assert len(set(expected)) > 1
    for seed in (0, 1):
        assert generate(model, [prompt], max_new_tokens=12, temperature=temperature, seed=seed) == [expected]


def test_a_temperature_far_from_zero_does_not_always_take_the_likeliest():
    model, (prompt,) = build(), prompts_of(5)
    assert generate(model, [prompt], max_new_tokens=12, temperature=3.0) != [greedy(model, prompt, 12)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -1),
        ("temperature", -1e-9),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("vocab_size", 0),
        ("vocab_size", -1),
        ("max_new_tokens", -1),
    ],
)
def test_f17_f18_settings_out_of_range_are_refused_in_one_line_that_names_them(option, value):
    with pytest.raises(ValueError, match=f"^{option} = {value} .+$"):
        generate(counting(), [[1]], **{"temperature": 1.0} | {option: value})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_f18_a_model_that_computes_no_numbers_is_refused(weight, temperature):
    model = build()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = weight
    with pytest.raises(ValueError, match="not finite"):
        generate(model, [[1, 2]], temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.01, 1e-6])
def test_f19_peaked_models_draw_the_peak(p, dtype):
    model = always([50.0, 0.0, 0.0, 0.0]).to(dtype)
    assert generate(model, [[1]], max_new_tokens=30, temperature=1.0, top_p=p) == [[0] * 30]


def test_the_repetition_penalty_counts_the_prompt_and_what_was_generated_each_row_its_own():
    model = always([3.0, 2.8, 2.6, 2.4, -1.0])
    rows = generate(model, [[0], [4], [1, 0], [4, 2]], max_new_tokens=4, repetition_penalty=2.0)
    assert rows == [[1, 2, 3, 0], [0, 1, 2, 3], [2, 3, 0, 0], [0, 1, 3, 0]]
    assert generate(model, [[0]], max_new_tokens=4) == [[0] * 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 9.0},
        {"temperature": 9.0, "top_k": 4},
        {"temperature": 9.0, "top_p": 0.2},
        {"temperature": 9.0, "min_p": 0.8},
        {"temperature": 9.0, "vocab_size": 9},
        {"temperature": 9.0, "repetition_penalty": 8.0},
        {"repetition_penalty": 3.0},
    ],
    ids=str,
)
def test_each_row_is_chosen_by_all_settings_from_its_own_text_and_generator(options):
    model, prompts = build(), prompts_of(5, 2, 9)
    texts, settings = copy.deepcopy(prompts), Settings(**options)
    generators = [torch.Generator().manual_seed(4 + row) for row in range(3)]
    for row, id, log_probability, _ in stream(model, prompts, max_new_tokens=12, seed=4, **options):
        logits = model(torch.tensor([texts[row]]))[:, -1].detach().double()
        uniform = torch.rand(1, generator=generators[row], dtype=torch.float64)
        expected = choose(logits, settings, uniform, torch.tensor([texts[row]]))
        assert id == expected[0]
        assert log_probability == pytest.approx(expected[1].item(), abs=1e-4)
        texts[row].append(id)
    assert list(map(len, texts)) == [17, 14, 21]


def test_a_seed_gives_the_same_ids_again_and_another_seed_others():
    model, prompts = build(), prompts_of(4, 6)
    options = {"max_new_tokens": 20, "temperature": 1.5}
    first = generate(model, prompts, seed=5, **options)
    torch.rand(3)
    assert generate(model, prompts, seed=5, **options) == first
    assert generate(model, prompts, seed=6, **options) != first


def test_drawing_leaves_the_global_random_state_alone():
    model, before = build(), torch.get_rng_state()
    generate(model, prompts_of(4), max_new_tokens=5, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


# --- company, cache and context -------------------------------------------------------------------------------------

STYLES = [{}, {"temperature": 1.5, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 11}]


@pytest.mark.parametrize("style", STYLES, ids=["greedy", "drawn"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("position", POSITIONS)
def test_f11_a_row_of_a_ragged_batch_is_that_prompt_alone_with_seed_plus_row(position, window, use_cache, style):
    model, prompts = build(position=position, window=window, n_kv_head=2), prompts_of(3, 7, 1, 12)
    options = {"max_new_tokens": 12, "use_cache": use_cache, **style}
    rows = generate(model, prompts, **options)
    seeds = [style.get("seed", 0) + row for row in range(4)]
    alone = [generate(model, [p], **options | {"seed": s})[0] for p, s in zip(prompts, seeds, strict=True)]
    assert rows == alone
    assert all(len(row) == 12 for row in rows)


def test_f11_rows_with_equal_prompts_draw_differently():
    rows = generate(build(), prompts_of(5) * 3, max_new_tokens=12, temperature=1.5)
    assert len(set(map(tuple, rows))) == 3


@pytest.mark.parametrize("style", STYLES, ids=["greedy", "drawn"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("position", POSITIONS)
def test_f08_f16_the_cache_changes_nothing_well_past_the_window(position, window, style):
    model, prompts = build(position=position, window=window, n_kv_head=2, max_seq_len=80), prompts_of(9, 4)
    cached, plain = (generate(model, prompts, max_new_tokens=64, use_cache=c, **style) for c in (True, False))
    assert cached == plain
    if not style:
        assert cached == [greedy(model, prompt, 64, use_cache=False) for prompt in prompts]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_f16_bfloat16_is_finite(use_cache):
    model = build(n_kv_head=2).bfloat16()
    events = list(stream(model, prompts_of(5, 2), max_new_tokens=20, temperature=1.0, use_cache=use_cache))
    assert len(events) == 40
    assert np.isfinite([log_probability for _, _, log_probability, _ in events]).all()


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_f15_what_was_generated_before_leaves_no_trace(kind):
    options = {"max_new_tokens": 10, "temperature": 1.0, "end_id": 30}
    model = build(**ENCODER_DECODER) if kind == "encoder_decoder" else build(window=WINDOW)
    fresh, (a, b) = copy.deepcopy(model), prompts_of(40, 3)
    generate(model, [a], **options)
    assert generate(model, [b], **options) == generate(fresh, [b], **options)


def test_f15_two_streams_at_once_do_not_meet():
    model, (a, b) = build(), prompts_of(9, 3)
    pairs = zip(*(stream(model, [prompt], max_new_tokens=10, temperature=1.0) for prompt in (a, b)), strict=True)
    together = [[id for _, id, _, _ in events] for events in zip(*pairs, strict=True)]
    assert together == [generate(model, [prompt], max_new_tokens=10, temperature=1.0)[0] for prompt in (a, b)]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("n_prompt", [15, 16, 17, 40])
@pytest.mark.parametrize(
    ("position", "window"), [(p, None) for p in POSITIONS] + [("rope", WINDOW), ("learned", WINDOW)]
)
def test_f13_past_the_context_learned_positions_end_and_all_others_go_on(position, window, n_prompt, use_cache):
    model, (prompt,) = build(position=position, window=window, max_seq_len=16), prompts_of(n_prompt)
    events = stream(model, [prompt], max_new_tokens=10, use_cache=use_cache)
    if position == "learned" and n_prompt > 16:
        with pytest.raises(ValueError, match=f"{n_prompt} tokens.*max_seq_len = 16"):
            next(events)
        return
    events = list(events)
    n_new = 16 - n_prompt + 1 if position == "learned" else 10
    assert [id for _, id, _, _ in events] == greedy(model, prompt, n_new, use_cache=False)
    assert [reason for *_, reason in events] == [None] * (n_new - 1) + ["length"]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_f13_each_row_ends_at_its_own_limit(use_cache):
    model, prompts = build(position="learned", max_seq_len=16), prompts_of(15, 3, 16)
    rows = generate(model, prompts, max_new_tokens=10, use_cache=use_cache)
    assert list(map(len, rows)) == [2, 10, 1]
    assert rows == [greedy(model, prompt, n, use_cache=False) for prompt, n in zip(prompts, (2, 10, 1), strict=True)]


def test_f13_one_prompt_too_long_refuses_the_batch_before_its_first_token():
    model = build(position="learned", max_seq_len=16)
    with pytest.raises(ValueError, match="max_seq_len = 16"):
        next(stream(model, prompts_of(3, 17)))


def test_the_cache_of_learned_positions_is_no_larger_than_they_are(monkeypatch):
    capacities, allocate = [], generation.KVCache.allocate
    monkeypatch.setattr(
        generation.KVCache, "allocate", lambda *args: capacities.append(args[2]) or allocate(*args), raising=True
    )
    generate(build(position="learned", max_seq_len=16), prompts_of(9, 3), max_new_tokens=10**9)
    assert capacities == [16]


@pytest.mark.parametrize("style", STYLES, ids=["greedy", "drawn"])
@pytest.mark.parametrize("window", [None, WINDOW, 40])
def test_a_cache_that_grows_changes_nothing(window, style, monkeypatch):
    model, prompts = build(window=window), prompts_of(3, 9, 4)
    whole = generate(model, prompts, max_new_tokens=60, **style)
    monkeypatch.setattr(generation, "ROOM", 5)
    reserved, reserve = [], generation.KVCache.reserve
    monkeypatch.setattr(generation.KVCache, "reserve", lambda cache, n: reserved.append(n) or reserve(cache, n))
    assert generate(model, prompts, max_new_tokens=60, **style) == whole
    assert reserved == [28, 56, 68]  # doubled from 9 + 5, and no more than the 9 + 60 - 1 that can be read


@pytest.mark.parametrize(("little", "n_threads"), [(0, 3), (2**22, 1)])
def test_little_work_takes_one_thread_and_gives_the_others_back(little, n_threads, monkeypatch):
    model, found, before = build(), [], torch.get_num_threads()
    monkeypatch.setattr(generation, "LITTLE_WORK", little)
    model.decoder.blocks[0].register_forward_hook(lambda *_: found.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        for _ in stream(model, prompts_of(3, 9), max_new_tokens=3):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found == [n_threads] * 3


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_equal_prompts_are_read_once_and_then_go_their_own_ways(kind, use_cache, monkeypatch):
    options = {} if kind == "decoder" else {"kind": kind, "n_encoder_layer": 1, "position": "sinusoidal"}
    model, (a, b) = build(**options), prompts_of(9, 4)
    prompts, drawing = [a, b, a, a, b], {"temperature": 1.0, "max_new_tokens": 6, "use_cache": use_cache}
    drawing |= {} if kind == "decoder" else {"end_id": 0}
    alone = [generate(model, [prompt], seed=row, **drawing)[0] for row, prompt in enumerate(prompts)]
    shapes = shapes_read(model, monkeypatch)
    assert generate(model, prompts, **drawing) == alone
    assert [n_row for n_row, _ in shapes[:2]] == [2, 5]
    assert len(set(map(tuple, alone))) == 5


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("piece", [1, 4, 7])
def test_a_prompt_read_in_pieces_is_the_prompt_read_at_once(position, window, piece, monkeypatch):
    model, prompts = build(position=position, window=window), prompts_of(3, 9, 4, 8, 14)
    whole = generate(model, prompts, max_new_tokens=6)
    monkeypatch.setattr(generation, "PREFILL", piece)
    shapes = shapes_read(model, monkeypatch)
    assert generate(model, prompts, max_new_tokens=6) == whole
    assert max(width for _, width in shapes) == piece
    assert len(shapes) == -(-14 // piece) + 5


# --- where rows begin and end ---------------------------------------------------------------------------------------


def test_f21_an_empty_prompt_starts_from_the_end_of_text():
    model = build()
    assert generate(model, [[], [5, 6]], end_id=7) == generate(model, [[7], [5, 6]], end_id=7)


def test_f21_an_empty_prompt_without_an_end_of_text_is_refused():
    for prompts in ([[]], [[1, 2], []]):
        with pytest.raises(ValueError, match=r"empty prompt.*end_id"):
            generate(build(), prompts)


def test_no_prompts_give_no_rows():
    assert generate(build(), []) == []


def test_f22_finished_rows_stay_finished_and_cost_nothing_more(monkeypatch):
    model = counting()
    shapes = shapes_read(model, monkeypatch)
    events = list(stream(model, [[7], [4]], max_new_tokens=10, end_id=9))
    assert [(row, id, reason) for row, id, _, reason in events] == [
        (0, 8, None),
        (1, 5, None),
        (0, 9, "end"),
        (1, 6, None),
        (1, 7, None),
        (1, 8, None),
        (1, 9, "end"),
    ]
    assert shapes == [(2, 1), (2, 1), (1, 1), (1, 1), (1, 1)]
    assert generate(model, [[7], [4]], max_new_tokens=10, end_id=9) == [[8], [5, 6, 7, 8]]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_f22_the_rows_that_go_on_are_what_they_are_alone(window, use_cache):
    model, prompts = build(window=window), prompts_of(2, 9, 5, 7, 3, 4)
    style = {"temperature": 3.0, "repetition_penalty": 1.5}
    options = {"max_new_tokens": 40, "end_id": 4, "use_cache": use_cache, **style}
    rows = generate(model, prompts, **options)
    assert rows == [generate(model, [prompt], seed=row, **options)[0] for row, prompt in enumerate(prompts)]
    assert len(set(map(len, rows))) > 3
    assert not any(4 in row for row in rows)


def test_f23_rows_of_the_vocabulary_beyond_the_tokenizer_never_come_out():
    model = build(vocab_size=64)
    rows = generate(model, prompts_of(*[3] * 50), max_new_tokens=40, temperature=5.0, vocab_size=60)
    ids = {id for row in rows for id in row}
    assert sum(map(len, rows)) == 2000
    assert len(ids) > 50
    assert max(ids) < 60
    assert (
        max(id for row in generate(model, prompts_of(*[3] * 50), max_new_tokens=40, temperature=5.0) for id in row) > 59
    )


def test_f23_neither_does_greedy_choose_them():
    assert generate(always([0.0, 1.0, 2.0]), [[0]], max_new_tokens=3, vocab_size=2) == [[1, 1, 1]]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_log_probabilities_are_those_of_the_model_itself_whatever_was_filtered(use_cache):
    model, prompts = build(n_kv_head=2), prompts_of(3, 8)
    style = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "vocab_size": 25}
    texts = copy.deepcopy(prompts)
    for row, id, log_probability, _ in stream(model, prompts, max_new_tokens=12, use_cache=use_cache, **style):
        raw = model(torch.tensor([texts[row]]))[0, -1].detach().double()
        assert log_probability == pytest.approx(raw.log_softmax(-1)[id].item(), abs=1e-4)
        texts[row].append(id)
    assert list(map(len, texts)) == [15, 20]


@pytest.mark.parametrize(
    ("options", "row", "reason"),
    [
        ({}, [3, 4, 5, 6, 7, 8], "length"),
        ({"max_new_tokens": 1}, [3], "length"),
        ({"stop": [[5, 6]]}, [3, 4], "stop"),
        ({"stop": ((5, 6),)}, [3, 4], "stop"),
        ({"stop": [[9], [6]]}, [3, 4, 5], "stop"),
        ({"stop": [[3]]}, [], "stop"),
        ({"stop": [[5], [4, 5]]}, [3], "stop"),  # two end together: all of both goes
        ({"stop": [[4, 5], [5]]}, [3], "stop"),
        ({"stop": [[4, 5, 6, 7], [5]]}, [3, 4], "stop"),
        ({"stop": [[5, 4], [3, 5]]}, [3, 4, 5, 6, 7, 8], "length"),
        ({"stop": [[2, 3]]}, [3, 4, 5, 6, 7, 8], "length"),  # the prompt is not part of it
        ({"stop": [[]]}, [3, 4, 5, 6, 7, 8], "length"),
        ({"stop": [[8]]}, [3, 4, 5, 6, 7], "stop"),  # at the last token allowed
        ({"stop": lambda new: new[-2:] == [4, 5]}, [3, 4, 5], "stop"),
        ({"stop": lambda new: 2 in new}, [3, 4, 5, 6, 7, 8], "length"),
        ({"end_id": 5}, [3, 4], "end"),
        ({"end_id": 3}, [], "end"),
        ({"end_id": 8}, [3, 4, 5, 6, 7], "end"),
        ({"end_id": 5, "stop": [[4, 5]]}, [3, 4], "end"),
        ({"end_id": 5, "stop": [[4]]}, [3], "stop"),
    ],
)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_rows_end_with_end_stop_or_length(options, row, reason, use_cache):
    options = {"max_new_tokens": 6, "use_cache": use_cache, **options}
    assert generate(counting(), [[2]], **options) == [row]
    reasons = [reason for *_, reason in stream(counting(), [[2]], **options)]
    assert reasons == [None] * (len(reasons) - 1) + [reason]


def test_a_stop_of_repeated_ids_is_found_after_a_false_start():
    period = chain(9 * torch.eye(3, dtype=torch.float64)[[1, 2, 0]])  # 0 1 2 0 1 2
    assert generate(period, [[2]], max_new_tokens=20, stop=[[1, 2, 0, 1, 2, 0, 1]]) == [[0]]


def test_each_row_stops_for_itself():
    rows = generate(counting(), [[2], [0], [6]], max_new_tokens=5, stop=[[4]], end_id=9)
    assert rows == [[3], [1, 2, 3], [7, 8]]


def test_no_new_tokens_asked_for_none_given():
    assert generate(build(), prompts_of(1, 5), max_new_tokens=0) == [[], []]
    assert generate(build(), prompts_of(1), max_new_tokens=0) == [[]]
    assert list(stream(build(), prompts_of(3), max_new_tokens=0)) == []


# --- the model afterwards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ending", ["whole", "abandoned", "refused"])
def test_the_model_is_left_in_the_mode_it_was_in(training, ending):
    model = build(dropout=0.5, position="learned", max_seq_len=16).train(training)
    if ending == "whole":
        generate(model, prompts_of(3))
    elif ending == "abandoned":
        events = stream(model, prompts_of(3))
        next(events)
        events.close()
    else:
        with pytest.raises(ValueError):
            generate(model, prompts_of(17))
    assert {module.training for module in model.modules()} == {training}


def test_dropout_is_off_while_generating():
    model = build(dropout=0.5)
    expected = generate(model, prompts_of(3), max_new_tokens=20)
    assert generate(model.train(), prompts_of(3), max_new_tokens=20) == expected


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_no_gradients_are_recorded_but_between_tokens_they_may_be(use_cache, monkeypatch):
    model = build()
    grad_modes, features = [], model.features
    monkeypatch.setattr(
        model, "features", lambda *a, **k: grad_modes.append(torch.is_grad_enabled()) or features(*a, **k)
    )
    assert all(torch.is_grad_enabled() for _ in stream(model, prompts_of(3), max_new_tokens=4, use_cache=use_cache))
    assert grad_modes == [False] * 4
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_prompts_are_not_written_to():
    prompts = prompts_of(3, 5)
    before = copy.deepcopy(prompts)
    generate(build(), prompts, max_new_tokens=4)
    assert prompts == before


# --- encoder-decoder ------------------------------------------------------------------------------------------------


def translate(model, source: list[int], end_id: int, n_new: int) -> list[int]:
    """Greedy, by the full forward."""
    target = [end_id]
    while len(target) <= n_new:
        id = model(torch.tensor([source]), torch.tensor([target]))[0, -1].argmax().item()
        if id == end_id:
            break
        target.append(id)
    return target[1:]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope"])
def test_f11_sources_of_different_lengths_are_each_what_they_are_alone(position, use_cache):
    model, sources = build(**ENCODER_DECODER, position=position, seed=3), prompts_of(3, 9, 1, 6, 2)
    greedy_rows = generate(model, sources, max_new_tokens=12, end_id=30, use_cache=use_cache)
    assert greedy_rows == [translate(model, source, 30, 12) for source in sources]
    options = {"max_new_tokens": 30, "temperature": 5.0, "end_id": 4, "use_cache": use_cache}
    rows = generate(model, sources, **options)
    assert rows == [generate(model, [source], seed=row, **options)[0] for row, source in enumerate(sources)]
    assert len(set(map(len, rows))) > 2  # rows that end leave the others alone


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope"])
def test_f16_an_encoder_decoder_needs_no_cache_either(position):
    model, sources = build(**ENCODER_DECODER, position=position), prompts_of(3, 9)
    options = {"max_new_tokens": 30, "temperature": 1.5, "end_id": 30}
    assert generate(model, sources, use_cache=True, **options) == generate(model, sources, use_cache=False, **options)


def test_an_encoder_decoder_without_an_end_of_text_has_no_start_and_is_refused():
    with pytest.raises(ValueError, match="encoder-decoder, needs an end_id"):
        generate(build(**ENCODER_DECODER), prompts_of(3))


def test_f13_learned_positions_limit_source_and_target_each_for_itself():
    model = build(**ENCODER_DECODER, position="learned", max_seq_len=16)
    (row,) = generate(model, prompts_of(16), max_new_tokens=99, end_id=30)
    assert len(row) == 16
    with pytest.raises(ValueError, match=r"17 tokens.*max_seq_len = 16"):
        generate(model, prompts_of(17), end_id=30)


# --- text -----------------------------------------------------------------------------------------------------------

PARTY, FAMILY = "\N{PARTY POPPER}", "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}\u200d\N{BOY}"
SAMPLES = {
    "party": PARTY,
    "family": FAMILY,
    "hangul": "가각힣 한국어",
    "jamo": "\u1112\u1161\u11ab",
    "accent": "déjà cafe\u0301",
    "all": f"a{PARTY}b{FAMILY}c한\n",
}


class Pieces(Tokenizer):
    """A tokenizer of given pieces, the last of which is the end of text."""

    def __init__(self, *pieces: bytes):
        self.name, self.pieces, self.end_id = "pieces", [*pieces, b""], len(pieces)


def printed(tokenizer, ids, stops=(), reason="length") -> list[str]:
    """What is printed at each id, the last of which has this reason."""
    text = Text(tokenizer, stops)
    return [text.add(id, reason if place == len(ids) - 1 else None) for place, id in enumerate(ids)]


@pytest.mark.parametrize("text", SAMPLES.values(), ids=SAMPLES)
def test_f24_streaming_never_prints_half_a_character(text):
    tokenizer = ByteTokenizer()
    parts = printed(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    assert [len(part) for part in parts] == [
        int(last) for character in text for last in [0] * (len(character.encode()) - 1) + [1]
    ]  # each character as soon as its last byte has come


@pytest.mark.parametrize("reason", ["length", "end"])
def test_f24_a_bad_byte_neither_stalls_the_stream_nor_is_lost(reason):
    tokenizer = ByteTokenizer()
    parts = printed(
        tokenizer,
        [0xC3, *b"ab", 0xFF, *b"c", *"한".encode()[:2], tokenizer.end_id][: 8 if reason == "end" else 7],
        reason=reason,
    )
    assert "".join(parts) == "\ufffdab\ufffdc\ufffd"
    assert parts[:5] == ["", "\ufffda", "b", "\ufffd", "c"]


def test_f24_stop_strings_across_tokens_are_not_printed():
    tokenizer = Pieces(b"Once", b" <E", b"N", b"D> more", "끝".encode()[:1], "끝".encode()[1:] + b"!")
    assert printed(tokenizer, [0, 1, 2, 3], ["<END>"], "stop") == ["Once", " ", "", ""]
    assert printed(tokenizer, [0, 4, 5], ["끝"], "stop") == ["Once", "", ""]
    assert printed(tokenizer, [0, 1, 2, 3], ["END>", "<END"], "stop") == ["Once", " ", "", ""]  # before the first
    stop = stops_at(tokenizer, ["<END>", "끝"])
    assert [stop([0, 1, 2, 3][:n]) for n in range(1, 5)] == [False, False, False, True]
    assert [stop([0, 4, 5][:n]) for n in range(1, 4)] == [False, False, True]
    assert not stops_at(tokenizer, [])([0, 1])


@pytest.mark.parametrize("reason", ["length", "end"])
def test_f24_text_held_back_for_a_stop_is_released_at_the_end(reason):
    tokenizer = Pieces(b"Once", b" <E", b"N")
    ids = [0, 1, 2] + [tokenizer.end_id] * (reason == "end")
    assert "".join(printed(tokenizer, ids, ["<END>"], reason)) == "Once <EN"


def test_f24_text_held_back_in_vain_is_released_at_once():
    tokenizer = Pieces(b"<", b"E", b"x")
    assert printed(tokenizer, [0, 1, 0, 1, 2, 2], ["<END>"]) == ["", "", "<E", "", "<Ex", "x"]


def test_f24_random_texts_are_printed_up_to_their_first_stop_and_as_early_as_can_be():
    han = "한".encode()
    tokenizer = Pieces(b"a", b"b", b"ab", b"ba", b"aab", han, han[:1], han[1:], han[:2], han[2:] + b"a", b"\xff")
    rng, n_stopped = random.Random(0), 0
    for _ in range(500):
        stops = ["".join(rng.choices(["a", "b", "한"], k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        stop, text, ids, so_far = stops_at(tokenizer, stops), Text(tokenizer, stops), [], ""
        n_ids = rng.randint(1, 12)
        while True:
            ids.append(rng.randrange(tokenizer.end_id))
            full = tokenizer.decode_bytes(ids).decode("utf-8", "replace")
            stopped = any(s in full for s in stops)
            assert stop(ids) == stopped
            reason = "stop" if stopped else "length" if len(ids) == n_ids else None
            so_far += text.add(ids[-1], reason)
            if reason:
                break
            whole = tokenizer.decode_bytes(ids).decode("utf-8", "ignore") if full.endswith("\ufffd") else full
            longest = max(map(len, stops), default=1)
            assert full.startswith(so_far)
            assert len(so_far) > len(whole) - longest - 1
        cut = min((full.find(s) for s in stops if s in full), default=len(full))
        assert so_far == full[:cut]
        n_stopped += stopped
    assert 100 < n_stopped < 450
