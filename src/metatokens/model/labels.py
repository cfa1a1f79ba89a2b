"""Labels: which tokens a language model is trained to predict, and where its logits are scored."""

from typing import Any

import torch
from torch import Tensor


def without_meta_tokens(
    labels: Tensor, meta_token_id: int | None, kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Labels, and the number of labels in the whole batch, without meta-tokens, which incur no loss (paper, section 3).

    Under gradient accumulation, assumes that every micro-batch has the same share of meta-tokens.

    Args:
        labels: (batch, length), -100 where nothing is to be predicted.
        meta_token_id: the model's; None if it has none.
        kwargs: further arguments of the model. `num_items_in_batch` counts labels; `shift_labels` are the labels of the
            tokens that follow.

    Returns:
        The labels, (batch, length), and `kwargs`: in both, -100 replaces meta-tokens, and they are not counted.
    """
    if meta_token_id is None:
        return labels, kwargs
    is_meta = labels == meta_token_id
    shift_labels, count = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
    if shift_labels is not None:
        kwargs = kwargs | {
            "shift_labels": shift_labels.masked_fill(shift_labels == meta_token_id, -100)
        }
    if count is not None:
        meta_tokens = is_meta[:, 1:].sum()
        scored = (labels[:, 1:] != -100).sum().clamp(min=1)
        # The loss of meta-tokens alone is 0, not 0 / 0.
        share = (1 - meta_tokens / scored).clamp(min=1e-6)
        kwargs = kwargs | {"num_items_in_batch": count * share}
    return labels.masked_fill(is_meta, -100), kwargs


def scored_labels(labels: Tensor, scored_positions: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The positions whose logits have a label, as an index of (batch, length), and the labels for these logits.

    Args:
        labels: (batch, length), the input's own ids, -100 where nothing is to be predicted.
        scored_positions: (batch, most), these positions, -1 where a row has fewer.

    Returns:
        The index, and the labels, (batch, most), -100 at padding.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    rows = torch.arange(len(targets), device=targets.device)[:, None]
    index = rows, scored_positions.clamp(min=0)
    return index, targets[index].masked_fill(scored_positions < 0, -100)
