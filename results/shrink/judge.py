"""Judge the lines of the suites by the rule of README.md: tables and verdicts as Markdown.

python -m results.shrink.judge runs/suites/results.jsonl
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import t

from metatokens.records import SEPARATOR, Result, read_lines, unpack_hits
from results.shrink.suites import NEEDLE_TASKS

SHRUNK, FULL = "shrunk", "full"
GOALS = {512: 0.9, 2048: 0.9, 4096: 0.9, 8192: 0.5}  # of what FULL finds, by length
ENOUGH = 0.25  # that FULL has to find, or nothing can be judged

Shares = npt.NDArray[np.float64]  # of references found, (tasks, prompts)


class Findings:
    """What models find in some tasks.

    Args:
        lines: of all models.
        tasks: that count; each has equally many prompts of a length.
        asked: references of a prompt in the first task.
    """

    def __init__(
        self, lines: Sequence[Result], tasks: Sequence[str] = NEEDLE_TASKS, asked: int = 1
    ):
        counting = [line for line in lines if line.task in tasks]
        self.tasks, self.asked = tasks, asked
        self.models = list(dict.fromkeys(line.model for line in counting))
        self.lengths = sorted({line.length for line in counting if line.length is not None})
        self._lines: defaultdict[tuple[str, int | None, str | None], list[Result]] = defaultdict(
            list
        )
        for line in counting:
            self._lines[line.model, line.length, line.task].append(line)

    def shares(self, model: str, length: int) -> Shares | None:
        """The share of each prompt's references, the mean of the seeds; None if a task is missing."""
        by_task = [self._lines[model, length, task] for task in self.tasks]
        if not all(by_task):
            return None
        number_of_prompts = by_task[0][0].n // self.asked
        rows = []
        for lines in by_task:
            seeds = [
                unpack_hits(line.hits, line.n).reshape(number_of_prompts, -1) for line in lines
            ]
            rows.append(np.mean(seeds, axis=(0, 2)))
        return np.array(rows)


def mean_with_interval(shares: Shares) -> tuple[float, float, float]:
    """The mean of the tasks' means, and its 95 % interval over prompts, by Student's t (Satterthwaite)."""
    tasks, prompts = shares.shape
    mean = float(shares.mean())
    variances = shares.var(axis=1, ddof=1) / prompts / tasks**2  # of each task's part of the mean
    variance = float(variances.sum())
    if variance == 0:
        return mean, mean, mean
    freedom = variance**2 / float((variances**2).sum() / (prompts - 1))
    half_width = float(t.ppf(0.975, freedom)) * math.sqrt(variance)
    return mean, mean - half_width, mean + half_width


def ratio_with_interval(shares: Shares, of: Shares) -> tuple[float, float, float]:
    """The ratio of two models' means of the same prompts, and its 95 % interval, linearised."""
    ratio = float(shares.mean() / of.mean())
    _, low, high = mean_with_interval((shares - ratio * of) / of.mean())
    return ratio, ratio + low, ratio + high


def verdict(findings: Findings, length: int) -> str:
    """Whether the shrunk model finds enough of what the full cache, trained alike, finds."""
    shrunk, full = findings.shares(SHRUNK, length), findings.shares(FULL, length)
    if shrunk is None or full is None:
        return "not run"
    if full.mean() < ENOUGH:
        return f"cannot be judged: {FULL} finds {full.mean():.0%}"
    ratio, low, high = ratio_with_interval(shrunk, full)
    word = "met" if ratio >= GOALS[length] else "missed"
    return f"{word}: {ratio:.0%} ({low:.0%} to {high:.0%}) of what {FULL} finds; goal {GOALS[length]:.0%}"


def comparison(findings: Findings, press: str, length: int) -> str:
    """Whether the shrunk model finds more than a press."""
    shrunk, other = findings.shares(SHRUNK, length), findings.shares(press, length)
    if shrunk is None or other is None:
        return "not run"
    difference, low, high = mean_with_interval(shrunk - other)
    word = "more" if low > 0 else "less" if high < 0 else "cannot be told"
    return f"{word}: {100 * difference:+.0f} ({100 * low:+.0f} to {100 * high:+.0f})"


def cell(findings: Findings, model: str, length: int) -> str:
    """What a model finds, in %."""
    shares = findings.shares(model, length)
    return "not run" if shares is None else estimate(shares)


def estimate(shares: Shares) -> str:
    """The mean of shares with its interval, in %."""
    value, low, high = mean_with_interval(shares)
    return f"{100 * value:.0f} ({100 * max(0, low):.0f} to {100 * min(1, high):.0f})"


def kept_share(lines: Sequence[Result], model: str, length: int) -> str:
    """What the cache of a model keeps of contexts, in the mean of all tasks."""
    shares = [
        1.0 if line.kv_kept is None else line.kv_kept
        for line in lines
        if (line.model, line.length, line.metric) == (model, length, "exact_match")
    ]
    return f"{100 * np.mean(shares):.1f}" if shares else "not run"


def answered_cell(line: Result | None) -> str:
    """A line's figure, in %."""
    if line is None:
        return "not run"
    return f"{100 * line.value:.0f} ({100 * line.low:.0f} to {100 * line.high:.0f})"


def table(title: str, rows: dict[str, list[str]], columns: Sequence[int | str]) -> str:
    """A table with a column of each of these names."""
    head = [f"| {title} | {' | '.join(map(str, columns))} |", f"|---|{'---:|' * len(columns)}"]
    return "\n".join(
        [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]
    )


def report(lines: Sequence[Result]) -> str:
    """All tables."""
    findings = Findings(lines)
    lengths = findings.lengths
    needles = {
        model: [cell(findings, model, length) for length in lengths] for model in findings.models
    }
    goals = {SHRUNK: [verdict(findings, length) for length in lengths if length in GOALS]}
    shares = {model: [kept_share(lines, model, length) for length in lengths] for model in needles}
    others: dict[str, dict[int | None, Result]] = {}
    for line in lines:
        if line.task not in NEEDLE_TASKS:
            others.setdefault(f"{line.task}: {line.model}, seed {line.seed}", {})[line.length] = (
                line
            )
    answered = {
        name: [answered_cell(by_length.get(length)) for length in lengths]
        for name, by_length in sorted(others.items())
    }
    presses = {
        model: [comparison(findings, model, length) for length in lengths]
        for model in findings.models
        if SEPARATOR in model
    }
    return "\n\n".join(
        [
            table("needles found, %", needles, lengths),
            table("the goal", goals, [length for length in lengths if length in GOALS]),
            table("points more than a press", presses, lengths),
            table("kept of a context, %", shares, lengths),
            table("other tasks, %", answered, lengths),
        ]
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path)
    options = parser.parse_args()
    print(report(read_lines(options.lines, Result)))


if __name__ == "__main__":
    main()
