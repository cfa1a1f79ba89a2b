"""What is measured of a model while it is being trained."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metatokens.checkpoint import LanguageModel
from metatokens.data.insertion import IGNORED_LABEL
from metatokens.tasks.scoring import score
from metatokens.tasks.store import Encoded


@dataclass(frozen=True)
class Probe:
    """A measurement that is repeated during a training.

    Attributes:
        every: steps between two measurements.
        measure: takes the model in evaluation mode; the keys that it gives are those of a curve's points.
    """

    every: int
    measure: Callable[[Any], dict[str, float]]


@torch.no_grad()
def held_out_loss(model: Any, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The mean loss (nats) over the scored tokens of some batches, each with `input_ids` and `labels`."""
    total, scored = 0.0, 0
    for batch in batches:
        ids, labels = (batch[name].to(model.device) for name in ("input_ids", "labels"))
        count = int((labels[:, 1:] != IGNORED_LABEL).sum())
        total += float(model(ids, labels=labels, use_cache=False).loss) * count
        scored += count
    return {"eval_loss": total / scored}


def exact_match(model: LanguageModel, examples: Sequence[Encoded]) -> float:
    """The share of examples whose whole answer greedy decoding gives."""
    exact, _ = score(model, examples)
    return sum(exact) / len(exact)
