"""Stores of a small corpus, in one shard and in many."""

import shutil

import pytest

from metatokens.data import writing
from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from tests.data.small_corpora import make_documents, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "a.jsonl", make_documents(400))


@pytest.fixture(scope="session")
def store(corpus, tmp_path_factory):
    return write_token_store(
        tmp_path_factory.mktemp("runs") / "deep" / "tokens",
        corpus,
        "train:300",
        held_out=0.2,
    )


@pytest.fixture(scope="session")
def stored_in_shards(corpus, tmp_path_factory):
    """The same store in shards of some twenty documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "SHARD_CHARACTERS", 4_000)
        return write_token_store(
            tmp_path_factory.mktemp("runs") / "tokens",
            corpus,
            "train:300",
            held_out=0.2,
        )


@pytest.fixture
def sharded_store(stored_in_shards, tmp_path):
    """A copy of it to be damaged."""
    shutil.copytree(stored_in_shards.path, tmp_path / "copy")
    return TokenStore.open(tmp_path / "copy")
