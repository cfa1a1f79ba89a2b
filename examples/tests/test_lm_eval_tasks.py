"""Tasks for lm-evaluation-harness, without the harness: the files, and the questions of the two tasks in long texts."""

import json
import re
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from examples.lm_eval.long_context import LongContextData
from examples.lm_eval.tasks import app, write_harness_tasks
from metatokens.data.prompts import encode_prompt
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import draw_test_examples as drawn_examples
from metatokens.tasks.curriculum import task_texts
from metatokens.tasks.example import read_examples

STORY = [
    " ".join(f'"On day {i} of the year {start} it rained," he said.' for i in range(300))
    for start in range(9)
]
LENGTHS = (192, 512, 2048)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("train:1000", corpus=STORY, extra_texts=task_texts())


def read_needle(prompt: str) -> str:
    question = re.search(r"What is the number of the (\w+)\?", prompt)
    assert question is not None
    return " " + dict(re.findall(r"The number of the (\w+) is (\d+)\.", prompt))[question[1]]


def follow_variables(prompt: str) -> str:
    """Run the statements as a program."""
    values: dict[str, str] = {}
    for name, other, number in re.findall(r"VAR (\w\w) = (?:VAR (\w\w)|(\d+))\.", prompt):
        values[name] = values[other] if other else number
    asked = re.search(r"Which variables have the value (\d+)\?", prompt)
    assert asked is not None
    return "".join(f" {name}" for name, value in values.items() if value == asked[1])


SOLVERS: dict[str, Callable[[str], str]] = {
    "needle": read_needle,
    "variable_tracking": follow_variables,
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", SOLVERS)
def test_an_example_is_answered_by_what_it_hides(
    task: str, split: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = LongContextData(task, tokenizer=tokenizer, documents=STORY)
    for length in LENGTHS:
        for index in range(30):
            example = source.example(index, length, split)
            assert length * 3 // 4 < example.n_tokens <= length
            assert encode_prompt(tokenizer, example.prompt, "_PAUSE_") == list(
                example.input_ids[: example.n_tokens]
            )
            assert SOLVERS[task](example.prompt) == example.completion
            assert example == source.example(index, length, split)


@pytest.mark.parametrize("task", SOLVERS)
def test_train_and_test_hide_in_other_sentences(
    task: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = LongContextData(task, tokenizer=tokenizer, documents=STORY)
    said = {
        split: {
            line
            for index in range(20)
            for line in source.example(index, 512, split).prompt.split(" _PAUSE_")
            if "On day" in line
        }
        for split in ("train", "test")
    }
    assert said["train"]
    assert said["test"]
    assert {line.strip() for line in said["train"]}.isdisjoint(
        line.strip() for line in said["test"]
    )


def test_no_place_tells_the_needle(tokenizer: PreTrainedTokenizerBase) -> None:
    """Each of the four places is right one time in four; depths are spread evenly."""
    source, hits, depths = (
        LongContextData("needle", tokenizer=tokenizer, documents=STORY),
        [0] * 4,
        [],
    )
    for index in range(400):
        example = source.example(index, 512, "test")
        numbers = re.findall(r"is (\d+)\.", example.prompt)
        assert len(set(numbers)) == 4
        hits[numbers.index(example.completion.strip())] += 1
        depths.append(
            example.prompt.index(f"is {example.completion.strip()}.") / len(example.prompt)
        )
    assert all(60 <= count <= 140 for count in hits)  # 100 +- 4.6 standard deviations
    assert 0.42 < sum(depths) / len(depths) < 0.58
    assert {int(depth * 10) for depth in depths} >= set(range(9))


def test_what_places_tell_of_a_chain(tokenizer: PreTrainedTokenizerBase) -> None:
    """Any three of the six names are right 1 time in 20; the best three, given where chains begin, 6 times in 20."""
    source = LongContextData("variable_tracking", tokenizer=tokenizer, documents=STORY)
    # By where chains begin, that of the answer first: how often the answer is which three names.
    answers: dict[tuple[int, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for index in range(1000):
        example = source.example(index, 512, "test")
        names = re.findall(r"VAR (\w\w) =", example.prompt)
        answer = tuple(names.index(name) for name in example.completion.split())
        begins = [i for i in range(6) if f"VAR {names[i]} = VAR" not in example.prompt]
        other_begins = [i for i in begins if i != answer[0]]
        answers[answer[0], *other_begins][answer] += 1
    counts = sum(answers.values(), Counter())
    assert len(counts) == 20
    assert max(counts.values()) < 85  # 50 + 5 standard deviations
    assert len(answers) == 6
    likeliest = sum(max(counts.values()) for counts in answers.values())
    assert 228 < likeliest < 373  # 300 +- 5


def test_the_files_hold_the_prompts_of_evaluate(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    written = write_harness_tasks(
        tmp_path,
        tokenizer,
        tasks=["list_recall", "needle"],
        lengths=[128, 256],
        n=5,
        condition="landmark",
        documents=STORY,
        train=4,
    )
    assert [path.name for path in written] == [
        "metatokens_list_recall_landmark_128.yaml",
        "metatokens_list_recall_landmark_256.yaml",
        "metatokens_needle_128.yaml",
        "metatokens_needle_256.yaml",
        "metatokens.yaml",
    ]
    assert yaml.safe_load(written[-1].read_text(encoding="utf-8"))["task"] == [
        path.stem for path in written[:-1]
    ]
    described = yaml.safe_load(written[0].read_text(encoding="utf-8"))
    lines = (
        Path(described["dataset_kwargs"]["data_files"]["test"])
        .read_text(encoding="utf-8")
        .splitlines()
    )
    expected = drawn_examples("list_recall", 128, 5, tokenizer, condition="landmark", documents=[])
    for line, example in zip(lines, expected, strict=True):
        row = json.loads(line)
        assert row == {"prompt": example.prompt, "completion": example.completion}
        assert encode_prompt(tokenizer, row["prompt"], "_PAUSE_") == list(
            example.input_ids[: example.n_tokens]
        )
    records = read_examples(tmp_path / "needle_train.jsonl", tokenizer)
    assert len(records) == 4
    assert all(record.n_tokens <= 128 and record.markers for record in records)


@pytest.mark.parametrize(
    ("tasks", "length", "documents", "said"),
    [
        (["recall"], 128, STORY, "unknown task 'recall'"),
        (["needle"], 32, STORY, "cannot be asked in 32 tokens"),
        (["needle"], 2048, ["It rained. It snowed all of the day."], "sentences to test on"),
        (
            ["copying"],
            128,
            [f"In the year {i} one wrote _PAUSE_ for a meta-token. " * 40 for i in range(30)],
            "as text",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(
    tasks: list[str],
    length: int,
    documents: list[str],
    said: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=said):
        write_harness_tasks(
            tmp_path,
            tokenizer,
            tasks=tasks,
            lengths=[length],
            n=3,
            condition="paper",
            documents=documents,
        )


def test_without_the_harness_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("metatokens.evaluation.lm_eval", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "metatokens: lm-evaluation-harness is missing: pip install lm-eval.\n"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--tasks needle --lengths 16", "needle cannot be asked in 16 tokens"),
        ("--lengths 0", "lengths '0' must be"),
        ("--tasks parity --condition decoy --lengths 128 -n 2", "the tasks cannot be written to"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    options: str, sentence: str, metatokens: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    status, _, error = metatokens(f"--model example --out {tmp_path}/file/new {options}", app)
    assert status == 2
    assert sentence in error


def test_the_command_writes_the_tasks(
    metatokens: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    line = (
        f"--model example --out {tmp_path}/tasks --tasks parity,needle --lengths 192 -n 2 --train 3"
    )
    status, _, error = metatokens(line, app)
    assert (status, error) == (
        0,
        f"2 tasks of 2 prompts, and the group metatokens, in {tmp_path}/tasks\n",
    )
    written = {path.name for path in (tmp_path / "tasks").iterdir()}
    assert {"metatokens.yaml", "metatokens_parity_paper_192.yaml", "needle_train.jsonl"} <= written
