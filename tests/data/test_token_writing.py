"""Writing a token store: what is in it, and that nothing finished is lost."""

import json
from collections import Counter
from pathlib import Path

import pytest

from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from tests.data.small_corpora import (
    documents_of,
    make_documents,
    save_word_level,
    write_corpus,
)


@pytest.fixture
def fifty(tmp_path):
    """A corpus of fifty documents."""
    return write_corpus(tmp_path / "fifty.jsonl", make_documents(50))


def test_copies_of_a_text_are_on_one_side(tmp_path):
    documents = make_documents(60)
    corpus = write_corpus(tmp_path / "a.jsonl", documents + documents[::-1] + documents)

    store = write_token_store(tmp_path / "tokens", corpus, "train:300", held_out=0.5)

    train, held_out = (
        Counter(documents_of(store, "train")),
        Counter(documents_of(store, "held_out")),
    )
    assert train.keys().isdisjoint(held_out)
    assert set(train.values()) == set(held_out.values()) == {3}


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_two_documents_are_enough_for_both_splits(tmp_path, held_out):
    text = "alpha beta gamma delta epsilon zeta " * 20
    corpus = write_corpus(tmp_path / "a.jsonl", [text + "0", text + "0", text + "1", text + "0"])
    words = save_word_level(tmp_path / "tokenizer", 300)

    store = write_token_store(tmp_path / "tokens", corpus, words, held_out=held_out)

    assert store.manifest.splits["train"].documents == 3
    assert store.manifest.splits["held_out"].documents == 1


def test_the_same_settings_open_the_store_that_is_there(fifty, tmp_path):
    first = write_token_store(tmp_path / "tokens", fifty, "train:300")
    Path(fifty).unlink()

    again = write_token_store(tmp_path / "tokens", fifty, "train:300")

    assert again.manifest == first.manifest


@pytest.mark.parametrize(
    "change",
    [{"held_out": 0.1}, {"tokenizer_spec": "train:310"}],
    ids=str,
)
def test_other_settings_are_refused_unless_overwriting(change, fifty, tmp_path):
    out = tmp_path / "tokens"
    before = write_token_store(out, fifty, "train:300").manifest
    settings = {"corpus_spec": fifty, "tokenizer_spec": "train:300"} | change

    with pytest.raises(
        UserError, match=r"holds a token store made with other settings.*--overwrite"
    ):
        write_token_store(out, **settings)

    assert TokenStore(out).manifest == before
    assert write_token_store(out, **settings, overwrite=True).manifest != before


def test_overwriting_keeps_a_folder_that_is_no_store(fifty, tmp_path, contents):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "00000.txt").write_text("my text")
    before = contents(tmp_path / "mine")

    with pytest.raises(UserError, match="mine is not empty and holds no token store"):
        write_token_store(tmp_path / "mine", fifty, "train:300", overwrite=True)

    assert contents(tmp_path / "mine") == before


def test_overwriting_keeps_a_model(fifty, tmp_path, small_model, contents):
    model = small_model(second_attention="meta")
    before = contents(model)

    with pytest.raises(UserError, match="is not empty and holds no token store"):
        write_token_store(model, fifty, "train:300", overwrite=True)

    assert contents(model) == before


def test_a_failure_while_overwriting_keeps_the_old_store(fifty, tmp_path):
    bad, words = tmp_path / "bad.jsonl", save_word_level(tmp_path / "words", 300)
    bad.write_text(json.dumps({"text": "fine " * 500}) + "\nnot JSON\n")
    before = write_token_store(tmp_path / "tokens", fifty, words)

    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        write_token_store(tmp_path / "tokens", str(bad), words, overwrite=True)

    assert TokenStore(tmp_path / "tokens").manifest == before.manifest


def test_ids_beyond_16_bits(tmp_path):
    corpus = write_corpus(tmp_path / "a.jsonl", ["w65535 w65536 w69999", "w3"])

    store = write_token_store(
        tmp_path / "tokens", corpus, save_word_level(tmp_path / "tokenizer", 70_000)
    )

    assert store.tokens("train")[:].tolist() == [65535, 65536, 69999, 0]
    assert store.tokens("held_out")[:].tolist() == [3, 0]
