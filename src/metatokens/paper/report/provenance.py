"""What was run where: the sections that let a reader judge a run, or repeat it."""

from metatokens.paper.report.blocks import Block, Fold, Section
from metatokens.paper.report.frame import Inputs
from metatokens.paper.report.tables.cost import models, settings, stages
from metatokens.paper.report.text import duration
from metatokens.records import RunInfo


def provenance(inputs: Inputs) -> list[Section]:
    """A section for each run, or one that says that no run was described."""
    title = "What was run where"
    again = f" Of {inputs.remeasured} figures measured again, the later is shown." if inputs.remeasured else ""
    if not inputs.read.runs:
        intro = f"There is no run.json beside the results: command, settings and times are unknown.{again}"
        versions = {package: version for one in inputs.read.results for package, version in one.versions.items()}
        return [Section("run", title, intro, [settings("Versions named in the results", versions)])]
    intro = f"{len(inputs.read.results) - inputs.remeasured:,} results in all.{again}"
    if len(inputs.read.runs) == 1:
        return [Section("run", title, intro, _run(inputs.read.runs[0]))]
    runs = enumerate(inputs.read.runs, start=1)
    return [Section(f"run-{number}", f"{title}: run {number}", intro, _run(run)) for number, run in runs]


def _run(run: RunInfo) -> list[Block]:
    facts = {
        "command": run.command,
        "preset": run.preset,
        "platform": run.platform,
        "cores": run.cores,
        "python": run.python,
        **run.versions,
        "last started": run.created,
        "last written": run.finished,
        "wall time": None if run.wall_seconds is None else duration(run.wall_seconds),
    }
    blocks: list[Block] = [settings("Run", {fact: value for fact, value in facts.items() if value is not None})]
    if run.models:
        blocks.append(models(run.models))
    if run.corpus:
        blocks.append(settings("Corpus", run.corpus))
    if run.stages:
        blocks.append(Fold("Time of each stage", [stages(run.stages)]))
    if run.recipes:
        blocks.append(Fold("Settings", [settings(recipe, values) for recipe, values in run.recipes.items()]))
    return blocks
