"""Measurements of a model while it is trained."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.model.positions import check_length
from metatokens.recipe import Phase
from metatokens.tasks.example import Encoded
from metatokens.tasks.landmarks_alone import LandmarksAlone
from metatokens.tasks.scoring import score
from metatokens.training.batches import with_hints
from metatokens.training.examples import Collator


@dataclass(frozen=True)
class Probe:
    """A measurement that is repeated during training.

    Attributes:
        every: steps between two measurements.
        measure: takes the model in evaluation mode and returns the figures of a point of the curve, by name.
    """

    every: int
    measure: Callable[[Any], dict[str, float]]


@torch.no_grad()
def held_out_loss(model: Any, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The mean loss (nats) over the scored tokens of some batches, each the inputs of a pass with `labels`."""
    total, scored = 0.0, 0
    for batch in batches:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        count = int((inputs["labels"][:, 1:] != IGNORED_LABEL).sum())
        loss = model(**inputs, use_cache=False).loss
        total += float(loss) * count
        scored += count
    return {"eval_loss": total / scored}


def exact_match(
    model: PreTrainedModel, examples: Sequence[Encoded], alone: LandmarksAlone | None = None
) -> float:
    """The share of examples whose whole answer greedy decoding gives; see `score`."""
    is_exact, _ = score(model, examples, alone=alone)
    return sum(is_exact) / len(is_exact)


def held_out_probe(
    records: Sequence[Encoded], pad_token_id: int, model: PreTrainedModel, phase: Phase
) -> Probe | None:
    """A probe of the loss (mean over answer tokens) and the exact match on held-out records; None: never measured."""
    by_length = sorted(records, key=lambda record: len(record.input_ids))
    check_length(model.config, len(by_length[-1].input_ids))
    collate = with_hints(Collator(pad_token_id=pad_token_id), model)
    size = phase.settings.per_device_train_batch_size

    def measure(model: PreTrainedModel) -> dict[str, float]:
        batches = (
            collate(by_length[start : start + size]) for start in range(0, len(by_length), size)
        )
        loss = held_out_loss(model, batches)
        return loss | {"eval_exact_match": exact_match(model, by_length)}

    every = phase.settings.measured_every(len(records))
    return Probe(every, measure) if every else None
