"""The comparison that the project is about: does `meta` gain, and does the control explain the gain?"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metatokens.records import Result
from metatokens.report.estimates import (
    Estimate,
    difference,
    measured_conditions,
    model_of,
    pivot,
    select,
    variant_of,
)

SUBJECT = "meta"
CONTROL = "twin"  # a second attention of equal size, over all positions
BASELINES = ("gpt2", "pause")  # one attention


@dataclass(frozen=True)
class Gain:
    """The models at one length of one task. Two differ where the 95 % interval of their difference excludes zero."""

    place: str
    """The length as a reader sees it, and what sets these models apart from other variants, if anything does."""
    cells: Mapping[str, Estimate]
    """By model, the figures that have an interval."""
    not_run: Sequence[str]
    """Models that cannot be run at this length."""
    commonest: float | None
    """What always giving the commonest answer scores, where it was measured."""

    def pairs(self) -> list[tuple[str, str]]:
        """Which models are compared: `meta` with the better baseline and the control; else the two best."""
        baselines = [model for model in BASELINES if model in self.cells]
        if SUBJECT in self.cells and baselines:
            base = max(baselines, key=self._value)
            control = [(SUBJECT, CONTROL), (CONTROL, base)] if CONTROL in self.cells else []
            return [(SUBJECT, base), *control]
        ranked = sorted(self.cells, key=self._value, reverse=True)
        return [(ranked[0], ranked[1])] if len(ranked) > 1 else []

    def sign(self, pair: tuple[str, str]) -> int:
        """1 where the first model is above the second, -1 where it is below, 0 where they do not differ."""
        gap = difference(self.cells[pair[0]], self.cells[pair[1]])
        return 0 if gap is None else (gap.low > 0) - (gap.high < 0)

    def verdict(self) -> str:
        """What came out, as a clause without figures."""
        pairs = self.pairs()
        if not pairs:
            return f"only {', '.join(self.cells)} was measured" if self.cells else "nothing was measured"
        if (floor := self.above_floor()) and not floor[2]:
            return f"no model is above {floor[0]}"
        first, second = pairs[0]
        match [self.sign(pair) for pair in pairs]:
            case [1, 1, 1]:
                return f"{first} is above {second}, and the control {CONTROL} explains part of the gain"
            case [1, 1, _]:
                return f"{first} is above {second}, and the control {CONTROL} does not explain the gain"
            case [1, 0, _]:
                return f"{first} is above {second}, but not measurably above the control {CONTROL}"
            case [1, -1, _]:
                return f"{first} is above {second}, and the control {CONTROL} is above {first}"
            case [0, -1, _]:
                return f"{first} gains nothing measurable over {second}, and the control {CONTROL} is above {first}"
            case [1]:
                return f"{first} is above {second}"
            case [-1, *_]:
                return f"{first} is below {second}"
            case _:
                return f"{first} gains nothing measurable over {second}"

    def above_floor(self) -> tuple[str, float, list[str]] | None:
        """What guessing scores, its name first, and the models whose whole interval lies above it."""
        chance = max((cell.chance for cell in self.cells.values() if cell.chance is not None), default=None)
        floors = [(chance, "chance"), (self.commonest, "the rate of the commonest answer")]
        known = [(rate, called) for rate, called in floors if rate is not None]
        if not known:
            return None
        rate, called = max(known)
        return called, rate, [model for model, cell in self.cells.items() if cell.low is not None and cell.low > rate]

    def _value(self, model: str) -> float:
        return self.cells[model].value or 0.0


def gains(results: Sequence[Result], task: str | None) -> list[Gain]:
    """The comparison at each of the key lengths, for each variant of the models."""
    condition = measured_conditions(results, task)[0]
    cells = pivot(results, "length", metric="exact_match", task=task, condition=condition)
    commonest = commonest_answer(results, task)
    found = []
    for length, place in key_lengths(results, task).items():
        families: dict[str, dict[str, Estimate]] = defaultdict(dict)
        for label, row in cells.items():
            if length in row:
                families[variant_of(label)][model_of(label)] = row[length]
        for variant, family in families.items():
            found.append(
                Gain(
                    place=f"{place}, {variant}" if variant else place,
                    cells={model: cell for model, cell in family.items() if cell.low is not None},
                    not_run=[model for model, cell in family.items() if cell.value is None],
                    commonest=commonest.get(length),
                )
            )
    return found


def commonest_answer(results: Sequence[Result], task: str | None) -> dict[int | None, float]:
    """By length, the rate of the commonest answer among a task's test answers: what always giving it would score."""
    found = pivot(results, "length", metric="majority_rate", task=task)
    return {length: cell.value for row in found.values() for length, cell in row.items() if cell.value is not None}


def key_lengths(results: Sequence[Result], task: str | None) -> dict[int | None, str]:
    """The lengths that tell most, with their names: the train length, the next one and the longest.

    Where models were trained at several lengths, the shortest that was measured stands for the train length.
    """
    measured = select(results, metric="exact_match", task=task)
    lengths = sorted({result.length for result in measured if result.length is not None})
    if not lengths:
        return {None: "all lengths"}
    trained = train_lengths(measured)
    if len(trained) != 1 or not trained <= set(lengths):
        return {length: f"{length:,} tokens" for length in (*lengths[:2], lengths[-1])}
    [start] = trained
    longer = [length for length in lengths if length > start]
    names: dict[int | None, str] = {start: f"{start:,} tokens (train)"}
    return names | {length: f"{length:,} tokens ({length / start:g}\u00d7)" for length in (*longer[:1], *longer[-1:])}


def train_lengths(results: Sequence[Result]) -> set[int]:
    """The lengths, in tokens, that the measured models were fine-tuned at."""
    return {result.train_length for result in results if result.train_length is not None}
