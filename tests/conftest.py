"""Fixtures that several test files share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text (C4, WikiText-2, books, the GPT-2 vocabulary), where there is one beside the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real text is not at {folder}")
    return folder
