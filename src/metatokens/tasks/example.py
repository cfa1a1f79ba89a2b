"""One example of a task: from drawn content to text, from text to tokens, and to and from records on disk.

A prompt is a sequence of text segments with one meta-token at each join. It is shown with ` _PAUSE_` at the
joins; the offsets of these markers travel with the text, so that a text which literally contains `_PAUSE_`
stays text.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from metatokens.data.prompts import split_at
from metatokens.errors import UserError
from metatokens.records import MARKER
from metatokens.tasks.encoding import SegmentEncoder

Condition = Literal["paper", "landmark", "none", "decoy", "long_prompt"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
Split = Literal["train", "validation", "test"]


def stable_hash(text: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def split_of(key: str) -> Split:
    """The split of what decides an answer, so that no answer to a test prompt stands in a train prompt.

    A tenth of all keys is for testing, a tenth for validation.
    """
    splits: dict[int, Split] = {0: "test", 1: "validation"}
    return splits.get(stable_hash(key) % 10, "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a task asks, before a condition decides what is shown of it, and with which markers.

    A gap g is the place before piece g; gap len(pieces) is the end of the context.
    """

    pieces: Sequence[str]
    """The context's text, cut wherever a marker could stand."""
    repeated: Sequence[str] = ()
    """What follows where markers know the answer: in list recall, the list that is asked about once more."""
    markers: tuple[int, ...]
    """The gaps, of pieces and repeated ones, of the meta-tokens that the question is about, ascending."""
    decoyed: tuple[int, ...]
    """The gaps of all meta-tokens among decoys, which leave the answer unchanged, ascending; empty without any."""
    decoy_repeated: Sequence[str] | None = None
    """What is repeated among decoys, where that differs; the gaps are those of pieces and of this."""
    landmarks: tuple[int, ...]
    """The gaps of the meta-tokens that know nothing of the question: one after each line."""
    question: str
    decoy_question: str | None = None
    """The question in condition `decoy`, where it differs."""
    landmark_question: str | None
    """The question that needs no marker, where there is one."""
    answer: str

    def is_for(self, condition: Condition) -> bool:
        """Whether it can be shown in that condition."""
        if condition == "decoy":
            return bool(self.decoyed)
        return condition in ("paper", "long_prompt") or self.landmark_question is not None

    def segments(self, condition: Condition) -> tuple[str, ...]:
        """The prompt's text segments. There is a meta-token at each join; the last one ends the prompt."""
        if condition in ("landmark", "none"):
            context = self._cut(self.pieces, self.landmarks if condition == "landmark" else ())
            question = self.landmark_question
        elif condition == "decoy":
            repeated = self.repeated if self.decoy_repeated is None else self.decoy_repeated
            context = self._cut([*self.pieces, *repeated], self.decoyed)
            question = self.decoy_question or self.question
        else:
            context, question = self._cut([*self.pieces, *self.repeated], self.markers), self.question
        return (*context[:-1], f"{context[-1]}\n{question}", "")

    @staticmethod
    def _cut(pieces: Sequence[str], gaps: Sequence[int]) -> list[str]:
        return ["".join(pieces[start:end]) for start, end in pairwise((0, *gaps, len(pieces)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt with its completion, as text and as token ids. The fields are the fields of a record."""

    task: str | None = None
    phase: int | None = None
    seed: int | None = None
    index: int | None = None
    split: Split | None = None
    condition: Condition | None = None
    prompt: str
    """Readable text, each meta-token shown as ` _PAUSE_`."""
    markers: tuple[int, ...]
    """The character offsets in `prompt` at which ` _PAUSE_` stands for the meta-token."""
    completion: str
    input_ids: tuple[int, ...]
    """Prompt ids, completion ids, end of text."""
    answer_start: int
    """Index of the completion's first id."""
    n_tokens: int
    """Tokens of the prompt, meta-tokens included."""

    def to_record(self) -> dict[str, Any]:
        """The example as a dictionary that JSON can write."""
        return dataclasses.asdict(self)


def encode_example(encoder: SegmentEncoder, segments: Sequence[str], completion: str, **fields: Any) -> Example:
    """Tokenise a prompt segment by segment and its completion; `fields` are the example's other fields."""
    ends = list(accumulate(len(segment) + len(MARKER) for segment in segments[:-1]))
    prompt_ids = encoder.encode_prompt(segments)
    return Example(
        prompt=MARKER.join(segments),
        markers=tuple(end - len(MARKER) for end in ends),
        completion=completion,
        input_ids=(*prompt_ids, *encoder.encode_text(completion), encoder.eos_token_id),
        answer_start=len(prompt_ids),
        n_tokens=len(prompt_ids),
        **fields,
    )


class _Prompt(BaseModel):
    """A record as a user may write it. What derives from the text may stand in it and is computed afresh."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str | None = None
    phase: int | None = None
    seed: int | None = None
    index: int | None = None
    split: Split | None = None
    condition: Condition | None = None
    prompt: Annotated[str, Field(min_length=1)]
    markers: list[int] = []
    completion: str = ""
    input_ids: Any = None
    answer_start: Any = None
    n_tokens: Any = None


class _Record(_Prompt):
    """A prompt with the completion that it is to get."""

    completion: Annotated[str, Field(min_length=1)]


def read_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, needs_completion: bool = True, landmarks: str | None = None
) -> list[Example]:
    """Read a JSON-lines file of records; `prompt` and `completion` suffice in each.

    Without `markers` a prompt holds no meta-token, whatever its text; the first such one with ` _PAUSE_` in it is
    named on standard error.

    Args:
        path: the file.
        tokenizer: of the model that is to read them.
        needs_completion: whether a record without one is a mistake; otherwise its completion is empty.
        landmarks: a rule by which further meta-tokens are put into the `input_ids` of the prompts, see `Landmarks`.

    Raises:
        UserError: if the file cannot be read, holds no record, or has a line that is none (it names the line); or if
            the rule is none for this tokenizer, or puts nothing in.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read the records in {path}: {error.strerror}.") from error
    encoder = SegmentEncoder(tokenizer, landmarks)
    examples: list[Example] = []
    is_warned = False
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                record = (_Record if needs_completion else _Prompt).model_validate_json(line)
                examples.append(_example_from_record(encoder, record))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {_first_reason(error)}.") from error
            if MARKER in record.prompt and "markers" not in record.model_fields_set and not is_warned:
                is_warned = True
                print(
                    f"{path}, line {number}: the prompt has {MARKER!r} and no markers, so it is read as text; list the "
                    "offsets of meta-tokens in markers, or give markers: [].",
                    file=sys.stderr,
                )
    if not examples:
        raise UserError(f"{path} holds no record; each line is a JSON object with a prompt and a completion.")
    if landmarks is not None and not any(encoder.meta_token_id in example.input_ids for example in examples):
        raise UserError(f"landmarks by {landmarks} have no place in any prompt of {path}.")
    return examples


def _example_from_record(encoder: SegmentEncoder, record: _Prompt) -> Example:
    return encode_example(
        encoder,
        split_at(record.prompt, record.markers),
        record.completion,
        **record.model_dump(include={"task", "phase", "seed", "index", "split", "condition"}),
    )


def _first_reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error).rstrip(".")
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        return f"unknown field {first['loc'][0]!r}; the fields of a record are {', '.join(_Record.model_fields)}"
    return ": ".join([*map(str, first["loc"]), first["msg"]])
