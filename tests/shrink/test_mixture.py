"""What a model is trained on: rows whose answers count, or whose every token does."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.landmarks import Landmarks
from metatokens.shrink.lookups import Asked, Question
from metatokens.shrink.mixture import Mixture, scored_row
from metatokens.tasks.example import Encoded

TOKENS, LONGEST, STEPS = 1024, 256, 24
RECORD = Encoded(input_ids=[11, 12, 13, 14, 15, 0], answer_start=3)


@pytest.fixture
def make(lookups):
    """Makes the batches of a mixture with other settings than usual."""
    usual = {"steps": STEPS, "tokens": TOKENS, "lengths": [LONGEST, LONGEST // 2], "distance": 60}
    usual |= {"prose_share": 1 / 3, "seed": 0}

    def batches(**changes):
        mixture = Mixture(lookups["train"], **usual | changes)
        return [mixture[step] for step in range(len(mixture))]

    return batches


def is_prose(batch):
    """Whether all tokens count but the first ones."""
    counts = batch["labels"] != IGNORED_LABEL
    return bool(counts[:, 1:].all() and not counts[:, 0].any())


def test_answers_count_and_follow_their_questions():
    first = Question("question", [4, 5], [6], closing=(7, 8))
    asked = Asked([1, 2, 3], [first, Question("passage", [9], [10, 11])])
    assert scored_row(asked) == ([*range(1, 12)], [5, 9, 10])


def test_a_seed_gives_its_batches(make):
    for batch, same, other in zip(make(), make(), make(seed=1), strict=True):
        assert torch.equal(batch["input_ids"], same["input_ids"])
        assert torch.equal(batch["labels"], same["labels"])
        assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_labels_are_the_ids_of_answers(make, lookups, tokenizer):
    entities = lookups["train"].entities
    values = {*entities.names, *entities.words, "and", *map(str, range(100, 10_000))}
    prose = lookups["train"].prose.ids.tolist()
    passages = 0
    for batch in make():
        rows, length = batch["input_ids"].shape
        text_length = TOKENS // rows  # besides questions and answers
        assert text_length in (LONGEST, LONGEST // 2)
        assert length == LONGEST if is_prose(batch) else text_length < length < 3 * text_length
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            counts = labels != IGNORED_LABEL
            assert torch.equal(labels[counts], ids[counts])
            if not is_prose(batch):
                for answer in runs(labels.tolist()):
                    # Of a chat's answer, the end of the turn counts too.
                    answered = tokenizer.decode(answer).replace("<|endoftext|>", "")
                    known = [word in values for word in answered.replace(",", "").split()]
                    is_passage = len(answer) == 8 and holds(prose, answer)
                    assert all(known) or is_passage
                    passages += is_passage
    assert passages


def runs(labels):
    """The labels that count, each run of them for itself."""
    groups = groupby(labels, key=lambda label: label != IGNORED_LABEL)
    return [list(group) for counts, group in groups if counts]


def holds(ids, part):
    """Whether ids have a part."""
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def test_prose_has_its_share_evenly(make):
    for share in (0, 1 / 3, 1 / 2):
        steps = list(map(is_prose, make(prose_share=share)))
        assert sum(steps[: STEPS // 2]) == sum(steps[STEPS // 2 :]) == round(share * STEPS / 2)


def test_a_text_longer_than_a_batch_is_a_batch(make):
    assert {len(batch["labels"]) for batch in make(tokens=100)} == {1}


def without_padding(batch, row):
    """The ids of a row up to its last answer."""
    last = int((batch["labels"][row] != IGNORED_LABEL).nonzero().max())
    return batch["input_ids"][row, : last + 1].tolist()


@pytest.mark.parametrize("rule", ["sentence", "every:7"])
def test_landmarks_change_no_text_and_no_answer(rule, make, tokenizer):
    landmarks = Landmarks(tokenizer, rule)
    for plain, marked in zip(make(), make(landmarks=landmarks), strict=True):
        is_answer = plain["labels"] != IGNORED_LABEL
        is_marked_answer = marked["labels"] != IGNORED_LABEL
        assert torch.equal(plain["labels"][is_answer], marked["labels"][is_marked_answer])
        assert torch.equal(plain["labels"][is_answer], marked["input_ids"][is_marked_answer])
        for row in range(len(is_answer)):
            inserted = landmarks.insert_into(without_padding(plain, row))
            with_metas = without_padding(marked, row)
            assert with_metas == inserted[: len(with_metas)]


def test_a_batch_has_records_that_follow_one_another_in_length(make):
    in_order = list(range(20, 80))
    shuffled = np.random.default_rng(0).permutation(in_order).tolist()
    records = [Encoded(input_ids=[length] * length, answer_start=4) for length in shuffled]
    batches = 0
    for batch in make(replies=records, prose_share=0, steps=60):
        lengths = batch["input_ids"][:, 0].tolist()
        if lengths[0] in in_order and (batch["input_ids"][0] == lengths[0]).sum() == lengths[0]:
            start = in_order.index(lengths[0])
            assert lengths == (in_order[start:] + in_order)[: len(lengths)]
            assert len(lengths) * max(lengths) <= TOKENS
            following = in_order[(start + len(lengths)) % len(in_order)]
            assert (len(lengths) + 1) * max(*lengths, following) > TOKENS
            batches += 1
    assert batches


@pytest.mark.parametrize(("records", "share"), [("user_records", 0.25), ("replies", 0.2)])
def test_records_have_their_share_of_the_steps_without_prose(records, share, make):
    without_prose, length = 300, LONGEST // 2
    # Short texts in small batches, which are drawn more quickly.
    sizes = {
        "tokens": length,
        "lengths": [length],
        "steps": 2 * without_prose,
        "prose_share": 1 / 2,
    }
    of_records = []
    for batch in make(**{records: [RECORD]}, **sizes):
        ids, labels = batch["input_ids"], batch["labels"]
        if ids[0, : len(RECORD.input_ids)].tolist() == RECORD.input_ids:
            assert {*map(tuple, ids.tolist())} == {(11, 12, 13, 14, 15, 0)}
            assert {*map(tuple, labels.tolist())} == {(*[IGNORED_LABEL] * 3, 14, 15, 0)}
            of_records.append(len(ids))
    standard_deviation = (without_prose * share * (1 - share)) ** 0.5
    assert abs(len(of_records) - without_prose * share) < 4 * standard_deviation
    assert set(of_records) == {length // len(RECORD.input_ids)}


def test_a_long_system_prompt_leaves_short_texts_without_chats(make, lookups):
    turns = replace(lookups["train"].turns, opening=[5] * 40)
    chatty = replace(lookups["train"], turns=turns)
    mixture = Mixture(chatty, 200, 256, [LONGEST, LONGEST // 2], 60, prose_share=0.0, seed=0)
    lengths = {True: set(), False: set()}
    for step in range(len(mixture)):
        batch = mixture[step]
        rows = len(batch["input_ids"])
        is_chat = bool((batch["input_ids"][0, :40] == 5).all())
        lengths[is_chat].add(256 // rows)
    assert lengths[True] == {LONGEST}  # 128 tokens have 68 for facts, less the 40
    assert lengths[False] == {LONGEST, LONGEST // 2}
