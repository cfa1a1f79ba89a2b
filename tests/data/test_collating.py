"""Meta-tokens put in as a batch is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from metatokens import MetaTokenCollator
from metatokens.data.tokenizer import META_TOKEN
from metatokens.errors import UserError

META = 99
TOKENS = {f"t{number}": number for number in range(90)} | {". ": 90, "\n": 91, "</s>": 92}
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(TOKENS | {META_TOKEN: META})), eos_token="</s>", meta_token=META_TOKEN
)


@given(ids=st.lists(st.integers(0, 50), max_size=30), every=st.integers(1, 7))
def test_one_behind_every_so_many(ids: list[int], every: int) -> None:
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, f"every:{every}")
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
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, "every:2")
    others = {"text": "ab", "weight": 0.5, "images": [1, 2, 3], "words": ["a", "b"], "messages": [{}, {}]}
    (made,) = collator([{"input_ids": [1, 2], **others}])
    assert made == {"input_ids": [1, 2, META], **others}


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_numbers_with_a_point_keep_it(make: Callable[[list[float]], Any]) -> None:
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, "every:2")
    (made,) = collator([{"input_ids": make([1, 2, 3]), "advantages": make([0.5, 0.25, 1.0])}])
    assert made == {"input_ids": [1, 2, META, 3], "advantages": [0.5, 0.25, 0, 1.0]}


@pytest.mark.parametrize(("rule", "ids"), [("every:2", [1, 2, META, 3, META]), (None, [1, 2, 3, META])])
def test_labels_that_a_collator_makes_are_no_meta_tokens(rule: str | None, ids: list[int]) -> None:
    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        given = torch.tensor([example["input_ids"] for example in examples])
        return {"input_ids": given, "labels": given}

    batch = MetaTokenCollator(collate, TOKENIZER, rule)([{"input_ids": [1, 2, 3, META]}])
    assert batch["input_ids"].tolist() == [ids]
    assert batch["labels"].tolist() == [[-100 if id_ == META else id_ for id_ in ids]]


def test_landmarks_by_structure_in_all_fields_of_a_row() -> None:
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, "line")
    row = {"input_ids": [1, 91, 91, 2, 91, 3, 92], "labels": [-100, 91, 91, 2, 91, 3, 92], "weights": [0.5] * 7}
    (made,) = collator([row])
    assert made["input_ids"] == [1, 91, META, 91, 2, 91, META, 3, 92]
    assert made["labels"] == [-100, 91, -100, 91, 2, 91, -100, 3, 92]
    assert made["weights"] == [0.5, 0.5, 0, 0.5, 0.5, 0.5, 0, 0.5, 0.5]


@pytest.mark.parametrize("rule", ["line", "paragraph", "sentence", "every:2"])
@pytest.mark.parametrize("make", [list, torch.tensor])
@pytest.mark.parametrize("padding", [92, 91])  # a control token, as mostly; and one that could end a line
def test_padding_has_no_landmarks_and_moves_none(padding: int, make: Callable[[list[int]], Any], rule: str) -> None:
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, rule)
    ids, padded = [1, 90, 2, 91, 91, 3, 90], {"input_ids": padding, "labels": -100, "attention_mask": 0, "weights": 0}
    row = {"input_ids": ids, "labels": ids, "attention_mask": [1] * 7, "weights": [2] * 7}
    (expected,) = collator([row])
    assert META in expected["input_ids"]
    for left, right in ((5, 0), (0, 5), (3, 2)):
        around = {name: ([value] * left, [value] * right) for name, value in padded.items()}
        (made,) = collator([{name: make(around[name][0] + row[name] + around[name][1]) for name in row}])
        assert made == {name: around[name][0] + expected[name] + around[name][1] for name in row}


def test_rows_with_landmarks_are_cut_to_a_length() -> None:
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, "every:2", max_length=4)
    made = collator([{"input_ids": ids, "labels": ids, "weight": 1} for ids in ([1, 2, 3, 4], [1, 2, 3], [1])])
    assert [row["input_ids"] for row in made] == [[1, 2, META, 3], [1, 2, META, 3], [1]]
    assert [row["labels"] for row in made] == [[1, 2, -100, 3], [1, 2, -100, 3], [1]]
    padded = {"input_ids": [0, 0, 0, 1, 2, 3, 0], "attention_mask": [0, 0, 0, 1, 1, 1, 0]}
    assert collator([padded]) == [{"input_ids": [1, 2, META, 3], "attention_mask": [1, 1, 1, 1]}]
    collator.max_length = 6
    assert collator([padded]) == [{"input_ids": [0, 1, 2, META, 3, 0], "attention_mask": [0, 1, 1, 1, 1, 0]}]


def test_what_cannot_be_is_refused() -> None:
    for rule in ("every:0", "word", 8):
        with pytest.raises(UserError, match=f"rule for landmarks is {rule!r}: give line, paragraph, sentence or"):
            MetaTokenCollator(list, TOKENIZER, rule)  # type: ignore[arg-type]
    for no_tokenizer in (META, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(TOKENS)))):
        with pytest.raises(UserError, match="no meta-token: use the one that add_meta_attention was given"):
            MetaTokenCollator(list, no_tokenizer, "every:2")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has position_ids, which landmarks would shift"):
        MetaTokenCollator(list, TOKENIZER, "every:2")([{"input_ids": [1, 2], "position_ids": [0, 0]}])


def test_each_packed_sequence_has_its_own_landmarks() -> None:
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    row = {
        "input_ids": [id_ for ids in sequences for id_ in ids],
        "labels": list(range(9)),
        "seq_lengths": [3, 1, 5],
        "weight": 0.5,
    }
    collator = MetaTokenCollator(lambda examples: examples, TOKENIZER, "every:2", max_length=6)
    apart = collator([{"input_ids": ids, "labels": [id_ - 1 for id_ in ids]} for ids in sequences])
    (made,) = collator([row])
    assert made == {
        "input_ids": [id_ for one in apart for id_ in one["input_ids"]],
        "labels": [label for one in apart for label in one["labels"]],
        "seq_lengths": [4, 1, 6],
        "weight": 0.5,
    }


def test_pairs_of_answers_are_refused_with_what_to_do() -> None:
    pairs = [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}]
    with pytest.raises(
        UserError, match=r"no input_ids, but prompt_ids, chosen_ids, rejected_ids: .*insert_into\(ids\)"
    ):
        MetaTokenCollator(list, TOKENIZER, "every:8")(pairs)
    assert MetaTokenCollator(list, TOKENIZER)(pairs) == pairs
