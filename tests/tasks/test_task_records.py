"""Records on disk: what the tasks write is read back, and a user's own records are checked."""

import json

import pytest

from metatokens.data.tokenizer import encode_text
from metatokens.errors import UserError
from metatokens.tasks import curriculum
from metatokens.tasks.example import read_examples
from tests.tasks.conftest import CASES


def write_lines(tmp_path, *lines):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("task", curriculum.TASKS)
def test_examples_survive_the_trip_through_a_file(task, tokenizer, documents, tmp_path):
    examples = [
        curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, seed=3, documents=documents).sample(
            i, 1, "test"
        )
        for own, condition in CASES
        if own == task
        for i in range(10)
    ]
    path = write_lines(tmp_path, *(example.to_record() for example in examples))
    assert read_examples(path, tokenizer) == examples


def test_prompt_and_completion_suffice(tokenizer, tmp_path):
    path = write_lines(tmp_path, {"prompt": "Two and two are", "completion": " four"}, "\n")
    (example,) = read_examples(path, tokenizer)
    prompt, answer = encode_text(tokenizer, ["Two and two are", " four"])
    assert example.input_ids == (*prompt, *answer, tokenizer.eos_token_id)
    assert example.answer_start == example.n_tokens == len(prompt)
    assert example.markers == ()
    assert example.task is None


def test_a_literal_pause_stays_text_unless_markers_name_it(tokenizer, tmp_path):
    prompt = "a _PAUSE_ b _PAUSE_<|endoftext|>"
    path = write_lines(
        tmp_path, {"prompt": prompt, "completion": "c"}, {"prompt": prompt, "completion": "c", "markers": [11]}
    )
    plain, marked = read_examples(path, tokenizer)
    assert plain.input_ids[:-2] == tuple(encode_text(tokenizer, [prompt])[0])
    before, after = encode_text(tokenizer, ["a _PAUSE_ b", "<|endoftext|>"])
    assert marked.input_ids[:-2] == (*before, tokenizer.meta_token_id, *after)
    assert marked.prompt == prompt
    assert plain.input_ids.count(tokenizer.eos_token_id) == marked.input_ids.count(tokenizer.eos_token_id) == 1


def test_ids_in_a_record_are_computed_afresh(tokenizer, tmp_path):
    record = {"prompt": "a", "completion": "b", "input_ids": [5], "answer_start": 9, "n_tokens": 9}
    (example,) = read_examples(write_lines(tmp_path, record), tokenizer)
    assert example.answer_start == 1
    assert len(example.input_ids) == 3


GOOD = {"prompt": "a", "completion": "b"}


def test_a_line_of_any_white_space_holds_no_record(tokenizer, tmp_path):
    line = '{"prompt": "one", "completion": " two"}\n'
    (tmp_path / "a.jsonl").write_text(f"\u00a0\n{line}\u3000 \n", encoding="utf-8")
    assert len(read_examples(tmp_path / "a.jsonl", tokenizer)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{\n", "Invalid JSON"),
        ("[]\n", "object"),
        ({"prompt": "a"}, "completion of record 2 is missing or empty"),
        ({**GOOD, "completion": ""}, "completion of record 2 is missing or empty"),
        ({**GOOD, "prompt": 3}, "prompt: .*string"),
        ({**GOOD, "phase": "1"}, "phase: .*integer"),
        ({**GOOD, "condition": "bars"}, "condition: .*paper"),
        ({**GOOD, "answer": "b"}, "answer: Extra inputs are not permitted"),
        ({**GOOD, "markers": [0]}, "offset 0"),
        ({**GOOD, "prompt": "a _PAUSE_", "markers": [1, 1]}, "offset 1"),
        ({**GOOD, "prompt": " _PAUSE_", "markers": [-8]}, "offset -8"),
        ('{"prompt": "\\ud800", "completion": "b"}\n', "Invalid JSON"),
    ],
)
def test_a_bad_record_is_named_by_its_line(line, reason, tokenizer, tmp_path):
    path = write_lines(tmp_path, GOOD, line)
    with pytest.raises(UserError, match=rf"records\.jsonl(, line 2)?: .*{reason}"):
        read_examples(path, tokenizer)
