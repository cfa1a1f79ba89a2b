"""`finetune` and `evaluate` on a user's own records."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_lines import Models, Refuse, Run, Succeed, column, read_lines, write_records

OWN = [
    {"prompt": "the cat _PAUSE_ sat", "markers": [7], "completion": " hills"},
    {"prompt": "the cat _PAUSE_ sat", "markers": [], "completion": " river"},
    {"prompt": "two dogs ran over", "completion": " river in spring"},
]
TUNE = "finetune --data own.jsonl --set training.learning_rate=0.02 --set training.warmup_steps=1"


def lines_of(file: str) -> list[dict[str, Any]]:
    return read_lines(Path(file).read_text())


@pytest.fixture
def records(workplace: Path) -> None:
    write_records("own.jsonl", OWN[:2])
    write_records("held_out.jsonl", OWN)


@pytest.mark.usefixtures("records")
def test_own_records_are_trained_on_and_measured(small_model: Models, run: Succeed) -> None:
    tune = (
        f"{TUNE} --model {small_model()} --set training.max_steps=60 --set training.save_steps=60"
    )

    _, error = run(f"{tune} --eval-data held_out.jsonl --out tuned")
    evaluated, _ = run(
        "evaluate --model tuned/data --data held_out.jsonl --predictions answers.jsonl --json"
    )

    *_, progress, last = error.splitlines()
    assert "held-out exact match 66.7%" in progress
    assert last == "models: tuned/data"
    measured = [point for point in lines_of("tuned/data/curve.jsonl") if "eval_loss" in point]
    assert column(measured, "step") == list(range(6, 61, 6))
    assert measured[-1]["eval_exact_match"] == pytest.approx(2 / 3)
    exact, tokens = read_lines(evaluated)
    assert (exact["metric"], exact["value"], exact["n"]) == ("exact_match", 2 / 3, 3)
    assert exact.keys().isdisjoint({"task", "length", "condition", "chance"})
    assert (tokens["metric"], tokens["model"]) == ("token_accuracy", "tuned/data")
    *right, wrong = lines_of("answers.jsonl")
    assert right == [
        record | {"prediction": record["completion"], "exact": True} for record in OWN[:2]
    ]
    assert wrong.pop("prediction") != OWN[2]["completion"]
    assert wrong == OWN[2] | {"markers": [], "exact": False}


@pytest.mark.usefixtures("records")
def test_neither_weights_nor_losses_depend_on_what_is_measured(
    small_model: Models, run: Succeed
) -> None:
    tune = (
        f"{TUNE} --model {small_model()} --set training.max_steps=4 --set training.logging_steps=1"
    )

    run(f"{tune} --eval-data held_out.jsonl --out measured")
    run(f"{tune} --out plain")

    measured, plain = lines_of("measured/data/curve.jsonl"), lines_of("plain/data/curve.jsonl")
    losses = [point for point in measured if "loss" in point]
    assert len(measured) > len(losses) > 0
    assert plain == losses
    assert (
        Path("plain/data/model.safetensors").read_bytes()
        == Path("measured/data/model.safetensors").read_bytes()
    )


def test_records_with_landmarks_are_trained_on_and_measured_alike(
    workplace: Path, small_model: Models, run: Succeed, refused: Refuse
) -> None:
    records = [
        {"prompt": "the cat\nsat", "completion": " hills"},
        {"prompt": "two dogs. Over", "completion": " river"},
    ]
    write_records("own.jsonl", records)
    tune = f"finetune --model {small_model()} --data own.jsonl --eval-data own.jsonl --set training.max_steps=2"

    run(f"{tune} --set task.landmarks=line --out tuned")
    evaluated, _ = run("evaluate --model tuned/data --data own.jsonl --landmarks line --json")

    measured = [point for point in lines_of("tuned/data/curve.jsonl") if "eval_loss" in point]
    exact, _ = read_lines(evaluated)
    assert exact["condition"] == "line"
    assert exact["value"] == measured[-1]["eval_exact_match"]
    assert (
        json.loads(Path("tuned/settings.json").read_text())["recipe"]["task"]["landmarks"] == "line"
    )
    refused(
        f"{tune} --set task.landmarks=sentence --out tuned",
        "task.landmarks was 'line' and is now 'sentence'",
    )


@pytest.mark.parametrize(("unmarked", "warnings"), [(2, 1), (0, 0)])
def test_a_record_with_a_marker_in_its_text_and_no_markers_is_named_once(
    unmarked: int, warnings: int, workplace: Path, small_model: Models, metatokens: Run
) -> None:
    text = {"prompt": "the cat _PAUSE_ sat", "completion": " river"}
    write_records(
        "own.jsonl", [text | {"markers": [7]}, text | {"markers": []}, *[text] * unmarked]
    )

    _, _, error = metatokens(f"evaluate --model {small_model()} --data own.jsonl")

    assert error.count("own.jsonl, record 3: the prompt has ' _PAUSE_' and no markers") == warnings
    assert error.count("no markers") == warnings
