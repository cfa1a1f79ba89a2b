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
OPTIONS = [
    (verb, option)
    for verb, command in COMMANDS.items()
    for option in command.params
    if option.name != "help"
]


def test_the_version_is_the_packages(metatokens: Run) -> None:
    assert metatokens("--version") == (0, f"metatokens {version('metatokens')}\n", "")


def test_help_lists_the_verbs_in_the_order_of_their_use(
    metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = []
    for panel, verbs in PANELS.items():
        expected.append(panel)
        expected += [f"{verb.__name__:<10}  {verb.__doc__.splitlines()[0]}" for verb in verbs]
    monkeypatch.setenv("COLUMNS", "80")

    _, output, _ = metatokens("--help")

    lines = [line.strip("│╭╮─ ") for line in output.splitlines()]
    listed = [line for line in lines if line in PANELS or line.split(" ")[0] in COMMANDS]
    assert listed == expected  # one line each


@pytest.mark.parametrize(
    ("verb", "option"), OPTIONS, ids=[f"{verb} {option.opts[0]}" for verb, option in OPTIONS]
)
def test_every_option_says_what_it_is_and_takes(verb: str, option: Any) -> None:
    assert option.help.endswith(".")
    assert option.metavar or option.is_flag


def test_an_option_takes_the_same_in_every_verb() -> None:
    metavars_of = defaultdict(set)
    for _, option in OPTIONS:
        metavars_of[option.opts[0]].add(option.metavar)

    several = {name: metavars for name, metavars in metavars_of.items() if len(metavars) > 1}

    assert several == {"--out": {"DIR", "FILE"}, "--corpus": {"CORPUS", "CORPUS|DIR"}}


def test_the_documentation_has_a_page_of_the_commands() -> None:
    line = [
        sys.executable,
        "-m",
        "typer",
        "metatokens.cli",
        "utils",
        "docs",
        "--name",
        "metatokens",
    ]

    page = html.unescape(subprocess.run(line, capture_output=True, text=True, check=True).stdout)

    headings = [part.splitlines()[0] for part in page.split("\n## ")[1:]]
    cut_short = [
        verb for verb, command in COMMANDS.items() if f"`: {command.short_help}\n" not in page
    ]
    expected = [f"`metatokens {verb}`" for verb in COMMANDS]
    assert headings == expected
    assert cut_short == []


def test_a_dry_run_prints_the_stages(metatokens: Run, tmp_path: Path) -> None:
    status, output, error = metatokens(
        f"reproduce --preset demo --out {tmp_path / 'new'} --only table9 --dry-run"
    )

    names = output.splitlines()
    assert (status, error, names[0]) == (0, "", "tokenize")
    assert {"finetune-meta-parity", "evaluate-gpt2-parity"} <= set(names)
    assert "copying" not in output
    assert not (tmp_path / "new").exists()


def test_the_installed_command_is_this_one() -> None:
    (script,) = entry_points(group="console_scripts", name="metatokens")
    assert script.load() is main


def test_without_a_verb_the_verbs_are_listed(metatokens: Run) -> None:
    status, output, error = metatokens("")

    missing = [verb for verb in COMMANDS if f" {verb} " not in output + error]
    assert (status, missing) == (2, [])


def test_debug_shows_the_traceback(metatokens: Run) -> None:
    with pytest.raises(UserError, match="no preset 'huge'"):
        metatokens("--debug reproduce --preset huge --out new")
