"""What stands first in the report on a grid: every claim with its verdict; and what the run cost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from metatokens.records import Stage
from metatokens.report import control_claims, cost_claims, findings, inner_claims, recall_claims
from metatokens.report.grid import Grid
from metatokens.report.recall_claims import TRAINED
from metatokens.report.sections import Section
from metatokens.report.tables import Table
from metatokens.report.verdicts import Claim
from metatokens.report.wording import duration

MARKS = {"holds": "\u2713", "does not hold": "\u2717", "cannot be told at this scale": "?"}


@dataclass(frozen=True)
class Claims:
    """The first screen: what the paper claims, what its controls say, and what came out."""

    verdict: str
    groups: dict[str, list[Claim]]
    key: str
    caution: str


def claims(grid: Grid) -> Claims:
    """Every claim with its verdict."""
    groups = {
        "The paper claims": [*recall_claims.claims(grid), *cost_claims.claims(grid), *inner_claims.claims(grid)],
        "Controls, and beyond the paper": [
            *control_claims.controls(grid),
            *cost_claims.controls(grid),
            *inner_claims.controls(grid),
        ],
    }
    counted = [
        f"{sum(claim.verdict == verdict for claim in groups['The paper claims'])} {text}"
        for verdict, text in (
            ("holds", "hold"), ("does not hold", "do not"), ("cannot be told at this scale", "cannot be told")
        )
    ]  # fmt: skip
    total = len(groups["The paper claims"])
    unsettled = sum(bool(claim.so_far()) for claim in groups["The paper claims"])
    key = (
        "For and against, of the comparisons that leave room for a difference (not both at guessing or below it, nor "
        "both at 98\u00a0% or more): those whose 95\u00a0% interval, and every seed, lies above or below what is "
        "claimed; short: shown to be no gain to speak of (5 points, 0.05 nats). A positive difference speaks for the "
        "claim. One seed says nothing of the luck of training. The rule is in docs/paper_map.md, under Verdicts, "
        "written before the run, and amended as it says."
    )
    if any(claim.so_far() for claim in chain.from_iterable(groups.values())):
        key += " (so far): more than half of the claim's comparisons are still to be run, and may turn the verdict."
    verdict = f"Of {total} claims of the paper, {counted[0]} at this scale, {counted[1]}, {counted[2]}"
    verdict += f"; of {unsettled} of them less than half has been run" if unsettled else ""
    verdict += ". The controls: " + "; ".join(
        f"{claim.text.rpartition(': ')[2]}: {claim.verdict.removesuffix(' at this scale')}{claim.so_far()}"
        for claim in groups["Controls, and beyond the paper"]
        if claim.section == "controls"
    )
    ran = [one.gap is not None for claim in chain.from_iterable(groups.values()) for one in claim.comparisons]
    missing = (
        f" {ran.count(False):,} of {len(ran):,} comparisons have not been run, or cannot be." if not all(ran) else ""
    )
    return Claims(f"{verdict}.", groups, key, _caution(grid) + missing)


def cost(grid: Grid) -> Section:
    """Core time and number of runs, by what they did."""
    times: dict[str, list[float]] = {}
    for run in grid.inputs.runs:
        for stage in run.stages:
            times.setdefault(_verb(stage.name), []).append(stage.cost)
    rows = tuple((verb, f"{len(each)}", duration(sum(each))) for verb, each in times.items())
    seconds = [one for each in times.values() for one in each]
    total = ("in all", f"{len(seconds)}", duration(sum(seconds)))
    title = "What the run cost"
    if not seconds:
        return Section("cost", title, "There is no run.json beside the results: times are unknown.")
    table = Table("One core each", ("what", "runs", "core time"), rows, (total,))
    stages = [stage for run in grid.inputs.runs for stage in run.stages]
    intro = (
        f"{_spent(stages)} Of a stage that was cut off and begun again, the last try is counted; of one that was "
        "carried out again, since its weights had not been kept, the first."
    )
    return Section("cost", title, intro, [table])


def _verb(stage: str) -> str:
    """What a stage does: the name up to the model's."""
    return next((verb for verb in ("rate-distortion", "raw-noise") if stage.startswith(verb)), stage.partition("-")[0])


def _spent(stages: Sequence[Stage]) -> str:
    """Core time, and what for."""
    trained = sum(stage.name.partition("-")[0] in ("pretrain", "extend", "finetune") for stage in stages)
    hours = sum(stage.cost for stage in stages) / 3600
    return f"{hours:.1f} core-hours in {len(stages)} stages, of which {trained} trained a model."


def _caution(grid: Grid) -> str:
    """Sizes, seeds and cost: what these figures are of, and what they cannot show."""
    infos = [info for run in grid.inputs.runs for info in run.models.values() if info.parameters]
    sizes = [f"{size / 1e6:.2g}" for size in sorted({info.parameters or 0 for info in infos})]
    seeds = defaultdict(set)
    for result in grid.inputs.results:
        if result.metric == "exact_match" and result.recipe == grid.name:
            seeds[result.model, result.position_embedding].add(result.seed)
    several = [f"{model} ({position})" for (model, position), its in sorted(seeds.items(), key=str) if len(its) > 1]
    most = max(map(len, seeds.values()), default=1)
    stages = [stage for run in grid.inputs.runs for stage in run.stages]
    trained = findings.budget(grid.losses("rope", TRAINED[0]))
    sentences = [
        f"Models of {sizes[0]} to {sizes[-1]} million parameters; the paper's has 152." if sizes else "",
        f"Up to {most} seeds of {', '.join(several)}." if several else "",
        "Intervals cover the draw of test prompts, not the luck of training: of that, the seeds beside them tell.",
        f"Training with rope: {trained}" if trained else "",
        _spent(stages) if stages else "",
    ]
    return " ".join(filter(None, sentences))
