"""The commands that make token stores and models."""

import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from metatokens.cli import options
from metatokens.cli.output import progress_bar, say
from metatokens.errors import UserError
from metatokens.files import PARTIAL
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe

LARGE = 100_000_000  # bytes of weights; larger models are assumed to be pretrained elsewhere


def tokenize(
    corpus: Annotated[str, typer.Option(metavar="CORPUS", help=f"The text: {options.CORPUS}.")],
    tokenizer: Annotated[str, typer.Option(metavar="TOKENIZER", help=f"{options.TOKENIZER}.")],
    out: options.Out,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; by default one per core.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Turn text into token ids on disk, for pretrain.

    An interrupted run resumes when the command is repeated.
    """
    from metatokens.data.store import MANIFEST
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    was_finished = (out / MANIFEST).exists() and not overwrite
    texts = task_texts() if tokenizer.startswith("train:") else ()
    store = write_token_store(
        out,
        corpus,
        tokenizer,
        extra_texts=texts,
        overwrite=overwrite,
        workers=workers,
    )
    if was_finished:
        say(f"{out} was finished earlier: the corpus is not read again without --overwrite.")
    for split, counts in store.manifest.splits.items():
        say(f"{split}: {counts.tokens:,} tokens in {counts.documents:,} documents")
    if not store.manifest.splits["held_out"].documents:
        say(
            "Nothing is held out, since the corpus has only one document; give more files, or a longer one."
        )


def pretrain(
    recipe: options.PretrainRecipe,
    out: options.Out,
    overrides: options.Set = None,
    init: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|hf:NAME",
            callback=options.fetched,
            help="Model to start from, in place of a new one.",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Train a language model on token ids.

    An interrupted run resumes when the command is repeated.
    """
    from metatokens.training.pretrain import pretrain

    settings = load_recipe(PretrainRecipe, recipe, overrides or ())
    if init is not None and any(override.startswith("model.") for override in overrides or ()):
        say("--set model.* changes nothing: the model of --init stays as it is.")
    options.check_overwriting(out, recipe, overwrite=overwrite)
    with progress_bar("pretrain") as progress:
        is_trained = pretrain(settings, out, init=init, overwrite=overwrite, progress=progress)
    _say_trained(out, is_trained)


def extend(
    model: options.Model,
    factor: Annotated[
        float, typer.Option(metavar="F", help="Factor by which the context grows, such as 4.")
    ],
    out: options.Out,
    recipe: options.PretrainRecipe,
    overrides: options.Set = None,
    original_length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Length that the model was trained on; by default its maximum.",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Lengthen the context of a model, and pretrain it further.

    The method is YaRN, for models with rotary positions. An interrupted run resumes when the command is repeated.
    """
    from metatokens.training.extend import extend

    settings = load_recipe(PretrainRecipe, recipe, overrides or ())
    options.check_overwriting(out, recipe, overwrite=overwrite)
    with progress_bar("extend") as progress:
        is_trained = extend(
            model,
            out,
            factor=factor,
            recipe=settings,
            original_length=original_length,
            overwrite=overwrite,
            progress=progress,
        )
    _say_trained(out, is_trained)


def _say_trained(out: Path, is_trained: bool) -> None:
    if not is_trained:
        _say_finished(out, f"pretrain --init {out}")
    say(f"model: {out}")


def _say_finished(out: Path, further: str) -> None:
    say(
        f"the run in {out} is finished; to train its model further, start a new run with `{further}`."
    )


def finetune(
    model: options.Model,
    out: options.Out,
    task: options.TaskOrData = None,
    data: options.Data = None,
    eval_data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Held-out records to measure on during training."),
    ] = None,
    recipe: options.FinetuneRecipe = None,
    overrides: options.Set = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Fine-tune a model on a task or on your own records.

    A task has one phase per train length, and each phase writes a model. An interrupted run resumes when the command
    is repeated.
    """
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.tasks.curriculum import documents_for
    from metatokens.tasks.example import read_examples
    from metatokens.training.finetune import finetune
    from metatokens.training.probe import held_out_probe

    options.check_task_or_data(task, data)
    recipe = recipe or _recipe_for_size(model)
    settings = load_recipe(FinetuneRecipe, recipe, overrides or ())
    options.check_overwriting(out, recipe, eval_data, overwrite=overwrite)
    for override in overrides or ():
        if (
            data is not None
            and override.startswith("task.")
            and not override.startswith("task.landmarks=")
        ):
            raise UserError(f"--set {override} is for --task; records are trained on as they are.")
    if eval_data is not None and settings.task.question_sees:
        raise UserError(
            "task.question_sees hides the text from questions, and the records of --eval-data may have none: leave one "
            "of them out."
        )
    probe = None
    if eval_data is not None:
        tokenizer = load_tokenizer(str(model))
        records = read_examples(eval_data, tokenizer, landmarks=settings.task.landmarks)
        probe = partial(held_out_probe, records, tokenizer.eos_token_id)
    with progress_bar("finetune") as progress:
        is_trained = finetune(
            settings,
            model,
            out,
            task=task,
            data=data,
            documents=documents_for(task or "", options.BUILTIN),
            overwrite=overwrite,
            progress=progress,
            probe=probe,
        )
    if not is_trained:
        last_phase = "data" if task is None else settings.task.train_lengths[-1]
        _say_finished(out, f"finetune --model {out / str(last_phase)}")
    say(f"models: {', '.join(str(path.parent) for path in sorted(out.glob('*/manifest.json')))}")


def _recipe_for_size(model: Path) -> str:
    """The bundled recipe whose learning rates fit the size of a model."""
    from metatokens.checkpoint import weights_size

    if weights_size(model) < LARGE:
        return "demo_finetune"
    say(
        f"recipe: pretrained_finetune, for weights of {LARGE / 1e6:.0f} MB or more; --recipe chooses another"
    )
    return "pretrained_finetune"


def retrofit(
    model: Annotated[
        Path,
        typer.Option(metavar="DIR|hf:NAME", help="The base: a folder, or hf:NAME from the Hub."),
    ],
    out: options.Out,
    heads: Annotated[
        int, typer.Option(metavar="N", min=1, max=1024, help="Heads of meta-attention per block.")
    ] = 8,
    head_size: Annotated[
        int, typer.Option(metavar="N", min=2, max=1024, help="Width of a head, an even number.")
    ] = 64,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Blocks with meta-attention, from 0, or none; by default all."
        ),
    ] = None,
    delta: Annotated[
        bool,
        typer.Option("--delta", metavar="", help="Write only the added weights, not the base."),
    ] = False,
) -> None:
    """Give a pretrained model meta-tokens and meta-attention.

    It works for most decoders in transformers. Until you train the base, its logits for plain text do not change.
    """
    from metatokens.checkpoint import load_base_and_tokenizer, save_model
    from metatokens.retrofit.injection import add_meta_attention

    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; give another one.")
    base: Any
    base, tokenizer = load_base_and_tokenizer(model)
    chosen = None
    if layers is not None:
        chosen = [] if layers == "none" else options.parse_numbers("layers", layers, smallest=0)
    add_meta_attention(base, tokenizer, heads=heads, head_size=head_size, layers=chosen)
    base.base_is_elsewhere = delta
    folder = out.resolve()
    unfinished = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was cut off
    unfinished.mkdir(parents=True)
    save_model(base, tokenizer, unfinished)
    unfinished.replace(folder)
    added = sum(weight.numel() for weight in base.parameters() if weight.requires_grad)
    say(f"model: {out} ({added:,} new parameters next to {base.num_parameters() - added:,})")
    say(
        "The meta-token is untrained: until you train it, the model predicts text among meta-tokens worse."
    )
