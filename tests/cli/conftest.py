"""Where the commands run, and how they are run."""

import shutil
from pathlib import Path

import pytest

from tests.cli.command_lines import Refuse, Run, Succeed


@pytest.fixture
def workplace(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty except for a corpus."""
    shutil.copy(small_corpus, tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(metatokens: Run) -> Succeed:
    """Runs a command line that must succeed: its standard output and standard error."""

    def succeed(line: str) -> tuple[str, str]:
        status, output, error = metatokens(line)
        assert status == 0, error
        return output, error

    return succeed


@pytest.fixture
def refused(metatokens: Run) -> Refuse:
    """Runs a command line that must end in one sentence with the given words."""

    def refuse(line: str, words: str) -> None:
        status, output, error = metatokens(line)
        assert (status, output) == (2, ""), error
        sentence = error.splitlines()[-1]
        assert sentence.startswith("metatokens: ")
        assert sentence.endswith(".")
        assert words in sentence

    return refuse
