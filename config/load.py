"""From a TOML file and a command line to a `Config`, and back.

A file is read as it is typed: "4" is no number and 1e3 no whole number. A command line has only words: tyro sorts them
to options and writes `--help`, and pydantic alone says what they mean. So both obey the one schema, and whatever is
wrong with a value is told by the one function `_sentence`.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import tyro
from pydantic import ValidationError
from tyro import _errors as tyro_errors  # private, hence tyro's exact pin: no other way to its mistakes before it exits
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from config.errors import ConfigError
from config.schema import Config, Section

PRESETS = Path(__file__).parent
DEFAULT_PRESET = PRESETS / "stories.toml"
LAST_LINE = "\n# end\n"


def load_config(argv: Sequence[str], prog: str | None = None, description: str | None = None) -> Config:
    """The configuration that `argv` (without the program) asks for: [PRESET] [--section.option VALUE ...].

    `--help` prints every option with its default in that preset, and exits. Raises `ConfigError`.
    """
    preset, words = split_preset(argv)
    return override(read_toml(preset), words, prog, description)


def given_options(argv: Sequence[str]) -> set[str]:
    """The full names of the options that the preset or the words of `argv` name, whatever they say of them."""
    preset, words = split_preset(argv)
    named = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return {option for option, _ in flatten(read_toml(preset).model_dump(exclude_unset=True))} | named & {*_options()}


def split_preset(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """The preset's file (its stem names the run) and the words after it. A bare name is a file beside this one."""
    if not argv or argv[0].startswith("-"):
        return DEFAULT_PRESET, list(argv)
    path = Path(argv[0])
    bare = path.suffix != ".toml" and len(path.parts) == 1
    return Path(os.path.relpath(PRESETS / f"{path}.toml")) if bare else path, list(argv[1:])


def read_toml(path: str | Path, saved: bool = False) -> Config:
    """The configuration in a file; what it leaves out has the schema's default, so that one that was `saved` must have
    its last line. Raises `ConfigError`."""
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")
        if saved and not text.endswith(LAST_LINE):
            raise ConfigError(f"{path} is damaged: its last line, {LAST_LINE.strip()}, is missing")
        return Config.model_validate(tomllib.loads(text))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}; {_nearby(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {_sentences(error, _toml)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except ValueError as error:  # not TOML: the message ends with line and column
        raise ConfigError(f"{path}: {error}") from None


def flatten(values: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested options under their full names."""
    for key, value in values.items():
        yield from flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


def differences(old: dict, new: dict) -> Iterator[tuple[str, object, object]]:
    """Each option of which two nested tables have different values, and both; one that `old` has not yet is no
    difference, and a list that was read is the tuple that was written."""
    old = dict(flatten(old))
    for option, after in flatten(new):
        before = old.get(option, after)
        if before != after and [before] != [list(after) if isinstance(after, tuple) else after]:
            yield option, before, after


def override(config: Config, argv: Sequence[str], prog: str | None = None, description: str | None = None) -> Config:
    """`config` with the options in `argv` (without a preset) changed, and checked together. Raises `ConfigError`.

    `--model.n-head 4` and `--model.n_head=4` mean the same, the last one wins, None unsets what may be omitted.
    """
    for word in argv:
        if word.startswith("--tyro-"):  # tyro's own, for programs that are installed
            raise ConfigError(f"{word} is not an option; --help lists them all")
    registry = ConstructorRegistry()
    registry.struct_rule(_section_rule)
    with tyro_errors.on_parse_error(_refuse):
        values = tyro.cli(Config, args=argv, default=config, prog=prog, description=description, registry=registry)
    try:
        return Config.model_validate(values, strict=False)  # not strict: words may become numbers
    except ValidationError as error:
        raise ConfigError(f"command line: {_sentences(error, str)}") from None


def to_toml(config: Config) -> str:
    """Text from which `read_toml` makes an equal configuration. TOML has no null: what is None is left out, which
    is right because only options whose default is None may be None."""
    return "\n\n".join(_tables(config.model_dump(exclude_none=True))) + LAST_LINE


def _tables(values: dict[str, Any], path: str = "") -> list[str]:
    own = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = ["\n".join([f"[{path}]", *own])] if own else []
    for key, value in values.items():
        if isinstance(value, dict):
            tables += _tables(value, f"{path}.{key}".lstrip("."))
    return tables


def _toml(value: Any) -> str:
    if isinstance(value, str):  # JSON's escapes are TOML's, which has one more
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


# What tyro is told


def _section_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A section leaves tyro as a dictionary: it cannot be built and checked while some values are words."""
    if not (isinstance(info.type, type) and issubclass(info.type, Section)):
        return None

    def section(**values: Any) -> dict[str, Any]:
        return values

    section.__doc__ = info.type.__doc__  # its heading in --help
    fields = [
        StructFieldSpec(name, _words(field.annotation), getattr(info.default, name), field.description)
        for name, field in info.type.model_fields.items()
    ]
    return StructConstructorSpec(section, tuple(fields))


def _words(kind: Any) -> Any:
    """An option's type for tyro: as many words as it takes, left as they are, but for None."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    pair = get_origin(kind) is tuple

    def read(words: list[str]) -> list[str] | str | None:
        return words if pair else None if words == ["None"] else words[0]

    spec = PrimitiveConstructorSpec(
        nargs=len(get_args(kind)) if pair else 1,
        metavar=_metavar(kind),
        instance_from_str=read,
        is_instance=lambda _: True,
        str_from_instance=lambda value: [v if isinstance(v, str) else _toml(v) for v in (value if pair else [value])],
    )
    return Annotated[Any, spec]


def _metavar(kind: Any) -> str:
    """How --help spells a type: INT, {true,false}, {pre,post}, STR|None, FLOAT FLOAT."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return _metavar(parts[0])
    if get_origin(kind) is Literal:
        return "{" + ",".join(parts) + "}"
    if parts:
        return (" " if get_origin(kind) is tuple else "|").join(map(_metavar, parts))
    return {bool: "{true,false}", type(None): "None"}.get(kind) or kind.__name__.upper()


# What is said when something is wrong

KINDS = {  # by the first word of pydantic's error type, where its own sentence is not for the person at the keyboard
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "model": "must be a table",
    "tuple": "must be a pair of numbers",
    "missing": "must be a pair of numbers",
    "too": "must be a pair of numbers",
}


def _refuse(event: tyro_errors.ParseErrorEvent) -> NoReturn:
    """tyro calls this where it would print a box and exit."""
    if isinstance(event, tyro_errors.BadValue):
        raise ConfigError(f"{event.argument.display_name()} needs a value: {event.argument.lowered.metavar}")
    assert isinstance(event, tyro_errors.UnrecognizedArgs), event  # the others: subcommands, choices, required options
    word = event.tokens[0].partition("=")[0]
    if not word.startswith("-"):
        raise ConfigError(f"{word} belongs to no option; a preset comes first, then --section.option VALUE")
    meant = _likest(word.lstrip("-").replace("-", "_"), _options())
    raise ConfigError(f"{word} is not an option; " + _hint(meant and f"--{meant.replace('_', '-')}"))


def _sentences(error: ValidationError, show: Callable[[Any], str]) -> str:
    return "; ".join(_sentence(problem, show) for problem in error.errors())


def _sentence(problem: dict[str, Any], show: Callable[[Any], str]) -> str:
    """One of pydantic's findings in our words; `show` spells the value as it was typed."""
    option = ".".join(part for part in problem["loc"] if isinstance(part, str))  # a number is a place in a pair
    if problem["type"] == "value_error":  # a check of the schema, which names options from within its own section
        return re.sub(r"[\w.]+(?= = )", lambda name: f"{option}.{name[0]}".lstrip("."), str(problem["ctx"]["error"]))
    if problem["type"] == "extra_forbidden":
        if isinstance(problem["input"], dict):
            meant = _likest(option, [name.rpartition(".")[0] for name in _options()])
            return f"[{option}] is not a section; " + _hint(meant and f"[{meant}]")
        return f"{option} is not an option; " + _hint(_likest(option, _options()))
    rule = KINDS.get(problem["type"].split("_")[0]) or problem["msg"].replace("Input should", "must")
    return f"{option} = {show(problem['input']):.80} {rule}"


def _options(values: dict[str, Any] | None = None) -> Iterator[str]:
    """Every option's full name."""
    for name, value in (Config().model_dump() if values is None else values).items():
        yield from [f"{name}.{inner}" for inner in _options(value)] if isinstance(value, dict) else [name]


def _likest(word: str, names: Iterable[str]) -> str | None:
    """The name a mistyped one most resembles: the part after the last dot must be alike, the section may be wrong."""

    def likeness(name: str) -> tuple[bool, float]:
        end = SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        return end > 0.6, SequenceMatcher(None, word, name).ratio()

    best = max(names, key=likeness, default=None)
    return best if best and likeness(best)[0] else None


def _hint(meant: str | None) -> str:
    return f"did you mean {meant}?" if meant else "--help lists them all"


def _nearby(path: Path) -> str:
    """What to say of a preset that is not there."""
    folder = path.parent if path.parent.is_dir() else Path(os.path.relpath(PRESETS))
    presets = {file.stem: file for file in sorted(folder.glob("*.toml"))}
    meant = _likest(path.stem, presets)
    return f"did you mean {presets[meant]}?" if meant else f"{folder} has {', '.join(presets) or 'no presets'}"
