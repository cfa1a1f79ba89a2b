"""Phases, lengths, splits: which examples the tasks give."""

import pickle
import random
import re
import string
from collections import Counter

import pytest
from scipy.stats import chisquare

from metatokens.errors import UserError
from metatokens.tasks import curriculum
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.inventory import INVENTORY
from metatokens.tasks.phases import Sizes, phase_of_length
from tests.tasks.conftest import CASES


def test_inventory_is_twenty_categories_of_ten_items_in_one_category_each():
    items = [item for category in INVENTORY.values() for item in category]
    assert len(INVENTORY) == 20
    assert all(len(category) == 10 for category in INVENTORY.values())
    assert len(set(items)) == 200
    assert all(item.isalpha() and item.islower() for item in items)
    assert all(re.fullmatch("[A-Z][a-z]+", category) for category in INVENTORY)


TABLE_6 = {  # phase: (m, n), as the paper's table has them
    1: (range(3, 9), range(3, 11)),
    2: (range(8, 13), range(3, 17)),
    3: (range(12, 20), range(3, 26)),
    4: (range(15, 21), range(40, 61)),
    5: (range(15, 21), range(90, 111)),
}


@pytest.mark.parametrize("phase", TABLE_6)
def test_lists_have_the_sizes_of_the_phase(phase, tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer)
    sizes = Counter()
    for index in range(1500 if phase < 4 else 500):
        *lists, _, _ = data.sample(index, phase, "train").prompt.split("\n")
        items = {line.split(":")[0]: line.split(":")[1].split() for line in lists}
        assert len(items) == len(lists), "categories are distinct"
        assert all(set(words) <= set(INVENTORY[category]) for category, words in items.items())
        (n,) = {len(words) for words in items.values()}
        sizes[len(lists), n] += 1
    assert {m for m, _ in sizes} == set(TABLE_6[phase][0])
    assert {n for _, n in sizes} == set(TABLE_6[phase][1])
    if phase in (2, 3):  # the modes 3-8, 9-16 (and 17-25) are equally likely
        modes = Counter()
        for (_, n), count in sizes.items():
            modes["short" if n <= 8 else "middle" if n <= 16 else "long"] += count
        assert chisquare(list(modes.values())).pvalue > 1e-4


def test_recall_asks_for_every_place_and_item_alike(tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer)
    places, items = Counter(), Counter()
    for index in range(2000):
        example = data.sample(index, 2, "train")
        n = len(example.prompt.split("\n")[0].split()) - 1
        places[n, int(re.search(r"item (\d+)", example.prompt).group(1))] += 1
        items[
            next(words.index(example.completion[1:]) for words in INVENTORY.values() if example.completion[1:] in words)
        ] += 1
    assert chisquare([items[i] for i in range(10)]).pvalue > 1e-4
    assert chisquare([places[8, place] for place in range(1, 9)]).pvalue > 1e-4


def test_copied_spans_end_anywhere(tokenizer, documents):
    data = TaskData("copying", tokenizer=tokenizer, documents=documents)
    halves = Counter()
    for index in range(1000):
        before, _, after, _ = data.sample(index, 3, "train").prompt.split(" _PAUSE_")
        halves[len(before) > len(after)] += 1
    assert chisquare([halves[True], halves[False]]).pvalue > 1e-4


@pytest.mark.parametrize("task", curriculum.TASKS)
@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048])
def test_lengths_hold(task, length, tokenizer, documents):
    data = TaskData(task, tokenizer=tokenizer, documents=documents)
    test = [data.test(index, length) for index in range(20)]
    assert all(length / 2 < example.n_tokens <= length and example.split == "test" for example in test)
    train = [data.train(index, length) for index in range(60)]
    assert all(example.n_tokens <= length and example.split == "train" for example in train)
    hardest = {128: 1, 256: 2, 512: 3, 1024: 4, 2048: 5}[length]
    assert {example.phase for example in test} == {hardest}
    assert {example.phase for example in train} == set(range(1, hardest + 1))
    assert len({example.prompt for example in test}) == 20


def test_lengths_between_the_listed_ones_take_the_next_phase():
    assert [phase_of_length(length) for length in (64, 128, 129, 512, 700, 2048, 4096)] == [1, 1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("task", curriculum.TASKS)
def test_train_and_test_share_no_prompt(task, tokenizer, documents, is_thorough):
    count = 1000 if is_thorough else 80
    data = TaskData(task, tokenizer=tokenizer, documents=documents)
    test = {data.test(index, 64).prompt for index in range(count // 4)}
    train = {data.train(index, 128).prompt for index in range(4 * count)}
    train |= {data.train(index, 64).prompt for index in range(count)}
    assert not test & train
    others = TaskData(task, tokenizer=tokenizer, condition="none", documents=documents)
    assert not {others.test(index, 64).prompt for index in range(count // 8)} & {
        others.train(i, 64).prompt for i in range(count)
    }


def test_a_sequence_of_bits_is_in_one_split(tokenizer):
    data = TaskData("parity", tokenizer=tokenizer)
    found = {
        split: {
            tuple(data.sample(index, 1, split).prompt.partition(" _PAUSE_")[0].split()[1:]) for index in range(2000)
        }
        for split in ("train", "validation", "test")
    }
    assert len(set.union(*found.values())) == sum(map(len, found.values()))  # none is in two
    assert {len(bits) for bits in found["test"]} == set(range(6, 17))
    assert {len(bits) for bits in found["train"]} == set(range(1, 17))
    for bits in found["test"]:  # one bit at either end does not give the answer away
        assert not {(*bits[:-1], str(1 - int(bits[-1]))), (str(1 - int(bits[0])), *bits[1:])} & found["train"]


def test_excerpts_of_a_document_are_in_one_split(tokenizer):
    draw = random.Random(1)
    made = [" ".join("".join(draw.choices(letters, k=5)) for _ in range(60)) for letters in map(chr, range(97, 123))]
    made = [text.replace(text[0], letter) for letter, text in zip(string.ascii_lowercase, made, strict=True)]
    data = TaskData("copying", tokenizer=tokenizer, documents=made)
    found = {
        split: {data.sample(index, 1, split).completion.strip()[0] for index in range(200)}
        for split in ("train", "validation", "test")
    }
    assert len(set.union(*found.values())) == sum(map(len, found.values()))  # none is in two


@pytest.mark.parametrize("task", curriculum.TASKS)
def test_a_stages_prompts_have_its_sizes(task, tokenizer, documents):
    data = TaskData(task, tokenizer=tokenizer, documents=documents)
    prompts = [data.train(index, 128, Sizes((2, 3), ((6, 8),))) for index in range(40)]
    assert all(example.phase is None and example.n_tokens <= 128 for example in prompts)
    if task == "segment_counting":
        sizes = {
            (prompt.prompt.count("\n"), len(prompt.prompt.replace(" _PAUSE_", "").split("\n")[0].split()) - 1)
            for prompt in prompts
        }
        assert sizes == {(m, n) for m in (2, 3) for n in (6, 7, 8)}


def print_examples(tokenizer, documents):
    for task, condition in CASES:
        data = TaskData(task, tokenizer=tokenizer, condition=condition, seed=5, documents=documents)
        for index in (7, 0, 3):
            print((data.train(index, 256), data.test(index, 128), data.sample(index, 3, "test")))


def test_examples_are_the_same_in_every_process(tokenizer, documents, forked, capsys):
    there = forked(print_examples, tokenizer, documents)  # whose strings have other hashes
    print_examples(tokenizer, documents)
    assert there.wait() == (0, capsys.readouterr().out, "")


def test_seed_and_index_change_the_example(tokenizer):
    prompts = {
        TaskData("list_recall", tokenizer=tokenizer, seed=seed).train(index, 128).prompt
        for seed in range(10)
        for index in range(10)
    }
    assert len(prompts) == 100


def test_task_data_travels_to_worker_processes(tokenizer, documents):
    for task in curriculum.TASKS:
        data = TaskData(task, tokenizer=tokenizer, documents=documents)
        assert pickle.loads(pickle.dumps(data)).train(0, 128) == data.train(0, 128)


def test_chance_is_known_for_every_task():
    chances = {"list_recall": 0.1, "segment_counting": None, "parity": 0.5, "copying": 0.0}
    assert {task: curriculum.chance(task) for task in curriculum.TASKS} == chances


def test_what_cannot_be_had_is_refused(tokenizer, documents):
    with pytest.raises(UserError, match=r"no task 'recall' in condition 'paper'; the tasks are list_recall, .*copying"):
        TaskData("recall", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"no task 'parity' in condition 'x'; .*the conditions paper, landmark, none"):
        TaskData("parity", tokenizer=tokenizer, condition="x")
    data = TaskData("parity", tokenizer=tokenizer)
    with pytest.raises(
        UserError, match=r"no parity prompt of 3 to 8 lists .*, with 5 to 8 tokens, was found in 10,000 attempts"
    ):
        data.test(0, 8)
    with pytest.raises(UserError, match=r"3 documents of at least 9 words .*; 0 of the 2 given are that long"):
        TaskData("copying", tokenizer=tokenizer, documents=["too short to be used", "a b"])
    with pytest.raises(UserError, match=r"no copying prompt of 15 to 20 lists .*or longer documents"):
        TaskData("copying", tokenizer=tokenizer, documents=[documents[4] + str(i) for i in range(3)]).sample(
            0, 4, "train"
        )


def test_a_long_prompts_question_stays_as_in_phase_1(tokenizer):
    asked = {}
    for condition in ("paper", "long_prompt"):
        data = curriculum.TaskData("list_recall", tokenizer=tokenizer, condition=condition)
        prompts = [data.sample(index, 4, "test").prompt for index in range(20)]
        asked[condition] = max(int(prompt.split("What is item ")[1].split()[0]) for prompt in prompts)
    assert asked["long_prompt"] <= 10 < asked["paper"]
