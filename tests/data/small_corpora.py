"""Corpora and tokenizers made for a test, and what a store holds."""

import gzip
import itertools
import json

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_documents(count, seed=0):
    """Distinct documents of random words, marker strings among them."""
    rng = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta", "épsilon", "<|endoftext|>", "_PAUSE_", "\n"]
    return [f"{i} " + " ".join(rng.choice(words, size=rng.integers(5, 60))) for i in range(count)]


def word_documents(count):
    """Distinct documents that `save_word_level`'s tokenizer gives back."""
    rng = np.random.default_rng(0)
    return [" ".join(f"w{word}" for word in [i + 2, *rng.integers(2, 300, size=20)]) for i in range(count)]


def write_corpus(path, documents):
    path.write_bytes(json_lines(*documents))
    return str(path)


def write_dataset(folder, *files):
    """Gzipped JSON lines as a dataset in the layout of `allenai/c4`, and its spec."""
    (folder / "en").mkdir(parents=True)
    config = "configs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/c4-train.*.json.gz"
    (folder / "README.md").write_text(f"---\n{config}\n---\n")
    for number, content in enumerate(files):
        path = folder / "en" / f"c4-train.{number:05}-of-{len(files):05}.json.gz"
        path.write_bytes(gzip.compress(content))
    return f"hf:{folder}:en"


def json_lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def save_word_level(folder, entries):
    """A tokenizer whose word `w7` has id 7."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(entries)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0").save_pretrained(folder)
    return str(folder)


def documents_of(store, split):
    """The documents of a split, decoded from its ids."""
    ids = store.tokens(split)[:].tolist()
    pieces = [list(group) for end, group in itertools.groupby(ids, store.manifest.eos_token_id.__eq__) if not end]
    return [store.tokenizer.decode(piece) for piece in pieces]


def text_of(item, meta_token_id=300):
    """The text ids of a block."""
    return tuple(i for i in item["input_ids"].tolist() if i != meta_token_id)


def shards_of(store, split):
    """The files of a split, in their order."""
    return [store.path / split / shard.name for shard in store.manifest.splits[split].shards]


def flip_a_bit(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)
