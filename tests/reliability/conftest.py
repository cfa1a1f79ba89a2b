"""The script that carries commands out, shared by all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.reliability.commands import Commands


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Forks of one process: its imports take longer than most commands."""
    started = Commands()
    yield started
    started.stop()
