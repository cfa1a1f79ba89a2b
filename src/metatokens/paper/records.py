"""The records that the reproduction and the benchmarks alone write: curves, a run's `run.json`, and timings.

Importing this module loads neither torch nor transformers.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from metatokens.records import Measured, Record

LOOKS = "looks"  # a run's folder of pages of attention, one for each task
Benchmark = Literal["train", "answers", "prefill", "decode", "length", "compile"]


class CurvePoint(Record):
    """A training's loss, or accuracy on its task, after one of its steps."""

    model: str
    position_embedding: str | None = None
    task: str | None = None  # null in pretraining
    train_length: int | None = None  # tokens
    recipe: str | None = None
    seed: int
    step: int
    text_tokens: int | None = None  # in lines of older versions: read so far
    loss: float | None = None  # nats per target token
    exact_match: float | None = None  # on the same `n` test prompts at each step
    n: int | None = None


class StageRecord(Record):
    """A stage of a run, and the time that it took."""

    name: str
    kind: str | None = None  # such as pretrain, finetune, evaluate, raw-noise, rate-distortion
    seconds: float  # by the clock
    cpu_seconds: float  # of one core


class ModelInfo(Record):
    """One of a run's models."""

    parameters: int | None = None
    weights_sha256: str | None = None
    description: str = ""


class RunInfo(Record):
    """A run's `run.json`: commands, settings, machine and stages. Every field may be absent."""

    command: str | None = None
    preset: str | None = None
    recipes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    corpus: dict[str, Any] = Field(default_factory=dict)
    models: dict[str, ModelInfo] = Field(default_factory=dict)
    platform: str | None = None  # of the machine that carried out the last stages
    cores: int | None = None  # of the same
    workers: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)  # of all stages
    python: str | None = None  # in files of older versions
    created: str | None = None
    finished: str | None = None
    stages: list[StageRecord] = Field(default_factory=list)


class Timing(Measured):
    """The time of a unit of work for one contestant, and its ratio to another's time in the same rounds.

    Low and high are the quartiles of the rounds.
    """

    benchmark: Benchmark
    model: str
    against: str
    shape: str
    parameters: int
    length: int  # positions
    batch: int
    text_tokens: int  # per unit of work
    n: Annotated[int, Field(ge=1)]  # rounds
    repeats: int  # units of work per round
    first: float | None = None  # seconds of the first unit of work, including compilation
    rounds: list[float]  # mean seconds per unit of work in each round
    seconds: float  # their median
    low: float
    high: float
    ratio: float  # the median of the rounds' ratios
    ratio_low: float
    ratio_high: float
    limit: float  # the ratio of the operations that the two functions need
    ratio_per_text_token: float
    limit_per_text_token: float
    over_products: (
        float  # seconds, relative to those of the matrix products that the contestant needs
    )
    flops: int | None = None  # operations that the function needs; null in decoding
    # As PyTorch counts them, with the masked half of causal attention.
    counted_flops: int | None = None
    reads: int | None = None  # bytes that decoding must read
    # Peak bytes in use during a unit of work, less those in use before it.
    memory: int | None = None
    dtype: str
    threads: int
    device: str
    compiled: bool
