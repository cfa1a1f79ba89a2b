"""Carries a plan out in worker processes: what is done is skipped, what was cut off goes on."""

import json
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Container
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
from metatokens.experiment.ledger import Ledger, write_whole
from metatokens.experiment.plan import Stage, select, stages
from metatokens.experiment.presets import preset
from metatokens.experiment.stages import Outcome, Workshop, carry_out
from metatokens.experiment.variants import Preset, finetune_recipe, pretrain_recipe
from metatokens.recipe import FinetuneRecipe, PretrainRecipe
from metatokens.training.run_folder import open_run


def reproduce(
    name: str,
    out: Path,
    *,
    corpus: str | None = None,
    book: str | None = None,
    table: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Carry out the stages of a preset; write `results.jsonl`, `analysis.jsonl`, `curves.jsonl` and `run.json`.

    Args:
        name: of the preset.
        out: the run's folder. The same preset goes on with what is there; another one is refused.
        corpus: the corpus spec to use in place of the preset's.
        book: the corpus spec of a text that perplexity is measured on too, in place of the preset's.
        table: carry out only the stages whose results stand in this table of the paper, and those that they need.
        workers: processes, of one thread each; default: the cores that this process may use.
        overwrite: replace another run in `out`.

    Raises:
        UserError: if the preset or the table is unknown, the folder holds something else, or a worker was killed.
    """
    sizes = preset(name)
    sizes = replace(sizes, corpus=corpus or sizes.corpus, book=book or sizes.book)
    plan = select(stages(sizes), table)
    about = {"preset": name, "corpus": sizes.corpus, "book": sizes.book, "tokenizer": sizes.tokenizer}
    with open_run(out, about, overwrite=overwrite):
        ledger = Ledger(out)
        ledger.check(plan)
        ledger.resume()
        workers = workers or available_cores()
        created, began = now(), time.monotonic()
        left = _unfinished(ledger, plan)
        if left or not (out / "run.json").exists():
            try:
                _carry_out(Workshop(out, name, sizes), ledger, plan, left, workers)
            finally:
                # Of a run that was cut off, the wall time is not known.
                seconds = round(time.monotonic() - began, 1) if len(left) == len(ledger.entries) else None
                _write_provenance(ledger, name, sizes, workers=workers, created=created, wall_seconds=seconds)


def unfinished(name: str, out: Path, *, table: str | None = None) -> list[Stage]:
    """The stages that `reproduce` would carry out.

    Raises:
        UserError: as `reproduce`.
    """
    plan = select(stages(preset(name)), table)
    left = _unfinished(Ledger(out), plan)
    return [stage for stage in plan if stage.name in left]


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _carry_out(workshop: Workshop, ledger: Ledger, plan: list[Stage], left: set[str], workers: int) -> None:
    by_name = {stage.name: stage for stage in plan}
    order = TopologicalSorter({stage.name: stage.after for stage in plan})
    order.prepare()
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    ready: list[str] = []
    running: dict[Future[tuple[Outcome, dict[str, float]]], str] = {}
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
                        outcome, times = future.result()
                        name = running.pop(future)
                        ledger.enter(by_name[name], outcome, **times)
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


def _work(workshop: Workshop, stage: Stage) -> tuple[Outcome, dict[str, float]]:
    began, began_on_cpu = time.monotonic(), time.process_time()
    outcome = carry_out(
        workshop, stage.verb, stage.arguments, lambda done, total: _reports.put((stage.name, done / total))
    )
    return outcome, {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - began_on_cpu}


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
            stage.split("-", 1)[1]: entry.facts for stage, entry in entries.items() if "parameters" in entry.facts
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cores(),
        "versions": library_versions(),
        "finished": now(),
        "stages": [entry.model_dump(include={"name", "seconds", "cpu_seconds"}) for entry in entries.values()],
        **run,
    }
    write_whole(ledger.out / "run.json", json.dumps(provenance, indent=1))


def _recipes(sizes: Preset, finished: Container[str]) -> dict[str, Any]:
    """The whole settings, defaults too, of what was trained."""
    recipes: dict[str, PretrainRecipe | FinetuneRecipe] = {}
    for one in sizes.variants:
        recipes[f"pretrain-{one.name}"] = pretrain_recipe(sizes, one, Path("tokens"))
        recipes |= {f"finetune-{one.name}-{task}": finetune_recipe(sizes, one, task) for task in one.tasks}
    return {stage: recipe.model_dump(mode="json") for stage, recipe in recipes.items() if stage in finished}
