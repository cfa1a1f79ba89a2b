"""Carries a plan out in worker processes: what is done is skipped, what was cut off goes on.

A stage is done when `stages/NAME.json` is there, which holds its result lines and its seconds and is moved in last.
"""

import json
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from graphlib import TopologicalSorter
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch

from metatokens.errors import UserError
from metatokens.evaluation.results import library_versions, now
from metatokens.experiment.display import Display
from metatokens.experiment.plan import MODELS, Preset, Stage, finetune_recipe, preset, pretrain_recipe, stages
from metatokens.experiment.stages import Outcome, Workshop, carry_out
from metatokens.training.trainer import open_run


def reproduce(
    name: str, out: Path, *, corpus: str | None = None, workers: int | None = None, overwrite: bool = False
) -> None:
    """Carry out every stage of a preset; write `results.jsonl`, `curves.jsonl`, `examples.jsonl` and `run.json`.

    Args:
        name: of the preset.
        out: the run's folder. The same preset goes on with what is there; another one is refused.
        corpus: the corpus spec to use in place of the preset's.
        workers: processes, of one thread each; default: the cores that this process may use.
        overwrite: replace another run in `out`.

    Raises:
        UserError: if the preset is unknown, the folder holds something else, or a worker was killed.
    """
    sizes = preset(name)
    if corpus is not None:
        sizes = replace(sizes, corpus=corpus)
    settings = {
        f"pretrain {one.name}": pretrain_recipe(sizes, one, Path("tokens")).model_dump(mode="json")
        for one in sizes.variants
        if one.pretrained_as is None
    }
    for one in sizes.variants:
        own = f"{one.name} " if one.finetune_overrides or one.seed else ""
        for task in one.tasks:
            settings[f"finetune {own}{task}"] = finetune_recipe(sizes, one, task).model_dump(mode="json")
    about = {"preset": name, "corpus": sizes.corpus, "recipes": settings, "tests": dict(sizes.test_counts)}
    open_run(out, about, overwrite=overwrite)
    (out / "stages").mkdir(exist_ok=True)

    plan = stages(sizes)
    workers = workers or available_cores()
    created, began = now(), time.monotonic()
    left = _unfinished(out, plan)
    if left or not (out / "run.json").exists():
        _carry_out(Workshop(out, name, sizes), plan, left, workers)
        # Of a run that was cut off, the wall time is not known.
        seconds = round(time.monotonic() - began, 1) if len(left) == len(plan) else None
        _write_provenance(out, name, settings, plan, sizes, workers=workers, created=created, wall_seconds=seconds)
    records = [_read_record(out, stage) for stage in plan]
    _write_lines(out / "results.jsonl", (json.loads(r.model_dump_json()) for record in records for r in record.results))
    _write_lines(out / "curves.jsonl", (point for record in records for point in record.curves))


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Record(Outcome):
    """What `stages/NAME.json` holds."""

    seconds: float


def _record(out: Path, stage: Stage) -> Path:
    return out / "stages" / f"{stage.name}.json"


def _read_record(out: Path, stage: Stage) -> Record:
    return Record.model_validate_json(_record(out, stage).read_text(encoding="utf-8"))


def _unfinished(out: Path, plan: list[Stage]) -> set[str]:
    """The stages to carry out: those without a record, and those whose product they need and is not there.

    So a run goes on from its records alone, where the weights were not kept.
    """
    unfinished: set[str] = set()
    needed: set[str] = set()
    for stage in reversed(plan):  # every stage stands after the ones that it needs
        product = None if stage.product is None else out / stage.product
        is_missing = product is not None and stage.name in needed and not product.exists()
        if is_missing or not _record(out, stage).exists():
            unfinished.add(stage.name)
            needed.update(stage.after)
    return unfinished


def _carry_out(workshop: Workshop, plan: list[Stage], left: set[str], workers: int) -> None:
    by_name = {stage.name: stage for stage in plan}
    order = TopologicalSorter({stage.name: stage.after for stage in plan})
    order.prepare()
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    ready: list[str] = []
    running: dict[Future[None], str] = {}
    with (
        Display({stage.name: stage.cost for stage in plan}) as display,
        ProcessPoolExecutor(workers, context, _start_worker, (reports,)) as pool,
    ):
        try:
            while order.is_active():
                for name in order.get_ready():
                    if name not in left:
                        display.skip(name)
                        order.done(name)
                    else:
                        ready.append(name)
                ready.sort(key=lambda name: (-by_name[name].priority, by_name[name].cost))
                while ready and len(running) < workers:  # the longest first, so that none is left for the end
                    stage = by_name[ready.pop()]
                    running[pool.submit(_work, workshop, stage)] = stage.name
                if running:
                    done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    while not reports.empty():
                        display.update(*reports.get())
                    for future in done:
                        future.result()
                        name = running.pop(future)
                        display.finish(name)
                        order.done(name)
                    display.refresh(running.values())
        except BrokenProcessPool as error:
            raise UserError(
                f"a worker was killed while it did {', '.join(sorted(running.values()))} (too little memory is the "
                "usual reason); the same command goes on from here, and --workers 1 needs less."
            ) from error
        except BaseException:
            # Without this, leaving the pool would wait for stages of minutes.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


_reports: Any = None  # in a worker: the queue that progress is put into


def _start_worker(reports: Any) -> None:
    global _reports
    _reports = reports
    # Ctrl-C reaches every process of the terminal. The parent hears it and ends its workers; a worker that ended by
    # itself could make the parent report a broken pool instead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    torch.set_num_threads(1)  # two processes of one thread beat one of two for small models


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_any([parent.sentinel])
    os._exit(1)


def _work(workshop: Workshop, stage: Stage) -> None:
    began = time.monotonic()
    outcome = carry_out(
        workshop, stage.verb, stage.arguments, lambda done, total: _reports.put((stage.name, done / total))
    )
    record = Record(**dict(outcome), seconds=round(time.monotonic() - began, 1))
    _write(_record(workshop.out, stage), record.model_dump_json())


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(record) + "\n" for record in records))


def _write_provenance(
    out: Path, name: str, settings: dict[str, Any], plan: list[Stage], sizes: Preset, **run: Any
) -> None:
    """Say what was run where: settings, versions, machine, data, sizes of the models, seconds of every stage."""
    records = {stage.name: _read_record(out, stage) for stage in plan}
    models = {
        one.name: {
            "parameters": records[f"pretrain-{one.name}"].facts["parameters"],
            "description": MODELS[one.model]["description"],
        }
        for one in sizes.variants
        if one.pretrained_as is None
    }
    provenance = {
        "command": f"metatokens reproduce --preset {name} --out {out.name}"
        + (f" --corpus '{sizes.corpus}'" if sizes.corpus != preset(name).corpus else ""),
        "preset": name,
        "recipes": settings,
        "corpus": records["tokenize"].facts["corpus"],
        "models": models,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cores(),
        "versions": library_versions(),
        "finished": now(),
        "stages": [{"name": name, "seconds": record.seconds} for name, record in records.items()],
        **run,
    }
    _write(out / "run.json", json.dumps(provenance, indent=1))
