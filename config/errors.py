"""Mistakes of the person at the keyboard, as opposed to our own."""

import sys
from collections.abc import Callable
from functools import wraps


class UserError(Exception):
    """Something the user can mend; the message is one readable sentence that says what and how."""


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, out of bounds, or impossible beside another one."""


def command(main: Callable) -> Callable:
    """Decorates what a command runs: a `UserError` is printed on standard error and ends it with exit code 2."""

    @wraps(main)
    def guarded(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return guarded
