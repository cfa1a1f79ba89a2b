"""Tokenizers: GPT-2's, one from a folder, or a byte-level BPE trained on the corpus.

Text never turns into a control token: `<|endoftext|>` written in a document is encoded as the ordinary
pieces of those characters, and decodes to them, and so is `<|meta|>`. Control ids (the end of a document, the
meta-token) are put in as ids. A tokenizer that is loaded here, or was saved with a model, knows the meta-token as a
special token, `tokenizer.meta_token`; where it did not before, its id is the first one after the vocabulary.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from metatokens.errors import UserError

END_OF_TEXT = "<|endoftext|>"
META_TOKEN = "<|meta|>"  # how a decoded text shows the meta-token
MIN_ENTRIES, MAX_ENTRIES = 300, 65_536  # of a trained vocabulary; the bytes and the end-of-text token are 257
LONG_TEXT = 400_000  # characters; a longer text is encoded in pieces
SPACE_BETWEEN = re.compile(r"(?<=\S) (?=\S)")
UNLIMITED = int(1e30)  # transformers' "no maximum length", which keeps it from warning about long texts

# The library's threads do not survive a fork, so forked data-loading workers go without. It sees to that itself
# only where the variable is unset, and then says so in the middle of the progress display.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


def load_tokenizer(
    spec: str, *, corpus: Iterable[str] | None = None, extra_texts: Iterable[str] = ()
) -> PreTrainedTokenizerBase:
    """The tokenizer that a spec names.

    Args:
        spec: a folder that holds a tokenizer; `gpt2`, from the Hugging Face Hub or its local cache (a folder
            of that name wins); or `train:N`, a byte-level BPE with N entries in all, trained here.
        corpus: the documents that `train:N` learns from; not read otherwise.
        extra_texts: short texts that `train:N` learns from too, with such weight that each of their words
            becomes a single token where the vocabulary has room.

    Returns:
        A fast tokenizer with an end-of-text id, a meta-token and no maximum length, to which special tokens in a text
        are text. Saved and loaded again, by transformers too, it still is.

    Raises:
        UserError: if the spec names no usable tokenizer, or the corpus has too little text for N entries.
    """
    if Path(spec).is_dir():
        tokenizer = _pretrained(spec, f"the folder {spec} holds no tokenizer that can be loaded.")
    elif spec == "gpt2":
        tokenizer = _pretrained(spec, "the Hugging Face Hub gave no gpt2 tokenizer: pass a folder that holds one.")
    elif spec.startswith("train:"):
        tokenizer = _train(spec, corpus, extra_texts)
    else:
        raise UserError(f"no tokenizer {spec!r}: give an existing folder, gpt2, or train:N (N entries).")
    if not (
        tokenizer.is_fast
        and tokenizer.eos_token_id is not None
        and max(tokenizer.get_vocab().values()) == len(tokenizer) - 1
        and encode_text(tokenizer, ["text"]) != [[]]  # transformers loads a folder without a vocabulary as an empty one
    ):
        raise UserError(
            f"the tokenizer {spec} cannot be used: it must be a fast one with an end-of-text token and a "
            "vocabulary numbered from 0 without gaps."
        )
    tokenizer.model_max_length = UNLIMITED
    return tokenizer


def encode_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, special tokens neither recognised nor added, at the backend's batch rate."""
    backend = tokenizer.backend_tokenizer
    # A call of the tokenizer itself leaves its settings in the backend.
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    if not _splits_at_spaces(backend) or all(len(text) <= LONG_TEXT for text in texts):
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    return [list(_ids_of_long(backend, text)) for text in texts]


def beginning_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that a tokenizer puts ahead of a text by itself, such as a token for the beginning; mostly none."""
    whole, plain = (tokenizer("text", add_special_tokens=added)["input_ids"] for added in (True, False))
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(plain)] == plain), [])


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text as the tokenizer begins one, the end-of-text id at its end."""
    beginning, end = beginning_of(tokenizer), tokenizer.eos_token_id
    return [[*beginning, *ids, end] for ids in encode_text(tokenizer, texts)]


def _splits_at_spaces(backend: Tokenizer) -> bool:
    """Whether a space between two words always starts a new piece, as in GPT-2's vocabulary."""
    cut = backend.pre_tokenizer
    return isinstance(cut, pre_tokenizers.ByteLevel) and cut.use_regex and backend.normalizer is None


def _ids_of_long(backend: Tokenizer, text: str) -> Iterator[int]:
    # The library takes some 130 bytes of memory a character of a text, so a long one goes through it bit by bit.
    start = 0
    while start < len(text):
        cut = SPACE_BETWEEN.search(text, start + LONG_TEXT)
        end = cut.start() if cut else len(text)
        yield from backend.encode_batch_fast([text[start:end]], add_special_tokens=False)[0].ids
        start = end


def meta_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The meta-token's id.

    Raises:
        UserError: if the tokenizer has none.
    """
    if getattr(tokenizer, "meta_token_id", None) is None:
        raise UserError(
            "this tokenizer has no meta-token: use the one that add_meta_attention was given, or that was saved with "
            "the model."
        )
    return tokenizer.meta_token_id


def text_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The entries that a text may have: all up to the last one that is not the meta-token."""
    return len(tokenizer) - (meta_token_id(tokenizer) == len(tokenizer) - 1)


def padded_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The model's vocabulary: entries and meta-token, up to a multiple of 64 (50304 with GPT-2's)."""
    return math.ceil(max(len(tokenizer), meta_token_id(tokenizer) + 1) / 64) * 64


def check_meta_token(config: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a model without a meta-token, or whose vocabulary is not that of the tokenizer in its folder."""
    if config.meta_token_id is None:
        raise UserError(
            f"the model in {folder} has no meta_token_id, which markers need; `metatokens retrofit` gives it one."
        )
    if config.meta_token_id != meta_token_id(tokenizer):
        raise UserError(
            f"the model in {folder} has meta_token_id {config.meta_token_id}, and its tokenizer's meta-token is "
            f"{meta_token_id(tokenizer)}."
        )
    entries, used = text_vocab_size(tokenizer), getattr(config, "unpadded_vocab_size", None) or config.vocab_size
    if entries > used:
        raise UserError(
            f"the tokenizer in {folder} has {entries} entries, and the model's unpadded_vocab_size is {used}: call "
            "model.resize_token_embeddings(len(tokenizer)) after adding tokens, and save both."
        )


def _pretrained(name: str, complaint: str) -> PreTrainedTokenizerBase:
    tokenizer = load_plain_tokenizer(name, complaint)
    if hasattr(tokenizer, "meta_token"):
        return tokenizer
    return load_plain_tokenizer(name, complaint, meta_token=META_TOKEN)


def load_plain_tokenizer(name: str, complaint: str, **settings: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of the Hugging Face Hub as transformers loads it, with further settings.

    Raises:
        UserError: if there is none, with the sentence `complaint`.
    """
    from transformers import AutoTokenizer  # imports torch, which data-loading workers can do without

    try:
        # Unless it is told, transformers asks on the terminal whether to run code that it finds in the folder.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **settings)
    except Exception as error:  # the backend raises bare Exception where it cannot parse a file
        raise UserError(complaint) from error


def _train(spec: str, corpus: Iterable[str] | None, extra_texts: Iterable[str]) -> PreTrainedTokenizerFast:
    digits = spec.removeprefix("train:")
    if not (digits.isdecimal() and MIN_ENTRIES <= int(digits) <= MAX_ENTRIES):
        raise UserError(f"the tokenizer {spec!r} must be train:N with N from {MIN_ENTRIES} to {MAX_ENTRIES}.")
    if corpus is None:
        raise ValueError(f"the tokenizer {spec} needs a corpus to learn from.")
    entries = int(digits)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_training_texts(corpus, extra_texts, entries), trainer)
    if backend.get_vocab_size() < entries:
        raise UserError(
            f"the corpus has too little text for the tokenizer {spec}: it yields no more than "
            f"{backend.get_vocab_size()} entries."
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        meta_token=META_TOKEN,
        split_special_tokens=True,
        add_prefix_space=False,
        clean_up_tokenization_spaces=False,
    )


def _training_texts(corpus: Iterable[str], extra_texts: Iterable[str], entries: int) -> Iterator[str]:
    """The corpus, then the extra texts as often as a piece must occur to be sure of its entry.

    With V entries, the rarest pieces that get one occur about (characters / 16 V) times; four times that
    made each of the tasks' 200 items one token for V = 4096, at 2 % more tokens for the corpus.
    """
    characters = 0
    for document in corpus:
        characters += len(document)
        yield document
    yield from list(extra_texts) * math.ceil(characters / (4 * entries))
