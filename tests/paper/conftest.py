"""The tiny plan, carried out in this process; and lines made up by hand, as the report reads them."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from metatokens.paper import pools, presets, run
from metatokens.paper.frame import Inputs, load
from metatokens.paper.variants import Preset
from tests.paper import tiny_preset
from tests.paper.report.made_lines import Line, write


class InThisProcess:
    """A stand-in for the process pool that carries each stage out when it is submitted."""

    def __init__(self, workers: int, context: object, initializer: object, initargs: tuple[Any]):
        pools._reports = initargs[0]

    def shutdown(self) -> None:
        pass

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(work(*arguments))
        return future


@pytest.fixture
def tiny(small_corpus):
    """The tiny preset."""
    return tiny_preset.tiny(str(small_corpus))


@pytest.fixture
def reproduce(tiny, tmp_path, monkeypatch):
    """Carries out the tiny preset, or another, in this process, and gives the run's folder."""
    monkeypatch.setattr(pools, "ProcessPoolExecutor", InThisProcess)

    def carry_out(
        name: str = "tiny", sizes: Preset = tiny, *, workers: int = 1, **options: Any
    ) -> Path:
        monkeypatch.setattr(presets, "PRESETS", {"tiny": sizes, "other": sizes})
        run.reproduce(name, tmp_path / "run", workers=workers, **options)
        return tmp_path / "run"

    return carry_out


@pytest.fixture(scope="session")
def undisturbed(small_corpus, tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "PRESETS", {"tiny": tiny_preset.tiny(str(small_corpus))})
        patch.setattr(pools, "ProcessPoolExecutor", InThisProcess)
        run.reproduce("tiny", out, workers=1)
    return out


@pytest.fixture
def copied(undisturbed, tmp_path):
    """A copy of that run, which `reproduce` resumes."""
    return shutil.copytree(undisturbed, tmp_path / "run")


@pytest.fixture
def read(tmp_path):
    """What `load` makes of some result lines, and of lines of a run's other files."""

    def read(results: Sequence[Line], **files: Sequence[Line]) -> Inputs:
        return load([write(tmp_path / "run", results=results, **files)])

    return read
