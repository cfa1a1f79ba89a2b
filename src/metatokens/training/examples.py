"""The examples of a fine-tuning: which ones a phase reads, in which order, and in which batches."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metatokens.data.blocks import shuffled
from metatokens.data.collating import labelled_batch
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, Phase
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.drills import draw_drill
from metatokens.tasks.example import Encoded
from metatokens.tasks.inventory import INVENTORY
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.phases import Sizes

LISTS_OF_CATEGORIES = {"list_recall", "segment_counting"}  # tasks whose lists have a category each
WINDOW = 16  # batches that are sorted by length together


def in_epochs(
    examples: Sequence[Encoded], *, length: int, seed: int | None = None
) -> list[Encoded]:
    """As many examples as a phase reads: the same over and over; with a seed, shuffled anew in each epoch."""
    count = len(examples)
    numbers = range(length)
    if seed is None:
        return [examples[number % count] for number in numbers]
    return [
        examples[shuffled(number % count, count, f"{seed} {number // count}")] for number in numbers
    ]


def grouped_by_length(examples: Sequence[Encoded], *, batch: int, seed: int) -> list[Encoded]:
    """The same examples, reordered so that a batch holds similar lengths and little padding.

    The examples of every `WINDOW` batches are sorted by length, completions included, and cut into batches, which come
    in random order. The order depends only on the arguments.
    """
    ordered = []
    for window, start in enumerate(range(0, len(examples), WINDOW * batch)):
        in_window = examples[start : start + WINDOW * batch]
        rows = sorted(in_window, key=lambda example: len(example.input_ids))
        batches = [rows[first : first + batch] for first in range(0, len(rows), batch)]
        for number in np.random.default_rng((seed, window)).permutation(len(batches)):
            ordered += batches[number]
    return ordered


class Collator:
    """Makes batches padded on the right, where causal attention needs no mask for padding.

    Labels are the completion and the end of text. With `alone`, a mask lets the questions see the meta-tokens of their
    documents alone.
    """

    def __init__(self, *, pad_token_id: int, alone: LandmarksAlone | None = None):
        self.pad_token_id, self.alone = pad_token_id, alone

    def __call__(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each (batch, longest); with `alone` an `attention_mask` of four dimensions."""
        rows = [(example.input_ids, example.answer) for example in examples]
        batch = labelled_batch(rows, self.pad_token_id)
        if self.alone is not None:
            batch["attention_mask"] = self.alone.mask(batch["input_ids"], examples)
        return batch


def train_source(
    recipe: FinetuneRecipe, task: str, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]
) -> TaskData:
    """The task, from which a recipe's examples are drawn."""
    if task != "segment_counting" and any(stage.bracket_loss for stage in recipe.task.stages):
        raise UserError(f"bracket_loss works with segment_counting alone, not with {task}.")
    categories = len(INVENTORY)
    for stage in recipe.task.stages:
        if task in LISTS_OF_CATEGORIES and not stage.drill and stage.lists[1] > categories:
            raise UserError(
                f"a stage of {task} has up to {stage.lists[1]} lists, and there are {categories} categories."
            )
    return TaskData(
        task,
        tokenizer=tokenizer,
        condition=recipe.task.condition,
        seed=recipe.training.seed,
        documents=documents,
    )


def train_examples(recipe: FinetuneRecipe, source: TaskData, phase: Phase) -> list[Encoded]:
    """Draw the examples of a phase."""
    draw = drawing(source, phase)
    count = min(recipe.task.examples, phase.examples)
    return [draw(index).without_text() for index in range(count)]


def drawing(source: TaskData, phase: Phase) -> Callable[[int], Encoded]:
    """The function that draws a phase's example of an index."""
    if phase.curriculum is None:
        return partial(source.train, train_length=phase.train_length)
    draw = partial(draw_drill, source) if phase.curriculum.drill else source.train
    sizes = Sizes(phase.curriculum.lists, (phase.curriculum.items,))
    return lambda index: draw(phase.first_example + index, phase.train_length, sizes)
