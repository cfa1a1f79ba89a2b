"""Any run's comparison of its models: does `meta` gain, and does the control explain the gain? By the grid's rules."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from metatokens.report.compare import Comparison, difference
from metatokens.report.frame import Cell, Inputs
from metatokens.report.labels import measured_conditions, model_of, rows, variant_of

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
    guessing: float
    """What guessing scores: chance, or always giving the commonest answer."""

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
        return [(a, b, difference(self.cells[a], self.cells[b])) for a, b in pairs]

    def verdict(self) -> str:
        """What came out, as a clause without figures."""
        pairs = self.pairs()
        if not pairs:
            return f"only {', '.join(self.cells)} was measured" if self.cells else "nothing was measured"
        if not self.above_guessing():
            return "no model is above guessing"
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

    def above_guessing(self) -> list[str]:
        """The models whose whole interval lies above guessing."""
        pooled = {model: cell.pooled() for model, cell in self.cells.items()}
        return [model for model, one in pooled.items() if one and one.low is not None and one.low > self.guessing]

    def _value(self, model: str) -> float:
        pooled = self.cells[model].pooled()
        return (pooled and pooled.value) or 0.0


def gains(inputs: Inputs, task: str) -> Iterator[Gain]:
    """The comparison at each of the key lengths, for each variant of the models."""
    named = rows(inputs, metric="exact_match", task=task, condition=measured_conditions(inputs, task)[0])
    for length, place in key_lengths(inputs, task).items():
        variants: dict[str, dict[str, Cell]] = defaultdict(dict)
        cells = inputs.cells([{**fields, "length": length} for _, fields in named])
        for (label, _), cell in zip(named, cells, strict=True):
            if cell:
                variants[variant_of(label)][model_of(label)] = cell
        for variant, family in variants.items():
            pooled = {model: cell.pooled() for model, cell in family.items()}
            yield Gain(
                place=f"{place}, {variant}" if variant else place,
                cells={model: family[model] for model, one in pooled.items() if one and one.low is not None},
                not_run=[model for model, one in pooled.items() if one is None],
                guessing=inputs.guessing(task, length),
            )


def key_lengths(inputs: Inputs, task: str) -> dict[int | None, str]:
    """The lengths that tell most, with their names: the train length, the next one and the longest.

    Where models were trained at several lengths, the shortest that was measured stands for the train length.
    """
    lengths = inputs.values("length", metric="exact_match", task=task)
    trained = inputs.values("train_length", metric="exact_match", task=task)
    if not lengths:
        return {None: "all lengths"}
    if len(trained) != 1 or trained[0] not in lengths:
        return {length: f"{length:,} tokens" for length in (*lengths[:2], lengths[-1])}
    [start] = trained
    longer = [length for length in lengths if length > start]
    names: dict[int | None, str] = {start: f"{start:,} tokens (train)"}
    return names | {length: f"{length:,} tokens ({length / start:g}\u00d7)" for length in (*longer[:1], *longer[-1:])}
