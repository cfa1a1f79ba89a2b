"""The command that runs everything in order, and the one that writes up results."""

from pathlib import Path
from typing import Annotated

import typer

from metatokens.cli import options
from metatokens.cli.output import say


def reproduce(
    preset: options.Preset,
    out: options.Out,
    corpus: Annotated[
        str | None,
        typer.Option(
            metavar="CORPUS", help=f"Text to train on instead of the preset's: {options.CORPUS}."
        ),
    ] = None,
    book: Annotated[
        str | None,
        typer.Option(
            metavar="CORPUS", help="Further text to measure perplexity on, named as --corpus is."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Run only the stages of this table or task, such as table7."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Print the remaining stages.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Stages at the same time; by default one per GPU or core."
        ),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Run whole experiments, from text to report.

    Tokenize, pretrain, fine-tune, evaluate, analyze and report several models. An interrupted run resumes when the
    command is repeated.
    """
    from metatokens.paper.report.page import write_report
    from metatokens.paper.run import reproduce, unfinished

    if dry_run:
        for stage in unfinished(preset, out, only=only):
            print(stage.name)
        return
    reproduce(
        preset,
        out,
        corpus=corpus,
        book=book,
        only=only,
        workers=workers,
        overwrite=overwrite,
        task_done=lambda: say(f"report so far: {write_report([out], out / 'report')}"),
    )
    say(f"report: {write_report([out], out / 'report', say)}")


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE", help="Folders of runs, or files of results.")
    ],
    out: options.Out,
) -> None:
    """Write a page of tables and figures from result files."""
    from metatokens.paper.report.page import write_report

    say(f"report: {write_report(results, out, say)}")
