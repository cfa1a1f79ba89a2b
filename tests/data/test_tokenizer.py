"""Tokenizers: specs, training, and text that stays text."""

import os
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metatokens.data.tokenizer import (
    encode_text,
    load_tokenizer,
    meta_token_id,
    padded_vocab_size,
    text_vocab_size,
)
from metatokens.errors import UserError
from tests.data.small_corpora import save_word_level
from tests.forked import PATIENCE

WORDS = (
    "lawyer",
    "cardamom",
    "clarinet",
    "turmeric",
    "wrestling",
    "butterfly",
    "rectangle",
)


def train():
    return load_tokenizer(
        "train:1500", corpus=topics.values(), extra_texts=[f": {' '.join(WORDS)}"]
    )


@pytest.fixture(scope="module")
def trained():
    return train()


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved):
    return AutoTokenizer.from_pretrained(saved)


def test_a_trained_vocabulary_has_the_entries_asked_for(trained):
    assert len(trained) == 1501
    assert sorted(trained.get_vocab().values()) == list(range(1501))
    assert trained.meta_token_id == meta_token_id(trained) == 1500
    assert padded_vocab_size(trained) == 1536
    assert trained.convert_tokens_to_ids("<|endoftext|>") == trained.eos_token_id


def test_words_of_the_extra_texts_become_single_tokens_at_little_cost(trained):
    without = load_tokenizer("train:1500", corpus=topics.values())
    spaced = [f" {word}" for word in WORDS]
    documents = list(topics.values())

    lengths = [len(ids) for ids in encode_text(trained, spaced)]
    assert lengths == [1] * len(WORDS)
    shortest_without = min(len(ids) for ids in encode_text(without, spaced))
    assert shortest_without > 1
    tokens = sum(map(len, encode_text(trained, documents)))
    assert tokens < 1.05 * sum(map(len, encode_text(without, documents)))


CONTROL = st.sampled_from(["<|endoftext|>", "<|meta|>", "_PAUSE_", " <|endo", "text|>", " ", "\n"])
texts = st.lists(CONTROL | st.text()).map("".join)


@given(texts)
def test_any_text_stays_text_also_after_saving_and_loading(trained, loaded, text):
    [ids] = encode_text(trained, [text])

    assert trained.eos_token_id not in ids
    assert max(ids, default=0) < meta_token_id(trained)
    assert encode_text(loaded, [text]) == [ids]
    for tokenizer in (trained, loaded):
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids


def test_the_meta_token_is_a_special_token_of_the_saved_tokenizer(trained, loaded):
    left, right = encode_text(trained, ["left", " right"])
    ids = [*left, loaded.meta_token_id, *right]

    assert (loaded.meta_token_id, loaded.meta_token) == (1500, "<|meta|>")
    assert loaded.decode(ids) == "left<|meta|> right"
    assert loaded.decode(ids, skip_special_tokens=True) == "left right"
    assert loaded("left<|meta|> right", split_special_tokens=False)["input_ids"] == ids


def test_a_tokenizer_that_was_saved_without_the_meta_token_gets_it(tmp_path):
    save_word_level(tmp_path, 320)
    with pytest.raises(UserError, match="this tokenizer has no meta-token"):
        meta_token_id(AutoTokenizer.from_pretrained(tmp_path))

    tokenizer = load_tokenizer(str(tmp_path))

    assert tokenizer.meta_token_id == text_vocab_size(tokenizer) == 320
    assert padded_vocab_size(tokenizer) == 384


def test_settings_of_an_earlier_call_do_not_leak_into_encoding(trained):
    text = "one two <|endoftext|> three"
    before = encode_text(trained, [text])

    trained(text, truncation=True, max_length=2, split_special_tokens=False)

    assert encode_text(trained, [text]) == before


ENCODE_IN_A_FORK = """
import os, sys
from metatokens.data.tokenizer import encode_text, load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
texts = ["some text"] * 1000
here = encode_text(tokenizer, texts)
child = os.fork()
if child == 0:
    os._exit(0 if encode_text(tokenizer, texts) == here else 1)
assert os.waitpid(child, 0)[1] == 0
assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
"""


def test_a_forked_worker_can_encode_and_says_nothing(saved):
    environment = {
        name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"
    }
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        ENCODE_IN_A_FORK,
        str(saved),
    ]

    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("train:", "train:.*300 to 1048576"),
        ("train:299", "train:299.*300 to 1048576"),
        ("train:2000000", "train:2000000.*300 to 1048576"),
        ("train:4k", "train:4k.*300 to 1048576"),
        ("train:400", r"too little text.*train:400.*2\d\d entries"),
        ("no/where", "no/where holds no tokenizer"),
    ],
)
def test_a_spec_that_names_no_tokenizer_is_refused(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        load_tokenizer(spec, corpus=["a few words of text"])


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'},
        {
            "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
            "tokenizer.json": '{"model": ',
        },
    ],
    ids=["empty", "without vocabulary", "garbled"],
)
def test_a_folder_without_a_tokenizer(files, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(UserError, match=r"holds no tokenizer|cannot be used") as caught:
        load_tokenizer(str(tmp_path))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vocabulary", "eos_token"),
    [({"a": 0, "b": 1}, None), ({"a": 0, "b": 5}, "b")],
    ids=["without end of text", "with gaps"],
)
def test_a_tokenizer_of_no_use(vocabulary, eos_token, tmp_path):
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token).save_pretrained(tmp_path)

    with pytest.raises(UserError, match="cannot be used"):
        load_tokenizer(str(tmp_path))
