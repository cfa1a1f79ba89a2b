"""The blocks cut from a token store."""

import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from metatokens.data import blocks
from metatokens.data.blocks import BlockDataset
from metatokens.data.landmarks import Landmarks
from metatokens.errors import UserError
from tests.data.small_corpora import text_of

META = 300


def make_dataset(store, **changes):
    settings = {
        "block_size": 40,
        "fraction": 0.1,
        "placement": "uniform",
        "seed": 0,
    } | changes
    return BlockDataset(store, "train", **settings)


def windows_of(ids, size):
    """The whole windows of a list of ids, one after the other."""
    starts = range(0, len(ids) - size + 1, size)
    return [tuple(ids[start : start + size]) for start in starts]


def as_lists(item):
    return item["input_ids"].tolist(), item["labels"].tolist()


def read(dataset, indices=None):
    """The ids and labels of some items, or of all."""
    return [as_lists(dataset[index]) for index in indices or range(len(dataset))]


def slow_labels(ids):
    """The text tokens but the first."""
    labels, is_first = [], True
    for token in ids:
        labels.append(-100 if token == META or is_first else token)
        is_first &= token == META
    return labels


@pytest.mark.parametrize(("placement", "window"), [("uniform", 36), ("periodic", 36), ("none", 40)])
def test_an_epoch_holds_every_window_once(store, placement, window):
    windows = windows_of(store.tokens("train")[:].tolist(), window)
    size = len(windows)

    dataset = make_dataset(store, placement=placement, epochs=2)

    assert len(dataset) == 2 * size
    first = [text_of(dataset[index]) for index in range(size)]
    second = [text_of(dataset[index]) for index in range(size, 2 * size)]
    assert Counter(first) == Counter(second) == Counter(windows)
    assert windows != first != second
    item = dataset[0]
    assert item["input_ids"].dtype == item["labels"].dtype == np.int64
    assert len(item["input_ids"]) == 40
    assert item["labels"].tolist() == slow_labels(item["input_ids"].tolist())


@pytest.mark.parametrize("rule", ["line", "every:7"])
@pytest.mark.parametrize(("stretch", "stretches"), [(1024, 2**20), (1, 9)])
def test_blocks_by_a_rule_hold_the_text_with_its_landmarks_once_an_epoch(
    rule, stretch, stretches, sharded_store, monkeypatch
):
    monkeypatch.setattr(blocks, "STRETCH", stretch)
    monkeypatch.setattr(blocks, "STRETCHES", stretches)
    text = sharded_store.tokens("train")[:].tolist()
    windows = windows_of(Landmarks(sharded_store.tokenizer, rule).insert_into(text), 40)
    size = len(windows)

    dataset = make_dataset(sharded_store, placement=rule, epochs=2)

    items = read(dataset)
    first, second = items[:size], items[size:]
    assert len(items) == 2 * size
    first_windows = Counter(tuple(ids) for ids, _ in first)
    assert first_windows == Counter(windows)
    second_windows = Counter(tuple(ids) for ids, _ in second)
    assert second_windows == Counter(windows)
    assert first != second
    for ids, labels in items:
        assert labels == slow_labels(ids)
    fresh = make_dataset(sharded_store, placement=rule, epochs=2)
    assert as_lists(fresh[size + 3]) == items[size + 3]
    assert as_lists(fresh[5]) == items[5]


def test_an_item_depends_on_its_index_alone(store):
    items = read(make_dataset(store, epochs=3))
    size = len(items) // 3
    fewer_epochs = make_dataset(store, epochs=2)

    assert read(fewer_epochs, range(size + 7, 2 * size)) == items[size + 7 : 2 * size]
    backwards = read(fewer_epochs, range(2 * size - 1, -1, -1))
    assert backwards[::-1] == items[: 2 * size]
    assert as_lists(fewer_epochs[-1]) == items[2 * size - 1]
    with pytest.raises(IndexError):
        fewer_epochs[2 * size]


READ_FIRST = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    dataset = pickle.load(file)
print(dataset[0]["input_ids"].tolist())
assert "torch" not in sys.modules
"""


# With landmarks a worker gets the vocabulary's pieces.
@pytest.mark.parametrize(("placement", "most_bytes"), [("uniform", 1000), ("line", 10_000)])
def test_a_worker_receives_a_path_and_needs_no_torch(placement, most_bytes, store, tmp_path):
    dataset = make_dataset(store, placement=placement)
    first = dataset[0]["input_ids"].tolist()  # the file is open now

    (tmp_path / "dataset.pickle").write_bytes(pickle.dumps(dataset))

    assert (tmp_path / "dataset.pickle").stat().st_size < most_bytes
    worker = [sys.executable, "-c", READ_FIRST, str(tmp_path / "dataset.pickle")]
    printed = subprocess.run(worker, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(first)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"block_size": 9},
            r"a block of 9 with a fraction 0\.1 of meta-tokens has none of them",
        ),
        ({"placement": "often"}, "often"),
        (
            {"placement": "every:99999"},
            "the rule every:99999 inserts no meta-token into the train split",
        ),
        (
            {"placement": "line", "block_size": 100_000},
            "tokens, too few for one block of 100000",
        ),
        (
            {"block_size": 100_000},
            "train split .* tokens, too few for one block of 100000",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range(store, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        make_dataset(store, **changes)
