"""The text, the tokenizer, the look-ups and the model that the tests share."""

import pytest
from transformers import AutoModelForCausalLM

from metatokens import add_meta_attention
from metatokens.data.tokenizer import load_tokenizer
from metatokens.shrink.lookups import Lookups, Turns, read_forms
from metatokens.shrink.texts import UserText
from tests.shrink.small import made_up_documents, plain_tokenizer, write_base, write_documents


@pytest.fixture(scope="session")
def documents():
    return made_up_documents()


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory):
    """The documents as a file."""
    return write_documents(tmp_path_factory.mktemp("corpus") / "text.jsonl", documents)


@pytest.fixture(scope="session")
def plain(documents):
    """The base's tokenizer, which has no meta-token and recognises control tokens in a text."""
    return plain_tokenizer(documents)


@pytest.fixture(scope="session")
def base(plain, tmp_path_factory):
    """A folder with a Llama as others save it."""
    return write_base(tmp_path_factory.mktemp("base") / "base", plain)


@pytest.fixture(scope="session")
def tokenizer(base):
    """The same with a meta-token."""
    return load_tokenizer(str(base))


@pytest.fixture
def model(base, tokenizer):
    """The Llama with a meta-token."""
    plain_model = AutoModelForCausalLM.from_pretrained(base)
    return add_meta_attention(plain_model, tokenizer, layers=[]).eval()


@pytest.fixture(scope="session")
def text(tokenizer, corpus):
    return UserText(tokenizer, [str(corpus)])


@pytest.fixture(scope="session")
def lookups(tokenizer, text):
    """What draws look-ups, by split."""
    forms, turns = read_forms(), Turns.of(tokenizer)
    return {
        "train": Lookups(tokenizer, text.train, text.entities["train"], forms["train"], turns),
        "test": Lookups(tokenizer, text.held_out, text.entities["test"], forms["test"], turns),
    }
