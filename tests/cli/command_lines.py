"""Command lines of small runs, and the types of the fixtures that run them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SETTINGS = [
    "data.tokens=tokens",
    "data.block_size=32",
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "training.max_steps=2",
    "training.save_steps=2",
    "training.logging_steps=1",
]
SMALL = "--set " + " --set ".join(SETTINGS)
PRETRAIN = f"pretrain --recipe demo {SMALL}"
FINETUNE = (
    "finetune --set training.max_steps=2 --set training.save_steps=2 --set training.logging_steps=1"
)

Run = Callable[[str], tuple[int, str, str]]
Succeed = Callable[[str], tuple[str, str]]
Refuse = Callable[[str, str], None]
Models = Callable[..., Path]
Contents = Callable[[Path], dict[str, bytes]]


def write_records(file: str, records: Iterable[Any]) -> None:
    """Write records as JSON lines."""
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records))


def column(lines: Iterable[dict[str, Any]], name: str) -> list[Any]:
    """A field of every line."""
    return [line[name] for line in lines]


def json_of(file: str) -> Any:
    """What a file of JSON holds."""
    return json.loads(Path(file).read_text())


def read_lines(lines: str) -> list[dict[str, Any]]:
    """Lines of JSON, such as a command prints."""
    return [json.loads(line) for line in lines.splitlines()]
