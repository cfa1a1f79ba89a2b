"""Everything that was read for one report, in tidy frames: a row for each measured figure and seed.

Columns are the fields of the records. Text that does not apply is empty, a number that does not apply is NaN. A column
that does not exist is a `KeyError`, so that a misspelt field never reads as "not run".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from metatokens.errors import UserError
from metatokens.evaluation.intervals import Estimate, mean, wilson_interval
from metatokens.paper.report import derive
from metatokens.paper.report.derive import select
from metatokens.paper.run_files import RunLines, read_runs
from metatokens.records import (
    AnalysisMetric,
    CurvePoint,
    Measurement,
    Metric,
    Record,
    Result,
)

PRESETS = ("small", "gpu", "paper")  # whose figures are set beside the paper's
MODELS = ("gpt2", "pause", "twin", "meta")  # each differs in one thing from the one before it
LENGTHS = (128, 256, 512, 1024, 2048, 4096)  # tokens, of the bins
TASKS = ("list_recall", "segment_counting", "parity", "copying")

Fields = dict[str, Any]  # column to value; None for a number that does not apply

_NUMBERS = (
    "train_length", "length", "noise_seed", "layer", "head", "distance", "position", "beta", "fit_seed", "rate",
    "batch", "seed", "value", "low", "high", "n", "chance", "step", "loss", "text_tokens", "exact_match",
)  # fmt: skip
METRICS = {*get_args(Metric), *get_args(AnalysisMetric), *derive.METRICS}
_DERIVED = ("benchmark", "against", "shape", "device")  # text that only derived figures have
_OUTCOMES = ("value", "low", "high", "n", "chance", "quantiles")  # the other columns say what was measured
_OBJECTS = ("premise", "boosted", "quantiles", "variant", "main")
_ACCURACY = {"condition": "paper", "train_condition": "paper", "intervention": ""}
_DEFAULTS: Mapping[str, Fields] = {
    "exact_match": _ACCURACY,
    "token_accuracy": _ACCURACY,
    "perplexity": {"variant": "", "text": "held_out"},
    "log_perplexity": {"variant": ""},
}


@dataclass(frozen=True)
class Cell:
    """One figure, seed by seed; no seed where the model cannot be run."""

    seeds: Mapping[Any, Estimate]

    def pooled(self) -> Estimate | None:
        """The mean of the seeds, which were tested on the same prompts; None of no seed.

        They are taken as wholly dependent: the half-widths of their intervals are averaged. How far the prompts move
        them together cannot be told from the lines, and independent ones would have a narrower interval.
        """
        return mean(self.seeds.values())

    @property
    def value(self) -> float | None:
        """The mean of the seeds' values; None of no seed."""
        pooled = self.pooled()
        return pooled.value if pooled else None

    @property
    def n(self) -> int:
        """How many prompts, rows or tokens, of all seeds."""
        return sum(one.n for one in self.seeds.values())

    @property
    def chance(self) -> float | None:
        """What blind guessing scores, where it was measured with the figure."""
        return next((one.chance for one in self.seeds.values() if one.chance is not None), None)

    def __getitem__(self, seed: Any) -> float:
        """The value of a seed."""
        return self.seeds[seed].value or 0.0

    def values(self) -> list[float]:
        """The value of each seed, in order."""
        return [self[seed] for seed in self.seeds]

    def of(self, seeds: Iterable[Any]) -> "Cell":
        """The cell with those of its seeds alone that are given."""
        return Cell({seed: self.seeds[seed] for seed in seeds if seed in self.seeds})


def shared(cells: Sequence[Cell | None]) -> list[Cell | None]:
    """The cells by the seeds that all of those with a figure have; as they are where there is no such seed."""
    seeds = [cell.seeds.keys() for cell in cells if cell and cell.seeds]
    common = set(seeds[0]).intersection(*seeds) if seeds else set()
    return [cell and cell.of(seed for seed in cell.seeds if seed in common) for cell in cells] if common else [*cells]


def one_seed(cells: Iterable[Cell | None]) -> str:
    """` (seed 0)` where every figure is of that seed alone; of several seeds each cell shows every one."""
    found = {tuple(cell.seeds) for cell in cells if cell and cell.seeds}
    [seeds] = found if len(found) == 1 else [()]
    return f" (seed {seeds[0]})" if len(seeds) == 1 else ""


@dataclass
class Inputs:
    """What was read.

    Args:
        figures: what was measured, and what is derived from it; of a grid's preset, its own runs alone.
        curves: points of training curves.
        preset: the preset of a grid; None of another run.
        read: the lines themselves.
        remeasured: figures left out because a later line holds the same.
    """

    figures: pd.DataFrame
    curves: pd.DataFrame
    preset: str | None
    read: RunLines
    remeasured: int = 0

    @property
    def scale(self) -> int:
        """How many times as long as ours the paper's prompts are where the context is extended."""
        return 4 if self.preset == "small" else 1

    def select(self, **where: Any) -> pd.DataFrame:
        """The figures whose fields have the given values; see `select`."""
        figures = self._of_metrics(frozenset([where["metric"]])) if "metric" in where else self.figures
        return select(figures, **where)

    def values(self, column: str, **where: Any) -> list[Any]:
        """The values that a field of the chosen figures has, nulls left out, sorted."""
        found = set(self.select(**where)[column].dropna()) - {""}
        return sorted(int(one) if isinstance(one, float) and one.is_integer() else one for one in found)

    def cell(self, **fields: Any) -> Cell | None:
        """One figure; see `cells`."""
        return self.cells([fields])[0]

    def cells(self, settings: Sequence[Fields], by: Sequence[str] = ("seed",)) -> list[Cell | None]:
        """The figure of each setting, None where it was not run; several rows of a seed, such as heads, are averaged.

        Args:
            settings: what was measured, all by the same fields. Those of an accuracy or a perplexity that are not
                given are as in the plain runs; an accuracy is an exact match.
            by: what tells the figures of a cell apart.
        """
        if not settings:
            return []
        wanted = pd.DataFrame([_with_defaults(fields) for fields in settings])
        figures = self._of_metrics(frozenset(wanted["metric"]))
        wanted = wanted.astype({name: figures[name].dtype for name in wanted})
        found = wanted.reset_index(names="setting").merge(figures, on=list(wanted))
        rows: list[dict[Any, list[Estimate]]] = [{} for _ in settings]
        columns = (found[name].tolist() for name in ("setting", "value", "low", "high", "n", "chance", *by))
        for setting, value, low, high, n, chance, *seeds in zip(*columns, strict=True):
            seed = int(seeds[0]) if len(seeds) == 1 else tuple(seeds)
            rows[setting].setdefault(seed, []).append(Estimate.of((value, low, high), int(n), chance))
        return [_cell(seeds) if seeds else None for seeds in rows]

    def floor(self, task: str, length: int | None, condition: str = "paper") -> float:
        """What is scored without doing the task: by chance, or by the best of the short cuts that were measured."""
        shortcut = max(self._shortcuts.get((task, length, one), 0.0) for one in (condition, ""))
        return max(self._chances.get(task, 0.0), shortcut)

    @cached_property
    def _by_metric(self) -> dict[str, pd.DataFrame]:
        return dict(tuple(self.figures.groupby("metric", sort=False)))

    def _of_metrics(self, metrics: frozenset[str]) -> pd.DataFrame:
        if unknown := metrics - METRICS:
            raise KeyError(f"there is no metric {', '.join(sorted(unknown))}")
        found = [self._by_metric[metric] for metric in metrics if metric in self._by_metric]
        return found[0] if len(found) == 1 else self.figures[self.figures["metric"].isin(metrics)]

    @cached_property
    def _chances(self) -> dict[str, float]:
        return dict(self.select(metric="exact_match").dropna(subset="chance").groupby("task")["chance"].last())

    @cached_property
    def _shortcuts(self) -> dict[tuple[str, float | None, str], float]:
        """The best by task, length and condition; the commonest answer of earlier versions is for every condition."""
        old = self.select(metric="majority_rate", variant="").assign(condition="")
        found = pd.concat([self.select(metric="shortcut", variant=""), old])
        last = found.drop_duplicates(["model", "task", "length", "condition"], keep="last")
        return dict(last.groupby(["task", "length", "condition"])["value"].max())


def load(paths: Sequence[Path]) -> Inputs:
    """What `read_runs` reads; of a figure that was measured again, the later record counts.

    Raises:
        UserError: as `read_runs` does, or if there are results of several presets, whose figures are not to be mixed.
    """
    read = read_runs(paths)
    presets = sorted({(result.recipe or "").partition("/")[0] for result in read.results} & set(PRESETS))
    if len(presets) > 1:
        raise UserError(f"there are results of the presets {' and '.join(presets)}; report one at a time.")
    preset = presets[0] if presets else None
    measured = _typed(pd.concat([_rows(read.results, Result), _rows(read.measurements, Measurement)]))
    figures = measured.drop_duplicates([name for name in measured if name not in _OUTCOMES], keep="last")
    remeasured = len(measured) - len(figures)
    figures, curves = (_variants(one, preset) for one in (figures, _typed(_rows(read.points, CurvePoint))))
    figures.loc[(figures["metric"] == "perplexity") & (figures["text"] == ""), "text"] = "held_out"
    figures = _whole_noise(figures[figures["main"] | (figures["analysis"] == "")])
    figures = _typed(pd.concat([figures, *derive.derived(figures, curves, read.timings)]))
    return Inputs(figures, curves, preset, read, remeasured)


def _rows(records: Sequence[Record], kind: type[Record]) -> pd.DataFrame:
    names = [
        name for name, field in kind.model_fields.items() if name not in ("versions", "created") and not field.exclude
    ]
    return pd.DataFrame([record.model_dump(include={*names}) for record in records], columns=names)


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with each column that a figure may have, text empty and numbers NaN where there is none."""
    missing = dict.fromkeys(name for name in (*_DERIVED, *_NUMBERS) if name not in frame)
    frame = frame.assign(**missing).reset_index(drop=True)
    texts = [name for name in frame if name not in _NUMBERS and name not in _OBJECTS]
    return frame.assign(
        **{name: pd.to_numeric(frame[name]).astype(float) for name in _NUMBERS},
        **{name: frame[name].astype(object).fillna("").astype(str) for name in texts},
    )


def _variants(frame: pd.DataFrame, preset: str | None) -> pd.DataFrame:
    """Of a preset its own rows: in which variant of it, and whether they speak for their model: the plain ones."""
    if preset is None:
        return frame.assign(variant="", main=True)
    recipe = frame["recipe"].str.extract("(?s)([^/]*)/?(.*)")  # two columns of an empty frame too
    frame = frame.assign(variant=recipe[1])[recipe[0] == preset]
    return frame.assign(main=frame["variant"] == "")


def _whole_noise(figures: pd.DataFrame) -> pd.DataFrame:
    """The figures, those of several draws of noise as one: each is a proportion of a part of the prompts."""
    is_part = figures["noise_seed"].notna() & (figures["n"] > 0) & figures["value"].between(0, 1)
    keys = [*_ACCURACY, "model", "position_embedding", "task", "train_length", "length", "metric", "recipe", "seed"]
    parts = figures[is_part].assign(hits=lambda part: (part["value"] * part["n"]).round())
    parts[["hits", "n"]] = parts.groupby(keys, dropna=False)[["hits", "n"]].transform("sum")
    whole = parts.drop_duplicates(keys)
    ends = [wilson_interval(int(hits), int(n)) for hits, n in zip(whole["hits"], whole["n"], strict=True)]
    whole = whole.assign(
        value=whole["hits"] / whole["n"], low=[low for low, _ in ends], high=[high for _, high in ends]
    )
    return pd.concat([figures[~is_part], whole.drop(columns="hits")])


def _with_defaults(fields: Fields) -> Fields:
    metric = fields.get("metric", "exact_match")
    defaults = _DEFAULTS.get(metric, {})
    main = {"main": True} if defaults is _ACCURACY and "variant" not in fields else {}
    return {"metric": metric} | defaults | main | fields


def _cell(seeds: Mapping[Any, Sequence[Estimate]]) -> Cell:
    means = ((seed, mean(seeds[seed])) for seed in sorted(seeds))
    return Cell({seed: one for seed, one in means if one})
