"""The token store as it is read, whole and damaged."""

import os
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from tests.data.small_corpora import documents_of, flip_a_bit, make_documents, shards_of


def test_the_splits_hold_every_document_once_in_order(store):
    documents = make_documents(400)
    train, held_out = documents_of(store, "train"), documents_of(store, "held_out")
    assert sorted(train + held_out) == sorted(documents)
    assert train == [text for text in documents if text in set(train)]
    assert held_out == [text for text in documents if text in set(held_out)]
    assert 0.1 < len(held_out) / 400 < 0.3


@pytest.mark.parametrize("kind", ["store", "stored_in_shards"])
def test_the_manifest_counts_what_the_files_hold(kind, corpus, request):
    store = request.getfixturevalue(kind)
    manifest = store.manifest
    for split in ("train", "held_out"):
        documents, counts = documents_of(store, split), manifest.splits[split]
        ids = store.tokens(split)[:]
        assert counts.documents == len(documents) == (ids == manifest.eos_token_id).sum()
        assert counts.characters == sum(map(len, documents))
        assert counts.tokens == len(ids) - len(documents)
        files = shards_of(store, split)
        assert sorted(files) == sorted((store.path / split).iterdir())
        assert [shard.sha256 for shard in counts.shards] == [sha256(path.read_bytes()).hexdigest() for path in files]
        columns = []
        for path in files:
            with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as table:
                assert table.schema.types == [pa.uint16()]
                columns += table.read_all().column(0).to_pylist()
        assert columns == ids.tolist()
    assert (manifest.vocab_size, manifest.meta_token_id) == (300, 300)
    assert (manifest.settings.corpus, manifest.settings.tokenizer) == (corpus, "train:300")
    tokenizer = (store.path / "tokenizer").iterdir()
    assert manifest.tokenizer == {path.name: sha256(path.read_bytes()).hexdigest() for path in tokenizer}
    names = [".lock", "held_out", "manifest.json", "tokenizer", "train"]  # the lock is empty, and held by nobody
    assert sorted(path.name for path in store.path.iterdir()) == names


def test_shards_change_nothing_for_the_reader(store, stored_in_shards):
    for split in ("train", "held_out"):
        assert len(shards_of(stored_in_shards, split)) > 5 > len(shards_of(store, split))
        assert stored_in_shards.tokens(split)[:].tolist() == store.tokens(split)[:].tolist()
    assert stored_in_shards.manifest.splits["train"].sha256 != store.manifest.splits["train"].sha256


@given(st.slices(3000))
def test_slices_are_those_of_a_list(store, stored_in_shards, window):
    if window.step is None or window.step > 0:
        expected = store.tokens("train")[:].tolist()[window]
        for tokens in (store.tokens("train"), stored_in_shards.tokens("train")):
            assert tokens[window].tolist() == expected
            assert tokens[window].dtype == np.int64


# --- integrity


def read_everything(store):
    assert store.tokenizer is not None
    return [store.tokens(split)[:] for split in ("train", "held_out")]


def test_a_flipped_bit_anywhere_is_reported_with_the_files_name(sharded_store):
    rng = np.random.default_rng(0)
    files = [path for path in sharded_store.path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) > 15
    for path in files:
        whole = path.read_bytes()
        places = {0, len(whole) // 2, len(whole) - 1, *rng.integers(len(whole), size=3).tolist()}
        for place in range(0, len(whole), 17) if path.name == "manifest.json" else places:
            flip_a_bit(path, place)
            with pytest.raises(UserError) as caught:
                read_everything(TokenStore.open(sharded_store.path))
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    read_everything(TokenStore.open(sharded_store.path))


def exchange(path):
    path.write_bytes(min(path.parent.iterdir()).read_bytes())


@pytest.mark.parametrize("damage", [flip_a_bit, exchange, lambda path: path.write_bytes(b""), os.unlink])
def test_what_is_read_from_other_shards_is_not_touched_by_a_damaged_one(sharded_store, stored_in_shards, damage):
    damaged = shards_of(sharded_store, "train")[2]
    damage(damaged)
    counts = [shard.tokens + shard.documents for shard in sharded_store.manifest.splits["train"].shards]
    start, end = sum(counts[:2]), sum(counts[:3])
    tokens, whole = sharded_store.tokens("train"), stored_in_shards.tokens("train")
    assert tokens[:start].tolist() == whole[:start].tolist()
    assert tokens[end:].tolist() == whole[end:].tolist()
    for window in (slice(start, start + 1), slice(end - 1, end), slice(start - 5, start + 1), slice(None)):
        with pytest.raises(UserError, match=rf"{damaged} is missing, cut short or altered: write the store again"):
            tokens[window]
    assert tokens[start:start].tolist() == []


def test_opening_reads_the_manifest_alone_and_each_shard_is_checked_once(sharded_store, monkeypatch):
    opened = []
    memory_map = pa.memory_map
    monkeypatch.setattr(pa, "memory_map", lambda path: opened.append(path) or memory_map(path))
    tokens = TokenStore.open(sharded_store.path).tokens("train")
    assert (len(tokens), opened) == (len(sharded_store.tokens("train")), [])
    for _ in range(3):
        tokens[:10]
        tokens[:]
    assert opened == [str(path) for path in shards_of(sharded_store, "train")]


def test_open_shards_hold_no_file_open(sharded_store):
    before = len(os.listdir("/proc/self/fd"))
    tokens = sharded_store.tokens("train")
    tokens[:]
    assert len(os.listdir("/proc/self/fd")) == before
