"""Any run's comparison of its models: does `meta` gain, and does the control explain the gain? By the grid's rules."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from metatokens.looking.style import SEPARATOR
from metatokens.paper.report.compare import Comparison, difference
from metatokens.paper.report.frame import Cell, Inputs
from metatokens.paper.report.labels import measured_conditions, rows

SUBJECT, CONTROL = "meta", "twin"  # the control has a second attention of equal size, over all positions
BASELINES = ("gpt2", "pause")  # one attention

# By the sides of zero on which lie subject - baseline, subject - control and control - baseline, as many as decide.
_CLAUSES = {
    (1, 1, 1): "{a} is above {b}, and the control twin explains part of the gain",
    (1, 1): "{a} is above {b}, and the control twin does not explain the gain",
    (1, 0): "{a} is above {b}, but not measurably above the control twin",
    (1, -1): "{a} is above {b}, and the control twin is above {a}",
    (0, -1): "{a} gains nothing measurable over {b}, and the control twin is above {a}",
    (1,): "{a} is above {b}",
    (0,): "{a} gains nothing measurable over {b}",
    (-1,): "{a} is below {b}",
}


@dataclass(frozen=True)
class Gain:
    """The models at one length of one task. Two differ where a `Comparison` of them lies on one side of zero."""

    place: str
    """The length as a reader sees it, and what sets these models apart from other variants, if anything does."""
    cells: Mapping[str, Cell]
    """By model, the figures that have an interval."""
    floor: float

    def pairs(self) -> list[tuple[str, str, Comparison]]:
        """Which models are compared: `meta` with the better baseline and the control; else the two best."""
        ranked = sorted(self.cells, key=lambda model: self.cells[model].value or 0.0, reverse=True)
        base = next((model for model in ranked if model in BASELINES), None)
        pairs = [(ranked[0], ranked[1])] if len(ranked) > 1 else []
        if base and SUBJECT in self.cells:
            pairs = [(SUBJECT, base)]
            pairs += [(SUBJECT, CONTROL), (CONTROL, base)] if CONTROL in self.cells else []
        return [(a, b, difference(self.cells[a], self.cells[b])) for a, b in pairs]

    def verdict(self) -> str:
        """What came out, as a clause without figures."""
        pairs = self.pairs()
        if not pairs:
            return f"only {', '.join(self.cells)} was measured" if self.cells else "nothing was measured"
        pooled = [cell.pooled() for cell in self.cells.values()]
        if not any(one and one.low is not None and one.low > self.floor for one in pooled):
            return "no model is above the floor"
        sides = tuple(one.side(0.0) for _, _, one in pairs)
        decisive = next(sides[:n] for n in (3, 2, 1) if sides[:n] in _CLAUSES)
        return _CLAUSES[decisive].format(a=pairs[0][0], b=pairs[0][1])


def gains(inputs: Inputs, task: str) -> Iterator[Gain]:
    """The comparison at each of the key lengths, for each variant of the models."""
    condition, *_ = measured_conditions(inputs)[task]
    named = rows(inputs, metric="exact_match", task=task, condition=condition)
    for length, place in key_lengths(inputs, task).items():
        variants: dict[str, dict[str, Cell]] = defaultdict(dict)
        cells = inputs.cells([fields | {"length": length} for _, fields in named])
        for (label, _), cell in zip(named, cells, strict=True):
            model, _, variant = label.partition(SEPARATOR)
            if cell:
                pooled = cell.pooled()
                variants[variant] |= {model: cell} if pooled and pooled.low is not None else {}
        for variant, own in variants.items():
            yield Gain(", ".join(filter(None, [place, variant])), own, inputs.floor(task, length, condition))


def key_lengths(inputs: Inputs, task: str) -> dict[int | None, str]:
    """The lengths that tell most, with their names: the train length, the next one and the longest.

    Where models were trained at several lengths, the shortest that was measured stands for the train length.
    """
    lengths, trained = (inputs.values(key, metric="exact_match", task=task) for key in ("length", "train_length"))
    if len(trained) != 1 or trained[0] not in lengths:
        return {length: f"{length:,} tokens" for length in lengths[:2] + lengths[-1:]} or {None: "all lengths"}
    [start] = trained
    longer = [length for length in lengths if length > start]
    names = {start: "train"} | {length: f"{length / start:g}\u00d7" for length in longer[:1] + longer[-1:]}
    return {length: f"{length:,} tokens ({said})" for length, said in names.items()}
