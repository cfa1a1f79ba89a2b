"""How names and figures read, and how they are kept from being Markdown."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from typing import Any

import yaml
from markupsafe import Markup

from metatokens.paper.variants import MODELS
from metatokens.tasks import TASKS

CONTENT: dict[str, Any] = yaml.safe_load(
    files("metatokens.paper.report").joinpath("content.yaml").read_text(encoding="utf-8")
)
WORDS: dict[str, Any] = CONTENT["words"]
NOT_RUN = "\u2013"
MINUS, PLUS_MINUS = "\u2212", "\u00b1"
_WORDS_BY_VALUE = [words for words in WORDS.values() if isinstance(words, dict)]
_ORDER = [*MODELS, *TASKS, *chain.from_iterable(_WORDS_BY_VALUE)]


@dataclass(frozen=True)
class Form:
    """How figures read.

    Attributes:
        what: their name, with their unit.
        scale: what they are multiplied by.
        digits: after the point.
        counted: the things that each is the mean of.
        chance: the name of what chance gives, where that is shown.
    """

    what: str
    scale: float = 1.0
    digits: int = 0
    counted: str = "prompts"
    chance: str = ""

    def __call__(self, value: float) -> str:
        """A figure: `97.4`, `1,240`, `−0.31`."""
        return number(self.scale * value, self.digits)


FORMS: Mapping[str, Form] = {name: Form(**fields) for name, fields in CONTENT["forms"].items()}
PERCENT = FORMS["percent"]


def number(value: float, digits: int = 0, sign: str = "") -> str:
    """A number with its thousands apart: `1,240`, `−0.31`; with the sign `+` also `+0.31`."""
    return f"{value:{sign}z,.{digits}f}".replace("-", MINUS)


def words(column: str, value: Any) -> str:
    """A value of a column of figures as a reader sees it, by `content.yaml`."""
    read_as = WORDS.get(column, {})
    if value is None:
        return ""
    if isinstance(read_as, str):
        return read_as.format(value)
    return str(read_as.get(value, str(value).replace(":", " ")))


def order(value: Any) -> tuple[int, float, str]:
    """A key to sort values by: numbers as they are, names of the project in its order, then other names."""
    if value is None or isinstance(value, (int, float)):
        return 0, value or 0, ""
    return 1, _ORDER.index(value) if value in _ORDER else len(_ORDER), value


def ordered(values: Iterable[Any]) -> list[Any]:
    """The different values, in order."""
    return sorted(set(values), key=order)


def listed(items: Sequence[str], word: str = "and") -> str:
    """`a`, `a and b`, or `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    *others, last = items
    return f"{', '.join(others)} {word} {last}"


def escape(value: object) -> object:
    """Text as Markdown that shows it, on one line; what is marked as markup stays as it is."""
    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).split())
    return Markup(re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(text, quote=False)))
