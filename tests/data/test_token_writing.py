"""Writing a token store: what is in it, and that nothing finished is lost."""

import gzip
import json
import platform
from collections import Counter

import pytest

from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from tests.data.small_corpora import documents_of, make_documents, save_word_level, write_corpus


def test_copies_of_a_text_are_on_one_side(tmp_path):
    documents = make_documents(60)
    corpus = write_corpus(tmp_path / "a.jsonl", documents + documents[::-1] + documents)
    store = write_token_store(tmp_path / "tokens", corpus, "train:300", held_out=0.5)
    train, held_out = Counter(documents_of(store, "train")), Counter(documents_of(store, "held_out"))
    assert not train.keys() & held_out.keys()
    assert set(train.values()) | set(held_out.values()) == {3}


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_two_documents_are_enough_for_both_splits(tmp_path, held_out):
    texts = ["alpha beta gamma delta epsilon zeta " * 20 + str(i) for i in range(2)]
    corpus = write_corpus(tmp_path / "a.jsonl", [texts[0], texts[0], texts[1], texts[0]])
    gpt2_like = save_word_level(tmp_path / "tokenizer", 300)
    store = write_token_store(tmp_path / "tokens", corpus, gpt2_like, held_out=held_out)
    assert store.manifest.splits["train"].documents == 3
    assert store.manifest.splits["held_out"].documents == 1


def test_ids_beyond_16_bits(tmp_path):
    corpus = write_corpus(tmp_path / "a.jsonl", ["w65535 w65536 w69999", "w3"])
    store = write_token_store(tmp_path / "tokens", corpus, save_word_level(tmp_path / "tokenizer", 70_000))
    assert store.tokens("train")[:].tolist() == [65535, 65536, 69999, 0]
    assert store.tokens("held_out")[:].tolist() == [3, 0]


def test_c4_with_the_gpt2_vocabulary(shared_data, tmp_path):
    spec = str(shared_data / "c4_sample.jsonl.gz")
    store = write_token_store(tmp_path, spec, str(shared_data / "gpt2_tokenizer"))
    counts = store.manifest.splits.values()
    assert sum(each.documents for each in counts) == 2_000
    assert sum(each.characters for each in counts) == 4_450_078
    assert sum(each.tokens for each in counts) == 978_327
    with gzip.open(spec) as file:
        originals = {json.loads(line)["text"] for line in file}
    assert set(documents_of(store, "held_out")) < originals
    assert 0.03 < store.manifest.splits["held_out"].documents / 2_000 < 0.07


def test_the_same_settings_open_the_store_that_is_there(tmp_path):
    corpus = write_corpus(tmp_path / "a.jsonl", make_documents(50))
    first = write_token_store(tmp_path / "tokens", corpus, "train:300", extra_texts=["a", "b"])
    (tmp_path / "a.jsonl").unlink()
    again = write_token_store(tmp_path / "tokens", corpus, "train:300", extra_texts=iter(["a", "b"]))
    assert again.manifest == first.manifest


def test_other_settings_are_refused_unless_overwriting(tmp_path):
    corpus = write_corpus(tmp_path / "a.jsonl", make_documents(50))
    out = tmp_path / "tokens"
    before = write_token_store(out, corpus, "train:300").manifest
    for change in ({"held_out": 0.1}, {"extra_texts": ["a"]}, {"tokenizer_spec": "train:310"}):
        settings = {"corpus_spec": corpus, "tokenizer_spec": "train:300"} | change
        with pytest.raises(UserError, match=r"tokens holds a token store made with other settings.*--overwrite"):
            write_token_store(out, **settings)
    assert TokenStore.open(out).manifest == before
    after = write_token_store(out, corpus, "train:310", overwrite=True)
    assert (after.manifest.vocab_size, len(after.tokenizer)) == (310, 311)


def test_the_python_version_belongs_to_the_builtin_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("metatokens.data.corpus._builtin", lambda: make_documents(50))
    assert write_token_store(tmp_path, "builtin", "train:300").manifest.settings.python == platform.python_version()
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    with pytest.raises(UserError, match="other settings"):
        write_token_store(tmp_path, "builtin", "train:300")


def test_a_failure_while_overwriting_keeps_the_old_store(tmp_path):
    good = write_corpus(tmp_path / "a.jsonl", make_documents(50))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "fine " * 500}) + "\nnot JSON\n")
    before = write_token_store(tmp_path / "tokens", good, save_word_level(tmp_path / "words", 300))
    with pytest.raises(UserError, match=r"b\.jsonl, line 2"):
        write_token_store(tmp_path / "tokens", str(tmp_path / "b.jsonl"), str(tmp_path / "words"), overwrite=True)
    assert TokenStore.open(tmp_path / "tokens").manifest == before.manifest


def test_a_failed_build_leaves_nothing_but_the_lock(tmp_path, corpus):
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "new", tmp_path / "mine"):
        with pytest.raises(UserError):
            write_token_store(out, corpus, "no-such-tokenizer")
        assert {path.name: path.stat().st_size for path in out.iterdir()} == {".lock": 0}
