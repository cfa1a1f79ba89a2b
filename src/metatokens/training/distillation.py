"""Distillation: a model learns the predictions of its own base, which sees all text and no meta-tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.model.rows import positions_of
from metatokens.retrofit.text_window import without_text_window


@contextmanager
def _base(model: Any) -> Iterator[None]:
    """Have a model compute what its base does for text: without a text window, adapters and dropout."""
    is_training, adapters_off = model.training, getattr(model, "disable_adapter", nullcontext)
    model.eval()
    try:
        with without_text_window(model), adapters_off():
            yield
    finally:
        model.train(is_training)


def divergence(model: Any, tuned: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """KL(base || model) of the next token, in nats, summed over the labels that are text; and the number of labels.

    The base reads the text alone, so its positions count text tokens. The base cannot predict a row's first text token,
    so that token does not count.

    Args:
        model: the one that is trained, perhaps wrapped.
        tuned: the same model, with no wrapper around it except PEFT's.
        batch: `input_ids` and `labels`, (batch, length), and perhaps an `attention_mask`.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    ids = inputs["input_ids"]
    is_text = ids != tuned.config.meta_token_id
    if "attention_mask" in inputs:
        is_text &= inputs["attention_mask"].bool()
    text_position = is_text.cumsum(dim=1) - 1
    is_scored = (batch["labels"] != IGNORED_LABEL) & is_text & (text_position > 0)
    rows, columns = is_scored.nonzero(as_tuple=True)
    logits = model(**inputs, use_cache=False).logits[rows, columns - 1]
    predicted = logits.float().log_softmax(dim=-1)
    with torch.no_grad(), _base(tuned):
        text_columns = positions_of(is_text)
        text = ids.gather(1, text_columns.clamp(min=0))
        base_logits = tuned(
            input_ids=text, attention_mask=(text_columns >= 0).long(), use_cache=False
        ).logits
        wanted = base_logits[rows, text_position[rows, columns] - 1].float().log_softmax(dim=-1)
    return torch.nn.functional.kl_div(predicted, wanted, reduction="sum", log_target=True), len(
        rows
    )
