"""Encode prompts in which markers are meta-tokens.

Only a marker that the caller names is one; other text that looks like a marker stays text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import META_TOKEN, backend_of, beginning_of, encode_text, meta_token_id
from metatokens.errors import UserError
from metatokens.records import split_at


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, markers: str | Sequence[int] = (), *, landmarks: str | None = None
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
    segments: Sequence[str], encode: Callable[[str, bool], Iterable[int]], *between: int
) -> Iterator[int]:
    """The ids of segments of one text, with the ids `between` at each join.

    `encode` gets a segment, and whether it continues the text.
    """
    continues = False
    for number, segment in enumerate(segments):
        if number:
            yield from between
        yield from encode(segment, continues)
        continues = continues or bool(segment)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, text: str, marker: str | None = None, *, landmarks: str | None = None
) -> list[int]:
    """Encode the output of `tokenizer.apply_chat_template(..., tokenize=False)`.

    The template's control tokens are recognised; what looks like a meta-token is text. The other arguments are those of
    `encode_prompt`.
    """
    [looks_alike] = encode_text(tokenizer, [META_TOKEN], continues=True)

    def encode(part: str, continues: bool) -> list[int]:
        backend = backend_of(tokenizer, continues=continues)
        backend.encode_special_tokens = False
        backend.no_truncation()
        backend.no_padding()
        return backend.encode(part, add_special_tokens=False).ids

    def encode_segment(segment: str, continues: bool) -> Iterator[int]:
        return join_segments(
            segment.split(META_TOKEN), lambda part, later: encode(part, continues or later), *looks_alike
        )

    segments = [text] if marker is None else _split(text, marker)
    ids = list(join_segments(segments, encode_segment, meta_token_id(tokenizer)))
    return ids if landmarks is None else Landmarks(tokenizer, landmarks).insert_into(ids)


def read_messages(file: Path) -> list[dict[str, str]]:
    """Read a chat, a JSON list of messages with `role` and `content`.

    Raises:
        UserError: if the file cannot be read, or holds something else.
    """
    try:
        messages = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {' '.join(str(error).split())}.") from error
    if not (isinstance(messages, list) and messages) or not all(
        isinstance(one, dict)
        and one.keys() == {"role", "content"}
        and all(isinstance(part, str) for part in one.values())
        for one in messages
    ):
        raise UserError(f'{file} must hold a list of messages, such as [{{"role": "user", "content": "Hello"}}].')
    return messages


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
    """Apply the tokenizer's chat template to messages, up to where the answer begins.

    Raises:
        UserError: if there is no template, or it refuses the messages, such as two user messages in succession.
    """
    if tokenizer.chat_template is None:
        raise UserError("the model's tokenizer has no chat template.")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise UserError(f"the chat template does not take these messages: {error}.") from error


def _split(text: str, marker: str) -> list[str]:
    if not marker:
        raise UserError("the marker is empty; give the text that marks a meta-token, such as _PAUSE_.")
    return re.split(f" ?{re.escape(marker)}", text)
