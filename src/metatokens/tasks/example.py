"""One example: drawn (`Example`), encoded (`Encoded`), and written or read as a line (`metatokens.records`).

A prompt is a sequence of text segments with one meta-token at each join. Its text shows ` _PAUSE_` at the joins. The
offsets of these markers are stored with the text, so that a literal `_PAUSE_` stays text.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from metatokens.data.prompts import SegmentEncoder
from metatokens.errors import UserError
from metatokens.files import sha256_of
from metatokens.recipe import Condition, Split
from metatokens.records import MARKER, ExampleRecord, read_lines, split_at


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The part of an example that training and evaluation read."""

    input_ids: Sequence[int] | np.ndarray
    """The ids of the prompt, of the completion, and the end of text."""
    answer_start: int
    """The index of the completion's first id."""

    @property
    def answer(self) -> slice:
        """Where the ids of the completion and the end of text are."""
        return slice(self.answer_start, len(self.input_ids))

    def without_text(self) -> "Encoded":
        """The same with the ids in an array, which takes a tenth of the memory of an `Example`."""
        ids = np.asarray(self.input_ids, dtype=np.int32)
        return Encoded(input_ids=ids, answer_start=self.answer_start)


@dataclass(frozen=True, kw_only=True)
class Example(Encoded):
    """One prompt with its completion, as text and as token ids."""

    task: str | None = None
    phase: int | None = None
    seed: int | None = None
    index: int | None = None
    split: Split | None = None
    condition: Condition | None = None
    prompt: str
    """Readable text, each meta-token shown as ` _PAUSE_`."""
    markers: tuple[int, ...]
    """The character offsets in `prompt` at which ` _PAUSE_` is a meta-token."""
    completion: str
    input_ids: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """The prompt's length in tokens, meta-tokens included."""
        return self.answer_start

    def to_record(self) -> dict[str, Any]:
        """The fields of the example's line, in their order."""
        return {name: getattr(self, name) for name in ExampleRecord.model_fields}


def encode_example(
    encoder: SegmentEncoder, segments: Sequence[str], completion: str, **fields: Any
) -> Example:
    """Tokenize a prompt segment by segment, and its completion; `fields` are the example's other fields."""
    ends_of_markers = accumulate(len(segment) + len(MARKER) for segment in segments[:-1])
    prompt_ids = encoder.encode_prompt(segments)
    return Example(
        prompt=MARKER.join(segments),
        markers=tuple(end - len(MARKER) for end in ends_of_markers),
        completion=completion,
        input_ids=(*prompt_ids, *encoder.encode_text(completion, True), encoder.eos_token_id),
        answer_start=len(prompt_ids),
        **fields,
    )


def records_sha256(examples: Sequence[Example]) -> str:
    """The SHA-256 of examples' texts and markers."""
    texts = [(example.prompt, example.markers, example.completion) for example in examples]
    return sha256_of(json.dumps(texts).encode())


def read_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, landmarks: str | None = None
) -> list[Example]:
    """Read a JSON-lines file of records; each needs only `prompt` and `completion`.

    A prompt without `markers` has no meta-token, whatever its text. If such a prompt contains ` _PAUSE_`, a warning on
    standard error names the first one.

    Args:
        path: the file.
        tokenizer: the model's; ids in a record are ignored and computed anew.
        landmarks: a rule that puts further meta-tokens into the `input_ids` of the prompts, see `Landmarks`.

    Raises:
        UserError: if the file cannot be read, has no record, or has a bad one (the message names it); or if the rule
            does not fit the tokenizer, or puts in nothing.
    """
    encoder = SegmentEncoder(tokenizer, landmarks)
    records = read_lines(path, ExampleRecord)
    if not records:
        raise UserError(
            f"{path} holds no record; each line is a JSON object with a prompt and a completion."
        )
    has_warned = False
    examples = []
    for number, record in enumerate(records, start=1):
        if not (record.prompt and record.completion):
            raise UserError(
                f"{path}: the prompt or the completion of record {number} is missing or empty."
            )
        is_unmarked = MARKER in record.prompt and "markers" not in record.model_fields_set
        if is_unmarked and not has_warned:
            has_warned = True
            print(
                f"{path}, record {number}: the prompt has {MARKER!r} and no markers, so it is read as text; list the "
                "offsets of meta-tokens in markers, or give markers: [].",
                file=sys.stderr,
            )
        segments = split_at(record.prompt, record.markers)
        example = encode_example(encoder, segments, record.completion)
        if not example.answer_start or len(example.input_ids) == example.answer_start + 1:
            raise UserError(
                f"{path}: the tokenizer has no token for the prompt or the completion of record {number}."
            )
        examples.append(example)
    if landmarks is not None and not any(
        list(example.input_ids).count(encoder.meta_token_id) > len(example.markers)
        for example in examples
    ):
        raise UserError(f"the rule {landmarks} inserts no meta-token into any prompt of {path}.")
    return examples
