"""Landmarks: rules that put a meta-token after each line, paragraph or sentence, or after every N tokens."""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from metatokens.data.insertion import Ids
from metatokens.data.tokenizer import backend_of, meta_token_id
from metatokens.errors import UserError
from metatokens.recipe import landmark_rule

Marks = npt.NDArray[np.bool_]

# The tokens before and after a place that decide whether it has a landmark; no rule reads more bytes than these have.
BEFORE, AFTER = 72, 4
_CONTROL = b"\0\0"  # replaces a control token's text
# In a byte-level vocabulary.
_BYTES = {ord(letter): byte for byte, letter in bytes_to_unicode().items()}

# White space of Unicode that ASCII lacks, and four of ASCII's that patterns over bytes do not count. The rules read a
# space in place of each, after as many fillers as keep all bytes in their places; no text has a filler.
_OTHER_WHITE = re.compile(
    "|".join(
        "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
        + "".join(map(chr, range(0x2000, 0x200B)))
    ).encode()
)
_FILLER = b"\xff"

_BLANKS = 32  # bytes at most, between the text of a line and its line feed
_BLANK = rb"[ \t\r\f\v\xff]"
# The lookbehind of `re` has a fixed length, so there is one pattern for each number of blanks.
_BEHIND_TEXT = b"|".join(
    rb"(?<=[^\s\xff]%b{%d}\n)" % (_BLANK, blanks) for blanks in range(_BLANKS + 1)
)
_LINE = rb"\n(?:" + _BEHIND_TEXT + rb")"
_NOT_ABBREVIATED = rb"(?<!(?<!['\x80-\xfe])\b[A-Za-z]\.)" + b"".join(
    rb"(?<!\b%s\.)" % title for title in (b"Mr", b"Mrs", b"Ms", b"Dr", b"St", b"Prof")
)
_CLOSING = b"(?:%s){0,3}" % "|".join(map(re.escape, "\"')]\u2019\u201d»」』")).encode()
# `…`, `。`, `！` and `？` have three bytes. The pattern begins with a set of first bytes, which `re` finds quickly.
_SENTENCE = rb"""
    [.!?\xe2\xe3\xef]
    (?:
        (?: (?<=\.) %(not_abbreviated)b | (?<=[!?]) | (?<=\xe2)\x80\xa6 )  # . ! ? or an ellipsis
        %(closing)b
        (?= \xff*\s (?![a-z]) | \Z )  # then white space, but not a single one before a-z
      |
        (?: (?<=\xe3)\x80\x82 | (?<=\xef)\xbc[\x81\x9f] )  # the same of full width
        %(closing)b
    )
"""
_ENDS = {
    "line": re.compile(_LINE),
    "paragraph": re.compile(_LINE + rb"%b{0,%d}\n" % (_BLANK, _BLANKS)),
    "sentence": re.compile(
        _SENTENCE % {b"not_abbreviated": _NOT_ABBREVIATED, b"closing": _CLOSING}, re.VERBOSE
    ),
}


class Landmarks:
    r"""A rule for landmarks: it puts meta-tokens into a text, given as token ids.

        Landmarks(tokenizer, "sentence").insert_into(tokenizer("It rains. He reads.")["input_ids"])

    The meta-token goes after the token that contains the last character of a unit, such as a line.

    - A line ends at its line feed (`\n`, also in `\r\n`). A line without text has no landmark.
    - A paragraph ends at the line feed of the first line without text after it.
    - A sentence ends at `.`, `!`, `?`, `…`, `。`, `！` or `？`, or at the closing quotes and brackets (three at most)
      directly after it. After the first four, white space or the end of the ids must follow. If exactly one character
      of white space follows, and then a letter from a to z, the sentence continues. A `.` after a single letter (`J.`,
      `e.g.`), Mr, Mrs, Ms, Dr, St or Prof ends no sentence.
    - `every:N` counts N tokens, including control tokens but not meta-tokens.

    A token is never split, and gets at most one meta-token. No rule inserts one directly before a meta-token that the
    text already has. Line, paragraph and sentence insert none directly before a control token, such as the end of a
    text or of a chat's message, so that a model learns to end a text from its last token. Text that looks like a
    marker stays text. White space is what `str.isspace` knows. A line feed after more than 32 bytes (UTF-8) of other
    white space ends nothing.

    Args:
        tokenizer: the tokenizer that made the ids.
        rule: `line`, `paragraph`, `sentence` or `every:N`.

    Raises:
        UserError: if the rule is unknown, or the tokenizer has no meta-token, or drops the white space that the rule
            needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rule: str):
        self.rule = landmark_rule(rule)
        self.meta_token_id = meta_token_id(tokenizer)
        self._every = int(rule.partition(":")[2] or 0)
        if self._every:
            return
        # The last for rows that have no token.
        self._pieces = np.append(_pieces(tokenizer, len(tokenizer)), _CONTROL)
        self._sizes = np.array([len(piece) for piece in self._pieces])
        # Numpy would drop trailing NULs.
        self._is_control = np.array([piece == _CONTROL for piece in self._pieces])
        white = b" " if rule == "sentence" else b"\n"
        if not any(white in piece for piece in self._pieces):
            raise UserError(
                f"landmarks by {rule} need white space that the tokenizer drops; every:N needs none."
            )

    def __call__(self, ids: npt.ArrayLike, start: int = 0) -> Marks:
        """Find the tokens after which a meta-token goes.

        Args:
            ids: a text, (tokens,), which may already have meta-tokens.
            start: the number of the text's tokens before these, without meta-tokens; `every:N` counts them too.

        Returns:
            (tokens,) bool.

        Raises:
            UserError: if the ids have another number of axes.
        """
        ids = _of_one_text(ids)
        is_text = ids != self.meta_token_id
        behind = np.zeros(len(ids), dtype=bool)
        behind[is_text] = self._behind(ids[is_text], start)
        behind[:-1] &= is_text[1:]
        return behind

    def insert_into(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """Insert the meta-tokens.

        Args:
            ids: (length,).
            before: what stands before these, which the rules read too.

        Returns:
            (length + meta-tokens,).
        """
        text = _of_one_text(ids)
        behind = self([*before, *text])[len(before) :]
        return np.insert(text, np.flatnonzero(behind) + 1, self.meta_token_id).tolist()

    def _behind(self, text: Ids, start: int) -> Marks:
        """The same for a text without meta-tokens."""
        if self._every:
            return np.arange(start + 1, start + len(text) + 1) % self._every == 0
        text = np.minimum(text, len(self._pieces) - 1)
        written = _OTHER_WHITE.sub(_as_blank, b"".join(self._pieces[text]))
        last_bytes = [match.end() - 1 for match in _ENDS[self.rule].finditer(written)]
        ends_of_tokens = np.cumsum(self._sizes[text])
        behind = np.zeros(len(text), dtype=bool)
        behind[np.searchsorted(ends_of_tokens, last_bytes, side="right")] = True
        behind[:-1] &= ~self._is_control[text[1:]]
        return behind


def _of_one_text(ids: npt.ArrayLike) -> Ids:
    text = np.asarray(ids, dtype=np.int64)
    if text.ndim != 1:
        raise UserError(f"landmarks go into the ids of one text, and these have {text.ndim} axes.")
    return text


def with_landmarks(
    landmarks: Landmarks | None, ids: Sequence[int], before: Sequence[int] = ()
) -> list[int]:
    """The ids with the meta-tokens of a rule; as they are without one. `before` as in `Landmarks.insert_into`."""
    return list(ids) if landmarks is None else landmarks.insert_into(ids, before)


def _as_blank(white: re.Match[bytes]) -> bytes:
    return _FILLER * (len(white[0]) - 1) + b" "


@lru_cache(maxsize=4)
def _pieces(tokenizer: PreTrainedTokenizerBase, size: int) -> npt.NDArray[np.object_]:
    """The bytes of text of each of a tokenizer's `size` entries; `_CONTROL` for control tokens."""
    backend = backend_of(tokenizer)
    added = backend.get_added_tokens_decoder()
    is_of_bytes = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()
    pieces: list[bytes] = []
    for number in range(size):
        if number in added:
            piece = b"" if added[number].special else added[number].content.encode()
        else:
            piece = _bytes_of(backend.id_to_token(number) or "", is_of_bytes)
        pieces.append(piece or _CONTROL)
    return np.array(pieces, dtype=object)


def _bytes_of(token: str, is_of_bytes: bool) -> bytes:
    """The text of an entry of a byte-level vocabulary, or of another."""
    if is_of_bytes:
        return token.translate(_BYTES).encode("latin-1", "ignore")
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
