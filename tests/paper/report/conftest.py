"""Fixtures of the report's tests."""

from collections.abc import Sequence

import pytest

from metatokens.paper.frame import Inputs, load
from tests.paper.report import pages
from tests.paper.report.made_lines import Line, grid, write


@pytest.fixture
def read(tmp_path):
    """What `load` makes of some result lines, and of lines of a run's other files."""

    def read(results: Sequence[Line], **files: Sequence[Line]) -> Inputs:
        return load([write(tmp_path / "run", results=results, **files)])

    return read


@pytest.fixture(scope="session")
def grid_inputs(tmp_path_factory):
    """The lines of a run of the preset `small`."""
    return load(grid(tmp_path_factory.mktemp("grid")))


@pytest.fixture
def undrawn():
    """Reports without drawn figures."""
    with pages.undrawn():
        yield
