"""Encode prompts in which markers are meta-tokens.

Only a marker that the caller names is one; other text that looks like a marker stays text.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import (
    backend_of,
    beginning_of,
    control_texts,
    encode_text,
    meta_token_id,
)
from metatokens.errors import UserError
from metatokens.records import split_at

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
)  # of a chat template, or of a choice among several
_BREAK = "\ufdd0"  # within the texts of control tokens in messages; Unicode keeps it for programs' own use


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    markers: str | Sequence[int] = (),
    *,
    landmarks: str | None = None,
) -> list[int]:
    """Encode a prompt, with a meta-token in place of each marker and at each landmark.

        encode_prompt(tokenizer, "Bits: 0 _PAUSE_ 1 0", markers="_PAUSE_")
        encode_prompt(tokenizer, "It rains. He reads.", landmarks="sentence")

    Args:
        tokenizer: the model's.
        text: the prompt.
        markers: the string that is a meta-token wherever it occurs, together with a space before it; or, as in the
            records of `finetune`, the character offsets at which ` _PAUSE_` is one.
        landmarks: a rule that inserts further meta-tokens, see `Landmarks`.

    Returns:
        The ids, after those that the tokenizer puts before a text. Anything else that looks like a special token is
        encoded as text.

    Raises:
        UserError: if the marker is empty, there is none at one of the offsets, or the rule does not fit the tokenizer.
    """
    segments = _split(text, markers) if isinstance(markers, str) else split_at(text, markers)
    return SegmentEncoder(tokenizer, landmarks).encode_prompt(segments)


class SegmentEncoder:
    """Encodes prompts segment by segment, with a meta-token at each join, and completions.

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


def join_segments(
    segments: Sequence[str], encode: Callable[[str, bool], Iterable[int]], meta_token_id: int
) -> list[int]:
    """The ids of segments of one text, with a meta-token at each join.

    `encode` gets a segment, and whether it continues the text.
    """
    ids: list[int] = []
    continues = False
    for number, segment in enumerate(segments):
        if number:
            ids.append(meta_token_id)
        ids += encode(segment, continues)
        continues = continues or bool(segment)
    return ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    marker: str | None = None,
    *,
    landmarks: str | None = None,
) -> list[int]:
    """Encode the output of `tokenizer.apply_chat_template(..., tokenize=False)`.

    The template's control tokens are recognised; what looks like a meta-token is text, and so is what looks like a
    control token in messages that went through `without_control`. The other arguments are those of `encode_prompt`.
    """
    control = _control(tokenizer)
    in_messages = re.compile(f"({'|'.join(re.escape(_broken(name)) for name in control)})")

    def encode(segment: str, continues: bool) -> list[int]:
        ids: list[int] = []
        for part in in_messages.split(segment):
            is_text = in_messages.fullmatch(part) is not None
            texts = [part.replace(_BREAK, "") if is_text else part]
            ids += encode_text(tokenizer, texts, continues=continues, with_control=not is_text)[0]
            continues = continues or bool(part)
        return ids

    segments = [text] if marker is None else _split(text, marker, _without(control, marker))
    ids = join_segments(segments, encode, meta_token_id(tokenizer))
    return ids if landmarks is None else Landmarks(tokenizer, landmarks).insert_into(ids)


def without_control(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages of a chat, whose texts get no control token from a chat template and `encode_chat`.

    A noncharacter is put into each text of a control token; `encode_chat` takes it out.
    """
    control = _control(tokenizer)

    def safe(value: Any) -> Any:
        return _without(control, value) if isinstance(value, str) else value

    return [{key: safe(value) for key, value in message.items()} for message in messages]


def _control(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of a tokenizer's control tokens, longest first, so that none hides a longer one that it begins."""
    return sorted(control_texts(backend_of(tokenizer)).values(), key=len, reverse=True)


def _without(control: Sequence[str], text: str) -> str:
    return re.sub("|".join(map(re.escape, control)), lambda match: _broken(match[0]), text)


def _broken(control: str) -> str:
    return f"{control[0]}{_BREAK}{control[1:]}"


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
    """Apply the tokenizer's chat template to messages, up to where the answer begins, for `encode_chat`.

    What looks like a control token in a message is text there, see `without_control`.

    Raises:
        UserError: if there is no template, or it refuses the messages, such as two user messages in succession.
    """
    if tokenizer.chat_template is None:
        raise UserError("the model's tokenizer has no chat template.")
    safe_messages = without_control(tokenizer, messages)
    try:
        return str(
            tokenizer.apply_chat_template(safe_messages, tokenize=False, add_generation_prompt=True)
        )
    except TEMPLATE_ERRORS as error:
        raise UserError(f"the chat template does not take these messages: {error}.") from error


def _split(text: str, *markers: str) -> list[str]:
    if not all(markers):
        raise UserError(
            "the marker is empty; give the text that marks a meta-token, such as _PAUSE_."
        )
    return re.split(f" ?(?:{'|'.join(map(re.escape, markers))})", text)
