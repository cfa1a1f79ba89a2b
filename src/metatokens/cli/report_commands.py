"""The command that runs everything in order, and those that draw and write up results."""

from pathlib import Path
from typing import Annotated

import typer

from metatokens.cli import options
from metatokens.cli.output import say
from metatokens.files import PNG, replace_same_kind


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
        bool, typer.Option("--dry-run", help="Print the remaining stages and their cost.")
    ] = False,
    executor: options.Executor = "processes",
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Stages at the same time; by default one per GPU or core (slurm: 64).",
        ),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Slurm setting such as slurm_partition=gpu; repeatable."
        ),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Run whole experiments, from text to report.

    Tokenize, pretrain, fine-tune, evaluate, analyze and report several models. An interrupted run resumes when the
    command is repeated.
    """
    from metatokens.paper.pools import job_settings
    from metatokens.paper.report.page import write_report
    from metatokens.paper.run import reproduce

    if dry_run:
        _print_stages(preset, out, only)
        return
    reproduce(
        preset,
        out,
        corpus=corpus,
        book=book,
        only=only,
        executor=executor,
        workers=workers,
        job=job_settings(job or ()),
        overwrite=overwrite,
        task_done=lambda: say(f"report so far: {write_report([out], out / 'report')}"),
    )
    say(f"report: {write_report([out], out / 'report', say)}")


def _print_stages(preset: str, out: Path, only: str | None) -> None:
    """Print the stages that a run has left, each with its estimated cost."""
    from metatokens.paper.run import unfinished

    stages = unfinished(preset, out, only=only)
    for stage in stages:
        print(f"{stage.cost / 60:6.1f} min  {stage.name}")
    hours = sum(stage.cost for stage in stages) / 3600
    say(
        f"{len(stages)} stages, an estimated {hours:.1f} core-hours (GPU-hours for models in bfloat16)"
    )


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="PNG file to draw.")] = Path(
        "curves.png"
    ),
) -> None:
    """Draw the learning curves of runs, finished or not."""
    from metatokens.looking.curves import draw_curves, read_curves
    from metatokens.looking.style import png

    replace_same_kind(out, png(draw_curves(read_curves(runs))), PNG)
    say(f"picture: {out}")


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE", help="Folders of runs, or files of results.")
    ],
    out: options.Out,
) -> None:
    """Write a page of tables and figures from result files."""
    from metatokens.paper.report.page import write_report

    say(f"report: {write_report(results, out, say)}")
