"""The committed report of the small grid is what its committed lines give."""

from pathlib import Path

import pytest

from metatokens.report.page import write_report

ROOT = Path(__file__).parents[2]
LINES = ROOT / "results" / "small"
SPEEDS = [ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in ("decode_1", "decode_8", "prefill")]


def test_the_committed_page_is_what_the_committed_lines_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metatokens.report.blocks.png", lambda figure: b"")
    write_report([LINES, *SPEEDS], tmp_path)
    assert (tmp_path / "report.md").read_bytes() == (LINES / "report" / "report.md").read_bytes()
