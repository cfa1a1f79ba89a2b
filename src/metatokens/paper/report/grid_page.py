"""The report on a preset's grid: every claim with its verdict, then the paper's tables and figures, then our controls.

The words of its sections are in `words.md`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from typing import Any

from metatokens.looking.style import PAGE
from metatokens.paper.report import run_page
from metatokens.paper.report.blocks import Block, Fold, Picture, Section, picture
from metatokens.paper.report.claims import claims
from metatokens.paper.report.derive import TRAINED, select
from metatokens.paper.report.figures import inside as drawn
from metatokens.paper.report.figures import lines
from metatokens.paper.report.frame import MODELS, TASKS, Inputs
from metatokens.paper.report.learning import BUDGET, LEARNED_LOSS
from metatokens.paper.report.paper import paper_figure
from metatokens.paper.report.tables import accuracy, cost, inside
from metatokens.paper.report.tables.claims import MARKS, evidence, headline, sentence, so_far
from metatokens.paper.report.tables.run import learning_steps
from metatokens.paper.report.tables.table import POSITIONS, Table
from metatokens.paper.report.text import duration, name, tokens
from metatokens.paper.report.verdict import Judged, judge
from metatokens.paper.report.words import sections as worded


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
    holds, fails, divided, open_ = (number.total() for number in counts.values())
    sentences = [
        f"Of {len(papers)} claims of the paper {holds} hold at this scale, {fails} do not, {divided} hold in part, and "
        f"{open_} cannot be told.",
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
    for anchor, words in worded().items():
        own = [one for one in judged if one.claim.section == anchor]
        if words.shows:
            title, intro, _, shows = words.of(**_values(inputs))
            blocks = [*map(sentence, own), *(block for show in shows for block in _shown(inputs, show))]
            blocks += [Fold("Every comparison behind these verdicts", list(map(evidence, own)))] if own else []
            found.append(Section(anchor, title, intro, blocks))
    return [*found, run_page.shortcuts(inputs), run_page.examples(inputs), _cost(inputs)]


def _shown(inputs: Inputs, show: str) -> Iterator[Block]:
    """What a line of `words.md` places in a section."""
    head, _, rest = show.partition(" | ")
    if head.startswith("fold "):
        folds: dict[str, list[Table]] = {}
        for call in rest.split("; "):
            for block, arguments in _called(inputs, call):
                words = {key: str(value).replace("_", " ") for key, value in arguments.items()}
                title = head.removeprefix("fold ").format_map(words | {"task": name(arguments.get("task"))})
                folds.setdefault(title, []).extend([block] if isinstance(block, Table) and block.rows else [])
        yield from (Fold(title, tables) for title, tables in folds.items() if tables)
    elif rest:
        function = _function(head)
        draw = cache(partial(function, inputs))
        if draw(PAGE).axes:  # something was measured
            yield picture(function.__name__, rest, draw)
    else:
        yield from (block for block, _ in _called(inputs, head) if block)


def _called(inputs: Inputs, call: str) -> Iterator[tuple[Block, dict[str, Any]]]:
    """What a function gives for each combination of its arguments, and the arguments."""
    function, *given = call.split(" ")
    values = {key: _EVERY.get(value) or value.split(",") for key, value in (one.split("=") for one in given)}
    for chosen in product(*values.values()):
        arguments = {key: int(one) if one.isdigit() else one for key, one in zip(values, chosen, strict=True)}
        found = _function(function)(inputs, **arguments)
        yield from ((block, arguments) for block in (found if isinstance(found, list) else [found]))


def _function(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(".")
    return getattr(_MODULES[module], function)


def _values(inputs: Inputs) -> dict[str, object]:
    """What the words of the sections leave open."""
    figures = {number: paper_figure(number) for number in (1, 2, 3)}
    published = "the published model of 125 million parameters, fine-tuned"
    from_scratch = "transformers' model at this size from random weights, on the same text"
    return {
        "figure_1": figures[1].statement,
        "figure_1_note": figures[1].notes[0],
        "figure_2": figures[2].statement,
        "figure_3_note": figures[3].notes[0],
        "gpt_neo": f"GPT-Neo is {published if inputs.preset == 'paper' else from_scratch}.",
        "shortest": TRAINED[0],
        "learned_loss": LEARNED_LOSS,
        "budget": BUDGET,
        "quarter": "At a quarter of the lengths in the paper." if inputs.scale > 1 else "",
        "block": tokens(1024 // inputs.scale),
    }


def training(inputs: Inputs) -> list[Block]:
    """How losses fell by kind of positions, and whether each model had time enough."""
    blocks: list[Block] = []
    for position, title in POSITIONS.items():
        curves = select(inputs.curves, position_embedding=position, train_length=TRAINED[0], main=True)
        curves = curves.dropna(subset="loss")
        if len(curves):
            styles = {model: style for model, style in lines.STYLES.items() if model in set(curves["model"])}
            draw = partial(lines.fine_tuning, curves, styles)
            blocks += [f"{title.capitalize()}. {run_page.budget(curves)}"]
            blocks += [picture(f"training_{position}", f"Loss by step, {title}.", draw)]
            blocks += [learning_steps(curves, f", {title}")]
    return blocks


def perplexity(inputs: Inputs) -> Table:
    """The perplexity of every model and variant."""
    variants = sorted(set(inputs.select(metric="perplexity")["variant"]))
    about = product(variants, (*MODELS, "gpt-neo"), POSITIONS)
    rows = [
        (
            ", ".join(filter(None, [model, POSITIONS[position], variant])),
            {"variant": variant, "model": model, "position_embedding": position},
        )
        for variant, model, position in about
    ]
    return cost.perplexity(inputs, rows)


_MODULES = {"accuracy": accuracy, "cost": cost, "drawn": drawn, "inside": inside, "lines": lines}
_MODULES["page"] = sys.modules[__name__]
_EVERY = {"tasks": TASKS}


def _cost(inputs: Inputs) -> Section:
    """Core time and number of runs, by what they did."""
    times: dict[str, list[float]] = {}
    for run in inputs.read.runs:
        for stage in run.stages:
            times.setdefault(stage.kind or "not said", []).append(stage.cost)
    rows = tuple((what, f"{len(each)}", duration(sum(each))) for what, each in times.items())
    seconds = list(chain.from_iterable(times.values()))
    words = worded()["cost"].of(spent=_spent(inputs))
    if not seconds:
        return Section("cost", words.title, "There is no run.json beside the results: times are unknown.")
    total = ("in all", f"{len(seconds)}", duration(sum(seconds)))
    table = Table("One core each", ("what", "runs", "core time"), rows, (total,))
    return Section("cost", words.title, words.text, [table])


def _spent(inputs: Inputs) -> str:
    """Core time, and what for."""
    stages = [stage for run in inputs.read.runs for stage in run.stages]
    trained = sum(stage.kind in ("pretrain", "extend", "finetune") for stage in stages)
    hours = sum(stage.cost for stage in stages) / 3600
    return f"{hours:.1f} core-hours in {len(stages)} stages, of which {trained} trained a model." if stages else ""


def _caution(inputs: Inputs) -> str:
    """Sizes, seeds and cost: what these figures are of, and what they cannot show."""
    sizes = sorted({info.parameters for run in inputs.read.runs for info in run.models.values() if info.parameters})
    millions = [f"{size / 1e6:.3g}" for size in sizes]
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
