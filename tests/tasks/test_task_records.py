"""Records on disk: what the tasks write is read back, and a user's own records are checked."""

import json

import pytest

from metatokens.data.tokenizer import encode_text, load_tokenizer
from metatokens.errors import UserError
from metatokens.tasks.curriculum import TASKS, TaskData
from metatokens.tasks.example import read_examples
from tests.data.small_corpora import save_word_level

GOOD = {"prompt": "a", "completion": "b"}


def write_lines(folder, *records):
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("task", TASKS)
def test_examples_survive_the_trip_through_a_file(task, tokenizer, documents, tmp_path):
    examples = []
    for condition in ("paper", "landmark", "decoy"):
        data = TaskData(task, tokenizer=tokenizer, condition=condition, seed=3, documents=documents)
        examples += [data.sample(index, 1, "test") for index in range(10)]

    path = write_lines(tmp_path, *(example.to_record() for example in examples))

    for example, again in zip(examples, read_examples(path, tokenizer), strict=True):
        assert again.prompt == example.prompt
        assert again.markers == example.markers
        assert again.input_ids == example.input_ids
        assert again.answer_start == example.answer_start


def test_prompt_and_completion_suffice(tokenizer, tmp_path):
    [example] = read_examples(
        write_lines(tmp_path, {"prompt": "Two and two are", "completion": " four"}),
        tokenizer,
    )

    prompt, answer = encode_text(tokenizer, ["Two and two are", " four"])
    assert example.input_ids == (*prompt, *answer, tokenizer.eos_token_id)
    assert example.answer_start == example.n_tokens == len(prompt)
    assert example.markers == ()
    assert example.task is None


def test_a_literal_pause_stays_text_unless_markers_name_it(tokenizer, tmp_path):
    record = {"prompt": "a _PAUSE_ b _PAUSE_<|endoftext|>", "completion": "c"}

    plain, marked = read_examples(
        write_lines(tmp_path, record, record | {"markers": [11]}), tokenizer
    )

    whole, before, after = encode_text(
        tokenizer, [record["prompt"], "a _PAUSE_ b", "<|endoftext|>"]
    )
    assert plain.input_ids[:-2] == tuple(whole)
    assert marked.input_ids[:-2] == (*before, tokenizer.meta_token_id, *after)
    assert marked.prompt == record["prompt"]
    assert (
        plain.input_ids.count(tokenizer.eos_token_id)
        == marked.input_ids.count(tokenizer.eos_token_id)
        == 1
    )


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"prompt": "a"},
        {**GOOD, "completion": ""},
        {**GOOD, "prompt": 3},
        {**GOOD, "answer": "b"},
        {**GOOD, "markers": [0]},
        {**GOOD, "prompt": "a _PAUSE_", "markers": [1, 1]},
        {**GOOD, "prompt": " _PAUSE_", "markers": [-8]},
    ],
    ids=str,
)
def test_a_bad_record_is_refused(record, tokenizer, tmp_path):
    path = write_lines(tmp_path, GOOD, record)

    with pytest.raises(UserError, match=r"records\.jsonl"):
        read_examples(path, tokenizer)


@pytest.mark.parametrize(
    ("prompt", "completion"), [(" ", "w3"), ("w3", "\n")], ids=["prompt", "completion"]
)
def test_a_text_without_tokens_is_refused(prompt, completion, tmp_path):
    words = load_tokenizer(save_word_level(tmp_path / "words", 9))
    path = write_lines(tmp_path, {"prompt": prompt, "completion": completion})

    with pytest.raises(UserError, match="the tokenizer has no token for the prompt or the comple"):
        read_examples(path, words)
