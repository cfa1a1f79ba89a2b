"""The command as a whole: help, its page in the documentation, dry runs, wrong usage."""

import html
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from metatokens.cli import PANELS, app, main
from metatokens.errors import UserError
from tests.cli.command_lines import Run

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = [(verb, option) for verb, command in COMMANDS.items() for option in command.params if option.name != "help"]


def test_the_version_is_the_packages(metatokens: Run) -> None:
    assert metatokens("--version") == (0, f"metatokens {version('metatokens')}\n", "")


def test_help_lists_the_verbs_in_the_order_of_their_use(metatokens: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip("│╭╮─ ") for line in metatokens("--help")[1].splitlines()]
    listed = [line for line in lines if line in PANELS or line.split(" ")[0] in COMMANDS]
    expected = []
    for panel, verbs in PANELS.items():
        expected += [panel, *(f"{verb.__name__:<10}  {verb.__doc__.splitlines()[0]}" for verb in verbs if verb.__doc__)]
    assert listed == expected  # one line each
    assert all(command.short_help.endswith(".") for command in COMMANDS.values())


def test_every_option_says_what_it_is_and_takes() -> None:
    for verb, option in OPTIONS:
        assert option.help, (verb, option.name)
        assert option.help.endswith("."), (verb, option.name)
        assert option.metavar or getattr(option, "is_flag", False), (verb, option.name)


def test_help_shows_no_types_of_flags(metatokens: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for verb in ("", *COMMANDS):
        assert "<bool>" not in metatokens(f"{verb} --help")[1]


def test_an_option_takes_the_same_in_every_verb() -> None:
    takes = defaultdict(set)
    for _, option in OPTIONS:
        takes[option.opts[0]].add(option.metavar)
    several = {name: metavars for name, metavars in takes.items() if len(metavars) > 1}
    assert several == {"--out": {"DIR", "FILE"}, "--corpus": {"CORPUS", "CORPUS|DIR"}}


def test_the_documentation_has_a_page_of_the_commands() -> None:
    line = [sys.executable, "-m", "typer", "metatokens.cli", "utils", "docs", "--name", "metatokens"]
    page = html.unescape(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    headings = [part.splitlines()[0] for part in page.split("\n## ")[1:]]
    assert headings == [f"`metatokens {verb}`" for verb in COMMANDS]
    for command in COMMANDS.values():
        assert f"`: {command.short_help}\n" in page  # whole


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
    (script,) = entry_points(group="console_scripts", name="metatokens")
    assert script.load() is main


def test_without_a_verb_the_verbs_are_listed(metatokens: Run) -> None:
    status, output, error = metatokens("")
    assert status == 2
    assert all(f" {verb} " in output + error for verb in COMMANDS)


def test_wrong_usage_of_a_verb_exits_with_2_as_well(metatokens: Run) -> None:
    for line in ("trane", "pretrain", "generate --model m --max-new-tokens many the"):
        status, output, error = metatokens(line)
        assert (status, output) == (2, "")
        assert "Traceback" not in error


def test_debug_shows_the_traceback(metatokens: Run) -> None:
    with pytest.raises(UserError, match="no preset 'huge'"):
        metatokens("--debug reproduce --preset huge --out new")
