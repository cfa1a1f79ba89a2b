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
from graphlib import TopologicalSorter
from math import prod
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from metatokens.errors import UserError
from metatokens.evaluation.results import Result, library_versions, now
from metatokens.experiment.display import Display
from metatokens.experiment.plan import MODELS, Preset, Stage, preset, stages
from metatokens.experiment.stages import Workshop, carry_out, finetune_recipe, pretrain_recipe
from metatokens.training.trainer import open_run


def reproduce(name: str, out: Path, *, workers: int | None = None, overwrite: bool = False) -> None:
    """Carry out every stage of a preset; write `results.jsonl`, `curves.jsonl`, `examples.jsonl` and `run.json`.

    Args:
        name: of the preset.
        out: the run's folder. The same preset goes on with what is there; another one is refused.
        workers: processes, of one thread each; default: the cores that this process may use.
        overwrite: replace another run in `out`.

    Raises:
        UserError: if the preset is unknown, the folder holds something else, or a worker was killed.
    """
    sizes = preset(name)
    settings = {
        f"pretrain {model}": pretrain_recipe(sizes, model, Path("tokens")).model_dump(mode="json")
        for model in sizes.models
    }
    settings |= {f"finetune {task}": finetune_recipe(sizes, task).model_dump(mode="json") for task in sizes.task_steps}
    open_run(out, {"preset": name, "recipes": settings, "tests": dict(sizes.test_counts)}, overwrite=overwrite)
    (out / "stages").mkdir(exist_ok=True)

    plan = stages(sizes)
    workers = workers or available_cores()
    created, began = now(), time.monotonic()
    left = [stage for stage in plan if not _record(out, stage).exists()]
    if left or not (out / "run.json").exists():
        _carry_out(Workshop(out, name, sizes), plan, workers)
        # Of a run that was cut off, the wall time is not known.
        seconds = round(time.monotonic() - began, 1) if left == plan else None
        _write_provenance(out, name, settings, plan, sizes, workers=workers, created=created, wall_seconds=seconds)
    _write_results(out, plan)
    _write_curves(out, sizes)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _record(out: Path, stage: Stage) -> Path:
    return out / "stages" / f"{stage.name}.json"


def _carry_out(workshop: Workshop, plan: list[Stage], workers: int) -> None:
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
                    if _record(workshop.out, by_name[name]).exists():
                        display.skip(name)
                        order.done(name)
                    else:
                        ready.append(name)
                ready.sort(key=lambda name: by_name[name].cost)
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
    results = carry_out(
        workshop, stage.verb, stage.arguments, lambda done, total: _reports.put((stage.name, done / total))
    )
    record = {
        "seconds": round(time.monotonic() - began, 1),
        "results": [json.loads(result.model_dump_json()) for result in results],
    }
    _write(_record(workshop.out, stage), json.dumps(record))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _json_lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _write_results(out: Path, plan: list[Stage]) -> None:
    records = (json.loads(_record(out, stage).read_text(encoding="utf-8")) for stage in plan)
    lines = [Result.model_validate(line).model_dump_json() + "\n" for record in records for line in record["results"]]
    _write(out / "results.jsonl", "".join(lines))


def _write_curves(out: Path, sizes: Preset) -> None:
    """Gather the training curves of all runs."""
    curves: list[dict[str, Any]] = []
    for model in sizes.models:
        pretraining = pretrain_recipe(sizes, model, out / "tokens")
        untuned = {"task": None, "train_length": None, "seed": pretraining.training.seed}
        runs: list[tuple[str, dict[str, Any]]] = [("pretrained", untuned)]
        for task in sizes.task_steps:
            tuning = finetune_recipe(sizes, task)
            for length in tuning.task.train_lengths:
                run = {"task": task, "train_length": length, "seed": tuning.training.seed}
                runs.append((f"{task}/{length}", run))
        about = {"model": model, "position_embedding": pretraining.model.position_embedding}
        for folder, run in runs:
            curve = out / "models" / model / folder / "curve.jsonl"
            curves += [about | run | json.loads(line) for line in curve.read_text(encoding="utf-8").splitlines()]
    _write(out / "curves.jsonl", _json_lines(curves))


def _write_provenance(
    out: Path, name: str, settings: dict[str, Any], plan: list[Stage], sizes: Preset, **run: Any
) -> None:
    """Say what was run where: settings, versions, machine, data, sizes of the models, seconds of every stage."""
    manifest = json.loads((out / "tokens" / "manifest.json").read_text(encoding="utf-8"))
    seconds = [
        {"name": stage.name, "seconds": json.loads(_record(out, stage).read_text(encoding="utf-8"))["seconds"]}
        for stage in plan
    ]
    models = {
        model: {
            "parameters": _parameters(out / "models" / model / "pretrained" / "model.safetensors"),
            "description": MODELS[model]["description"],
        }
        for model in sizes.models
    }
    provenance = {
        "command": f"metatokens reproduce --preset {name} --out {out.name}",
        "preset": name,
        "recipes": settings,
        "corpus": manifest,
        "models": models,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cores(),
        "versions": library_versions(),
        "finished": now(),
        "stages": seconds,
        **run,
    }
    _write(out / "run.json", json.dumps(provenance, indent=1))


def _parameters(weights: Path) -> int:
    with safe_open(weights, framework="np") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
