"""The shape of the source: who imports whom, how long a file may be, what a preset opens with."""

import ast
from itertools import takewhile
from pathlib import Path

import pytest

from config import read_toml

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / "config").glob("*.toml"))

# Of design.md, from the bottom up. A module imports only from lower lines; what is missing here is refused.
LEVELS = [
    ["config.errors", "interrupt"],
    ["config.schema"],  # a line of its own: the loader and the mathematics name its types
    [
        "config.load",
        "attention",
        "linear",
        "choice",
        "distributed",
        "plots",
        "data.tokenizer",
        "data.grammar",
    ],
    ["cache", "data.hub_tokenizer"],  # its masks are the mathematics', and the model calls it
    ["model", "optim", "data.loader", "data.stories", "data.tasks"],
    ["data.sources", "compiling"],
    ["checkpoint", "data.prepare"],
    ["generation", "heads", "pretrained", "printing", "progress"],
    ["sample", "translation", "machine", "run_folder"],
    ["loss"],
    ["train"],
    ["speed"],
    ["experiments", "bench"],
]
PACKAGES = {"config": "config.load", "data": None}  # the highest part that importing the package itself brings
LEVEL = {module: level for level, line in enumerate(LEVELS) for module in line}
OURS = {module.partition(".")[0] for module in LEVEL}

BUDGETS = {"model.py": 450}  # lines


def sources(root: Path) -> list[Path]:
    """Every Python file but tests and what git ignores."""
    ignored = ("tests", "runs", "wandb", "venv")
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path for path in files if not path.parts[0].startswith((".", *ignored)))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def level(module: str, importing: bool = False) -> int:
    """The line of a module; a package counts as its highest part."""
    if module in PACKAGES:
        return -1 if PACKAGES[module] is None else LEVEL[PACKAGES[module]] + (0 if importing else 0.5)
    if module.startswith("experiments."):
        module = "experiments"
    if module not in LEVEL:
        raise LookupError(f"{module} has no level: it is not in design.md's picture")
    return LEVEL[module]


def imports(source: str, name: str) -> set[str]:
    """Our modules that a source imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {part for part in parts if part in LEVEL or (ROOT / f"{part.replace('.', '/')}.py").exists()}
            found |= modules
            if modules != parts:
                found.add(node.module)
    return {module for module in found if module.partition(".")[0] in OURS | {"tests"}}


def violations(name: str, source: str) -> list[str]:
    own = level(name)
    inside_experiments = name.startswith("experiments")
    return [
        f"{name} imports {module}"
        for module in sorted(imports(source, name))
        if not (inside_experiments and module.startswith("experiments.")) and level(module, importing=True) >= own
    ]


@pytest.mark.parametrize("path", sources(ROOT), ids=str)
def test_imports_point_strictly_downward(path):
    assert violations(module_name(path), (ROOT / path).read_text("utf-8")) == []


def test_the_sources_are_found():
    names = {module_name(path) for path in sources(ROOT)}
    assert {"train", "model", "config", "config.schema", "data", "data.loader"} <= names


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model", "import train"),
        ("model", "import optim"),  # the same level
        ("model", "def f():\n    from checkpoint import load_model"),  # hidden in a function
        ("attention", "from config import Config"),  # the package brings the loader
        ("data.loader", "from data import prepare"),
        ("data.loader", "import data.prepare as p"),
        ("config.schema", "from config.load import load_config"),
        ("sample", "from sample import generate"),
        ("train", "from experiments.positions import run"),
        ("checkpoint", "if True:\n    import sample, os"),
    ],
)
def test_an_import_that_points_up_or_sideways_is_noticed(name, source):
    assert len(violations(name, source)) == 1


@pytest.mark.parametrize(("name", "source"), [("helper", ""), ("model", "import data.helper"), ("data.helper", "")])
def test_a_module_without_a_level_is_refused(name, source):
    with pytest.raises(LookupError, match="helper has no level"):
        violations(name, source)


def test_a_relative_import_is_refused():
    with pytest.raises(AssertionError, match="relative import"):
        violations("config.load", "from .errors import ConfigError")


def test_what_points_down_passes():
    source = "import os, torch\nfrom config import Config\nfrom data import stories\nfrom model import build_model"
    assert violations("checkpoint", source) == []


@pytest.mark.parametrize("name", BUDGETS)
def test_files_keep_to_their_budget(name):
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= BUDGETS[name]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_open_with_a_comment_on_what_they_train(preset):
    read_toml(preset)
    header = "".join(takewhile(lambda line: line.startswith("#"), preset.read_text("utf-8").splitlines()))
    assert len(header) > 60


def test_there_are_presets():
    assert "stories" in {preset.stem for preset in PRESETS}
