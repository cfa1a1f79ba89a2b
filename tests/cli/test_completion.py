"""Completion in the shell, through bash as users have it; it is quick and complete."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import HEAVY

PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@cache
def completion() -> str:
    """The completion script, as `eval "$(_METATOKENS_COMPLETE=source_bash metatokens)"` runs it."""
    asked = os.environ | {"_METATOKENS_COMPLETE": "source_bash"}
    line = [Path(sys.executable).parent / "metatokens"]
    return subprocess.run(line, env=asked, capture_output=True, text=True, check=True).stdout


def completed(*words: str) -> list[str]:
    """What bash offers for the last word, asked as its completion script asks."""
    script = """
eval "$COMPLETION"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_metatokens_completion metatokens
printf '%s\n' "${COMPREPLY[@]}"
"""
    line = ["bash", "-c", script, "bash", "metatokens", *words]
    told = os.environ | PATH | {"COMPLETION": completion()}
    done = subprocess.run(line, env=told, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@needs_bash
def test_bash_completes_verbs_options_and_names() -> None:
    assert completed("p") == ["pretrain", "perplexity"]
    assert completed("evaluate", "--ta") == ["--task"]
    # Which is not fetched.
    assert completed("evaluate", "--model", "hf:nobody/nothing", "--task", "p") == ["parity"]
    assert completed("reproduce", "--preset", "sm") == ["smoke", "small"]
    assert completed("pretrain", "--recipe", "paper_e") == ["paper_extend"]
    assert completed("analyze", "r") == ["residual", "rate-distortion"]


def test_a_line_with_a_model_is_completed_without_loading_anything() -> None:
    code = """
import json, sys
from metatokens.cli import app
try:
    app(prog_name="metatokens")
except SystemExit:
    print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    line = {
        "COMP_WORDS": "metatokens evaluate --model hf:nobody/nothing --task p",
        "COMP_CWORD": "5",
    }
    told = os.environ | line | {"_METATOKENS_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=told, capture_output=True, text=True, check=True
    )
    offered, loaded = done.stdout.splitlines()
    assert offered == "parity"
    assert HEAVY.isdisjoint(json.loads(loaded))
