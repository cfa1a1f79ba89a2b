"""Carry out a plan: skip what is done, resume what was cut off."""

import platform
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from metatokens.data.corpus import files_of
from metatokens.files import write_whole
from metatokens.machine import available_cores
from metatokens.paper.display import Display
from metatokens.paper.plan import Stage, select, stages
from metatokens.paper.pools import ProcessPool
from metatokens.paper.presets import load_preset
from metatokens.paper.records import ModelInfo, RunInfo, StageRecord
from metatokens.paper.run_log import FinishedStage, RunLog
from metatokens.paper.runner import Runner
from metatokens.paper.variants import Preset
from metatokens.records import now
from metatokens.training.run_folder import open_run


def reproduce(
    name: str,
    out: Path,
    *,
    corpus: str | None = None,
    book: str | None = None,
    only: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    task_done: Callable[[], None] = lambda: None,
) -> None:
    """Carry out the stages of a preset; write `results.jsonl`, `analysis.jsonl`, `curves.jsonl` and `run.json`.

    Args:
        name: of the preset.
        out: the run's folder. A run of the same preset in it is resumed; another one is refused.
        corpus: a corpus spec in place of the preset's.
        book: a corpus spec in place of the preset's second text for perplexity.
        only: carry out only the stages whose results this table or task shows, and those that they need.
        workers: stages at a time; by default one per GPU, or per core if there is none.
        overwrite: replace another run in `out`.
        task_done: called whenever the last accuracy on a task was measured and another task is left.

    Raises:
        UserError: if the preset, the table or the task is unknown, `out` holds another run, or a stage fails.
    """
    preset = load_preset(name)
    preset = replace(preset, corpus=corpus or preset.corpus, book=book or preset.book)
    plan = select(stages(preset), only)
    files: list[Path] = []
    for spec in filter(None, (preset.corpus, preset.book)):
        files += map(Path, files_of(spec))
    settings: dict[str, Any] = {
        "preset": name,
        "corpus": preset.corpus,
        "book": preset.book,
        "tokenizer": preset.tokenizer,
    }
    if files:  # stages read the text anew, and have to find the same one
        settings["text_bytes"] = sum(file.stat().st_size for file in files)
    with (
        open_run(out, settings, overwrite=overwrite, inputs=files),
        ProcessPool(Runner(out.resolve(), name, preset), workers) as pool,
    ):
        log = RunLog(out)
        log.check(plan)
        log.resume()
        left = _stages_left(log, plan)
        provenance = out / "run.json"
        if left or not provenance.exists():
            # So that the next try writes it if this one does not.
            provenance.unlink(missing_ok=True)
            try:
                _carry_out(log, left, pool, task_done)
            finally:
                _write_provenance(log, name, preset, workers=pool.size)


def unfinished(name: str, out: Path, *, only: str | None = None) -> list[Stage]:
    """The stages that `reproduce` would carry out."""
    plan = select(stages(load_preset(name)), only)
    log = RunLog(out)
    log.check(plan)
    return _stages_left(log, plan)


def _stages_left(log: RunLog, plan: list[Stage]) -> list[Stage]:
    """The stages that are not in the log, and those whose product one of them needs and that is missing.

    So a run can go on from its records if the weights were not kept.
    """
    left: list[Stage] = []
    needed: set[str] = set()
    for stage in reversed(plan):  # each stage follows those that it needs
        has_product = stage.product is None or (log.out / stage.product).exists()
        is_missing = stage.name in needed and not has_product
        if is_missing or stage.name not in log.entries:
            left.append(stage)
            needed.update(stage.after)
    return left[::-1]


def _carry_out(
    log: RunLog, left: list[Stage], pool: ProcessPool, task_done: Callable[[], None]
) -> None:
    """Carry out the stages that are left in the plan's order, each once those that it needs are done."""
    waiting = {stage.name: stage for stage in left}
    running: dict[str, Stage] = {}
    display = Display({stage.name: stage.steps for stage in left})
    while waiting or running:
        unfinished = waiting.keys() | running.keys()
        ready = [stage for stage in waiting.values() if unfinished.isdisjoint(stage.after)]
        for stage in ready[: pool.size - len(running)]:
            running[stage.name] = waiting.pop(stage.name)
            pool.submit(stage)
        finished = []
        for name, outcome in pool.finished():
            stage = running.pop(name)
            log.add(stage, outcome)  # at once, since the next stage may have failed
            display.finish(name)
            finished.append(stage)
        for name, fraction in pool.progress():
            display.update(name, fraction)
        display.refresh(running)
        tested = _tasks_tested_by(finished)
        untested = _tasks_tested_by([*waiting.values(), *running.values()])
        if untested and tested - untested:
            task_done()


def _tasks_tested_by(plan: list[Stage]) -> set[str]:
    """The tasks on which these stages measure accuracies."""
    return {stage.subject["task"] for stage in plan if stage.method == "evaluate"}


def _write_provenance(log: RunLog, name: str, preset: Preset, *, workers: int) -> None:
    """Write `run.json`: settings, versions, machine, data, sizes of the models, and the time of each finished stage."""
    entries = log.entries
    if "tokenize" not in entries:
        return
    recipes = {
        stage.name: stage.options["recipe"].model_dump(mode="json")  # including defaults
        for stage in stages(preset)
        if stage.name in entries and "recipe" in stage.options
    }
    models = {}
    for model in preset.models:
        entry = entries.get(f"{model.made_by}-{model.name}")
        if entry is not None:
            models[model.name] = ModelInfo(**entry.facts, description=model.description)
    times = [entry.model_dump(include={*StageRecord.model_fields}) for entry in entries.values()]
    info = RunInfo(
        command=_command(log.out, name, preset),
        preset=name,
        recipes=recipes,
        corpus=entries["tokenize"].facts["corpus"],
        models=models,
        platform=platform.platform(),
        cores=available_cores(),
        workers=workers,
        versions=_versions(entries.values()),
        created=min(map(_began, entries.values())),
        finished=now(),
        stages=[StageRecord(**stage) for stage in times],
    )
    write_whole(log.out / "run.json", info.model_dump_json(exclude_defaults=True).encode())


def _versions(entries: Iterable[FinishedStage]) -> dict[str, str]:
    """The versions of Python and the packages in all stages, which other machines may have carried out."""
    versions: dict[str, dict[str, None]] = {}
    for entry in entries:
        for package, version in entry.versions.items():
            versions.setdefault(package, {})[version] = None
    return {package: " and ".join(of_package) for package, of_package in versions.items()}


def _began(entry: FinishedStage) -> str:
    """The time at which a stage began, to a second."""
    finished = datetime.fromisoformat(entry.finished)
    return (finished - timedelta(seconds=entry.seconds)).isoformat(timespec="seconds")


def _command(out: Path, name: str, preset: Preset) -> str:
    words = ["metatokens", "reproduce", "--preset", name, "--out", out.resolve().name]
    for option in ("corpus", "book"):
        text = getattr(preset, option)
        if text != getattr(load_preset(name), option):
            words += [f"--{option}", text]
    return shlex.join(words)
