"""The token store and the blocks cut from it."""

import gzip
import hashlib
import itertools
import json
import os
import pickle
import platform
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from metatokens.data import blocks
from metatokens.data.blocks import BlockDataset, TokenStore, write_token_store
from metatokens.errors import UserError


def make_documents(count, seed=0):
    """Distinct documents of random words, marker strings among them."""
    rng = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta", "épsilon", "<|endoftext|>", "_PAUSE_", "\n"]
    return [f"{i} " + " ".join(rng.choice(words, size=rng.integers(5, 60))) for i in range(count)]


def write_corpus(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "a.jsonl", make_documents(400))


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    return write_token_store(tmp_path_factory.mktemp("runs") / "deep" / "tokens", corpus, "train:300", held_out=0.2)


def documents_of(store, split):
    """The documents of a split, decoded from its ids."""
    ids = store.tokens(split)[:].tolist()
    pieces = [list(group) for end, group in itertools.groupby(ids, store.manifest.eos_token_id.__eq__) if not end]
    return [store.tokenizer.decode(piece) for piece in pieces]


# --- the store


def test_the_splits_hold_every_document_once_in_order(store):
    documents = make_documents(400)
    train, held_out = documents_of(store, "train"), documents_of(store, "held_out")
    assert sorted(train + held_out) == sorted(documents)
    assert train == [text for text in documents if text in set(train)]
    assert held_out == [text for text in documents if text in set(held_out)]
    assert 0.1 < len(held_out) / 400 < 0.3


def test_the_manifest_counts_what_the_files_hold(store, corpus):
    manifest = store.manifest
    for split in ("train", "held_out"):
        documents, counts = documents_of(store, split), manifest.splits[split]
        ids = store.tokens(split)[:]
        assert counts.documents == len(documents) == (ids == manifest.eos_token_id).sum()
        assert counts.characters == sum(map(len, documents))
        assert counts.tokens == len(ids) - len(documents)
        assert counts.sha256 == hashlib.sha256((store.path / f"{split}.arrow").read_bytes()).hexdigest()
        with pa.OSFile(str(store.path / f"{split}.arrow")) as file:
            assert pa.ipc.open_file(file).schema.types == [pa.uint16()]
    assert (manifest.vocab_size, manifest.meta_token_id) == (300, 300)
    assert (manifest.settings.corpus, manifest.settings.tokenizer) == (corpus, "train:300")
    assert sorted(path.name for path in store.path.iterdir()) == [
        "held_out.arrow",
        "manifest.json",
        "tokenizer",
        "train.arrow",
    ]


def test_small_batches_give_the_same_files(store, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BATCH_CHARACTERS", 100)
    again = write_token_store(tmp_path, corpus, "train:300", held_out=0.2)
    for split in ("train", "held_out"):
        assert again.tokens(split)[:].tolist() == store.tokens(split)[:].tolist()
        middle = slice(50, 1000)  # over many record batches
        assert again.tokens(split)[middle].tolist() == store.tokens(split)[:].tolist()[middle]


@given(st.slices(3000))
def test_slices_are_those_of_a_list(store, window):
    tokens = store.tokens("train")
    if window.step is None or window.step > 0:
        assert tokens[window].tolist() == tokens[:].tolist()[window]
        assert tokens[window].dtype == np.int64


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


def save_word_level(folder, entries):
    """A tokenizer whose word `w7` has id 7."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(entries)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0").save_pretrained(folder)
    return str(folder)


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
    assert (after.manifest.vocab_size, len(after.tokenizer)) == (310, 310)


def test_the_python_version_belongs_to_the_builtin_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "read_corpus", lambda spec: iter(make_documents(50)))
    assert write_token_store(tmp_path, "builtin", "train:300").manifest.settings.python == platform.python_version()
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    with pytest.raises(UserError, match="other settings"):
        write_token_store(tmp_path, "builtin", "train:300")


def test_an_unfinished_store_is_written_again(tmp_path):
    corpus = write_corpus(tmp_path / "a.jsonl", make_documents(50))
    out = tmp_path / "tokens"
    first = write_token_store(out, corpus, "train:300").manifest
    (out / "manifest.json").unlink()
    (out / "train.arrow").write_bytes(b"half")
    (out / ".partial").mkdir()
    (out / ".partial" / "train.arrow").write_bytes(b"left by a killed run")
    with pytest.raises(UserError, match="holds no complete token store"):
        TokenStore.open(out)
    assert write_token_store(out, corpus, "train:300").manifest == first
    assert not (out / ".partial").exists()


def test_a_failure_while_overwriting_keeps_the_old_store(tmp_path):
    good = write_corpus(tmp_path / "a.jsonl", make_documents(50))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "fine " * 500}) + "\nnot JSON\n")
    before = write_token_store(tmp_path / "tokens", good, save_word_level(tmp_path / "words", 300))
    with pytest.raises(UserError, match=r"b\.jsonl, line 2"):
        write_token_store(tmp_path / "tokens", str(tmp_path / "b.jsonl"), str(tmp_path / "words"), overwrite=True)
    assert TokenStore.open(tmp_path / "tokens").manifest == before.manifest
    assert not (tmp_path / "tokens" / ".partial").exists()


@pytest.fixture
def copy_of_store(tmp_path):
    corpus = write_corpus(tmp_path / "a.jsonl", make_documents(50))
    return write_token_store(tmp_path / "tokens", corpus, "train:300").path


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, lambda path: path.unlink()])
def test_a_damaged_file_is_noticed_on_opening(copy_of_store, split, damage):
    damage(copy_of_store / f"{split}.arrow")
    with pytest.raises(UserError, match=rf"{split}\.arrow is missing, cut short or altered"):
        TokenStore.open(copy_of_store)


def test_a_large_file_is_checked_for_its_length_alone(copy_of_store, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_HASHED_BYTES", 100)
    monkeypatch.setattr(blocks, "_sha256", lambda path: pytest.fail("hashed"))
    TokenStore.open(copy_of_store)
    cut_short(copy_of_store / "train.arrow")
    with pytest.raises(UserError, match=r"train\.arrow"):
        TokenStore.open(copy_of_store)


@pytest.mark.parametrize("text", ["{}", "not JSON", '{"model": "of another kind"}', ""])
def test_a_manifest_of_something_else(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is not the manifest of a token store"):
        write_token_store(tmp_path, "builtin", "train:300")
    assert (tmp_path / "manifest.json").read_text() == text


def test_another_tokenizer_in_the_store(copy_of_store, tmp_path):
    save_word_level(copy_of_store / "tokenizer", 20)
    with pytest.raises(UserError, match=r"tokenizer has 20 entries.*says 300"):
        _ = TokenStore.open(copy_of_store).tokenizer


def test_no_store_at_all(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="holds no complete token store"):
            TokenStore.open(path)


@pytest.mark.parametrize("text", ["", " \n\n", '{"text": ""}\n'])
def test_an_empty_corpus(tmp_path, text):
    corpus = tmp_path / ("a.jsonl" if text.startswith("{") else "a.txt")
    corpus.write_text(text)
    with pytest.raises(UserError, match=rf"{corpus.name} holds no text"):
        write_token_store(tmp_path / "tokens", str(corpus), "train:300")
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("held_out", [0, 1, -0.1, float("nan")])
def test_held_out_share_out_of_range(tmp_path, corpus, held_out):
    with pytest.raises(UserError, match=f"{held_out}.*between 0 and 1"):
        write_token_store(tmp_path, corpus, "train:300", held_out=held_out)


def test_a_place_that_cannot_be_written(tmp_path, corpus):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file" / "tokens", tmp_path / "file"):
        with pytest.raises(UserError, match="cannot be written"):
            write_token_store(out, corpus, "train:300")


def test_a_disk_that_fails_half_way(tmp_path, corpus, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks.os, "replace", full)
    with pytest.raises(UserError, match=r"cannot be written.*No space left on device"):
        write_token_store(tmp_path / "tokens", corpus, "train:300")
    monkeypatch.undo()
    assert write_token_store(tmp_path / "tokens", corpus, "train:300").manifest.vocab_size == 300


def test_a_failed_build_leaves_nothing_behind(tmp_path, corpus):
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "new", tmp_path / "mine"):
        with pytest.raises(UserError):
            write_token_store(out, corpus, "no-such-tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert not any((tmp_path / "mine").iterdir())


def test_a_replacement_cut_off_half_way_does_not_pass_for_a_store(copy_of_store, corpus, monkeypatch):
    replace = os.replace

    def cut_off(source, target):
        if target.name == "held_out.arrow":
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(blocks.os, "replace", cut_off)
        with pytest.raises(UserError, match="Input/output error"):
            write_token_store(copy_of_store, corpus, "train:310", overwrite=True)
    with pytest.raises(UserError, match="holds no complete token store"):
        TokenStore.open(copy_of_store)
    assert write_token_store(copy_of_store, corpus, "train:310").manifest.vocab_size == 310


# --- blocks


def make_dataset(store, **changes):
    settings = {"block_size": 40, "fraction": 0.1, "placement": "uniform", "seed": 0} | changes
    return BlockDataset(store, "train", **settings)


def text_of(item, meta_token_id=300):
    return tuple(i for i in item["input_ids"].tolist() if i != meta_token_id)


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


def test_items_have_block_size_ids_and_labels(store):
    item = make_dataset(store)[0]
    assert item["input_ids"].shape == item["labels"].shape == (40,)
    assert item["input_ids"].dtype == item["labels"].dtype == np.int64
    assert (item["input_ids"] == 300).sum() == 4
    assert (item["labels"] != -100).sum() == 35


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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's own, about forking with threads
def test_the_number_of_workers_changes_nothing(store):
    dataset = make_dataset(store, epochs=2)
    runs = [
        [
            (ids.tolist(), labels.tolist())
            for batch in DataLoader(dataset, batch_size=7, num_workers=workers)
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        for workers in (0, 2)
    ]
    assert runs[0] == runs[1] == everything(dataset)


def test_a_worker_receives_a_path_and_needs_no_torch(store, tmp_path):
    dataset = make_dataset(store)
    first = dataset[0]["input_ids"].tolist()  # the file is open now
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
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


def test_a_split_shorter_than_a_block_says_how_much(store):
    tokens = len(store.tokens("train"))
    with pytest.raises(UserError, match=rf"train split .* {tokens} tokens.*block of 100000 \(90000 .* 10000"):
        make_dataset(store, block_size=100_000)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_size": 1}, "block size is 1"),
        ({"fraction": 0.6}, r"0\.6"),
        ({"fraction": -0.1, "placement": "none"}, r"-0\.1"),
        ({"placement": "often"}, "often"),
    ],
)
def test_settings_out_of_range(store, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        make_dataset(store, **changes)


def test_a_folder_of_something_else_is_left_alone(corpus, tmp_path):
    mine = tmp_path / "tokenizer" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no token store"):
        write_token_store(tmp_path, corpus, "train:300")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"
