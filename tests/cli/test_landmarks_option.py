"""`--landmarks` of the commands that train and measure on text."""

import json
import shutil
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from tests.cli.command_lines import PRETRAIN, SMALL, Models, Run


@pytest.fixture
def tokens(workplace: Path, small_store: TokenStore) -> TokenStore:
    shutil.copytree(small_store.path, workplace / "tokens")
    return small_store


def test_pretraining_by_a_rule_goes_on_as_another_run_does_not(tokens: TokenStore, metatokens: Run) -> None:
    status, _, error = metatokens(f"{PRETRAIN} --landmarks sentence --out base")
    assert (status, error.splitlines()[-1]) == (0, "model: base")
    assert json.loads(Path("base/settings.json").read_text())["recipe"]["data"]["placement"] == "sentence"
    assert metatokens(f"{PRETRAIN} --set data.placement=sentence --out base")[0] == 0  # the same run
    status, _, error = metatokens(f"{PRETRAIN} --landmarks every:8 --out base")
    assert (status, "data.placement was 'sentence' and is now 'every:8'" in error) == (2, True)
    weights = Path("base/model.safetensors").read_bytes()
    assert metatokens(f"{PRETRAIN} --landmarks every:8 --out other")[0] == 0
    assert Path("other/model.safetensors").read_bytes() != weights

    extend = (
        f"extend --model base --factor 2 --original-length 32 --recipe demo {SMALL} --landmarks sentence --out long"
    )
    assert metatokens(extend)[0] == 0
    settings = json.loads(Path("long/settings.json").read_text())["recipe"]["data"]
    assert (settings["placement"], settings["block_size"]) == ("sentence", 64)


def test_perplexity_with_landmarks(tokens: TokenStore, small_model: Models, metatokens: Run) -> None:
    measure = f"perplexity --model {small_model()} --corpus tokens --block-size 32 --max-tokens 600"
    lines = {}
    for options in ("", "--landmarks sentence", "--landmarks every:6"):
        status, output, error = metatokens(f"{measure} {options}")
        assert (status, error) == (0, "")
        lines[options] = json.loads(output)
    conditions = [line.get("condition") for line in lines.values()]
    assert conditions == ["none", "sentence", "every:6"]
    assert len({line["n"] for line in lines.values()}) == 1
    assert len({line["value"] for line in lines.values()}) == 3
