"""The report on any run that is no grid: its models side by side, in sentences that are true whatever came out."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pandas as pd

from metatokens.looking.style import Style, model_of
from metatokens.paper.report.blocks import Block, Fold, Link, Section, picture
from metatokens.paper.report.compare import HAIR
from metatokens.paper.report.derive import select
from metatokens.paper.report.figures import lines
from metatokens.paper.report.frame import Inputs
from metatokens.paper.report.gains import gains, key_lengths
from metatokens.paper.report.labels import in_order, labelled, measured_conditions, of_models, rows
from metatokens.paper.report.learning import BUDGET, LEARNED_LOSS, learning
from metatokens.paper.report.tables import cost
from metatokens.paper.report.tables import run as tables
from metatokens.paper.report.tables.table import Table, span
from metatokens.paper.report.text import name
from metatokens.paper.report.words import sections as worded
from metatokens.paper.variants import MODELS


@dataclass(frozen=True)
class Headline:
    """The first screen: what was compared and what came out."""

    verdict: str
    table: Table
    key: str
    """How to read the table."""
    findings: Mapping[str, str]
    """What came out on each task."""
    caution: str
    descriptions: Mapping[str, str]
    """What each row's model is."""


def headline(inputs: Inputs) -> Headline:
    """What was learned, how soon, how far and with which markers; perplexity where no accuracy was measured."""
    conditions = measured_conditions(inputs)
    if not conditions:
        verdict = "No accuracy was measured."
        table = cost.perplexity(inputs, rows(inputs, metric="perplexity"))
    else:
        verdict = " ".join([_answer(inputs, conditions), *(_learners(inputs, task) for task in conditions)])
        table = tables.learned(inputs)
    positions = ", ".join(inputs.values("position_embedding"))
    about = {model: info["description"] for model, info in MODELS.items()}
    about |= {one: info.description for run in inputs.read.runs for one, info in run.models.items() if info.description}
    shown = {label for row in table.rows for label in row[: table.text_columns]}
    return Headline(
        verdict=verdict,
        table=table,
        key=f"Positions: {positions or 'not named'}.",
        findings={name(task): _verdict(inputs, task) for task in conditions},
        caution=_caution(inputs),
        descriptions={label: about.get(model_of(label), "") for label in in_order(shown) if model_of(label) in about},
    )


def _answer(inputs: Inputs, tasks: Iterable[str]) -> str:
    """The answer to the page's question: the comparison of the models at the first length of each task."""
    said: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for task in tasks:
        for gain in islice(gains(inputs, task), 1):
            said[gain.place][gain.verdict()].append(name(task).lower())
    return " ".join(
        f"At {place}: {'; '.join(f'in {_and(where)}, {what}' for what, where in found.items())}."
        for place, found in said.items()
    )


def _learners(inputs: Inputs, task: str) -> str:
    """Which models have learned a task: those whose interval, at the train length, lies above the floor."""
    condition, *_ = measured_conditions(inputs)[task]
    length, *_ = key_lengths(inputs, task)
    models = rows(inputs, metric="exact_match", task=task, condition=condition)
    cells = inputs.cells([fields | {"length": length} for _, fields in models])
    pooled = {label: cell.pooled() for (label, _), cell in zip(models, cells, strict=True) if cell}
    floor = inputs.floor(task, length, condition)
    if floor >= 1 - HAIR:
        return f"{name(task)}: tells nothing, since a short cut answers all of it."
    able = [label for label, one in pooled.items() if one and one.low is not None and one.low > floor]
    others = [label for label in pooled if label not in able]
    not_by = f", not by {_and(others)}" if able and others else ""
    return f"{name(task)}: learned by {_and(able) if able else 'no model'}{not_by}."


def sections(inputs: Inputs, styles: Mapping[str, Style]) -> list[Section]:
    """The sections on what came out; one without data says so.

    Args:
        inputs: what was read, its figures with labels.
        styles: a style for each label, from `figures.style.palette`.
    """
    perplexity = [cost.perplexity(inputs, rows(inputs, metric="perplexity"))]
    return [
        _section("accuracy", _accuracy(inputs, styles), "No accuracy was measured."),
        _section("markers", _markers(inputs, styles), "Only one marker condition was measured."),
        _section("curves", _curves(inputs, styles), "No training curves: there is no curves.jsonl beside the results."),
        _section("held-out", perplexity, "No perplexity was measured."),
        shortcuts(inputs),
        examples(inputs),
    ]


def shortcuts(inputs: Inputs) -> Section:
    """What always giving the commonest answer would score."""
    return _section("shortcuts", [tables.shortcuts(inputs)], "No short cut was measured.")


def examples(inputs: Inputs) -> Section:
    """One prompt of each task."""
    absent = "No examples: there is no examples.jsonl beside the results."
    blocks: list[Block] = []
    for example in inputs.read.examples:
        blocks.append(example)
        if page := inputs.read.looks.get(example.task or ""):
            blocks.append(Link("What the models attend to, layer by layer, and what they answer", page))
    return _section("examples", blocks, absent)


def budget(curves: pd.DataFrame) -> str:
    """Was every model trained long enough to be compared? One sentence for each answer."""
    answers: dict[str, list[str]] = defaultdict(list)
    for place, ratio in learning(curves).groupby("place", sort=False)["budget"].min().items():
        if math.isnan(ratio):
            answers["Learned by no model in the steps given"].append(f"{place}")
        elif ratio >= BUDGET:
            answers[f"Every model had {BUDGET} times the slowest learner's steps or more"].append(f"{place}")
        else:
            answers[f"A model had less than {BUDGET} times the slowest learner's steps"].append(
                f"{place} ({ratio:.2f})"
            )
    return " ".join(f"{answer}: {', '.join(places)}." for answer, places in answers.items())


def _section(anchor: str, blocks: Iterable[Block], absent: str) -> Section:
    """A section of what was measured; a table without rows is left out."""
    shown = [block for block in blocks if not isinstance(block, Table) or block.rows]
    title, text, *_ = worded()[anchor].of(learned_loss=LEARNED_LOSS)
    return Section(anchor, title, text if shown else absent, shown)


def _accuracy(inputs: Inputs, styles: Mapping[str, Style]) -> list[Block]:
    conditions = {task: trained for task, (trained, *_) in measured_conditions(inputs).items()}
    if not conditions:
        return []
    verdicts = [f"{name(task)}: {_verdict(inputs, task)}" for task in conditions]
    by_answer, by_token = (
        [tables.accuracy(inputs, *one, metric=metric) for one in conditions.items()]
        for metric in ("exact_match", "token_accuracy")
    )
    by_token = [table for table in by_token if table.rows]
    return [
        picture("accuracy", " ".join(verdicts), partial(lines.accuracy, inputs, styles)),
        *verdicts,
        *by_answer,
        Fold("Differences between models, with intervals", [tables.differences(inputs)]),
        *([Fold("Token accuracy: answer tokens right, one by one", by_token)] if by_token else []),
    ]


def _markers(inputs: Inputs, styles: Mapping[str, Style]) -> list[Block]:
    blocks: list[Block] = []
    for number, (task, (_, *others)) in enumerate(measured_conditions(inputs).items(), start=1):
        if others:
            draw = partial(lines.marker_conditions, inputs, styles, task)
            blocks += [
                picture(f"markers_{number}", f"{name(task)} by condition and length", draw),
                tables.marker_conditions(inputs, task),
                *(tables.accuracy(inputs, task, condition) for condition in others),
            ]
    return blocks


def _curves(inputs: Inputs, styles: Mapping[str, Style]) -> list[Block]:
    losses = labelled(inputs.curves.dropna(subset="loss"))
    blocks: list[Block] = []
    if len(own := select(losses, task="")):
        unigrams = inputs.select(metric="perplexity", condition="none")["chance"].dropna()
        draw = partial(lines.pretraining, own, styles, next(iter(unigrams), None))
        blocks += [picture("pretraining", _last_losses(own), draw)]
    if len(own := losses[losses["task"] != ""]):
        draw = partial(lines.fine_tuning, own, styles)
        blocks += [picture("fine_tuning", _last_losses(own), draw), budget(own), tables.learning_steps(own)]
    return blocks


def _last_losses(losses: pd.DataFrame) -> str:
    """The last logged loss of each model, the mean of its seeds, by task where there is one."""
    last = losses.sort_values("step", kind="stable").groupby(["task", "label", "seed"])["loss"].last()
    means = last.groupby(["task", "label"]).mean().reset_index().itertuples(index=False)
    said = (f"{name(task) + ', ' if task else ''}{label} {loss:.3g}" for task, label, loss in means)
    return f"Last loss: {'; '.join(said)}."


def _verdict(inputs: Inputs, task: str) -> str:
    """What came out on one task, without figures: each verdict once, with the lengths where it holds."""
    places: dict[str, list[str]] = defaultdict(list)
    for gain in gains(inputs, task):
        places[gain.verdict()].append(gain.place)
    return f"{'; '.join(f'at {_and(where)}, {what}' for what, where in places.items())}."


def _caution(inputs: Inputs) -> str:
    """Seeds and sizes: what these figures cannot show."""
    seeds = [f"{seed:.0f}" for seed in sorted(set(of_models(inputs.figures)["seed"]))]
    caution = (
        f"One training seed ({seeds[0]}): intervals cover the draw of test prompts, not the luck of training."
        if len(seeds) == 1
        else f"{len(seeds)} seeds ({', '.join(seeds)}): their figures and the ends of their intervals are averaged."
    )
    sizes = sorted({info.parameters for run in inputs.read.runs for info in run.models.values() if info.parameters})
    if sizes:
        ends = span(dict.fromkeys(f"{size / 1e6:.3g}" for size in (sizes[0], sizes[-1])))
        caution += f" Models of {ends} million parameters; the paper's has 152 million."
    left = [one for one in MODELS if one != "gpt-neo" and one not in set(inputs.figures["model"])]
    if left and any(run.preset == "demo" for run in inputs.read.runs):
        caution += f" {_and(left)} are left to the preset small."
    return caution


def _and(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
