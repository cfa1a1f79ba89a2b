"""Token ids of examples: those of the segments, the meta-tokens between them, the answer and the end of text."""

import pytest

from metatokens.data.tokenizer import encode_text
from metatokens.tasks.curriculum import TaskData
from tests.tasks.conftest import CASES


@pytest.mark.parametrize(("task", "condition"), CASES)
def test_example_ids_are_its_segments_meta_tokens_answer_and_end(
    task, condition, tokenizer, documents
):
    data = TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    for index in range(30):
        example = data.sample(index, 1 + index % 5, "train")

        expected, start = [], 0
        for offset in example.markers:
            assert example.prompt[offset : offset + 8] == " _PAUSE_"
            [segment] = encode_text(tokenizer, [example.prompt[start:offset]])
            expected += [*segment, tokenizer.meta_token_id]
            start = offset + 8
        assert start == len(example.prompt), "the prompt ends with a meta-token"
        assert example.input_ids[: example.answer_start] == tuple(expected)
        assert example.n_tokens == example.answer_start == len(expected)
        *answer, end = example.input_ids[example.answer_start :]
        assert end == tokenizer.eos_token_id
        assert tokenizer.decode(answer) == example.completion
        if task == "copying" and condition in ("paper", "decoy"):
            first = expected.index(tokenizer.meta_token_id) + 1
            assert expected[first : first + len(answer)] == answer, (
                "the answer has the ids of the bracketed text"
            )
