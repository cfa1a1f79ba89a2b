"""The command that makes the cache of a pretrained model smaller."""

from pathlib import Path
from typing import Annotated

import typer

from metatokens.cli import options
from metatokens.cli.output import progress_bar, say
from metatokens.errors import UserError
from metatokens.recipe import ShrinkRecipe, load_recipe


def shrink(
    model: Annotated[
        Path,
        typer.Option(metavar="DIR|hf:NAME", help="The model: a folder, or hf:NAME of the Hub."),
    ],
    text: Annotated[
        list[str],
        typer.Option(metavar="CORPUS", help=f"Your text, repeatable: {options.CORPUS}."),
    ],
    out: options.Out,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Of keys and values, such as 1/8 or 0.125; default 1/8."
        ),
    ] = None,
    full_layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Blocks that keep all text, from 0; by default chosen by measuring.",
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Your own questions to train on: {options.RECORDS}."),
    ] = None,
    forms: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A YAML file with further forms of look-ups."),
    ] = None,
    landmarks: options.Landmarks = None,
    controls: Annotated[
        bool,
        typer.Option(
            help="Also train the full cache, and a window alone, to compare with: three times the time."
        ),
    ] = True,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="FILE|NAME", help="The settings; by default shrink.")
    ] = "shrink",
    overrides: options.Set = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Make the cache of a pretrained model smaller.

    Some blocks keep all text, the others forget it. The command chooses these blocks by measuring, trains the model on
    prose and look-ups made from your text, tests it on held-out text, and writes a page. An interrupted run resumes
    when the command is repeated.
    """
    from metatokens.shrink.shrinking import PAGE, shrink

    changes = list(overrides or ())
    if keep is not None:
        changes.append(f"cache.keep={_share(keep)}")
    if full_layers is not None:
        layers = options.parse_numbers("full-layers", full_layers, smallest=0)
        changes.append(f"cache.full_layers={layers}")
    if landmarks is not None:
        changes.append(f"cache.landmarks={landmarks}")
    settings = load_recipe(ShrinkRecipe, recipe, changes)
    findings = shrink(
        settings,
        model,
        text,
        out,
        forms=forms,
        questions=questions,
        controls=controls,
        overwrite=overwrite,
        watch=progress_bar,
    )
    say(findings.summary)
    say(f"model: {out / 'model'}")
    say(f"page: {out / PAGE}")


def _share(keep: str) -> float:
    """A share, given as a fraction or a decimal number."""
    numerator, slash, denominator = keep.partition("/")
    try:
        return float(numerator) / float(denominator) if slash else float(keep)
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"--keep {keep!r} is no share: give one such as 1/8 or 0.125.") from error
