"""Completion in the shell is quick: it offers names, and loads no library for that."""

import json
import os
import subprocess
import sys

import pytest

from tests.test_imports import HEAVY

CODE = """
import json, sys
from metatokens.cli import app
try:
    app(prog_name="metatokens")
except SystemExit:
    print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("metatokens p", ["pretrain", "perplexity"]),
        ("metatokens evaluate --model hf:nobody/nothing --task p", ["parity"]),
        ("metatokens reproduce --preset sm", ["smoke", "small"]),
        ("metatokens pretrain --recipe paper_e", ["paper_extend"]),
    ],
)
def test_names_are_offered_without_loading_anything(line: str, offered: list[str]) -> None:
    asked = {
        "_METATOKENS_COMPLETE": "complete_bash",  # as the script of bash asks
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=True,
    )
    *words, loaded = done.stdout.splitlines()
    assert words == offered
    assert HEAVY.isdisjoint(json.loads(loaded))
