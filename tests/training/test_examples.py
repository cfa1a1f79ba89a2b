"""The examples of a fine-tuning: their order, their batches, and what the loss is on."""

from collections import Counter

import numpy as np
import pytest

from metatokens.tasks.example import Example
from metatokens.training.examples import Collator, grouped_by_length, in_epochs

META, END = 9, 0


def example(prompt: list[int], completion: list[int]) -> Example:
    """An example in which only the ids matter."""
    ids = (*prompt, *completion, END)
    return Example(
        prompt="",
        markers=(),
        completion="",
        input_ids=ids,
        answer_start=len(prompt),
    )


def test_the_loss_is_on_the_answer_and_its_end() -> None:
    collator = Collator(pad_token_id=END)
    short = example([5, META, 6], [7])
    long = example([5, META, 6, 4, META], [7, 8])
    batch = collator([short, long])
    assert batch["input_ids"].tolist() == [
        [5, META, 6, 7, END, END, END, END],
        [5, META, 6, 4, META, 7, 8, END],
    ]
    assert batch["labels"].tolist() == [
        [-100, -100, -100, 7, END, -100, -100, -100],
        [-100, -100, -100, -100, -100, 7, 8, END],
    ]


def orders(seed: int | None) -> list[list[int]]:
    """The orders of twenty examples in three epochs."""
    examples = in_epochs([example([number], [1]) for number in range(20)], seed=seed, length=60)
    order = [example.input_ids[0] for example in examples]
    return [order[:20], order[20:40], order[40:]]


def test_every_epoch_holds_every_example_once_and_with_a_seed_in_an_order_of_its_own() -> None:
    in_order = list(range(20))
    first, second, third = orders(seed=3)
    assert orders(seed=None) == [in_order, in_order, in_order]
    assert sorted(first) == sorted(second) == sorted(third) == in_order
    assert first != second != third != first
    assert orders(seed=3) == [first, second, third]
    assert orders(seed=4)[0] != first


def pairs_of(numbers: list[int]) -> list[list[int]]:
    return [numbers[first : first + 2] for first in range(0, len(numbers), 2)]


@pytest.mark.parametrize("count", [1, 30, 100])
def test_batches_hold_every_example_once_and_similar_lengths_together(count: int) -> None:
    draw = np.random.default_rng(0)
    prompts, completions = draw.integers(1, 500, size=(2, count)).tolist()
    examples = [example([5] * prompts[i], [7] * completions[i]) for i in range(count)]
    read = grouped_by_length(examples, batch=2, seed=0)
    assert Counter(map(id, read)) == Counter(map(id, examples))
    for start in range(0, count, 32):  # a window of 16 batches
        window = slice(start, start + 32)
        lengths = sorted(len(row.input_ids) for row in examples[window])
        order = [len(row.input_ids) for row in read[window]]
        batches, sorted_batches = pairs_of(order), pairs_of(lengths)
        assert sorted(batches) == sorted_batches
        assert len(batches) < 3 or batches != sorted_batches
