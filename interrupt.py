"""Ctrl-C and the signals of a machine that shuts down: what they do while a command starts, and while it trains."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

T = TypeVar("T")


def on_interrupt(handler: Callable) -> None:
    """Sets what Ctrl-C does, unless whoever started the program had it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def leave(*_) -> NoReturn:
    """Ends at once; not by an exception, which in the middle of an import may become anything."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


_came = False  # Ctrl-C, since the steps that are being made began


def raise_interrupt(*_) -> NoReturn:
    """What Ctrl-C does by itself, and `until_interrupted` may do once more."""
    global _came
    _came = True
    raise KeyboardInterrupt


def until_interrupted(steps: Iterable[T]) -> Iterator[T]:
    """The same steps. A guard of compiled code swallows whatever is raised in it, so a KeyboardInterrupt that was lost
    during a step is raised again after it."""
    global _came
    _came = False
    for step in steps:
        if _came:
            raise KeyboardInterrupt
        yield step


class Interruption:
    """SIGINT, SIGTERM and SIGHUP ask for an end after the step; a second one ends at once.

    Not under torchrun: there the same signal may come twice, from whoever sent it to all and from torchrun, which ends
    by itself what does not end in time (--shutdown-timeout).
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self):
        self.signal = 0  # the number of the one that came
        for number in self.SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.note)

    def note(self, number: int, frame) -> None:
        self.signal = number
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        once_more = "" if torchrun else "; once more ends at once"
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # not print, which may be what was interrupted
                os.write(2, f"\n{signal.Signals(number).name}: finishing the step and saving{once_more}\n".encode())
        for number in self.SIGNALS:
            if signal.getsignal(number) == self.note:
                signal.signal(number, signal.SIG_IGN if torchrun else signal.SIG_DFL)
