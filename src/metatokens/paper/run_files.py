"""Everything that a report reads: the files of run folders, and single files of lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metatokens.errors import UserError
from metatokens.paper.records import LOOKS, CurvePoint, RunInfo, Timing
from metatokens.records import (
    AnyRecord,
    ExampleRecord,
    Measurement,
    Result,
    read_lines,
    read_record,
    read_text,
)


@dataclass
class RunLines:
    """The contents of run folders and files of lines, in the order of reading."""

    results: list[Result] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    points: list[CurvePoint] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    examples: list[ExampleRecord] = field(default_factory=list)
    runs: list[RunInfo] = field(default_factory=list)
    looks: dict[str, Path] = field(default_factory=dict)  # the page of attention for each task


def read_runs(paths: Sequence[Path]) -> RunLines:
    """Read run folders and files of lines.

    Args:
        paths: folders with `results.jsonl` and, optionally, `analysis.jsonl`, `curves.jsonl`, `examples.jsonl`,
            `run.json` and pages in `looks`; or files of result lines or of lines that `benchmarks.speed` wrote. Files
            of lines may be compressed (`results.jsonl.gz`).

    Raises:
        UserError: if a path is missing or unreadable, a line or file is malformed, or there is no result at all.
    """
    lines = RunLines()
    for path in paths:
        if path.is_dir():
            _read_folder(path, lines)
        elif '"benchmark":' in _first_line(path):  # the key that lines of benchmarks alone have
            lines.timings += read_lines(path, Timing)
        else:
            lines.results += read_lines(path, Result)
    if not (lines.results or lines.measurements or lines.points or lines.timings):
        raise UserError(
            f"there is no result in {', '.join(map(str, paths)) or 'an empty list of files'}; "
            "give a run folder or a file of result lines."
        )
    return lines


def _first_line(file: Path) -> str:
    return read_text(file).partition("\n")[0]


def _read_folder(folder: Path, lines: RunLines) -> None:
    """Add what a run's folder has; a run of a few stages need not have each file."""
    lines.results += _lines(folder, "results", Result)
    lines.measurements += _lines(folder, "analysis", Measurement)
    lines.points += _lines(folder, "curves", CurvePoint)
    lines.examples += _lines(folder, "examples", ExampleRecord)
    if (folder / "run.json").exists():
        lines.runs.append(read_record(folder / "run.json", RunInfo))
    lines.looks |= {page.stem: page for page in sorted((folder / LOOKS).glob("*.html"))}


def _lines(folder: Path, name: str, kind: type[AnyRecord]) -> list[AnyRecord]:
    """The lines of `NAME.jsonl`, or else of `NAME.jsonl.gz`; none if there is neither."""
    for file in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"):
        if file.exists():
            return read_lines(file, kind)
    return []
