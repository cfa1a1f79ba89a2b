"""The report on a preset's grid: every claim with its verdict, then the paper's tables and figures, then our controls.

The words of its sections are in `sections.md`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import chain, product

from matplotlib.figure import Figure

from metatokens.report import run_page
from metatokens.report.blocks import Block, Fold, Section, picture
from metatokens.report.claims import claims
from metatokens.report.decisive import beside_the_paper, text_gaps
from metatokens.report.derive import TRAINED, recall_curves
from metatokens.report.figures import inside as inside_figures
from metatokens.report.figures import lines
from metatokens.report.frame import LONGER, TASKS, Inputs, select
from metatokens.report.learning import BUDGET, LEARNED_LOSS
from metatokens.report.paper import paper_figure
from metatokens.report.tables import accuracy, cost, inside
from metatokens.report.tables.claims import evidence, sentence, so_far
from metatokens.report.tables.run import learning_steps
from metatokens.report.tables.table import POSITIONS, Table
from metatokens.report.text import duration, name, tokens
from metatokens.report.verdict import Judged, judge


@dataclass(frozen=True)
class Overview:
    """The first screen: what the paper claims, what its controls say, and what came out."""

    verdict: str
    groups: dict[str, list[Judged]]
    key: str
    caution: str


def overview(inputs: Inputs) -> Overview:
    """Every claim with its verdict."""
    groups = {title: [judge(inputs, one) for one in group] for title, group in claims(inputs.scale).items()}
    papers, ours = groups.values()
    counted = [
        f"{sum(one.verdict == verdict for one in papers)} {text}"
        for verdict, text in (
            ("holds", "hold"), ("does not hold", "do not"), ("cannot be told at this scale", "cannot be told")
        )
    ]  # fmt: skip
    unsettled = sum(bool(so_far(one)) for one in papers)
    key = (
        "For and against, of the comparisons that leave room for a difference (not both at guessing or below it, nor "
        "both at 98\u00a0% or more): those whose 95\u00a0% interval, and every seed, lies above or below what is "
        "claimed; short: shown to be no gain to speak of (5 points, 0.05 nats). A positive difference speaks for the "
        "claim. One seed says nothing of the luck of training. The rule is in docs/paper_map.md, under Verdicts, "
        "written before the run, and amended as it says."
    )
    if any(map(so_far, chain(papers, ours))):
        key += " (so far): more than half of the claim's comparisons are still to be run, and may turn the verdict."
    verdict = f"Of {len(papers)} claims of the paper, {counted[0]} at this scale, {counted[1]}, {counted[2]}"
    verdict += f"; of {unsettled} of them less than half has been run" if unsettled else ""
    verdict += ". The controls: " + "; ".join(
        f"{one.claim.text.rpartition(': ')[2]}: {one.verdict.removesuffix(' at this scale')}{so_far(one)}"
        for one in ours
        if one.claim.section == "controls"
    )
    ran = [one.gap is not None for judged in chain(papers, ours) for one in judged.comparisons]
    missing = (
        f" {ran.count(False):,} of {len(ran):,} comparisons have not been run, or cannot be." if not all(ran) else ""
    )
    return Overview(f"{verdict}.", groups, key, _caution(inputs) + missing)


def sections(inputs: Inputs, groups: dict[str, list[Judged]]) -> list[Section]:
    """A section for each group of the paper's tables and figures, and for each control; at the end the cost.

    In each: what came out, then what it rests on; the comparisons of its claims are folded in at the end.
    """
    judged = list(chain.from_iterable(groups.values()))
    found = []
    for anchor, title, intro in _words(inputs):
        own = [one for one in judged if one.claim.section == anchor]
        folded = [Fold("Every comparison behind these verdicts", list(map(evidence, own)))] if own else []
        blocks = [block for block in _BLOCKS[anchor](inputs) if block]
        found.append(Section(anchor, title, intro, [*map(sentence, own), *blocks, *folded]))
    return [*found, run_page.majority(inputs), run_page.examples(inputs), _cost(inputs)]


def _words(inputs: Inputs) -> Iterator[tuple[str, str, str]]:
    """The anchor, the title and the first paragraph of each section."""
    figures = {number: paper_figure(number) for number in (1, 2, 3)}
    neo = "GPT-Neo here is transformers' model at this size from random weights, on the same text."
    values = {
        "figure_1": figures[1].statement,
        "figure_1_note": figures[1].notes[0],
        "figure_2": figures[2].statement,
        "figure_3_note": figures[3].notes[0],
        "gpt_neo": "GPT-Neo is the published model of 125 million parameters, fine-tuned."
        if inputs.preset == "paper"
        else neo,
        "longer": accuracy.longer(inputs),
        "shortest": TRAINED[0],
        "learned_loss": LEARNED_LOSS,
        "budget": BUDGET,
        "quarter": "At a quarter of the lengths in the paper." if inputs.scale > 1 else "",
        "block": tokens(1024 // inputs.scale),
        "unlearned_yarn": accuracy.unlearned_yarn(inputs),
        "text_read": accuracy.text_read(inputs),
    }
    for section in _prose().split("## ")[1:]:
        head, _, body = section.partition("\n")
        anchor, title = head.split(" | ")
        yield anchor, title, re.sub("[ \n]+", " ", body.format_map(values)).strip()


@cache
def _prose() -> str:
    return files("metatokens.report").joinpath("sections.md").read_text(encoding="utf-8")


def _lengths(inputs: Inputs) -> Iterator[Block]:
    yield picture("lengths", f"Accuracy by length. {beside_the_paper(inputs, ())}", lambda w: lines.lengths(inputs, w))
    yield accuracy.unlearned(inputs)
    for task in TASKS:
        yield accuracy.lengths(inputs, task)
    for task, (metric, unit) in product(
        TASKS, {"exact_match": "answers", "token_accuracy": "tokens of answers"}.items()
    ):
        tables = [accuracy.all_lengths(inputs, task, variant=variant, metric=metric) for variant in ("", LONGER)]
        yield Fold(f"{name(task)}: every model, {unit}", [tables[0], *_filled(tables[1])])


def _training(inputs: Inputs) -> Iterator[Block]:
    """How losses fell, and whether each model had time enough."""
    for position, title in POSITIONS.items():
        curves = select(inputs.curves, position_embedding=position, train_length=TRAINED[0], main=True)
        curves = curves.dropna(subset="loss")
        if len(curves):
            styles = {model: style for model, style in lines.STYLES.items() if model in set(curves["model"])}
            yield f"{title.capitalize()}. {run_page.budget(curves)}"
            yield picture(
                f"training_{position}",
                f"Loss by step, {title}.",
                lambda width, curves=curves, styles=styles: lines.fine_tuning(curves, styles, width),
            )
            table = learning_steps(curves)
            yield replace(table, title=f"{table.title}, {title}")


def _markers(inputs: Inputs) -> Iterator[Block]:
    yield accuracy.markers(inputs)
    for task, condition in product(TASKS, ("none", "decoy")):
        if table := _filled(accuracy.all_lengths(inputs, task, condition)):
            yield Fold(f"{name(task)} in condition {condition}", table)
    for condition in ("none", "paper", "decoy"):
        if table := _filled(accuracy.all_lengths(inputs, "list_recall", condition, variant="unmarked")):
            yield Fold(f"List recall of models trained without markers, tested in condition {condition}", table)


def _learning(inputs: Inputs) -> Iterator[Block]:
    if recall_curves(inputs.curves):
        yield picture("learning", "List recall by text tokens seen.", lambda width: lines.learning(inputs, width))
    yield cost.learning(inputs)


def _yarn(inputs: Inputs) -> Iterator[Block]:
    yield accuracy.yarn(inputs, "list_recall")
    yield accuracy.yarn(inputs, "segment_counting")
    yield Fold("The paper's table in full", [accuracy.papers_yarn()])


def _ablations(inputs: Inputs) -> Iterator[Block]:
    yield accuracy.whose_loss(inputs)
    yield accuracy.ablations_by_length(inputs, "list_recall", TRAINED[-1])
    yield accuracy.zeroed_positions(inputs)
    for task in TASKS:
        yield accuracy.ablations(inputs, task)
    others = [one for one in product(TASKS, TRAINED[::-1]) if one != ("list_recall", TRAINED[-1])]
    tables = (accuracy.ablations_by_length(inputs, task, trained) for task, trained in others)
    yield Fold("Every model, task and train length, by length", list(chain.from_iterable(map(_filled, tables))))


def _noise(inputs: Inputs) -> Iterator[Block]:
    for task in accuracy.NOISE_TABLES:
        yield accuracy.noise(inputs, task, 128)
    tables = (
        accuracy.noise(inputs, task, length, kind)
        for task, length, kind in product(accuracy.NOISE_TABLES, (128, 512), accuracy.NOISE_KINDS)
        if (length, kind) != (128, "")
    )
    folded = list(chain.from_iterable(map(_filled, tables)))
    yield Fold("At other lengths, at the meta-tokens alone, in raw units", folded)


def _sharpness(inputs: Inputs) -> Iterator[Block]:
    yield from _drawn(inputs, "sharpness", "Changes of logits and entropy by head.", "premise_holds")
    yield inside.sharpness(inputs)
    yield Fold("Theorem 4.1's premise by layer and head", [inside.premise(inputs)])
    yield Fold("How the changes of the output are spread", [inside.output_changes(inputs)])


def _caching(inputs: Inputs) -> Iterator[Block]:
    prompt = "Similarity of each state of one prompt of list recall to the final meta-token's, meta."
    yield from _drawn(inputs, "similarity", "Cosine by distance.", "similarity_centred")
    yield from _drawn(inputs, "heat_map", prompt, "similarity_centred")
    yield inside.caching(inputs)
    yield inside.attention_of_final(inputs)


def _rate_distortion(inputs: Inputs) -> Iterator[Block]:
    yield from _drawn(inputs, "rate_distortion", "Distortion by rate.", "rate")
    if gaps := text_gaps(inputs):
        yield (
            "Every model answers at the last meta-token, gpt2 too, which saw none in pretraining: that the distortion "
            f"is lower there than at the text before tells where the answer is read. By how much it is lower {gaps}."
        )
    yield inside.rate_distortion(inputs)


def _placement(inputs: Inputs) -> Iterator[Block]:
    yield accuracy.seed_spread(inputs)
    yield accuracy.placement(inputs)


def _random_positions(inputs: Inputs) -> Iterator[Block]:
    if inputs.values("model", metric="exact_match", variant="random-positions"):
        alt = "Accuracy by length with random positions."
        yield picture("random_positions", alt, lambda width: lines.random_positions(inputs, width))
    for task in TASKS:
        yield accuracy.random_positions(inputs, task)


def _drawn(inputs: Inputs, file: str, alt: str, metric: str) -> Iterator[Block]:
    """A figure of what is inside meta, where it was measured."""
    draw: Callable[[Inputs, float], Figure] = getattr(inside_figures, file)
    if len(inputs.select(metric=metric, model="meta")):
        yield picture(file, alt, lambda width: draw(inputs, width))


def _filled(table: Table) -> list[Table]:
    return [table] if table.rows else []


_BLOCKS: dict[str, Callable[[Inputs], Iterator[Block]]] = {
    "lengths": _lengths,
    "training": _training,
    "controls": lambda inputs: iter([accuracy.controls(inputs)]),
    "markers": _markers,
    "learning": _learning,
    "yarn": _yarn,
    "ablations": _ablations,
    "noise": _noise,
    "sharpness": _sharpness,
    "caching": _caching,
    "rate-distortion": _rate_distortion,
    "speed": lambda inputs: iter([cost.speed(inputs)]),
    "perplexity": lambda inputs: iter([cost.perplexity(inputs)]),
    "placement": _placement,
    "random-positions": _random_positions,
}


def _cost(inputs: Inputs) -> Section:
    """Core time and number of runs, by what they did."""
    times: dict[str, list[float]] = {}
    for run in inputs.runs:
        for stage in run.stages:
            times.setdefault(_what(stage.name), []).append(stage.cost)
    rows = tuple((what, f"{len(each)}", duration(sum(each))) for what, each in times.items())
    seconds = list(chain.from_iterable(times.values()))
    title = "What the run cost"
    if not seconds:
        return Section("cost", title, "There is no run.json beside the results: times are unknown.")
    total = ("in all", f"{len(seconds)}", duration(sum(seconds)))
    table = Table("One core each", ("what", "runs", "core time"), rows, (total,))
    intro = (
        f"{_spent(inputs)} Of a stage that was cut off and begun again, the last try is counted; of one that was "
        "carried out again, since its weights had not been kept, the first."
    )
    return Section("cost", title, intro, [table])


def _what(stage: str) -> str:
    """What a stage does: the name up to the model's."""
    return next((what for what in ("rate-distortion", "raw-noise") if stage.startswith(what)), stage.partition("-")[0])


def _spent(inputs: Inputs) -> str:
    """Core time, and what for."""
    stages = [stage for run in inputs.runs for stage in run.stages]
    trained = sum(_what(stage.name) in ("pretrain", "extend", "finetune") for stage in stages)
    hours = sum(stage.cost for stage in stages) / 3600
    return f"{hours:.1f} core-hours in {len(stages)} stages, of which {trained} trained a model." if stages else ""


def _caution(inputs: Inputs) -> str:
    """Sizes, seeds and cost: what these figures are of, and what they cannot show."""
    sizes = sorted({info.parameters for run in inputs.runs for info in run.models.values() if info.parameters})
    millions = [f"{size / 1e6:.2g}" for size in sizes]
    plain = inputs.select(metric="exact_match", variant="")
    seeds = plain.groupby(["model", "position_embedding"])["seed"].nunique()
    several = [f"{model} ({position})" for (model, position), number in seeds.items() if number > 1]
    curves = select(inputs.curves, position_embedding="rope", train_length=TRAINED[0], main=True)
    trained = run_page.budget(curves.dropna(subset="loss"))
    sentences = [
        f"Models of {millions[0]} to {millions[-1]} million parameters; the paper's has 152." if sizes else "",
        f"Up to {max(seeds, default=1)} seeds of {', '.join(several)}." if several else "",
        "Intervals cover the draw of test prompts, not the luck of training: of that, the seeds beside them tell.",
        f"Training with rope: {trained}" if trained else "",
        _spent(inputs),
    ]
    return " ".join(filter(None, sentences))
