"""The package on a GPU, in eight minutes: its tests, then speed, memory and utilisation next to transformers.

    python -m benchmarks.gpu --out benchmarks/results/gpu

It names the measurements that do not fit in the time. On a CPU, which its tests use, the sizes are tiny.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from metatokens.paper.records import Timing
from metatokens.records import read_lines

TESTS = Path(__file__).parents[1] / "tests/device"
# Operations a second of dense bfloat16 products, as the makers give them (without sparsity).
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
OURS = ("gpt2", "pause", "meta", "dense")


def measurements(device: str) -> list[tuple[str, list[str]]]:
    """The measurements, the most important first: a file's name, and the arguments of `benchmarks.speed`."""
    is_gpu = device == "cuda"
    shape, short, long, rounds = (
        ("paper", "1024", "8192", "8") if is_gpu else ("tiny", "64", "128", "1")
    )
    shared_options = [
        "--shape",
        shape,
        "--device",
        device,
        "--rounds",
        rounds,
        "--warmup",
        "3" if is_gpu else "1",
    ]
    shared_options += ["--dtype", "bfloat16" if is_gpu else "float32"]
    theirs = [*OURS, "transformers", "gpt2-learned"]
    batch = {short: "8" if is_gpu else "2", long: "1"}
    runs_asked = []
    for length in (short, long):
        for compiled in ([], ["--compile"]) if is_gpu else ([],):
            name = f"train_{length}{'_compiled' if compiled else ''}"
            sizes = [
                "--lengths",
                length,
                "--batch-size",
                batch[length],
                *contestants(theirs),
                *compiled,
            ]
            runs_asked.append((name, ["train", *shared_options, *sizes]))
    for length in (short, long):
        decoding = [
            "--lengths",
            length,
            *contestants(["gpt2", "meta", "transformers", "gpt2-learned"]),
        ]
        runs_asked.append((f"decode_{length}", ["decode", *shared_options, *decoding]))
    return runs_asked


def contestants(names: Sequence[str]) -> list[str]:
    """The options that name the contestants."""
    return [part for name in names for part in ("--contestant", name)]


def utilisation(timing: Timing, peak: float | None) -> str:
    """Model-FLOP utilisation: the operations that the function needs, a second, as a share of the device's peak."""
    if timing.flops is None or peak is None:
        return "-"
    return f"{timing.flops / timing.seconds / peak:.1%}"


def table(files: Sequence[Path], peak: float | None) -> Table:
    """A row for each model and measurement."""
    shown = Table("measured", "model", "text tokens/s", "utilisation", "MB", "ratio", "against")
    for file in files:
        for timing in read_lines(file, Timing):
            memory = "-" if timing.memory is None else f"{timing.memory / 1e6:,.0f}"
            speed = f"{timing.text_tokens / timing.seconds:,.0f}"
            ratio = f"{timing.ratio:.3f} [{timing.ratio_low:.3f}, {timing.ratio_high:.3f}]"
            shown.add_row(
                file.stem,
                timing.model,
                speed,
                utilisation(timing, peak),
                memory,
                ratio,
                timing.against,
            )
    return shown


def main() -> int:
    """Run what fits, print the figures, and return the status of the tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the lines of each measurement"
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="no measurement starts later than this"
    )
    choices = parser.parse_args()
    choices.out.mkdir(parents=True, exist_ok=True)
    end, console = time.monotonic() + 60 * choices.minutes, Console(width=120)
    name = torch.cuda.get_device_name() if choices.device == "cuda" else "processor"
    console.print(f"device: {name}, PyTorch {torch.__version__}")
    environment = {**os.environ, "METATOKENS_DEVICE": choices.device}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(TESTS)], env=environment, check=False
    )
    files, left = [], []
    for measured, arguments in measurements(choices.device):
        if time.monotonic() > end:
            left.append(measured)
            continue
        file = choices.out / f"{measured}.jsonl"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.speed", *arguments, "--out", str(file)]
        try:
            subprocess.run(
                command,
                check=True,
                stderr=subprocess.PIPE,
                timeout=max(1, end + 60 - time.monotonic()),
            )
            files.append(file)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = (error.stderr or b"").decode(errors="replace").strip().rpartition("\n")[2]
            left.append(f"{measured} ({type(error).__name__}: {said})")
    console.print(table(files, next((peak for key, peak in PEAKS.items() if key in name), None)))
    if left:
        console.print(f"left out: {', '.join(left)}", markup=False, soft_wrap=True)
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
