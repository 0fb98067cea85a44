"""The schema by itself: what it derives, what it refuses, and what every option owes its reader."""

from types import NoneType
from typing import get_args

import pytest
from pydantic import ValidationError

from config.schema import Config, DataConfig, ModelConfig, OptimConfig, RopeScaling, Section, TrainConfig


def fields(section=Config, path=()):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from fields(field.annotation, (*path, name))
        else:
            yield ".".join((*path, name)), field


def test_every_option_says_what_it_means():
    assert [name for name, field in fields() if not field.description] == []


def test_every_section_says_what_it_holds():
    sections = [Config, RopeScaling, *(field.annotation for field in Config.model_fields.values())]
    assert [section.__name__ for section in sections if not section.__doc__] == []


def test_only_an_option_whose_default_is_none_may_be_none():
    """TOML has no null, so an option that is on by default could never be read back as None."""
    for name, field in fields():
        assert (NoneType in get_args(field.annotation)) == (field.default is None), name


def test_frozen():
    config = Config()
    with pytest.raises(ValidationError):
        config.model.n_layer = 2
    with pytest.raises(ValidationError):
        config.model = ModelConfig()


@pytest.mark.parametrize("given", [{"n_layer": "4"}, {"n_layer": 4.0}, {"n_layer": True}, {"bias": 1}, {"kind": None}])
def test_nothing_is_coerced(given):
    with pytest.raises(ValidationError):
        ModelConfig(**given)


def test_a_whole_number_is_a_number_and_a_list_is_a_pair():
    optim = OptimConfig(learning_rate=1, betas=[0, 0.5])
    assert optim.learning_rate == 1.0
    assert isinstance(optim.learning_rate, float)
    assert optim.betas == (0.0, 0.5)


def test_unknown_keyword_is_refused():
    with pytest.raises(ValidationError, match="n_heads"):
        ModelConfig(n_heads=4)


@pytest.mark.parametrize(
    ("section", "given", "told"),
    [
        (ModelConfig, {"d_model": 30, "n_head": 4}, ["d_model = 30", "n_head = 4"]),
        (ModelConfig, {"n_head": 4, "d_model": 64, "n_kv_head": 3}, ["n_head = 4", "n_kv_head = 3"]),
        (ModelConfig, {"n_head": 2, "d_model": 64, "n_kv_head": 4}, ["n_head = 2", "n_kv_head = 4"]),
        (ModelConfig, {"d_model": 30, "n_head": 2, "position": "rope"}, ["position = rope", "head_dim", "15"]),
        (ModelConfig, {"d_model": 33, "n_head": 1, "position": "sinusoidal"}, ["position = sinusoidal", "33"]),
        (ModelConfig, {"n_encoder_layer": 2}, ["n_encoder_layer = 2", "kind = encoder_decoder"]),
        (
            ModelConfig,
            {"position": "none", "rope_scaling": RopeScaling(kind="linear", factor=2)},
            ["rope_scaling.kind = linear", "position = rope", "none"],
        ),
        (RopeScaling, {"factor": 2.0}, ["factor = 2.0", "kind"]),
        (RopeScaling, {"kind": "linear"}, ["kind = linear", "factor above 1"]),
        (RopeScaling, {"kind": "yarn", "factor": 2.0, "beta_fast": 1.0}, ["beta_fast = 1.0", "beta_slow = 1.0"]),
        (
            RopeScaling,
            {"kind": "llama3", "factor": 2.0, "high_freq_factor": 0.5},
            ["high_freq_factor = 0.5", "low_freq_factor = 1.0"],
        ),
        (OptimConfig, {"min_learning_rate": 1.0}, ["min_learning_rate = 1.0", "learning_rate = 0.003"]),
        (TrainConfig, {"batch_size": 8, "micro_batch_size": 3}, ["batch_size = 8", "micro_batch_size = 3"]),
    ],
)
def test_impossible_pair_is_refused_with_both_values(section, given, told):
    with pytest.raises(ValidationError) as error:
        section(**given)
    for part in told:
        assert part in str(error.value)


def test_resolve_derives_what_was_left_out():
    model = ModelConfig(n_head=4, d_model=128).resolve(vocab_size=66)
    assert (model.vocab_size, model.n_kv_head, model.head_dim, model.d_ff) == (66, 4, 32, 352)  # 8/3 · 128 = 341.3
    assert model.attention_scale == pytest.approx(32**-0.5)
    assert model.n_encoder_layer is None
    assert ModelConfig(activation="gelu", d_model=128, n_head=4).resolve(66).d_ff == 512
    assert ModelConfig(kind="encoder_decoder", n_layer=3).resolve(66).n_encoder_layer == 3


def test_resolve_keeps_what_was_given_and_changes_nothing_twice():
    model = ModelConfig(
        vocab_size=50, n_kv_head=2, head_dim=8, d_ff=7, attention_scale=1.0, n_encoder_layer=2, kind="encoder_decoder"
    )
    assert model.resolve(vocab_size=66) == model
    assert ModelConfig().resolve(66).resolve(99) == ModelConfig().resolve(66)


SECTIONS = [Config, RopeScaling, *(field.annotation for field in Config.model_fields.values())]


IDLE = {  # a value that differs from the default, beside one that leaves it without effect
    "rope_theta": (500.0, {"position": "none"}),
    "n_encoder_layer": (2, {}),
    "factor": (2.0, {}),
    "original_max_seq_len": (16, {"kind": "linear", "factor": 2.0}),
    "low_freq_factor": (2.0, {"kind": "yarn", "factor": 2.0}),
    "high_freq_factor": (8.0, {"kind": "yarn", "factor": 2.0}),
    "beta_fast": (64.0, {"kind": "llama3", "factor": 2.0}),
    "beta_slow": (2.0, {"kind": "llama3", "factor": 2.0}),
    "source_vocab_size": (300, {}),
    "betas": ((0.5, 0.5), {"name": "sgd"}),
    "decay_fraction": (0.5, {}),
    "matrix_learning_rate": (0.5, {}),
    "min_learning_rate": (1e-4, {"schedule": "constant"}),
    "wandb_project": ("mine", {}),
}


@pytest.mark.parametrize(("section", "option"), [(s, option) for s in SECTIONS for option in s.NEEDS])
def test_an_option_without_effect_is_refused(section, option):
    value, beside = IDLE[option]
    with pytest.raises(ValidationError, match=rf"{option} = .* needs {section.NEEDS[option][0]} = "):
        section(**{option: value}, **beside)


@pytest.mark.parametrize("source", ["stories", "pydoc", "https://example.org/rows", "a.txt", "A.MD", "pairs.tsv"])
def test_a_text_field_without_rows_is_refused(source):
    with pytest.raises(ValidationError, match=f"text_field = body needs rows with fields .* source is {source}"):
        DataConfig(source=source, text_field="body")


@pytest.mark.parametrize("source", ["hub:a/b", "hub:a.txt", "folder", "rows.jsonl", "rows.parquet"])
def test_rows_may_have_a_text_field(source):
    assert DataConfig(source=source, text_field="body").text_field == "body"
