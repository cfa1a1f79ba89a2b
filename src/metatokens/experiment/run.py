"""Carries a plan out: what is done is skipped, what was cut off goes on."""

import platform
import time
from collections.abc import Container, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from metatokens.experiment.display import Display
from metatokens.experiment.ledger import Ledger
from metatokens.experiment.plan import Stage, select, stages
from metatokens.experiment.pools import Pool, open_pool
from metatokens.experiment.presets import preset
from metatokens.experiment.stages import WEIGHTS, Workshop
from metatokens.experiment.variants import Preset, extend_recipe, finetune_recipe, pretrain_recipe
from metatokens.files import write_whole
from metatokens.machine import available_cores
from metatokens.recipe import FinetuneRecipe, PretrainRecipe
from metatokens.records import ModelInfo, RunInfo, library_versions, now
from metatokens.training.run_folder import open_run


def reproduce(
    name: str,
    out: Path,
    *,
    corpus: str | None = None,
    book: str | None = None,
    table: str | None = None,
    executor: str = "processes",
    workers: int | None = None,
    job: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Carry out the stages of a preset; write `results.jsonl`, `analysis.jsonl`, `curves.jsonl` and `run.json`.

    The files of lines are plain until the plan is done, and compressed then (`results.jsonl.gz`).

    Args:
        name: of the preset.
        out: the run's folder. The same preset goes on with what is there; another one is refused.
        corpus: the corpus spec to use in place of the preset's.
        book: the corpus spec of a text that perplexity is measured on too, in place of the preset's.
        table: carry out only the stages whose results stand in this table of the paper, and those that they need.
        executor, workers, job: who carries the stages out, and how many at a time: see `open_pool`.
        overwrite: replace another run in `out`.

    Raises:
        UserError: if the preset, the table or the executor is unknown, the folder holds something else, or a worker
            was killed.
    """
    sizes = preset(name)
    sizes = replace(sizes, corpus=corpus or sizes.corpus, book=book or sizes.book)
    plan = select(stages(sizes), table)
    about = {"preset": name, "corpus": sizes.corpus, "book": sizes.book, "tokenizer": sizes.tokenizer}
    with open_run(out, about, overwrite=overwrite):
        ledger = Ledger(out)
        ledger.check(plan)
        left = _unfinished(ledger, plan)
        if left or not ledger.is_packed:
            ledger.resume()
        created, began, is_first = now(), time.monotonic(), not ledger.entries
        if left or not (out / "run.json").exists():
            pool = open_pool(Workshop(out.resolve(), name, sizes), executor, workers, job or {})
            (out / "run.json").unlink(missing_ok=True)  # which, if this try cannot write it, the next one is to
            try:
                _carry_out(ledger, plan, left, pool)
            finally:
                # Of a run that was cut off, the wall time is not known.
                is_whole = is_first and len(left) == len(ledger.entries)
                seconds = round(time.monotonic() - began, 1) if is_whole else None
                _write_provenance(ledger, name, sizes, workers=pool.size, created=created, wall_seconds=seconds)
        ledger.pack()


def unfinished(name: str, out: Path, *, table: str | None = None) -> list[Stage]:
    """The stages that `reproduce` would carry out.

    Raises:
        UserError: as `reproduce`.
    """
    plan = select(stages(preset(name)), table)
    ledger = Ledger(out)
    ledger.check(plan)
    left = _unfinished(ledger, plan)
    return [stage for stage in plan if stage.name in left]


def _unfinished(ledger: Ledger, plan: list[Stage]) -> set[str]:
    """The stages to carry out: those not in the ledger, and those whose product they need and is not there.

    So a run goes on from its records alone, where the weights were not kept.
    """
    unfinished: set[str] = set()
    needed: set[str] = set()
    for stage in reversed(plan):  # every stage stands after the ones that it needs
        product = None if stage.product is None else ledger.out / stage.product
        is_missing = product is not None and stage.name in needed and not product.exists()
        if is_missing or stage.name not in ledger.entries:
            unfinished.add(stage.name)
            needed.update(stage.after)
    return unfinished


def _carry_out(ledger: Ledger, plan: list[Stage], left: set[str], pool: Pool) -> None:
    by_name = {stage.name: stage for stage in plan}
    order = TopologicalSorter({stage.name: stage.after for stage in plan})
    order.prepare()
    ready: list[str] = []
    running: set[str] = set()
    with Display({stage.name: stage.cost for stage in plan}) as display, pool:
        while order.is_active():
            while names := order.get_ready():  # until what is done already has let all that can begin through
                for name in names:
                    if name not in left:
                        display.skip(name)
                        order.done(name)
                    else:
                        ready.append(name)
            ready.sort(key=lambda name: (-by_name[name].priority, by_name[name].cost))
            while ready and len(running) < pool.size:  # the longest first, so that none is left for the end
                name = ready.pop()
                pool.submit(by_name[name])
                running.add(name)
            if running:
                finished = []
                for name, found in pool.finished():  # filed one by one, since the next one may have failed
                    ledger.enter(by_name[name], found)
                    finished.append(name)
                for name, fraction in pool.progress():
                    display.update(name, fraction)
                for name in finished:
                    running.remove(name)
                    display.finish(name)
                    order.done(name)
                display.refresh(running)


def _write_provenance(ledger: Ledger, name: str, sizes: Preset, **run: Any) -> None:
    """Say what was run where: settings, versions, machine, data, sizes of the models, seconds of every stage so far."""
    entries = ledger.entries
    if "tokenize" not in entries:
        return
    given = {"corpus": sizes.corpus, "book": sizes.book}
    options = [f" --{option} '{spec}'" for option, spec in given.items() if spec != getattr(preset(name), option)]
    provenance = {
        "command": f"metatokens reproduce --preset {name} --out {ledger.out.name}{''.join(options)}",
        "preset": name,
        "recipes": _recipes(sizes, entries),
        "corpus": entries["tokenize"].facts["corpus"],
        "models": {
            one.name: ModelInfo(
                parameters=entries[stage].facts.get("parameters"),
                weights_sha256=entries[stage].facts.get(WEIGHTS),
                description=one.description,
            )
            for one in sizes.variants
            if (stage := f"{one.made_by}-{one.name}") in entries
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cores(),
        "versions": library_versions(),
        "finished": now(),
        "stages": [entry.model_dump(include={"name", "seconds", "cpu_seconds"}) for entry in entries.values()],
        **run,
    }
    write_whole(
        ledger.out / "run.json",
        RunInfo.model_validate(provenance).model_dump_json(indent=1, exclude_defaults=True).encode(),
    )


def _recipes(sizes: Preset, finished: Container[str]) -> dict[str, Any]:
    """The whole settings, defaults too, of what was trained."""
    recipes: dict[str, PretrainRecipe | FinetuneRecipe] = {}
    for one in sizes.variants:
        recipes[f"pretrain-{one.name}"] = pretrained = pretrain_recipe(sizes, one, Path("tokens"))
        if one.extension is not None:
            recipes[f"extend-{one.name}"] = extend_recipe(sizes, one, pretrained)
        recipes |= {f"finetune-{one.name}-{task}": finetune_recipe(sizes, one, task) for task in one.tasks}
    return {stage: recipe.model_dump(mode="json") for stage, recipe in recipes.items() if stage in finished}
