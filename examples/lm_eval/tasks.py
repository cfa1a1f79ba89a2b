"""Tasks for lm-evaluation-harness, written to a folder for its `--include_path`.

    python -m examples.lm_eval.tasks --model DIR --out tasks --lengths 128,512,2048 --corpus book.txt

For each task and length there is a file of prompts (JSON lines) and the YAML file that describes it to the harness. The
group `metatokens` has all of them. A prompt shows each meta-token as ` _PAUSE_`; with `--model_args marker=_PAUSE_` the
model reads it as one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from transformers import PreTrainedTokenizerBase

from examples.lm_eval.long_context import LONG_CONTEXT_TASKS, LongContextData
from metatokens.cli import main
from metatokens.cli.options import CORPUS, Condition, Out, fetched, parse_numbers
from metatokens.cli.output import say
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import TEST_SEED, draw_test_examples
from metatokens.files import write_whole
from metatokens.records import MARKER
from metatokens.tasks import TASKS
from metatokens.tasks.curriculum import documents_for
from metatokens.tasks.example import Example

HARNESS_TASKS = (*TASKS, *LONG_CONTEXT_TASKS)
GROUP = "metatokens"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def write(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR|hf:NAME",
            callback=fetched,
            help="The model to be measured, for its tokenizer.",
        ),
    ],
    out: Out,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="TASK,...", help="The four tasks, needle and variable_tracking; by default all."
        ),
    ] = ",".join(HARNESS_TASKS),
    lengths: Annotated[
        str, typer.Option(metavar="LENGTH,...", help="Longest prompts in tokens.")
    ] = "128,256,512,1024",
    condition: Condition = "paper",
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Prompts per length.")] = 500,
    corpus: Annotated[
        str,
        typer.Option(
            metavar="CORPUS",
            help=f"Text for copying, and to hide needles and variables in: {CORPUS}.",
        ),
    ] = "builtin",
    train: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Fine-tuning records of the latter two to write, of the first length.",
        ),
    ] = 0,
) -> None:
    """Write tasks for lm-evaluation-harness.

    Run them by python -m metatokens.evaluation.lm_eval --model metatokens --include_path DIR --tasks metatokens.
    """
    written = write_harness_tasks(
        out,
        load_tokenizer(str(model)),
        tasks=tasks.split(","),
        lengths=parse_numbers("lengths", lengths, smallest=1),
        n=n,
        condition=condition,
        documents=documents_for("copying", corpus),
        train=train,
    )
    say(f"{len(written) - 1} tasks of {n:,} prompts, and the group metatokens, in {out}")


def write_harness_tasks(
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    n: int,
    condition: str,
    documents: Sequence[str],
    train: int = 0,
) -> list[Path]:
    """Write the folder of tasks.

    Args:
        out: the folder.
        tokenizer: the tokenizer of the models to be measured; prompts have (length / 2, length] of its tokens.
        tasks: names in HARNESS_TASKS.
        lengths: prompt lengths in tokens.
        n: prompts per task and length, the same as in `metatokens evaluate`.
        condition: the condition of the four tasks' prompts.
        documents: the texts that copying copies from, and the haystack of the two tasks in long texts.
        train: fine-tuning records to write for the two tasks in long texts, of the first length, in
            `TASK_train.jsonl`.

    Returns:
        The YAML files; the group's is the last.

    Raises:
        UserError: if a task is unknown, no prompt of a length is found, a prompt's text holds the marker itself, or the
            folder cannot be written.
    """
    drawn: dict[str, list[Example]] = {}
    records: dict[str, list[Example]] = {}
    for task in tasks:
        if task not in HARNESS_TASKS:
            raise UserError(f"unknown task {task!r}; the tasks are {', '.join(HARNESS_TASKS)}.")
        if task in LONG_CONTEXT_TASKS:
            source = LongContextData(task, tokenizer=tokenizer, documents=documents, seed=TEST_SEED)
            for length in lengths:
                drawn[f"{GROUP}_{task}_{length}"] = [
                    source.example(index, length, "test") for index in range(n)
                ]
            if train:
                records[f"{task}_train"] = [
                    source.example(index, lengths[0], "train") for index in range(train)
                ]
        else:
            for length in lengths:
                drawn[f"{GROUP}_{task}_{condition}_{length}"] = draw_test_examples(
                    task, length, n, tokenizer, condition=condition, documents=documents
                )
    for name, examples in drawn.items():
        if any(
            example.prompt.count(MARKER.strip()) != len(example.markers) for example in examples
        ):
            raise UserError(
                f"a prompt of {name} holds {MARKER.strip()} as text; give another corpus."
            )
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, examples in records.items():
            _write_lines(out / f"{name}.jsonl", [example.to_record() for example in examples])
        for name, examples in drawn.items():
            rows = [
                {"prompt": example.prompt, "completion": example.completion} for example in examples
            ]
            _write_lines(out / f"{name}.jsonl", rows)
            _write_yaml(out / f"{name}.yaml", _description(name, out / f"{name}.jsonl", examples))
        _write_yaml(out / f"{GROUP}.yaml", {"group": GROUP, "task": list(drawn)})
    except OSError as error:
        raise UserError(f"the tasks cannot be written to {out}: {error.strerror}.") from error
    return [out / f"{name}.yaml" for name in (*drawn, GROUP)]


def _description(name: str, data: Path, examples: Sequence[Example]) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "{{completion | trim}}",
        "target_delimiter": "",
        # One token more than the longest answer with its end: a model that goes on is wrong.
        "generation_kwargs": {
            "until": [],
            "do_sample": False,
            "max_gen_toks": 1
            + max(len(example.input_ids) - example.answer_start for example in examples),
        },
        "filter_list": [
            {
                "name": "trimmed",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
        "metadata": {"version": 1},
    }


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, yaml.safe_dump(content, sort_keys=False).encode())


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


if __name__ == "__main__":
    main(app)
