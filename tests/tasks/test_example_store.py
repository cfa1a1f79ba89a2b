"""Encoded examples on disk."""

from pathlib import Path

import numpy as np
import pytest

from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.example_store import ExampleStore


def test_examples_come_back(small_store: TokenStore, tmp_path: Path) -> None:
    source = TaskData("list_recall", tokenizer=small_store.tokenizer)
    examples = [source.train(index, 256) for index in range(30)]
    written = ExampleStore.write(tmp_path / "deep" / "a.arrow", examples)
    for store in (written, ExampleStore(tmp_path / "deep" / "a.arrow")):
        assert len(store) == 30
        for stored, example in zip(store, examples, strict=True):
            assert tuple(stored.input_ids.tolist()) == example.input_ids
            assert stored.answer_start == example.answer_start
        assert [one.answer_start for one in store[3:9:2]] == [example.answer_start for example in examples[3:9:2]]
        assert np.array_equal(store[-1].input_ids, examples[-1].input_ids)
        with pytest.raises(IndexError):
            store[30]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.arrow"]


def test_nothing_appears_when_drawing_fails(tmp_path: Path) -> None:
    def failing():
        yield from ()
        raise UserError("no prompt was found.")

    with pytest.raises(UserError, match="no prompt"):
        ExampleStore.write(tmp_path / "a.arrow", failing())
    assert not (tmp_path / "a.arrow").exists()


@pytest.mark.parametrize("content", [b"", b"not an arrow file", None])
def test_another_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.arrow is no file of encoded examples"):
        ExampleStore(tmp_path / "a.arrow")
