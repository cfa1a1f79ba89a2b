"""The command `metatokens`: one verb a stage, each usable alone on a user's own files.

Results go to standard output as JSON lines, everything else to standard error. A user's mistake is one sentence and
exit status 2. Every verb imports what it needs when it runs, so that `--help` is quick.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from metatokens.errors import UserError

if TYPE_CHECKING:
    from metatokens.evaluation.results import Result
    from metatokens.training.trainer import Progress

INTERRUPTED = 130  # typer's exit status after Ctrl-C

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Language models with learned meta-tokens: train, evaluate, report.",
)

Out = Annotated[Path, typer.Option("--out", help="Output folder.")]
ResultFile = Annotated[Path | None, typer.Option("--out", help="Append JSON lines to this file instead of printing.")]
Model = Annotated[Path, typer.Option("--model", help="Folder of a model and its tokenizer.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder holds.")]
Corpus = Annotated[
    str, typer.Option("--corpus", help="builtin, a file or glob (.txt, .jsonl, .gz, .parquet), or hf:NAME:CONFIG.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")]
Lengths = Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a mistake.")] = False,
) -> None:
    """Options that all verbs share (`main` reads --debug itself)."""


@app.command()
def reproduce(
    preset: Annotated[str, typer.Option(help="smoke, demo or small.")],
    out: Out,
    corpus: Annotated[str | None, typer.Option(help="In place of the preset's: see tokenize.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores there are.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Everything in order: tokenize, pretrain, fine-tune, evaluate, report. Resumes what was cut off."""
    from metatokens.experiment.run import reproduce
    from metatokens.report.page import write_report

    reproduce(preset, out, corpus=corpus, workers=workers, overwrite=overwrite)
    _say(f"report: {write_report([out], out / 'report')}")


@app.command()
def tokenize(
    corpus: Corpus,
    tokenizer: Annotated[str, typer.Option(help="gpt2, a folder, or train:N.")],
    out: Out,
    held_out: Annotated[float, typer.Option(min=0, max=0.5, help="Share of the documents that are held out.")] = 0.05,
    overwrite: Overwrite = False,
) -> None:
    """Write a corpus as a store of token ids, memory-mapped when read."""
    from metatokens.data.blocks import write_token_store
    from metatokens.tasks.curriculum import task_texts

    texts = task_texts() if tokenizer.startswith("train:") else ()
    store = write_token_store(out, corpus, tokenizer, held_out=held_out, extra_texts=texts, overwrite=overwrite)
    for split, counts in store.manifest.splits.items():
        _say(f"{split}: {counts.tokens:,} tokens in {counts.documents:,} documents")


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Option(help="YAML file, or the name of a recipe that comes with the package.")],
    out: Out,
    overrides: Set = None,
    init: Annotated[Path | None, typer.Option(help="Go on from this checkpoint, a GPT-2 included.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a language model on a token store. Resumes what was cut off."""
    from metatokens.recipe import PretrainRecipe, load_recipe
    from metatokens.training.pretrain import pretrain

    settings = load_recipe(PretrainRecipe, recipe, overrides or ())
    with _progress("pretrain") as progress:
        pretrain(settings, out, init=init, overwrite=overwrite, progress=progress)
    _say(f"model: {out}")


@app.command()
def sample(
    task: Annotated[str, typer.Argument(help="list_recall, segment_counting, parity or copying.")],
    phase: Annotated[int, typer.Option(help="1 to 5.")] = 1,
    condition: Annotated[str, typer.Option(help="paper, none or decoy.")] = "paper",
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    split: Annotated[str, typer.Option(help="train or test.")] = "test",
    tokenizer: Annotated[str, typer.Option(help="gpt2, a folder, or train:N.")] = "train:4096",
    corpus: Corpus = "builtin",
    out: ResultFile = None,
) -> None:
    """Print examples of a task as JSON lines."""
    from metatokens.data.corpus import read_corpus
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.tasks.curriculum import TaskData, task_texts

    documents = _documents(corpus) if task == "copying" else ()
    text = read_corpus(corpus) if tokenizer.startswith("train:") else None
    loaded = load_tokenizer(tokenizer, corpus=text, extra_texts=task_texts())
    source = TaskData(task, tokenizer=loaded, condition=condition, seed=seed, documents=documents)
    _write(
        (json.dumps(source.sample(i, phase, cast(Any, split)).to_record(), ensure_ascii=False) for i in range(n)), out
    )


@app.command()
def finetune(
    model: Model,
    out: Out,
    task: Annotated[str | None, typer.Option(help="list_recall, segment_counting, parity or copying.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your own records: JSON lines of prompt and completion.")] = None,
    train_length: Annotated[str | None, typer.Option(help="Prompt lengths of the phases, such as 128,256,512.")] = None,
    recipe: Annotated[str, typer.Option(help="YAML file, or a name.")] = "demo_finetune",
    overrides: Set = None,
    corpus: Corpus = "builtin",
    overwrite: Overwrite = False,
) -> None:
    """Fine-tune a model on a task, in phases of growing train length, or on your own records."""
    from metatokens.recipe import FinetuneRecipe, load_recipe
    from metatokens.training.finetune import finetune

    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")
    own = [f"task.train_lengths={_lengths(train_length)}"] if train_length else []
    settings = load_recipe(FinetuneRecipe, recipe, [*own, *(overrides or ())])
    texts = _documents(corpus) if task == "copying" else ()
    with _progress("finetune") as progress:
        finetune(settings, model, out, task=task, data=data, documents=texts, overwrite=overwrite, progress=progress)
    _say(f"models: {', '.join(str(path.parent) for path in sorted(out.glob('*/manifest.json')))}")


@app.command()
def evaluate(
    model: Model,
    task: Annotated[str, typer.Option(help="list_recall, segment_counting, parity or copying.")],
    lengths: Lengths = "128,256,512,1024",
    condition: Annotated[str, typer.Option(help="paper, none or decoy.")] = "paper",
    n: Annotated[int, typer.Option("-n", min=1, help="Test prompts of each length.")] = 2_500,
    name: Annotated[str | None, typer.Option(help="What the results are filed under; default: the folder.")] = None,
    corpus: Corpus = "builtin",
    out: ResultFile = None,
) -> None:
    """Measure exact match and token accuracy by prompt length."""
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.accuracy import evaluate, test_examples
    from metatokens.model.checkpoint import load_model
    from metatokens.model.positions import check_length
    from metatokens.training.finetune import check_meta_token, training_of

    _check_results_file(out)
    loaded, tokenizer = load_model(model), load_tokenizer(str(model))
    check_meta_token(loaded.config, tokenizer, model)
    bins = _lengths(lengths)
    check_length(loaded.config, max(bins))
    documents = _documents(corpus) if task == "copying" else ()
    tests = {
        length: test_examples(task, length, n, tokenizer, condition=condition, documents=documents) for length in bins
    }
    about = training_of(model)
    _write_results(evaluate(loaded, tests, task=task, name=name or str(model), condition=condition, **about), out)


@app.command()
def perplexity(
    model: Model,
    corpus: Annotated[str, typer.Option(help="A corpus spec, or a token store, whose held-out split is read.")],
    block_size: Annotated[int, typer.Option(min=2, help="Positions of a block, meta-tokens included.")] = 256,
    fraction: Annotated[float, typer.Option(help="Of the positions that are meta-tokens, in [0, 0.5].")] = 0.1,
    placement: Annotated[str, typer.Option(help="uniform, periodic or none.")] = "none",
    name: Annotated[str | None, typer.Option(help="What the result is filed under; default: the folder.")] = None,
    out: ResultFile = None,
) -> None:
    """Measure perplexity, counted on text tokens alone, on a corpus or on the held-out split of a token store."""
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.perplexity import held_out_text, perplexity
    from metatokens.model.checkpoint import load_model

    _check_results_file(out)
    loaded = load_model(model)
    text = held_out_text(corpus, load_tokenizer(str(model)))
    result = perplexity(
        loaded, text, block_size=block_size, fraction=fraction, placement=placement, name=name or str(model)
    )
    _write_results([result], out)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text; what looks like a marker in it stays text.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Text tokens to generate.")] = 64,
    meta_every: Annotated[int | None, typer.Option(min=1, help="Insert a meta-token every so many tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Continue a text."""
    import torch

    from metatokens.data.tokenizer import encode_text, load_tokenizer
    from metatokens.model.checkpoint import load_model

    loaded, tokenizer = load_model(model).eval(), load_tokenizer(str(model))
    ids = torch.tensor(encode_text(tokenizer, [prompt]))
    if ids.shape[1] == 0:
        raise UserError("the prompt is empty.")
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = loaded.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        meta_every=meta_every,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    print(f"{prompt}{tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)}")


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Run folders or files of result lines.")],
    out: Out,
) -> None:
    """Draw tables, figures and the page from result files alone."""
    from metatokens.report.page import write_report

    _say(f"report: {write_report(results, out)}")


def main() -> None:
    """Run the command; a user's mistake is one sentence on standard error and exit status 2."""
    # The libraries' notices and progress bars would stand between the lines of this command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except UserError as error:
        if "--debug" in sys.argv:
            raise
        _say(f"metatokens: {error}")
        sys.exit(2)
    except SystemExit as status:
        if status.code == INTERRUPTED:
            _say("metatokens: interrupted; the same command goes on from here.")
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _write(lines: Iterable[str], out: Path | None) -> None:
    if out is None:
        for line in lines:
            print(line)
        return
    try:
        with out.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}.") from error


def _check_results_file(out: Path | None) -> None:
    """Refuse a file that cannot be appended to before anything is measured."""
    if out is not None:
        is_new = not out.exists()
        _write_results((), out)
        if is_new:
            out.unlink()


def _write_results(results: Iterable["Result"], out: Path | None) -> None:
    from metatokens.evaluation.results import write_results

    if out is None:
        _write((result.model_dump_json() for result in results), None)
    else:
        write_results(out, results)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f"lengths {text!r} must be positive numbers separated by commas, such as 128,256.")
    return lengths


def _documents(corpus: str) -> list[str]:
    from metatokens.data.corpus import read_corpus

    return list(islice(read_corpus(corpus), 500))


@contextmanager
def _progress(verb: str) -> "Iterator[Progress]":
    """A progress bar with the time left, on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
