"""Good input of every kind, which the tests of this folder damage."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from metatokens.data.store import TokenStore
from metatokens.files import LOCK
from metatokens.records import MARKER
from tests.paper.report import made_lines

Files = dict[str, bytes]  # by name
RECORDS = [
    {"prompt": f"a{MARKER} b", "markers": [1], "completion": " c"},
    {"prompt": "a", "completion": "b"},
]
RECIPE = b"""\
data: {tokens: tokens, block_size: 32, fraction: 0.1}
model: {hidden_size: 16, second_attention: meta}
training:
  max_steps: 10  # a comment
  learning_rate: 1.0e-3
"""


class Good(NamedTuple):
    """Good input that takes a while to make: a token store and a model of each kind."""

    store: TokenStore
    models: dict[str, Path]


def lines_of(records: list[dict[str, Any]]) -> bytes:
    """A file of JSON lines."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def files_of(folder: Path) -> Files:
    """Every file of a folder, except its lock."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != LOCK:
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def run_folder() -> Files:
    """A run's files of lines, and its provenance."""
    results = [
        made_lines.accuracy(0.5, hits="/8AA", n=20, recipe="demo"),
        made_lines.accuracy(0.5, model="gpt2", task="own", recipe="demo"),
        made_lines.perplexity(40.0, recipe="demo"),
    ]
    curves = [
        made_lines.recall(5, 0.4, recipe="demo"),
    ]
    sharpness = made_lines.inner(
        "sharpness",
        "attention_entropy_change",
        0.1,
        recipe="demo",
        module="attention",
        layer=0,
        keys="near",
    )
    return {
        "results.jsonl": lines_of(results),
        "curves.jsonl": lines_of(curves),
        "analysis.jsonl": lines_of([sharpness]),
        "examples.jsonl": lines_of(made_lines.EXAMPLES),
        "run.json": json.dumps(made_lines.RUN).encode(),
    }
