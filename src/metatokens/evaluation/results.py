"""Result records: one JSON line a figure, with n, interval, chance, seed and provenance.

Every table and figure of the report is made from files of these lines and from nothing else.
"""

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.stats import binomtest

from metatokens.errors import UserError
from metatokens.files import append_lines

Metric = Literal["exact_match", "token_accuracy", "perplexity", "majority_rate"]


def library_versions() -> dict[str, str]:
    """The versions a figure depends on, by package name."""
    packages = ("metatokens", "torch", "transformers")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def now() -> str:
    """The current time, UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Result(BaseModel):
    """One measured figure. Fields that do not apply are null."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str  # gpt2, pause, twin, meta, gpt-neo, or a folder's name
    position_embedding: str | None = None  # learned, rope, none
    task: str | None = None
    condition: str | None = None  # the tasks' marker condition; for perplexity the placement of meta-tokens
    train_condition: str | None = None
    train_length: int | None = None  # tokens
    length: int | None = None  # tokens; bin L holds prompts of (L/2, L] tokens
    intervention: str | None = None
    noise_seed: int | None = None  # of an intervention that draws noise
    text: str | None = None  # that perplexity is measured on: held_out, book, or a path
    metric: Metric
    value: float | None  # proportions in [0, 1]; null where the model cannot be run
    n: Annotated[int, Field(ge=0)]  # examples (accuracies) or scored tokens (token_accuracy, perplexity)
    low: float | None = None  # 95 % interval
    high: float | None = None
    chance: float | None = None
    seed: int
    recipe: str | None = None
    versions: dict[str, str] = Field(default_factory=library_versions)
    created: str = Field(default_factory=now)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The Wilson 95 % score interval of a proportion, as (low, high).

    Raises:
        ValueError: if n is 0 or successes is outside [0, n].
    """
    interval = binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def write_results(path: Path, results: Iterable[BaseModel]) -> None:
    """Append results, or records of another kind, to a JSON-lines file, one line each.

    Raises:
        UserError: if the file cannot be written, which then is as it was.
    """
    try:
        append_lines(path, (result.model_dump_json() for result in results))
    except OSError as error:
        raise UserError(f"cannot write results to {path}: {error.strerror}.") from error


def read_results(paths: Sequence[Path]) -> list[Result]:
    """Every result in the given JSON-lines files.

    Raises:
        UserError: if a file is missing or no text, or a line is not a result; the sentence names file and line.
    """
    results = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"no result file at {path}.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the results in {path}: {error}.") from error
        # Only a line feed ends a record: a name may hold the other line separators that str.splitlines knows.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                results.append(Result.model_validate_json(line))
            except ValidationError as error:
                reason = str(error).splitlines()
                raise UserError(f"{path}, line {number} is not a result record: {' '.join(reason[:3])}.") from error
    return results
