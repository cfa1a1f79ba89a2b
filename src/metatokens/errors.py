"""The one exception that means "the user's input was wrong"."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """A mistake of the user's: one sentence that names what is wrong, where, and what is allowed.

    The command prints the sentence and exits with status 2, without a traceback.
    """


def one_line(error: object) -> str:
    """The start of an error's message, or of a name, on one line and without a full stop, for use in a sentence."""
    return " ".join(str(error).split())[:300].rstrip(".")


def broken_rule(error: "ValidationError") -> str:
    """The first complaint of a pydantic error, to end a sentence with: the field and the rule."""
    first = error.errors()[0]
    rule = first["msg"].removeprefix("Value error, ").rstrip(".")
    field = " ".join(".".join(map(str, first["loc"])).split())
    # The package's own rules name their fields.
    return rule if first["type"] == "value_error" or not field else f"{field}: {rule}"
