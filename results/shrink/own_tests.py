"""What the tests of `metatokens shrink` say of its runs, by the rule of README.md: tables and verdicts as Markdown.

    python -m results.shrink.own_tests results/shrink/runs.jsonl.gz

`--gather OUT` first writes that file from the runs in a folder. A line's `recipe` is its run's name: the seed of a run
with the main settings, or the setting that differs.
"""

import argparse
import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metatokens.evaluation.intervals import student_interval
from metatokens.records import Result, read_lines
from metatokens.shrink.lookups import CHAT, KINDS
from metatokens.shrink.measuring import (
    BASE,
    EXCERPT,
    FACTS,
    REPLY,
    SHRUNK,
    TRAINED_FULL,
    TRAINED_WINDOW,
)
from results.shrink.judge import (
    FULL,
    GOALS,
    Findings,
    answered_cell,
    cell,
    kept_share,
    table,
    verdict,
)

NEW = (*KINDS, CHAT)  # kinds of look-ups whose forms are not trained
PROSE_GOAL = 0.10  # nats a token more than the full cache, trained alike
ARMS = {BASE: "base", SHRUNK: SHRUNK, TRAINED_FULL: FULL, TRAINED_WINDOW: "window"}


def gather(folder: Path, file: Path) -> None:
    """Write the lines of all runs in a folder."""
    lines = []
    for path in sorted(folder.glob("*/results/*.jsonl")):
        run = path.parent.parent.name
        for result in read_lines(path, Result):
            lines.append(result.model_copy(update={"recipe": run}).line())
    if not lines:
        raise SystemExit(f"{folder} has no results; {file} stays as it is.")
    file.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def named_as_arms(lines: Sequence[Result]) -> list[Result]:
    """The lines with the short names of the models."""
    return [line.model_copy(update={"model": ARMS[line.model]}) for line in lines]


def of_main_runs(lines: Sequence[Result]) -> list[Result]:
    """Those of the runs with the main settings, whose names are their seeds."""
    return [line for line in lines if str(line.recipe).isdigit()]


def loss_difference(
    kind: str, lines: Sequence[Result], other_lines: Sequence[Result]
) -> tuple[float, float, float] | None:
    """Nats a token by which a model predicts excerpts or replies worse than another, and its 95 % interval over them.

    The loss of a text is the mean over seeds. None: one of them has no such losses, or they are of other texts, since
    replies are about texts that are longer than a run's window.
    """
    losses = _losses(kind, lines)
    other_losses = _losses(kind, other_lines)
    if not losses or losses.keys() != other_losses.keys():
        return None
    return student_interval([losses[text] - other_losses[text] for text in losses])


def _losses(kind: str, lines: Sequence[Result]) -> dict[tuple[str, int | None], float]:
    """By the name and the length of a text."""
    by_text: dict[tuple[str, int | None], list[float]] = {}
    for line in lines:
        if line.metric == "perplexity" and str(line.text).startswith(kind):
            losses = by_text.setdefault((str(line.text), line.length), [])
            losses.append(math.log(line.value or math.nan))
    return {text: float(np.mean(losses)) for text, losses in by_text.items()}


def prose_verdict(lines: Sequence[Result]) -> str:
    """Whether the shrunk model's prose is near that of the full cache, trained alike."""
    of_shrunk = [line for line in lines if line.model == SHRUNK]
    of_full = [line for line in lines if line.model == FULL]
    difference = loss_difference(EXCERPT, of_shrunk, of_full)
    if difference is None:
        return "not run"
    word = "met" if difference[0] <= PROSE_GOAL else "missed"
    return f"{word}: {nats(difference)} nats; goal {PROSE_GOAL:+.2f}"


def nats(difference: tuple[float, float, float] | None) -> str:
    """A difference with its interval."""
    return (
        "not compared" if difference is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*difference)
    )


def kinds_rows(lines: Sequence[Result], lengths: Sequence[int]) -> dict[str, list[str]]:
    """What each model finds of each kind, a row for each seed."""
    by_row: dict[str, dict[int | None, Result]] = {}
    for line in lines:
        if line.metric == "exact_match":
            by_row.setdefault(f"{line.task}: {line.model}, seed {line.seed}", {})[line.length] = (
                line
            )
    return {
        name: [answered_cell(by_length.get(length)) for length in lengths]
        for name, by_length in sorted(by_row.items())
    }


def run_rows(
    lines: Sequence[Result], full: Sequence[Result], lengths: Sequence[int]
) -> dict[str, list[str]]:
    """What the shrunk model of each run finds of the new kinds, and its losses next to those of `full` of its seed."""
    rows = {}
    for run in dict.fromkeys(str(line.recipe) for line in lines):
        of_run = [line for line in lines if line.recipe == run and line.model == SHRUNK]
        seeds = {line.seed for line in of_run}
        full_of_seed = [line for line in full if line.seed in seeds]
        findings = Findings(of_run, NEW, FACTS)
        shares = [cell(findings, SHRUNK, length) for length in lengths]
        losses = [nats(loss_difference(kind, of_run, full_of_seed)) for kind in (EXCERPT, REPLY)]
        rows[run] = [kept_share(of_run, SHRUNK, 4096), *shares, *losses]
    return rows


def report(lines: Sequence[Result]) -> str:
    """All tables."""
    named = named_as_arms(lines)
    main = of_main_runs(named)
    findings = Findings(main, NEW, FACTS)
    lengths = findings.lengths
    judged = [length for length in lengths if length in GOALS]
    cells_found = {
        model: [cell(findings, model, length) for length in lengths] for model in findings.models
    }
    cells_kept = {
        model: [kept_share(main, model, length) for length in lengths] for model in findings.models
    }
    full = [line for line in main if line.model == FULL]
    return "\n\n".join(
        [
            table("look-ups of new forms found, %", cells_found, lengths),
            table("the goal", {SHRUNK: [verdict(findings, length) for length in judged]}, judged),
            f"Prose: {prose_verdict(main)}.",
            table("kept of a text, %", cells_kept, lengths),
            table(
                "run",
                run_rows(named, full, lengths),
                [
                    "kept of 4,096, %",
                    *(f"found at {length}, %" for length in lengths),
                    "prose, nats",
                    "replies, nats",
                ],
            ),
            table("by kind, %", kinds_rows(main, lengths), lengths),
        ]
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--gather", type=Path)
    options = parser.parse_args()
    if options.gather:
        gather(options.gather, options.file)
    print(report(read_lines(options.file, Result)))


if __name__ == "__main__":
    main()
