"""Options that several verbs have: what one says is said here, so that it says the same everywhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from metatokens.errors import UserError
from metatokens.tasks import TASKS


def fetched(context: typer.Context, model: Path | None) -> Path | None:
    """The folder of a model, which is fetched from the Hub where its name says so."""
    if model is None or context.resilient_parsing:  # the shell completes a line that has a model
        return model
    from metatokens.checkpoint import fetch_model

    return fetch_model(model)


def choice(meaning: str, *names: str) -> dict[str, Any]:
    """The help and the shell's completion of an option that takes one of these names."""
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    return {"help": f"{meaning}: {listed}.", "autocompletion": lambda: list(names)}


def _recipe(settings: str, *, of_finetuning: bool) -> Any:
    def names() -> list[str]:
        from metatokens.recipe import recipe_names

        tuning = ("_finetune", *(f"_{task}" for task in TASKS))
        return [name for name in recipe_names() if name.endswith(tuning) == of_finetuning]

    help = f"{settings}: a YAML file, or the name of a recipe that comes with the package."
    return typer.Option("--recipe", metavar="FILE|NAME", help=help, autocompletion=names)


CORPUS = "builtin, a file or glob (.txt, .jsonl, .gz, .parquet), or hf:NAME:CONFIG"
TOKENIZER = "gpt2, a folder, or train:N, which trains one of N tokens on the corpus"
RECORDS = "JSON lines of prompt, markers and completion"
LANDMARK_RULES = ("line", "paragraph", "sentence", "every:N")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
CONDITIONS = ("paper", "landmark", "none", "decoy", "long_prompt")

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")]
ResultFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Append the JSON lines to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines in place of a table, on a terminal too.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder holds.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the recipe; may be repeated."),
]
Lora = Annotated[
    str | None,
    typer.Option(
        "--lora", metavar="rank=N", help="Train adapters of this rank in place of the model's weights (PEFT)."
    ),
]
Model = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="DIR|hf:NAME",
        callback=fetched,
        help="The model: a folder with its tokenizer, hf:NAME from the Hub, or example, which comes along.",
    ),
]
Landmarks = Annotated[
    str | None,
    typer.Option(
        "--landmarks", metavar="RULE", **choice("Put a meta-token into the text behind each", *LANDMARK_RULES)
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", **choice("Where the model runs (by default on a GPU if there is one)", *DEVICES)
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", **choice("Type of the model's numbers (by default as saved)", *DTYPES)),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", min=1, help="Sequences at a time, which memory bounds.")
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="The model's name in the results; by default its folder.")
]
Task = Annotated[str, typer.Option("--task", metavar="TASK", **choice("The task", *TASKS))]
TaskOrData = Annotated[
    str | None, typer.Option("--task", metavar="TASK", **choice("The task, unless --data is given", *TASKS))
]
Condition = Annotated[
    str,
    typer.Option(
        metavar="NAME", **choice("Meta-tokens of the prompts (as in the paper, none, or idle ones too)", *CONDITIONS)
    ),
]
TaskCorpus = Annotated[
    str, typer.Option("--corpus", metavar="CORPUS", help=f"Text that the task copying copies from: {CORPUS}.")
]
Intervention = Annotated[
    str | None,
    typer.Option(
        "--intervention",
        metavar="NAME",
        help="Change to the meta-tokens inside the model: no_pos, no_embed, neither, or noise:S[:meta][:raw].",
    ),
]
PretrainRecipe = Annotated[str, _recipe("Settings of the pretraining", of_finetuning=False)]
FinetuneRecipe = Annotated[
    str | None,
    _recipe(
        "Settings of the fine-tuning (by default demo_finetune, or pretrained_finetune for weights of 100 MB or more)",
        of_finetuning=True,
    ),
]
SEVERAL = "LENGTH,..."  # of an option that takes several


def parse_lengths(text: str, *, least: int = 1, name: str = "lengths") -> list[int]:
    """Lengths, or other whole numbers of at least `least`, separated by commas.

    Raises:
        UserError: if that is not what the text is.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < least:
        some = "positive numbers separated by commas, such as 128,256" if least else "numbers separated by commas"
        raise UserError(f"{name} {text!r} must be {some}.")
    return lengths
