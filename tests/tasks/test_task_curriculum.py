"""Phases, lengths, splits: which examples the tasks give."""

import re
import string
from collections import Counter

import pytest
from scipy.stats import chisquare

from metatokens.errors import UserError
from metatokens.tasks.curriculum import TASKS, TaskData
from metatokens.tasks.inventory import INVENTORY
from metatokens.tasks.phases import Sizes
from tests.tasks.conftest import CASES

TABLE_6 = {  # phase: (m, n), as the paper's table has them
    1: (range(3, 9), range(3, 11)),
    2: (range(8, 13), range(3, 17)),
    3: (range(12, 20), range(3, 26)),
    4: (range(15, 21), range(40, 61)),
    5: (range(15, 21), range(90, 111)),
}


def lists_of(prompt):
    """The items of each list of a prompt of list recall, by category."""
    *lines, _, _ = prompt.split("\n")
    items = {}
    for line in lines:
        category, words = line.split(":")
        items[category] = words.split()
    assert len(items) == len(lines), "categories are distinct"
    return items


@pytest.mark.parametrize("phase", TABLE_6)
def test_lists_have_the_sizes_of_the_phase(phase, tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer)

    sizes = Counter()
    for index in range(1500 if phase < 4 else 500):
        lists = lists_of(data.sample(index, phase, "train").prompt)
        for category, words in lists.items():
            assert set(words) <= set(INVENTORY[category])
        [length] = {len(words) for words in lists.values()}
        sizes[len(lists), length] += 1

    numbers_of_lists, lengths = TABLE_6[phase]
    numbers = {lists for lists, _ in sizes}
    assert numbers == set(numbers_of_lists)
    lengths_seen = {length for _, length in sizes}
    assert lengths_seen == set(lengths)


def test_recall_asks_for_every_position_and_item_alike(tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer)

    positions, items = Counter(), Counter()
    for index in range(2000):
        example = data.sample(index, 2, "train")
        number, category = re.search(r"What is item (\d+) of (\w+)", example.prompt).groups()
        if len(lists_of(example.prompt)[category]) == 8:
            positions[number] += 1
        items[INVENTORY[category].index(example.completion.strip())] += 1

    assert chisquare(list(items.values())).pvalue > 1e-4
    assert len(positions) == 8
    assert chisquare(list(positions.values())).pvalue > 1e-4


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("length", "hardest_phase"), [(128, 1), (256, 2), (512, 3), (1024, 4), (2048, 5)]
)
def test_lengths_hold(task, length, hardest_phase, tokenizer, documents):
    data = TaskData(task, tokenizer=tokenizer, documents=documents)

    for index in range(20):
        example = data.test(index, length)
        assert length / 2 < example.n_tokens <= length
        assert (example.split, example.phase) == ("test", hardest_phase)
    phases = set()
    for index in range(60):
        example = data.train(index, length)
        assert example.n_tokens <= length
        assert example.split == "train"
        phases.add(example.phase)
    assert phases == set(range(1, hardest_phase + 1))


@pytest.mark.parametrize("condition", ["paper", "landmark"])
@pytest.mark.parametrize("task", TASKS)
def test_train_and_test_share_no_prompt(task, condition, tokenizer, documents, is_thorough):
    count = 1000 if is_thorough else 80
    data = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)

    test = {data.test(index, 64).prompt for index in range(count // 4)}
    train = {data.train(index, 64).prompt for index in range(count)}
    longer_train = {data.train(index, 128).prompt for index in range(4 * count)}

    assert test.isdisjoint(train | longer_train)


def test_a_sequence_of_bits_is_in_one_split(tokenizer):
    data = TaskData("parity", tokenizer=tokenizer)

    bits_in = {}
    for split in ("train", "validation", "test"):
        bits_in[split] = set()
        for index in range(2000):
            before_marker, _, _ = data.sample(index, 1, split).prompt.partition(" _PAUSE_")
            bits_in[split].add(before_marker.removeprefix("Bits: ").replace(" ", ""))

    train, validation, test = bits_in.values()
    assert train.isdisjoint(validation)
    assert train.isdisjoint(test)
    assert validation.isdisjoint(test)
    lengths_in_test = {len(bits) for bits in test}
    assert lengths_in_test == set(range(6, 17))
    lengths_in_train = {len(bits) for bits in train}
    assert lengths_in_train == set(range(1, 17))
    flipped = {"0": "1", "1": "0"}
    for bits in test:  # one bit at either end does not give the answer away
        assert bits[:-1] + flipped[bits[-1]] not in train
        assert flipped[bits[0]] + bits[1:] not in train


def test_excerpts_of_a_document_are_in_one_split(tokenizer):
    documents = [" ".join([5 * letter] * 60) for letter in string.ascii_lowercase]
    data = TaskData("copying", tokenizer=tokenizer, documents=documents)

    letters_in = {}
    for split in ("train", "validation", "test"):
        letters_in[split] = {
            data.sample(index, 1, split).completion.strip()[0] for index in range(200)
        }

    # None is in two.
    assert len(set.union(*letters_in.values())) == sum(map(len, letters_in.values()))


def test_a_stages_prompts_have_its_sizes(tokenizer):
    data = TaskData("segment_counting", tokenizer=tokenizer)

    sizes = set()
    for index in range(40):
        example = data.train(index, 128, Sizes((2, 3), ((6, 8),)))
        assert example.phase is None
        *lists, _ = example.prompt.replace(" _PAUSE_", "").split("\n")
        sizes.add((len(lists), len(lists[0].split()) - 1))

    assert sizes == {(2, 6), (2, 7), (2, 8), (3, 6), (3, 7), (3, 8)}


def print_examples(tokenizer, documents):
    for task, condition in CASES:
        data = TaskData(task, tokenizer=tokenizer, condition=condition, seed=5, documents=documents)
        for index in (7, 0, 3):
            print(
                data.train(index, 256),
                data.test(index, 128),
                data.sample(index, 3, "test"),
            )


def test_examples_are_the_same_in_every_process(tokenizer, documents, forked, capsys):
    there = forked(print_examples, tokenizer, documents)  # whose strings have other hashes

    print_examples(tokenizer, documents)

    assert there.wait() == (0, capsys.readouterr().out, "")


def test_a_prompt_that_is_not_found_is_a_sentence(tokenizer):
    data = TaskData("parity", tokenizer=tokenizer)

    with pytest.raises(UserError, match=r"no parity prompt with 5 to 8 tokens"):
        data.test(0, 8)


def test_a_long_prompts_question_stays_as_in_phase_1(tokenizer):
    highest = {}
    for condition in ("paper", "long_prompt"):
        data = TaskData("list_recall", tokenizer=tokenizer, condition=condition)
        prompts = [data.sample(index, 4, "test").prompt for index in range(20)]
        highest[condition] = max(
            int(re.search(r"What is item (\d+)", prompt)[1]) for prompt in prompts
        )

    assert highest["long_prompt"] <= 10 < highest["paper"]
