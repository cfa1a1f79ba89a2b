"""What a page begins with, if questions were asked with the text covered: what is covered, and who still answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import pandas as pd

from metatokens.looking.style import readable
from metatokens.paper.report.table import Cell, Fields, order
from metatokens.paper.report.tables import ALONE, Tables
from metatokens.paper.report.text import PERCENT, listed, name, number
from metatokens.records import ExampleRecord
from metatokens.tasks.content import OPENING

MODELS = {
    "gpt2": "a plain GPT-2",
    "pause": "meta-tokens alone",
    "twin": "a second attention among all tokens",
    "meta": "a second attention among its meta-tokens",
}


@dataclass(frozen=True)
class Asked:
    """A model's answers to the same questions, with the text in sight and with the text covered."""

    model: str
    in_sight: Cell
    covered: Cell
    kv_kept: float
    """The share of the text's keys and values that the covered text leaves."""


def asked_covered(tables: Tables) -> dict[str, list[Asked]]:
    """The models that were trained with the text in sight and asked with it covered too, by task; `meta` first."""
    asked: dict[str, list[Asked]] = {}
    for task, main in tables.tasks.items():
        in_sight = _by_model(tables, main, "")
        covered = _by_model(tables, main, ALONE)
        for model in sorted(covered.keys() & in_sight.keys(), key=order, reverse=True):
            kv_kept = float(covered[model]["kv_kept"].mean())
            row = Asked(model, Cell.of(in_sight[model]), Cell.of(covered[model]), kv_kept)
            asked.setdefault(task, []).append(row)
    return asked


def _by_model(tables: Tables, main: Fields, intervention: str) -> dict[str, pd.DataFrame]:
    """The main accuracies of a task under an intervention, by model."""
    accuracies = tables.inputs.measured(**{**main, "intervention": intervention})
    return {str(model): of_model for model, of_model in accuracies.groupby("model")}


def sentences(by_task: Mapping[str, Sequence[Asked]]) -> list[str]:
    """What a meta-token is, what was trained, and what came out on the first task."""
    task, asked = next(iter(by_task.items()))
    models = [f"{row.model} ({MODELS[row.model]})" if row.model in MODELS else row.model for row in asked]
    runs = max(len(row.covered.runs) for row in asked)
    rights = [
        f"{row.model} answers {PERCENT(row.covered.estimate()[0])} % "
        f"(with the text in sight {PERCENT(row.in_sight.estimate()[0])} %)"
        for row in asked
    ]
    counts = listed([number(n) for n in sorted({n for row in asked for n in row.covered.n})], "or")
    guessing = asked[0].covered.floors[1]
    chance = f"; guessing gives {PERCENT(guessing)} %" if isfinite(guessing) else ""
    return [
        "A meta-token is a learned token between the words of a text: a language model reads it, and is never asked to "
        "predict it.",
        f"We trained {listed(models)}, {'once' if runs == 1 else f'up to {runs} times'} each, on questions about texts "
        "that they saw whole.",
        f"Then we covered the texts: a question sees their meta-tokens alone, {PERCENT(asked[0].kv_kept)} % of the "
        f"keys and values. Of {counts} questions of {name(task).lower()}, {listed(rights)}{chance}.",
    ]


def shown_example(tables: Tables, task: str) -> ExampleRecord | None:
    """The task's example; none if it has no question, or if there are several, as of different runs."""
    prompts = {
        example.prompt: example
        for example in tables.inputs.read.examples
        if example.task == task and OPENING in example.prompt
    }
    return next(iter(prompts.values())) if len(prompts) == 1 else None


def answers(tables: Tables, example: ExampleRecord, *, is_covered: bool) -> dict[str, tuple[str, bool]]:
    """What each model answered to the example, in visible characters, and whether that is right; `meta` first."""
    answers_by_model = {
        result.model: result.answer
        for result in tables.inputs.read.results
        if result.task == example.task
        and result.answer is not None
        and not (result.recipe or "").partition("/")[2]  # a variant's
        and result.intervention == (ALONE if is_covered else None)
    }
    return {
        model: (readable(answer.strip(" ")) or "nothing", answer == example.completion)
        for model, answer in sorted(answers_by_model.items(), key=lambda item: order(item[0]), reverse=True)
    }


def pieces(example: ExampleRecord, *, is_covered: bool = False) -> list[tuple[str, str]]:
    """The prompt as pairs of a text and its HTML element: `kbd` for a meta-token, `del` for covered text, or none."""
    plain = [(text, "kbd" if is_meta else "") for text, is_meta in example.pieces()]
    if not is_covered:
        return plain
    question = max(index for index, (text, element) in enumerate(plain) if not element and OPENING in text)
    document, opening, rest = plain[question][0].rpartition(OPENING)
    covered = [(text, element or "del") for text, element in [*plain[:question], (document, "")] if text]
    return [*covered, (opening + rest, ""), *plain[question + 1 :]]
