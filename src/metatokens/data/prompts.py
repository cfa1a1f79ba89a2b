"""Prompts with meta-tokens: a text in which markers stand for them.

Text is never searched for a marker unasked: what looks like one stays text.
"""

import re
from collections.abc import Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from metatokens.data.collating import with_meta_tokens
from metatokens.data.tokenizer import beginning_of, encode_text, meta_token_id
from metatokens.errors import UserError
from metatokens.records import MARKER


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, markers: str | Sequence[int] = (), *, every: int | None = None
) -> list[int]:
    """The ids of a prompt, the meta-token's in place of each marker, or behind every so many tokens.

        encode_prompt(tokenizer, "Bits: 0 _PAUSE_ 1 0", markers="_PAUSE_")

    Args:
        tokenizer: a model's.
        text: the prompt.
        markers: what stands for a meta-token wherever it occurs, a space before it included; or, as in the records of
            `finetune`, the character offsets at which ` _PAUSE_` does.
        every: tokens between two meta-tokens that are put in, as `MetaTokenCollator` does.

    Returns:
        The ids, behind those that the tokenizer begins a text with; whatever else looks like a special token is encoded
        as text.

    Raises:
        UserError: if the marker is empty, there is none at one of the offsets, or `every` is below 1.
    """
    if every is not None and every < 1:
        raise UserError(f"every is {every}; it must be at least 1.")
    if markers == "":
        raise UserError("the marker is empty; give the text that stands for a meta-token, such as _PAUSE_.")
    segments = re.split(f" ?{re.escape(markers)}", text) if isinstance(markers, str) else split_at(text, markers)
    first, *others = encode_text(tokenizer, segments)
    meta = meta_token_id(tokenizer)
    prompt = [*beginning_of(tokenizer), *first, *chain.from_iterable([meta, *ids] for ids in others)]
    return prompt if every is None else with_meta_tokens(prompt, meta, every)


def split_at(prompt: str, offsets: Sequence[int]) -> list[str]:
    """The text between markers, whose character offsets are given in ascending order.

    Raises:
        UserError: if there is no marker at one of them.
    """
    segments, start = [], 0
    for offset in offsets:
        if offset < start or not prompt.startswith(MARKER, offset):
            raise UserError(f"markers: offset {offset} is not that of a further {MARKER!r} in the prompt.")
        segments.append(prompt[start:offset])
        start = offset + len(MARKER)
    return [*segments, prompt[start:]]
