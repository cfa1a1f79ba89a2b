"""The report on a preset's grid: every claim with its verdict, then the paper's tables and figures, then our controls.

The words of its sections are in `sections.md`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from matplotlib.figure import Figure

from metatokens.report import run_page
from metatokens.report.blocks import Block, Fold, Picture, Section, picture
from metatokens.report.claims import claims
from metatokens.report.derive import TRAINED, recall_curves, select
from metatokens.report.figures import inside as inside_figures
from metatokens.report.figures import lines
from metatokens.report.frame import LONGER, MODELS, TASKS, Inputs
from metatokens.report.learning import BUDGET, LEARNED_LOSS
from metatokens.report.paper import paper_figure
from metatokens.report.tables import accuracy, cost, inside
from metatokens.report.tables.claims import MARKS, evidence, headline, sentence, so_far
from metatokens.report.tables.run import learning_steps
from metatokens.report.tables.table import POSITIONS, Table
from metatokens.report.text import duration, name, tokens
from metatokens.report.verdict import Judged, judge
from metatokens.report.words import sections as worded


@dataclass(frozen=True)
class Overview:
    """The first screen: what came out, beside the paper; every claim, by the question that it answers."""

    sentences: list[str]
    picture: Picture
    models: str
    """What sets the models of the picture apart."""
    counts: dict[str, dict[str, int]]
    """Of the paper's claims: how many of each verdict, by why."""
    questions: dict[str, list[Judged]]
    key: str
    caution: str


def overview(inputs: Inputs) -> Overview:
    """Every claim with its verdict."""
    questions = {text: [judge(inputs, one) for one in group] for text, group in claims(inputs.scale).items()}
    judged = list(chain.from_iterable(questions.values()))
    papers = [one for one in judged if one.claim.is_the_papers]
    counts = {verdict: Counter(one.why for one in papers if one.verdict == verdict) for verdict in MARKS}
    holds, fails, open_ = (number.total() for number in counts.values())
    sentences = [
        f"Of {len(papers)} claims of the paper {holds} hold at this scale, {fails} do not, and {open_} cannot be told.",
        *map(headline, sorted((one for one in judged if one.claim.headline), key=lambda one: one.claim.headline)),
    ]
    ran = [one.gap is not None for own in judged for one in own.comparisons]
    words = worded()["claims"].text
    if any(map(so_far, judged)):
        words += " (so far): more than half of the claim's comparisons are still to be run, and may turn the verdict."
    missing = f" {ran.count(False):,} of {len(ran):,} comparisons have not been run, or cannot be."
    alt = "List recall, segment counting, parity and copying by prompt length: ours in colour, the paper's in grey."
    return Overview(
        sentences,
        picture("beside_the_paper", alt, partial(lines.beside_the_paper, inputs)),
        worded()["controls"].text,
        {verdict: dict(number) for verdict, number in counts.items() if number},
        questions,
        words,
        _caution(inputs) + ("" if all(ran) else missing),
    )


def sections(inputs: Inputs, judged: Sequence[Judged]) -> list[Section]:
    """A section for each group of the paper's tables and figures, and for each control; at the end the cost.

    In each: what came out, then what it rests on; the comparisons of its claims are folded in at the end.
    """
    found = []
    for anchor, blocks in _BLOCKS.items():
        title, intro, _ = worded()[anchor].of(**_values(inputs))
        own = [one for one in judged if one.claim.section == anchor]
        folded = [Fold("Every comparison behind these verdicts", list(map(evidence, own)))] if own else []
        found.append(
            Section(anchor, title, intro, [*map(sentence, own), *(block for block in blocks(inputs) if block), *folded])
        )
    return [*found, run_page.majority(inputs), run_page.examples(inputs), _cost(inputs)]


def _values(inputs: Inputs) -> dict[str, object]:
    """What the words of the sections leave open."""
    figures = {number: paper_figure(number) for number in (1, 2, 3)}
    published = "the published model of 125 million parameters, fine-tuned"
    from_scratch = "transformers' model at this size from random weights, on the same text"
    longer = inputs.values("task", metric="exact_match", task="list_recall", variant=LONGER)
    return {
        "figure_1": figures[1].statement,
        "figure_1_note": figures[1].notes[0],
        "figure_2": figures[2].statement,
        "figure_3_note": figures[3].notes[0],
        "gpt_neo": f"GPT-Neo is {published if inputs.preset == 'paper' else from_scratch}.",
        "longer": worded()["longer"].text if longer else "",
        "shortest": TRAINED[0],
        "learned_loss": LEARNED_LOSS,
        "budget": BUDGET,
        "quarter": "At a quarter of the lengths in the paper." if inputs.scale > 1 else "",
        "block": tokens(1024 // inputs.scale),
    }


def _lengths(inputs: Inputs) -> Iterator[Block]:
    alt = "Accuracy by length: ours in colour, the paper's in grey."
    yield picture("lengths", alt, partial(lines.lengths, inputs))
    yield accuracy.unlearned(inputs)
    for task in TASKS:
        yield accuracy.lengths(inputs, task)
    for task, (metric, unit) in product(
        TASKS, {"exact_match": "answers", "token_accuracy": "tokens of answers"}.items()
    ):
        tables = [accuracy.every_model(inputs, task, variant=variant, metric=metric) for variant in ("", LONGER)]
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
                partial(lines.fine_tuning, curves, styles),
            )
            yield learning_steps(curves, f", {title}")


def _markers(inputs: Inputs) -> Iterator[Block]:
    yield accuracy.markers(inputs)
    for task, condition in product(TASKS, ("none", "decoy")):
        if table := _filled(accuracy.every_model(inputs, task, condition)):
            yield Fold(f"{name(task)} in condition {condition}", table)
    for condition in ("none", "paper", "decoy"):
        if table := _filled(accuracy.every_model(inputs, "list_recall", condition, variant="unmarked")):
            yield Fold(f"List recall of models trained without markers, tested in condition {condition}", table)


def _learning(inputs: Inputs) -> Iterator[Block]:
    if recall_curves(inputs.curves):
        yield picture("learning", "List recall by text tokens seen.", partial(lines.learning, inputs))
    yield cost.learning(inputs)


def _yarn(inputs: Inputs) -> Iterator[Block]:
    yield accuracy.yarn(inputs, "list_recall")
    yield accuracy.yarn(inputs, "segment_counting")
    yield Fold("The paper's table in full", [accuracy.papers_yarn()])


def _ablations(inputs: Inputs) -> Iterator[Block]:
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
    yield inside.rate_distortion(inputs)


def _perplexity(inputs: Inputs) -> Iterator[Block]:
    variants = sorted(set(inputs.select(metric="perplexity")["variant"]))
    rows = [
        (
            ", ".join(filter(None, [model, POSITIONS[position], variant])),
            {"variant": variant, "model": model, "position_embedding": position},
        )
        for variant, model, position in product(variants, (*MODELS, "gpt-neo"), POSITIONS)
    ]
    yield cost.perplexity(inputs, rows)


def _random_positions(inputs: Inputs) -> Iterator[Block]:
    if inputs.values("model", metric="exact_match", variant="random-positions"):
        alt = "Accuracy by length with random positions."
        yield picture("random_positions", alt, partial(lines.random_positions, inputs))
    for task in TASKS:
        yield accuracy.random_positions(inputs, task)


def _drawn(inputs: Inputs, file: str, alt: str, metric: str) -> Iterator[Block]:
    """A figure of what is inside meta, where it was measured."""
    draw: Callable[[Inputs, float], Figure] = getattr(inside_figures, file)
    if len(inputs.select(metric=metric, model="meta")):
        yield picture(file, alt, partial(draw, inputs))


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
    "perplexity": _perplexity,
    "placement": lambda inputs: iter([accuracy.placement(inputs)]),
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
    words = worded()["cost"].of(spent=_spent(inputs))
    if not seconds:
        return Section("cost", words.title, "There is no run.json beside the results: times are unknown.")
    total = ("in all", f"{len(seconds)}", duration(sum(seconds)))
    table = Table("One core each", ("what", "runs", "core time"), rows, (total,))
    return Section("cost", words.title, words.text, [table])


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
