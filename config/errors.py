"""Mistakes of the person at the keyboard, as opposed to our own."""

import io
import os
import sys
from collections.abc import Callable
from functools import wraps


class UserError(Exception):
    """Something the user can mend; the message is one readable sentence that says what and how."""


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, out of bounds, or impossible beside another one."""


def command(main: Callable) -> Callable:
    """Decorates what a command runs: a `UserError` is printed on standard error and ends it with exit code 2.

    Ctrl-C and a closed pipe (`| head`) end it without a traceback; whatever the console's encoding, output is UTF-8.
    """

    @wraps(main)
    def guarded(*args, **kwargs):
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="replace")
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:  # what reads the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
            sys.exit(141)
        except OSError as error:  # a name too long, a full disk, no permission: the system says it well
            where = f": {error.filename}" if error.filename else ""
            print(f"error: {error.strerror or error}{where}", file=sys.stderr)
            sys.exit(2)

    return guarded
