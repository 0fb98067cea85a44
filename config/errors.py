"""Mistakes of the person at the keyboard, as opposed to our own."""

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps


class UserError(Exception):
    """Something the user can mend; the message is one readable sentence that says what and how."""

    said = False  # by another process


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, out of bounds, or impossible beside another one."""


class OneProcessError(UserError):
    """What went wrong in one of several processes, and so is not said by all."""


PATIENCE = 5  # seconds after which torchrun would have ended this process if the first one had said the same


def from_torchrun(name: str, default: int = 0) -> int:
    """What torchrun says about this process: RANK, LOCAL_RANK (on its machine), WORLD_SIZE, …"""
    return int(os.environ.get(name) or default)


def command(main: Callable) -> Callable:
    """Decorates what a command runs: a `UserError` is printed on standard error and ends it with exit code 2.

    Ctrl-C and a closed pipe (`| head`) end it without a traceback; whatever the console's encoding, output is UTF-8. Of
    several processes on a machine the first one alone says what went wrong in all.
    """

    @wraps(main)
    def guarded(*args, **kwargs):
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="replace")
        process = f"process {from_torchrun('RANK')}: " if from_torchrun("WORLD_SIZE", 1) > 1 else ""
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if process:  # torchrun ends all when one has ended: who has something to say may, who only repeats it waits
                waits = from_torchrun("LOCAL_RANK") and not isinstance(error, OneProcessError)
                signal.signal(signal.SIGTERM, signal.SIG_DFL if waits else signal.SIG_IGN)
                time.sleep(PATIENCE if waits else 0)
            if not error.said:
                print(f"{process}error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:  # what reads the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
            sys.exit(141)
        except OSError as error:  # a name too long, a full disk, no permission: the system says it well
            where = f": {error.filename}" if error.filename else ""
            print(f"{process}error: {error.strerror or error}{where}", file=sys.stderr)
            sys.exit(2)

    return guarded
