"""How many measured values become one record."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Required, TypedDict

import numpy as np
from torch import Tensor

from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import QUANTILES, Measurement


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
