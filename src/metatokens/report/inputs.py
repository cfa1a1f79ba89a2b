"""What a report is made from: result records and, beside them in a run folder, curves, examples and settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metatokens import records
from metatokens.errors import UserError
from metatokens.records import (
    Measurement,
    Result,
    RunInfo,
    ShownExample,
    Timing,
    lines_file,
    read_lines,
    read_record,
    read_text,
)

OUTCOME_FIELDS = {"value", "n", "low", "high", "chance", "versions", "created"}  # the others say what was measured


class CurvePoint(records.CurvePoint):
    """The training loss at one logged step."""

    loss: float


class RecallPoint(records.CurvePoint):
    """Accuracy on a fixed set of test prompts at one step of fine-tuning, by the text tokens seen until then."""

    text_tokens: int
    exact_match: float


@dataclass
class Inputs:
    """Everything that was read for one report."""

    results: list[Result]
    remeasured: int = 0
    """Records left out because a later record holds the same figure."""
    curves: list[CurvePoint] = field(default_factory=list)
    recall: list[RecallPoint] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    speeds: list[Timing] = field(default_factory=list)
    examples: list[ShownExample] = field(default_factory=list)
    runs: list[RunInfo] = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read run folders and result files.

    Args:
        paths: folders that hold `results.jsonl` and may hold `analysis.jsonl`, `curves.jsonl`, `examples.jsonl` and
            `run.json`, or files of result lines, or of lines that `metatokens benchmark` wrote. Files of lines may be
            compressed (`results.jsonl.gz`).

    Raises:
        UserError: if a path is missing or unreadable, a line or file is malformed, or there is no result at all.
    """
    files = [lines_file(path, "results") if path.is_dir() else path for path in paths]
    for path, file in zip(paths, files, strict=True):
        if path != file and not file.is_file():
            raise UserError(f"the folder {path} holds no results.jsonl; give a run folder or a file of result lines.")
    speeds = [file for file in files if _is_of_benchmark(file)]
    results = [result for file in files if file not in speeds for result in read_lines(file, Result)]
    if not results:
        raise UserError(f"there is no result in {', '.join(map(str, files)) or 'an empty list of files'}.")
    latest = {result.model_dump_json(exclude=OUTCOME_FIELDS): result for result in results}
    inputs = Inputs(list(latest.values()), remeasured=len(results) - len(latest))
    for file in speeds:
        inputs.speeds += read_lines(file, Timing)
    for folder in (path for path in paths if path.is_dir()):
        inputs.measurements += _read(lines_file(folder, "analysis"), Measurement)
        for point in _read(lines_file(folder, "curves"), records.CurvePoint):  # which has a loss, an accuracy, or both
            if point.loss is not None:
                inputs.curves.append(CurvePoint.model_validate(point.model_dump()))
            if point.exact_match is not None:
                inputs.recall.append(RecallPoint.model_validate(point.model_dump()))
        inputs.examples += _read(lines_file(folder, "examples"), ShownExample)
        if (folder / "run.json").exists():
            inputs.runs.append(read_record(folder / "run.json", RunInfo))
    return inputs


def _is_of_benchmark(file: Path) -> bool:
    """Whether a file's first line is one of `metatokens benchmark`; what cannot be read is left to who reads it."""
    try:
        return "benchmark" in json.loads(read_text(file).partition("\n")[0])
    except (ValueError, TypeError, RecursionError):  # UserError is a ValueError
        return False


def _read(path: Path, kind: type[records.AnyRecord]) -> list[records.AnyRecord]:
    return read_lines(path, kind) if path.exists() else []
