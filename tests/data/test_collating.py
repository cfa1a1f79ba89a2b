"""Meta-tokens put in as a batch is made."""

import pytest
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
    (made,) = collator([{"input_ids": [1, 2], "text": "ab", "weight": 0.5, "images": [1, 2, 3]}])
    assert made == {"input_ids": [1, 2, META], "text": "ab", "weight": 0.5, "images": [1, 2, 3]}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="every is 0; it must be at least 1"):
        MetaTokenCollator(list, META, 0)
    with pytest.raises(UserError, match="packed into one"):
        MetaTokenCollator(list, META, 2)([{"input_ids": [1, 2], "position_ids": [0, 0]}])
