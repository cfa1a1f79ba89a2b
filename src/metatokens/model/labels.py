"""Which tokens a language model is trained to predict: all but meta-tokens (paper, section 3)."""

from typing import Any

from torch import Tensor


def without_meta_tokens(
    labels: Tensor, meta_token_id: int | None, kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Labels without meta-tokens, and how many there are in the whole batch without them.

    Of the other parts of a batch whose gradients are accumulated the share of meta-tokens is taken to be the same.

    Args:
        labels: (batch, length), -100 where nothing is to be predicted.
        meta_token_id: the model's; None if it has none.
        kwargs: further arguments of the model, of which `num_items_in_batch`, if it is there, counts labels, and
            `shift_labels` are the labels of the tokens that follow.
    """
    if meta_token_id is None:
        return labels, kwargs
    is_meta = labels == meta_token_id
    if kwargs.get("shift_labels") is not None:
        following = kwargs["shift_labels"]
        kwargs = kwargs | {"shift_labels": following.masked_fill(following == meta_token_id, -100)}
    if kwargs.get("num_items_in_batch") is not None:
        share = 1 - is_meta[:, 1:].sum() / (labels[:, 1:] != -100).sum().clamp(min=1)
        share = share.clamp(min=1e-6)  # of meta-tokens alone the loss is 0
        kwargs = kwargs | {"num_items_in_batch": kwargs["num_items_in_batch"] * share}
    return labels.masked_fill(is_meta, -100), kwargs
