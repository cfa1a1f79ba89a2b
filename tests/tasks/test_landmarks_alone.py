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

CASES = [
    *((task, "paper") for task in TASKS),
    ("list_recall", "landmark"),
    ("list_recall", "decoy"),
    ("list_recall", "facts_4"),
]


def model_for(tokenizer, **fields):
    return tiny_model(
        vocab_size=1408,
        meta_token_id=tokenizer.meta_token_id,
        position_embedding="none",
        **fields,
    )


def document_size(example, tokenizer):
    """The number of ids before the question, by the prompt's text."""
    start = example.prompt.rindex("\nQ: ")
    markers = [marker for marker in example.markers if marker < start]
    return len(encode_prompt(tokenizer, example.prompt[:start], markers))


def slow_mask(example, tokenizer):
    """For each query, whether it sees each key: the rule, written out."""
    ids, document = example.input_ids, document_size(example, tokenizer)
    mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for query in range(len(ids)):
        for key in range(query + 1):
            is_hidden_text = query >= document > key and ids[key] != tokenizer.meta_token_id
            mask[query, key] = not is_hidden_text
    return mask


def batch_of(examples):
    rows = [torch.tensor(example.input_ids) for example in examples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize(("task", "condition"), CASES)
def test_a_question_sees_the_meta_tokens_of_its_document_and_itself(
    task, condition, tokenizer, documents
):
    data = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    examples = [data.train(index, 128) for index in range(8)]

    masks = LandmarksAlone(model_for(tokenizer), tokenizer).mask(batch_of(examples), examples)

    assert masks.any(dim=-1).all()  # padding too, or its softmax would be undefined
    for example, mask in zip(examples, masks[:, 0], strict=True):
        size = len(example.input_ids)
        assert torch.equal(mask[:size, :size], slow_mask(example, tokenizer))


@SECOND
def test_every_attention_of_a_model_obeys(second_attention, tokenizer):
    model = model_for(tokenizer, second_attention=second_attention)
    oracle = DenseOracle(model)
    data = TaskData("list_recall", tokenizer=tokenizer, condition="facts_2")
    examples = [data.train(index, 128) for index in range(3)]
    ids = batch_of(examples)

    with torch.no_grad():
        logits = model(
            ids, attention_mask=LandmarksAlone(model, tokenizer).mask(ids, examples)
        ).logits

    for example, logits_of_row in zip(examples, logits, strict=True):
        size, document = len(example.input_ids), document_size(example, tokenizer)
        expected = oracle.logits(example.input_ids, slow_mask(example, tokenizer)).detach()
        in_sight = oracle.logits(example.input_ids).detach()
        torch.testing.assert_close(logits_of_row[:size], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            logits_of_row[:document], in_sight[:document], rtol=1e-9, atol=1e-9
        )
        assert (logits_of_row[document:size] - in_sight[document:]).abs().max() > 0.1


def greedy_answer(example, oracle, tokenizer):
    """The example with the two tokens that the dense formula says in place of its answer."""
    mask = slow_mask(example, tokenizer)
    ids = list(example.input_ids[: example.answer_start])
    for _ in range(2):
        logits = oracle.logits(ids, mask[: len(ids), : len(ids)])[-1]
        logits[tokenizer.meta_token_id] = -torch.inf
        logits[len(tokenizer) :] = -torch.inf
        ids.append(int(logits.argmax()))
    return Encoded(input_ids=ids, answer_start=example.answer_start)


@SECOND
def test_scores_are_those_of_greedy_decoding_of_the_dense_formula(second_attention, tokenizer):
    model = model_for(tokenizer, second_attention=second_attention)
    oracle = DenseOracle(model)
    data = TaskData("list_recall", tokenizer=tokenizer, condition="facts_4")
    examples = [data.train(index, 128) for index in range(3)]
    said_by_the_model = [
        greedy_answer(data.train(index, 128), oracle, tokenizer) for index in range(3, 6)
    ]

    exact, tokens = score(
        model,
        examples + said_by_the_model,
        alone=LandmarksAlone(model, tokenizer),
    )
    in_sight, _ = score(model, examples + said_by_the_model)

    assert exact == [False, False, False, True, True, True]
    assert tokens[3:] == [2, 2, 2]
    assert in_sight != exact


@pytest.mark.parametrize("lines", [1, 2, 4, 8])
def test_facts_are_one_item_lists_with_a_landmark_behind_so_many(lines, tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer, condition=f"facts_{lines}")

    numbers_of_facts = set()
    for index in range(60):
        prompt = data.train(index, 128).prompt
        *facts, question = prompt.split("\n")
        assert question.startswith("Q: What is item 1 of ")
        for number, fact in enumerate(facts, start=1):
            assert len(fact.replace(" _PAUSE_", "").split()) == 2
            assert fact.endswith(" _PAUSE_") == (number % lines == 0 or number == len(facts))
        numbers_of_facts.add(len(facts))

    assert numbers_of_facts == set(range(8, 17))


@pytest.mark.parametrize("lines", [1, 8])
def test_no_shortcut_answers_about_facts(lines, tokenizer):
    data = TaskData("list_recall", tokenizer=tokenizer, condition=f"facts_{lines}")
    train = [data.train(index, 128) for index in range(100)]
    test = [data.test(index, 128) for index in range(100)]

    for name, is_right in answers("list_recall", f"facts_{lines}", train, test).items():
        assert sum(is_right) < 30, name


def test_a_question_that_cannot_be_told_apart_is_refused(tokenizer):
    model = model_for(tokenizer)
    prompt = encode_prompt(tokenizer, "no question _PAUSE_", "_PAUSE_")

    with pytest.raises(UserError, match=r"do not show where its question begins\.$"):
        LandmarksAlone(model, tokenizer).start(Encoded(input_ids=prompt, answer_start=len(prompt)))


def test_an_attention_that_takes_no_mask_is_refused(tokenizer):
    model = model_for(tokenizer)
    model.set_attn_implementation("eager")

    with pytest.raises(UserError, match=r"needs attention 'sdpa', and this has 'eager'\.$"):
        LandmarksAlone(model, tokenizer)
