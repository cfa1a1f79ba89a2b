"""What every test with hostile input asks: it works, or it says in one sentence why not, and soon."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import pytest

from metatokens.errors import UserError

SECONDS = 60  # for one case; the slowest takes one or two


@pytest.fixture(scope="session")
def clean() -> Callable[[], AbstractContextManager[None]]:
    """Surrounds a call: a `UserError` of one sentence is fine, any other exception and a hang are not."""
    return _clean


@contextmanager
def _clean() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _hung)
    signal.alarm(SECONDS)
    try:
        yield
    except UserError as error:
        sentence = str(error)
        assert sentence.endswith("."), sentence
        assert "\n" not in sentence, sentence
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _hung(signal_number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer after {SECONDS} s")


@pytest.fixture
def trap(tmp_path: Path) -> "Trap":
    """A payload, and the file that appears if it is run."""
    return Trap(tmp_path / "sprung")


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)

    @property
    def was_sprung(self) -> bool:
        return self.marker.exists()
