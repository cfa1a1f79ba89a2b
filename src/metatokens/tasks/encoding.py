"""Encode prompts segment by segment, with a meta-token at each join."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from metatokens.data.landmarks import Landmarks
from metatokens.data.prompts import join_segments
from metatokens.data.tokenizer import beginning_of, encode_text, meta_token_id


class SegmentEncoder:
    """Encodes prompts and completions.

    Args:
        tokenizer: any tokenizer with a meta-token.
        landmarks: a rule that puts landmarks into prompts, see `Landmarks`.

    Raises:
        UserError: if the tokenizer has no meta-token, or the rule does not fit it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, landmarks: str | None = None):
        self.tokenizer = tokenizer
        self._landmarks = None if landmarks is None else Landmarks(tokenizer, landmarks)
        self.beginning = beginning_of(tokenizer)
        self.meta_token_id: int = meta_token_id(tokenizer)
        self.eos_token_id: int = tokenizer.eos_token_id

    def encode_text(self, text: str, continues: bool) -> list[int]:
        """The ids of one text, which may continue another; what looks like a special token is text."""
        [ids] = encode_text(self.tokenizer, [text], continues=continues)
        return ids

    def encode_prompt(self, segments: Sequence[str]) -> list[int]:
        """The ids of the segments with a meta-token at each join, after those that the tokenizer puts before a text."""
        ids = self.beginning + join_segments(segments, self.encode_text, self.meta_token_id)
        return ids if self._landmarks is None else self._landmarks.insert_into(ids)
