"""The records in files of lines, one JSON object per line. Measurements write them, and reports read them.

These records are the only interface between measuring and reporting. Importing this module loads neither torch nor
transformers nor numpy, so that reports can be made without the first two, and commands start fast.
"""

import base64
import gzip
import importlib.metadata
import math
import platform
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, NonNegativeInt, ValidationError, model_validator

from metatokens.errors import UserError, broken_rule
from metatokens.files import GZIP
from metatokens.recipe import Condition, Split

if TYPE_CHECKING:
    import numpy as np

MARKER = " _PAUSE_"  # means a meta-token in the prompt of a task or a record
SEPARATOR = ", "  # between the names of a model and of its variant

Metric = Literal["exact_match", "token_accuracy", "perplexity", "shortcut"]
Analysis = Literal["sharpness", "residual", "rate_distortion"]
AnalysisMetric = Literal[
    "attention_logit_change",
    "attention_log_odds_change",
    "attention_entropy_change",
    "premise_holds",
    "entropy_fell",
    "output_top_logit_change",
    "output_answer_logit_change",
    "output_entropy_change",
    "similarity_centred",
    "similarity_to_final_centred",
    "attention_weight",
    "attention_weight_if_uniform",
    "rate",
    "distortion",
    "answer_entropy",
]
KeyClass = Literal["itself", "earlier_meta", "before_meta", "after_meta", "first", "near", "other"]
# Of an analysis's prompts; `fit` is the few that are fitted.
AnalysisSplit = Literal["fit", "train", "held_out"]


def split_at(prompt: str, offsets: Sequence[int]) -> list[str]:
    """The segments of a prompt between the markers at the given character offsets, which ascend.

    Raises:
        UserError: if there is no marker at one of them.
    """
    segments, start = [], 0
    for offset in offsets:
        if offset < start or not prompt.startswith(MARKER, offset):
            raise UserError(
                f"markers: no further {MARKER!r} begins at offset {offset} of the prompt."
            )
        segments.append(prompt[start:offset])
        start = offset + len(MARKER)
    return [*segments, prompt[start:]]


class Record(BaseModel, extra="forbid"):
    """A line of a file. Unknown fields are errors; a field that does not apply is null."""

    def line(self) -> str:
        """The record as JSON without a line feed; fields with their defaults are left out."""
        return self.model_dump_json(exclude_defaults=True)


# The `intervention` of a result whose questions saw the meta-tokens of their documents alone.
ALONE = "landmarks_alone"


class Subject(Record):
    """The subject of a figure: a model, its training, and the prompts."""

    model: str  # gpt2, pause, twin, meta, gpt-neo, the name of a folder or of a shortcut
    position_embedding: str | None = None  # learned, rope, none
    task: str | None = None
    # The marker condition of the prompts; for perplexity the placement of meta-tokens.
    condition: str | None = None
    train_condition: str | None = None
    train_length: int | None = None  # tokens of the longest prompts in training
    length: int | None = None  # tokens; bin L holds prompts of (L/2, L] tokens
    intervention: str | None = None


class About(Subject):
    """A subject and its seeds, before anything is measured."""

    text: str | None = (
        None  # for perplexity: held_out, book, or a corpus; of your own records: their file
    )
    seed: int = 0  # of the model's training
    recipe: str | None = None  # the preset, or preset/variant

    def present_fields(self, **more: Any) -> dict[str, Any]:
        """The fields that are not null, and further ones."""
        return self.model_dump(exclude_none=True) | more


class Measured(Record, allow_inf_nan=False):
    """A measured figure."""

    versions: dict[str, str] = {}  # by package; empty in a run, whose run.json has them
    created: str | None = None


class Result(Subject, Measured):
    """An accuracy, a perplexity, or the share of prompts that a shortcut answers."""

    text: str | None = None  # as in `About`
    fraction: float | None = None  # for perplexity: k, where it is not the paper's 0.1
    text_window: int | None = None  # positions; null for a model that forgets no text
    # The share of tokens whose keys and values are kept: of prompts, blocks, or the documents of landmarks_alone.
    kv_kept: float | None = None
    metric: Metric
    value: float | None = None  # proportions in [0, 1]; null where the model cannot be run
    # Examples (accuracies) or scored tokens (token_accuracy, perplexity).
    n: NonNegativeInt
    low: float | None = None  # 95 % interval
    high: float | None = None
    chance: float | None = None
    # Of an exact match: whether each prompt was answered, as `pack_hits` writes it.
    hits: str | None = None
    # Of an exact match in a run: what was answered to its first prompt, the task's example.
    answer: str | None = None
    seed: int
    recipe: str | None = None

    @model_validator(mode="after")
    def _has_a_possible_value(self) -> "Result":
        lowest, highest = (1.0, math.inf) if self.metric == "perplexity" else (0.0, 1.0)
        if self.value is not None and not lowest <= self.value <= highest:
            raise ValueError(f"value is {self.value:g}, which no {self.metric} can be")
        return self

    @model_validator(mode="after")
    def _has_a_hit_for_each_prompt(self) -> "Result":
        if (
            self.hits is not None
            and len(base64.b64decode(self.hits, validate=True)) != (self.n + 7) // 8
        ):
            raise ValueError(f"hits has another length than that of {self.n} bits in base64")
        return self


class Measurement(Subject, Measured, strict=True):
    """A value measured inside a model. Entropies, rates and distortions are in nats.

    The analysis `sharpness` compares with and without `no_embed`; its lines have no `intervention`.
    """

    analysis: Analysis
    position_embedding: str
    seed: int
    recipe: str | None = None

    metric: AnalysisMetric
    module: Literal["attention", "second_attention"] | None = None
    layer: int | None = None  # blocks from 0; for residual states, the number of blocks before
    head: int | None = None  # if layer is null too, all layers and heads together
    # The meta-tokens within the prompt, or the last one.
    marker: Literal["context", "final"] | None = None
    # The meta-token, or the nearest text token before it.
    subject: Literal["meta", "text"] | None = None
    keys: KeyClass | None = None
    # Whether alpha > exp(-H) held at the boosted key, in the rows counted.
    premise: bool | None = None
    boosted: bool | None = None  # whether that key's log-odds rose, in the rows counted
    distance: int | None = None  # tokens; the upper end of a bin
    position: int | None = None  # in the prompt of one example
    beta: float | None = None
    split: AnalysisSplit | None = None
    fit_seed: int | None = None  # of the bottleneck's training

    value: float | None = None  # a mean; null if there was nothing to average
    n: NonNegativeInt  # the number of values averaged
    low: float | None = None  # 95 % interval of the mean, over examples
    high: float | None = None


class ExampleRecord(Record, strict=True):
    """One example as a line: `metatokens sample` prints it, and users write their own."""

    task: str | None = None
    phase: int | None = None
    seed: int | None = None
    index: int | None = None
    split: Split | None = None
    condition: Condition | None = None
    prompt: str
    markers: tuple[int, ...] = ()  # the offsets in the prompt at which MARKER is a meta-token
    completion: str = ""
    input_ids: tuple[int, ...] = ()  # of prompt, completion and end of text
    answer_start: int | None = None  # the index of the completion's first id
    n_tokens: int | None = None  # of the prompt, meta-tokens included

    @model_validator(mode="after")
    def _markers_are_in_the_prompt(self) -> "ExampleRecord":
        split_at(self.prompt, self.markers)
        return self

    def pieces(self) -> list[tuple[str, bool]]:
        """The prompt as (text, is a meta-token) pairs; a literal `_PAUSE_` in the text is text."""
        first, *others = split_at(self.prompt, self.markers)
        pieces = [(first, False)]
        for segment in others:
            pieces += [(MARKER.strip(), True), (segment, False)]
        return [piece for piece in pieces if piece[0]]

    def facts(self) -> str:
        """Where the example comes from, in one line."""
        facts = {
            "phase {}": self.phase,
            "{}": self.split,
            "condition {}": self.condition,
            "{} tokens": self.n_tokens,
        }
        return ", ".join(form.format(value) for form, value in facts.items() if value is not None)


AnyRecord = TypeVar("AnyRecord", bound=Record)


def library_versions() -> dict[str, str]:
    """The versions of Python and of the packages that figures depend on."""
    packages = ("metatokens", "torch", "transformers")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages
    }


def now() -> str:
    """The current time, UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stamped(records: Iterable[Record]) -> Iterator[Record]:
    """The records, with versions and time in those of measured figures, for lines outside a run."""
    made = {"versions": library_versions(), "created": now()}
    for record in records:
        yield record.model_copy(update=made) if isinstance(record, Measured) else record


def pack_hits(hits: Sequence[bool]) -> str:
    """One bit for each prompt, the first in the highest bit of the first byte, in base64."""
    import numpy as np

    return base64.b64encode(np.packbits(np.asarray(hits, dtype=bool)).tobytes()).decode()


def unpack_hits(packed: str, n: int) -> "np.ndarray":
    """The n bools that `pack_hits` wrote."""
    import numpy as np

    return np.unpackbits(np.frombuffer(base64.b64decode(packed), dtype=np.uint8), count=n).astype(
        bool
    )


def read_lines(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """The records of a file, which may be compressed (gzip). Errors name the file and the line."""
    # Only a line feed ends a record: str.splitlines would also split at other separators inside a text.
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [
        parse_record(kind, line, f"{path}, line {number}") for number, line in lines if line.strip()
    ]


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """The record that a whole file holds."""
    return parse_record(kind, read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file, which may be compressed (gzip).

    Raises:
        UserError: if it cannot be read, decompressed or decoded.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(GZIP) else content).decode(
            "utf-8-sig"
        )
    except OSError as error:  # BadGzipFile is one
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def parse_record(kind: type[AnyRecord], text: str, source: str) -> AnyRecord:
    """Parse a record from JSON text; `source` names it in errors."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"{source}: {broken_rule(error)}.") from error
