"""The application, the options that several verbs have, and how results and progress are written."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatokens.errors import UserError
from metatokens.files import append_lines
from metatokens.machine import is_first_process

if TYPE_CHECKING:
    from metatokens.records import Record
    from metatokens.training.trainer import Progress

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Language models with learned meta-tokens: train, evaluate, report.",
)


def _fetched(model: Path) -> Path:
    from metatokens.model.checkpoint import fetch_model

    return fetch_model(model)


def named(*names: str, what: str = "{}.") -> dict[str, Any]:
    """The help and the shell's completion of an option that takes one of these names.

    Args:
        names: the names.
        what: the help, with a place for them.
    """
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    return {"help": what.format(listed), "autocompletion": lambda: list(names)}


TASKS = ("list_recall", "segment_counting", "parity", "copying")
RECIPES = (
    "demo",
    "small",
    "paper",
    "demo_finetune",
    "small_finetune",
    "paper_finetune",
    "small_extend",
    "paper_extend",
)
Out = Annotated[Path, typer.Option("--out", help="Output folder.")]
ResultFile = Annotated[Path | None, typer.Option("--out", help="Append JSON lines to this file instead of printing.")]
Model = Annotated[
    Path,
    typer.Option("--model", callback=_fetched, help="Folder of a model and its tokenizer, or hf:NAME from the Hub."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder holds.")]
Corpus = Annotated[
    str, typer.Option("--corpus", help="builtin, a file or glob (.txt, .jsonl, .gz, .parquet), or hf:NAME:CONFIG.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too, in place of a table.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")]
Lengths = Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")]


def say(text: str) -> None:
    """Print a line to standard error; of processes that train one model together, the first one does."""
    if is_first_process():
        print(text, file=sys.stderr)


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
    """Whether somebody reads standard output, and has not asked for JSON."""
    return sys.stdout.isatty() and not as_json


def write_records(records: "Iterable[Record]", out: Path | None, *, as_json: bool = True) -> None:
    """Write records, measured figures with versions and time, as JSON lines: see `write_lines`; on a terminal a table.

    Args:
        records: what was measured.
        out: a file to append to, in place of standard output.
        as_json: whether a terminal gets JSON lines too.
    """
    from metatokens.records import append_records, stamped

    if out is not None:
        append_records(out, stamped(records))
    elif shows_tables(as_json):
        print_table([record.model_dump(exclude_defaults=True) for record in records])
    else:
        write_lines((record.line() for record in stamped(records)), None)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table; what all of them say stands above it, once.

    A figure (`value`, with `low` and `high`) stands with its 95 % interval, one of an accuracy in percent.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    hidden = {"value", "low", "high", "quantiles", "versions", "created"}
    names = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in hidden]
    of_row = {"metric", "n", "chance"} if len(rows) == 1 else set()
    same = [name for name in names if name not in of_row and len({str(row.get(name)) for row in rows}) == 1]
    if same:
        console.print(
            ", ".join(f"{name.replace('_', ' ')} {rows[0][name]}" for name in same), style="dim", markup=False
        )
    shown = [name for name in names if name not in same]
    figures = ["value"] if any("value" in row for row in rows) else []
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (*shown, *figures):
        is_number = name == "value" or all(isinstance(row.get(name, 0), int | float) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        cells = [Text("" if (value := row.get(name)) is None else str(value)) for name in shown]
        table.add_row(*cells, *(Text(_figure(row)) for _ in figures))
    console.print(table)


def _figure(row: Mapping[str, Any]) -> str:
    if row.get("value") is None:
        return "cannot be run"
    is_share = row.get("metric") in ("exact_match", "token_accuracy")
    ends = [
        f"{100 * row[end]:.1f}" if is_share else f"{row[end]:,.4g}" for end in ("value", "low", "high") if end in row
    ]
    interval = f" ({ends[1]} to {ends[2]})" if len(ends) == 3 else ""
    return f"{ends[0]}{' %' if is_share else ''}{interval}"


def check_results_file(out: Path | None) -> None:
    """Refuse a file that cannot be appended to before anything is measured."""
    if out is not None:
        is_new = not out.exists()
        write_records((), out)
        if is_new:
            out.unlink()


def parse_lengths(text: str) -> list[int]:
    """Lengths separated by commas.

    Raises:
        UserError: if that is not what the text is.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f"lengths {text!r} must be positive numbers separated by commas, such as 128,256.")
    return lengths


LINE_EVERY = 30.0  # seconds between the lines that are printed where there is no terminal to redraw

_SHOWN = {  # a run's figures, in this order
    "loss": "loss {:.4g}",
    "eval_loss": "held-out loss {:.4g}",
    "eval_exact_match": "held-out exact match {:.1%}",
    "learning_rate": "learning rate {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(text.format(figures[name]) for name, text in _SHOWN.items() if name in figures)


class _Lines:
    """Progress where no terminal is: a line at the first loss, every half a minute, and at the end."""

    def __init__(self, verb: str):
        self._verb = verb
        self._last = -math.inf

    def __call__(self, done: int, total: int, figures: Mapping[str, float]) -> None:
        if figures and (time.monotonic() - self._last > LINE_EVERY or done == total):
            self._last = time.monotonic()
            print(f"{self._verb} {done:,}/{total:,}: {_shown(figures)}", file=sys.stderr, flush=True)


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

            def show(done: int, total: int, figures: Mapping[str, float]) -> None:
                bar.figures = _shown(figures)
                bar.update(task, completed=done, total=total)

            yield show
