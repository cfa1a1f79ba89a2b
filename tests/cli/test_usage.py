"""The command as a whole: its verbs, what a run would cost, wrong usage."""

import importlib.metadata
from pathlib import Path

import pytest

from metatokens import cli
from metatokens.errors import UserError
from tests.cli.command_lines import Run


def test_a_dry_run_prints_the_stages_and_their_cost(metatokens: Run, tmp_path: Path) -> None:
    status, output, error = metatokens(f"reproduce --preset demo --out {tmp_path / 'new'} --only table9 --dry-run")
    assert status == 0
    stages = [line.split() for line in output.splitlines()]
    assert stages[0][1:] == ["min", "tokenize"]
    assert {"finetune-meta-parity", "evaluate-gpt2-parity"} <= {name for _, _, name in stages}
    assert not [name for _, _, name in stages if "copying" in name]
    count, total = len(stages), sum(float(minutes) for minutes, _, _ in stages) / 60
    assert error.startswith(f"{count} stages, an estimated ")
    assert float(error.split()[4]) == pytest.approx(total, abs=0.05 * count)
    assert not (tmp_path / "new").exists()


def test_the_installed_command_is_this_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="metatokens")
    assert script.load() is cli.main


def test_without_a_verb_the_verbs_are_listed(metatokens: Run) -> None:
    verbs = (
        "reproduce", "tokenize", "pretrain", "extend", "finetune", "report",
        "sample", "evaluate", "analyze", "perplexity", "generate", "look",
    )  # fmt: skip
    status, output, error = metatokens("")
    assert status == 2
    assert all(f" {verb} " in output + error for verb in verbs)
    assert metatokens("--help")[0] == 0


def test_wrong_usage_of_a_verb_exits_with_2_as_well(metatokens: Run) -> None:
    for line in ("trane", "pretrain", "generate --model m --max-new-tokens many the"):
        status, output, error = metatokens(line)
        assert (status, output) == (2, "")
        assert "Traceback" not in error


def test_debug_shows_the_traceback(metatokens: Run) -> None:
    with pytest.raises(UserError, match="no preset 'huge'"):
        metatokens("--debug reproduce --preset huge --out new")
