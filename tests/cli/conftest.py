"""Where the commands run."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def workplace(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for a corpus, and the current one."""
    shutil.copy(small_corpus, tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path
