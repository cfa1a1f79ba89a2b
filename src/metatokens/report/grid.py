"""The results of a whole grid of runs, cell by cell, the seeds of each cell apart."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from metatokens.errors import UserError
from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import Measurement, Result
from metatokens.report.estimates import Estimate, mean
from metatokens.report.inputs import CurvePoint, Inputs, RecallPoint

GRIDS = ("small", "gpu", "paper")  # the presets that answer the paper's tables
LONGER = "longer"  # the note of runs that were trained longer than the plain ones
_KEYS = (
    "model", "position_embedding", "task", "condition", "train_condition", "train_length", "length", "intervention",
    "metric", "text",
)  # fmt: skip
_PLAIN = {
    "accuracy": {"condition": "paper", "train_condition": "paper", "metric": "exact_match", "text": None},
    "perplexity": dict.fromkeys(("task", "train_condition", "train_length", "length"), None)
    | {"metric": "perplexity", "text": "held_out"},
}


@dataclass(frozen=True)
class Cell:
    """One figure, seed by seed; no seed where the model cannot be run."""

    seeds: Mapping[int, Estimate]

    def pooled(self, seeds: Iterable[int] | None = None) -> Estimate | None:
        """The mean of the seeds, all or those given, which were tested on the same prompts; None of no seed."""
        return mean(self.seeds[seed] for seed in (self.seeds if seeds is None else seeds))


class Grid:
    """What was read of one grid, by the fields that say what was measured.

    Args:
        name: the preset; results are filed under `NAME`, or `NAME/NOTE` where a run departs from it.
        inputs: everything that was read.
    """

    def __init__(self, name: str, inputs: Inputs):
        self.name, self.inputs = name, inputs
        self._cells: dict[tuple[Any, ...], dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
        self._guesses: dict[tuple[str | None, int | None], float] = {}
        self._chances: dict[str | None, float] = {}
        self._longer: set[tuple[str | None, str | None]] = set()  # task, positions
        for result in inputs.results:
            if result.metric == "majority_rate" and result.recipe == name:
                self._guesses[result.task, result.length] = result.value or 0.0
            elif (note := self._note(result.recipe)) is not None:
                self._cells[note, *_key(result)][result.seed].append(result)
                if note == LONGER:
                    self._longer.add((result.task, result.position_embedding))
                if result.metric == "exact_match" and result.chance is not None:
                    self._chances[result.task] = result.chance
        self._measured: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
        for measurement in inputs.measurements:
            if self._note(measurement.recipe) == self.note(measurement.task, measurement.position_embedding):
                self._measured[measurement.analysis, measurement.metric].append(measurement)

    @property
    def scale(self) -> int:
        """How many times as long as ours the paper's prompts are where the context is extended."""
        return 4 if self.name == "small" else 1

    def note(self, task: str | None, position_embedding: str | None) -> str:
        """The note of the runs that speak for all models with these positions: the plain ones, or LONGER if any is."""
        return LONGER if (task, position_embedding) in self._longer else ""

    def accuracy(self, note: str | None = None, **fields: Any) -> Cell | None:
        """An accuracy; None where it was not run. Fields that are not given are as in the plain runs."""
        if note is None:
            note = self.note(fields.get("task"), fields.get("position_embedding"))
        return self._find(note, _PLAIN["accuracy"] | fields)

    def perplexity(self, note: str = "", **fields: Any) -> Cell | None:
        """A perplexity by model, position, placement (`condition`) and `text`; None where it was not run."""
        return self._find(note, _PLAIN["perplexity"] | fields)

    def values(self, field: str, **where: Any) -> list[Any]:
        """The values that a field of the cells has, nulls left out, sorted; `note` is a field too."""
        place = {name: number for number, name in enumerate(("note", *_KEYS))}
        chosen = (key for key in self._cells if all(key[place[name]] == value for name, value in where.items()))
        return sorted({key[place[field]] for key in chosen} - {None})

    def floor(self, task: str, length: int | None) -> float:
        """What guessing scores: chance, or the rate of the commonest answer where that is higher."""
        return max(self._chances.get(task, 0.0), self._guesses.get((task, length), 0.0))

    def measured(self, analysis: str, metric: str, **where: Any) -> "list[Measurement]":
        """The measurements of one metric whose fields have the given values."""
        found = self._measured[analysis, metric]
        return [one for one in found if all(getattr(one, name) == value for name, value in where.items())]

    def recall(self) -> dict[tuple[str, str], dict[int, list[RecallPoint]]]:
        """The learning curves of list recall by (model, position), by seed; steps ascending."""
        curves: dict[tuple[str, str], dict[int, dict[int, RecallPoint]]] = defaultdict(lambda: defaultdict(dict))
        for point in self.inputs.recall:
            wanted = self.note(point.task, point.position_embedding)
            if point.task == "list_recall" and self._note(point.recipe) == wanted:
                curves[point.model, point.position_embedding or ""][point.seed][point.step] = point
        return {
            model: {seed: [points[step] for step in sorted(points)] for seed, points in sorted(seeds.items())}
            for model, seeds in curves.items()
        }

    def losses(self, position: str, train_length: int) -> list[CurvePoint]:
        """The losses in fine-tuning, up to this length, of the runs that speak for all models: see `note`."""
        return [
            point
            for point in self.inputs.curves
            if (point.position_embedding, point.train_length) == (position, train_length)
            and self._note(point.recipe) == self.note(point.task, position)
        ]

    def _note(self, recipe: str | None) -> str | None:
        base, _, note = (recipe or "").partition("/")
        return note if base == self.name else None

    def _find(self, note: str, fields: Mapping[str, Any]) -> Cell | None:
        seeds = self._cells.get((note, *(fields.get(name) for name in _KEYS)))
        if seeds is None:
            return None
        figures = {seed: _together([_estimate(one) for one in seeds[seed]]) for seed in sorted(seeds)}
        return Cell({seed: one for seed, one in figures.items() if one.value is not None})


def grid_of(inputs: Inputs) -> Grid | None:
    """The grid among the results, None where there is none.

    Raises:
        UserError: if there are several, whose figures are not to be mixed.
    """
    names = {(result.recipe or "").partition("/")[0] for result in inputs.results} & set(GRIDS)
    if len(names) > 1:
        raise UserError(f"there are results of the presets {' and '.join(sorted(names))}; report one at a time.")
    return Grid(names.pop(), inputs) if names else None


def _together(parts: Sequence[Estimate]) -> Estimate:
    """One figure of a seed: where it has several, each is a proportion of a part of the prompts."""
    if len(parts) == 1 or any(one.value is None for one in parts):
        return parts[0]
    n = sum(one.n for one in parts)
    hits = sum(round((one.value or 0.0) * one.n) for one in parts)
    return Estimate(hits / n, *_wilson(hits, n), n, parts[0].chance)


@cache
def _wilson(hits: int, n: int) -> tuple[float, float]:
    # A page asks for the same few hundred intervals thousands of times.
    return wilson_interval(hits, n)


def _key(result: Result) -> tuple[Any, ...]:
    if result.metric == "perplexity":  # the same text in the same blocks for all models
        result = result.model_copy(update={"length": None, "text": result.text or "held_out"})
    return tuple(getattr(result, name) for name in _KEYS)


def _estimate(result: Result) -> Estimate:
    return Estimate(result.value, result.low, result.high, result.n, result.chance)
