"""Corpora and tokenizers made for a test, and what a store holds."""

import gzip
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from metatokens.data.store import TokenStore

WORDS = ("alpha", "beta", "gamma", "delta", "épsilon", "<|endoftext|>", "_PAUSE_", "\n")


def make_documents(count: int) -> list[str]:
    """Distinct documents of random words, marker strings among them."""
    draw = np.random.default_rng(0)
    documents = []
    for number in range(count):
        words = draw.choice(WORDS, size=draw.integers(5, 60))
        documents.append(f"{number} " + " ".join(words))
    return documents


def word_documents(count: int) -> list[str]:
    """Distinct documents that `save_word_level`'s tokenizer gives back."""
    draw = np.random.default_rng(0)
    documents = []
    for number in range(2, count + 2):
        numbers = [number, *draw.integers(2, 300, size=20)]
        documents.append(" ".join(f"w{number}" for number in numbers))
    return documents


def write_corpus(path: Path, documents: list[str]) -> str:
    path.write_bytes(json_lines(*documents))
    return str(path)


def write_dataset(folder: Path, *files: bytes) -> str:
    """Gzipped JSON lines as a dataset in the layout of `allenai/c4`, and its spec."""
    (folder / "en").mkdir(parents=True)
    config = "configs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/c4-train.*.json.gz"
    (folder / "README.md").write_text(f"---\n{config}\n---\n")
    for number, content in enumerate(files):
        path = folder / "en" / f"c4-train.{number:05}-of-{len(files):05}.json.gz"
        path.write_bytes(gzip.compress(content))
    return f"hf:{folder}:en"


def json_lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def save_word_level(folder: Path, entries: int) -> str:
    """A tokenizer whose word `w7` has id 7."""
    vocabulary = {f"w{number}": number for number in range(entries)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0").save_pretrained(folder)
    return str(folder)


def documents_of(store: TokenStore, split: str) -> list[str]:
    """The documents of a split, decoded from its ids."""
    documents, ids = [], []
    for token in store.tokens(split)[:].tolist():
        if token == store.tokenizer.eos_token_id:
            documents.append(store.tokenizer.decode(ids))
            ids = []
        else:
            ids.append(token)
    return documents


def text_of(item: dict[str, np.ndarray], meta_token_id: int = 300) -> tuple[int, ...]:
    """The text ids of a block."""
    ids = item["input_ids"]
    return tuple(ids[ids != meta_token_id].tolist())


def shards_of(store: TokenStore, split: str) -> list[Path]:
    """The files of a split, in their order."""
    return [store.path / split / shard.name for shard in store.manifest.splits[split].shards]


def flip_a_bit(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)
