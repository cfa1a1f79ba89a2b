"""Fixtures of the tests with hostile input: it works, or one sentence says why not, and soon."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from tests.hostile.good import Good

SECONDS = 600  # for one case, on a machine with other work; the slowest takes one or two


@pytest.fixture(scope="session")
def clean():
    """Surrounds a call: a `UserError` of one sentence is fine, any other exception and a hang are not."""
    return _clean


@contextmanager
def _clean() -> Iterator[None]:
    try:
        with _in_time():
            yield
    except UserError as error:
        _check_sentence(error)


@pytest.fixture(scope="session")
def refuses():
    """Surrounds a call that a `UserError` must refuse, soon, in one sentence that matches."""
    return in_one_sentence


@contextmanager
def in_one_sentence(match: str | None = None) -> Iterator[None]:
    """What `refuses` gives, for a process of its own."""
    with pytest.raises(UserError, match=match) as refusal, _in_time():
        yield
    _check_sentence(refusal.value)


def _check_sentence(error: UserError) -> None:
    sentence = str(error)
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence, sentence


@contextmanager
def _in_time() -> Iterator[None]:
    handler = signal.signal(signal.SIGALRM, _hung)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def _hung(signal_number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer after {SECONDS} s")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a small model of each kind, without a manifest."""
    ids = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    attention_types = [[["global"], 2]]
    neo = {
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": attention_types,
    }
    models = {
        "meta_gpt2": MetaGPT2ForCausalLM(MetaGPT2Config(**ids, **sizes, meta_token_id=1)),
        "gpt2": GPT2LMHeadModel(GPT2Config(**ids, n_embd=8, n_layer=2, n_head=2, n_positions=32)),
        "gpt_neo": GPTNeoForCausalLM(GPTNeoConfig(**ids, **neo, max_position_embeddings=32)),
    }
    folders = {}
    for kind, model in models.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind])
    return folders


@pytest.fixture(scope="session")
def good(small_store, models):
    return Good(small_store, models)


@pytest.fixture
def trap(tmp_path):
    """A payload, and the file that appears if it is run."""
    return Trap(tmp_path / "sprung")


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)

    @property
    def was_sprung(self) -> bool:
        return self.marker.exists()
