"""What a person at a terminal gets, and what a pipe gets; the shell's completion; the version."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from metatokens.cli.app import RECIPES, TASKS
from metatokens.tasks import curriculum


def at_a_terminal(arguments: list[str], columns: int = 80) -> tuple[int, str]:
    """The exit status and everything that the command shows on a terminal of this width."""
    leader, follower = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "metatokens", *arguments]
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.PIPE, env=environment) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                chunk = os.read(leader, 4096)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not chunk:
                break
            shown += chunk
        _, error = process.communicate()
    os.close(leader)
    assert process.returncode == 0, error.decode()
    return process.returncode, shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_a_table_and_a_pipe_json_lines(
    small_model: Callable[..., Path], workplace: Path, metatokens: Callable[[str], tuple[int, str, str]]
) -> None:
    line = f"evaluate --model {small_model()} --task parity --lengths 64,96 -n 3 --corpus text.txt --name small"
    status, output, _ = metatokens(line)
    assert status == 0
    records = [json.loads(each) for each in output.splitlines()]
    _, shown = at_a_terminal(line.split())
    table = shown.splitlines()
    assert max(map(len, table)) <= 80
    assert "model small" in table[0]
    assert "task parity" in table[0]
    assert len([row for row in table if row.split()[:1] in (["64"], ["96"])]) == len(records)
    assert all(f"{100 * record['value']:.1f} %" in shown for record in records)
    _, forced = at_a_terminal([*line.split(), "--json"])
    without = [{key: value for key, value in record.items() if key != "created"} for record in records]
    assert [
        {key: value for key, value in json.loads(each).items() if key != "created"} for each in forced.splitlines()
    ] == without


def test_a_perplexity_is_one_row(small_model: Callable[..., Path], workplace: Path) -> None:
    _, shown = at_a_terminal(f"perplexity --model {small_model()} --corpus text.txt --block-size 32".split())
    assert "perplexity" in shown
    assert "{" not in shown


def test_the_version_is_the_packages(metatokens: Callable[[str], tuple[int, str, str]]) -> None:
    assert metatokens("--version") == (0, f"metatokens {version('metatokens')}\n", "")


def test_the_shell_completes_verbs_options_and_names() -> None:
    def completed(*words: str) -> set[str]:
        line = " ".join(("metatokens", *words))
        told = os.environ | {
            "_METATOKENS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words)),
        }  # fmt: skip
        code = "import sys; sys.argv[0] = 'metatokens'; from metatokens.cli import app; app(prog_name='metatokens')"
        run = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, check=False)
        return set(run.stdout.split())

    assert {"pretrain", "perplexity"} <= completed("p")
    assert "--task" in completed("evaluate", "--ta")
    assert completed("evaluate", "--task", "p") == {"parity"}


def test_what_is_completed_is_what_there_is() -> None:
    assert set(TASKS) == set(curriculum.TASKS)
    recipes = {path.name.removesuffix(".yaml") for path in files("metatokens.recipes").iterdir()}
    assert set(RECIPES) == {name for name in recipes if not name.startswith("_")}


def test_the_types_are_for_others_too() -> None:
    assert files("metatokens").joinpath("py.typed").is_file()
