"""Any activation of a model on one prompt, by name, as in TransformerLens."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens.analysis.observation import observe
from metatokens.errors import UserError
from metatokens.model.wrappers import takes_wrapped


def _every(name: str) -> bool:
    return True


@takes_wrapped
@torch.no_grad()
def run_with_cache(
    model: PreTrainedModel, input_ids: Tensor, names: Callable[[str], bool] = _every
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a model on one prompt, and return its logits and its activations.

        logits, cache = metatokens.run_with_cache(model, ids)
        cache["blocks.2.second_attention.pattern"]  # (heads, meta-tokens, meta-tokens)

    Names, where L is the number of a block and M is `attention` or `second_attention` (meta-attention, or a twin's):

    - `blocks.L.resid_pre`, `blocks.L.resid_post`: the residual stream before and after a block, (length, width);
    - `blocks.L.M.queries`, `.keys`, `.values`: (heads, rows, head size), the first two with positions applied;
    - `blocks.L.M.scores`, `.pattern`: before and after softmax, (heads, rows, rows); masked scores are -inf;
    - `blocks.L.M.positions`: (rows,) int64, the rows' positions in the prompt; in meta-attention, the meta-tokens'.

    Args:
        model: any decoder, with or without meta-tokens; it is put into evaluation mode.
        input_ids: (length,) or (1, length) int64.
        names: decides which names are kept. The scores of a long prompt take more memory than everything else.

    Returns:
        The logits, (length, vocabulary), and the activations by name, in float64 except for `positions`.

    Raises:
        UserError: if there are several prompts, or the model's attention cannot be read.
    """
    prompt = input_ids.squeeze(0)
    if prompt.dim() != 1:
        raise UserError(
            f"run_with_cache takes one prompt, and input_ids has the shape {tuple(input_ids.shape)}."
        )
    seen = observe(model, prompt)
    cache: dict[str, Tensor] = {}
    for layer, (before, after) in enumerate(pairwise(seen.states)):
        cache[f"blocks.{layer}.resid_pre"] = before
        cache[f"blocks.{layer}.resid_post"] = after
    for (module, layer), inputs in seen.attention.items():
        prefix = f"blocks.{layer}.{module}"
        for part in ("queries", "keys", "values", "positions"):
            cache[f"{prefix}.{part}"] = getattr(inputs, part)
        if names(f"{prefix}.scores"):
            cache[f"{prefix}.scores"] = inputs.logits()
        if names(f"{prefix}.pattern"):
            cache[f"{prefix}.pattern"] = inputs.weights()
    return seen.logits, {name: activation for name, activation in cache.items() if names(name)}
