"""Fixtures of the tests with hostile input: it works, or one sentence says why not, and soon."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.tasks.example import read_examples
from metatokens.tasks.example_store import ExampleStore
from metatokens.untrusted import parameters_at_least
from tests.hostile.good import RECORDS, Good, lines_of

SECONDS = 60  # of processor time for one case; the slowest takes one or two
WAITING = 600  # seconds, on a machine with other work


@pytest.fixture(scope="session")
def clean() -> Callable[[], AbstractContextManager[None]]:
    """Surrounds a call: a `UserError` of one sentence is fine, any other exception and a hang are not."""
    return _clean


@contextmanager
def _clean() -> Iterator[None]:
    before = {number: signal.signal(number, _hung) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    try:
        yield
    except UserError as error:
        sentence = str(error)
        assert sentence.endswith("."), sentence
        assert "\n" not in sentence, sentence
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _hung(signal_number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer after {SECONDS} s of computing, or {WAITING} s of waiting")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a small model of each kind, without a manifest."""
    ids = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    neo = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}
    made = {
        "meta_gpt2": MetaGPT2ForCausalLM(MetaGPT2Config(**ids, **sizes, meta_token_id=1)),
        "gpt2": GPT2LMHeadModel(GPT2Config(**ids, n_embd=8, n_layer=2, n_head=2, n_positions=32)),
        "gpt_neo": GPTNeoForCausalLM(GPTNeoConfig(**ids, **neo, max_position_embeddings=32)),
    }
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in made}
    for kind, model in made.items():
        model.save_pretrained(folders[kind])
        assert parameters_at_least(model.config) <= sum(p.numel() for p in model.parameters())
    return folders


@pytest.fixture(scope="session")
def good(small_store: TokenStore, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    (folder / "records.jsonl").write_bytes(lines_of(RECORDS * 3))
    ExampleStore.write(folder / "arrow", read_examples(folder / "records.jsonl", small_store.tokenizer))
    return Good(small_store, models, (folder / "arrow").read_bytes())


@pytest.fixture
def trap(tmp_path: Path) -> "Trap":
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
