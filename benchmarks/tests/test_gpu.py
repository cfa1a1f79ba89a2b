"""The scripts that run benchmarks: the one for a GPU, run to its end on a CPU with tiny sizes, and `benchmarks/run`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.speed.__main__ import app
from metatokens.paper.records import Timing
from metatokens.records import read_lines


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's module, with one small test in place of the device's, which `make test` runs anyway."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    monkeypatch.setattr(gpu, "TESTS", tmp_path / "test_one.py")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path / "out")])
    return gpu


def test_it_measures_what_it_names(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    [(name, arguments)] = [line for line in script.measurements("cpu") if line[0] == "train_64"]
    monkeypatch.setattr(gpu, "measurements", lambda device: [(name, [*arguments, "--no-memory"])])
    assert script.main() == 0
    train = read_lines(tmp_path / "out" / f"{name}.jsonl", Timing)
    assert {line.model for line in train} == {
        "gpt2",
        "pause",
        "meta",
        "dense",
        "transformers",
        "gpt2-learned",
    }
    shown = capfd.readouterr().out
    assert "1 passed" in shown
    assert "left out" not in shown
    assert all(model in shown for model in ("dense", "transformers"))
    (first, *_) = train
    assert first.flops is not None
    assert script.utilisation(first, first.flops / first.seconds * 4) == "25.0%"


def test_what_does_not_fit_or_fails_is_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        gpu, "measurements", lambda device: [("broken", ["train", "--shape", "unknown"])]
    )
    assert script.main() == 0
    assert (
        "left out: broken (CalledProcessError: metatokens: Invalid value for '--shape'"
        in capfd.readouterr().out
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--minutes", "0"])
    monkeypatch.setattr(gpu, "measurements", lambda device: [("late", ["train"])])
    assert script.main() == 0
    assert "left out: late\n" in capfd.readouterr().out


def test_a_benchmark_that_fails_ends_the_script_of_all(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(Path(gpu.__file__).with_name("run"), tmp_path / "benchmarks")
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run([script], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    assert done.returncode == 3


def test_every_gpu_measurement_is_a_command(script: Any) -> None:
    from typer.main import get_command

    benchmark = get_command(app)
    asked = script.measurements("cuda")
    assert len({name for name, _ in asked}) == len(asked) == 6
    for _, arguments in asked:
        choices = benchmark.make_context(
            "benchmark", list(arguments), resilient_parsing=True
        ).params
        assert (choices["device"], choices["shape"], choices["dtype"]) == (
            "cuda",
            "paper",
            "bfloat16",
        )
