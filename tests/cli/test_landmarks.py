"""`--landmarks` of the commands that measure, and answers through landmarks alone."""

import json
import shutil
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from tests.cli.command_lines import Models, Refuse, Succeed, column, read_lines


@pytest.fixture(autouse=True)
def tokens(workplace: Path, small_store: TokenStore) -> None:
    shutil.copytree(small_store.path, workplace / "tokens")


def test_perplexity_with_landmarks(small_model: Models, run: Succeed) -> None:
    measure = f"perplexity --model {small_model()} --corpus tokens --block-size 32 --max-tokens 600 --json"

    printed = [
        run(measure),
        run(f"{measure} --landmarks sentence"),
        run(f"{measure} --landmarks every:6"),
    ]

    lines = [json.loads(output) for output, _ in printed]
    assert column(lines, "condition") == ["none", "sentence", "every:6"]
    assert len(set(column(lines, "n"))) == 1
    assert len(set(column(lines, "value"))) == 3


def test_answers_through_landmarks_alone(
    small_model: Models, run: Succeed, refused: Refuse
) -> None:
    task = "--task list_recall --condition facts_1 --lengths 128 -n 3"
    evaluate = (
        f"evaluate --model {small_model(second_attention='meta')} --intervention landmarks_alone"
    )

    output, _ = run(f"{evaluate} {task} --json")

    exact, tokens = read_lines(output)
    assert exact["intervention"] == tokens["intervention"] == "landmarks_alone"
    assert exact["n"] == 3
    assert 0.1 < exact["kv_kept"] < 0.3
    refused(f"{evaluate} --data records.jsonl", "--intervention landmarks_alone goes with --task")
    refused(
        f"{evaluate} {task} --predictions answers.jsonl",
        "--intervention landmarks_alone goes with --task",
    )
