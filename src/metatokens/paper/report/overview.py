"""The sentences of the first screen, and the entry of each claim; the data choose the words."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np

from metatokens.paper import rule
from metatokens.paper.claims import Claim, ClaimResult, MeasuredStratum, Setting, Side, after_holm
from metatokens.paper.frame import GRIDS, PRESETS, select
from metatokens.paper.report.make_table import Cell, Fields, Row, Table, in_order, plain
from metatokens.paper.report.tables import Tables
from metatokens.paper.report.text import NOT_RUN, listed, name, number
from metatokens.paper.rule import Effect, Verdict

MARKS = {
    "supported": "\u25b6",
    "contradicted": "\u25c0",
    "equivalent": "\u25a0",
    "inconclusive": "\u25cb",
    "not run": NOT_RUN,
}
# By unit: the factor, the digits after the point, and the word.
_UNITS = {
    "points": (100.0, 1, "points"),
    "percent": (100.0, 1, "%"),
    "nats": (1.0, 2, "nats"),
    "logits": (1.0, 2, "logits"),
    "cosine": (1.0, 2, "cosine"),
    "times": (1.0, 2, "times"),
}
ALWAYS_RIGHT = 0.98  # a shortcut that answers so many prompts


# --- Amounts


def amount(effect: Effect, unit: str) -> str:
    """An effect and its interval: `+11.2 points (+4.0 to +18.4)`, `19 % fewer steps (2 to 34)`."""
    ends = [end for end in (effect.value, effect.low, effect.high) if math.isfinite(end)]
    if not ends:
        return NOT_RUN
    if unit == "steps":  # the logarithm of how many times as many steps the other side needs
        word = "% fewer steps"
        shown = [number(-100 * math.expm1(-end)) for end in ends]
    else:
        scale, digits, word = _UNITS[unit]
        shown = [number(scale * end, digits, "+") for end in ends]
    text = f"{shown[0]} {word}"
    return f"{text} ({shown[1]} to {shown[2]})" if len(shown) == 3 else text


def effect_text(result: ClaimResult) -> str:
    """A claim's effect and its interval, or that there is none."""
    if not result.strata:
        return "no setting counts" if result.empty_strata else "not run"
    text = amount(result.effect, result.claim.unit)
    return f"{text}, one run" if math.isnan(result.effect.low) else text


# --- The first screen


def sentences(tables: Tables, results: Sequence[ClaimResult]) -> list[str]:
    """The verdicts where several runs can be compared; with one run, what was trained."""
    if any(math.isfinite(result.effect.low) for result in results):
        said = [_verdicts(results), _main_claims(results)]
    else:
        said = [_compared(tables)]
    return list(filter(None, [*said, _learned(tables)]))


def _verdicts(results: Sequence[ClaimResult]) -> str:
    """How many of the paper's claims have each verdict."""
    counts = Counter(result.verdict for result in results if result.claim.number is not None)
    verdicts = []
    for verdict in get_args(Verdict):
        if counts[verdict]:
            verdicts.append(f"{counts[verdict]} {_be(counts[verdict])} {verdict}")
    return f"The paper makes {counts.total()} claims. At this scale {listed(verdicts)}."


def _main_claims(results: Sequence[ClaimResult]) -> str:
    """The claims that were named beforehand, and whether a correction for their number changes them."""
    tested = [result for result in results if result.claim.primary and result.strata]
    if not tested:
        return ""
    remains = after_holm(results)
    verdicts: list[str] = []
    lost: list[str] = []
    for result in tested:
        quoted = f"\u201c{result.claim.text}\u201d"
        verdicts.append(f"{quoted} is {result.verdict}: {effect_text(result)}")
        if result.verdict != "inconclusive" and not remains[result.claim.text]:
            lost.append(quoted)
    text = f"The main claims, named before the experiment: {'; '.join(verdicts)}."
    if lost:
        text += f" Holm's correction for their number would leave {listed(lost)} inconclusive."
    return text


def _compared(tables: Tables) -> str:
    """Which models were trained on what."""
    if not tables.tasks:
        return "No accuracy was measured."
    accuracies = select(tables.inputs.figures, metric="exact_match", intervention="")
    names = in_order(accuracies["model"])
    parameters = {
        model: info.parameters
        for run in tables.inputs.read.runs
        for model, info in run.models.items()
    }
    sizes = [f"{size / 1e6:.2f}" for size in map(parameters.get, names) if size]
    of_size = f" ({listed(sizes)} million parameters)" if len(sizes) == len(names) else ""
    runs = accuracies.groupby("model")["seed"].nunique().max()
    often = "once" if runs == 1 else f"up to {runs} times"
    tasks = [name(task).lower() for task in tables.tasks]
    return f"You see {listed(names)}{of_size}, each trained {often} and tested on {listed(tasks)}."


def _learned(tables: Tables) -> str:
    """Which models are above the best shortcut on each task, at the shortest train length."""
    if not tables.tasks:
        return ""
    tasks_by_words: dict[str, list[str]] = {}
    for task, main in tables.tasks.items():
        tasks_by_words.setdefault(_above_shortcut(tables, main), []).append(name(task).lower())
    easy = tasks_by_words.pop("", [])
    said = [
        f"{words} above the best shortcut in {listed(tasks)}"
        for words, tasks in sorted(tasks_by_words.items())
    ]
    if easy:
        said.append(
            f"in {listed(easy)} a shortcut is always right, so that accuracy does not show what was learned"
        )
    lengths = listed(sorted({number(main["length"]) for main in tables.tasks.values()}))
    return f"At {lengths} tokens, {'; '.join(said)}."


def _above_shortcut(tables: Tables, main: Fields) -> str:
    """Which models are above the best shortcut: `only twin and meta are`; empty if it is always right."""
    cells = {
        model: Cell.of(figures)
        for model, figures in tables.inputs.measured(**main).groupby("model")
    }
    floor = np.nan_to_num([cell.floors for cell in cells.values()]).max()
    above = in_order(model for model, cell in cells.items() if cell.estimate()[1] > floor)
    if floor >= ALWAYS_RIGHT:
        return ""
    if len(above) == len(cells):
        return "every model is"
    return f"only {listed(above)} {_be(len(above))}" if above else "no model is"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


# --- The entry of a claim


def numbered(result: ClaimResult) -> str:
    """A claim's text; one of the paper has its number."""
    return (
        f"{result.claim.number}. {result.claim.text}" if result.claim.number else result.claim.text
    )


def title(result: ClaimResult) -> str:
    """A claim with its verdict and its effect, on one line."""
    main = "Main claim: " if result.claim.primary else ""
    return (
        f"{MARKS[result.verdict]} {main}{numbered(result)}: {result.verdict}, {effect_text(result)}"
    )


def sides(claim: Claim) -> str:
    """What is compared: one side minus the other."""
    less = f", each minus its figure with {_side(claim.less, claim.metric)}" if claim.less else ""
    against = listed([_side(b, claim.metric) for b in claim.b], "or")
    return f"{_side(claim.a, claim.metric)} minus {against}{less}"


def boundaries(claim: Claim) -> tuple[str, str]:
    """The effects above which a claim is supported, and below which it is contradicted."""
    ends = rule.boundaries(claim.kind, claim.smallest)
    above, below = (amount(Effect(end), claim.unit) if end else "0" for end in ends)
    return above, below


def command(result: ClaimResult, preset: str | None) -> str:
    """The command that measures a claim again; none where it is unknown what was run."""
    if result.claim.only == "speed":
        return "python -m benchmarks.speed decode"
    if preset not in PRESETS:
        return ""
    only = f" --only {result.claim.only}" if preset in GRIDS else ""
    # Its own corpus is for trying it out.
    texts = " --corpus TEXT --book BOOK" if preset == "small" else ""
    return f"metatokens reproduce --preset {preset}{only}{texts} --out DIR"


def evidence(result: ClaimResult) -> Table:
    """A row for each stratum of a claim: its effect, the means compared, the number of runs and the settings."""
    rows = [
        _evidence_row(result.claim, stratum, rule.effect([stratum])) for stratum in result.strata
    ]
    rows += [_evidence_row(result.claim, stratum, Effect()) for stratum in result.empty_strata]
    return Table("", ("", "effect (95 % interval)", "means compared", "runs", "settings"), rows)


def _evidence_row(claim: Claim, stratum: MeasuredStratum, effect: Effect) -> Row:
    return (
        _stratum_name(claim, stratum),
        amount(effect, claim.unit),
        _means(claim, stratum),
        " and ".join(str(len(seeds)) for seeds in stratum.seeds) or NOT_RUN,
        _settings(stratum),
    )


def _stratum_name(claim: Claim, stratum: MeasuredStratum) -> str:
    fields = {key: value for key, value in stratum.fields.items() if value not in ("", "rope")}
    words = [name(value) if key == "task" else value for key, value in fields.items()]
    if len(claim.b) > 1:
        words.append(f"against {_side(stratum.against, claim.metric)}")
    return ", ".join(words) or "all"


def _means(claim: Claim, stratum: MeasuredStratum) -> str:
    """The means of what was compared, over the settings that count."""
    counted = [setting.means for setting in stratum.settings if not setting.left_out]
    means = counted or [setting.means for setting in stratum.settings]
    averages = [sum(of_figure) / len(means) for of_figure in zip(*means, strict=True)]
    if claim.unit == "steps":
        return ", ".join(number(math.exp(average)) for average in averages)
    scale, digits, _ = _UNITS[claim.unit]
    shown = [
        math.exp(average) if claim.unit == "percent" else scale * average for average in averages
    ]
    return ", ".join(number(value, digits) for value in shown)


def _settings(stratum: MeasuredStratum) -> str:
    """Its settings, and why some were left out."""
    by_reason: dict[str, list[str]] = {"": []}
    for setting in stratum.settings:
        by_reason.setdefault(setting.left_out, []).append(_setting(setting, stratum))
    counted = ", ".join(by_reason.pop(""))
    left_out = [
        f"left out ({reason}): {', '.join(settings)}" for reason, settings in by_reason.items()
    ]
    return "; ".join(filter(None, [counted, *left_out])) or "all"


def _setting(setting: Setting, stratum: MeasuredStratum) -> str:
    fields = {key: value for key, value in setting.fields.items() if key not in stratum.fields}
    lengths = [number(fields.pop(key)) for key in ("train_length", "length") if key in fields]
    words = [" \u2192 ".join(lengths)] if lengths else []
    words += [f"{key} {plain(value)}" for key, value in fields.items()]
    return " ".join(words)


def _side(side: Side, metric: str) -> str:
    """One side of a comparison; its metric, where that is not the claim's."""
    if side == "chance":
        return "guessing"
    if not isinstance(side, dict):
        return f"{side:g}"
    words = []
    for key, value in side.items():
        if value not in (None, "", metric):
            words.append(str(value) if key == "model" else f"{key.replace('_', ' ')} {value}")
    if not words:
        return "the plain run"
    first, *others = words
    return f"{first} with {', '.join(others)}" if others else first
