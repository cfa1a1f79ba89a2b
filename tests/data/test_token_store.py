"""The token store as it is read, whole and damaged."""

import os
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from tests.data.small_corpora import documents_of, flip_a_bit, make_documents, shards_of


def hash_of(path):
    return sha256(path.read_bytes()).hexdigest()


def ids_in(path):
    """The ids of a shard, read by numpy alone."""
    return np.fromfile(path, np.uint16).tolist()


def test_the_splits_hold_every_document_once_in_order(store):
    documents = make_documents(400)

    train, held_out = documents_of(store, "train"), documents_of(store, "held_out")

    assert sorted(train + held_out) == sorted(documents)
    train_in_order = [text for text in documents if text in set(train)]
    assert train == train_in_order
    held_out_in_order = [text for text in documents if text in set(held_out)]
    assert held_out == held_out_in_order
    assert 0.1 < len(held_out) / 400 < 0.3


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("kind", ["store", "stored_in_shards"])
def test_the_manifest_counts_what_the_files_hold(kind, split, request):
    store = request.getfixturevalue(kind)
    counts = store.manifest.splits[split]

    documents = documents_of(store, split)
    files = shards_of(store, split)
    ids = [token for path in files for token in ids_in(path)]

    assert counts.documents == len(documents)
    assert counts.characters == sum(map(len, documents))
    assert counts.tokens == len(ids) - len(documents)
    assert ids == store.tokens(split)[:].tolist()
    assert sorted(files) == sorted((store.path / split).iterdir())
    sums = [shard.sha256 for shard in counts.shards]
    hashes = [hash_of(path) for path in files]
    assert sums == hashes


@given(st.slices(3000))
def test_slices_are_those_of_a_list(store, stored_in_shards, window):
    window = slice(window.start, window.stop)
    expected = store.tokens("train")[:].tolist()[window]

    for tokens in (store.tokens("train"), stored_in_shards.tokens("train")):
        assert tokens[window].tolist() == expected
        assert tokens[window].dtype == np.int64


# --- integrity


def test_no_shard_stays_open(stored_in_shards):
    open_before = len(os.listdir("/dev/fd"))
    text = stored_in_shards.tokens("train")
    assert len(text[:]) > len(shards_of(stored_in_shards, "train")) > 10
    assert len(os.listdir("/dev/fd")) == open_before


def read_everything(folder):
    store = TokenStore(folder)
    assert store.tokenizer is not None
    for split in ("train", "held_out"):
        store.tokens(split)[:]


def test_a_flipped_bit_anywhere_is_reported_with_the_files_name(sharded_store):
    draw = np.random.default_rng(0)
    files = [
        path for path in sharded_store.path.rglob("*") if path.is_file() and path.name != ".lock"
    ]
    assert len(files) > 15

    for path in files:
        good = path.read_bytes()
        positions = {
            0,
            len(good) // 2,
            len(good) - 1,
            *draw.integers(len(good), size=3).tolist(),
        }
        if path.name == "manifest.json":
            positions |= set(range(0, len(good), 17))
        for position in positions:
            flip_a_bit(path, position)
            with pytest.raises(UserError) as caught:
                read_everything(sharded_store.path)
            path.write_bytes(good)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
    read_everything(sharded_store.path)
