"""Tokenizers of other models: what they begin a text with, and how, is kept in corpora, prompts and on disk."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from metatokens.data.prompts import encode_chat, encode_prompt
from metatokens.data.tokenizer import load_tokenizer
from metatokens.data.writing import write_token_store
from metatokens.evaluation.perplexity import held_out_text
from metatokens.tasks.encoding import SegmentEncoder
from metatokens.tasks.example import encode_example
from tests.data.small_corpora import write_corpus

TEXTS = [f"the cat number {i} sat on a mat while it rained" for i in range(60)]
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer like Llama 2's: a token begins a text, and a space its first word."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False))
    tokenizer = LlamaTokenizer(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts.jsonl", TEXTS)


def expected_documents(folder: Path) -> dict[tuple[int, ...], str]:
    own = AutoTokenizer.from_pretrained(folder)
    return {(*own(text)["input_ids"], own.eos_token_id): text for text in TEXTS}


def documents_in(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    ends = [place for place, token in enumerate(ids, start=1) if token == tokenizer.eos_token_id]
    return [tuple(ids[start:end]) for start, end in pairwise([0, *ends])]


def test_a_text_has_the_ids_that_transformers_gives(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    own = AutoTokenizer.from_pretrained(folder)
    assert own.convert_ids_to_tokens(own("the cat")["input_ids"])[:2] == ["<s>", "▁the"]
    for text in TEXTS:
        assert encode_prompt(tokenizer, text) == own(text)["input_ids"]


def test_saved_again_it_is_what_it_was(folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    own, again = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text in TEXTS] == [own(text)["input_ids"] for text in TEXTS]
    assert again.chat_template == TEMPLATE


def test_the_documents_of_a_store(
    folder: Path, tokenizer: PreTrainedTokenizerBase, corpus: str, tmp_path: Path
) -> None:
    store = write_token_store(tmp_path / "store", corpus, str(folder), held_out=0.2)
    found = [one for split in ("train", "held_out") for one in documents_in(store.tokens(split)[:].tolist(), tokenizer)]
    expected = expected_documents(folder)
    assert sorted(found) == sorted(expected)
    assert sum(counts.tokens for counts in store.manifest.splits.values()) == sum(len(one) - 1 for one in expected)


def test_the_documents_that_perplexity_reads(folder: Path, tokenizer: PreTrainedTokenizerBase, corpus: str) -> None:
    found = documents_in(held_out_text(corpus, tokenizer).tolist(), tokenizer)
    assert found == list(expected_documents(folder))


# Each puts a space before a text: Llama 2's as published and as transformers makes it, T5's, and RoBERTa's.
PREFIXES: dict[str, Callable[[Tokenizer], None]] = {
    "prepend": lambda backend: setattr(
        backend,
        "normalizer",
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    ),
    "first": lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always", split=False)]),
    ),
    "bytes": lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_meta_token_changes_no_id_of_the_text(prefix: str, tmp_path: Path) -> None:
    """By characters as entries, so that the ids of a text are those of its parts, except for the space before it."""
    space = "\u0120" if prefix == "bytes" else "\u2581"
    entries = ["<unk>", "</s>", space, "\u010a", "\n", *map(chr, range(33, 127))]
    backend = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, [], unk_token="<unk>"))
    PREFIXES[prefix](backend)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    meta = tokenizer.meta_token_id

    def plain(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    texts = (
        "owl_PAUSE_, robin",
        "owl _PAUSE_\nrobin",
        "owl_PAUSE_robin",
        "_PAUSE_owl",
        "_PAUSE__PAUSE_ owl",
        "a_PAUSE_",
    )
    for text in texts:
        whole = plain(text.replace(" _PAUSE_", "").replace("_PAUSE_", ""))
        assert whole[0] == tokenizer.convert_tokens_to_ids(space)
        for encode in (encode_prompt, encode_chat):
            ids = encode(tokenizer, text, "_PAUSE_")
            assert [one for one in ids if one != meta] == whole
            assert ids.count(meta) == text.count("_PAUSE_")
        *segments, last = text.replace(" _PAUSE_", "_PAUSE_").split("_PAUSE_")
        example = encode_example(SegmentEncoder(tokenizer), [*segments, last], "go")
        assert [one for one in example.input_ids if one != meta] == [*whole, *plain("go")[1:], tokenizer.eos_token_id]
    assert plain("owl")[1:] == plain("owl")[-3:]  # a text of its own still begins with a space
