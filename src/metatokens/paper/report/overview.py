"""The sentences of the first screen, and the entry of each claim; the data choose the words."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from metatokens.paper import rule
from metatokens.paper.claims import ClaimResult, MeasuredStratum, Setting, Side, after_holm
from metatokens.paper.frame import GRIDS, PRESETS, select
from metatokens.paper.report.table import Cell, Table, order, plain
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
    "points": (100.0, 1, "points"), "percent": (100.0, 1, "%"), "nats": (1.0, 2, "nats"), "logits": (1.0, 2, "logits"),
    "cosine": (1.0, 2, "cosine"), "times": (1.0, 2, "times"),
}  # fmt: skip
# The name that `reproduce --only` takes, by the section that shows a claim.
_ONLY = {
    "lengths": "figure1", "controls": "figure1", "markers": "markers", "long-prompts": "lengths", "jumps": "lengths",
    "learning": "learning", "yarn": "table1", "noise": "table15", "placement": "placement", "sharpness": "figure2",
    "caching": "figure2", "rate-distortion": "figure3", "perplexity": "perplexity", "ablations": "table11",
    "landmarks-alone": "landmarks", "other-recipes": "recipes",
}  # fmt: skip


def amount(found: Effect, unit: str) -> str:
    """An effect and its interval: `+11.2 points (+4.0 to +18.4)`, `19 % fewer steps (2 to 34)`."""
    ends = [end for end in (found.value, found.low, found.high) if math.isfinite(end)]
    if unit == "steps":  # the logarithm of how many times as many steps the other side needs
        word, shown = "% fewer steps", [number(-100 * math.expm1(-end)) for end in ends]
    else:
        scale, digits, word = _UNITS[unit]
        shown = [number(scale * end, digits, "+") for end in ends]
    if not shown:
        return NOT_RUN
    return f"{shown[0]} {word}" + (f" ({shown[1]} to {shown[2]})" if len(shown) == 3 else "")


def effect_text(one: ClaimResult) -> str:
    """A claim's effect and its interval, or that there is none."""
    if not one.strata:
        return "no setting counts" if one.empty_strata else "not run"
    return amount(one.effect, one.claim.unit) + (", one run" if math.isnan(one.effect.low) else "")


def sentences(tables: Tables, judged: Sequence[ClaimResult]) -> list[str]:
    """The verdicts where several runs can be compared; with one run, what was trained."""
    said = [_verdicts(judged), _main_claims(judged)] if any(math.isfinite(one.effect.low) for one in judged) else []
    return list(filter(None, [*(said or [_compared(tables)]), _learned(tables)]))


def _verdicts(judged: Sequence[ClaimResult]) -> str:
    """How many of the paper's claims have each verdict."""
    counts = Counter(one.verdict for one in judged if one.claim.number is not None)
    said = [f"{counts[one]} {_be(counts[one])} {one}" for one in get_args(Verdict) if counts[one]]
    return f"The paper makes {counts.total()} claims. At this scale {listed(said)}."


def _main_claims(judged: Sequence[ClaimResult]) -> str:
    """The claims that were named beforehand, and whether a correction for their number changes them."""
    told = [one for one in judged if one.claim.primary and one.strata]
    remains = after_holm(judged)
    lost = [one.claim.text for one in told if one.verdict != "inconclusive" and not remains[one.claim.text]]
    said = "; ".join(f"\u201c{one.claim.text}\u201d is {one.verdict}: {effect_text(one)}" for one in told)
    quoted = listed([f"\u201c{text}\u201d" for text in lost])
    holm = f" Holm's correction for their number would leave {quoted} inconclusive." if lost else ""
    return f"The main claims, named before the experiment: {said}.{holm}" if told else ""


def _compared(tables: Tables) -> str:
    """Which models were trained on what."""
    found = select(tables.inputs.figures, metric="exact_match", intervention="")
    names = sorted(set(found["model"]), key=order)
    infos = {one: info for run in tables.inputs.read.runs for one, info in run.models.items()}
    sizes = [f"{size / 1e6:.2f}" for one in names if one in infos and (size := infos[one].parameters)]
    of_size = f" ({listed(sizes)} million parameters)" if len(sizes) == len(names) else ""
    runs = found.groupby("model")["seed"].nunique().max() if len(found) else 0
    how = "trained once" if runs == 1 else f"trained up to {runs} times"
    tasks = [name(task).lower() for task in tables.tasks]
    if not tasks:
        return "No accuracy was measured."
    return f"You see {listed(names)}{of_size}, each {how} and tested on {listed(tasks)}."


def _learned(tables: Tables) -> str:
    """Which models are above the best shortcut on each task, at the shortest train length."""
    groups: dict[str, list[str]] = {}
    for task, about in tables.tasks.items():
        cells = {model: Cell.of(own) for model, own in tables.inputs.measured(**about).groupby("model")}
        floor = max((end for cell in cells.values() for end in cell.floors if math.isfinite(end)), default=0.0)
        above = [model for model in sorted(cells, key=order) if cells[model].estimate()[1] > floor]
        some = f"only {listed(above)} {_be(len(above))}" if above else "no model is"
        who = "every model is" if len(above) == len(cells) else some
        groups.setdefault("" if floor >= 0.98 else who, []).append(name(task).lower())
    easy = groups.pop("", [])
    said = [f"{who} above the best shortcut in {listed(tasks)}" for who, tasks in sorted(groups.items())]
    if easy:
        said.append(f"in {listed(easy)} a shortcut is always right, so that accuracy does not show what was learned")
    lengths = listed(sorted({number(about["length"]) for about in tables.tasks.values()}))
    return f"At {lengths} tokens, {'; '.join(said)}." if said else ""


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def evidence(one: ClaimResult) -> Table:
    """A row for each stratum of a claim: its effect, the means compared, the number of runs and the settings."""
    effects = [(stratum, rule.effect([stratum])) for stratum in one.strata]
    effects += [(stratum, Effect()) for stratum in one.empty_strata]
    rows = [
        (
            _stratum_name(one, stratum),
            amount(effect, one.claim.unit),
            _means(one, stratum),
            " and ".join(str(len(seeds)) for seeds in stratum.seeds) or NOT_RUN,
            _settings(stratum),
        )
        for stratum, effect in effects
    ]
    header = ("", "effect (95 % interval)", "means compared", "runs", "settings")
    return Table("", header, rows)


def _stratum_name(one: ClaimResult, stratum: MeasuredStratum) -> str:
    fields = {key: value for key, value in stratum.fields.items() if value not in ("", "rope")}
    words = [name(value) if key == "task" else str(value) for key, value in fields.items()]
    against = f"against {_side(stratum.against, one.claim.metric)}" if len(one.claim.b) > 1 else ""
    return ", ".join(filter(None, [*words, against])) or "all"


def _means(one: ClaimResult, stratum: MeasuredStratum) -> str:
    """The means of what was compared, over the settings that count."""
    every = [setting.means for setting in stratum.settings]
    counted = [setting.means for setting in stratum.settings if not setting.left_out] or every
    scale, digits, _ = _UNITS.get(one.claim.unit, (1.0, 2, ""))
    averages = [sum(each) / len(counted) for each in zip(*counted, strict=True)]
    shown = [math.exp(mean) if one.claim.unit in ("steps", "percent") else scale * mean for mean in averages]
    return ", ".join(number(mean, 0 if one.claim.unit == "steps" else digits) for mean in shown)


def _settings(stratum: MeasuredStratum) -> str:
    """Its settings, and why some were left out."""
    by_reason: dict[str, list[str]] = {"": []}
    for setting in stratum.settings:
        by_reason.setdefault(setting.left_out, []).append(_setting(setting, stratum))
    said = [", ".join(own) if not why else f"left out ({why}): {', '.join(own)}" for why, own in by_reason.items()]
    return "; ".join(filter(None, said)) or "all"


def _setting(setting: Setting, stratum: MeasuredStratum) -> str:
    own = {key: value for key, value in setting.fields.items() if key not in stratum.fields}
    ends = [number(own.pop(key)) for key in ("train_length", "length") if key in own]
    return " ".join(filter(None, [" \u2192 ".join(ends), *(f"{key} {plain(value)}" for key, value in own.items())]))


def _side(side: Side | Mapping[str, Any], metric: str) -> str:
    """One side of a comparison; its metric, where that is not the claim's."""
    if not isinstance(side, Mapping):
        return "guessing" if side == "chance" else f"{side:g}"
    words = [
        f"{key.replace('_', ' ')} {value}" if key != "model" else str(value)
        for key, value in side.items()
        if value not in (None, "", metric)
    ]
    return " with ".join([words[0], ", ".join(words[1:])]) if len(words) > 1 else "".join(words) or "the plain run"


def command(one: ClaimResult, preset: str | None) -> str:
    """The command that measures a claim again; none where it is unknown what was run."""
    if one.claim.section == "speed":
        return "python -m benchmarks.speed decode"
    only = f" --only {_ONLY[one.claim.section]}" if preset in GRIDS and one.claim.section in _ONLY else ""
    texts = " --corpus TEXT --book BOOK" if preset == "small" else ""  # its own corpus is for trying it out
    return f"metatokens reproduce --preset {preset}{only}{texts} --out DIR" if preset in PRESETS else ""


def numbered(one: ClaimResult) -> str:
    """A claim's text; one of the paper has its number."""
    return f"{one.claim.number}. {one.claim.text}" if one.claim.number else one.claim.text


def title(one: ClaimResult) -> str:
    """A claim with its verdict and its effect, on one line."""
    main = "Main claim: " if one.claim.primary else ""
    return f"{MARKS[one.verdict]} {main}{numbered(one)}: {one.verdict}, {effect_text(one)}"


def about(one: ClaimResult) -> str:
    """Where a claim is from, what is compared, and where its boundaries lie."""
    claim = one.claim
    above, below = (
        amount(Effect(end), claim.unit) if end else "0" for end in rule.boundaries(claim.kind, claim.smallest)
    )
    rank = "A main claim" if claim.primary else "An exploratory claim"
    source = f"the paper's ({claim.source})" if claim.number is not None else f"ours ({claim.source})"
    less = f", each minus its figure with {_side(claim.less, claim.metric)}" if claim.less else ""
    against = listed([_side(b, claim.metric) for b in claim.b], "or")
    where = "in each task alone" if claim.universal else "in the mean of tasks"
    return (
        f"{rank}, {source}. Compared, {where}: {_side(claim.a, claim.metric)} minus {against}{less}, by "
        f"{claim.metric.replace('_', ' ')}. "
        f"Supported above {above}, contradicted below {below}."
    )
