"""The commands that make token stores and models."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatokens.cli import options
from metatokens.cli.output import progress_bar, say, write_figures
from metatokens.errors import UserError
from metatokens.machine import is_first_process
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe

if TYPE_CHECKING:
    from metatokens.tasks.example import Example

LARGE = 100_000_000  # bytes of weights; larger models are assumed to be pretrained elsewhere


def tokenize(
    corpus: Annotated[str, typer.Option(metavar="CORPUS", help=f"The text: {options.CORPUS}.")],
    tokenizer: Annotated[str, typer.Option(metavar="TOKENIZER", help=f"{options.TOKENIZER}.")],
    out: options.Out,
    held_out: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0, max=0.5, help="Share of the documents to keep out of training."
        ),
    ] = 0.05,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; by default one per core.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Turn text into token ids on disk, for pretrain.

    An interrupted run resumes when the command is repeated.
    """
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    texts = task_texts() if tokenizer.startswith("train:") else ()
    store = write_token_store(
        out,
        corpus,
        tokenizer,
        held_out=held_out,
        extra_texts=texts,
        overwrite=overwrite,
        workers=workers,
    )
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
            help="Model to start from, also a plain GPT-2.",
        ),
    ] = None,
    landmarks: options.Landmarks = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Train a language model on token ids.

    An interrupted run resumes when the command is repeated.
    """
    from metatokens.training.pretrain import pretrain

    settings = load_recipe(
        PretrainRecipe, recipe, [*_overrides({"data.placement": landmarks}), *(overrides or ())]
    )
    with progress_bar("pretrain") as progress:
        trained = pretrain(settings, out, init=init, overwrite=overwrite, progress=progress)
    if not trained:
        _say_finished(out, f"pretrain --init {out}")
    say(f"model: {out}")


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


TrainLengths = Annotated[
    str | None,
    typer.Option(
        metavar=options.SEVERAL, help="Prompt lengths, one phase each; by default the recipe's."
    ),
]
EvalData = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Held-out records to evaluate on.")
]
Lora = Annotated[
    str | None,
    typer.Option(metavar="rank=N", help="Train LoRA adapters of this rank, not the base (PEFT)."),
]
KeepAdapter = Annotated[
    bool,
    typer.Option("--keep-adapter", help="With --lora, write the adapters alone, as PEFT does."),
]


def finetune(
    model: options.Model,
    out: options.Out,
    task: options.TaskOrData = None,
    data: options.Data = None,
    train_lengths: TrainLengths = None,
    eval_data: EvalData = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    recipe: options.FinetuneRecipe = None,
    overrides: options.Set = None,
    lora: Lora = None,
    keep_adapter: KeepAdapter = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
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
    if data is not None and train_lengths:
        say("--train-lengths is ignored: the records of --data are used whatever their length.")
    of_options = {
        "task.train_lengths": options.parse_lengths(train_lengths) if train_lengths else None,
        "task.landmarks": landmarks,
        "training.keep_adapter": keep_adapter or None,
        "training.lora_rank": _lora_rank(lora),
        "training.text_window": text_window,
    }
    settings = load_recipe(
        FinetuneRecipe,
        recipe or _recipe_for_size(model),
        [*_overrides(of_options), *(overrides or ())],
    )
    records: Sequence[Example] = ()
    probe = None
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
            documents=documents_for(task or "", options.BUILTIN),
            inputs=[eval_data],
            overwrite=overwrite,
            progress=progress,
            probe=probe,
        )
    last_phase = out / ("data" if task is None else str(settings.task.train_lengths[-1]))
    if not trained:
        _say_finished(out, f"finetune --model {last_phase}")
    say(f"models: {', '.join(str(path.parent) for path in sorted(out.glob('*/manifest.json')))}")
    if records and is_first_process():
        _evaluate_held_out(last_phase, records, settings, as_json=as_json)


def _recipe_for_size(model: Path) -> str:
    """The bundled recipe whose learning rates fit the size of a model."""
    from metatokens.checkpoint import weights_size

    if weights_size(model) < LARGE:
        return "demo_finetune"
    say(
        f"recipe: pretrained_finetune, for weights of {LARGE / 1e6:.0f} MB or more; --recipe chooses another"
    )
    return "pretrained_finetune"


def _evaluate_held_out(
    model: Path, records: "Sequence[Example]", settings: FinetuneRecipe, *, as_json: bool
) -> None:
    """Print the accuracy of a fine-tuned model on held-out records."""
    from metatokens.checkpoint import load_model
    from metatokens.evaluation.accuracy import evaluate
    from metatokens.records import About
    from metatokens.training.run_folder import training_of

    device = "cpu" if settings.training.use_cpu else None
    subject = About(model=str(model), condition=settings.task.landmarks, **training_of(model))
    write_figures(
        evaluate(load_model(model, device=device), {None: records}, subject), None, as_json=as_json
    )


def _overrides(of_options: dict[str, Any]) -> list[str]:
    """The options that are short for `--set`, as it writes them."""
    return [f"{key}={json.dumps(value)}" for key, value in of_options.items() if value is not None]


def _lora_rank(lora: str | None) -> int | None:
    if lora is None:
        return None
    if not re.fullmatch("rank=[1-9][0-9]{0,3}", lora):
        raise UserError(f"--lora {lora!r} must be rank=N, such as rank=16.")
    return int(lora.removeprefix("rank="))


def _say_finished(out: Path, further: str) -> None:
    say(
        f"the run in {out} is finished; to train its model further, start a new run with `{further}`."
    )


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
        bool, typer.Option("--delta", help="Write only the added weights, not the base.")
    ] = False,
) -> None:
    """Give a pretrained model meta-tokens and meta-attention.

    It works for most decoders in transformers. Until you train the base, its logits for plain text do not change.
    """
    from metatokens.checkpoint import load_base_and_tokenizer, save_model
    from metatokens.retrofit.injection import add_meta_attention

    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; give another one.")
    base: Any
    base, tokenizer = load_base_and_tokenizer(model)
    chosen = [] if layers == "none" else options.parse_layers(layers)
    add_meta_attention(base, tokenizer, heads=heads, head_size=head_size, layers=chosen)
    out.mkdir(parents=True, exist_ok=True)
    base.base_is_elsewhere = delta
    save_model(base, tokenizer, out)
    added = sum(weight.numel() for weight in base.parameters() if weight.requires_grad)
    say(f"model: {out} ({added:,} new parameters next to {base.num_parameters() - added:,})")
    say(
        "The meta-token is untrained: until you train it, the model predicts text among meta-tokens worse."
    )
