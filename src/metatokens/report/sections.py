"""What the report says, section by section, before it becomes HTML or Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from metatokens.experiment.variants import MODELS
from metatokens.records import ShownExample
from metatokens.report import figures, findings, tables
from metatokens.report.estimates import measured_conditions, measured_tasks, model_of, select
from metatokens.report.figures import PAGE, PHONE, Style, png
from metatokens.report.findings import Finding
from metatokens.report.gains import key_lengths
from metatokens.report.inputs import Inputs
from metatokens.report.learning import LEARNED_LOSS
from metatokens.report.tables import Table


@dataclass(frozen=True)
class Headline:
    """The first screen: what was compared and what came out."""

    verdict: str
    table: Table
    key: str
    """How to read the table."""
    findings: Sequence[Finding]
    caution: str
    descriptions: Mapping[str, str]
    """What each row's model is."""


@dataclass(frozen=True)
class Picture:
    """A figure, drawn for a page and for a phone."""

    file: str
    alt: str
    page: bytes
    phone: bytes


@dataclass(frozen=True)
class Fold:
    """Tables that are shown when asked for."""

    title: str
    tables: Sequence[Table]


Block = str | Table | Picture | Fold | ShownExample  # a string is a paragraph


@dataclass(frozen=True)
class Section:
    """A section: a few words, then what it shows."""

    anchor: str
    title: str
    intro: str
    blocks: Sequence[Block] = ()


def headline(inputs: Inputs) -> Headline:
    """The first task's accuracy at the key lengths; perplexity where no accuracy was measured."""
    results = inputs.results
    infos = {model: info for run in inputs.runs for model, info in run.models.items()}
    task = next(iter(measured_tasks(results)), None)
    if not select(results, metric="exact_match"):
        table, found, verdict = tables.perplexity(results), [], "No accuracy was measured."
    else:
        condition = measured_conditions(results, task)[0]
        table = tables.accuracy(results, task, condition, lengths=key_lengths(results, task))
        verdict = findings.verdict(results, task)
        found = [*findings.comparisons(results, task), *findings.marker_effects(results, task)]
    positions = sorted({result.position_embedding for result in results if result.position_embedding})
    key = "In brackets: 95\u00a0% intervals. " if found else ""
    descriptions = {model: about["description"] for model, about in MODELS.items()}
    descriptions |= {model: info.description for model, info in infos.items() if info.description}
    labels = [row[0] for row in table.rows]
    return Headline(
        key=f"{key}Positions: {', '.join(positions) or 'not named'}.",
        verdict=verdict,
        table=table,
        findings=found,
        caution=findings.caution(results, task, infos),
        descriptions={label: descriptions.get(model_of(label), "") for label in labels},
    )


def sections(inputs: Inputs, styles: Mapping[str, Style]) -> list[Section]:
    """The sections on what came out; one without data says so.

    Args:
        inputs: what was read.
        styles: a style for each label, from `figures.palette`.
    """
    return [
        _accuracy(inputs, styles),
        _markers(inputs, styles),
        _training(inputs, styles),
        _perplexity(inputs),
        majority(inputs),
        examples(inputs),
    ]


def _accuracy(inputs: Inputs, styles: Mapping[str, Style]) -> Section:
    results = inputs.results
    anchor, title = "accuracy", "Accuracy by prompt length"
    tasks = measured_tasks(results)
    if not tasks:
        return Section(anchor, title, "No accuracy was measured.")
    conditions = {task: measured_conditions(results, task)[0] for task in tasks}
    summaries = [findings.accuracy_summary(results, task, condition) for task, condition in conditions.items()]
    token_accuracy = [
        tables.accuracy(results, task, condition, metric="token_accuracy")
        for task, condition in conditions.items()
        if select(results, metric="token_accuracy", task=task, condition=condition)
    ]
    blocks: list[Block] = [
        picture("accuracy", " ".join(summaries), lambda width: figures.headline(results, styles, width)),
        *(findings.verdict(results, task) for task in tasks),
        *(tables.accuracy(results, task, condition) for task, condition in conditions.items()),
    ]
    blocks.append(Fold("Differences between models, with intervals", [tables.differences(results)]))
    if token_accuracy:
        blocks.append(Fold("Token accuracy: answer tokens right, one by one", token_accuracy))
    return Section(
        anchor,
        title,
        "An answer counts when all of it is right. Bands and brackets are 95\u00a0% intervals. Length L stands for "
        "prompts of more than L/2 and up to L tokens, meta-tokens included. Two models are said to differ where the "
        "95\u00a0% interval of their difference (Newcombe) excludes zero, without correction for several comparisons.",
        blocks,
    )


def _markers(inputs: Inputs, styles: Mapping[str, Style]) -> Section:
    results = inputs.results
    blocks: list[Block] = []
    for number, task in enumerate(measured_tasks(results), start=1):
        conditions = measured_conditions(results, task)
        if len(conditions) > 1:
            summary = [f"In {c}: {findings.accuracy_summary(results, task, c)}" for c in conditions]

            def draw(width: float, task: str | None = task) -> Figure:
                return figures.marker_conditions(results, styles, task, width)

            blocks += [
                picture(f"markers_{number}", " ".join(summary), draw),
                tables.marker_conditions(results, task),
                *(tables.accuracy(results, task, condition) for condition in conditions[1:]),
            ]
    title = "Do the markers give the answer away?"
    if not blocks:
        return Section("markers", title, "Only one marker condition was measured.")
    return Section(
        "markers",
        title,
        "In condition \u201cpaper\u201d a meta-token marks the place that the question asks about. In "
        "\u201cnone\u201d each marker of the context is the ordinary text \u201c|\u201d. In \u201cdecoy\u201d "
        "further meta-tokens stand where they leave the answer unchanged.",
        blocks,
    )


def _training(inputs: Inputs, styles: Mapping[str, Style]) -> Section:
    curves = inputs.curves
    title = "Training curves"
    if not curves:
        return Section("training", title, "No training curves: there is no curves.jsonl beside the results.")
    blocks: list[Block] = []
    if any(point.task is None for point in curves):
        perplexities = select(inputs.results, metric="perplexity", condition="none")
        unigram = next((result.chance for result in perplexities if result.chance), None)
        blocks.append(
            picture(
                "pretraining",
                findings.final_losses(curves, None),
                lambda width: figures.pretraining(curves, styles, unigram, width),
            )
        )
    tasks = [task for task in dict.fromkeys(point.task for point in curves) if task is not None]
    if tasks:
        summary = " ".join(findings.final_losses(curves, task) for task in tasks)
        blocks += [
            picture("fine_tuning", summary, lambda width: figures.fine_tuning(curves, styles, width)),
            findings.budget(curves),
            tables.learning_steps(curves),
        ]
    return Section(
        "training",
        title,
        "Pretraining loss is over text tokens, fine-tuning loss over answer tokens. A task counts as learned from the "
        f"first logged step from which the answer loss stays under {LEARNED_LOSS}, the dashed line.",
        blocks,
    )


def _perplexity(inputs: Inputs) -> Section:
    if not select(inputs.results, metric="perplexity"):
        return Section("perplexity", "Perplexity", "No perplexity was measured.")
    return Section(
        "perplexity",
        "Perplexity",
        "Held-out text, the same text tokens for every model and column; no meta-token is ever a target.",
        [findings.perplexities(inputs.results), tables.perplexity(inputs.results)],
    )


def majority(inputs: Inputs) -> Section:
    """What always giving the commonest answer would score."""
    title = "The commonest answer"
    if not select(inputs.results, metric="majority_rate"):
        return Section("majority", title, "No majority rate was measured.")
    return Section(
        "majority",
        title,
        "What always giving the commonest of the test answers would score. A model that scores no higher need not have "
        "read the prompt.",
        [tables.majority_rates(inputs.results)],
    )


def examples(inputs: Inputs) -> Section:
    """One prompt of each task."""
    if not inputs.examples:
        return Section("examples", "Examples", "No examples: there is no examples.jsonl beside the results.")
    intro = "One prompt of each task. A tinted _PAUSE_ is a meta-token; any other text is text."
    return Section("examples", "Examples", intro, inputs.examples)


def picture(file: str, alt: str, draw: Callable[[float], Figure]) -> Picture:
    """A figure that is drawn for each width."""
    return Picture(file, alt, png(draw(PAGE)), png(draw(PHONE)))
