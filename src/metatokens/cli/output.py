"""How results and progress are written: a table and a bar for a person at a terminal, JSON lines for a program."""

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatokens.errors import UserError
from metatokens.files import append_lines, write_whole
from metatokens.machine import is_first_process

if TYPE_CHECKING:
    from metatokens.records import Measured, Record
    from metatokens.training.trainer import Figures, Progress


def say(text: str) -> None:
    """Print a line to standard error; of processes that train one model together, the first one does."""
    if is_first_process():
        print(text, file=sys.stderr)


PNG = b"\x89PNG"  # how such a file begins


def write_own(path: Path, content: bytes, signature: bytes) -> None:
    """Write a file, in place of one of the same kind alone: what somebody else wrote is kept.

    Args:
        path: the file.
        content: what it is to hold.
        signature: what every file of its kind holds.

    Raises:
        UserError: if there is another file of that name, or it cannot be written.
    """
    try:
        if path.exists() and signature not in path.read_bytes():
            raise UserError(f"{path} is another kind of file, and is kept; give another name.")
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}.") from error


def write_lines(lines: Iterable[str], out: Path | None) -> None:
    """Print lines to standard output, or append them to a file.

    Raises:
        UserError: if the file cannot be written.
    """
    if out is None:
        for line in lines:
            print(line)
        return
    try:
        append_lines(out, lines)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}.") from error


def shows_tables(as_json: bool) -> bool:
    """Whether a person reads standard output, and has not asked for JSON."""
    return sys.stdout.isatty() and not as_json


def write_records(records: "Iterable[Record]", out: Path | None) -> None:
    """Write records as JSON lines, those of measured figures with versions and time: see `write_lines`."""
    from metatokens.records import append_records, stamped

    if out is None:
        write_lines((record.line() for record in stamped(records)), None)
    else:
        append_records(out, stamped(records))


def write_figures(figures: "Sequence[Measured]", out: Path | None, *, as_json: bool) -> None:
    """Write measured figures as JSON lines, and show them as a table where standard output is a terminal.

    Args:
        figures: what was measured.
        out: a file that the lines are appended to, in place of standard output.
        as_json: whether a terminal gets JSON lines too, and no table.
    """
    if out is not None or not shows_tables(as_json):
        write_records(figures, out)
    if shows_tables(as_json):
        print_figures([figure.model_dump(exclude_defaults=True) for figure in figures])


def check_results_file(out: Path | None) -> None:
    """Refuse a file that cannot be appended to before anything is measured."""
    if out is not None:
        is_new = not out.exists()
        write_records((), out)
        if is_new:
            out.unlink()


_SHARES = ("exact_match", "token_accuracy", "shortcut", "majority_rate")  # are shown in percent
_FIGURE = ("metric", "value", "low", "high", "n", "chance", "quantiles")


def print_figures(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of what was measured: the value, its 95 % interval, n, and chance.

    What all rows have in common stands above it, once.
    """
    circumstances = [{name: value for name, value in row.items() if name not in _FIGURE} for row in rows]
    common = dict(circumstances[0])
    for each in circumstances:
        common = {name: value for name, value in common.items() if each.get(name) == value}
    own = [{name: value for name, value in each.items() if name not in common} for each in circumstances]
    print_table(
        {
            "measured": [
                ", ".join((row["metric"].replace("_", " "), *_said(each))) for row, each in zip(rows, own, strict=True)
            ],
            "value": [_number(row, "value") or "-" for row in rows],
            "95 % interval": [
                f"{_number(row, 'low')} to {_number(row, 'high')}" if "low" in row else "" for row in rows
            ],
            "n": [f"{row['n']:,}" for row in rows],
            "chance": [_number(row, "chance") for row in rows],
        },
        above=", ".join(_said(common)),
        numbers=("value", "95 % interval", "n", "chance"),
    )


def _said(circumstances: Mapping[str, Any]) -> list[str]:
    yes_or_no = {True: "yes", False: "no"}
    return [
        f"{name.replace('_', ' ')} {yes_or_no[value] if isinstance(value, bool) else value}"
        for name, value in circumstances.items()
    ]


def _number(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if row["metric"] in _SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_table(columns: Mapping[str, Sequence[str]], *, above: str = "", numbers: Collection[str] = ()) -> None:
    """Print a table; columns that are empty in all rows are left out.

    Args:
        columns: the cells of each column, by its heading.
        above: a line above the table.
        numbers: headings of the columns that are aligned on the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in shown:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, row))
    console = Console()
    if above:
        console.print(Text(above, style="dim"))
    console.print(table)


LINE_EVERY = 30.0  # seconds between the lines that are printed where there is no terminal to redraw

_SHOWN = {  # a run's figures, in this order
    "loss": "loss {:.4g}",
    "eval_loss": "held-out loss {:.4g}",
    "eval_exact_match": "held-out exact match {:.1%}",
    "learning_rate": "learning rate {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def _shown(done: int, figures: "Figures") -> str:
    """The figures; those that were measured before the step that was just done are shown with their own step."""
    by_step: dict[int, list[str]] = {}
    for name, text in _SHOWN.items():
        if name in figures:
            value, step = figures[name]
            by_step.setdefault(step, []).append(text.format(value))
    shown = {step: ", ".join(told) for step, told in sorted(by_step.items(), reverse=True)}
    return "; ".join(told if step == done else f"step {step:,}: {told}" for step, told in shown.items())


class _Lines:
    """Progress where no terminal is: a line at the first loss, every half a minute, and at the end."""

    def __init__(self, verb: str):
        self._verb = verb
        self._last = -math.inf

    def __call__(self, done: int, total: int, figures: "Figures") -> None:
        if figures and (time.monotonic() - self._last > LINE_EVERY or done == total):
            self._last = time.monotonic()
            print(f"{self._verb} {done:,}/{total:,}: {_shown(done, figures)}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(verb: str) -> "Iterator[Progress]":
    """How far a verb is, and the latest figures, on standard error: a bar on a terminal, elsewhere lines.

    Of processes that train one model together, the first one shows it.
    """
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Bar(Progress):
        figures = ""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.figures:
                yield Text(self.figures)

    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not is_first_process():
        yield lambda done, total, figures: None
    elif not console.is_terminal:
        yield _Lines(verb)
    else:
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task(verb, total=None)

            def show(done: int, total: int, figures: "Figures") -> None:
                bar.figures = _shown(done, figures)
                bar.update(task, completed=done, total=total)

            yield show
