"""How results and progress are written: a table, or JSON lines if asked for; on a terminal, a bar while it works."""

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatokens.errors import UserError
from metatokens.files import append_lines, check_lines
from metatokens.machine import is_first_process

if TYPE_CHECKING:
    from metatokens.records import Measured, Record
    from metatokens.training.trainer import Figures, Progress


def say(text: str) -> None:
    """Print a line to standard error; of processes that train one model together, only the first prints."""
    if is_first_process():
        print(text, file=sys.stderr)


def write_records(records: "Iterable[Record]", out: Path | None) -> None:
    """Print records as JSON lines, or append them to a file; measured figures get versions and time."""
    from metatokens.records import stamped

    lines = (record.line() for record in stamped(records))
    if out is None:
        for line in lines:
            print(line)
        return
    try:
        append_lines(out, lines)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}.") from error


def write_figures(figures: "Sequence[Measured]", out: Path | None, *, as_json: bool) -> None:
    """Print measured figures, as a table or as JSON lines.

    Args:
        figures: the results.
        out: a file to append the JSON lines to as well.
        as_json: print JSON lines instead of a table.
    """
    # Printed first, so that a full disk does not lose them.
    if as_json:
        write_records(figures, None)
    else:
        print_figures([figure.model_dump(exclude_defaults=True) for figure in figures])
    if out is not None:
        write_records(figures, out)


def check_results_file(out: Path | None, *others: str | Path | None) -> None:
    """Refuse a file that cannot be appended to, before anything is measured; the file stays as it is.

    Args:
        out: the file.
        others: what the command reads or writes besides.
    """
    if out is None:
        return
    if any(other is not None and out.resolve() == Path(other).resolve() for other in others):
        raise UserError(f"{out} is read or written by this command already; give another name.")
    is_new = not out.exists()
    try:
        check_lines(out)
        if not out.is_fifo():  # closing a pipe would end it for its reader
            out.open("ab").close()
        if is_new:
            out.resolve().unlink()  # a link stays
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}.") from error


_SHARES = ("exact_match", "token_accuracy", "shortcut")  # shown in percent
_FIGURE = ("metric", "value", "low", "high", "n", "chance", "hits")


def print_figures(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of results: the value, its 95 % interval, n, and chance, unless no row has one.

    A line above it holds the fields that all rows share.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shared = {
        name: value
        for name, value in rows[0].items()
        if all(row.get(name) == value for row in rows)
    }
    columns = {
        "measured": [
            ", ".join([row["metric"].replace("_", " "), *_described(row, without=shared)])
            for row in rows
        ],
        "value": [_number(row, "value") or "-" for row in rows],
        "95 % interval": [_interval(row) for row in rows],
        "n": [f"{row['n']:,}" for row in rows],
        "chance": [_number(row, "chance") for row in rows],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in shown:
        table.add_column(
            heading, justify="left" if heading == "measured" else "right", overflow="fold"
        )
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))
    console = Console()
    if shared:
        console.print(Text(", ".join(_described(shared)), style="dim"))
    console.print(table)


def _interval(row: Mapping[str, Any]) -> str:
    return f"{_number(row, 'low')} to {_number(row, 'high')}" if "low" in row else ""


def _described(row: Mapping[str, Any], without: Collection[str] = ()) -> Iterator[str]:
    """One text for each field that describes a row."""
    for name, value in row.items():
        if name not in _FIGURE and name not in without:
            shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            yield f"{name.replace('_', ' ')} {shown}"


def _number(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if row["metric"] in _SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


LINE_EVERY = 30.0  # seconds between printed lines where there is no terminal to redraw

_SHOWN = {  # a run's figures, in this order
    "loss": "loss {:.4g}",
    "eval_loss": "held-out loss {:.4g}",
    "eval_exact_match": "held-out exact match {:.1%}",
    "learning_rate": "learning rate {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def _shown(figures: "Figures") -> str:
    """The latest figures as text."""
    return ", ".join(text.format(figures[name]) for name, text in _SHOWN.items() if name in figures)


def _time_left(steps: int, seconds: float, remaining: int) -> str:
    """The minutes that the remaining steps take if they are as fast as those before; empty while nothing is known."""
    if steps == 0 or remaining == 0:
        return ""
    return f", {math.ceil(seconds / steps * remaining / 60):,} min left"


@contextmanager
def progress_bar(verb: str) -> "Iterator[Progress]":
    """Show progress, the time that is left, and the latest figures on standard error.

    A terminal gets a bar. Elsewhere a line is printed at the first figures, every half minute, and at the end. If
    several processes train one model, only the first shows anything.
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
            yield Text(self.figures)

    console = Console(stderr=True)
    printed = time.monotonic()
    has_figures = False
    first_step: int | None = None  # a run that resumes does not begin with 1
    started = 0.0

    def print_line(done: int, total: int, figures: "Figures") -> None:
        nonlocal printed, has_figures, first_step, started
        now = time.monotonic()
        if first_step is None:
            first_step = done
            started = now
        has_first_figures = bool(figures) and not has_figures
        if has_first_figures or done == total or now - printed > LINE_EVERY:
            printed = now
            has_figures = bool(figures)
            shown = f": {_shown(figures)}" if figures else ""
            left = _time_left(done - first_step, now - started, total - done)
            print(f"{verb} {done:,}/{total:,}{left}{shown}", file=sys.stderr, flush=True)

    if not is_first_process():
        yield lambda done, total, figures: None
    elif not console.is_terminal:
        yield print_line
    else:
        columns = (
            TextColumn(verb),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task(verb, total=None)

            def redraw(done: int, total: int, figures: "Figures") -> None:
                bar.figures = _shown(figures)
                bar.update(task, completed=done, total=total)

            yield redraw
