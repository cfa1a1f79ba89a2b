"""Good input of every kind, which the tests of this folder damage."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from metatokens.data.store import TokenStore
from metatokens.files import LOCK
from metatokens.records import MARKER

Lines = list[dict[str, Any]]
Files = dict[str, bytes]  # by name
Clean = Callable[[], AbstractContextManager[None]]  # the fixture `clean`

MADE = {"versions": {"python": "3.11"}, "created": "2026-01-01T00:00:00+00:00"}
RESULTS: Lines = [
    {
        "model": model, "position_embedding": "rope", "task": task, "condition": "paper", "train_condition": "paper",
        "train_length": 128, "length": length, "metric": metric, "value": 0.5, "n": 20, "low": 0.3, "high": 0.7,
        "chance": 0.1, "seed": 0, "recipe": "demo", "hits": "/8AA" if metric == "exact_match" else None, **MADE,
    }
    for model in ("gpt2", "meta") for task in ("parity", "own") for length in (128, 256)
    for metric in ("exact_match", "token_accuracy")
]  # fmt: skip
RESULTS.append({"model": "meta", "metric": "perplexity", "value": 40.0, "n": 900, "seed": 0, "chance": 300.0, **MADE})
ANALYSES: Lines = [
    {
        "analysis": "sharpness", "model": "meta", "position_embedding": "rope", "seed": 0, "value": 0.1, "n": 5,
        "metric": "attention_entropy_change", "module": "attention", "layer": 0, "head": None, "keys": "near",
        "quantiles": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], **MADE,
    }
]  # fmt: skip
CURVES: Lines = [
    {"model": "meta", "seed": 0, "step": step, "loss": 2.0, "task": task, "train_length": 128}
    for step in (1, 2) for task in (None, "parity")
]  # fmt: skip
CURVES.append(
    {"model": "meta", "seed": 0, "step": 5, "text_tokens": 900, "exact_match": 0.4, "n": 10, "task": "parity"}
)
SHOWN: Lines = [{"task": "parity", "prompt": f"Bits: 1{MARKER} 0", "markers": [7], "completion": " 1", "phase": 1}]
SPEEDS: Lines = [
    {
        "benchmark": "train", "model": "meta", "against": "gpt2", "shape": "tiny", "length": 32, "batch": 1,
        "text_tokens": 32, "n": 3, "seconds": 0.1, "ratio": 1.1, "ratio_low": 1.0, "ratio_high": 1.2, "limit": 1.3,
        "threads": 1, "device": "cpu", "dtype": "float32", "parameters": 9, "repeats": 1, "rounds": [0.1], "low": 0.1,
        "high": 0.1, "ratio_per_text_token": 1.0, "limit_per_text_token": 1.0, "over_products": 1.0, "compiled": False,
    }
]  # fmt: skip
RUN = {
    "command": "metatokens reproduce", "preset": "demo", "recipes": {"pretrain": {"seed": 1}}, "cores": 2,
    "created": "2026-01-01T00:00:00+00:00", "stages": [{"name": "tokenize", "seconds": 1.0}],
    "corpus": {"spec": "builtin"}, "models": {"meta": {"parameters": 5, "description": "a model"}}, "wall_seconds": 3.0,
}  # fmt: skip
STAGES: Lines = [
    {
        "name": name, "seconds": 1.0, "cpu_seconds": 1.0, "settings": {"seed": 0}, "facts": {}, "lines": {"results": 1},
        "finished": "2026-01-01T00:00:00+00:00", "versions": {},
    }
    for name in "ab"
]  # fmt: skip
RECORDS: Lines = [{"prompt": f"a{MARKER} b", "markers": [1], "completion": " c"}, {"prompt": "a", "completion": "b"}]


class Good(NamedTuple):
    """Good input that takes a while to make: a token store, a model of each kind, and the examples of a fine-tuning."""

    store: TokenStore
    models: dict[str, Path]
    examples: bytes


def lines_of(records: Lines) -> bytes:
    return b"\n".join(json.dumps(record).encode() for record in records)


def files_of(folder: Path) -> Files:
    """Every file of a folder, except its lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK
    }
