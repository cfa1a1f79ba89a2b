"""The one exception that means "the user's input was wrong"."""

from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
    """A mistake of the user's: one sentence that names what is wrong, where, and what is allowed.

    The command prints the sentence and exits with status 2, without a traceback.
    """


def one_line(error: BaseException) -> str:
    """The start of an error's message, on one line and without its full stop, to end a sentence with."""
    return " ".join(str(error).split())[:300].rstrip(".")


def broken_rule(error: Mapping[str, Any]) -> str:
    """The message of one of pydantic's errors, without its prefix and its full stop."""
    return error["msg"].removeprefix("Value error, ").rstrip(".")
