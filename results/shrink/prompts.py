"""The prompts of the suites: as lines of a file, and how an output is scored. Nothing here needs transformers."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from metatokens.errors import UserError
from metatokens.evaluation.intervals import wilson_interval
from metatokens.files import append_lines
from metatokens.records import Record, Result, pack_hits, read_lines

Suite = Literal["ruler", "babilong", "metatokens"]
Shares = dict[tuple[str | None, int | None], float]  # what is kept of contexts, by task and length

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_END_OF_BABILONG_ANSWER = re.compile(r"\.|<context>|<example>")


class Prompt(Record):
    """A context, a question about it, and what has to be found.

    Attributes:
        suite: whose task it is.
        task: its name.
        length: the most tokens that the whole prompt and its output take.
        context: read before the question is known.
        question: follows the context.
        answer_prefix: follows the question; the output goes on from there.
        references: what the output has to contain.
        new_tokens: of the output.
    """

    suite: Suite
    task: str
    length: int
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    new_tokens: int


def references_found(prompt: Prompt, output: str) -> list[bool]:
    """Whether each reference is found in an output, as its suite decides it.

    RULER: the output contains the reference, in capital letters or small ones. BABILong: the output's first sentence
    names the right room and no other. The package's tasks: the output begins with the answer, and a word ends there.
    """
    if prompt.suite == "ruler":
        return [reference.lower() in output.lower() for reference in prompt.references]
    if prompt.suite == "babilong":
        sentence = _END_OF_BABILONG_ANSWER.split(output.lower())[0]
        named = tuple(room for room in ROOMS if room in sentence)
        return [named == prompt.references]
    answer = _single_spaced(prompt.references[0])
    return [re.match(rf"{re.escape(answer)}(?!\w)", _single_spaced(output)) is not None]


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


def write_results(
    prompts: Sequence[Prompt],
    out: Path,
    *,
    model: str,
    seed: int,
    answer: Callable[[Prompt], str],
    share: Callable[[Sequence[Prompt]], dict[str, Any]],
) -> Iterator[Result]:
    """Append a line a task and length to a file, unless it has that line of the model and seed.

    Each reference is a question that is answered or not; a prompt with four references counts four.

    Args:
        prompts: those of a task and length follow each other.
        out: the file.
        model: its name in the lines.
        seed: of its training.
        answer: gives the output of a prompt.
        share: fields of the lines that say what the cache keeps of these prompts.

    Yields:
        Each new line.
    """
    lines = read_lines(out, Result) if out.exists() else []
    done = {(line.model, line.seed, line.task, line.length) for line in lines}
    for (suite, task, length), group in groupby(prompts, lambda p: (p.suite, p.task, p.length)):
        if (model, seed, task, length) in done:
            continue
        of_group = list(group)
        hits: list[bool] = []
        for prompt in of_group:
            hits += references_found(prompt, answer(prompt))
        low, high = wilson_interval(sum(hits), len(hits))
        result = Result(
            model=model,
            seed=seed,
            task=task,
            condition=suite,
            length=length,
            metric="exact_match",
            value=sum(hits) / len(hits),
            n=len(hits),
            low=low,
            high=high,
            hits=pack_hits(hits),
            **share(of_group),
        )
        append_lines(out, [result.line()])
        yield result


def shares_kept(lines: Sequence[Result], model: str, seed: int) -> Shares:
    """What a model keeps of the contexts of each task and length, by its lines of a seed.

    Raises:
        UserError: if there are no such lines.
    """
    shares = {
        (line.task, line.length): line.kv_kept
        for line in lines
        if (line.model, line.seed) == (model, seed) and line.kv_kept is not None
    }
    if not shares:
        raise UserError(f"no line says what {model!r} of seed {seed} keeps.")
    return shares
