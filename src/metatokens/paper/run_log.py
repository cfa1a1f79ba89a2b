"""The log of a run: its finished stages, and the lines that they added to its files.

`stages.jsonl` records for each finished stage how many lines it added to `results.jsonl`, `analysis.jsonl` and
`curves.jsonl`. One process writes all files, the stage's own line last. So lines that the log does not count belong to
a stage that was cut off, and are dropped when the run resumes.
"""

import os
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from metatokens.differences import differences
from metatokens.errors import UserError
from metatokens.files import append_lines
from metatokens.paper.plan import Stage
from metatokens.paper.records import StageRecord
from metatokens.paper.runner import WEIGHTS, Outcome
from metatokens.records import library_versions, now, parse_record, read_text

LOG = "stages.jsonl"
# The files of lines, by the field of an outcome whose records they hold.
FILES = {"results": "results.jsonl", "measurements": "analysis.jsonl", "curves": "curves.jsonl"}


class FinishedStage(StageRecord):
    """A line of the log."""

    settings: dict[str, Any]
    facts: dict[str, Any]
    lines: dict[str, int]  # the number of lines that it added, by kind (FILES)
    finished: str  # the time
    versions: dict[str, str]  # by package


class RunLog:
    """The finished stages of the run in `out`, in the order in which they finished."""

    def __init__(self, out: Path):
        self.out = out
        self.entries: dict[str, FinishedStage] = {}
        for number, line in enumerate(_whole_lines(out / LOG), start=1):
            entry = parse_record(FinishedStage, line, f"{out / LOG}, line {number}")
            if entry.name in self.entries:
                raise UserError(f"{out / LOG}, line {number} repeats the stage {entry.name!r}.")
            self.entries[entry.name] = entry

    def resume(self) -> None:
        """Drop the lines of a stage that was cut off."""
        _cut(self.out / LOG, len(self.entries))
        for kind, file in FILES.items():
            counted = sum(entry.lines.get(kind, 0) for entry in self.entries.values())
            if len(_whole_lines(self.out / file)) < counted:
                raise UserError(
                    f"{self.out / file} has fewer lines than {LOG} counts, so they are of different runs."
                )
            _cut(self.out / file, counted)

    def check(self, plan: Iterable[Stage]) -> None:
        """Refuse a plan in which a finished stage has other settings."""
        for stage in plan:
            if stage.name not in self.entries:
                continue
            recorded = self.entries[stage.name].settings
            for key, before, after in differences(recorded, stage.settings):
                raise UserError(
                    f"{self.out} holds the stage {stage.name} with other settings ({key} was {before!r} and is now "
                    f"{after!r}); give a new folder, or --overwrite to replace the run."
                )

    def add(self, stage: Stage, outcome: Outcome) -> None:
        """Append a stage and its records; nothing for a stage that ran again because its product was missing.

        Training again on another machine gives other weights, which finished stages have not measured: warn then.
        """
        if stage.name in self.entries:
            if self.entries[stage.name].facts.get(WEIGHTS) != outcome.facts.get(WEIGHTS):
                print(
                    f"{stage.name} gave other weights than those that finished stages measured.",
                    file=sys.stderr,
                )
            return
        numbers = {}
        for kind, file in FILES.items():
            lines = [record.line() for record in getattr(outcome, kind)]
            append_lines(self.out / file, lines)
            if lines:
                numbers[kind] = len(lines)
        entry = FinishedStage(
            name=stage.name,
            kind=stage.kind,
            seconds=outcome.seconds,
            cpu_seconds=outcome.cpu_seconds,
            settings=stage.settings,
            facts=outcome.facts,
            lines=numbers,
            finished=now(),
            versions=library_versions(),
        )
        append_lines(self.out / LOG, [entry.line()])
        self.entries[stage.name] = entry


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that end in a line feed."""
    return read_text(path).split("\n")[:-1] if path.exists() else []


def _cut(path: Path, count: int) -> None:
    """Drop everything after the first `count` lines."""
    if path.exists():
        with path.open("rb") as file:
            size = sum(len(line) for line in islice(file, count))
        os.truncate(path, size)
