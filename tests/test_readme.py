"""The README's commands run, with few steps; its Python runs as it stands; its two set-up commands are what CI runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```$", README, re.M | re.S) for kind in ("sh", "python")}
TINY = "--model.n-layer 1 --model.d-model 32 --model.n-head 2 --model.n-kv-head 1 --model.max-seq-len 64"
FEW = "--train.steps 2 --train.batch-size 2 --optim.warmup-steps 1 --data.max-tokens 20000 --data.bpe-vocab-size 300"
FEW += " --log.sample-tokens 4"


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [
        str(ROOT / word) if word in ("train.py", "sample.py", "bench.py") else word for word in shlex.split(command)
    ]
    words[:1] = [sys.executable, *(["-m", "torch.distributed.run"] if words[0] == "torchrun" else [])]
    return subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would be: beside the presets, with a text of their own."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "config").symlink_to(ROOT / "config")
    (folder / "my_book.txt").write_text("Once there was a book.\n그 책은 짧았다.\n" * 200, "utf-8")
    return folder


def python_commands() -> list[str]:
    lines = "\n".join(BLOCKS["sh"][2:]).splitlines()
    return ["python train.py", *(line for line in lines if line.startswith(("python ", "torchrun ")))]


def test_every_command_of_the_readme_runs(folder):
    commands = python_commands()
    assert len(commands) >= 6
    for command in commands:
        if ("train.py" in command and "--resume" not in command) or "bench.py train" in command:
            command += f" {FEW} {TINY}"
        elif "sample.py" in command:
            command += " --max-new-tokens 4"
        elif "bench.py decode" in command:
            command += " --prompt 4 --new 2 --rounds 1"
        elif "bench.py" in command and "loss" not in command.split():
            command += " --stories 2 --pairs 2" if "stories" in command.split()[2] else " --pairs 2"
        result = run(command, folder)
        assert result.returncode == 0, (command, result.stderr)
        assert result.stdout


def test_the_python_of_the_readme_runs(folder):
    for block in BLOCKS["python"]:
        (folder / "example.py").write_text(block, "utf-8")
        result = run(f"python {folder / 'example.py'}", folder)
        assert result.returncode == 0, result.stderr


def test_set_up_commands_are_two_lines_that_install_and_run():
    first, second = BLOCKS["sh"][:2]
    assert first.count("\n") == second.count("\n") == 1
    assert "requirements.txt" in first
    assert first.strip().endswith("python train.py")
    assert "requirements-dev.txt" in second
    assert second.strip().endswith("pytest")


def test_every_file_that_the_readme_names_exists():
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / picture).stat().st_size > 10_000, picture
    names = set(re.findall(r"`([\w./]+?\.(?:py|md)|config/\w+\.toml|\w+/)`", README))
    assert {"attention.py", "model.py", "train.py", "sample.py", "config/translate.toml"} <= names
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "config" / name).exists(), name
