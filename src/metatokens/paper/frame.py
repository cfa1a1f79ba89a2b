"""Everything that was read, in tidy frames: a row for each measured figure of each training run.

Columns are the fields of the records. Text that does not apply is empty, a number that does not apply is NaN. A column
that does not exist is a `KeyError`, so that a misspelt field never reads as "not measured".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from metatokens.errors import UserError
from metatokens.paper.presets import PRESETS
from metatokens.paper.records import CurvePoint, Timing
from metatokens.paper.run_files import RunLines, read_runs
from metatokens.records import SEPARATOR, AnalysisMetric, Measurement, Metric, Record, Result

_RUN = ["task", "model", "position_embedding", "seed"]  # whose learning curve is one

Fields = Mapping[str, Any]
GRIDS = ("small", "gpu", "paper")  # the presets whose figures are set next to the paper's
SPEEDS = ("prefill", "decode")  # benchmarks that the paper has figures of
RATES = (0.5, 1.0, 2.0, 4.0)  # nats, at which distortions are compared
# Metrics that no line has.
DERIVED = ("distortion_at_rate", "slowdown")
METRICS = {*get_args(Metric), *get_args(AnalysisMetric), *DERIVED}

ACCURACIES = ("exact_match", "token_accuracy")
_NUMBERS = (
    "train_length", "length", "text_window", "fraction", "layer", "head", "distance", "position", "beta",
    "fit_seed", "rate", "batch", "seed", "value", "low", "high", "n", "chance", "shortcut", "step", "loss",
    "text_tokens", "exact_match", "kv_kept",
)  # fmt: skip
_TEXTS = ("benchmark", "against", "shape", "device")  # that derived figures alone have
_OBJECTS = ("premise", "boosted")
# The other columns identify what was measured.
_OUTCOMES = ("value", "low", "high", "n", "chance", "hits", "kv_kept")
_ACCURACY = {"condition": "paper", "train_condition": "paper", "intervention": "", "variant": ""}
_PLAIN: Mapping[str, Fields] = {
    **dict.fromkeys(ACCURACIES, _ACCURACY),
    "perplexity": {"variant": "", "text": "held_out"},
}


@dataclass(frozen=True)
class Inputs:
    """The figures and curves that a report reads.

    Args:
        figures: what was measured and what is derived from it. A row has the fields of `Result` or `Measurement`, and
            `variant` (of a preset; empty for the plain runs). The name of a model also has what else differs: its text
            window, the share of meta-tokens, the file of the records, a recipe that is no preset's:
            `meta, window 256`. An exact match also has `chance`, what guessing scores, and `shortcut`, the
            best rule that does not do the task; both as proportions of the prompts of its task, length and condition.
            The metrics of `DERIVED` are explained where they are made.
        curves: the points of training curves, with `variant`.
        preset: the preset of all lines; None if there are lines of other runs.
        read: the lines themselves.
    """

    figures: pd.DataFrame
    curves: pd.DataFrame
    preset: str | None
    read: RunLines

    @property
    def is_grid(self) -> bool:
        """Whether the figures are set next to the paper's."""
        return self.preset in GRIDS

    @property
    def scale(self) -> int:
        """How many times as long as ours the paper's prompts are where the context is extended."""
        return 4 if self.preset == "small" else 1

    def measured(self, **where: Any) -> pd.DataFrame:
        """The figures whose fields have the given values, by the rules of `select`; by default of `exact_match`.

        The fields that `_PLAIN` has for the metric default to the plain runs: the paper's prompts, no intervention, no
        variant. A field that is "*", and any other that is not given, may have any value.

        Raises:
            KeyError: if there is no such column or metric.
        """
        metric = where.get("metric", "exact_match")
        metrics = metric if isinstance(metric, (list, tuple)) else [metric]
        if not METRICS.issuperset(metrics):
            raise KeyError(f"there is no metric {metric}")
        fields = {"metric": metric, **_PLAIN.get(metrics[0], {}), **where}
        wanted = {key: want for key, want in fields.items() if want != "*"}
        return select(self.figures, **wanted)


def load(paths: Sequence[Path]) -> Inputs:
    """Read run folders and files of lines into frames. Where a figure was measured again, the later line counts.

    Raises:
        UserError: as `read_runs` does, or if there are lines of two presets, or of a grid and of other runs.
    """
    read = read_runs(paths)
    preset = _preset_of(read)
    measured = _typed(
        pd.concat([_rows(read.results, Result), _rows(read.measurements, Measurement)])
    )
    latest = measured.drop_duplicates(
        [name for name in measured if name not in _OUTCOMES], keep="last"
    )
    figures = _with_floors(_named(latest.dropna(subset=["value"])))
    curves = _named(_typed(_rows(read.points, CurvePoint)))
    derived = pd.DataFrame([*distortions(figures, RATES), *_slowdowns(read.timings)])
    figures = _typed(pd.concat([figures, derived]))
    return Inputs(figures, curves, preset, read)


def _preset_of(read: RunLines) -> str | None:
    lines: Iterable[Result | Measurement | CurvePoint] = chain(
        read.results, read.measurements, read.points
    )
    recipes = {(line.recipe or "").partition("/")[0] for line in lines}
    presets = sorted(recipes & PRESETS.keys())
    has_grid = not recipes.isdisjoint(GRIDS)
    if len(presets) > 1 or (has_grid and len(recipes) > 1):
        raise UserError(
            f"there are lines of the preset {presets[0]} and of other runs; report that preset alone."
        )
    return presets[0] if recipes == {*presets[:1]} else None


def select(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows whose columns have the given values: one, any of a list, or None for no number.

    Raises:
        KeyError: if there is no such column.
    """
    selected = np.ones(len(frame), dtype=bool)
    for column, wanted in where.items():
        values = frame[column]
        if wanted is None:
            selected &= values.isna()
        elif isinstance(wanted, (list, tuple)):
            selected &= values.isin(wanted)
        else:
            selected &= values == wanted
    return frame[selected]


def trained_to(frame: pd.DataFrame, train_length: Any) -> pd.DataFrame:
    """The rows of models that were trained up to that length, or whose training had none."""
    lengths = frame["train_length"]
    return frame[lengths.isna() | (lengths == train_length)]


def learning_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """The accuracies of the plain runs by step, up to their first train length; `value` has them."""
    points = select(curves, variant="").dropna(subset=["exact_match"])
    first_length = points.groupby(_RUN)["train_length"].transform("min")
    points = trained_to(points, first_length).drop_duplicates([*_RUN, "step"], keep="last")
    return points.assign(value=points["exact_match"])


def distortions(figures: pd.DataFrame, rates: Sequence[float]) -> Iterator[Fields]:
    """`distortion_at_rate`, in nats, at these rates: the mean of a run's fits."""
    of_run = ["model", "position_embedding", "intervention", "split", "seed"]
    for values, points in select(figures, analysis="rate_distortion").groupby(of_run):
        fields = dict(zip(of_run, values, strict=True))
        for subject in ("meta", "text"):
            fits = _distortions_of_fits(select(points, subject=["", subject]), rates)
            if fits:
                for rate, mean in zip(rates, np.mean(fits, axis=0), strict=True):
                    at_rate = {"subject": subject, "rate": rate, "value": mean, "n": len(fits)}
                    yield {"metric": "distortion_at_rate", **fields, **at_rate}


def _distortions_of_fits(figures: pd.DataFrame, rates: Sequence[float]) -> list[np.ndarray]:
    """The distortions of each fit at these rates: linear between its points, and that of the last one beyond it.

    A curve begins at rate 0 with the entropy of the answers.

    Args:
        figures: measured rates, distortions and an answer entropy that differ in fit and beta alone.
    """
    entropies = select(figures, metric="answer_entropy")["value"]
    at_rate_0 = [(0.0, entropy) for entropy in entropies]
    measured = select(figures, metric=["rate", "distortion"])
    by_beta = measured.pivot(index=["fit_seed", "beta"], columns="metric", values="value")
    points = by_beta.reindex(columns=["rate", "distortion"]).dropna()
    fits = []
    for _, of_fit in points.groupby("fit_seed"):
        curve = sorted([*at_rate_0, *of_fit.itertuples(index=False)])
        measured_rates, measured_distortions = zip(*curve, strict=True)
        fits.append(np.interp(rates, measured_rates, measured_distortions))
    return fits


def _rows(records: Sequence[Record], kind: type[Record]) -> pd.DataFrame:
    names = [name for name in kind.model_fields if name not in ("versions", "created", "answer")]
    return pd.DataFrame([record.model_dump(include={*names}) for record in records], columns=names)


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with each column that a figure may have, text empty and numbers NaN where there is none."""
    missing = [name for name in (*_TEXTS, *_NUMBERS) if name not in frame]
    frame = frame.assign(**dict.fromkeys(missing)).reset_index(drop=True)
    for name in frame:
        if name in _NUMBERS:
            frame[name] = frame[name].astype(float)
        elif name not in _OBJECTS:
            frame[name] = frame[name].astype(object).fillna("").astype(str)
    return frame


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with their variants, what follows the preset in the recipe, and with the names of models in full."""
    variants: list[str] = []
    names: list[str] = []
    columns = frame.reindex(
        columns=["model", "recipe", "text_window", "fraction", "metric", "text"]
    )
    for model, recipe, window, fraction, metric, text in columns.itertuples(index=False):
        words = [model]
        if not np.isnan(window):
            words.append(f"window {window:.0f}")
        if not np.isnan(fraction):
            words.append(f"k = {fraction:g}")
        if metric in ACCURACIES and text:
            words.append(text)
        preset, _, variant = recipe.partition("/")
        if recipe and preset not in PRESETS:
            words.append(recipe)
            variant = ""
        variants.append(variant)
        names.append(SEPARATOR.join(words))
    columns_of_text = pd.DataFrame({"variant": variants, "model": names}, frame.index, dtype=object)
    return frame.assign(**columns_of_text)


def _with_floors(figures: pd.DataFrame) -> pd.DataFrame:
    """Each exact match with `chance` and `shortcut`; see `Inputs`.

    A line has its task's `CHANCE`, except in counting. There it is the measured share of the
    commonest answer.
    """
    prompts = ["task", "length", "condition"]
    shortcuts = select(figures, metric="shortcut", variant="")
    constants = shortcuts[shortcuts["model"].str.startswith("the commonest answer")]
    matches = select(figures, metric="exact_match").drop(columns="shortcut")
    for column, scores in (("shortcut", shortcuts), ("constant", constants)):
        best = scores.groupby(prompts)["value"].max().rename(column)
        matches = matches.join(best, on=prompts)
    matches["chance"] = matches["chance"].fillna(matches.pop("constant"))
    others = figures[figures["metric"] != "exact_match"]
    return pd.concat([others, matches], ignore_index=True)


def _slowdowns(timings: Sequence[Timing]) -> Iterator[Fields]:
    """`slowdown`: the median of the rounds' ratios, with the 95 % interval of a median that the quartiles give.

    Prefill is timed per position: per text token, no model with k = 0.1 could keep the paper's bound of 1.02. A normal
    distribution has quartiles 1.349 standard deviations apart, and its median has 1.253 times the standard error of its
    mean.
    """
    for timing in timings:
        if timing.benchmark not in SPEEDS:
            continue
        reach = 1.96 * 1.253 * (timing.ratio_high - timing.ratio_low) / 1.349 / sqrt(timing.n)
        yield {
            **timing.model_dump(include={"benchmark", "model", "against", "shape", "batch", "n"}),
            "metric": "slowdown",
            "seed": 0,
            "device": "A100" if "A100" in timing.device else timing.device,
            "value": timing.ratio,
            "low": timing.ratio - reach,
            "high": timing.ratio + reach,
        }
