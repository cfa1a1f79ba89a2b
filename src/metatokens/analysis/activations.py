"""Any activation of a model on one prompt, by name, as in TransformerLens."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens.analysis.observation import observe
from metatokens.errors import UserError
from metatokens.model.wrappers import takes_wrapped


@takes_wrapped
@torch.no_grad()
def run_with_cache(
    model: PreTrainedModel, input_ids: Tensor, names: Callable[[str], bool] | str | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a model on one prompt, and return its logits and its activations.

        logits, cache = metatokens.run_with_cache(model, ids)
        cache["blocks.2.second_attention.pattern"]  # (heads, meta-tokens, meta-tokens)

    Names, where L is the number of a block and M is `attention` or `second_attention` (meta-attention, or a twin's):

    - `blocks.L.resid_pre`, `blocks.L.resid_post`: the residual stream before and after a block, (length, width);
    - `blocks.L.M.queries`, `.keys`, `.values`: (heads, rows, head size), the first two with positions applied;
    - `blocks.L.M.scores`, `.pattern`: before and after softmax, (heads, rows, rows); masked scores are -inf;
    - `blocks.L.M.positions`: (rows,) int64, the rows' positions in the prompt; in meta-attention, the meta-tokens';
    - every name in `model.named_modules()`: the submodule's output, or its first part, without the batch dimension; no
      entry if that is no tensor.

    Args:
        model: any decoder, with or without meta-tokens; it is put into evaluation mode.
        input_ids: (length,) or (1, length) int64.
        names: one name, or a function that decides which names are kept; by default all except submodules.

    Returns:
        The logits, (length, vocabulary), and the activations by name. Those named `blocks.L` are float64, except
        `positions`.

    Raises:
        UserError: if there is no such name, or the model's attention cannot be read.
    """
    if input_ids.squeeze(0).dim() != 1:
        raise UserError(f"run_with_cache takes one prompt, and input_ids has the shape {tuple(input_ids.shape)}.")
    is_wanted = _choice_of(names)
    modules: list[str] = []
    if names is not None:
        modules = [name for name, _ in model.named_modules() if name and is_wanted(name)]
    seen = observe(model, input_ids.squeeze(0), modules)
    # Compute only what is wanted: the scores of a long prompt take more memory than everything else.
    makers: dict[str, Callable[[], Tensor]] = {}
    for layer in range(len(seen.states) - 1):
        makers[f"blocks.{layer}.resid_pre"] = partial(seen.states.__getitem__, layer)
        makers[f"blocks.{layer}.resid_post"] = partial(seen.states.__getitem__, layer + 1)
    for (module, layer), inputs in seen.attention.items():
        for part in ("queries", "keys", "values", "positions"):
            makers[f"blocks.{layer}.{module}.{part}"] = partial(getattr, inputs, part)
        makers[f"blocks.{layer}.{module}.scores"] = inputs.logits
        makers[f"blocks.{layer}.{module}.pattern"] = inputs.weights
    cache = dict(seen.outputs)
    for name, make in makers.items():
        if is_wanted(name):
            cache[name] = make()
    if isinstance(names, str) and not cache:
        raise UserError(f"no activation {names!r}; without a name, run_with_cache gives all of them.")
    return seen.logits, cache


def _choice_of(names: Callable[[str], bool] | str | None) -> Callable[[str], bool]:
    """Which activations are asked for."""
    if names is None:
        return lambda name: True
    if isinstance(names, str):
        return names.__eq__
    return names
