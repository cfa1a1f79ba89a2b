"""The words of `words.md`, and what stands in each section.

## anchor | title               of a section; then its first paragraph, with {placeholders}
@ module.function task=a,b      a table, a paragraph or blocks, for each combination of arguments; those of a figure:
@ module.figure | alt
@ fold title | call; call       tables that are folded, one fold for each title
### table | title | corner      of a table, and the header of its first column; then the note below it
"""

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
    shows: tuple[str, ...] = ()
    """What stands in a section below its text."""

    def of(self, **values: object) -> "Words":
        """The words with the values in their places."""
        title, text, corner = (" ".join(part.format_map(values).split(" ")).strip() for part in self[:3])
        return Words(title, text, corner, self.shows)


@cache
def sections() -> dict[str, Words]:
    """The sections of a grid's page by anchor, in order."""
    return dict(_parsed("## "))


@cache
def table_words(key: str) -> Words:
    """The words of a table."""
    return dict(_parsed("### "))[key]


def _parsed(mark: str) -> Iterator[tuple[str, Words]]:
    source = files("metatokens.paper.report").joinpath("words.md").read_text(encoding="utf-8")
    for level, head, text in re.findall(r"^(#+ )(.*)\n((?:(?!#|-->).*\n)*)", source, flags=re.MULTILINE):
        if level == mark:
            key, title, *corner = head.split(" | ")
            shows = re.findall(r"^@ (.*)$", text, flags=re.MULTILINE)
            words = re.sub(r"^@.*$", "", text, flags=re.MULTILINE)
            yield key, Words(title, re.sub("[ \n]+", " ", words).strip(), "".join(corner), tuple(shows))
