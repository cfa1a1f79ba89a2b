"""Everything that a report reads: the files of run folders, and single files of lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metatokens.errors import UserError
from metatokens.paper.records import LOOKS, CurvePoint, RunInfo, Timing, lines_file
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
        file = lines_file(path, "results") if path.is_dir() else path
        if path != file and not file.is_file():
            raise UserError(
                f"the folder {path} holds no results.jsonl; give a run folder or a file of result lines."
            )
        first_line, _, _ = read_text(file).partition("\n")
        if '"benchmark":' in first_line:  # the key that lines of benchmarks alone have
            lines.timings += read_lines(file, Timing)
            continue
        lines.results += read_lines(file, Result)
        if path.is_dir():
            lines.measurements += _read_if_there(lines_file(path, "analysis"), Measurement)
            lines.points += _read_if_there(lines_file(path, "curves"), CurvePoint)
            lines.examples += _read_if_there(lines_file(path, "examples"), ExampleRecord)
            if (path / "run.json").exists():
                lines.runs.append(read_record(path / "run.json", RunInfo))
            lines.looks |= {page.stem: page for page in sorted((path / LOOKS).glob("*.html"))}
    if not lines.results:
        raise UserError(
            f"there is no result in {', '.join(map(str, paths)) or 'an empty list of files'}."
        )
    return lines


def _read_if_there(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    return read_lines(path, kind) if path.exists() else []
