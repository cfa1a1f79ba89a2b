"""Reports without what takes longest, and what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from io import BytesIO
from types import SimpleNamespace

import pytest
from PIL import Image

_WHITE = BytesIO()
Image.new("L", (8, 3), 255).save(_WHITE, format="png")


@contextmanager
def undrawn() -> Iterator[None]:
    """While it lasts, figures have their panels and nothing drawn in them; their pictures are white."""
    with pytest.MonkeyPatch.context() as patch:
        empty = lambda panels, *_, **__: SimpleNamespace(axes=list(panels))  # noqa: E731
        patch.setattr("metatokens.paper.report.figures.small_multiples", empty)
        patch.setattr("metatokens.paper.report.page.png", lambda figure: _WHITE.getvalue())
        yield


def table(markdown: str, title: str) -> dict[str, dict[str, str]]:
    """The cells of the first table whose title begins so, by row and column."""
    body = markdown.split(f"\n**{title}")[1].split("\n\n")[1].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split(" |")] for line in body)
    return {row[0]: dict(zip(header[1:], row[1:], strict=False)) for row in rows}


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
