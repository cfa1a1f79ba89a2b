"""The script that runs commands with and without glibc keeping their memory, on one quick command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.thorough
def test_it_writes_a_line_for_each_figure(tmp_path: Path) -> None:
    options = [
        "--tokenizer",
        "train:768",
        "--rounds",
        "1",
        "--only",
        "tokenize",
        "--out",
        str(tmp_path / "lines.jsonl"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.allocator", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        json.loads(line)
        for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["figure"] for line in lines] == ["user", "system", "wall", "peak"]
    assert all(line["kept"] > 0 and line["plain"] > 0 for line in lines)
