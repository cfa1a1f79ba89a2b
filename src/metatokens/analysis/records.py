"""The record of an analysis: one JSON line for each measured value, and how many values become one line."""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, Required, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from metatokens.evaluation.results import library_versions, now, wilson_interval

Analysis = Literal["sharpness", "residual", "rate_distortion"]
Metric = Literal[
    "attention_logit_change",
    "attention_log_odds_change",
    "attention_entropy_kept",
    "attention_entropy_zeroed",
    "attention_entropy_change",
    "premise_holds",
    "entropy_fell",
    "output_top_logit_change",
    "output_answer_logit_change",
    "output_answer_log_probability_change",
    "output_entropy_kept",
    "output_entropy_zeroed",
    "output_entropy_change",
    "similarity",
    "similarity_centred",
    "similarity_to_final",
    "similarity_to_final_centred",
    "attention_weight",
    "attention_weight_if_uniform",
    "attention_of_final",
    "rate",
    "distortion",
    "information",
    "answer_entropy",
]
KeyClass = Literal["itself", "earlier_meta", "before_meta", "after_meta", "first", "near", "other"]
Split = Literal["fit", "train", "held_out"]  # `fit`: few examples, scored on themselves

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class Measurement(BaseModel):
    """One measured value. Fields that do not apply are null; entropies, rates and distortions are in nats."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    analysis: Analysis
    model: str  # gpt2, pause, twin, meta, or a folder's name
    position_embedding: str  # learned, rope, none
    task: str | None = None
    condition: str | None = None  # the marker condition of the prompts
    train_condition: str | None = None
    train_length: int | None = None  # tokens
    length: int | None = None  # tokens; bin L holds prompts of (L/2, L] tokens
    intervention: str | None = None  # in force throughout; "sharpness" compares with and without `no_embed` itself
    seed: int  # of the model's training
    recipe: str | None = None

    metric: Metric
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
    split: Split | None = None
    fit_seed: int | None = None  # of the bottleneck's training

    value: float | None  # a mean; null if there was nothing to average
    n: Annotated[int, Field(ge=0)]  # values averaged
    low: float | None = None  # 95 % interval of the mean, over examples
    high: float | None = None
    quantiles: Annotated[tuple[float, ...], Field(min_length=len(QUANTILES), max_length=len(QUANTILES))] | None = None
    versions: dict[str, str] = Field(default_factory=cache(library_versions))  # looked up once: there are many lines
    created: str = Field(default_factory=now)


class About(TypedDict, total=False):
    """The fields of a `Measurement` that only the caller knows: which model, trained how, on which prompts."""

    model: Required[str]
    task: str | None
    condition: str | None
    train_condition: str | None
    train_length: int | None
    length: int | None
    seed: Required[int]
    recipe: str | None


class Samples:
    """Values gathered example by example, filed under the fields of a `Measurement` that tell them apart."""

    def __init__(self) -> None:
        self._values: dict[tuple[tuple[str, Any], ...], dict[int, list[np.ndarray]]] = defaultdict(dict)

    def add(self, example: int, values: Tensor, **fields: Any) -> None:
        """File values of any shape, numbers or truths, as those of the example of that number."""
        parts = self._values[tuple(fields.items())].setdefault(example, [])
        parts.append(values.detach().cpu().numpy().reshape(-1))

    def measurements(self, **common: Any) -> list[Measurement]:
        """One record for each set of fields, in the order in which they first came."""
        return [
            Measurement(**common, **dict(fields), **summary([np.concatenate(parts) for parts in examples.values()]))
            for fields, examples in self._values.items()
        ]


def summary(examples: Sequence[np.ndarray]) -> dict[str, Any]:
    """The fields `value, n, low, high, quantiles` of the values that each example gave.

    The mean is over all values. The values of one example depend on each other, so the interval is over examples, as
    of a ratio of their sums to their counts; where a proportion is exactly 0 or 1 it is Wilson's, counting examples.

    Args:
        examples: an array for each example, of numbers, or of truths, which have no quantiles.
    """
    values = np.concatenate(examples)
    if len(values) == 0:
        return {"value": None, "n": 0}
    is_proportion = values.dtype == bool
    mean = float(values.mean(dtype=np.float64))
    fields: dict[str, Any] = {"value": mean, "n": len(values)}
    if not is_proportion:
        fields["quantiles"] = tuple(np.quantile(values, QUANTILES).tolist())
    counted = [part for part in examples if len(part)]
    if is_proportion and mean in (0.0, 1.0):
        fields["low"], fields["high"] = wilson_interval(round(mean * len(counted)), len(counted))
    elif len(counted) > 1:
        deviations = np.array([part.sum(dtype=np.float64) - mean * len(part) for part in counted])
        error = math.sqrt((deviations**2).sum() * len(counted) / (len(counted) - 1)) / len(values)
        fields["low"], fields["high"] = mean - 1.96 * error, mean + 1.96 * error
        if is_proportion:
            fields["low"], fields["high"] = max(0.0, fields["low"]), min(1.0, fields["high"])
    return fields
