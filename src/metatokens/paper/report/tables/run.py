"""Tables of any run's results: a row for each model, and for whatever else sets its figures apart."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pandas as pd

from metatokens.paper.report.derive import learned_from, select
from metatokens.paper.report.frame import Fields, Inputs
from metatokens.paper.report.gains import gains, key_lengths
from metatokens.paper.report.labels import in_order, labelled, measured_conditions, rows
from metatokens.paper.report.learning import BUDGET, LEARNED_LOSS, learning
from metatokens.paper.report.tables.table import Table, crosstab, span, worded
from metatokens.paper.report.text import DIVIDED, MINUS, NOT_RUN, count, learned_at, name, percent, points, tokens
from metatokens.paper.report.words import table_words

LEARNED = 0.95  # of the test prompts: what is learned is answered as often from then on
_RATE = f"{100 * LEARNED:.0f}\u00a0%"


def learned(inputs: Inputs) -> Table:
    """Each task's first lengths, other conditions, and how soon it was learned: a row for each task and model.

    The last row of a task is its floor. The figures are of the train length where no length is
    named, and have their intervals in the tables of each task.
    """
    conditions = measured_conditions(inputs)
    lengths = dict.fromkeys(length for task in conditions for length in key_lengths(inputs, task))
    others = in_order({one for _, *rest in conditions.values() for one in rest})
    curves = inputs.curves.dropna(subset="exact_match") if len(inputs.curves) else inputs.curves
    header = [tokens(length) for length in lengths] + others
    header += [f"steps to {_RATE}", "text tokens"] if len(curves) else []
    lines: list[tuple[str, ...]] = []
    for task, (trained, *_) in conditions.items():
        start, *_ = key_lengths(inputs, task)
        asked = [(length, trained) for length in lengths] + [(start, one) for one in others]
        for label, fields in rows(inputs, metric="exact_match", task=task, condition=trained):
            cells = inputs.cells([fields | {"length": length, "condition": one} for length, one in asked])
            values = (percent(cell.value) if cell else "" for cell in cells)
            lines.append((name(task), label, *values, *(_sooner(curves, task, label) if len(curves) else ())))
        is_asked = [one in conditions[task] for _, one in asked]
        floors = [percent(inputs.floor(task, *one)) if own else "" for one, own in zip(asked, is_asked, strict=True)]
        lines.append((name(task), "floor", *floors, *(("", "") if len(curves) else ())))
    return replace(worded(table_words("learned").of(rate=_RATE), ("model", *header), lines), text_columns=2)


def _sooner(curves: pd.DataFrame, task: str, label: str) -> tuple[str, str]:
    """Steps and text tokens until a model had learned a task, by seed."""
    own = select(labelled(curves), task=task, label=label).sort_values("step")
    runs = [learned_from(points.drop_duplicates("step", keep="last"), LEARNED) for _, points in own.groupby("seed")]
    steps = " / ".join("not reached" if math.isinf(one) else count(one) for one, _ in runs)
    return steps, " / ".join("" if math.isinf(one) else learned_at(one) for _, one in runs)


def accuracy(
    inputs: Inputs,
    task: str,
    condition: str,
    *,
    metric: str = "exact_match",
    lengths: Mapping[int | None, str] | None = None,
) -> Table:
    """One task's accuracy: a row for each model, a column for each length; floor and n below.

    Args:
        inputs: whose figures have labels.
        task, condition: which, and how it was marked.
        metric: `exact_match` or `token_accuracy`.
        lengths: the lengths shown and their names; all that were measured, by default.
    """
    where = {"metric": metric, "task": task, "condition": condition}
    if lengths is None:
        trained = inputs.values("train_length", metric=metric, task=task)
        measured: list[int | None] = [*inputs.values("length", **where)] or [None]
        lengths = {one: f"{tokens(one)} (train)" if one in trained else tokens(one) for one in measured}
    columns: dict[str, Fields] = {text: {"length": length} for length, text in lengths.items()}
    which = f" in condition {condition}" if len(measured_conditions(inputs)[task]) > 1 else ""
    words = table_words("accuracy" if metric == "exact_match" else "accuracy-by-token")
    return crosstab(inputs, words.of(task=name(task), which=which), rows(inputs, **where), columns)


def marker_conditions(inputs: Inputs, task: str) -> Table:
    """One task at the train length: a row for each model, its score in each condition and what that changes."""
    length, place = next(iter(key_lengths(inputs, task).items()))
    trained, *others = measured_conditions(inputs)[task]
    found = rows(inputs, metric="exact_match", task=task, condition=trained)
    models = [(label, fields | {"length": length}) for label, fields in found]
    columns = {condition: {"condition": condition} for condition in (trained, *others)}
    gaps = {f"{other} {MINUS} {trained}": (other, trained) for other in others}
    return crosstab(inputs, table_words("by-condition").of(task=name(task), place=place), models, columns, gaps=gaps)


def differences(inputs: Inputs) -> Table:
    """Every comparison of two models: a row for each task, length and pair."""
    found = [
        (name(task), gain.place, f"{a} {MINUS} {b}", points(one.gap))
        for task in measured_conditions(inputs)
        for gain in gains(inputs, task)
        for a, b, one in gain.pairs()
    ]
    header = ("task", "length", "difference", "points (95 % interval)")
    return Table("Differences between models", header, tuple(found), text_columns=3)


def shortcuts(inputs: Inputs) -> Table:
    """What each short cut scores: a row for each task, condition and short cut, a column for each length."""
    old = inputs.select(metric="majority_rate").assign(model="the commonest answer", condition="")
    found = pd.concat([inputs.select(metric="shortcut"), old]).dropna(subset="value")
    keys = ["task", "condition", "model"]
    rates = found.groupby([*keys, "length"], dropna=False, sort=False)["value"].last().unstack().astype(object)
    rates = rates.where(rates.notna(), None)
    tasks = in_order(found["task"])
    rows = sorted(rates.index, key=lambda row: tasks.index(row[0]))
    lines = ((name(row[0]), *row[1:], *map(percent, rates.loc[row])) for row in rows)
    header = (tokens(None if length != length else int(length)) for length in rates)
    return replace(worded(table_words("shortcuts").of(), ("condition", "short cut", *header), lines), text_columns=3)


def learning_steps(curves: pd.DataFrame, which: str = "") -> Table:
    """Steps until the answer loss stays under the threshold: a row for each model, a column for each task."""
    runs = learning(curves)
    learned = runs.set_index(["place", "label", "seed"])["learned"].to_dict()
    places = runs.groupby("place", sort=False)
    models = runs[["label", "seed"]].drop_duplicates().sort_values(["label", "seed"])
    is_one_seed, is_one_length = (runs[key].nunique(dropna=False) <= 1 for key in ("seed", "train_length"))
    rows = (
        (
            label if is_one_seed else f"{label}, seed {seed:.0f}",
            *(_steps(learned.get((place, label, seed))) for place in places.groups),
        )
        for label, seed in models.itertuples(index=False)
    )
    words = table_words("learning-steps").of(loss=LEARNED_LOSS, budget=BUDGET, which=which)
    header = (name(own["task"].iloc[0]) if is_one_length else str(place) for place, own in places)
    footer = (
        ("steps trained", *(_ends(own["steps"], count) for _, own in places)),
        (f"{DIVIDED} slowest learner", *(_ends(own["budget"], "{:.2f}".format) for _, own in places)),
    )
    return worded(words, header, rows, footer)


def _ends(values: pd.Series, form: Callable[[float], str]) -> str:
    """The one figure of a column, or the range of those that differ."""
    return NOT_RUN if values.isna().all() else span(map(form, sorted({values.min(), values.max()})))


def _steps(learned: float | None) -> str:
    return "" if learned is None else "not reached" if math.isnan(learned) else count(learned)
