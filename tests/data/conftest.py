"""Stores of a small corpus, in one shard and in many."""

import shutil

import pytest

from metatokens.data import corpus as corpus_module
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
def stored_in_shards(tmp_path_factory):
    """The same store in shards of twenty documents."""
    folder, documents = tmp_path_factory.mktemp("corpora"), make_documents(400)
    for start in range(0, 400, 20):
        write_corpus(folder / f"{start:03}.jsonl", documents[start : start + 20])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PART_BYTES", 1)
        return write_token_store(
            tmp_path_factory.mktemp("runs") / "tokens",
            f"{folder}/*.jsonl",
            "train:300",
            held_out=0.2,
        )


@pytest.fixture
def sharded_store(stored_in_shards, tmp_path):
    """A copy of it to be damaged."""
    shutil.copytree(stored_in_shards.path, tmp_path / "copy")
    return TokenStore(tmp_path / "copy")
