"""The client of the script `disturbed.py`, which runs the commands for the tests of this folder."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

TRAINING = ["save_steps=2", "logging_steps=1", "eval_steps=0", "per_device_train_batch_size=4"]
SIZES = [
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "data.block_size=32",
]


def verbs_of(
    corpus: Path, tokens: Path, model: Path, *, steps: int, tuned: int, prompts: int
) -> dict[str, list[str]]:
    """The commands that resume, without `--out`."""

    def train(line: str, *overrides: str) -> list[str]:
        settings = [*overrides, *(f"training.{setting}" for setting in TRAINING)]
        options = [option for setting in settings for option in ("--set", setting)]
        return [*line.split(), *options]

    evaluate = f"evaluate --task parity --model {model} --lengths 64,128 -n {prompts}"
    lengths = "task.train_lengths=[64, 128]"
    return {
        "tokenize": f"tokenize --corpus {corpus} --tokenizer train:400".split(),
        "pretrain": train(
            "pretrain --recipe demo", f"data.tokens={tokens}", f"training.max_steps={steps}", *SIZES
        ),
        "finetune": train(
            f"finetune --task parity --model {model}", lengths, f"training.max_steps={tuned}"
        ),
        "evaluate": evaluate.split(),
    }


def quickly(quick: Sequence[str], values: Iterable[str]) -> list[Any]:
    """Parameters of a test: those in `quick` for every run, the others for a thorough one."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.thorough)
        for value in values
    ]


class Commands:
    """The running script; in a name space of its own where the system allows it, so that it can mount file systems."""

    def __init__(self) -> None:
        mounting = "mount -t tmpfs -o size=1m tmpfs /mnt"
        ways = (["unshare", "-rm"], ["unshare", "-m"])
        self._way = next((way for way in ways if succeeds([*way, "sh", "-c", mounting])), [])
        self._process = subprocess.Popen(
            [*self._way, sys.executable, "-m", "tests.reliability.disturbed"],
            cwd=ROOT,
            # Wide, so that no line is broken, however long the names of folders are.
            env=os.environ | {"COLUMNS": "1000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def carry_through(self, arguments: list[str], out: Path, **kills: Any) -> dict[str, Any]:
        """Run a command, killed as planned; return how it ended, what it printed and how many seconds it took."""
        plan = {"kills": 0, "seed": 0, "inside": None, "faults": {}} | kills
        began = time.monotonic()
        fate = self._ask(plan | {"arguments": [*arguments, "--out", str(out)]})
        return fate | {"seconds": time.monotonic() - began}

    def attempt(self, arguments: list[str], out: Path, **faults: Any) -> tuple[int, str]:
        """Run a command with faults; return its exit status and what it printed."""
        fate = self.carry_through(arguments, out, faults=faults)
        return fate["status"], fate["said"]

    def fail(self, arguments: list[str], out: Path, **faults: Any) -> str:
        """Run a command that must end with one sentence; return the sentence."""
        status, said = self.attempt(arguments, out, **faults)
        return assert_one_sentence(status, said)

    def succeed(self, arguments: list[str], out: Path, **faults: Any) -> str:
        """Run a command that must succeed; return what it printed."""
        status, said = self.attempt(arguments, out, **faults)
        assert status == 0, said
        return said

    def mount(self, folder: Path, options: str) -> None:
        """Mount a file system in memory that only the commands see, or change its options."""
        if not self._way:
            pytest.skip("this process may not mount a file system")
        folder.mkdir(exist_ok=True)
        assert self._ask({"shell": f"mount -t tmpfs -o '{options}' tmpfs '{folder}'"}) == 0

    def copy(self, path: Path, to: Path) -> None:
        """Copy from a mounted file system."""
        assert self._ask({"shell": f"cp -r '{path}' '{to}'"}) == 0

    def stop(self) -> None:
        """End the script."""
        self._process.communicate()

    def _ask(self, plan: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def assert_one_sentence(status: int, said: str) -> str:
    """Check that a command ended with one sentence, as on a user's mistake; return it."""
    assert status == 2, said
    *notices, sentence = said.splitlines()
    expected = r"It is dropped|half a line|^ *[0-9]+% in |^(pretrain|finetune) [0-9]+/[0-9]+: "
    expected += "|^read [0-9,]+ figures|^drawing and writing"  # of report
    expected += "|^(model|task|measured|exact match|token accuracy)[ ,]"  # of evaluate
    unexpected = [line for line in notices if not re.search(expected, line)]
    assert unexpected == [], said
    assert sentence.startswith("metatokens: ")
    assert sentence.endswith(".")
    return sentence


def succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def left(out: Path) -> dict[str, Any]:
    """A run's folder or result file, without the checkpoints, the lock and the dates of results."""
    if out.is_file():
        return {
            "lines": [json.loads(line) | {"created": None} for line in out.read_text().splitlines()]
        }
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts and path.name != ".lock"
    }
