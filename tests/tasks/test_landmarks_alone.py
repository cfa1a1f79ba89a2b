"""Questions that see landmarks alone, against loops over the prompt's text and the dense oracle."""

import pytest
import torch

from metatokens.data.prompts import encode_prompt
from metatokens.errors import UserError
from metatokens.tasks.curriculum import TASKS, TaskData
from metatokens.tasks.example import Encoded
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.scoring import score
from metatokens.tasks.shortcuts import answers
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import SECOND, tiny_model

CASES = [*((task, "paper") for task in TASKS), *(("list_recall", one) for one in ("landmark", "decoy", "facts_4"))]


def model_for(tokenizer, **fields):
    return tiny_model(vocab_size=1408, meta_token_id=tokenizer.meta_token_id, position_embedding="none", **fields)


def document(example, tokenizer):
    """The ids of what is before the question, by the prompt's text."""
    start = example.prompt.rindex("\nQ: ")
    return encode_prompt(tokenizer, example.prompt[:start], [marker for marker in example.markers if marker < start])


def seen(example, tokenizer):
    """For each query, whether it sees each key: the rule, written out."""
    size, ids = len(document(example, tokenizer)), example.input_ids
    places = range(len(ids))
    return torch.tensor(
        [
            [key <= query and (query < size or key >= size or ids[key] == tokenizer.meta_token_id) for key in places]
            for query in places
        ]
    )


def batch_of(examples):
    ids = torch.zeros(len(examples), max(len(example.input_ids) for example in examples), dtype=torch.long)
    for row, example in zip(ids, examples, strict=True):
        row[: len(example.input_ids)] = torch.tensor(example.input_ids)
    return ids


@pytest.mark.parametrize(("task", "condition"), CASES)
def test_a_question_sees_the_meta_tokens_of_its_document_and_itself(task, condition, tokenizer, documents):
    data = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    examples = [data.train(index, 128) for index in range(8)]
    ids = batch_of(examples)
    mask = LandmarksAlone(model_for(tokenizer), tokenizer).mask(ids, examples)
    assert mask.shape == (8, 1, ids.shape[1], ids.shape[1])
    assert mask.any(dim=-1).all()  # padding too, or its softmax would be undefined
    for example, own in zip(examples, mask[:, 0], strict=True):
        size = len(example.input_ids)
        assert torch.equal(own[:size, :size], seen(example, tokenizer))
        assert not torch.equal(own[:size, :size], torch.ones(size, size).tril().bool())


@SECOND
def test_every_attention_of_a_model_obeys(second_attention, tokenizer):
    model = model_for(tokenizer, second_attention=second_attention)
    data = TaskData("list_recall", tokenizer=tokenizer, condition="facts_2")
    examples, oracle = [data.train(index, 128) for index in range(3)], DenseOracle(model)
    ids = batch_of(examples)
    assert len({len(example.input_ids) for example in examples}) > 1
    with torch.no_grad():
        found = model(ids, attention_mask=LandmarksAlone(model, tokenizer).mask(ids, examples)).logits
    for example, logits in zip(examples, found, strict=True):
        size, start = len(example.input_ids), len(document(example, tokenizer))
        expected = oracle.logits(example.input_ids, seen(example, tokenizer))
        torch.testing.assert_close(logits[:size], expected.detach(), rtol=1e-9, atol=1e-9)
        everything = oracle.logits(example.input_ids).detach()
        torch.testing.assert_close(logits[:start], everything[:start], rtol=1e-9, atol=1e-9)
        assert (logits[start:size] - everything[start:]).abs().max() > 0.1


@SECOND
def test_scores_are_those_of_greedy_decoding_of_the_dense_formula(second_attention, tokenizer):
    model = model_for(tokenizer, second_attention=second_attention)
    data = TaskData("list_recall", tokenizer=tokenizer, condition="facts_4")
    oracle, examples = DenseOracle(model), []
    never = [tokenizer.meta_token_id, *range(len(tokenizer), 1408)]
    for index in range(6):  # in every second one, the answer is what the model says
        example = data.train(index, 128)
        size, ids = example.answer_start, [*example.input_ids[: example.answer_start]]
        for _ in range(2 if index % 2 else 0):
            logits = oracle.logits(ids, seen(example, tokenizer)[: len(ids), : len(ids)])[-1]
            logits[never] = -torch.inf
            ids.append(int(logits.argmax()))
        examples.append(Encoded(input_ids=ids if index % 2 else example.input_ids, answer_start=size))
    exact, tokens = score(model, examples, alone=LandmarksAlone(model, tokenizer), batch=3)
    assert exact[1::2] == [True] * 3
    assert tokens[1::2] == [2] * 3
    assert not all(exact)
    in_sight, _ = score(model, examples)
    assert in_sight != exact


@pytest.mark.parametrize("lines", [1, 2, 4, 8])
def test_facts_are_one_item_lists_with_a_landmark_behind_so_many(lines, tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer, condition=f"facts_{lines}")
    counts = set()
    for index in range(60):
        example = data.train(index, 128)
        *facts, question, end = [
            *example.prompt.rpartition("\nQ: ")[0].split("\n"),
            *example.prompt.rsplit("\nQ: ")[1:],
            "",
        ]
        assert (question.startswith("What is item 1 of "), end) == (True, "")
        assert all(len(fact.replace(" _PAUSE_", "").split()) == 2 for fact in facts)
        marked = {place for place, fact in enumerate(facts, start=1) if fact.endswith(" _PAUSE_")}
        assert marked == {place for place in range(1, len(facts) + 1) if place % lines == 0} | {len(facts)}
        counts.add(len(facts))
    assert counts == set(range(8, 17))
    train, test = ([draw(index, 128) for index in range(100)] for draw in (data.train, data.test))
    rates = {name: sum(right) / 100 for name, right in answers("list_recall", f"facts_{lines}", train, test).items()}
    assert max(rates.values()) < 0.3, rates  # no rule does the task itself


def test_what_cannot_be_told_apart_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"condition facts_2 is for list_recall, .*, not for parity\.$"):
        TaskData("parity", tokenizer=tokenizer, condition="facts_2")
    model = model_for(tokenizer)
    prompt = encode_prompt(tokenizer, "no question _PAUSE_", "_PAUSE_")
    with pytest.raises(UserError, match=r"do not show where its question begins\.$"):
        LandmarksAlone(model, tokenizer).start(Encoded(input_ids=prompt, answer_start=len(prompt)))
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match=r"needs attention 'sdpa', and this has 'eager'\.$"):
        LandmarksAlone(model, tokenizer)
