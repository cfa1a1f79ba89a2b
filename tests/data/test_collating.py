"""Meta-tokens put in as a batch is made."""

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
WORDS = {f"t{number}": number for number in range(90)}
TOKENS = WORDS | {". ": 90, "\n": 91, "</s>": 92}
BACKEND = Tokenizer(WordLevel(TOKENS | {META_TOKEN: META}))
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=BACKEND, eos_token="</s>", meta_token=META_TOKEN
)
Row = dict[str, Any]


def collate(rows, rule):
    """The rows with landmarks, which another collator would make a batch of."""
    collator = MetaTokenCollator(lambda rows: rows, TOKENIZER, rule)
    return collator(rows)


@given(ids=st.lists(st.integers(0, 50), max_size=30), every=st.integers(1, 7))
def test_one_behind_every_so_many(ids, every):
    expected: Row = {
        "input_ids": [],
        "labels": [],
        "completion_mask": [],
        "attention_mask": [],
    }
    for count, token in enumerate(ids, start=1):
        expected["input_ids"].append(token)
        expected["labels"].append(token + 1)
        expected["completion_mask"].append(token % 2)
        expected["attention_mask"].append(1)
        if count % every == 0:
            expected["input_ids"].append(META)
            expected["labels"].append(-100)
            expected["completion_mask"].append(0)
            expected["attention_mask"].append(1)
    row = {
        "input_ids": ids,
        "labels": [token + 1 for token in ids],
        "completion_mask": [token % 2 for token in ids],
        "attention_mask": [1] * len(ids),
    }

    assert collate([row], f"every:{every}") == [expected]


@pytest.mark.parametrize(
    ("rule", "ids"), [("every:2", [1, 2, META, 3, META]), (None, [1, 2, 3, META])]
)
def test_labels_that_a_collator_makes_are_no_meta_tokens(rule, ids):
    def with_labels(rows):
        input_ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": input_ids, "labels": input_ids}

    batch = MetaTokenCollator(with_labels, TOKENIZER, rule)([{"input_ids": [1, 2, 3, META]}])

    labels = [-100 if token == META else token for token in ids]
    assert batch["input_ids"].tolist() == [ids]
    assert batch["labels"].tolist() == [labels]


@pytest.mark.parametrize("rule", ["line", "paragraph", "sentence", "every:2"])
# A control token, as mostly; and one that could end a line.
@pytest.mark.parametrize("padding", [92, 91])
@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (3, 2)])
def test_padding_has_no_landmarks_and_moves_none(left, right, padding, rule):
    ids = [1, 90, 2, 91, 91, 3, 90]
    row = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": [1] * 7,
        "weights": [2] * 7,
    }
    padding_of = {
        "input_ids": padding,
        "labels": -100,
        "attention_mask": 0,
        "weights": 0,
    }

    def padded(row):
        return {
            name: left * [padding_of[name]] + values + right * [padding_of[name]]
            for name, values in row.items()
        }

    [unpadded] = collate([row], rule)

    assert META in unpadded["input_ids"]
    assert collate([padded(row)], rule) == [padded(unpadded)]


def test_no_mask_hides_nothing():
    row = {"input_ids": [1, 2, 3], "attention_mask": None}

    assert collate([row], "every:2") == [{"input_ids": [1, 2, META, 3], "attention_mask": None}]


def test_a_batch_in_place_of_a_text_is_refused():
    with pytest.raises(UserError, match="landmarks go into the ids of one text"):
        collate([{"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}], "every:2")


@pytest.mark.parametrize("name", ["position_ids", "seq_lengths"])
def test_numbers_that_landmarks_would_shift_are_refused(name):
    with pytest.raises(UserError, match="would shift position_ids and seq_lengths"):
        collate([{"input_ids": [1, 2], name: [1, 1]}], "every:2")


def test_pairs_of_answers_are_refused_with_what_to_do():
    pairs = [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}]
    sentence = r"has prompt_ids, chosen_ids, rejected_ids: .* need input_ids.*insert_into\(ids\)"

    with pytest.raises(UserError, match=sentence):
        collate(pairs, "every:8")
    assert MetaTokenCollator(list, TOKENIZER)(pairs) == pairs
