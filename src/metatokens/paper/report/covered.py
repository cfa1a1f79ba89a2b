"""What a page begins with, if questions were asked with the text covered: what is covered, and who still answers."""

from metatokens.looking.style import readable
from metatokens.paper.frame import select
from metatokens.paper.report.make_table import Cell
from metatokens.paper.report.tables import Tables
from metatokens.paper.report.text import CONTENT, PERCENT, listed, number, ordered, words
from metatokens.records import ALONE, ExampleRecord
from metatokens.tasks.content import OPENING


def sentences(tables: Tables) -> list[str]:
    """What was done, and who answers the first task that was asked with the text covered; empty if no task was."""
    hidden = tables.main_figures(intervention=ALONE)
    if hidden.empty:
        return []
    task = hidden["task"].iloc[0]
    hidden = select(hidden, task=task)
    in_sight = select(tables.main_figures(), task=task)
    named, answers = [], []
    for model in reversed(ordered(hidden["model"])):
        description = CONTENT["models"].get(model)
        named.append(f"{model} ({description})" if description else model)
        mean_hidden, _, _ = Cell.of(select(hidden, model=model)).estimate()
        answer = f"{model} answers {PERCENT(mean_hidden)} %"
        with_text = Cell.of(select(in_sight, model=model))
        if with_text.runs:
            mean_in_sight, _, _ = with_text.estimate()
            answer += f" (with the text in sight {PERCENT(mean_in_sight)} %)"
        answers.append(answer)
    numbers_of_questions = sorted(set(hidden["n"]))
    n = listed([*map(number, numbers_of_questions)], "or")
    chance = hidden["chance"].max()
    guesses = f"; guessing gives {PERCENT(chance)} %" if chance >= 0 else ""
    runs = hidden.groupby("model")["seed"].nunique().max()
    often = "once" if runs == 1 else f"up to {runs} times"
    return [
        'The paper "Language Modeling with Learned Meta-Tokens" puts learned tokens between the words of a text: a '
        "language model reads such a meta-token, and is never asked to predict it.",
        f"We trained {listed(named)}, {often} each, on questions about texts that they saw whole, with a meta-token "
        "right after what is asked for.",
        "Then we covered the texts: a question sees their meta-tokens alone, "
        f"{PERCENT(hidden['kv_kept'].mean())} % of the keys and values. Of {n} questions of "
        f"{words('task', task).lower()}, {listed(answers)}{guesses}.",
    ]


def shown_example(tables: Tables) -> ExampleRecord | None:
    """The example of that task; none if it has no question, or if there are several, as of different runs."""
    tasks = tables.main_figures(intervention=ALONE)["task"]
    prompts = {
        example.prompt: example
        for example in tables.inputs.read.examples
        if example.task in set(tasks[:1]) and OPENING in example.prompt
    }
    return next(iter(prompts.values())) if len(prompts) == 1 else None


def answers(
    tables: Tables, example: ExampleRecord, *, is_covered: bool
) -> dict[str, tuple[str, bool]]:
    """What each model answered to the example, in visible characters, and whether that is right; `meta` first."""
    said = {
        result.model: result.answer
        for result in tables.inputs.read.results
        if (result.task, result.intervention) == (example.task, ALONE if is_covered else None)
        and result.answer is not None
        and "/" not in (result.recipe or "")  # a variant's
    }
    return {
        model: (readable(said[model].strip(" ")) or "nothing", said[model] == example.completion)
        for model in reversed(ordered(said))
    }


def pieces(example: ExampleRecord, *, is_covered: bool = False) -> list[tuple[str, str]]:
    """The prompt as pairs of a text and its HTML element: `kbd` for a meta-token, `del` for covered text, or none."""
    plain = [(text, "kbd" if is_meta else "") for text, is_meta in example.pieces()]
    if not is_covered:
        return plain
    question = max(
        index for index, (text, element) in enumerate(plain) if not element and OPENING in text
    )
    document, opening, rest = plain[question][0].rpartition(OPENING)
    before = [*plain[:question], (document, "")]
    covered = [(text, element or "del") for text, element in before if text]
    return [*covered, (opening + rest, ""), *plain[question + 1 :]]
