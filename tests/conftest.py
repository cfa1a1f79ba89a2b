"""Settings of every test process, and fixtures that several test files share."""

import os
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# Drawn cases of each test that does not say how many; tests/hostile multiplies its own numbers with theirs.
settings.register_profile("quick", deadline=None)
settings.register_profile("long", max_examples=20 * settings.default.max_examples, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Read when torch and transformers are imported, and handed down to subprocesses: one thread, since the tests run side
# by side, and no notices, as the command sets it.
os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

if TYPE_CHECKING:
    from metatokens.data.store import TokenStore


@pytest.fixture
def metatokens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Runs the command in this process: exit status, standard output, standard error."""
    from metatokens import cli

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["metatokens", *shlex.split(line)])
        capfd.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return status, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text (C4, WikiText-2, books, the GPT-2 vocabulary), where there is one beside the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real text is not at {folder}")
    return folder


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder, by its relative path."""
    return lambda folder: {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of a few documents that a small model learns a good deal of in a few steps."""
    draw = random.Random(0)
    line = "the cat sat on a mat while two dogs ran over green hills and a river in spring"
    words = line.split(" ")
    sentences = [" ".join(draw.choices(words, k=12)) + "." for _ in range(8)]
    paragraphs = [" ".join(draw.choices(sentences, k=20)) for _ in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "small.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_store(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> "TokenStore":
    """The corpus as token ids, the tokenizer trained on the tasks' words too."""
    from metatokens.data.writing import write_token_store
    from metatokens.tasks.curriculum import task_texts

    folder = tmp_path_factory.mktemp("store") / "tokens"
    return write_token_store(folder, str(small_corpus), "train:768", held_out=0.2, extra_texts=task_texts())


@pytest.fixture(scope="session")
def small_model(small_store: "TokenStore", tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a small untrained model of the given configuration and the store's tokenizer; not to be changed."""
    import torch

    from metatokens.data.tokenizer import padded_vocab_size
    from metatokens.model.checkpoint import save_model
    from metatokens.model.configuration import MetaGPT2Config
    from metatokens.model.modeling import MetaGPT2ForCausalLM

    def make(**changes: object) -> Path:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
        eos = small_store.manifest.eos_token_id
        ids = {"meta_token_id": small_store.manifest.meta_token_id, "eos_token_id": eos, "bos_token_id": eos}
        vocabulary = {"vocab_size": padded_vocab_size(small_store.tokenizer)}
        torch.manual_seed(0)
        model = MetaGPT2ForCausalLM(MetaGPT2Config(**(sizes | ids | vocabulary | changes)))
        folder = tmp_path_factory.mktemp("model")
        save_model(model, small_store.tokenizer, folder)
        return folder

    return make
