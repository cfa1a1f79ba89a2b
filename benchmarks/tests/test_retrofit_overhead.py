"""The script that times a retrofitted model next to its base, at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path


def test_it_writes_a_line_for_each_comparison(tmp_path: Path) -> None:
    sizes = [
        "--hidden",
        "64",
        "--layers",
        "1",
        "--length",
        "32",
        "--new-tokens",
        "9",
        "--rounds",
        "2",
    ]
    line = [
        sys.executable,
        "-m",
        "benchmarks.retrofit_overhead",
        *sizes,
        "--out",
        str(tmp_path / "lines.jsonl"),
    ]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        json.loads(line)
        for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {(line["measured"], line["against"]) for line in lines} == {
        ("reading text", "base, reading"),
        ("reading, 1/8 meta-tokens", "base, reading"),
        ("generating", "base, generating"),
        ("generating, meta_every=8", "base, generating"),
    }
    # More is added to a tiny model than it had: 8 heads of 64 at a width of 64.
    assert all(
        line["parameters"] - line["base_parameters"] == 4 * 64 * 512 + 64 + 64 for line in lines
    )
    assert all(line["ratio"] > 0 and line["n"] == 2 for line in lines)
