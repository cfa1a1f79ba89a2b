"""Verbs that make something: stores, models, reports, and everything in order."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from metatokens.cli.options import (
    CORPUS,
    RECORDS,
    SEVERAL,
    TOKENIZER,
    AsJson,
    BatchSize,
    Device,
    Dtype,
    FinetuneRecipe,
    Landmarks,
    Lora,
    Model,
    Out,
    Overwrite,
    PretrainRecipe,
    Set,
    TaskCorpus,
    TaskOrData,
    choice,
    fetched,
    parse_lengths,
)
from metatokens.cli.output import PNG, progress_bar, say, write_figures, write_own
from metatokens.errors import UserError
from metatokens.machine import is_first_process

LARGE = 100_000_000  # bytes of weights from which a model is taken for one that was pretrained elsewhere
PRESETS = ("smoke", "demo", "small", "gpu", "paper")
EXECUTORS = ("processes", "slurm", "local")


def reproduce(
    preset: Annotated[str, typer.Option(metavar="NAME", **choice("Size of the experiments", *PRESETS))],
    out: Out,
    corpus: Annotated[
        str | None, typer.Option(metavar="CORPUS", help=f"Text to train on, in place of the preset's: {CORPUS}.")
    ] = None,
    book: Annotated[
        str | None, typer.Option(metavar="CORPUS", help="Text that perplexity is measured on too, named likewise.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run only what this table or task needs, such as table7.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the stages and their estimated cost.")] = False,
    executor: Annotated[
        str,
        typer.Option(metavar="NAME", **choice("Where stages run; local runs Slurm's jobs on this machine", *EXECUTORS)),
    ] = "processes",
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stages at a time; by default one a GPU, or a core.")
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Setting of a cluster's job, such as slurm_partition=gpu; may be repeated."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Run whole experiments, from text to report.

    Tokenize, pretrain, finetune, evaluate, analyze and report, for several models.
    The same command goes on where it was cut off.
    """
    from metatokens.paper.pools import job_settings
    from metatokens.paper.report.page import write_report
    from metatokens.paper.run import reproduce, unfinished

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
        say(f"report: {write_report([out], out / 'report', say)}")


def tokenize(
    corpus: Annotated[str, typer.Option(metavar="CORPUS", help=f"The text: {CORPUS}.")],
    tokenizer: Annotated[str, typer.Option(metavar="TOKENIZER", help=f"{TOKENIZER}.")],
    out: Out,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=0.5, help="Documents that no training reads, as a share.")
    ] = 0.05,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes; by default one a core.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn text into token ids on disk, which pretrain reads.

    The same command goes on where it was cut off.
    """
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    texts = task_texts() if tokenizer.startswith("train:") else ()
    store = write_token_store(
        out, corpus, tokenizer, held_out=held_out, extra_texts=texts, overwrite=overwrite, workers=workers
    )
    for split, counts in store.manifest.splits.items():
        say(f"{split}: {counts.tokens:,} tokens in {counts.documents:,} documents")


def _finished(out: Path, further: str) -> str:
    return f"the run in {out} is finished; to train its model further, start a new one with `{further}`."


def _lora(given: str | None) -> list[str]:
    """What `--lora` sets in a recipe, as overrides."""
    if given is not None and not re.fullmatch("rank=[1-9][0-9]{0,3}", given):
        raise UserError(f"--lora {given!r} must be rank=N, such as rank=16.")
    return [] if given is None else [f"training.lora_{given}"]


def _landmarks(key: str, given: str | None) -> list[str]:
    """What `--landmarks` sets in a recipe, as overrides."""
    return [] if given is None else [f"{key}={json.dumps(given)}"]


def _placing(device: str | None, dtype: str | None, batch_size: int | None) -> list[str]:
    """What `--device`, `--dtype` and `--batch-size` set in a recipe, as overrides.

    Raises:
        UserError: if there is no such device, or no such type.
    """
    from metatokens.checkpoint import check_placing

    check_placing(device, dtype)
    overrides = [] if device is None else [f"training.use_cpu={device == 'cpu'}"]
    overrides += [] if dtype is None else [f"training.bf16={dtype == 'bfloat16'}"]
    return overrides + ([] if batch_size is None else [f"training.per_device_train_batch_size={batch_size}"])


def pretrain(
    recipe: PretrainRecipe,
    out: Out,
    overrides: Set = None,
    init: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|hf:NAME",
            callback=fetched,
            help="Model to start from, which may be a GPT-2: a folder, or hf:NAME from the Hub.",
        ),
    ] = None,
    landmarks: Landmarks = None,
    lora: Lora = None,
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a language model on the token ids of a text.

    The same command goes on where it was cut off.
    """
    from metatokens.recipe import PretrainRecipe, load_recipe
    from metatokens.training.pretrain import pretrain

    own = [*_landmarks("data.placement", landmarks), *_lora(lora)]
    own += _placing(device, dtype, batch_size)
    settings = load_recipe(PretrainRecipe, recipe, [*own, *(overrides or ())])
    with progress_bar("pretrain") as progress:
        trained = pretrain(settings, out, init=init, overwrite=overwrite, progress=progress)
    if not trained:
        say(_finished(out, f"pretrain --init {out}"))
    say(f"model: {out}")


def extend(
    model: Model,
    factor: Annotated[float, typer.Option(metavar="F", help="How many times longer the context becomes, such as 4.")],
    out: Out,
    recipe: PretrainRecipe,
    overrides: Set = None,
    landmarks: Landmarks = None,
    original_length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Length that the model was trained at; by default its maximum."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Lengthen the context of a model, and pretrain it further.

    The method is YaRN, for models with rotary positions.
    The same command goes on where it was cut off.
    """
    from metatokens.recipe import PretrainRecipe, load_recipe
    from metatokens.training.extend import extend

    own = [*_landmarks("data.placement", landmarks), *_placing(device, dtype, batch_size)]
    settings = load_recipe(PretrainRecipe, recipe, [*own, *(overrides or ())])
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


def finetune(
    model: Model,
    out: Out,
    task: TaskOrData = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Your records to train on: {RECORDS}.")] = None,
    train_lengths: Annotated[
        str | None,
        typer.Option(metavar=SEVERAL, help="Prompt lengths in tokens, one phase each; by default the recipe's."),
    ] = None,
    eval_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held-out records to measure the model on.")
    ] = None,
    landmarks: Landmarks = None,
    recipe: FinetuneRecipe = None,
    overrides: Set = None,
    lora: Lora = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="With --lora, write the adapters, as PEFT does, in place of a model.")
    ] = False,
    corpus: TaskCorpus = "builtin",
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on a task or on your own records.

    On a task there is a phase for each train length, which leaves a model.
    The same command goes on where it was cut off.
    """
    from metatokens.checkpoint import load_model, weights_size
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.accuracy import evaluate
    from metatokens.recipe import FinetuneRecipe, load_recipe
    from metatokens.records import About
    from metatokens.tasks.curriculum import documents_for
    from metatokens.tasks.example import Example, read_examples
    from metatokens.training.finetune import Probing, finetune
    from metatokens.training.probe import held_out_probe
    from metatokens.training.run_folder import training_of

    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")
    if data is not None and train_lengths:
        say("--train-lengths is ignored: the records of --data are trained on as they are, whatever their length.")
    own = [f"task.train_lengths={parse_lengths(train_lengths)}"] if train_lengths else []
    own += ["training.keep_adapter=true"] if keep_adapter else []
    own += [*_landmarks("task.landmarks", landmarks), *_lora(lora), *_placing(device, dtype, batch_size)]
    if recipe is None:
        recipe = "pretrained_finetune" if weights_size(model) >= LARGE else "demo_finetune"
        if recipe == "pretrained_finetune":
            say(f"recipe: {recipe}, since the weights take {LARGE / 1e6:.0f} MB or more; --recipe names another")
    settings = load_recipe(FinetuneRecipe, recipe, [*own, *(overrides or ())])
    texts = documents_for(task or "", corpus)
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
        about = About(model=str(last), condition=settings.task.landmarks, **training_of(last))
        write_figures(evaluate(load_model(last, device=device), {None: records}, about), None, as_json=as_json)


def retrofit(
    model: Annotated[
        Path,
        typer.Option(
            "--model", metavar="DIR|hf:NAME", help="The base: a folder, a GGUF file, or hf:NAME from the Hub."
        ),
    ],
    out: Out,
    heads: Annotated[int, typer.Option(metavar="N", min=1, help="Heads of meta-attention in each block.")] = 8,
    head_size: Annotated[int, typer.Option(metavar="N", min=2, help="Width of one head, even.")] = 64,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Blocks that get meta-attention, from 0; by default all; none: meta-tokens alone."
        ),
    ] = None,
    delta: Annotated[
        bool, typer.Option("--delta", help="Write what is added alone; the model is read from where it is.")
    ] = False,
    dtype: Dtype = None,
) -> None:
    """Give a pretrained model meta-tokens and meta-attention.

    Most decoders of transformers; until the base is trained, its logits of text stay the same.
    """
    from metatokens.checkpoint import check_placing, fetch_model, gguf_file, load_base, save_model
    from metatokens.data.tokenizer import load_plain_tokenizer
    from metatokens.retrofit.surgery import add_meta_attention

    check_placing(None, dtype)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give another folder.")
    folder = fetch_model(model)
    if not folder.exists():
        raise UserError(f"there is no folder {folder}; a model of the Hub is hf:NAME.")
    file, complaint = gguf_file(folder), f"the folder {folder} holds no tokenizer that can be loaded."
    tokenizer = load_plain_tokenizer(
        str(folder if file is None else file.parent), complaint, **({} if file is None else {"gguf_file": file.name})
    )
    base: Any = load_base(folder, dtype)
    # What is added may be read from elsewhere, or on another machine.
    base.config.name_or_path = str(folder.absolute()) if folder == model else model.as_posix().removeprefix("hf:")
    chosen = None if layers is None else [] if layers == "none" else parse_lengths(layers, least=0, name="layers")
    add_meta_attention(base, tokenizer, heads=heads, head_size=head_size, layers=chosen)
    out.mkdir(parents=True, exist_ok=True)
    base.base_is_elsewhere = delta
    save_model(base, tokenizer, out)
    new = sum(weight.numel() for weight in base.parameters() if weight.requires_grad)
    say(f"model: {out} ({new:,} new parameters next to {base.num_parameters() - new:,})")
    say("The meta-token is untrained: the model predicts text among meta-tokens worse until you train it.")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="PNG file to draw into.")] = Path("curves.png"),
) -> None:
    """Draw the learning curves of runs, finished or not."""
    from metatokens.looking.curves import draw_curves, read_curves
    from metatokens.looking.style import png

    write_own(out, png(draw_curves(read_curves(runs))), PNG)
    say(f"picture: {out}")


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE", help="Folders of experiments, or files of result lines.")
    ],
    out: Out,
) -> None:
    """Write a page of tables and figures from result files."""
    from metatokens.paper.report.page import write_report

    say(f"report: {write_report(results, out, say)}")
