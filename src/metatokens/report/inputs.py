"""What a report is made from: result records and, beside them in a run folder, curves, examples and settings."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError, model_validator

from metatokens.errors import UserError
from metatokens.evaluation.results import Result, read_results

if TYPE_CHECKING:
    from metatokens.analysis.records import Measurement

MARKER = " _PAUSE_"  # how a meta-token is shown in a prompt
OUTCOME_FIELDS = {"value", "n", "low", "high", "chance", "versions", "created"}  # the others say what was measured

Record = TypeVar("Record", bound=BaseModel)


class CurvePoint(BaseModel):
    """The training loss (nats per target token) at one logged step; `task` is null in pretraining."""

    model: str
    position_embedding: str | None = None
    task: str | None = None
    train_length: int | None = None
    recipe: str | None = None
    seed: int
    step: int
    loss: float


class RecallPoint(BaseModel):
    """Accuracy on a fixed set of test prompts at one step of fine-tuning, by the text tokens seen until then."""

    model: str
    position_embedding: str | None = None
    task: str | None = None
    train_length: int | None = None
    recipe: str | None = None
    seed: int
    step: int
    text_tokens: int
    exact_match: float
    n: int | None = None


class SpeedLine(BaseModel):
    """How long a unit of work took, as `metatokens benchmark` writes it; only what is shown."""

    benchmark: str
    model: str
    against: str
    shape: str
    length: int
    batch: int
    text_tokens: int
    n: int
    seconds: float
    ratio: float
    ratio_low: float  # quartiles of the rounds
    ratio_high: float
    limit: float
    threads: int
    device: str
    dtype: str


class ShownExample(BaseModel):
    """One example of a task, as `metatokens sample` prints it; only what is shown."""

    task: str | None = None
    phase: int | None = None
    split: str | None = None
    condition: str | None = None
    prompt: str
    markers: list[int] = []
    completion: str
    n_tokens: int | None = None

    @model_validator(mode="after")
    def _markers_stand_in_prompt(self) -> "ShownExample":
        end = 0
        for offset in self.markers:
            if offset < end or not self.prompt.startswith(MARKER, offset):
                raise ValueError(f"markers names offset {offset}, where the prompt has no {MARKER!r}")
            end = offset + len(MARKER)
        return self

    def pieces(self) -> list[tuple[str, bool]]:
        """The prompt as (text, is a meta-token) pairs; a literal `_PAUSE_` in the text is text."""
        pieces, start = [], 0
        for offset in self.markers:
            pieces += [(self.prompt[start:offset], False), (MARKER.strip(), True)]
            start = offset + len(MARKER)
        return [piece for piece in [*pieces, (self.prompt[start:], False)] if piece[0]]

    def facts(self) -> str:
        """Where the example comes from, in one line."""
        facts = {
            "phase {}": self.phase,
            "{}": self.split,
            "condition {}": self.condition,
            "{} tokens": self.n_tokens,
        }
        return ", ".join(form.format(value) for form, value in facts.items() if value is not None)


class Stage(BaseModel):
    """One stage of a run and the wall time it took."""

    name: str
    seconds: float
    cpu_seconds: float | None = None

    @property
    def cost(self) -> float:
        """Seconds of one core; by the clock where the other is not known."""
        return self.seconds if self.cpu_seconds is None else self.cpu_seconds


class ModelInfo(BaseModel):
    """What a run says about one of its models."""

    parameters: int | None = None
    description: str = ""


class RunInfo(BaseModel):
    """A run's `run.json`: what was run, where, with which settings. Everything may be absent."""

    command: str | None = None
    preset: str | None = None
    recipes: dict[str, dict[str, Any]] = {}
    python: str | None = None
    platform: str | None = None
    cores: int | None = None
    versions: dict[str, str] = {}
    created: str | None = None
    finished: str | None = None
    wall_seconds: float | None = None
    stages: list[Stage] = []
    corpus: dict[str, Any] = {}
    models: dict[str, ModelInfo] = {}


@dataclass
class Inputs:
    """Everything that was read for one report."""

    results: list[Result]
    remeasured: int = 0
    """Records left out because a later record holds the same figure."""
    curves: list[CurvePoint] = field(default_factory=list)
    recall: list[RecallPoint] = field(default_factory=list)
    measurements: "list[Measurement]" = field(default_factory=list)
    speeds: list[SpeedLine] = field(default_factory=list)
    examples: list[ShownExample] = field(default_factory=list)
    runs: list[RunInfo] = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read run folders and result files.

    Args:
        paths: folders that hold `results.jsonl` and may hold `analysis.jsonl`, `curves.jsonl`, `examples.jsonl` and
            `run.json`, or files of result lines, or of lines that `metatokens benchmark` wrote.

    Raises:
        UserError: if a path is missing or unreadable, a line or file is malformed, or there is no result at all.
    """
    files = [path / "results.jsonl" if path.is_dir() else path for path in paths]
    for path, file in zip(paths, files, strict=True):
        if path != file and not file.is_file():
            raise UserError(f"the folder {path} holds no results.jsonl; give a run folder or a file of result lines.")
    speeds = [file for file in files if _is_of_benchmark(file)]
    records = read_results([file for file in files if file not in speeds])
    if not records:
        raise UserError(f"there is no result in {', '.join(map(str, files)) or 'an empty list of files'}.")
    latest = {record.model_dump_json(exclude=OUTCOME_FIELDS): record for record in records}
    inputs = Inputs(list(latest.values()), remeasured=len(records) - len(latest))
    for file in speeds:
        inputs.speeds += _read_lines(file, SpeedLine)
    for folder in (path for path in paths if path.is_dir()):
        inputs.measurements += _measurements(folder / "analysis.jsonl")
        # A point of a curve has a loss, an accuracy, or both.
        inputs.curves += _read_lines(folder / "curves.jsonl", CurvePoint, unless=_has_accuracy_alone)
        inputs.recall += _read_lines(folder / "curves.jsonl", RecallPoint, unless=_has_no_accuracy)
        inputs.examples += _read_lines(folder / "examples.jsonl", ShownExample)
        if (folder / "run.json").exists():
            file = folder / "run.json"
            inputs.runs.append(_validate(RunInfo, _read_text(file), str(file)))
    return inputs


def _is_of_benchmark(file: Path) -> bool:
    """Whether a file's first line is one of `metatokens benchmark`; what cannot be read is left to who reads it."""
    try:
        with file.open(encoding="utf-8") as lines:
            return "benchmark" in json.loads(next(lines, "null"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _measurements(path: Path) -> "Iterator[Measurement]":
    if path.exists():
        from metatokens.analysis.records import Measurement  # brings torch, which no other report needs

        yield from _read_lines(path, Measurement)


def _has_no_accuracy(line: Any) -> bool:
    return isinstance(line, dict) and line.get("exact_match") is None


def _has_accuracy_alone(line: Any) -> bool:
    return not _has_no_accuracy(line) and isinstance(line, dict) and line.get("loss") is None


def _read_lines(path: Path, kind: type[Record], unless: Callable[[Any], bool] = lambda line: False) -> Iterator[Record]:
    # Only a line feed ends a record: a text may hold the other line separators that str.splitlines knows.
    lines = _read_text(path).split("\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            if not unless(_load(line, place)):
                yield _validate(kind, line, place)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def _load(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON: {error}.") from error


def _validate(kind: type[Record], text: str, place: str) -> Record:
    """A record from JSON; read as JSON, since a strict record takes a JSON list for a tuple and no other."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(".".join(map(str, first["loc"])).split())
        raise UserError(f"{place}: {where + ': ' if where else ''}{first['msg']}.") from error
