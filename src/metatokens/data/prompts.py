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
    encode_with_control,
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

    def encode(segment: str, continues: bool) -> list[int]:
        return encode_text(tokenizer, [segment], continues=continues)[0]

    segments = _split(text, markers) if isinstance(markers, str) else split_at(text, markers)
    prompt = [*beginning_of(tokenizer), *join_segments(segments, encode, meta_token_id(tokenizer))]
    return prompt if landmarks is None else Landmarks(tokenizer, landmarks).insert_into(prompt)


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
            if in_messages.fullmatch(part):
                ids += encode_text(tokenizer, [part.replace(_BREAK, "")], continues=continues)[0]
            else:
                ids += encode_with_control(tokenizer, part, continues=continues)
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
    safe_messages: list[dict[str, Any]] = []
    for message in messages:
        texts = {
            key: _without(control, value)
            for key, value in message.items()
            if isinstance(value, str)
        }
        safe_messages.append(message | texts)
    return safe_messages


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
