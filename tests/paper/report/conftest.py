"""Fixtures of the report's tests."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from metatokens.paper.frame import Inputs, load
from tests.paper.report import pages
from tests.paper.report.made_lines import Line, write


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Inputs]:
    """What `load` makes of some result lines, and of lines of a run's other files."""

    def read(results: Sequence[Line], *, speeds: Sequence[Line] = (), **files: Sequence[Line]) -> Inputs:
        paths = [write(tmp_path / "run", results=results, **files)]
        return load(paths + ([write(tmp_path, speeds=speeds) / "speeds.jsonl"] if speeds else []))

    return read


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Reports without drawn figures."""
    with pages.undrawn():
        yield
