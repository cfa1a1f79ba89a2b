"""`finetune` and `evaluate` on a user's own records."""

import json
from pathlib import Path

import pytest

from metatokens.records import Result, read_lines
from metatokens.tasks import scoring
from tests.cli.command_lines import Models, Refuse, Run, Succeed, write_records

OWN = [
    {"prompt": "the cat _PAUSE_ sat", "markers": [7], "completion": " hills"},
    {"prompt": "the cat _PAUSE_ sat", "markers": [], "completion": " river"},
    {"prompt": "two dogs ran over", "completion": " river in spring"},
]


def test_own_records_are_trained_on_and_measured(
    workplace: Path, small_model: Models, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, records in (("own", OWN[:2]), ("held_out", OWN[1:])):
        write_records(f"{name}.jsonl", records)
    tuned = (
        f"finetune --model {small_model()} --data own.jsonl --train-lengths 64 --set training.max_steps=60 "
        "--set training.save_steps=60 --set training.learning_rate=0.02 --set training.warmup_steps=1"
    )
    status, output, error = metatokens(f"{tuned} --eval-data held_out.jsonl --out tuned --json")
    first, *_, progress, last = error.splitlines()
    assert (status, last) == (0, "models: tuned/data")
    assert first == "--train-lengths is ignored: the records of --data are used whatever their length."
    assert "held-out loss" in progress
    assert "held-out exact match 50.0%" in progress
    curve = [json.loads(line) for line in Path("tuned/data/curve.jsonl").read_text().splitlines()]
    measured = [point for point in curve if "eval_loss" in point]
    assert [point["step"] for point in measured] == list(range(6, 61, 6))
    assert measured[0].keys() == {"step", "eval_loss", "eval_exact_match"}
    assert measured[-1]["eval_exact_match"] == 0.5
    Path("printed.jsonl").write_text(output)
    exact, tokens = read_lines(Path("printed.jsonl"), Result)
    assert (exact.metric, exact.value, exact.n, exact.task, exact.length, exact.condition, exact.chance) == (
        "exact_match", 0.5, 2, None, None, None, None
    )  # fmt: skip
    assert (tokens.metric, tokens.model, exact.low is not None) == ("token_accuracy", "tuned/data", True)

    # Neither the weights nor the losses depend on what was measured.
    assert metatokens(f"{tuned} --out plain")[0] == 0
    assert Path("plain/data/model.safetensors").read_bytes() == Path("tuned/data/model.safetensors").read_bytes()
    losses = [json.loads(line) for line in Path("plain/data/curve.jsonl").read_text().splitlines()]
    assert losses == [point for point in curve if "loss" in point]

    evaluation = "evaluate --model tuned/data --data held_out.jsonl --predictions answers.jsonl --json"
    status, output, error = metatokens(evaluation)
    assert (status, error, [json.loads(line)["value"] for line in output.splitlines()]) == (0, "", [0.5, tokens.value])
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["exact"] for answer in answers] == [True, False]
    for answer, record in zip(answers, OWN[1:], strict=True):
        assert answer.keys() == {"prompt", "markers", "completion", "prediction", "exact"}
        assert {"markers": []} | record == {name: answer[name] for name in ("prompt", "markers", "completion")}
        assert (answer["prediction"] == record["completion"]) == answer["exact"]

    scored: list[int] = []
    hits = scoring._hits
    monkeypatch.setattr(scoring, "_hits", lambda *args: scored.append(len(args[1])) or hits(*args))
    status, output, _ = metatokens(
        "evaluate --model tuned/data --task parity --lengths 64,128 -n 6 --predictions parity.jsonl --json"
    )
    assert sum(scored) == 12  # each prompt once
    answers = [json.loads(line) for line in Path("parity.jsonl").read_text().splitlines()]
    values = [line["value"] for line in map(json.loads, output.splitlines()) if line["metric"] == "exact_match"]
    assert values == [sum(answer["exact"] for answer in answers[start : start + 6]) / 6 for start in (0, 6)]


def test_records_with_landmarks_are_trained_on_and_measured_alike(
    workplace: Path, small_model: Models, run: Succeed, refused: Refuse
) -> None:
    records = [{"prompt": "the cat\nsat", "completion": " hills"}, {"prompt": "two dogs. Over", "completion": " river"}]
    write_records("own.jsonl", records)
    tune = f"finetune --model {small_model()} --data own.jsonl --eval-data own.jsonl --set training.max_steps=2"
    output, _ = run(f"{tune} --landmarks line --out tuned --json")
    printed = [json.loads(line) for line in output.splitlines()]
    assert {line["condition"] for line in printed} == {"line"}
    assert json.loads(Path("tuned/settings.json").read_text())["recipe"]["task"]["landmarks"] == "line"
    refused(f"{tune} --landmarks sentence --out tuned", "task.landmarks was 'line' and is now 'sentence'")
    output, _ = run("evaluate --model tuned/data --data own.jsonl --landmarks line --json")
    again = [json.loads(line) for line in output.splitlines()]
    assert [(line["value"], line["condition"]) for line in again] == [(line["value"], "line") for line in printed]


def test_a_record_with_a_marker_in_its_text_and_no_markers_is_named_once(
    workplace: Path, small_model: Models, metatokens: Run
) -> None:
    text = {"prompt": "the cat _PAUSE_ sat", "completion": " river"}
    silent = [text | {"markers": [7]}, text | {"markers": []}, {"prompt": "two dogs", "completion": " river"}]
    line = f"evaluate --model {small_model()} --data"
    for name, records in (("told", [*silent, text, text]), ("silent", silent)):
        write_records(f"{name}.jsonl", records)
        _, _, error = metatokens(f"{line} {name}.jsonl")
        lines = [one for one in error.splitlines() if "no markers" in one]
        assert len(lines) == (name == "told")
        assert all(one.startswith("told.jsonl, line 4: the prompt has ' _PAUSE_' and no markers") for one in lines)
