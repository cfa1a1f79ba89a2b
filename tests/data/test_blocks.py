"""The blocks cut from a token store."""

import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from metatokens.data import blocks
from metatokens.data.blocks import BlockDataset
from metatokens.data.landmarks import Landmarks
from metatokens.errors import UserError
from tests.data.small_corpora import text_of


def make_dataset(store, **changes):
    settings = {"block_size": 40, "fraction": 0.1, "placement": "uniform", "seed": 0} | changes
    return BlockDataset(store, "train", **settings)


@pytest.mark.parametrize(
    ("placement", "window"), [("uniform", 36), ("periodic", 36), ("none", 40)], ids=lambda value: str(value)
)
def test_an_epoch_holds_every_window_once(store, placement, window):
    ids = store.tokens("train")[:].tolist()
    windows = [tuple(ids[start : start + window]) for start in range(0, len(ids) - window + 1, window)]
    dataset = make_dataset(store, placement=placement, epochs=3)
    n = len(windows)
    assert len(dataset) == 3 * n
    epochs = [[text_of(dataset[e * n + j]) for j in range(n)] for e in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(windows)
    assert windows != epochs[0] != epochs[1] != epochs[2]
    item = dataset[0]
    assert item["input_ids"].shape == item["labels"].shape == (40,)
    assert item["input_ids"].dtype == item["labels"].dtype == np.int64
    assert (item["input_ids"] == 300).sum() == 40 - window
    assert (item["labels"] != -100).sum() == window - 1


@pytest.mark.parametrize("rule", ["line", "every:7"])
@pytest.mark.parametrize("sizes", [(1024, 2**20), (16, 2**20), (1, 9)], ids=str)
def test_blocks_by_a_rule_hold_the_text_with_its_landmarks_once_an_epoch(rule, sizes, sharded_store, monkeypatch):
    monkeypatch.setattr(blocks, "STRETCH", sizes[0])
    monkeypatch.setattr(blocks, "STRETCHES", sizes[1])
    ids = sharded_store.tokens("train")[:].tolist()
    whole = Landmarks(sharded_store.tokenizer, rule).insert_into(ids)
    windows = [tuple(whole[start : start + 40]) for start in range(0, len(whole) - 39, 40)]
    dataset = make_dataset(sharded_store, placement=rule, epochs=2)
    n = len(windows)
    assert len(dataset) == 2 * n
    items = [dataset[index] for index in range(2 * n)]
    for epoch in (items[:n], items[n:]):
        assert Counter(tuple(item["input_ids"].tolist()) for item in epoch) == Counter(windows)
    assert [item["input_ids"].tolist() for item in items[:n]] != [item["input_ids"].tolist() for item in items[n:]]
    counts = {(item["input_ids"] == 300).sum() for item in items}
    assert len(counts) > 1 or rule == "every:7"
    for item in items:
        assert item["input_ids"].dtype == item["labels"].dtype == np.int64
        is_text = item["input_ids"] != 300
        first = np.flatnonzero(is_text)[0]
        expected = np.where(is_text & (np.arange(40) != first), item["input_ids"], -100)
        assert item["labels"].tolist() == expected.tolist()
    assert everything(make_dataset(sharded_store, placement=rule, seed=0, epochs=2), [n + 3, 5]) == [
        (items[index]["input_ids"].tolist(), items[index]["labels"].tolist()) for index in (n + 3, 5)
    ]


def test_a_text_of_any_length_is_counted_in_as_much_memory(store, monkeypatch):
    monkeypatch.setattr(blocks, "STRETCH", 8)
    monkeypatch.setattr(blocks, "STRETCHES", 50)
    dataset = make_dataset(store, placement="line")
    assert len(store.tokens("train")) > 5_000
    assert len(dataset._tokens._starts) <= 51


def everything(dataset, indices=None):
    return [
        (item["input_ids"].tolist(), item["labels"].tolist())
        for item in (dataset[i] for i in (range(len(dataset)) if indices is None else indices))
    ]


def test_an_item_depends_on_its_index_alone(store):
    long = everything(make_dataset(store, epochs=3))
    n = len(long) // 3
    assert everything(make_dataset(store, epochs=1)) == long[:n]
    resumed = make_dataset(store, epochs=2)
    assert everything(resumed, range(n + 7, 2 * n)) == long[n + 7 : 2 * n]
    backwards = everything(resumed, reversed(range(2 * n)))
    assert backwards[::-1] == long[: 2 * n]
    assert everything(resumed, [-1]) == [long[2 * n - 1]]
    with pytest.raises(IndexError):
        resumed[2 * n]


def test_meta_tokens_differ_between_epochs_and_seeds(store):
    def meta_positions_by_text(dataset, epoch):
        n = len(dataset) // 2
        items = (dataset[i] for i in range(epoch * n, (epoch + 1) * n))
        return {text_of(item): tuple(np.flatnonzero(item["input_ids"] == 300)) for item in items}

    dataset = make_dataset(store, epochs=2)
    first, second = meta_positions_by_text(dataset, 0), meta_positions_by_text(dataset, 1)
    other = meta_positions_by_text(make_dataset(store, seed=1, epochs=2), 0)
    assert first.keys() == second.keys() == other.keys()
    assert sum(first[text] == second[text] for text in first) < len(first) / 10
    assert sum(first[text] == other[text] for text in first) < len(first) / 10
    assert len(set(first.values())) > len(first) / 2


def test_every_window_is_as_likely_at_any_place(store):
    ids = store.tokens("train")[:].tolist()
    size = len(ids) // 10
    windows = {tuple(ids[start : start + size]): k for k, start in enumerate(range(0, 10 * size, size))}
    settings = {"block_size": size, "placement": "none"}
    draws = 1000
    for place in (0, 5):
        seen = Counter(
            windows[tuple(make_dataset(store, seed=seed, **settings)[place]["input_ids"].tolist())]
            for seed in range(draws)
        )
        statistic = sum((seen[k] - draws / 10) ** 2 / (draws / 10) for k in range(10))
        assert 0.001 < chi2.sf(statistic, 9) < 0.999


@pytest.mark.parametrize(("placement", "most"), [("uniform", 1000), ("line", 10_000)])  # with the vocabulary's pieces
def test_a_worker_receives_a_path_and_needs_no_torch(placement, most, store, tmp_path):
    dataset = make_dataset(store, placement=placement)
    first = dataset[0]["input_ids"].tolist()  # the file is open now
    pickled = pickle.dumps(dataset)
    assert len(pickled) < most
    (tmp_path / "dataset.pickle").write_bytes(pickled)
    code = """if True:
        import pickle, sys
        with open(sys.argv[1], "rb") as file:
            dataset = pickle.load(file)
        print(dataset[0]["input_ids"].tolist())
        assert "torch" not in sys.modules
    """
    worker = [sys.executable, "-c", code, str(tmp_path / "dataset.pickle")]
    assert subprocess.run(worker, check=True, capture_output=True, text=True).stdout.strip() == str(first)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fraction": 0.6}, r"0\.6"),
        ({"block_size": 9}, r"a block of 9 with a fraction 0\.1 of meta-tokens has none of them"),
        ({"fraction": -0.1, "placement": "none"}, r"-0\.1"),
        ({"placement": "often"}, "often"),
        ({"placement": "every:0"}, "every:0"),
        ({"placement": "every:99999"}, "the rule every:99999 inserts no meta-token into the train split"),
        ({"placement": "line", "block_size": 100_000}, "tokens, and a block takes 100000"),
        ({"block_size": 100_000}, r"train split .* TOKENS tokens, and a block takes 90000"),
    ],
)
def test_settings_out_of_range(store, changes, sentence):
    with pytest.raises(UserError, match=sentence.replace("TOKENS", str(len(store.tokens("train"))))):
        make_dataset(store, **changes)
