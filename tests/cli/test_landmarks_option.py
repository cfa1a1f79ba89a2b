"""`--landmarks` of the commands that train and measure on text."""

import json
import shutil
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from tests.cli.command_lines import PRETRAIN, SMALL, Models, Refuse, Succeed


@pytest.fixture
def tokens(workplace: Path, small_store: TokenStore) -> TokenStore:
    shutil.copytree(small_store.path, workplace / "tokens")
    return small_store


def test_pretraining_by_a_rule_goes_on_as_another_run_does_not(
    tokens: TokenStore, run: Succeed, refused: Refuse
) -> None:
    _, error = run(f"{PRETRAIN} --landmarks sentence --out base")
    assert error.splitlines()[-1] == "model: base"
    assert json.loads(Path("base/settings.json").read_text())["recipe"]["data"]["placement"] == "sentence"
    run(f"{PRETRAIN} --set data.placement=sentence --out base")  # the same run
    refused(f"{PRETRAIN} --landmarks every:8 --out base", "data.placement was 'sentence' and is now 'every:8'")
    weights = Path("base/model.safetensors").read_bytes()
    run(f"{PRETRAIN} --landmarks every:8 --out other")
    assert Path("other/model.safetensors").read_bytes() != weights

    run(f"extend --model base --factor 2 --original-length 32 --recipe demo {SMALL} --landmarks sentence --out long")
    settings = json.loads(Path("long/settings.json").read_text())["recipe"]["data"]
    assert (settings["placement"], settings["block_size"]) == ("sentence", 64)


def test_perplexity_with_landmarks(tokens: TokenStore, small_model: Models, run: Succeed) -> None:
    measure = f"perplexity --model {small_model()} --corpus tokens --block-size 32 --max-tokens 600 --json"
    lines = {}
    for options in ("", "--landmarks sentence", "--landmarks every:6"):
        lines[options] = json.loads(run(f"{measure} {options}")[0])
    conditions = [line.get("condition") for line in lines.values()]
    assert conditions == ["none", "sentence", "every:6"]
    assert len({line["n"] for line in lines.values()}) == 1
    assert len({line["value"] for line in lines.values()}) == 3


def test_answers_through_landmarks_alone(
    tokens: TokenStore, small_model: Models, run: Succeed, refused: Refuse
) -> None:
    model = small_model(second_attention="meta")
    alone, task = "--intervention landmarks_alone", "--task list_recall --condition facts_1 --lengths 128 -n 3"
    output, _ = run(f"evaluate --model {model} {task} {alone} --json")
    lines = [json.loads(line) for line in output.splitlines()]
    assert [one["intervention"] for one in lines] == ["landmarks_alone"] * 2
    assert lines[0]["n"] == 3
    assert all(0.1 < one["kv_kept"] < 0.3 for one in lines)
    said = "--intervention landmarks_alone goes with --task"
    Path("records.jsonl").write_text('{"prompt": "a", "completion": " b"}\n')
    refused(f"evaluate --model {model} --data records.jsonl {alone}", said)
    refused(f"evaluate --model {model} {task} {alone} --predictions answers.jsonl", said)
