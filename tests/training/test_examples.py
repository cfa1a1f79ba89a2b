"""The examples of a fine-tuning: their order, their batches, and what the loss is on."""

from collections import Counter

import numpy as np
import pytest

from metatokens.tasks.example import Example
from metatokens.training.examples import ByLength, Collator, Epochs

META, END = 9, 0


def example(prompt: list[int], completion: list[int]) -> Example:
    """An example in which only the ids matter."""
    ids = (*prompt, *completion, END)
    return Example(prompt="", markers=(), completion="", input_ids=ids, answer_start=len(prompt), n_tokens=len(prompt))


@pytest.mark.parametrize(
    ("loss_on", "labels"),
    [
        ("answer", [[-100, -100, -100, 7, END, -100, -100, -100], [-100, -100, -100, -100, -100, 7, 8, END]]),
        ("sequence", [[-100, -100, 6, 7, END, -100, -100, -100], [-100, -100, 6, 4, -100, 7, 8, END]]),
    ],
)
def test_the_loss_is_on_the_answer_or_the_sequence_and_never_on_meta_tokens(
    loss_on: str, labels: list[list[int]]
) -> None:
    collator = Collator(pad_token_id=END, meta_token_id=META, loss_on=loss_on)
    batch = collator([example([5, META, 6], [7]), example([5, META, 6, 4, META], [7, 8])])
    assert batch["input_ids"].tolist() == [[5, META, 6, 7, END, END, END, END], [5, META, 6, 4, META, 7, 8, END]]
    assert batch["labels"].tolist() == labels
    without_prompt = Collator(pad_token_id=END, meta_token_id=META, loss_on="sequence")([example([], [7, 8])])
    assert without_prompt["labels"].tolist() == [[-100, 8, END]]


def test_every_epoch_holds_every_example_once_and_with_a_seed_in_an_order_of_its_own() -> None:
    examples = [example([number], [1]) for number in range(20)]

    def epochs(seed: int | None) -> list[list[int]]:
        dataset = Epochs(examples, seed=seed, length=60)
        assert len(dataset) == 60
        return [[dataset[20 * epoch + place].input_ids[0] for place in range(20)] for epoch in range(3)]

    assert epochs(None) == [list(range(20))] * 3
    assert all(Counter(epoch) == Counter(range(20)) for epoch in epochs(3))
    assert len({tuple(epoch) for epoch in epochs(3)}) == 3
    assert epochs(3) == epochs(3)
    assert epochs(3)[0] != epochs(4)[0]


@pytest.mark.parametrize("count", [1, 30, 64, 100])
def test_batches_hold_every_example_once_and_similar_lengths_together(count: int) -> None:
    sizes = np.random.default_rng(0).integers(1, 500, size=(count, 2)).tolist()  # of prompts and of completions
    examples = [example([5] * prompt, [7] * completion) for prompt, completion in sizes]
    dataset = ByLength(examples, batch=2, seed=0)
    read = [dataset[index] for index in range(len(dataset))]
    assert Counter(map(id, read)) == Counter(map(id, examples))
    order = [len(one.input_ids) for one in read]
    for start in range(0, count, 32):  # a window of 16 batches
        window = sorted(sum(size) + 1 for size in sizes[start : start + 32])
        pairs = [tuple(order[first : first + 2]) for first in range(start, min(start + 32, count), 2)]
        assert sorted(pairs) == [tuple(window[first : first + 2]) for first in range(0, len(window), 2)]
        assert len(pairs) < 3 or pairs != sorted(pairs)
    backwards = [dataset[index] for index in reversed(range(count))]
    assert all(one is another for one, another in zip(backwards[::-1], read, strict=True))
    other = ByLength(examples, batch=2, seed=1)
    assert count < 30 or read != [other[index] for index in range(count)]
