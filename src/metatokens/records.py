"""The records in a run's files, one JSON object a line: what is measured writes them, and the report reads them.

This module brings neither torch nor transformers, so that a report is drawn where there is none.
"""

import gzip
import importlib.metadata
import json
import platform
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from metatokens.errors import UserError
from metatokens.files import append_lines
from metatokens.recipe import Condition, Split

MARKER = " _PAUSE_"  # how a meta-token is shown in the prompt of a task or a record
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # that a measurement gives
LOOKS = "looks"  # the folder of a run's pages of what its models attend to, each named by its task
PACKED = ".gz"  # what a compressed file has at its name's end
_GZIP = b"\x1f\x8b"  # begins what is compressed, and no text

Metric = Literal["exact_match", "token_accuracy", "perplexity", "shortcut", "majority_rate"]
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
Part = Literal["fit", "train", "held_out"]  # of an analysis's prompts; `fit`: few, scored on themselves
Benchmark = Literal["train", "answers", "prefill", "decode", "length", "compile"]


def split_at(prompt: str, offsets: Sequence[int]) -> list[str]:
    """The segments of a prompt between the markers at the given character offsets, which ascend.

    Raises:
        UserError: if there is no marker at one of them.
    """
    segments, start = [], 0
    for offset in offsets:
        if offset < start or not prompt.startswith(MARKER, offset):
            raise UserError(f"markers: no further {MARKER!r} begins at offset {offset} of the prompt.")
        segments.append(prompt[start:offset])
        start = offset + len(MARKER)
    return [*segments, prompt[start:]]


class Record(BaseModel):
    """A line of a file. A field that it does not know is an error; one that does not apply is null."""

    model_config = ConfigDict(extra="forbid")

    def line(self) -> str:
        """The record as JSON, without its line feed. What is null or empty is left out."""
        return self.model_dump_json(exclude_defaults=True)


class About(Record):
    """What a figure is about: a model, its training, and the prompts. Lines have these fields among their own."""

    model: str  # gpt2, pause, twin, meta, gpt-neo, the name of a folder or of a shortcut
    position_embedding: str | None = None  # learned, rope, none
    task: str | None = None
    condition: str | None = None  # the marker condition of the prompts; for perplexity the placement of meta-tokens
    train_condition: str | None = None
    train_length: int | None = None  # tokens of the longest prompts in training
    length: int | None = None  # tokens; bin L holds prompts of (L/2, L] tokens
    intervention: str | None = None
    noise_seed: int | None = None  # of an intervention that draws noise
    seed: int = 0  # of the model's training
    recipe: str | None = None  # the preset, or preset/variant

    def known(self, **more: Any) -> dict[str, Any]:
        """The fields that are not null, and further ones."""
        return self.model_dump(exclude_none=True) | more


class Measured(Record):
    """A measured figure."""

    model_config = ConfigDict(allow_inf_nan=False)

    versions: dict[str, str] = {}  # by package; empty in a run, whose run.json has them
    created: str | None = None


class Result(Measured):
    """An accuracy, a perplexity, or the share of prompts that a shortcut answers. Fields as in `About`, and more."""

    model: str
    position_embedding: str | None = None
    task: str | None = None
    condition: str | None = None
    train_condition: str | None = None
    train_length: int | None = None
    length: int | None = None
    intervention: str | None = None
    noise_seed: int | None = None
    text: str | None = None  # for perplexity: held_out, book, or a path
    metric: Metric
    value: float | None = None  # proportions in [0, 1]; null where the model cannot be run
    n: Annotated[int, Field(ge=0)]  # examples (accuracies) or scored tokens (token_accuracy, perplexity)
    low: float | None = None  # 95 % interval
    high: float | None = None
    chance: float | None = None
    seed: int
    recipe: str | None = None


class Measurement(Measured):
    """A value measured inside a model; entropies, rates and distortions are in nats."""

    model_config = ConfigDict(strict=True)

    analysis: Analysis
    model: str
    position_embedding: str
    task: str | None = None
    condition: str | None = None
    train_condition: str | None = None
    train_length: int | None = None
    length: int | None = None
    intervention: str | None = None  # "sharpness", which compares with and without `no_embed`, has none
    seed: int
    recipe: str | None = None

    metric: AnalysisMetric
    module: Literal["attention", "second_attention"] | None = None
    layer: int | None = None  # blocks from 0; of residual states: how many blocks the state has passed
    head: int | None = None  # with layer null too: all layers and heads together
    marker: Literal["context", "final"] | None = None  # the meta-tokens within the prompt, or its last one
    subject: Literal["meta", "text"] | None = None  # the meta-token, or the nearest text token before it
    keys: KeyClass | None = None  # what is attended to
    premise: bool | None = None  # of the rows counted: whether alpha > exp(-H) held at the boosted key
    boosted: bool | None = None  # of the rows counted: whether that key's log-odds rose
    distance: int | None = None  # tokens; D holds the distances above the next smaller one, up to D
    position: int | None = None  # in the prompt of one example
    beta: float | None = None
    split: Part | None = None
    fit_seed: int | None = None  # of the bottleneck's training

    value: float | None = None  # a mean; null if there was nothing to average
    n: Annotated[int, Field(ge=0)]  # values averaged
    low: float | None = None  # 95 % interval of the mean, over examples
    high: float | None = None
    quantiles: Annotated[tuple[float, ...], Field(min_length=len(QUANTILES), max_length=len(QUANTILES))] | None = None


class CurvePoint(Record):
    """What was known of a training run after one of its steps: the loss, or how much of a task it had learned."""

    model: str
    position_embedding: str | None = None
    task: str | None = None  # null in pretraining
    train_length: int | None = None  # tokens
    recipe: str | None = None
    seed: int
    step: int
    text_tokens: int | None = None  # seen until then
    loss: float | None = None  # nats per target token
    exact_match: float | None = None  # on `n` test prompts, always the same
    n: int | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "CurvePoint":
        if self.loss is None and (self.exact_match is None or self.text_tokens is None):
            raise ValueError("a point of a curve has a loss, or an exact_match after so many text_tokens")
        return self


class Timing(Measured):
    """How long a unit of work took one contestant, and the ratio to what it took another in the same rounds.

    Low and high are the quartiles of the rounds.
    """

    benchmark: Benchmark
    model: str
    against: str
    shape: str
    parameters: int
    length: int  # positions
    batch: int
    text_tokens: int  # of a unit of work
    n: Annotated[int, Field(ge=1)]  # rounds
    repeats: int  # units of work in each
    first: float | None = None  # seconds of the very first unit of work, whatever it has to be compiled for
    rounds: list[float]  # seconds that a unit of work took in each, on average
    seconds: float  # their median
    low: float
    high: float
    ratio: float  # the median of the rounds' ratios
    ratio_low: float
    ratio_high: float
    limit: float  # of the ratio: what the functions need
    ratio_per_text_token: float
    limit_per_text_token: float
    over_products: float  # seconds over what matrix products alone took, scaled by what the contestant needs
    flops: int | None = None  # that the function needs; null in decoding
    counted_flops: int | None = None  # as PyTorch counts them, the masked half of causal attention included
    reads: int | None = None  # bytes that decoding must read
    memory: int | None = None  # bytes, the most in use during a unit of work less those in use before it
    dtype: str
    threads: int
    device: str
    compiled: bool


class ExampleRecord(Record):
    """One example as a line: `metatokens sample` prints it, and users write their own."""

    model_config = ConfigDict(strict=True)

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


class Stage(Record):
    """One stage of a run, and the time it took. What does not apply is null, and all but the name in older files."""

    name: str
    kind: str | None = None  # such as pretrain, finetune, evaluate, raw-noise, rate-distortion
    model: str | None = None  # as results have it, and what follows
    position_embedding: str | None = None
    seed: int | None = None
    recipe: str | None = None
    task: str | None = None
    condition: str | None = None
    train_length: int | None = None  # tokens; null of stages that go through several
    seconds: float  # by the clock
    cpu_seconds: float | None = None

    @property
    def cost(self) -> float:
        """Seconds of one core; by the clock where the other is not known."""
        return self.seconds if self.cpu_seconds is None else self.cpu_seconds


class ModelInfo(Record):
    """What a run says about one of its models."""

    parameters: int | None = None
    weights_sha256: str | None = None
    description: str = ""


class RunInfo(Record):
    """A run's `run.json`: what was run, where, with which settings. Everything may be absent."""

    command: str | None = None
    preset: str | None = None
    recipes: dict[str, dict[str, Any]] = {}
    corpus: dict[str, Any] = {}
    models: dict[str, ModelInfo] = {}
    python: str | None = None
    platform: str | None = None
    cores: int | None = None
    workers: int | None = None
    versions: dict[str, str] = {}
    created: str | None = None
    finished: str | None = None
    wall_seconds: float | None = None
    stages: list[Stage] = []


AnyRecord = TypeVar("AnyRecord", bound=Record)


def library_versions() -> dict[str, str]:
    """The versions a figure depends on, by package name."""
    packages = ("metatokens", "torch", "transformers")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def now() -> str:
    """The current time, UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stamped(records: Iterable[Record]) -> Iterator[Record]:
    """The records, those of measured figures with versions and time: for lines that belong to no run."""
    made = {"versions": library_versions(), "created": now()}
    for record in records:
        yield record.model_copy(update=made) if isinstance(record, Measured) else record


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append records to a file, one line each.

    Raises:
        UserError: if the file cannot be written, which then is as it was.
    """
    try:
        append_lines(path, (record.line() for record in records))
    except OSError as error:
        raise UserError(f"cannot write results to {path}: {error.strerror}.") from error


def lines_file(folder: Path, name: str) -> Path:
    """The file of lines in a run's folder: `NAME.jsonl` or, where there is none, `NAME.jsonl.gz`."""
    plain = folder / f"{name}.jsonl"
    return plain if plain.exists() else plain.with_name(plain.name + PACKED)


def read_lines(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """The records of a file, which may be compressed (gzip).

    Raises:
        UserError: if the file cannot be read, or a line is no such record; the sentence names file and line.
    """
    # Only a line feed ends a record: a text may hold the other line separators that str.splitlines knows.
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [_validate(kind, line, f"{path}, line {number}") for number, line in lines if line.strip()]


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """The record that a file is as a whole.

    Raises:
        UserError: if the file cannot be read, or is no such record.
    """
    return _validate(kind, read_text(path), str(path))


@dataclass
class RunLines:
    """Everything that run folders and files of lines hold, in the order in which it was read."""

    results: list[Result] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    points: list[CurvePoint] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    examples: list[ExampleRecord] = field(default_factory=list)
    runs: list[RunInfo] = field(default_factory=list)
    looks: dict[str, Path] = field(default_factory=dict)  # by task, a page of what models attend to


def read_runs(paths: Sequence[Path]) -> RunLines:
    """Read run folders and files of lines.

    Args:
        paths: folders that hold `results.jsonl` and may hold `analysis.jsonl`, `curves.jsonl`, `examples.jsonl` and
            `run.json`, and pages in `looks`, or files of result lines, or of lines that `benchmarks.speed` wrote.
            Files of lines may be compressed (`results.jsonl.gz`).

    Raises:
        UserError: if a path is missing or unreadable, a line or file is malformed, or there is no result at all.
    """
    lines = RunLines()
    for path in paths:
        file = lines_file(path, "results") if path.is_dir() else path
        if path != file and not file.is_file():
            raise UserError(f"the folder {path} holds no results.jsonl; give a run folder or a file of result lines.")
        if _is_of_benchmark(file):
            lines.timings += read_lines(file, Timing)
            continue
        lines.results += read_lines(file, Result)
        if path.is_dir():
            lines.measurements += _read_if_there(lines_file(path, "analysis"), Measurement)
            lines.points += _read_if_there(lines_file(path, "curves"), CurvePoint)
            lines.examples += _read_if_there(lines_file(path, "examples"), ExampleRecord)
            lines.runs += [read_record(path / "run.json", RunInfo)] if (path / "run.json").exists() else []
            lines.looks |= {page.stem: page for page in sorted((path / LOOKS).glob("*.html"))}
    if not lines.results:
        raise UserError(f"there is no result in {', '.join(map(str, paths)) or 'an empty list of files'}.")
    return lines


def _is_of_benchmark(file: Path) -> bool:
    """Whether a file's first line is one of `benchmarks.speed`; what cannot be read is left to who reads it."""
    try:
        return "benchmark" in json.loads(read_text(file).partition("\n")[0])
    except (ValueError, TypeError, RecursionError):  # UserError is a ValueError
        return False


def _read_if_there(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    return read_lines(path, kind) if path.exists() else []


def read_text(path: Path) -> str:
    """The text of a file, which may be compressed (gzip).

    Raises:
        UserError: if it cannot be read.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except OSError as error:  # BadGzipFile is one
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def _validate(kind: type[AnyRecord], text: str, place: str) -> AnyRecord:
    """A record from JSON; read as JSON, since a strict record takes a JSON list for a tuple and no other."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(".".join(map(str, first["loc"])).split())
        raise UserError(f"{place}: {where + ': ' if where else ''}{first['msg']}.") from error
