"""An auxiliary loss: which tokens of a prompt are between its first two meta-tokens?

To count in a bracket, a model must first know what is inside it. After each block a linear head predicts this from the
residual stream. The heads are discarded after training.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from metatokens.decoder import decoder_of

POSITIVE_WEIGHT = 3.0  # of tokens in the bracket, which are fewer


def bracket_labels(input_ids: Tensor, meta_token_id: int) -> tuple[Tensor, Tensor]:
    """The tokens that the loss is on, and those of them that are in the bracket.

    Args:
        input_ids: (batch, length); each row is a prompt that ends with a meta-token, a completion without meta-tokens,
            and padding.
        meta_token_id: the meta-token.

    Returns:
        Two masks, (batch, length): the prompt's tokens except meta-tokens; those between the first two meta-tokens.
    """
    is_meta = input_ids == meta_token_id
    meta_tokens_before = is_meta.cumsum(dim=1)
    # The completion follows the last meta-token.
    is_prompt = meta_tokens_before < meta_tokens_before[:, -1:]
    is_scored = is_prompt & ~is_meta
    return is_scored, is_scored & (meta_tokens_before == 1)


@contextmanager
def bracket_loss(model: Any, weight: float | None, micro_batches: int) -> Iterator[None]:
    """Within the context, add `weight` times the auxiliary loss of every block except the last to the training loss.

    A block's loss is the binary cross-entropy of a linear head on its layer-normed states. It is a mean over the tokens
    of the prompt, in which tokens in the bracket count `POSITIVE_WEIGHT` times.

    Args:
        model: has hooks and the heads, as its module `bracket_heads`, within the context. The heads are drawn from
            torch's generator.
        weight: of the sum over blocks; None: no auxiliary loss.
        micro_batches: those of an optimizer step, over all processes; each one's loss is divided by it.
    """
    if weight is None:
        yield
        return
    blocks = decoder_of(model)[1][:-1]
    heads = nn.ModuleList(nn.Linear(model.config.hidden_size, 1) for _ in blocks).to(model.device)
    meta_token_id = model.config.meta_token_id
    states: list[Tensor] = []

    def keep_states(
        block: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor | None]
    ) -> None:
        if block.training:
            # Some return attention weights too.
            states.append(output[0] if isinstance(output, tuple) else output)

    def add_loss(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        if module.training:
            auxiliary = _loss(heads, states, kwargs["input_ids"], meta_token_id)
            outputs.loss = outputs.loss + weight / micro_batches * auxiliary
            states.clear()
        return outputs

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(keep_states))
        hooks.enter_context(model.register_forward_hook(add_loss, with_kwargs=True))
        model.bracket_heads = heads  # so that the optimizer finds them
        hooks.callback(delattr, model, "bracket_heads")
        yield


def _loss(
    heads: nn.ModuleList, states: list[Tensor], input_ids: Tensor, meta_token_id: int
) -> Tensor:
    is_scored, is_inside = bracket_labels(input_ids, meta_token_id)
    targets = is_inside.float()
    positive_weight = torch.full((1,), POSITIVE_WEIGHT, device=input_ids.device)
    # A mask, since an index would have a data-dependent shape.
    weights = is_scored / is_scored.sum()
    losses = []
    for head, state in zip(heads, states, strict=True):
        normed = functional.layer_norm(state, state.shape[-1:])
        logits = head(normed.to(head.get_parameter("weight").dtype))[..., 0]
        loss = functional.binary_cross_entropy_with_logits(
            logits, targets, weights, reduction="sum", pos_weight=positive_weight
        )
        losses.append(loss)
    return torch.stack(losses).sum()
