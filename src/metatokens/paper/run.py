"""Carry out a plan: skip what is done, resume what was cut off."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from metatokens.files import write_whole
from metatokens.machine import available_cores
from metatokens.paper.choices import Executor
from metatokens.paper.display import Display
from metatokens.paper.plan import Stage, select, stages
from metatokens.paper.pools import Pool, open_pool
from metatokens.paper.presets import preset
from metatokens.paper.records import ModelInfo, RunInfo
from metatokens.paper.run_log import RunLog
from metatokens.paper.runner import WEIGHTS, Runner
from metatokens.paper.variants import Preset
from metatokens.records import library_versions, now
from metatokens.training.run_folder import open_run


def reproduce(
    name: str,
    out: Path,
    *,
    corpus: str | None = None,
    book: str | None = None,
    only: str | None = None,
    executor: Executor = "processes",
    workers: int | None = None,
    job: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    task_done: Callable[[], None] = lambda: None,
) -> None:
    """Carry out the stages of a preset; write `results.jsonl`, `analysis.jsonl`, `curves.jsonl` and `run.json`.

    The files of lines are plain until the plan is done, and then compressed (`results.jsonl.gz`).

    Args:
        name: of the preset.
        out: the run's folder. A run of the same preset in it is resumed; another one is refused.
        corpus: a corpus spec in place of the preset's.
        book: a corpus spec in place of the preset's second text for perplexity.
        only: carry out only the stages whose results this table or task shows, and those that they need.
        executor, workers, job: see `open_pool`.
        overwrite: replace another run in `out`.
        task_done: called whenever the last accuracy on a task was measured and another task is left.

    Raises:
        UserError: if the preset, the table or the task is unknown, `out` holds another run, the workers refuse their
            options, or a stage fails.
    """
    sizes = preset(name)
    sizes = replace(sizes, corpus=corpus or sizes.corpus, book=book or sizes.book)
    plan = select(stages(sizes), only)
    about = {"preset": name, "corpus": sizes.corpus, "book": sizes.book, "tokenizer": sizes.tokenizer}
    pool = open_pool(Runner(out.resolve(), name, sizes), executor, workers, job or {})
    with pool, open_run(out, about, overwrite=overwrite):  # a pool refuses its options before a run is replaced
        log = RunLog(out)
        log.check(plan)
        left = _unfinished(log, plan)
        if left or not log.is_packed:
            log.resume()
        created, began, is_first = now(), time.monotonic(), not log.entries
        if left or not (out / "run.json").exists():
            (out / "run.json").unlink(missing_ok=True)  # so that the next try writes it if this one does not
            try:
                _carry_out(log, plan, left, pool, task_done)
            finally:
                # The wall time is unknown if the run was cut off before.
                is_whole = is_first and len(left) == len(log.entries)
                seconds = round(time.monotonic() - began, 1) if is_whole else None
                _write_provenance(log, name, sizes, workers=pool.size, created=created, wall_seconds=seconds)
        log.pack()


def unfinished(name: str, out: Path, *, only: str | None = None) -> list[Stage]:
    """The stages that `reproduce` would carry out."""
    plan = select(stages(preset(name)), only)
    log = RunLog(out)
    log.check(plan)
    left = _unfinished(log, plan)
    return [stage for stage in plan if stage.name in left]


def _unfinished(log: RunLog, plan: list[Stage]) -> set[str]:
    """The stages that are not in the log, and those whose product one of them needs and that is missing.

    So a run can go on from its records if the weights were not kept.
    """
    unfinished: set[str] = set()
    needed: set[str] = set()
    for stage in reversed(plan):  # each stage follows those that it needs
        product = None if stage.product is None else log.out / stage.product
        is_missing = product is not None and stage.name in needed and not product.exists()
        if is_missing or stage.name not in log.entries:
            unfinished.add(stage.name)
            needed.update(stage.after)
    return unfinished


def _carry_out(log: RunLog, plan: list[Stage], left: set[str], pool: Pool, task_done: Callable[[], None]) -> None:
    by_name = {stage.name: stage for stage in plan}
    order = TopologicalSorter({stage.name: stage.after for stage in plan})
    order.prepare()
    ready: list[str] = []
    running: set[str] = set()
    task_of = {name: by_name[name].subject["task"] for name in left if by_name[name].method == "evaluate"}
    asked = Counter(task_of.values())
    with Display({stage.name: stage.cost for stage in plan}) as display:
        while order.is_active():
            while names := order.get_ready():  # skipping a finished stage may make others ready
                for name in names:
                    if name not in left:
                        display.skip(name)
                        order.done(name)
                    else:
                        ready.append(name)
            ready.sort(key=lambda name: (-by_name[name].priority, by_name[name].cost))
            while ready and len(running) < pool.size:  # the longest first, so that they do not run alone at the end
                name = ready.pop()
                pool.submit(by_name[name])
                running.add(name)
            if running:
                finished = []
                for name, found in pool.finished():
                    log.add(by_name[name], found)  # at once, since the next stage may have failed
                    finished.append(name)
                for name, fraction in pool.progress():
                    display.update(name, fraction)
                for name in finished:
                    running.remove(name)
                    display.finish(name)
                    order.done(name)
                display.refresh(running)
                tested = Counter(
                    by_name[name].subject["task"] for name in finished if by_name[name].method == "evaluate"
                )
                asked -= tested  # tasks without a model left disappear
                if asked and tested.keys() - asked.keys():
                    task_done()


def _write_provenance(log: RunLog, name: str, sizes: Preset, **run: Any) -> None:
    """Write `run.json`: settings, versions, machine, data, sizes of the models, and the time of each finished stage."""
    entries = log.entries
    if "tokenize" not in entries:
        return
    plan = {stage.name: stage for stage in stages(sizes)}
    given = {"corpus": sizes.corpus, "book": sizes.book}
    options = [f" --{option} '{spec}'" for option, spec in given.items() if spec != getattr(preset(name), option)]
    provenance = {
        "command": f"metatokens reproduce --preset {name} --out {log.out.name}{''.join(options)}",
        "preset": name,
        "recipes": {  # including defaults
            stage.name: stage.options["recipe"].model_dump(mode="json")
            for stage in plan.values()
            if stage.name in entries and "recipe" in stage.options
        },
        "corpus": entries["tokenize"].facts["corpus"],
        "models": {
            one.name: ModelInfo(
                parameters=entries[stage].facts.get("parameters"),
                weights_sha256=entries[stage].facts.get(WEIGHTS),
                description=one.description,
            )
            for one in sizes.models
            if (stage := f"{one.made_by}-{one.name}") in entries
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cores(),
        "versions": library_versions(),
        "finished": now(),
        "stages": [
            entry.model_dump(include={"name", "seconds", "cpu_seconds"})
            | (plan[entry.name].fields(name) if entry.name in plan else {})
            for entry in entries.values()
        ],
        **run,
    }
    write_whole(
        log.out / "run.json", RunInfo.model_validate(provenance).model_dump_json(exclude_defaults=True).encode()
    )
