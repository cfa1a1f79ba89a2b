"""Reports without what takes longest, and what they hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from metatokens.paper.claims import claims
from metatokens.paper.report.page import write_report

_WHITE = BytesIO()
Image.new("L", (8, 3), 255).save(_WHITE, format="png")


@contextmanager
def undrawn() -> Iterator[None]:
    """While it lasts, figures have their panels and nothing drawn in them; their pictures are white."""

    def empty_figure(panels: Any, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(axes=list(panels))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metatokens.paper.report.figures.small_multiples", empty_figure)
        patch.setattr("metatokens.paper.report.page.png", lambda figure: _WHITE.getvalue())
        yield


@contextmanager
def main_claims_alone() -> Iterator[None]:
    """While it lasts, a report judges the main claims and none of the 70 others."""
    main_claims = [claim for claim in claims() if claim.primary]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metatokens.paper.report.page.claims", lambda: main_claims)
        yield


def write_quick_report(paths: Sequence[Path], out: Path) -> str:
    """Write a report with white pictures and the main claims alone; returns its Markdown."""
    with undrawn(), main_claims_alone():
        write_report(paths, out)
    return (out / "report.md").read_text(encoding="utf-8")


def table(markdown: str, title: str) -> dict[str, dict[str, str]]:
    """The cells of the first table whose title begins so, by row and column."""
    after_title = markdown.split(f"\n**{title}")[1]
    header, _, *rows = after_title.split("\n\n")[1].splitlines()
    columns = _cells(header)[1:]
    by_row = {}
    for row in rows:
        label, *cells = _cells(row)
        by_row[label] = dict(zip(columns, cells, strict=False))
    return by_row


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" |")]


class Page(HTMLParser):
    """The elements of a page with their attributes, the text of each kind of element, and what is neither."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.other: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts[tag][-1] += data

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    handle_pi = unknown_decl = handle_comment
