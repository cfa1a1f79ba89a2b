"""A model folder as a user has it."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(small_model: Callable[..., Path]) -> Path:
    """A small untrained model with meta-attention, and its tokenizer; shared, so not to be changed."""
    return small_model()
