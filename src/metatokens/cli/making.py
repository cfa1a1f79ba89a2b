"""Commands that make something: token stores, models, reports, and all of it in order."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from metatokens import recipe as recipes
from metatokens.cli import options
from metatokens.cli.output import progress_bar, say, write_figures
from metatokens.errors import UserError
from metatokens.files import PNG, replace_own
from metatokens.machine import is_first_process

LARGE = 100_000_000  # bytes of weights; larger models are assumed to be pretrained elsewhere
BATCH_SIZE, WINDOW = "training.per_device_train_batch_size", "training.text_window"


def reproduce(
    preset: options.Preset,
    out: options.Out,
    corpus: Annotated[
        str | None, typer.Option(metavar="CORPUS", help=f"Text to train on instead of the preset's: {options.CORPUS}.")
    ] = None,
    book: Annotated[
        str | None, typer.Option(metavar="CORPUS", help="Further text to measure perplexity on, named as --corpus is.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run only the stages of this table or task, such as table7.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the remaining stages and their cost.")] = False,
    executor: options.Executor = "processes",
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Stages at the same time; by default one per GPU or core (slurm: 64)."),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Slurm setting such as slurm_partition=gpu; repeatable."),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Run whole experiments, from text to report.

    Tokenize, pretrain, fine-tune, evaluate, analyze and report several models. An interrupted run resumes when the
    command is repeated.
    """
    from metatokens.paper.pools import job_settings
    from metatokens.paper.report.page import write_report
    from metatokens.paper.run import reproduce, unfinished

    if dry_run:
        stages = unfinished(preset, out, only=only)
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
            only=only,
            executor=executor,
            workers=workers,
            job=job_settings(job or ()),
            overwrite=overwrite,
            task_done=lambda: say(f"report so far: {write_report([out], out / 'report')}"),
        )
        say(f"report: {write_report([out], out / 'report', say)}")


def tokenize(
    corpus: Annotated[str, typer.Option(metavar="CORPUS", help=f"The text: {options.CORPUS}.")],
    tokenizer: Annotated[str, typer.Option(metavar="TOKENIZER", help=f"{options.TOKENIZER}.")],
    out: options.Out,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=0.5, help="Share of the documents to keep out of training.")
    ] = 0.05,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes; by default one per core.")] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Turn text into token ids on disk, for pretrain.

    An interrupted run resumes when the command is repeated.
    """
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    texts = task_texts() if tokenizer.startswith("train:") else ()
    store = write_token_store(
        out, corpus, tokenizer, held_out=held_out, extra_texts=texts, overwrite=overwrite, workers=workers
    )
    for split, counts in store.manifest.splits.items():
        say(f"{split}: {counts.tokens:,} tokens in {counts.documents:,} documents")
    if not store.manifest.splits["held_out"].documents:
        say("Nothing is held out, since the corpus has only one document; give more files, or a longer one.")


def _settings(
    kind: type[recipes.Recipe],
    recipe: str,
    overrides: Sequence[str] | None,
    device: str | None,
    dtype: str | None,
    own: Mapping[str, Any],
) -> recipes.Recipe:
    """A recipe, changed by the options for single settings, then by --set."""
    from metatokens.checkpoint import check_placing

    check_placing(device, dtype)
    placing = {
        "training.use_cpu": None if device is None else device == "cpu",
        "training.bf16": None if dtype is None else dtype == "bfloat16",
    }
    given: list[str] = [f"{key}={json.dumps(value)}" for key, value in {**placing, **own}.items() if value is not None]
    return recipes.load_recipe(kind, recipe, [*given, *(overrides or ())])


def _rank(lora: str | None) -> int | None:
    if lora is not None and not re.fullmatch("rank=[1-9][0-9]{0,3}", lora):
        raise UserError(f"--lora {lora!r} must be rank=N, such as rank=16.")
    return None if lora is None else int(lora.removeprefix("rank="))


def _say_finished(out: Path, further: str) -> None:
    say(f"the run in {out} is finished; to train its model further, start a new run with `{further}`.")


def pretrain(
    recipe: options.PretrainRecipe,
    out: options.Out,
    overrides: options.Set = None,
    init: Annotated[
        Path | None,
        typer.Option(metavar="DIR|hf:NAME", callback=options.fetched, help="Model to start from, also a plain GPT-2."),
    ] = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    lora: options.Lora = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Train a language model on token ids.

    An interrupted run resumes when the command is repeated.
    """
    from metatokens.training.pretrain import pretrain

    own = {"data.placement": landmarks, "training.lora_rank": _rank(lora), BATCH_SIZE: batch_size, WINDOW: text_window}
    settings = _settings(recipes.PretrainRecipe, recipe, overrides, device, dtype, own)
    with progress_bar("pretrain") as progress:
        trained = pretrain(settings, out, init=init, overwrite=overwrite, progress=progress)
    if not trained:
        _say_finished(out, f"pretrain --init {out}")
    say(f"model: {out}")


def extend(
    model: options.Model,
    factor: Annotated[float, typer.Option(metavar="F", help="Factor by which the context grows, such as 4.")],
    out: options.Out,
    recipe: options.PretrainRecipe,
    overrides: options.Set = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    original_length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Length that the model was trained on; by default its maximum."),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Lengthen the context of a model, and pretrain it further.

    The method is YaRN, for models with rotary positions. An interrupted run resumes when the command is repeated.
    """
    from metatokens.training.extend import extend

    own = {"data.placement": landmarks, BATCH_SIZE: batch_size, WINDOW: text_window}
    settings = _settings(recipes.PretrainRecipe, recipe, overrides, device, dtype, own)
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
        _say_finished(out, f"pretrain --init {out}")
    say(f"model: {out}")


def finetune(
    model: options.Model,
    out: options.Out,
    task: options.TaskOrData = None,
    data: options.Data = None,
    train_lengths: Annotated[
        str | None,
        typer.Option(metavar=options.SEVERAL, help="Prompt lengths, one phase each; by default the recipe's."),
    ] = None,
    eval_data: Annotated[Path | None, typer.Option(metavar="FILE", help="Held-out records to evaluate on.")] = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    recipe: options.FinetuneRecipe = None,
    overrides: options.Set = None,
    lora: options.Lora = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="With --lora, write the adapters alone, as PEFT does.")
    ] = False,
    corpus: options.TaskCorpus = "builtin",
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Fine-tune a model on a task or on your own records.

    A task has one phase per train length, and each phase writes a model. An interrupted run resumes when the command
    is repeated.
    """
    from metatokens.checkpoint import load_model, weights_size
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.accuracy import evaluate
    from metatokens.records import About
    from metatokens.tasks.curriculum import documents_for
    from metatokens.tasks.example import Example, read_examples
    from metatokens.training.finetune import Probing, finetune
    from metatokens.training.probe import held_out_probe
    from metatokens.training.run_folder import training_of

    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")
    if data is not None and train_lengths:
        say("--train-lengths is ignored: the records of --data are used whatever their length.")
    own = {
        "task.train_lengths": options.parse_lengths(train_lengths) if train_lengths else None,
        "task.landmarks": landmarks,
        "training.keep_adapter": keep_adapter or None,
        "training.lora_rank": _rank(lora),
        BATCH_SIZE: batch_size,
        WINDOW: text_window,
    }
    if recipe is None:
        recipe = "pretrained_finetune" if weights_size(model) >= LARGE else "demo_finetune"
        if recipe == "pretrained_finetune":
            say(f"recipe: {recipe}, for weights of {LARGE / 1e6:.0f} MB or more; --recipe chooses another")
    settings = _settings(recipes.FinetuneRecipe, recipe, overrides, device, dtype, own)
    probe: Probing | None = None
    records: Sequence[Example] = ()
    if eval_data is not None:
        tokenizer = load_tokenizer(str(model))
        records = read_examples(eval_data, tokenizer, landmarks=settings.task.landmarks)
        probe = partial(held_out_probe, records, tokenizer.eos_token_id)
    with progress_bar("finetune") as progress:
        trained = finetune(
            settings,
            model,
            out,
            task=task,
            data=data,
            documents=documents_for(task or "", corpus),
            inputs=[eval_data],
            overwrite=overwrite,
            progress=progress,
            probe=probe,
        )
    last = out / ("data" if task is None else str(settings.task.train_lengths[-1]))
    if not trained:
        _say_finished(out, f"finetune --model {last}")
    say(f"models: {', '.join(str(path.parent) for path in sorted(out.glob('*/manifest.json')))}")
    if records and is_first_process():
        about = About(model=str(last), condition=settings.task.landmarks, **training_of(last))
        write_figures(evaluate(load_model(last, device=device), {None: records}, about), None, as_json=as_json)


def retrofit(
    model: Annotated[
        Path, typer.Option(metavar="DIR|hf:NAME", help="The base: a folder, a GGUF file, or hf:NAME from the Hub.")
    ],
    out: options.Out,
    heads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Heads of meta-attention per block.")] = 8,
    head_size: Annotated[int, typer.Option(metavar="N", min=2, max=1024, help="Width of a head, an even number.")] = 64,
    layers: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Blocks with meta-attention, from 0, or none; by default all."),
    ] = None,
    delta: Annotated[bool, typer.Option("--delta", help="Write only the added weights, not the base.")] = False,
    dtype: options.Dtype = None,
) -> None:
    """Give a pretrained model meta-tokens and meta-attention.

    It works for most decoders in transformers. Until you train the base, its logits for plain text do not change.
    """
    from metatokens.checkpoint import load_base_and_tokenizer, save_model
    from metatokens.retrofit.injection import add_meta_attention

    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; give another one.")
    base: Any
    base, tokenizer = load_base_and_tokenizer(model, dtype)
    chosen = [] if layers == "none" else options.parse_layers(layers)
    add_meta_attention(base, tokenizer, heads=heads, head_size=head_size, layers=chosen)
    out.mkdir(parents=True, exist_ok=True)
    base.base_is_elsewhere = delta
    save_model(base, tokenizer, out)
    new = sum(weight.numel() for weight in base.parameters() if weight.requires_grad)
    say(f"model: {out} ({new:,} new parameters next to {base.num_parameters() - new:,})")
    say("The meta-token is untrained: until you train it, the model predicts text among meta-tokens worse.")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="PNG file to draw.")] = Path("curves.png"),
) -> None:
    """Draw the learning curves of runs, finished or not."""
    from metatokens.looking.curves import draw_curves, read_curves
    from metatokens.looking.style import png

    replace_own(out, png(draw_curves(read_curves(runs))), PNG)
    say(f"picture: {out}")


def report(
    results: Annotated[list[Path], typer.Argument(metavar="DIR|FILE", help="Folders of runs, or files of results.")],
    out: options.Out,
) -> None:
    """Write a page of tables and figures from result files."""
    from metatokens.paper.report.page import write_report

    say(f"report: {write_report(results, out, say)}")
