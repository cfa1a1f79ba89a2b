"""Meta-tokens put in as a batch is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metatokens import MetaTokenCollator
from metatokens.errors import UserError

META = 99


@given(ids=st.lists(st.integers(0, 50), max_size=30), every=st.integers(1, 7))
def test_one_behind_every_so_many(ids: list[int], every: int) -> None:
    collator = MetaTokenCollator(lambda examples: examples, META, every)
    labels, mask = [id_ + 1 for id_ in ids], [id_ % 2 for id_ in ids]
    (made,) = collator(
        [{"input_ids": ids, "labels": labels, "completion_mask": mask, "attention_mask": [1] * len(ids)}]
    )
    expected: dict[str, list[int]] = {"input_ids": [], "labels": [], "completion_mask": [], "attention_mask": []}
    for place, id_ in enumerate(ids, start=1):
        rows = [(id_, id_ + 1, id_ % 2, 1)]
        if place % every == 0:
            rows.append((META, -100, 0, 1))
        for row in rows:
            for values, value in zip(expected.values(), row, strict=True):
                values.append(value)
    assert made == expected


def test_other_fields_are_left() -> None:
    collator = MetaTokenCollator(lambda examples: examples, META, 2)
    others = {"text": "ab", "weight": 0.5, "images": [1, 2, 3], "words": ["a", "b"], "messages": [{}, {}]}
    (made,) = collator([{"input_ids": [1, 2], **others}])
    assert made == {"input_ids": [1, 2, META], **others}


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_numbers_with_a_point_keep_it(make: Callable[[list[float]], Any]) -> None:
    collator = MetaTokenCollator(lambda examples: examples, META, 2)
    (made,) = collator([{"input_ids": make([1, 2, 3]), "advantages": make([0.5, 0.25, 1.0])}])
    assert made == {"input_ids": [1, 2, META, 3], "advantages": [0.5, 0.25, 0, 1.0]}


@pytest.mark.parametrize(("every", "ids"), [(2, [1, 2, META, 3, META, META]), (None, [1, 2, 3, META])])
def test_labels_that_a_collator_makes_are_no_meta_tokens(every: int | None, ids: list[int]) -> None:
    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        given = torch.tensor([example["input_ids"] for example in examples])
        return {"input_ids": given, "labels": given}

    batch = MetaTokenCollator(collate, META, every)([{"input_ids": [1, 2, 3, META]}])
    assert batch["input_ids"].tolist() == [ids]
    assert batch["labels"].tolist() == [[-100 if id_ == META else id_ for id_ in ids]]


def test_what_cannot_be_is_refused() -> None:
    for every in (0, 2.5):
        with pytest.raises(UserError, match=f"every is {every}; it must be a whole number, at least 1"):
            MetaTokenCollator(list, META, every)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="meta_token_id is None; give that of a tokenizer with a meta-token"):
        MetaTokenCollator(list, None, 2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="packed into one"):
        MetaTokenCollator(list, META, 2)([{"input_ids": [1, 2], "position_ids": [0, 0]}])
