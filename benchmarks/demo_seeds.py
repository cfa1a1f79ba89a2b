"""The demo with several seeds: does each of them show what `make demo` shows?

    python -m benchmarks.demo_seeds --seeds 5 --out runs/demo-seeds

List recall comes first, for all seeds. The command resumes a run that was cut short, and prints what it has measured.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from metatokens.paper import presets
from metatokens.paper.run import reproduce
from metatokens.paper.variants import Inspection, Preset
from metatokens.records import Result, read_lines

NAME = "demo"


def main(
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0.")] = 5,
    workers: Annotated[int | None, typer.Option(help="Stages at a time.")] = None,
    task: Annotated[str | None, typer.Option(help="Train and test on this task alone.")] = None,
) -> None:
    """Carry out the demo for all seeds, and print a row for each task, length and model."""
    presets.PRESETS = {**presets.PRESETS, NAME: with_seeds(presets.PRESETS["demo"], seeds)}
    reproduce(NAME, out, only=task, workers=workers)
    [results] = out.glob("results.jsonl*")
    Console(width=160).print(table(list(read_lines(results, Result)), seeds))


def with_seeds(sizes: Preset, seeds: int) -> Preset:
    """The preset with each of its models and inspections for the seeds 0, 1, ..."""
    models = tuple(replace(model, seed=seed) for seed in range(seeds) for model in sizes.models)

    def inspected(inspection: Inspection) -> Inspection:
        names = tuple(model.name for model in models if model.model in inspection.models)
        return replace(inspection, models=names)

    inspections = tuple(inspected(inspection) for inspection in sizes.inspections)
    return replace(sizes, models=models, inspections=inspections, looked_into=())


def table(results: list[Result], seeds: int) -> Table:
    """Exact match in percent, a column for each seed, next to the best shortcut."""
    shortcuts: dict[tuple[Any, ...], float] = defaultdict(float)
    accuracy: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for result in results:
        prompts = (result.task, result.condition, result.length)
        if result.metric == "shortcut" and result.value is not None:
            shortcuts[prompts] = max(shortcuts[prompts], result.value)
        elif (
            result.metric == "exact_match" and result.value is not None and result.seed is not None
        ):
            sees = "covered" if result.intervention else "in sight"
            accuracy[(*prompts, sees, result.model)][result.seed] = result.value
    shown = Table(
        "task",
        "condition",
        "tokens",
        "text",
        "model",
        *(f"seed {seed}" for seed in range(seeds)),
        "shortcut",
    )
    for key in sorted(accuracy):
        cells = [
            f"{100 * accuracy[key][seed]:.1f}" if seed in accuracy[key] else ""
            for seed in range(seeds)
        ]
        shown.add_row(*map(str, key), *cells, f"{100 * shortcuts[key[:3]]:.1f}")
    return shown


if __name__ == "__main__":
    typer.run(main)
