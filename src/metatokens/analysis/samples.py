"""Many measured values become one record: their mean and its interval."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from metatokens.evaluation.intervals import error_of_ratio, normal_interval, wilson_interval
from metatokens.records import Measurement


class Samples:
    """Values of one example after another, grouped by those fields of a `Measurement` in which they differ."""

    def __init__(self) -> None:
        self._values: dict[tuple[tuple[str, Any], ...], dict[int, list[np.ndarray]]] = defaultdict(
            dict
        )
        self._example = 0

    def next_example(self) -> None:
        """Begin the next example, to which all values belong that are added from now on."""
        self._example += 1

    def add(self, values: Tensor, **fields: Any) -> None:
        """Add values of any shape, numbers or booleans, of the present example."""
        parts = self._values[tuple(fields.items())].setdefault(self._example, [])
        parts.append(values.detach().cpu().numpy().reshape(-1))

    def measurements(self, **common: Any) -> list[Measurement]:
        """One record for each group, in the order in which the groups began."""
        records: list[Measurement] = []
        for fields, examples in self._values.items():
            values = [np.concatenate(parts) for parts in examples.values()]
            records.append(Measurement(**common, **dict(fields), **summary(values)))
        return records


def summary(examples: Sequence[np.ndarray]) -> dict[str, Any]:
    """The fields `value, n, low, high` of a record.

    The mean is over all values. Values of one example depend on each other, so the interval is over examples: that of
    the ratio of their sums to their counts. For a proportion of exactly 0 or 1 it is Wilson's, counting examples.

    Args:
        examples: an array of values for each example: numbers or booleans.
    """
    values = np.concatenate(examples)
    if len(values) == 0:
        return {"value": None, "n": 0}
    is_share = values.dtype == bool
    mean = float(values.mean(dtype=np.float64))
    counted = [part for part in examples if len(part)]
    fields: dict[str, Any] = {"value": mean, "n": len(values)}
    if is_share and mean in (0.0, 1.0):
        fields["low"], fields["high"] = wilson_interval(round(mean * len(counted)), len(counted))
    elif len(counted) > 1:
        low, high = normal_interval(mean, error_of_ratio(counted, mean))
        fields["low"], fields["high"] = (max(0.0, low), min(1.0, high)) if is_share else (low, high)
    return fields
