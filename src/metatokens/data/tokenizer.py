"""Tokenizers: GPT-2's, one from a folder, or a byte-level BPE trained on the corpus.

Text never becomes a control token: `<|endoftext|>` or `<|meta|>` in a document is encoded as ordinary pieces of those
characters, and decodes to them. Control ids (the end of a document, the meta-token) are inserted as ids. A tokenizer
that is loaded here, or was saved with a model, has the meta-token as a special token, `tokenizer.meta_token`. If it did
not have one before, the id is the first one after the vocabulary.
"""

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from metatokens.errors import UserError, one_line

END_OF_TEXT = "<|endoftext|>"
META_TOKEN = "<|meta|>"  # shows the meta-token in a decoded text
MIN_ENTRIES = 300  # of a trained vocabulary; 257 are the bytes and the end-of-text token
MAX_ENTRIES = 2**20
# No maximum length for transformers, which then does not warn about long texts.
UNLIMITED = int(1e30)

# The library's threads do not survive a fork, so forked data-loading workers use none. If the variable is unset, the
# library switches them off itself, but prints a warning into the progress display.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


def load_tokenizer(
    spec: str, *, corpus: Iterable[str] | None = None, extra_texts: Iterable[str] = ()
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a spec names, or train it.

    Args:
        spec: a folder with a tokenizer; a name of the Hugging Face Hub, such as `gpt2`, which may be in its local cache
            (a folder of that name takes precedence); or `train:N`, a byte-level BPE with N entries, trained here.
        corpus: the documents that `train:N` is trained on; otherwise not read.
        extra_texts: short texts that `train:N` is also trained on, weighted so that each of their words becomes a
            single token if the vocabulary has room.

    Returns:
        A fast tokenizer with an end-of-text id, a meta-token and no maximum length, which encodes special tokens in a
        text as text. It stays so when it is saved and loaded again, by transformers too.

    Raises:
        UserError: if the spec names no usable tokenizer, or the corpus has too little text for N entries.
    """
    if spec.startswith("train:"):
        tokenizer = _train(spec, corpus or (), extra_texts)
    else:
        tokenizer = load_plain_tokenizer(spec)
        if not hasattr(tokenizer, "meta_token"):
            tokenizer = load_plain_tokenizer(spec, meta_token=META_TOKEN)
    if not (
        tokenizer.is_fast
        and tokenizer.eos_token_id is not None
        and max(tokenizer.get_vocab().values()) == len(tokenizer) - 1
        and not shares_its_id(tokenizer)
        and encode_text(tokenizer, ["text"])
        != [[]]  # transformers loads a folder without vocabulary as an empty one
    ):
        raise UserError(
            f"the tokenizer {spec} cannot be used: it must be a fast one with an end-of-text token and a "
            "vocabulary numbered from 0 without gaps."
        )
    tokenizer.model_max_length = UNLIMITED
    return tokenizer


def shares_its_id(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether another entry has the meta-token's id, as where it was added to a vocabulary with gaps."""
    vocabulary = tokenizer.get_vocab()
    meta_id = vocabulary.get(getattr(tokenizer, "meta_token", None))
    return meta_id is not None and list(vocabulary.values()).count(meta_id) > 1


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    continues: bool = False,
    with_control: bool = False,
) -> list[list[int]]:
    """The ids of each text; special tokens are neither recognised nor added.

    Tokenizers like Llama 2's put a space before a text. They put none before a text that `continues` another. In a text
    `with_control`, all control tokens are recognised except for the meta-token, which the tokenizer must have.

    Raises:
        UserError: if a text has a lone surrogate, which UTF-8 cannot encode.
    """
    backend = _copy_of_backend(tokenizer, len(tokenizer), continues, with_control)
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    except TypeError as error:
        raise UserError(
            "a text has a lone surrogate, such as for a byte that is not UTF-8, and cannot be encoded."
        ) from error
    return [encoding.ids for encoding in encodings]


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """What a fast tokenizer encodes by.

    Raises:
        UserError: if it is a slow one, such as ByT5's.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"{type(tokenizer).__name__} is no fast tokenizer, and meta-tokens need one."
        )
    return backend


def control_texts(backend: Tokenizer) -> dict[int, str]:
    """The texts of a backend's control tokens, the meta-token included, by their ids."""
    added = backend.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


@lru_cache(maxsize=8)
def _copy_of_backend(
    tokenizer: PreTrainedTokenizerBase, size: int, continues: bool, with_control: bool
) -> Tokenizer:
    """The backend of a tokenizer with `size` entries, changed so that text stays text.

    `with_control`, the control tokens are recognised, except for the meta-token. An earlier call of the tokenizer
    may have left truncation and padding in the original.
    """
    settings = json.loads(backend_of(tokenizer).to_str()) | {
        "truncation": None,
        "padding": None,
    }
    if continues:
        settings |= {
            part: _without_prefix(settings[part]) for part in ("normalizer", "pre_tokenizer")
        }
    backend = Tokenizer.from_str(json.dumps(settings))
    hidden = [tokenizer.meta_token] if with_control else _control_in_vocabulary(backend)
    if hidden:
        backend = Tokenizer.from_str(json.dumps(_hiding(settings, hidden)))
    backend.encode_special_tokens = not with_control  # as text
    return backend


def _control_in_vocabulary(backend: Tokenizer) -> list[str]:
    """The control tokens whose texts are pieces of text too, as in the vocabularies of Unigram models.

    The unknown token is none: it stands for text. The backend then encodes control tokens as text.
    """
    backend.encode_special_tokens = True
    unknown = getattr(backend.model, "unk_token", None)
    reached: list[str] = []
    for number, text in control_texts(backend).items():
        if text != unknown and number in backend.encode(text, add_special_tokens=False).ids:
            reached.append(text)
    return reached


def _hiding(settings: dict[str, Any], tokens: Iterable[str]) -> dict[str, Any]:
    """Change the settings of a backend so that no text becomes one of the tokens. All ids are the same."""
    names = {token: token + secrets.token_hex() for token in tokens}  # which no text can guess
    for added in settings["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    model = settings["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            names.get(piece, piece): number for piece, number in model["vocab"].items()
        }
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])
        ]
    return settings


def _without_prefix(part: Any) -> Any:
    """A part of a backend's settings that puts no space before a text."""
    if isinstance(part, list):
        return [_without_prefix(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return {key: off.get(key, _without_prefix(value)) for key, value in part.items()}


def decode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]
) -> str:
    """The text by which ids continue a prompt, without control tokens.

    Tokenizers like Llama 2's drop the space before the first word of a text, which the first word of a continuation
    keeps.
    """
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    if not whole.startswith(before):  # the prompt ends within a character
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(whole[len(before) :])


def text_of_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token within a text; at the beginning of one, tokenizers like Llama 2's drop its space."""
    first, both = tokenizer.decode([token]), tokenizer.decode([token, token])
    return str(both.removeprefix(first))


def beginning_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that a tokenizer puts before a text, such as a token for its beginning; often none."""
    encoding = tokenizer("text", return_special_tokens_mask=True)
    is_special = encoding["special_tokens_mask"]
    start_of_text = is_special.index(0) if 0 in is_special else 0
    return encoding["input_ids"][:start_of_text]


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, with those that the tokenizer puts before it and the end-of-text id."""
    beginning, end = beginning_of(tokenizer), tokenizer.eos_token_id
    return [[*beginning, *ids, end] for ids in encode_text(tokenizer, texts)]


def meta_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The meta-token's id, which the tokenizer must have.

    Raises:
        UserError: if it has none.
    """
    if getattr(tokenizer, "meta_token_id", None) is None:
        raise UserError(
            "this tokenizer has no meta-token: use the one that add_meta_attention was given, or that was saved with "
            "the model."
        )
    return tokenizer.meta_token_id


def text_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of entries for text: all up to the last one that is not the meta-token."""
    return len(tokenizer) - (meta_token_id(tokenizer) == len(tokenizer) - 1)


def padded_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The model's vocabulary: the entries and the meta-token, rounded up to a multiple of 64 (50304 for GPT-2)."""
    return math.ceil(len(tokenizer) / 64) * 64


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
    entries = text_vocab_size(tokenizer)
    used = getattr(config, "unpadded_vocab_size", None) or config.vocab_size
    if entries > used:
        raise UserError(
            f"the tokenizer in {folder} has {entries} entries, and the model's unpadded_vocab_size is {used}: call "
            "model.resize_token_embeddings(len(tokenizer)) after adding tokens, and save both."
        )


def load_plain_tokenizer(name: str, **settings: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hugging Face Hub as transformers does.

    Raises:
        UserError: if there is none that can be loaded.
    """
    from transformers import AutoTokenizer  # imports torch, which data-loading workers do not need

    try:
        # Without trust_remote_code, transformers asks on the terminal whether to run code in the folder.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **settings)
    except Exception as error:  # the backend raises bare Exception if it cannot parse a file
        raise UserError(
            f"{name} holds no tokenizer that can be loaded: give a folder, a name of the Hugging Face Hub, "
            f"or train:N (N entries). The cause: {one_line(error)}."
        ) from error


def _train(spec: str, corpus: Iterable[str], extra_texts: Iterable[str]) -> PreTrainedTokenizerFast:
    digits = spec.removeprefix("train:")
    if not (digits.isdecimal() and MIN_ENTRIES <= int(digits) <= MAX_ENTRIES):
        raise UserError(
            f"the tokenizer {spec!r} must be train:N with N from {MIN_ENTRIES} to {MAX_ENTRIES}."
        )
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


def _training_texts(
    corpus: Iterable[str], extra_texts: Iterable[str], entries: int
) -> Iterator[str]:
    """The corpus, then the extra texts, repeated so often that their words get entries of their own.

    With V entries, the rarest pieces that get one occur about (characters / 16 V) times. With four times as many, each
    of the tasks' 200 items became one token for V = 4096, and the corpus took 2 % more tokens.
    """
    characters = 0
    for document in corpus:
        characters += len(document)
        yield document
    yield from list(extra_texts) * math.ceil(characters / (4 * entries))
