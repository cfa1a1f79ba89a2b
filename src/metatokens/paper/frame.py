"""Everything that was read, in tidy frames: a row for each measured figure of each training run.

Columns are the fields of the records. Text that does not apply is empty, a number that does not apply is NaN. A column
that does not exist is a `KeyError`, so that a misspelt field never reads as "not run".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from metatokens.errors import UserError
from metatokens.evaluation.intervals import wilson_interval
from metatokens.paper.run_files import RunLines, read_runs
from metatokens.recipe import PresetName
from metatokens.records import (
    SEPARATOR,
    AnalysisMetric,
    CurvePoint,
    Measurement,
    Metric,
    Record,
    Result,
    Timing,
    pack_hits,
    unpack_hits,
)

PRESETS = get_args(PresetName)
GRIDS = ("small", "gpu", "paper")  # the presets whose figures are set next to the paper's
LEARNED = 0.9  # of the test prompts: a task is learned from the first point on from which accuracy stays there
SPEEDS = ("prefill", "decode")  # benchmarks that the paper has figures of
RATES = (0.5, 1.0, 2.0, 4.0)  # nats, at which distortions are compared
DERIVED = ("log_steps_to_learn", "distortion_at_rate", "slowdown", "log_perplexity")  # metrics that no line has
METRICS = {*get_args(Metric), *get_args(AnalysisMetric), *DERIVED}

_NUMBERS = (
    "train_length", "length", "text_window", "noise_seed", "layer", "head", "distance", "position", "beta", "fit_seed",
    "rate", "batch", "seed", "value", "low", "high", "n", "chance", "shortcut", "step", "loss", "text_tokens",
    "exact_match", "kv_kept", "kv_bytes",
)  # fmt: skip
_TEXTS = ("benchmark", "against", "shape", "device")  # that derived figures alone have
_OBJECTS = ("premise", "boosted", "quantiles")
# The other columns identify what was measured.
_OUTCOMES = ("value", "low", "high", "n", "chance", "quantiles", "hits", "kv_kept", "kv_bytes")
_ACCURACY = {"condition": "paper", "train_condition": "paper", "intervention": "", "variant": ""}
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "exact_match": _ACCURACY,
    "token_accuracy": _ACCURACY,
    "perplexity": {"variant": "", "text": "held_out"},
    "log_perplexity": {"variant": ""},
    "log_steps_to_learn": {"variant": ""},
}

Curve = Sequence[tuple[float, float]]
"""Points (rate, distortion), rates ascending, from rate 0 on."""


@dataclass(frozen=True)
class Inputs:
    """The figures and curves that a report reads.

    Args:
        figures: what was measured and what is derived from it. A row has the fields of `Result` or `Measurement`, and
            `variant` (of a preset; empty for the plain runs). The name of a model also has its text window, and a
            recipe that is no preset's: `meta, window 256`. An exact match also has `chance`, what a constant answer
            scores, and `shortcut`, the best rule that does not do the task; both as proportions of the prompts of its
            task, length and condition. The metrics of `DERIVED` are explained where they are made.
        curves: the points of training curves, with `variant`.
        preset: the preset of a grid; None for other runs.
        read: the lines themselves.
        remeasured: how many figures were left out because a later line holds the same.
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
        """The figures whose fields have the given values, by the rules of `select`; by default of `exact_match`.

        The fields that `_PLAIN` has for the metric default to the plain runs: the paper's prompts, no intervention, no
        variant. Any other field that is not given may have any value.

        Raises:
            KeyError: if there is no such column or metric.
        """
        metric = where.get("metric", "exact_match")
        if metric not in METRICS:
            raise KeyError(f"there is no metric {metric}")
        return select(self.figures, **{"metric": metric, **_PLAIN.get(metric, {}), **where})


def load(paths: Sequence[Path]) -> Inputs:
    """Read run folders and files of lines into frames. Where a figure was measured again, the later line counts.

    Raises:
        UserError: as `read_runs` does, or if there are lines of a grid and of other runs, which are not to be mixed.
    """
    read = read_runs(paths)
    lines: list[Any] = [*read.results, *read.measurements, *read.points]
    presets = {(line.recipe or "").partition("/")[0] for line in lines}
    grid = next((preset for preset in GRIDS if preset in presets), None)
    if grid and len(presets) > 1:
        raise UserError(f"there are lines of the preset {grid} and of other runs; report that preset alone.")
    measured = _typed(pd.concat([_rows(read.results, Result), _rows(read.measurements, Measurement)]))
    figures = measured.drop_duplicates([name for name in measured if name not in _OUTCOMES], keep="last")
    remeasured = len(measured) - len(figures)
    figures, curves = map(_named, (figures, _typed(_rows(read.points, CurvePoint))))
    figures.loc[(figures["metric"] == "perplexity") & (figures["text"] == ""), "text"] = "held_out"
    figures = _with_chances(_whole_noise(figures[(figures["variant"] == "") | (figures["analysis"] == "")]))
    derived = [*_steps_to_learn(curves), *_distortions(figures), *_slowdowns(read.timings)]
    figures = _typed(pd.concat([figures, pd.DataFrame(derived), _log_perplexities(figures)]))
    return Inputs(figures, curves, grid, read, remeasured)


def select(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows whose columns have the given values: one, any of a list, or None for no number.

    Raises:
        KeyError: if there is no such column.
    """
    keep = np.ones(len(frame), dtype=bool)
    for column, wanted in where.items():
        values = frame[column]
        if wanted is None:
            keep &= values.isna()
        else:
            keep &= values.isin(wanted) if isinstance(wanted, (list, tuple)) else values == wanted
    return frame[keep]


def learning_curves(curves: pd.DataFrame) -> dict[tuple[str, str, str, int], pd.DataFrame]:
    """The plain runs' curves at their first train length by task, model, positions and seed; steps ascending."""
    points = select(curves, variant="").dropna(subset=["exact_match"])
    about = ["task", "model", "position_embedding", "seed"]
    first = points.groupby(about)["train_length"].transform("min")
    points = points[points["train_length"].isna() | (points["train_length"] == first)]
    points = points.drop_duplicates([*about, "step"], keep="last").sort_values("step")
    return {(task, model, place, int(seed)): own for (task, model, place, seed), own in points.groupby(about)}


def learned_from(points: pd.DataFrame) -> float:
    """Steps to the first point of a curve from which accuracy is never below `LEARNED`; infinite if there is none."""
    below = np.flatnonzero(points["exact_match"].to_numpy() < LEARNED)
    after = int(below[-1]) + 1 if len(below) else 0
    return float(points["step"].iloc[after]) if after < len(points) else float("inf")


def distortion_curves(figures: pd.DataFrame) -> dict[tuple[int, int], Curve]:
    """The rate-distortion curves, by seed of the model and of the fit.

    Args:
        figures: measured rates, distortions and answer entropies that differ in seed, fit and beta alone.
    """
    entropies = select(figures, metric="answer_entropy").groupby("seed")["value"].last()
    rates, distortions = (
        select(figures, metric=metric).dropna(subset=["value"]).set_index(["seed", "fit_seed", "beta"])["value"]
        for metric in ("rate", "distortion")
    )
    points = pd.DataFrame({"rate": rates, "distortion": distortions}).dropna().reset_index()
    curves: dict[tuple[int, int], Curve] = {}
    for (seed, fit), own in points.groupby(["seed", "fit_seed"]):
        start = entropies.get(seed, own["distortion"].max())
        curves[int(seed), int(fit)] = sorted([(0.0, start), *zip(own["rate"], own["distortion"], strict=True)])
    return curves


def distortion_at(curve: Curve, rate: float) -> float:
    """The distortion of a curve at a rate: linear between its points, and that of the last one beyond it."""
    rates, distortions = zip(*curve, strict=True)
    return float(np.interp(rate, rates, distortions))


def _rows(records: Sequence[Record], kind: type[Record]) -> pd.DataFrame:
    names = [name for name in kind.model_fields if name not in ("versions", "created")]
    return pd.DataFrame([record.model_dump(include={*names}) for record in records], columns=names)


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with each column that a figure may have, text empty and numbers NaN where there is none."""
    missing = dict.fromkeys(name for name in (*_TEXTS, *_NUMBERS) if name not in frame)
    frame = frame.assign(**missing).reset_index(drop=True)
    texts = [name for name in frame if name not in _NUMBERS and name not in _OBJECTS]
    return frame.assign(
        **{name: pd.to_numeric(frame[name]).astype(float) for name in _NUMBERS},
        **{name: frame[name].astype(object).fillna("").astype(str) for name in texts},
    )


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with their variants, what follows the preset in the recipe, and with the names of models in full."""
    variants, names = [], []
    for model, recipe, window in zip(frame["model"], frame["recipe"], frame["text_window"], strict=True):
        preset, _, variant = recipe.partition("/")
        further = [] if np.isnan(window) else [f"window {window:.0f}"]
        further += [] if preset in PRESETS or not preset else [recipe]
        variants.append(variant if preset in PRESETS else "")
        names.append(SEPARATOR.join([model, *further]))
    return frame.assign(variant=variants, model=names)


def _whole_noise(figures: pd.DataFrame) -> pd.DataFrame:
    """The figures, those of several draws of noise as one: draw i of k answers the prompts i, i + k, i + 2k, ..."""
    is_of_preset = figures["recipe"].str.split("/").str[0].isin(PRESETS)  # `evaluate --noise-seed` uses all prompts
    is_part = is_of_preset & figures["noise_seed"].notna() & (figures["n"] > 0) & figures["value"].between(0, 1)
    about = ["metric", "model", "position_embedding", "task", "train_length", "length", *_ACCURACY, "seed"]
    whole = []
    for _, parts in figures[is_part].sort_values("noise_seed").groupby(about, dropna=False, sort=False):
        n, right = int(parts["n"].sum()), round((parts["value"] * parts["n"]).sum())
        low, high = wilson_interval(right, n)
        hits = np.zeros(n, dtype=bool)
        for draw, (packed, count) in enumerate(zip(parts["hits"], parts["n"], strict=True)):
            hits[draw :: len(parts)] = unpack_hits(packed, int(count)) if packed else False
        packed = pack_hits(hits.tolist()) if parts["hits"].all() else ""
        whole.append({**parts.iloc[0], "n": n, "value": right / n, "low": low, "high": high, "hits": packed})
    return pd.concat([figures[~is_part], pd.DataFrame(whole, columns=figures.columns)]) if whole else figures


def _with_chances(figures: pd.DataFrame) -> pd.DataFrame:
    """Each exact match with `chance` and `shortcut`; see `Inputs`.

    A line has the score of a constant answer as its chance, except in counting. There it is the measured share of the
    commonest answer.
    """
    found = select(figures, metric="shortcut", variant="")
    on, is_match = ["task", "length", "condition"], figures["metric"] == "exact_match"
    best, constant = (
        figures[on].merge(one.groupby(on)["value"].max().reset_index(), on=on, how="left")["value"].to_numpy()
        for one in (found, found[found["model"].str.startswith("the commonest answer")])
    )
    chance = figures["chance"].where(figures["chance"].notna() | ~is_match, constant)
    return figures.assign(chance=chance, shortcut=np.where(is_match, best, nan))


def _steps_to_learn(curves: pd.DataFrame) -> Iterable[Mapping[str, Any]]:
    """`log_steps_to_learn`: log(min(steps until the task is learned, tau)), tau the steps that every run was trained.

    The runs are those of the task and the positions, so that none is censored before tau. `chance` is log(tau).
    """
    found = learning_curves(curves)
    for (task, model, place, seed), points in found.items():
        tau = min(own["step"].iloc[-1] for (its, _, where, _), own in found.items() if (its, where) == (task, place))
        about = {"task": task, "model": model, "position_embedding": place, "seed": seed, "n": points["n"].max()}
        value = np.log(min(learned_from(points), tau))
        yield about | {"metric": "log_steps_to_learn", "value": value, "chance": np.log(tau)}


def _distortions(figures: pd.DataFrame) -> Iterable[Mapping[str, Any]]:
    """`distortion_at_rate`, in nats: the mean of a run's fits."""
    of_model = ["model", "position_embedding", "intervention", "split"]
    for about, own in select(figures, analysis="rate_distortion").groupby(of_model):
        for subject in ("meta", "text"):
            curves = distortion_curves(select(own, subject=["", subject]))
            for seed in sorted({seed for seed, _ in curves}):
                where = dict(zip(of_model, about, strict=True)) | {"subject": subject, "seed": seed}
                for rate in RATES:
                    fits = [distortion_at(curve, rate) for (its, _), curve in curves.items() if its == seed]
                    yield where | {"metric": "distortion_at_rate", "rate": rate, "value": np.mean(fits), "n": len(fits)}


def _slowdowns(speeds: Sequence[Timing]) -> Iterable[Mapping[str, Any]]:
    """`slowdown`: the median of the rounds' ratios, with the 95 % interval of a median that the quartiles give.

    Prefill is timed per position: per text token, no model with k = 0.1 could keep the paper's bound of 1.02. A normal
    distribution has quartiles 1.349 standard deviations apart, and its median has 1.253 times the standard error of its
    mean.
    """
    for line in speeds:
        if line.benchmark not in SPEEDS:
            continue
        about = {name: getattr(line, name) for name in ("benchmark", "model", "against", "shape", "batch", "n")}
        about |= {"metric": "slowdown", "seed": 0, "device": "A100" if "A100" in line.device else line.device}
        reach = 1.96 * 1.253 * (line.ratio_high - line.ratio_low) / 1.349 / sqrt(line.n)
        yield about | {"value": line.ratio, "low": line.ratio - reach, "high": line.ratio + reach}


def _log_perplexities(figures: pd.DataFrame) -> pd.DataFrame:
    """`log_perplexity`: every model reads the same text, which is not taken as a draw; so there is no interval."""
    found = select(figures, metric="perplexity").dropna(subset=["value"])
    return found.assign(metric="log_perplexity", value=np.log(found["value"]), low=nan, high=nan, chance=nan)
