"""One comparison: a figure less another, or less a bound, of the same seeds in the same setting."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from metatokens.evaluation.intervals import Difference, Estimate, newcombe, order, student, student_pooled
from metatokens.paper.report.frame import Cell, Fields, Inputs, one_seed
from metatokens.paper.report.text import learned_at, name, percent, tokens

HAIR = 0.02  # of a proportion: as close to the floor, or to 1, as this, a figure tells nothing apart
AGREES = 0.02  # of a proportion: a seed agrees with a difference of accuracies only by more than this
ROUNDING = 1e-9  # of differences that a whole number of prompts makes: 3 points and 2 are not more than 5
FEWEST = 3  # informative comparisons that a verdict asks for, and seeds on each side
LONGEST = 4096  # tokens, of the bins
LEARNED_END = 1024  # the longest bin that a learned table reaches
TEXTS = {"held_out": "held-out text", "book": "a book"}


@dataclass(frozen=True)
class Comparison:
    """The difference of two figures: what a claim says is that it lies above a margin."""

    label: str = ""
    gap: Difference | None = None
    """None where a figure was not run, or cannot be."""
    by_seed: tuple[float, ...] = ()
    """The difference of each seed that both sides have; one alone has no sign to agree with."""
    is_informative: bool = True
    """Whether the figures can tell: not both at 1, nor against a bound of another machine."""
    is_low: bool = False
    """Whether both are at the floor or below it, where a loss is a loss, and nothing else tells anything."""
    figures: str = ""
    """The two figures as a reader sees them."""
    task: str = ""
    """Of a setting that has one."""
    seeds: int | None = None
    """How many trainings of each side it rests on; None where the luck of training has no part in it."""
    agreement: float = 0.0
    """By more than so much a seed's own difference is to lie on a side."""

    def side(self, margin: float) -> int:
        """1 where it lies above the margin, with every seed; -1 where below; 0 where that cannot be told."""
        if self.gap is None:
            return 0
        least = self.agreement + ROUNDING
        if self.gap.low > margin and all(gap - margin > least for gap in self.by_seed):
            return 1
        is_below = self.gap.high < margin and all(margin - gap > least for gap in self.by_seed)
        return -1 if is_below else 0


class Versus(BaseModel):
    """What is compared: the first less the second, in each of some settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a: Fields | float
    """The fields that select the first figure in a setting, or a bound."""
    b: Fields | float | Literal["floor"]
    """Those of the second, a bound, or what needs no model."""
    over: dict[str, Any]
    """The settings, as claims.yaml writes them."""
    label: str = "{place}"
    is_match: bool = False
    """Whether the claim is that nothing is lost, of which two figures at 1 tell something."""
    room: Fields | None = None
    """The fields of the figures that must leave room for a difference, where they are not those compared."""
    device: str = ""
    """Where the bound was measured, which tells nothing of another."""
    scale: int = 1
    """By what the lengths are divided."""

    @field_validator("a", "b", mode="before")
    @classmethod
    def _name_is_of_model(cls, side: Any) -> Any:
        return {"model": side} if isinstance(side, str) and side != "floor" else side

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        fields = self.a if isinstance(self.a, dict) else self.b if isinstance(self.b, dict) else {}
        return str(fields.get("metric", "exact_match"))


def compare(inputs: Inputs, versus: Versus) -> list[Comparison]:
    """The comparison in each setting; one that was not run where nothing says what the settings are."""
    settings = list(_settings(inputs, versus))
    if not settings:
        return [Comparison("not measured")]
    how = _HOW.get(versus.metric, _proportions)
    ours, theirs = _sides(inputs, versus.a, versus.b, settings, _BY.get(versus.metric, ("seed",)))
    found = (how(inputs, versus, where, a, b) for where, a, b in zip(settings, ours, theirs, strict=True))
    return [
        replace(one, label=_label(versus, where), task=where.get("task", ""))
        for one, where in zip(found, settings, strict=True)
    ]


def _settings(inputs: Inputs, versus: Versus) -> Iterator[Fields]:
    over = dict(versus.over)
    if measured := over.pop("measured", None):
        fields = versus.a if isinstance(versus.a, dict) else versus.b
        assert isinstance(fields, dict), "what is compared with a bound was measured"
        found = inputs.select(**{**fields, **over})[measured].dropna().drop_duplicates()
        for row in found.to_dict("records"):
            yield {key: int(value) if isinstance(value, float) else value for key, value in row.items()}
        return
    longest = over.pop("up_to", LONGEST)
    for values in product(*over.values()):
        where = dict(zip(over, values, strict=True))
        if ratio := where.pop("ratio", None):
            where["length"] = ratio * where["train_length"]
            if where["length"] > longest or not reaches(where["position_embedding"], where["length"]):
                continue
        yield {key: value // versus.scale if key.endswith("length") else value for key, value in where.items()}


def reaches(position: str, length: int) -> bool:
    """Whether models with these positions can be run at a length."""
    return position != "learned" or length <= LEARNED_END


def _label(versus: Versus, where: Fields) -> str:
    """What a setting is called: `List recall, rope, 512 → 1,024`."""
    fields = {**(versus.a if isinstance(versus.a, dict) else {}), **where}
    words = {key: tokens(value) if isinstance(value, int) else str(value) for key, value in fields.items()}
    task = where.get("task", "")
    ends = f"{words.get('train_length')} \u2192 {words.get('length')}"
    place = f"{name(task)}, {words.get('position_embedding')}, {ends}"
    setting = f"{words.get('position_embedding')}, {name(task).lower()}, {ends}"
    words |= {"task": name(task), "text": TEXTS.get(where.get("text", ""), "")}
    words |= {"intervention": words.get("intervention", "").replace(":", " "), "passed": f"{where.get('layer', 0) - 1}"}
    words |= {"rate": f"{where.get('rate', 0):g}"}
    return versus.label.format(place=place, setting=setting, **words)


def difference(a: Cell | None, b: Cell | None, floor: float | None = None, *, is_match: bool = False) -> Comparison:
    """a - b by the seeds that both have, with Newcombe's interval.

    Args:
        a, b: the figures; None where one was not run.
        floor: what an accuracy has without doing the task; None where every figure leaves room for a difference.
        is_match: see `Versus`.
    """
    a, b = _of_both(a, b)
    if a is None or b is None:
        return Comparison()
    gaps = tuple(a[seed] - b[seed] for seed in a.seeds)
    is_low = is_high = False
    if floor is not None:
        both = [one for one in (a.pooled(), b.pooled()) if one]
        is_low = all(one.low is not None and one.low <= floor + HAIR for one in both)
        is_high = not is_match and all(one.value is not None and one.value >= 1 - HAIR for one in both)
    by_seed = gaps if len(gaps) > 1 else ()
    return Comparison("", newcombe(a.pooled(), b.pooled()), by_seed, not is_high, is_low, seeds=len(gaps))


def _floor(inputs: Inputs, where: Fields) -> float:
    return inputs.floor(where["task"], where["length"], where.get("condition", "paper"))


def _proportions(inputs: Inputs, versus: Versus, where: Fields, a: Cell | None, b: Cell | None) -> Comparison:
    """By Newcombe's interval: accuracies, gains, shares, times, and means with an interval of their own."""
    one, is_accuracy, floor = difference(a, b), versus.metric in ("exact_match", "training_gain"), None
    rooms = [a, b]
    if is_accuracy and isinstance(versus.a, dict) and isinstance(versus.b, dict):
        floor = _floor(inputs, {**where, **versus.a})
        if versus.room:
            rooms = inputs.cells([{**where, **side, **versus.room} for side in (versus.a, versus.b)])
    room = difference(rooms[0], rooms[1], floor, is_match=versus.is_match)
    is_informative = room.is_informative
    if versus.device and isinstance(versus.b, dict):
        is_informative = any(versus.device in one for one in inputs.values("device", **{**where, **versus.b}))
    ours, theirs = _of_both(a, b)
    figures = ""
    if ours and theirs and is_accuracy:
        figures = percent(ours.value) + (f" v {percent(theirs.value)}" if isinstance(versus.b, dict) else "")
        figures += one_seed([ours])
    elif ours and theirs and not isinstance(versus.a, dict) and versus.metric == "slowdown":
        figures = f"{theirs.value:.3f} v {ours.value:.3f}"
    return replace(
        one,
        is_informative=is_informative,
        is_low=room.is_low,
        figures=figures,
        seeds=None if versus.metric == "slowdown" else one.seeds,
        agreement=AGREES if is_accuracy else 0.0,
    )


def _distortions(inputs: Inputs, versus: Versus, where: Fields, a: Cell | None, b: Cell | None) -> Comparison:
    """Student's over seeds of the models, each the mean of its fits; of a single seed over its fits.

    These say nothing of another training of the model.
    """
    a, b = _of_both(a, b)
    if a is None or b is None:
        return Comparison()
    gaps: dict[float, list[float]] = {}
    for seed, fit in a.seeds:
        gaps.setdefault(seed, []).append(a[seed, fit] - b[seed, fit])
    means = tuple(map(fmean, gaps.values()))
    if len(means) > 1:
        return Comparison("", student(means), means, figures=f"{len(means)} seeds", seeds=len(means))
    [fits] = gaps.values()
    return Comparison("", student(fits), figures=f"1 seed, {len(fits)} fits", seeds=1)


def _perplexities(inputs: Inputs, versus: Versus, where: Fields, a: Cell | None, b: Cell | None) -> Comparison:
    """Of the luck of training: Student's, with the spread between seeds of all models that have several."""
    if not a or not b or not a.seeds or not b.seeds:
        return Comparison()
    models = inputs.cells([{**where, "metric": versus.metric, "model": model} for model in ("gpt2", "twin", "meta")])
    gap = student_pooled(a.values(), b.values(), [one.values() for one in models if one])
    alone = Difference(*[fmean(a.values()) - fmean(b.values())] * 3)
    return Comparison("", gap or alone, is_informative=gap is not None, seeds=min(len(a.seeds), len(b.seeds)))


def _orders(inputs: Inputs, versus: Versus, where: Fields, a: Cell | None, b: Cell | None) -> Comparison:
    """Whether every seed of one side comes before every seed of the other."""
    if not a or not b or not a.seeds or not b.seeds:
        return Comparison()
    sides = [a.values(), b.values()]
    figures = " v ".join(" / ".join(map(learned_at, side)) for side in sides)
    seeds = min(map(len, sides))
    return Comparison("", order(*sides), is_informative=seeds >= FEWEST, figures=figures, seeds=seeds)


_How = Callable[[Inputs, Versus, Fields, Cell | None, Cell | None], Comparison]
_HOW: dict[str, _How] = {
    "distortion_at_rate": _distortions,
    "log_perplexity": _perplexities,
    "tokens_to_learn": _orders,
}
_BY = {"distortion_at_rate": ("seed", "fit_seed")}  # what tells the figures of a cell apart


def _of_both(a: Cell | None, b: Cell | None) -> tuple[Cell, Cell] | tuple[None, None]:
    """The two by the seeds that both have; None where there is no such seed."""
    seeds = sorted(a.seeds.keys() & b.seeds.keys()) if a and b else []
    return (a.of(seeds), b.of(seeds)) if a and b and seeds else (None, None)


def _sides(
    inputs: Inputs, a: Fields | float | str, b: Fields | float | str, settings: Sequence[Fields], by: Sequence[str]
) -> tuple[Sequence[Cell | None], Sequence[Cell | None]]:
    """The cells of either side; a bound is the figure of every seed that the other side has."""
    if not isinstance(a, dict):
        theirs, ours = _sides(inputs, b, a, settings, by)
        return ours, theirs
    ours = inputs.cells([{**where, **a} for where in settings], by)
    if isinstance(b, dict):
        return ours, inputs.cells([{**where, **b} for where in settings], by)
    bounds = [_floor(inputs, {**where, **a}) if b == "floor" else float(b) for where in settings]
    return ours, [
        Cell(dict.fromkeys(cell.seeds, Estimate(bound, bound, bound))) if cell else None
        for cell, bound in zip(ours, bounds, strict=True)
    ]
