"""The command that makes the cache of a pretrained model smaller."""

import re
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
            metavar="SHARE",
            help="The share of the keys and values of a text of 4,096 tokens to keep, such as 1/8 or 0.125; by "
            "default 1/8.",
        ),
    ] = None,
    full_heads: Annotated[
        str | None,
        typer.Option(
            metavar="B.H,...",
            help="Key-value heads that keep all text, such as 18.2 for head 2 of block 18, both from 0; by default "
            "chosen by measuring.",
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
            help="Also train the full cache, and a window alone, to compare with. The command then takes about twice "
            "as long."
        ),
    ] = True,
    recipe: options.ShrinkRecipe = "shrink",
    overrides: options.Set = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Make the cache of a pretrained model smaller.

    Some key-value heads keep all text, the others forget it. The command chooses them by measuring, trains the model on
    prose and look-ups made from your text, tests it on held-out text, and writes a page. An interrupted run resumes
    when the command is repeated.
    """
    from metatokens.shrink.shrinking import PAGE, shrink

    changes = list(overrides or ())
    if keep is not None:
        changes.append(f"cache.keep={_share(keep)}")
    if full_heads is not None:
        changes.append(f"cache.full_heads={_heads(full_heads)}")
    if landmarks is not None:
        changes.append(f"cache.landmarks={landmarks}")
    settings = load_recipe(ShrinkRecipe, recipe, changes)
    if keep is not None and settings.cache.window is not None:
        raise UserError("--keep and cache.window both say how much a cache keeps: leave one out.")
    options.check_overwriting(out, recipe, overwrite=overwrite)
    findings = shrink(
        settings,
        model,
        text,
        out,
        forms=forms,
        questions=questions,
        controls=controls,
        overwrite=overwrite,
        tell=say,
        watch=progress_bar,
    )
    say(findings.chosen)
    say(findings.summary)
    say(f"model: {out / 'model'}")
    say(f"page: {out / PAGE}")


def _heads(names: str) -> list[list[int]]:
    """Heads, each given as its block and its number there."""
    if not re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", names, re.ASCII):
        raise UserError(f"--full-heads {names!r} names no heads: give some such as 18.2,23.0.")
    return sorted([int(number) for number in name.split(".")] for name in names.split(","))


def _share(keep: str) -> float:
    """A share, given as a fraction or a decimal number."""
    numerator, slash, denominator = keep.partition("/")
    try:
        return float(numerator) / float(denominator) if slash else float(keep)
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"--keep {keep!r} is no share: give one such as 1/8 or 0.125.") from error
