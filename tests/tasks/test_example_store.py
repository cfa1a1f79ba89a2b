"""Encoded examples on disk."""

import pytest

from metatokens.errors import UserError
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.example_store import ExampleStore


def test_examples_come_back(small_store, tmp_path):
    source = TaskData("list_recall", tokenizer=small_store.tokenizer)
    examples = [source.train(index, 256) for index in range(30)]

    written = ExampleStore.write(tmp_path / "deep" / "a.arrow", examples)

    read = ExampleStore(tmp_path / "deep" / "a.arrow")
    assert len(written) == len(read) == 30
    for example, *stored in zip(examples, written, read, strict=True):
        for copy in stored:
            assert tuple(copy.input_ids.tolist()) == example.input_ids
            assert copy.answer_start == example.answer_start
    names = [path.name for path in (tmp_path / "deep").iterdir()]
    assert names == ["a.arrow"]


def test_nothing_appears_when_drawing_fails(tmp_path):
    def failing():
        yield from ()
        raise UserError("no prompt was found.")

    with pytest.raises(UserError, match="no prompt"):
        ExampleStore.write(tmp_path / "a.arrow", failing())

    assert not (tmp_path / "a.arrow").exists()


def test_another_file_is_refused(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"not an arrow file")

    with pytest.raises(UserError, match=r"a\.arrow"):
        ExampleStore(tmp_path / "a.arrow")
