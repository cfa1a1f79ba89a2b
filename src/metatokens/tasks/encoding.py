"""Encode prompts segment by segment, with a meta-token at each join, and each word only once."""

import re
from collections.abc import Sequence

from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from metatokens.data.landmarks import Landmarks
from metatokens.data.prompts import join_segments
from metatokens.data.tokenizer import beginning_of, encode_text, meta_token_id

# GPT-2's byte-level pre-tokenizer cuts ASCII text into these words, and byte-pair merges never cross its cuts.
_ASCII_WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)


class SegmentEncoder:
    """Encodes prompts and completions, and caches the ids of words.

    If the tokenizer is a byte-level BPE with GPT-2's word cuts, the ids of an ASCII text are those of its words in a
    row. Other texts, and all texts with another tokenizer, are encoded whole. The ids are the same either way.

    Args:
        tokenizer: any tokenizer with a meta-token.
        landmarks: a rule that puts landmarks into prompts, see `Landmarks`.

    Raises:
        UserError: if the tokenizer has no meta-token, or the rule does not fit it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, landmarks: str | None = None):
        self._tokenizer = tokenizer
        self._landmarks = None if landmarks is None else Landmarks(tokenizer, landmarks)
        self._word_ids: dict[str, list[int]] = {}
        self._words_are_independent = _cuts_words_like_gpt2(tokenizer)
        self.beginning = beginning_of(tokenizer)
        self.meta_token_id: int = meta_token_id(tokenizer)
        self.eos_token_id: int = tokenizer.eos_token_id

    def encode_text(self, text: str, continues: bool) -> list[int]:
        """The ids of one text, which may continue another; what looks like a special token is text."""
        if not (self._words_are_independent and text.isascii()):
            return encode_text(self._tokenizer, [text], continues=continues)[0]
        words = _ASCII_WORDS.findall(text)
        new_words = list(set(words).difference(self._word_ids))
        if new_words:
            self._word_ids.update(zip(new_words, encode_text(self._tokenizer, new_words), strict=True))
        return [token for word in words for token in self._word_ids[word]]

    def encode_prompt(self, segments: Sequence[str]) -> list[int]:
        """The ids of the segments with a meta-token at each join, after those that the tokenizer puts before a text."""
        ids = [*self.beginning, *join_segments(segments, self.encode_text, self.meta_token_id)]
        return ids if self._landmarks is None else self._landmarks.insert_into(ids)


def _cuts_words_like_gpt2(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = tokenizer.backend_tokenizer
    cut = backend.pre_tokenizer
    return (
        isinstance(backend.model, models.BPE)
        and backend.model.dropout is None
        and backend.normalizer is None
        and isinstance(cut, pre_tokenizers.ByteLevel)
        and cut.use_regex
        and not cut.add_prefix_space
        and all(token.special for token in backend.get_added_tokens_decoder().values())
    )
