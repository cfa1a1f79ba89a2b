"""An auxiliary loss: which tokens of a prompt stand between its first two meta-tokens?

Counting in a bracket needs to know what is inside before it can compare anything. This has a linear head tell it from
the residual stream, block by block, and the head is thrown away afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from metatokens.checkpoint import LanguageModel
from metatokens.decoder import decoder_of
from metatokens.errors import UserError

POSITIVE_WEIGHT = 3.0  # of tokens inside, which are fewer


def check_inside(model: LanguageModel) -> None:
    """Refuse a model that has no states to tell it from.

    Raises:
        UserError: if it has one block alone.
    """
    if len(decoder_of(model)[1]) == 1:
        raise UserError("a stage's inside_loss reads the states after each block but the last, and the model has one.")


def inside_labels(input_ids: Tensor, meta_token_id: int) -> tuple[Tensor, Tensor]:
    """Which tokens are asked about, and which of them are inside.

    Args:
        input_ids: (batch, length), each row a prompt that ends with a meta-token, a completion without, and padding.
        meta_token_id: the meta-token's.

    Returns:
        Two masks, (batch, length): the prompt's tokens but for meta-tokens; and those between the first two of these.
    """
    is_meta = input_ids == meta_token_id
    before = is_meta.cumsum(dim=1)
    asked = ~is_meta & (before < before[:, -1:])  # what follows the last meta-token is no prompt
    return asked, asked & (before == 1)


@contextmanager
def inside_loss(model: Any, weight: float | None, pieces: int) -> Iterator[None]:
    """Add `weight` times a mean over the asked tokens to each training step's loss, for every block but the last.

    It is the binary cross-entropy of a linear head on the layer-normed states, in which tokens inside count
    `POSITIVE_WEIGHT` times. With a weight of None nothing is added.

    Args:
        model: gets the heads, drawn from torch's generator, as its module `inside_heads` for as long, and hooks.
        weight: of the sum over blocks.
        pieces: how many batches, of all processes, make up an optimizer step: each one's mean counts that much less.
    """
    if weight is None:
        yield
        return
    blocks, states = decoder_of(model)[1][:-1], []
    heads = nn.ModuleList(nn.Linear(model.config.hidden_size, 1) for _ in blocks).to(model.device)

    def keep(block: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor | None]) -> None:
        if block.training:
            states.append(output[0] if isinstance(output, tuple) else output)  # GPT-Neo's has weights beside it

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if module.training:
            outputs.loss = outputs.loss + weight / pieces * _loss(heads, states, kwargs["input_ids"], meta_token_id)
            states.clear()
        return outputs

    meta_token_id = model.config.meta_token_id
    hooks = [block.register_forward_hook(keep) for block in blocks]
    hooks.append(model.register_forward_hook(add, with_kwargs=True))
    model.inside_heads = heads  # where the optimizer finds them
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del model.inside_heads


def _loss(heads: nn.ModuleList, states: list[Tensor], input_ids: Tensor, meta_token_id: int) -> Tensor:
    asked, inside = inside_labels(input_ids, meta_token_id)
    targets, more = inside.float(), torch.full((1,), POSITIVE_WEIGHT, device=input_ids.device)
    weights = asked / asked.sum()  # of the others none, in place of an index that only the data tells the size of
    losses = []
    for head, state in zip(heads, states, strict=True):
        normed = functional.layer_norm(state, state.shape[-1:])
        logits = head(normed.to(head.get_parameter("weight").dtype))[..., 0]
        losses.append(
            functional.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum", pos_weight=more)
        )
    return torch.stack(losses).sum()
