"""What a page begins with, if questions were asked with the text covered: what is covered, and who still answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from metatokens.looking.style import readable
from metatokens.paper.report.make_table import Cell, Fields, order
from metatokens.paper.report.tables import ALONE, Tables
from metatokens.paper.report.text import PERCENT, WORDS, listed, number
from metatokens.records import ExampleRecord
from metatokens.tasks.content import OPENING


@dataclass(frozen=True)
class Asked:
    """A model's answers to the same questions, with the text in sight and with the text covered."""

    model: str
    in_sight: Cell
    covered: Cell
    kv_kept: float
    """The share of the text's keys and values that the covered text leaves."""

    def __str__(self) -> str:
        words = WORDS["models"].get(self.model)
        return f"{self.model} ({words})" if words else self.model

    @property
    def right(self) -> str:
        """How many it answers."""
        covered, *_ = self.covered.estimate()
        in_sight, *_ = self.in_sight.estimate()
        return f"{self.model} answers {PERCENT(covered)} % (with the text in sight {PERCENT(in_sight)} %)"


def asked_covered(tables: Tables) -> dict[str, list[Asked]]:
    """The models that were trained with the text in sight and asked with it covered too, by task; `meta` first."""
    asked_by_task = {}
    for task, main in tables.tasks.items():
        in_sight = _by_model(tables, main, "")
        covered = _by_model(tables, {**main, "model": [*in_sight]}, ALONE)
        kv_kept = (
            tables.inputs.measured(**{**main, "intervention": ALONE})
            .groupby("model")["kv_kept"]
            .mean()
        )
        models = sorted(covered, key=order, reverse=True)
        if models:
            asked_by_task[task] = [
                Asked(model, in_sight[model], covered[model], kv_kept[model]) for model in models
            ]
    return asked_by_task


def _by_model(tables: Tables, main: Fields, intervention: str) -> dict[str, Cell]:
    """The main accuracies of a task under an intervention, by model."""
    accuracies = tables.inputs.measured(**{**main, "intervention": intervention})
    return {str(model): Cell.of(of_model) for model, of_model in accuracies.groupby("model")}


def counts(asked: Sequence[Asked]) -> str:
    """How many questions were asked."""
    n = frozenset[int]().union(*(row.covered.n for row in asked))
    return listed(list(map(number, sorted(n))), "or")


def shown_example(tables: Tables, task: str) -> ExampleRecord | None:
    """The task's example; none if it has no question, or if there are several, as of different runs."""
    examples = tables.inputs.read.examples
    prompts = {
        example.prompt: example
        for example in examples
        if example.task == task and OPENING in example.prompt
    }
    return next(iter(prompts.values())) if len(prompts) == 1 else None


def answers(
    tables: Tables, example: ExampleRecord, *, is_covered: bool
) -> dict[str, tuple[str, bool]]:
    """What each model answered to the example, in visible characters, and whether that is right; `meta` first."""
    intervention = ALONE if is_covered else None
    answers_by_model = {
        result.model: result.answer
        for result in tables.inputs.read.results
        if (result.task, result.intervention) == (example.task, intervention)
        and result.answer is not None
        and "/" not in (result.recipe or "")  # a variant's
    }
    return {
        model: (
            readable(answers_by_model[model].strip(" ")) or "nothing",
            answers_by_model[model] == example.completion,
        )
        for model in sorted(answers_by_model, key=order, reverse=True)
    }


def pieces(example: ExampleRecord, *, is_covered: bool = False) -> list[tuple[str, str]]:
    """The prompt as pairs of a text and its HTML element: `kbd` for a meta-token, `del` for covered text, or none."""
    plain = [(text, "kbd" if is_meta else "") for text, is_meta in example.pieces()]
    if not is_covered:
        return plain
    questions = [
        index for index, (text, element) in enumerate(plain) if not element and OPENING in text
    ]
    question = questions[-1]
    document, opening, rest = plain[question][0].rpartition(OPENING)
    before = [*plain[:question], (document, "")]
    covered = [(text, element or "del") for text, element in before if text]
    return [*covered, (opening + rest, ""), *plain[question + 1 :]]
