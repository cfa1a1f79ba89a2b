"""Tokenizers: specs, training, and text that stays text."""

import logging
import os
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metatokens.data.tokenizer import encode_text, load_tokenizer, meta_token_id, padded_vocab_size, text_vocab_size
from metatokens.errors import UserError
from tests.data.small_corpora import save_word_level
from tests.forked import PATIENCE

WORDS = ["lawyer", "cardamom", "clarinet", "turmeric", "wrestling", "butterfly", "rectangle"]


@pytest.fixture(scope="module")
def trained():
    return load_tokenizer("train:1500", corpus=topics.values(), extra_texts=[f": {' '.join(WORDS)}"])


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved):
    return AutoTokenizer.from_pretrained(saved)


def test_a_trained_vocabulary_has_the_entries_asked_for(trained):
    assert (len(trained), trained.meta_token_id, meta_token_id(trained)) == (1501, 1500, 1500)
    assert padded_vocab_size(trained) == 1536
    assert sorted(trained.get_vocab().values()) == list(range(1501))
    assert trained.eos_token == "<|endoftext|>"
    assert trained.convert_tokens_to_ids("<|endoftext|>") == trained.eos_token_id
    again = load_tokenizer("train:1500", corpus=topics.values(), extra_texts=[f": {' '.join(WORDS)}"])
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


def test_words_of_the_extra_texts_become_single_tokens_at_little_cost(trained):
    without = load_tokenizer("train:1500", corpus=topics.values())
    spaced = [f" {word}" for word in WORDS]
    assert [len(ids) for ids in encode_text(trained, spaced)] == [1] * len(WORDS)
    assert all(len(ids) > 1 for ids in encode_text(without, spaced))
    with_extra, plain = (sum(map(len, encode_text(each, list(topics.values())))) for each in (trained, without))
    assert with_extra < 1.05 * plain


texts = st.lists(
    st.sampled_from(["<|endoftext|>", "<|meta|>", "_PAUSE_", " <|endo", "text|>", " ", "\n"]) | st.text()
).map("".join)


@given(texts)
def test_any_text_stays_text_also_after_saving_and_loading(trained, loaded, text):
    [ids] = encode_text(trained, [text])
    assert trained.eos_token_id not in ids
    assert max(ids, default=0) < meta_token_id(trained)
    assert encode_text(loaded, [text]) == [ids]
    for tokenizer in (trained, loaded):
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids


def test_the_meta_token_is_a_special_token_of_the_saved_tokenizer(trained, saved):
    loaded = AutoTokenizer.from_pretrained(saved)
    meta = loaded.meta_token_id
    assert (meta, loaded.meta_token) == (1500, "<|meta|>")
    ids = [*encode_text(trained, ["left"])[0], meta, *encode_text(trained, [" right"])[0]]
    assert loaded.decode(ids) == "left<|meta|> right"
    assert loaded.decode(ids, skip_special_tokens=True) == "left right"
    assert loaded("left<|meta|> right", split_special_tokens=False)["input_ids"] == ids
    loaded.add_tokens(["another"])
    assert loaded.convert_tokens_to_ids("another") == 1501
    assert (meta_token_id(loaded), text_vocab_size(loaded)) == (1500, 1502)


def test_a_tokenizer_that_was_saved_without_the_meta_token_gets_it(tmp_path):
    save_word_level(tmp_path, 320)
    with pytest.raises(UserError, match="this tokenizer has no meta-token"):
        meta_token_id(AutoTokenizer.from_pretrained(tmp_path))
    after = load_tokenizer(str(tmp_path))
    assert (after.meta_token_id, text_vocab_size(after), padded_vocab_size(after)) == (320, 320, 384)


def test_a_folder_named_gpt2_wins_over_the_hub(saved, tmp_path, monkeypatch):
    (tmp_path / "gpt2").symlink_to(saved)
    monkeypatch.chdir(tmp_path)
    assert len(load_tokenizer("gpt2")) == 1501


def test_the_gpt2_vocabulary(shared_data):
    tokenizer = load_tokenizer(str(shared_data / "gpt2_tokenizer"))
    assert (meta_token_id(tokenizer), padded_vocab_size(tokenizer)) == (50257, 50304)
    assert encode_text(tokenizer, ["Hello world", " lawyer"]) == [[15496, 995], [6853]]
    assert tokenizer.eos_token_id == 50256
    [ids] = encode_text(tokenizer, ["<|endoftext|>"])
    assert 50256 not in ids
    assert tokenizer.decode(ids) == "<|endoftext|>"


def test_settings_of_an_earlier_call_do_not_leak_into_encoding(trained):
    text = "one two <|endoftext|> three"
    [expected] = encode_text(trained, [text])
    trained(text, truncation=True, max_length=2, split_special_tokens=False)
    assert encode_text(trained, [text]) == [expected]


def test_a_long_text_brings_no_warning(trained, tmp_path):
    limited = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, eos_token="<|endoftext|>", model_max_length=16
    )
    limited.save_pretrained(tmp_path)
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        ids = load_tokenizer(str(tmp_path))("word " * 5000)["input_ids"]
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert len(ids) > 5000
    assert heard == []


def test_a_forked_worker_can_encode_and_says_nothing(saved):
    code = f"""if True:
        import os
        from metatokens.data.tokenizer import encode_text, load_tokenizer
        tokenizer = load_tokenizer({str(saved)!r})
        texts = ["some text"] * 1000
        here = encode_text(tokenizer, texts)
        child = os.fork()
        if child == 0:
            os._exit(0 if encode_text(tokenizer, texts) == here else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    """
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        *((f"train:{n}", f"train:{n}.*300 to 65536") for n in ("", "299", "65537", "-400", "4k", "1e3")),
        ("train:400", r"too little text.*train:400.*2\d\d entries"),
        ("no/where", "no/where.*folder, gpt2, or train:N"),
    ],
)
def test_a_spec_that_names_no_tokenizer_is_refused(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        load_tokenizer(spec, corpus=["a few words of text"])


def test_an_unreachable_hub_suggests_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="folder"):
        load_tokenizer("gpt2")


PLAIN = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
USELESS = {
    "empty": {},
    "without vocabulary": {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'},
    "garbled": {"tokenizer_config.json": PLAIN, "tokenizer.json": '{"model": '},
    "without end of text": ({"a": 0, "b": 1}, None),
    "with gaps": ({"a": 0, "b": 5}, "b"),
}


@pytest.mark.parametrize("kind", USELESS)
def test_a_folder_without_a_usable_tokenizer(kind, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    if isinstance(USELESS[kind], dict):
        for name, content in USELESS[kind].items():
            (folder / name).write_text(content)
    else:
        vocabulary, end = USELESS[kind]
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end).save_pretrained(folder)
    with pytest.raises(UserError, match=r"folder (holds no tokenizer|cannot be used)") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)
