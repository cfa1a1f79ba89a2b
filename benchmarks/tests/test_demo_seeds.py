"""The demo with several seeds: its plan, and the table of what it measured."""

import io
from typing import Any

from rich.console import Console

from benchmarks.demo_seeds import table, with_seeds
from metatokens.paper.plan import stages
from metatokens.paper.presets import PRESETS
from metatokens.records import Result


def test_each_seed_has_the_stages_of_the_demo() -> None:
    once = {stage.name for stage in stages(PRESETS["demo"]) if "look" not in stage.name}
    names = {stage.name for stage in stages(with_seeds(PRESETS["demo"], 2))}
    assert once <= names
    for kind, model in (("pretrain", "meta"), ("finetune", "gpt2"), ("landmarks-alone", "pause")):
        asked = {name for name in once if name.startswith(f"{kind}-{model}")}
        assert asked
        assert {name.replace(f"{kind}-{model}", f"{kind}-{model}-seed1") for name in asked} <= names


def test_a_row_has_all_seeds_next_to_the_best_shortcut() -> None:
    prompts: dict[str, Any] = {
        "task": "parity",
        "condition": "paper",
        "length": 128,
        "n": 10,
        "recipe": "demo",
    }
    measured = [
        Result(**prompts, metric="exact_match", model="meta", seed=0, value=0.9),
        Result(**prompts, metric="exact_match", model="meta", seed=1, value=0.8),
        Result(
            **prompts,
            metric="exact_match",
            model="meta",
            seed=1,
            value=0.1,
            intervention="landmarks_alone",
        ),
        Result(**prompts, metric="shortcut", model="the last bit", seed=2026, value=0.5),
        Result(**prompts, metric="shortcut", model="the first bit", seed=2026, value=0.4),
    ]
    console = Console(file=io.StringIO(), width=160)
    console.print(table(measured, 2))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split() for line in console.file.getvalue().splitlines() if "parity" in line]
    cells = [[cell for cell in row if cell != "│"] for row in rows]
    assert cells == [
        ["parity", "paper", "128", "covered", "meta", "10.0", "50.0"],
        ["parity", "paper", "128", "in", "sight", "meta", "90.0", "80.0", "50.0"],
    ]
