"""Ctrl-C and other signals: at once while a command starts, after the step while it trains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import interrupt

ROOT = Path(__file__).parents[1]


@pytest.fixture
def handlers():
    """The signals of a training, as nobody has set them; afterwards as they were."""
    before = {number: signal.getsignal(number) for number in interrupt.Interruption.SIGNALS}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("words", ["train.py", "bench.py train", "sample.py"])
def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback(words, tmp_path):
    program, *words = words.split()
    command = [sys.executable, "-X", "importtime", ROOT / program, *words]  # which says what has been imported
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            if b" torch." in line:
                process.send_signal(signal.SIGINT)
                break
        said = [line for line in process.stderr.read().splitlines() if not line.startswith(b"import time:")]
        assert process.stdout.read() == b""
        assert process.wait(120) == 130
    assert said == [b"", b"interrupted"]


@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize("number", interrupt.Interruption.SIGNALS)
def test_the_first_signal_is_noted_and_the_second_ends_at_once(monkeypatch, handlers, capfd, number, torchrun):
    if torchrun:  # it passes on what may have been sent to all already, and ends by itself what does not end
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    interruption = interrupt.Interruption()
    assert interruption.signal == 0
    os.kill(os.getpid(), number)
    assert interruption.signal == number
    for other in interrupt.Interruption.SIGNALS:
        assert signal.getsignal(other) is (signal.SIG_IGN if torchrun else signal.SIG_DFL)
    name = signal.Signals(number).name
    assert f"{name}: finishing the step and saving" in capfd.readouterr().err


def test_what_was_ignored_stays_ignored(handlers):
    """nohup ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interruption = interrupt.Interruption()
    os.kill(os.getpid(), signal.SIGHUP)
    assert interruption.signal == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_of_many_processes_one_says_it(monkeypatch, handlers, capfd):
    monkeypatch.setenv("RANK", "1")
    interruption = interrupt.Interruption()
    os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.signal == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_an_interrupt_is_raised_where_it_comes_and_once_more_where_it_was_swallowed(handlers):
    interrupt.on_interrupt(interrupt.raise_interrupt)

    def steps():
        for step in range(4):
            if step == 2:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            yield step

    with pytest.raises(KeyboardInterrupt):
        list(interrupt.until_interrupted(steps()))
    assert list(interrupt.until_interrupted(range(3))) == [0, 1, 2]  # what came before them is over
