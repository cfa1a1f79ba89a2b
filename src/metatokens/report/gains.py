"""Any run's comparison of its models: does `meta` gain, and does the control explain the gain? By the grid's rules."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from metatokens.report.compare import Comparison, difference
from metatokens.report.derive import select
from metatokens.report.frame import Cell
from metatokens.report.labels import measured_conditions, model_of, pivot, variant_of

SUBJECT = "meta"
CONTROL = "twin"  # a second attention of equal size, over all positions
BASELINES = ("gpt2", "pause")  # one attention


@dataclass(frozen=True)
class Gain:
    """The models at one length of one task. Two differ where a `Comparison` of them lies on one side of zero."""

    place: str
    """The length as a reader sees it, and what sets these models apart from other variants, if anything does."""
    cells: Mapping[str, Cell]
    """By model, the figures that have an interval."""
    not_run: Sequence[str]
    """Models that cannot be run at this length."""
    commonest: float | None
    """What always giving the commonest answer scores, where it was measured."""

    def pairs(self) -> list[tuple[str, str, Comparison]]:
        """Which models are compared: `meta` with the better baseline and the control; else the two best."""
        baselines = [model for model in BASELINES if model in self.cells]
        if SUBJECT in self.cells and baselines:
            base = max(baselines, key=self._value)
            pairs = [(SUBJECT, base)]
            pairs += [(SUBJECT, CONTROL), (CONTROL, base)] if CONTROL in self.cells else []
        else:
            ranked = sorted(self.cells, key=self._value, reverse=True)
            pairs = [(ranked[0], ranked[1])] if len(ranked) > 1 else []
        return [(a, b, difference(self.place, self.cells[a], self.cells[b])) for a, b in pairs]

    def verdict(self) -> str:
        """What came out, as a clause without figures."""
        pairs = self.pairs()
        if not pairs:
            return f"only {', '.join(self.cells)} was measured" if self.cells else "nothing was measured"
        if (floor := self.above_guessing()) and not floor[2]:
            return f"no model is above {floor[0]}"
        first, second, _ = pairs[0]
        match [one.side(0.0) for _, _, one in pairs]:
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

    def above_guessing(self) -> tuple[str, float, list[str]] | None:
        """What guessing scores, its name first, and the models whose whole interval lies above it."""
        pooled = {model: one for model, cell in self.cells.items() if (one := cell.pooled())}
        chance = max((one.chance for one in pooled.values() if one.chance is not None), default=None)
        rates = [(chance, "chance"), (self.commonest, "the rate of the commonest answer")]
        known = [(rate, called) for rate, called in rates if rate is not None]
        if not known:
            return None
        rate, called = max(known)
        return called, rate, [model for model, one in pooled.items() if one.low is not None and one.low > rate]

    def _value(self, model: str) -> float:
        pooled = self.cells[model].pooled()
        return (pooled and pooled.value) or 0.0


def gains(figures: pd.DataFrame, task: str) -> list[Gain]:
    """The comparison at each of the key lengths, for each variant of the models."""
    condition = measured_conditions(figures, task)[0]
    cells = pivot(figures, "length", metric="exact_match", task=task, condition=condition)
    commonest = commonest_answer(figures, task)
    found = []
    for length, place in key_lengths(figures, task).items():
        families: dict[str, dict[str, Cell]] = defaultdict(dict)
        for label, row in cells.items():
            if length in row:
                families[variant_of(label)][model_of(label)] = row[length]
        for variant, family in families.items():
            run = {model: cell.pooled() for model, cell in family.items()}
            found.append(
                Gain(
                    place=f"{place}, {variant}" if variant else place,
                    cells={model: family[model] for model, one in run.items() if one and one.low is not None},
                    not_run=[model for model, one in run.items() if one is None],
                    commonest=commonest.get(length),
                )
            )
    return found


def differences_of(figures: pd.DataFrame, task: str) -> Iterator[tuple[str, str, str, Comparison]]:
    """Where, between which models, and the comparison: of every gain on a task."""
    for gain in gains(figures, task):
        for a, b, one in gain.pairs():
            yield gain.place, a, b, one


def commonest_answer(figures: pd.DataFrame, task: str) -> dict[int | None, float]:
    """By length, the rate of the commonest answer among a task's test answers: what always giving it would score."""
    found = pivot(figures, "length", metric="majority_rate", task=task)
    rates = {length: cell.pooled() for row in found.values() for length, cell in row.items()}
    return {length: one.value for length, one in rates.items() if one and one.value is not None}


def key_lengths(figures: pd.DataFrame, task: str) -> dict[int | None, str]:
    """The lengths that tell most, with their names: the train length, the next one and the longest.

    Where models were trained at several lengths, the shortest that was measured stands for the train length.
    """
    measured = select(figures, metric="exact_match", task=task)
    lengths = sorted(set(measured["length"].dropna().astype(int)))
    if not lengths:
        return {None: "all lengths"}
    trained = train_lengths(measured)
    if len(trained) != 1 or not trained <= set(lengths):
        return {length: f"{length:,} tokens" for length in (*lengths[:2], lengths[-1])}
    [start] = trained
    longer = [length for length in lengths if length > start]
    names: dict[int | None, str] = {start: f"{start:,} tokens (train)"}
    return names | {length: f"{length:,} tokens ({length / start:g}\u00d7)" for length in (*longer[:1], *longer[-1:])}


def train_lengths(figures: pd.DataFrame) -> set[int]:
    """The lengths, in tokens, that the measured models were fine-tuned at."""
    return set(figures["train_length"].dropna().astype(int))
