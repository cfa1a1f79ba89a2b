"""The tiny plan, carried out in this process."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from metatokens.paper import pools, presets, run
from tests.paper import tiny_preset


class InThisProcess:
    """Stands for the process pool: carries each stage out when it is submitted."""

    def __init__(self, workers: int, context: object, initializer: object, initargs: tuple[Any]):
        pools._reports = initargs[0]

    def shutdown(self) -> None:
        pass

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(work(*arguments))
        return future


@pytest.fixture
def reproduce(small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`reproduce` with the tiny preset, in this process."""
    monkeypatch.setattr(presets, "PRESETS", {name: tiny_preset.tiny(str(small_corpus)) for name in ("tiny", "other")})
    monkeypatch.setattr(pools, "ProcessPoolExecutor", InThisProcess)
    return lambda out, name="tiny", **options: run.reproduce(name, out, workers=1, **options)


@pytest.fixture(scope="session")
def undisturbed(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "PRESETS", {"tiny": tiny_preset.tiny(str(small_corpus))})
        patch.setattr(pools, "ProcessPoolExecutor", InThisProcess)
        run.reproduce("tiny", out, workers=1)
    return out
