"""The words of `words.md`: the title and the first paragraph of each section, and those of its tables."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Words(NamedTuple):
    """Of a section or a table, words with {placeholders}."""

    title: str
    text: str
    corner: str = ""
    """The header of a table's first column."""

    def of(self, **values: object) -> "Words":
        """The words with the values in their places."""
        return Words(*(" ".join(part.format_map(values).split(" ")).strip() for part in self))


@cache
def sections() -> dict[str, Words]:
    """The sections of a grid's page by anchor, in order."""
    return dict(_parsed("## "))


@cache
def table_words(key: str) -> Words:
    """The words of a table."""
    return dict(_parsed("### "))[key]


def _parsed(mark: str) -> Iterator[tuple[str, Words]]:
    source = files("metatokens.report").joinpath("words.md").read_text(encoding="utf-8")
    for level, head, text in re.findall(r"^(#+ )(.*)\n((?:(?!#).*\n)*)", source, flags=re.MULTILINE):
        if level == mark:
            key, title, *corner = head.split(" | ")
            yield key, Words(title, re.sub("[ \n]+", " ", text).strip(), *corner)
