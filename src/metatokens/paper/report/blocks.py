"""What the report is made of, before it becomes HTML or Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from metatokens.looking.style import PAGE, PHONE, png
from metatokens.paper.report.tables.table import Table
from metatokens.records import ExampleRecord


@dataclass(frozen=True)
class Picture:
    """A figure, drawn for a page and for a phone."""

    file: str
    alt: str
    page: bytes
    phone: bytes


@dataclass(frozen=True)
class Fold:
    """Tables that are shown when asked for."""

    title: str
    tables: Sequence[Table]


@dataclass(frozen=True)
class Link:
    """A page that lies elsewhere."""

    text: str
    page: Path


Block = str | Table | Picture | Fold | ExampleRecord | Link  # a string is a paragraph


@dataclass(frozen=True)
class Section:
    """A section: a few words, then what it shows."""

    anchor: str
    title: str
    intro: str
    blocks: Sequence[Block] = ()


def picture(file: str, alt: str, draw: Callable[[float], Figure]) -> Picture:
    """A figure that is drawn for each width."""
    return Picture(file, alt, png(draw(PAGE)), png(draw(PHONE)))
