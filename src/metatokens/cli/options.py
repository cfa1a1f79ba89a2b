"""Options that several commands share, so that each reads the same everywhere."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from metatokens import recipe
from metatokens.errors import UserError
from metatokens.paper import choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnalysisName = Literal["sharpness", "residual", "rate-distortion"]
BUILTIN = "builtin"
CORPUS = f"{BUILTIN}, a file or glob (.txt, .jsonl, .gz), or hf:NAME:CONFIG"
TOKENIZER = (
    "a folder, gpt2 or another name of the Hub, or train:N to train one of N tokens on the corpus"
)
LARGEST = 1_000_000  # of the numbers in a list, such as lengths in tokens
RECORDS = "JSON lines of prompt, markers and completion"


def fetched(context: typer.Context, model: Path | None) -> Path | None:
    """The folder of a model, downloaded if the name is one of the Hub."""
    if model is None or context.resilient_parsing:  # the shell is completing the line
        return model
    from metatokens.checkpoint import fetch_model

    return fetch_model(model)


def load(model: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model of a folder and its tokenizer."""
    from metatokens.checkpoint import load_model
    from metatokens.data.tokenizer import load_tokenizer

    return load_model(model), load_tokenizer(str(model))


def _listed(names: Any) -> str:
    *others, last = get_args(names)
    return f"{', '.join(others)} or {last}"


def _choice(option: str, names: Any, meaning: str) -> Any:
    """An option that takes one of a `Literal`'s names, which its help lists."""
    return typer.Option(option, metavar="NAME", help=f"{meaning}: {_listed(names)}.")


def _recipe(meaning: str) -> Any:
    """An option that takes the file of a recipe, or the name of a bundled one."""
    return typer.Option(
        "--recipe", metavar="FILE|NAME", help=meaning, autocompletion=recipe.recipe_names
    )


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")]
ResultFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Append the JSON lines to this file.")
]
AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print JSON lines instead of a table.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", metavar="", help="Replace the contents of the output folder.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the recipe; repeatable."
    ),
]
Model = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="DIR|hf:NAME",
        callback=fetched,
        help="A folder with a model and its tokenizer, hf:NAME from the Hub, or example (bundled).",
    ),
]
Landmarks = Annotated[
    str | None,
    typer.Option(
        "--landmarks",
        metavar="RULE",
        help="Put a meta-token after each line, paragraph or sentence, or after every:N tokens.",
    ),
]
Task = Annotated[recipe.Task, _choice("--task", recipe.Task, "The task")]
TaskOrData = Annotated[
    recipe.Task | None, _choice("--task", recipe.Task, "The task (unless --data is given)")
]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="FILE", help=f"Your own records: {RECORDS}.")
]
Condition = Annotated[
    recipe.Condition,
    _choice("--condition", recipe.Condition, "How the prompts are marked with meta-tokens"),
]
ConditionOrData = Annotated[
    recipe.Condition | None,
    _choice(
        "--condition", recipe.Condition, "How the prompts of --task are marked (by default paper)"
    ),
]
Split = Annotated[recipe.Split, _choice("--split", recipe.Split, "The split of the examples")]
Placement = Annotated[
    recipe.Placement, _choice("--placement", recipe.Placement, "Where meta-tokens go in a block")
]
Kind = Annotated[
    AnalysisName, typer.Argument(metavar="KIND", help=f"What to measure: {_listed(AnalysisName)}.")
]
Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        help=f"Size of the experiments: {_listed(choices.PresetName)}.",
        autocompletion=lambda: list(get_args(choices.PresetName)),
    ),
]
PretrainRecipe = Annotated[
    str, _recipe("Pretraining settings: a YAML file, or the name of a bundled recipe.")
]
ShrinkRecipe = Annotated[
    str, _recipe("The settings: a YAML file, or the name of a bundled recipe; by default shrink.")
]
FinetuneRecipe = Annotated[
    str | None,
    _recipe(
        "Fine-tuning settings: a YAML file, or the name of a bundled recipe; by default demo_finetune, or "
        "pretrained_finetune for weights of 100 MB or more."
    ),
]


def check_task_or_data(task: str | None, data: Path | None) -> None:
    """Refuse a command line with both --task and --data, or neither."""
    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")


def parse_numbers(name: str, text: str, *, smallest: int) -> list[int]:
    """Read numbers separated by commas, such as lengths in tokens."""
    parts = [part.strip() for part in text.split(",")]
    allowed = range(smallest, LARGEST + 1)
    if not all(re.fullmatch(r"\d{1,7}", part, re.ASCII) and int(part) in allowed for part in parts):
        raise UserError(
            f"{name} {text[:100]!r} must be numbers from {smallest} to {LARGEST:,}, separated by commas."
        )
    return list(map(int, parts))


def check_overwriting(out: Path, *files: str | Path | None, overwrite: bool) -> None:
    """Refuse --overwrite where it would remove a file that the command alone reads, such as a recipe."""
    from metatokens.training import run_folder

    if overwrite:
        paths = [Path(file) for file in files if file is not None]
        # A recipe may also be a bundled one's name.
        run_folder.check_overwriting(out, [path for path in paths if path.is_file()])
