"""Fixtures of the report's tests."""

import pytest

from metatokens.paper.frame import load
from tests.paper.report import pages
from tests.paper.report.made_lines import grid


@pytest.fixture(scope="session")
def grid_inputs(tmp_path_factory):
    """The lines of a run of the preset `small`."""
    return load(grid(tmp_path_factory.mktemp("grid")))


@pytest.fixture
def undrawn():
    """Reports without drawn figures."""
    with pages.undrawn():
        yield
