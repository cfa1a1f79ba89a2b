"""Verbs that make something: stores, models, reports, and everything in order."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from metatokens.cli.app import (
    RECIPES,
    TASKS,
    Corpus,
    Model,
    Out,
    Overwrite,
    Set,
    app,
    named,
    parse_lengths,
    progress_bar,
    say,
    write_records,
)
from metatokens.errors import UserError
from metatokens.machine import is_first_process


@app.command(rich_help_panel="Everything in order")
def reproduce(
    preset: Annotated[str, typer.Option(**named("smoke", "demo", "small", "gpu", "paper"))],
    out: Out,
    corpus: Annotated[str | None, typer.Option(help="In place of the preset's: see tokenize.")] = None,
    book: Annotated[str | None, typer.Option(help="A corpus spec that perplexity is measured on too.")] = None,
    only: Annotated[str | None, typer.Option(help="Only what answers this table or question, such as table7.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the stages and what they may cost.")] = False,
    executor: Annotated[
        str, typer.Option(**named("processes", "slurm", "local", what="{} (jobs as of slurm, here)."))
    ] = "processes",
    workers: Annotated[int | None, typer.Option(min=1, help="Stages at a time; default: one a GPU, or a core.")] = None,
    job: Annotated[list[str] | None, typer.Option(help="A cluster job's setting: slurm_partition=gpu.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Everything in order: tokenize, pretrain, fine-tune, evaluate, report. Resumes what was cut off."""
    from metatokens.experiment.pools import job_settings
    from metatokens.experiment.run import reproduce, unfinished
    from metatokens.report.page import write_report

    if dry_run:
        stages = unfinished(preset, out, table=only)
        for stage in stages:
            print(f"{stage.cost / 60:6.1f} min  {stage.name}")
        hours = sum(stage.cost for stage in stages) / 3600
        say(f"{len(stages)} stages, an estimated {hours:.1f} core-hours (GPU-hours for models in bfloat16)")
    else:
        reproduce(
            preset,
            out,
            corpus=corpus,
            book=book,
            table=only,
            executor=executor,
            workers=workers,
            job=job_settings(job or ()),
            overwrite=overwrite,
        )
        say(f"report: {write_report([out], out / 'report')}")


@app.command(rich_help_panel="Train")
def tokenize(
    corpus: Corpus,
    tokenizer: Annotated[str, typer.Option(help="gpt2, a folder, or train:N.")],
    out: Out,
    held_out: Annotated[float, typer.Option(min=0, max=0.5, help="Share of the documents that are held out.")] = 0.05,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores there are.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a corpus as a store of token ids, memory-mapped when read. Resumes what was cut off."""
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    texts = task_texts() if tokenizer.startswith("train:") else ()
    store = write_token_store(
        out, corpus, tokenizer, held_out=held_out, extra_texts=texts, overwrite=overwrite, workers=workers
    )
    for split, counts in store.manifest.splits.items():
        say(f"{split}: {counts.tokens:,} tokens in {counts.documents:,} documents")


PNG = b"\x89PNG"  # how such a file begins


def _finished(out: Path, further: str) -> str:
    return f"the run in {out} is finished; to train its model further, start a new one with `{further}`."


@app.command(rich_help_panel="Train")
def pretrain(
    recipe: Annotated[
        str,
        typer.Option(help="YAML file, or the name of a recipe of the package.", autocompletion=lambda: list(RECIPES)),
    ],
    out: Out,
    overrides: Set = None,
    init: Annotated[Path | None, typer.Option(help="Go on from this checkpoint, a GPT-2 included.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a language model on a token store. Resumes what was cut off."""
    from metatokens.recipe import PretrainRecipe, load_recipe
    from metatokens.training.pretrain import pretrain

    settings = load_recipe(PretrainRecipe, recipe, overrides or ())
    with progress_bar("pretrain") as progress:
        trained = pretrain(settings, out, init=init, overwrite=overwrite, progress=progress)
    if not trained:
        say(_finished(out, f"pretrain --init {out}"))
    say(f"model: {out}")


@app.command(rich_help_panel="Train")
def extend(
    model: Model,
    factor: Annotated[float, typer.Option(help="How many times longer the context becomes, such as 4.")],
    out: Out,
    recipe: Annotated[
        str,
        typer.Option(
            help="YAML file, or the name of a recipe, for more pretraining.", autocompletion=lambda: list(RECIPES)
        ),
    ],
    overrides: Set = None,
    original_length: Annotated[
        int | None, typer.Option(min=1, help="Positions that the model was trained on; default: its maximum.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Lengthen a rotary model's context with YaRN, and pretrain it further. Resumes what was cut off."""
    from metatokens.recipe import PretrainRecipe, load_recipe
    from metatokens.training.extend import extend

    settings = load_recipe(PretrainRecipe, recipe, overrides or ())
    with progress_bar("extend") as progress:
        trained = extend(
            model,
            out,
            factor=factor,
            recipe=settings,
            original_length=original_length,
            overwrite=overwrite,
            progress=progress,
        )
    if not trained:
        say(_finished(out, f"pretrain --init {out}"))
    say(f"model: {out}")


@app.command(rich_help_panel="Train")
def finetune(
    model: Model,
    out: Out,
    task: Annotated[str | None, typer.Option(**named(*TASKS))] = None,
    data: Annotated[Path | None, typer.Option(help="Your own records: JSON lines of prompt and completion.")] = None,
    train_lengths: Annotated[
        str | None, typer.Option(help="Prompt lengths of the phases, such as 128,256,512.")
    ] = None,
    eval_data: Annotated[Path | None, typer.Option(help="Held-out records, to measure the model on.")] = None,
    recipe: Annotated[
        str,
        typer.Option(help="YAML file, or the name of a recipe of the package.", autocompletion=lambda: list(RECIPES)),
    ] = "demo_finetune",
    overrides: Set = None,
    corpus: Corpus = "builtin",
    overwrite: Overwrite = False,
) -> None:
    """Fine-tune a model on a task, in phases of growing train length, or on your own records."""
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.accuracy import evaluate, held_out_probe
    from metatokens.model.checkpoint import load_model
    from metatokens.recipe import FinetuneRecipe, load_recipe
    from metatokens.tasks.curriculum import documents_for
    from metatokens.tasks.example import Example, read_examples
    from metatokens.training.finetune import Probing, finetune, training_of, unprobed

    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")
    if data is not None and train_lengths:
        say("--train-lengths is ignored: the records of --data are trained on as they are, whatever their length.")
    own = [f"task.train_lengths={parse_lengths(train_lengths)}"] if train_lengths else []
    settings = load_recipe(FinetuneRecipe, recipe, [*own, *(overrides or ())])
    texts = documents_for(task or "", corpus)
    probe: Probing = unprobed
    records: Sequence[Example] = ()
    if eval_data is not None:
        tokenizer = load_tokenizer(str(model))
        records = read_examples(eval_data, tokenizer)
        probe = partial(held_out_probe, records, tokenizer.eos_token_id)
    with progress_bar("finetune") as progress:
        trained = finetune(
            settings,
            model,
            out,
            task=task,
            data=data,
            documents=texts,
            overwrite=overwrite,
            progress=progress,
            probe=probe,
        )
    last = out / ("data" if task is None else str(settings.task.train_lengths[-1]))
    if not trained:
        say(_finished(out, f"finetune --model {last}"))
    say(f"models: {', '.join(str(path.parent) for path in sorted(out.glob('*/manifest.json')))}")
    if records and is_first_process():
        about = {"task": None, "condition": None, "name": str(last), **training_of(last)}
        write_records(evaluate(load_model(last), {None: records}, **about), None)


@app.command(rich_help_panel="Look")
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not.")],
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("curves.png"),
) -> None:
    """Draw the losses of runs, and what was measured in between, against their steps."""
    from metatokens.files import write_whole
    from metatokens.report.figures.curves import draw_curves, read_curves
    from metatokens.report.figures.style import png

    picture = png(draw_curves(read_curves(runs)))
    try:
        if out.exists() and not out.read_bytes().startswith(PNG):
            raise UserError(f"{out} is no picture, and is kept; give another file.")
        write_whole(out, picture)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}.") from error
    say(f"picture: {out}")


@app.command(rich_help_panel="Look")
def report(
    results: Annotated[list[Path], typer.Argument(help="Run folders or files of result lines.")],
    out: Out,
) -> None:
    """Draw tables, figures and the page from result files alone."""
    from metatokens.report.page import write_report

    say(f"report: {write_report(results, out)}")
