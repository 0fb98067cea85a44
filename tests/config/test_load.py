"""Files and the command line: what is read, what comes back, and what is said when something is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import annotated_types
import pytest

from config import Config, ConfigError, load_config, override, read_toml, split_preset, to_toml
from config.load import DEFAULT_PRESET
from config.schema import ModelConfig, Section

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "config").glob("*.toml"))


def options(section=Config, path=()):
    """(full name, field) of every option, from the schema."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from options(field.annotation, (*path, name))
        else:
            yield ".".join((*path, name)), field


def plain(field):
    """(type without its bounds, bounds) of an option: of X in X | None, and of the first in a pair."""
    kind, bounds = field.annotation, list(field.metadata)
    while get_origin(kind) in (Annotated, Union, UnionType, tuple):
        kind, *more = [part for part in get_args(kind) if part is not NoneType]
        bounds += [bound for part in more for bound in getattr(part, "metadata", [part])]
    return kind, bounds


OPTIONS = dict(options())
PAIRS = [name for name, field in OPTIONS.items() if get_origin(field.annotation) is tuple]
NUMBERS = [name for name, field in OPTIONS.items() if plain(field)[0] in (int, float)]


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def refusal(call, *args):
    """The sentence of a ConfigError: one line, and none of the marks of a library talking to itself."""
    with pytest.raises(ConfigError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message
    assert not re.search(r"https?://|Value error|validation error|Input should|[│╭╰]|Traceback|input_value", message)
    return message


@pytest.fixture
def preset(tmp_path):
    """Writes a preset and gives its path as a word of the command line."""

    def write(text, name="tiny.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


# Precedence


def test_preset_over_schema_and_command_line_over_preset(preset):
    file = preset("[model]\nn_layer = 3\nd_model = 96\n[optim]\nlearning_rate = 0.5\n")
    config = load_config([file, "--model.n-layer", "5"])
    assert (config.model.n_layer, config.model.d_model, config.optim.learning_rate) == (5, 96, 0.5)
    assert config.train == Config().train
    assert load_config([file]) == read_toml(file)


@pytest.mark.parametrize(
    "words", ["--model.n-kv-head 2", "--model.n_kv_head 2", "--model.n-kv-head=2", "--model.n_kv_head=2"]
)
def test_an_option_in_all_its_spellings(words):
    assert override(Config(), words.split()).model.n_kv_head == 2


def test_the_last_word_on_an_option_wins():
    assert override(Config(), ["--train.seed", "1", "--train.seed=2"]).train.seed == 2


def test_an_override_reaches_a_table_in_a_table():
    config = override(Config(), ["--model.rope-scaling.kind", "ntk", "--model.rope_scaling.factor=4"])
    assert (config.model.rope_scaling.kind, config.model.rope_scaling.factor) == ("ntk", 4.0)


def test_a_pair_takes_two_words():
    assert override(Config(), ["--optim.betas", "0.8", "0.99", "--train.seed", "3"]).optim.betas == (0.8, 0.99)


def test_none_unsets_only_what_may_be_omitted(preset):
    file = preset("[model]\nwindow = 64\n[train]\nrun_dir = 'runs/x'\n")
    config = load_config([file, "--model.window", "None", "--train.run-dir=None"])
    assert config.model.window is None
    assert config.train.run_dir is None
    assert "train.steps = None must be a whole number" in refusal(load_config, [file, "--train.steps", "None"])
    assert "data.source = None must be text" in refusal(load_config, [file, "--data.source", "None"])


def test_overrides_are_checked_together_in_any_order(preset):
    file = preset("[model]\nn_head = 6\nd_model = 384\n")
    words = ["--model.n-head=5", "--model.d-model=320"]
    first, second = load_config([file, *words]), load_config([file, *words[::-1]])
    assert first == second
    assert (first.model.n_head, first.model.d_model) == (5, 320)
    assert "model.d_model = 384 must be a multiple of model.n_head = 5" in refusal(load_config, [file, words[0]])


def test_an_override_is_checked_against_the_preset(preset):
    file = preset("[model]\nn_head = 4\nd_model = 64\n")
    message = refusal(load_config, [file, "--model.n-kv-head", "3"])
    assert message == "command line: model.n_head = 4 must be a multiple of model.n_kv_head = 3"


def test_override_without_words_changes_nothing():
    config = Config(model=ModelConfig(n_layer=2, window=5))
    assert override(config, []) == config


def test_split_preset(monkeypatch):
    assert split_preset([]) == (DEFAULT_PRESET, [])
    assert split_preset(["--train.seed", "1"]) == (DEFAULT_PRESET, ["--train.seed", "1"])
    assert split_preset(["a/b.toml", "--train.seed", "1"]) == (Path("a/b.toml"), ["--train.seed", "1"])
    monkeypatch.chdir(ROOT)
    assert split_preset(["gpt2_124m"]) == (Path("config/gpt2_124m.toml"), [])
    assert split_preset(["config/gpt2_124m.toml"])[0].stem == "gpt2_124m"


# There and back


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_and_comes_back(path, preset):
    config = read_toml(path)
    assert read_toml(preset(to_toml(config))) == config


BASES = [
    Config(),
    Config(model={"kind": "encoder_decoder"}),
    Config(model={"rope_scaling": {"kind": "linear", "factor": 2.0}}),
    Config(model={"rope_scaling": {"kind": "llama3", "factor": 2.0}}),
    Config(model={"rope_scaling": {"kind": "yarn", "factor": 2.0}}),
    Config(data={"source": "hub:a/b"}),
    Config(log={"wandb": "offline"}),
    Config(optim={"schedule": "wsd"}),
    Config(optim={"name": "muon"}),
]
CANDIDATES = {int: [1, 2, 768, 2000], float: [1e-7, 0.25, 2.5], bool: [True, False], str: ['별 "x"\\\n\t\x7f é']}


def changed(name):
    """(a configuration, the same with another value for this option)"""
    kind, _ = plain(OPTIONS[name])
    for value in get_args(kind) if get_origin(kind) is Literal else CANDIDATES[kind]:
        value = [value / 2, value] if name in PAIRS else value
        for base in BASES:
            try:
                config = Config.model_validate(merge(base.model_dump(), nested(name, value)))
            except ValueError:
                continue
            if config != base:
                return base, config
    pytest.fail(f"{name} has no valid value but its default")


def merge(values, more):
    return values | {k: merge(values[k], v) if isinstance(v, dict) else v for k, v in more.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_comes_back_from_toml(name, preset):
    base, config = changed(name)
    assert to_toml(config) != to_toml(base)
    assert read_toml(preset(to_toml(config))) == config


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_comes_from_the_command_line(name):
    base, config = changed(name)
    value = value_of(config, name)
    first, *rest = map(str, value if name in PAIRS else [value])
    assert override(base, [f"--{name}={first}", *rest]) == config


def test_what_is_none_is_left_out():
    assert "window" not in to_toml(Config())
    assert "None" not in to_toml(Config())


def test_a_preset_from_a_windows_editor_is_read(preset):
    assert read_toml(preset(b"\xef\xbb\xbf[model]\r\nn_layer = 2\r\n")).model.n_layer == 2


# F58: booleans


@pytest.mark.parametrize("option", ["model.bias", "model.tie-embeddings"])
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize(("word", "meant"), [("False", 0), ("false", 0), ("0", 0), ("no", 0), ("True", 1), ("true", 1)])
def test_f58_a_boolean_means_what_its_word_says(option, start, word, meant):
    base = Config(model=ModelConfig(bias=start, tie_embeddings=start))
    name = option.replace("-", "_")
    for words in ([f"--{option}", word], [f"--{option}={word}"]):
        config = override(base, words)
        assert value_of(config, name) is bool(meant)
        assert f"{name.split('.')[1]} = {str(bool(meant)).lower()}\n" in to_toml(config)


def test_f58_a_boolean_needs_a_word_it_knows():
    assert "model.bias = maybe must be true or false" in refusal(override, Config(), ["--model.bias", "maybe"])
    assert refusal(override, Config(), ["--model.bias"]) == "--model.bias needs a value: {true,false}"
    assert "did you mean --model.bias?" in refusal(override, Config(), ["--model.no-bias"])


# F59: mistyped overrides


def test_f59_a_whole_number_is_a_rate():
    rate = override(Config(), ["--optim.learning-rate", "1"]).optim.learning_rate
    assert rate == 1.0
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--train.steps 1e3", "command line: train.steps = 1e3 must be a whole number"),
        ("--train.steps ten", "command line: train.steps = ten must be a whole number"),
        ("--optim.learning-rate fast", "command line: optim.learning_rate = fast must be a number"),
        ("--optim.learning-rate nan", "command line: optim.learning_rate = nan must be a finite number"),
        ("--optim.learning-rate -1", "command line: optim.learning_rate = -1 must be greater than 0"),
        ("--optim.learning-rate=-1e-3", "command line: optim.learning_rate = -1e-3 must be greater than 0"),
        ("--model.window 0", "command line: model.window = 0 must be greater than or equal to 1"),
        ("--model.position ropes", "model.position = ropes must be 'sinusoidal', 'learned', 'rope' or 'none'"),
        ("--optim.betas 0.9 1.5", "command line: optim.betas = 1.5 must be less than 1"),
        ("--optim.betas 0.9", "--optim.betas needs a value: FLOAT FLOAT"),
        ("--train.steps", "--train.steps needs a value: INT"),
        ("--train.steps --train.seed 1", "--train.steps needs a value: INT"),
        ("--data.source -x", "--data.source needs a value: STR"),
        ("--train.steps 10 20", "20 belongs to no option"),
        ("--train.seed 1 config/tiny.toml", "config/tiny.toml belongs to no option; a preset comes first"),
        (
            "--model.rope-scaling.factor 2",
            "model.rope_scaling.factor = 2.0 needs model.rope_scaling.kind = linear or llama3 or ntk or yarn",
        ),
        (
            "--model.rope-scaling.kind ntk --model.rope-scaling.factor 2 --model.position none",
            "model.rope_scaling.kind = ntk needs model.position =",
        ),
    ],
)
def test_f59_a_wrong_value_is_told_in_one_line(words, told):
    assert told in refusal(override, Config(), words.split())


def test_f59_a_value_may_begin_with_a_dash():
    assert override(Config(), ["--data.source=-x"]).data.source == "-x"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--model.n-heads", "--model.n-head"),
        ("--model.n_heads", "--model.n-head"),
        ("--n-head", "--model.n-head"),
        ("--steps", "--train.steps"),
        ("--warmup", "--optim.warmup-steps"),
        ("--model.learning-rate", "--optim.learning-rate"),
        ("--modle.n-head", "--model.n-head"),
        ("--optim.min-lerning-rate", "--optim.min-learning-rate"),
        ("--model.rope-scaling.beta-fst", "--model.rope-scaling.beta-fast"),
    ],
)
def test_f59_a_mistyped_option_is_answered_with_what_was_meant(typed, meant):
    told = f"{typed} is not an option; did you mean {meant}?"
    assert refusal(override, Config(), [typed, "4"]) == told
    assert refusal(override, Config(), ["--train.seed", "1", f"{typed}=4"]) == told


def test_f59_an_option_like_no_other_points_to_help():
    assert refusal(override, Config(), ["--xyzzy", "4"]) == "--xyzzy is not an option; --help lists them all"


def test_f59_a_missing_preset_is_answered_with_one_nearby(preset, tmp_path, monkeypatch):
    preset("", "shakespeare_char.toml")
    preset("", "stories.toml")
    missing = tmp_path / "shakespeare.toml"
    assert refusal(load_config, [str(missing)]) == (
        f"there is no {missing}; did you mean {tmp_path / 'shakespeare_char.toml'}?"
    )
    message = refusal(load_config, [str(tmp_path / "xyzzy.toml")])
    assert message.endswith(f"{tmp_path} has shakespeare_char, stories")
    assert refusal(load_config, [str(tmp_path)]) == f"{tmp_path} cannot be read: Is a directory"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("config.load.PRESETS", tmp_path)
    assert refusal(load_config, ["storys"]) == "there is no storys.toml; did you mean stories.toml?"
    assert refusal(load_config, ["confg/stories.toml"]).endswith("; did you mean stories.toml?")


# Files


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[model]\nn_heads = 4", "model.n_heads is not an option; did you mean model.n_head?"),
        ("n_head = 4", "n_head is not an option; did you mean model.n_head?"),
        ("[model]\nlearning_rate = 1", "model.learning_rate is not an option; did you mean optim.learning_rate?"),
        ("[modle]\nn_head = 4", "[modle] is not a section; did you mean [model]?"),
        ("[model.rope_scalin]", "[model.rope_scalin] is not a section; did you mean [model.rope_scaling]?"),
        ("[model]\nn_head = '4'", 'model.n_head = "4" must be a whole number'),
        ("[model]\nn_head = 4.0", "model.n_head = 4.0 must be a whole number"),
        ("[model]\nn_head = true", "model.n_head = true must be a whole number"),
        ("[train]\nsteps = 1e3", "train.steps = 1000.0 must be a whole number"),
        ("[model]\nbias = 1", "model.bias = 1 must be true or false"),
        ("[model]\nbias = 'no'", 'model.bias = "no" must be true or false'),
        ("[data]\nsource = 4", "data.source = 4 must be text"),
        ("[data]\nsource = 2024-01-01", "data.source = 2024-01-01 must be text"),
        ("[optim]\nlearning_rate = '1'", 'optim.learning_rate = "1" must be a number'),
        ("[optim]\nlearning_rate = inf", "optim.learning_rate = inf must be a finite number"),
        ("[optim]\nname = 'adam'", "optim.name = \"adam\" must be 'adamw', 'muon' or"),
        ("[optim]\nbetas = [0.9]", "optim.betas = [0.9] must be a pair of numbers"),
        ("[optim]\nbetas = [0.9, 0.9, 0.9]", "optim.betas = [0.9, 0.9, 0.9] must be a pair of numbers"),
        ("[optim]\nbetas = 0.9", "optim.betas = 0.9 must be a pair of numbers"),
        ("[optim]\nbetas = [0.9, 1]", "optim.betas = 1 must be less than 1"),
        ("model = 4", "model = 4 must be a table"),
        ("[model]\nn_head = 5", "model.d_model = 384 must be a multiple of model.n_head = 5"),
        ("[model]\nn_head = 4 4", "(at line 2, column 12)"),
        ("[model]\nn_head = null", "Invalid value (at line 2, column 10)"),
        ("[model]\nn_head = 4\nn_head = 5", "Cannot overwrite a value"),
        (b"[data]\nsource = '\xff'", "is not UTF-8 text"),
    ],
)
def test_a_wrong_file_is_told_in_one_line_with_its_name(text, told, preset):
    file = preset(text)
    message = refusal(read_toml, file)
    assert message.startswith(file)
    assert told in message
    assert refusal(load_config, [file]) == message


def test_all_mistakes_in_a_file_are_told_at_once(preset):
    message = refusal(read_toml, preset("[model]\nn_layer = 0\nnorm = 'x'\n[train]\nstep = 3\n"))
    assert all(part in message for part in ("model.n_layer = 0", "model.norm", "did you mean train.steps?"))


def test_a_value_without_end_is_cut(preset):
    assert len(refusal(read_toml, preset(f"[model]\nn_layer = '{'9' * 5000}'"))) < 400
    assert len(refusal(override, Config(), ["--model.n-layer", "x" * 5000])) < 400


# Bounds


def outside(kind, bounds):
    """Values just past each bound of a number."""
    for bound in bounds:
        match bound:
            case annotated_types.Ge(ge=limit):
                yield kind(limit - 1)
            case annotated_types.Gt(gt=limit) | annotated_types.Lt(lt=limit):
                yield kind(limit)
            case annotated_types.Le(le=limit):
                yield kind(limit + 1)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_bounds_that_hold(name, preset):
    kind, bounds = plain(OPTIONS[name])
    section, _, option = name.rpartition(".")
    values = [str(value) for value in outside(kind, bounds)]
    assert values, f"{name} accepts any number"
    for value in values + ["nan", "inf", "-inf"] * (kind is float):
        pair = name in PAIRS
        assert f"{name} = {value} must " in refusal(override, Config(), [f"--{name}={value}"] + [value] * pair)
        file = preset(f"[{section}]\n{option} = {f'[{value}, {value}]' if pair else value}\n")
        assert f"{name} = {value} must " in refusal(read_toml, file)


# Processes


def run(code, *argv, **env):
    return subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **env}
    )


def test_f57_nothing_heavy_is_imported(preset):
    code = "import sys; from config import load_config; load_config(sys.argv[1:]); print(*sys.modules)"
    result = run(code, preset(""), "--train.device", "cpu")
    assert result.returncode == 0, result.stderr
    heavy = {"torch", "numpy", "tiktoken", "datasets", "transformers", "matplotlib", "wandb"}
    assert heavy.isdisjoint(result.stdout.split())


HELP = "import sys; from config import load_config; load_config(sys.argv[1:], prog='train.py', description='Trains.')"


def test_help_shows_every_option_with_its_meaning_and_its_default_in_the_preset(preset):
    result = run(HELP, preset("[model]\nn_layer = 17\nbias = true\n"), "--help", COLUMNS="100")
    assert (result.returncode, result.stderr) == (0, "")
    shown = result.stdout
    assert shown.startswith("usage: train.py")
    assert "Trains." in shown
    assert max(map(len, shown.splitlines())) <= 100
    text = re.sub(r"[\s│]+", " ", shown)
    for section in Config.model_fields.values():
        assert section.annotation.__doc__ in text
    for name, field in OPTIONS.items():
        assert f"--{name.replace('_', '-')} " in text, name
        assert re.sub(r"\s+", " ", field.description) in text, name
    assert "Blocks of the decoder. (default: 17)" in text
    assert "--model.bias {true,false} " in text
    assert "(never in the head). (default: true)" in text
    assert "--optim.betas FLOAT FLOAT " in text
    assert "(default: 0.9 0.95)" in text
    assert "--model.window INT|None " in text
    assert "--model.norm {layernorm,rmsnorm} " in text


def test_a_mistake_ends_a_command_with_one_line_and_code_2(preset):
    code = (
        "import sys; from config import command, load_config\n"
        "@command\ndef main(argv): load_config(argv)\n"
        "main(sys.argv[1:])"
    )
    result = run(code, preset(""), "--model.n-heads", "4")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --model.n-heads is not an option; did you mean --model.n-head?\n"
