"""Figures that are made from what was measured, as further rows of the same frame, so that a claim can compare them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from metatokens.evaluation.intervals import Estimate, newcombe
from metatokens.records import Timing

METRICS = ("tokens_to_learn", "training_gain", "distortion_at_rate", "slowdown", "log_perplexity")  # that are derived
ENDS = ("value", "low", "high")
LEARNED = 0.9  # of the test prompts: list recall is learned from where accuracy stays there
RATES = (0.5, 1.0, 2.0, 4.0)  # nats, at which distortions are compared
TRAINED = (128, 256, 512)  # tokens, of the phases of fine-tuning

Curve = Sequence[tuple[float, float]]
"""Points (rate, distortion), rates ascending, from rate 0 on."""


def derived(figures: pd.DataFrame, curves: pd.DataFrame, speeds: Sequence[Timing]) -> list[pd.DataFrame]:
    """The derived figures, of METRICS."""
    rows = [*_tokens_to_learn(curves), *_training_gains(figures), *_distortions(figures), *_slowdowns(speeds)]
    perplexities = select(figures, metric="perplexity").dropna(subset="value")
    logs = perplexities.assign(metric="log_perplexity", value=np.log(perplexities["value"]), low=None, high=None)
    return [pd.DataFrame(rows).assign(main=True), logs]


def select(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows whose columns have the given values: one, any of a list, or None for no number.

    Raises:
        KeyError: if there is no such column.
    """
    for column, wanted in where.items():
        values = frame[column]
        if wanted is None:
            frame = frame[values.isna()]
        else:
            frame = frame[values.isin(wanted) if isinstance(wanted, list) else values == wanted]
    return frame


def learned_from(points: pd.DataFrame, rate: float) -> tuple[float, float]:
    """Steps and text tokens until the first point from which accuracy stays at a rate; infinite where there is none.

    Args:
        points: of one run's learning curve, steps ascending.
        rate: at least so large a share of the prompts is answered right.
    """
    below = points["exact_match"].to_numpy() < rate
    after = int(np.flatnonzero(below)[-1]) + 1 if below.any() else 0
    if after == len(points):
        return math.inf, math.inf
    return float(points["step"].iloc[after]), float(points["text_tokens"].iloc[after])


def learning_curves(curves: pd.DataFrame, task: str = "list_recall") -> dict[tuple[str, str, int], pd.DataFrame]:
    """The learning curves of a task by model, positions and seed; steps ascending, of a step its last point."""
    points = select(curves, task=task, main=True).dropna(subset="exact_match")
    about = ["model", "position_embedding", "seed"]
    points = points.drop_duplicates([*about, "step"], keep="last").sort_values("step")
    return {(model, position, int(seed)): own for (model, position, seed), own in points.groupby(about)}


def _tokens_to_learn(curves: pd.DataFrame) -> Iterable[Mapping[str, Any]]:
    for (model, position, seed), points in learning_curves(curves).items():
        about = {"model": model, "position_embedding": position, "seed": seed, "n": points["n"].max()}
        yield about | {"metric": "tokens_to_learn", "value": learned_from(points, LEARNED)[1]}


def _training_gains(figures: pd.DataFrame) -> Iterable[Mapping[str, Any]]:
    """What training on to the longest length adds to training to the shortest, seed by seed."""
    plain = select(
        figures, metric="exact_match", main=True, condition="paper", train_condition="paper", intervention=""
    )
    on = ["model", "position_embedding", "task", "length", "seed"]
    short, long = (select(plain, train_length=end) for end in (TRAINED[0], TRAINED[-1]))
    for row in long.merge(short, on=on, suffixes=("", "_short")).to_dict("records"):
        after, before = (Estimate.of(row[f"{end}{side}"] for end in ENDS) for side in ("", "_short"))
        if gap := newcombe(after, before):
            yield {key: row[key] for key in (*on, "n")} | {"metric": "training_gain"} | gap._asdict()


def distortion_curves(figures: pd.DataFrame) -> dict[tuple[int, int], Curve]:
    """The rate-distortion curves, by seed of the model and of the fit.

    Args:
        figures: measured rates, distortions and answer entropies that differ in seed, fit and beta alone.
    """
    entropies = select(figures, metric="answer_entropy").groupby("seed")["value"].last()
    rates, distortions = (
        select(figures, metric=metric).dropna(subset="value").set_index(["seed", "fit_seed", "beta"])["value"]
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


def _distortions(figures: pd.DataFrame) -> Iterable[Mapping[str, Any]]:
    measured = select(figures, analysis="rate_distortion")
    of_model = ["model", "position_embedding", "intervention", "split"]
    for about, own in measured.groupby(of_model):
        for subject in ("meta", "text"):
            for (seed, fit), curve in distortion_curves(select(own, subject=["", subject])).items():
                where = dict(zip(of_model, about, strict=True)) | {"subject": subject, "seed": seed, "fit_seed": fit}
                for rate in RATES:
                    value = distortion_at(curve, rate)
                    yield where | {"metric": "distortion_at_rate", "rate": rate, "value": value, "n": own["n"].max()}


def slowdowns(speeds: Sequence[Timing]) -> list[Timing]:
    """The lines on decoding and reading, ratios and limits as the paper's are taken to be.

    Decoding is per text token: with meta-tokens as many positions hold the fewer. The first token is after as many
    positions; per text token no model with k = 0.1 could keep to the paper's bound of 1.02.
    """
    about = attrgetter("benchmark", "shape", "length", "batch")
    texts = {(about(line), line.model): line.text_tokens for line in speeds}
    found = [line for line in speeds if line.benchmark == "prefill"]
    for line in speeds:
        if line.benchmark == "decode" and (theirs := texts.get((about(line), line.against))):
            more = theirs / line.text_tokens
            scaled = {name: more * getattr(line, name) for name in ("ratio", "ratio_low", "ratio_high", "limit")}
            found.append(line.model_copy(update=scaled))
    return found


def _slowdowns(speeds: Sequence[Timing]) -> Iterable[Mapping[str, Any]]:
    for line in slowdowns(speeds):
        about = {
            name: getattr(line, name) for name in ("benchmark", "model", "against", "shape", "batch", "device", "n")
        }
        ratio = {"value": line.ratio, "low": line.ratio_low, "high": line.ratio_high}
        yield about | {"metric": "slowdown", "seed": 0} | ratio
