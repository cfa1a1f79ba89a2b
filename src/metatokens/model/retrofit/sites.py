"""Where meta-attention goes: the submodule of a block whose output joins the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.errors import UserError
from metatokens.model.retrofit.classes import decoder_of


@dataclass
class Call:
    """A module's call: what went in and came out, flat and in float32."""

    name: str
    inputs: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None


@torch.no_grad()
def find_sites(model: PreTrainedModel, layers: Sequence[int]) -> tuple[tuple[str, ...], bool]:
    """The site of each block, by what its submodules compute for a few tokens, whatever they are called.

    With x the block's input and z its output, the site is the first submodule whose output y
    - makes x + c y the input of a later one (c is 1 but in models that scale it), or
    - makes x + y + y' the output z with a later one's output y' (attention beside the feed-forward layer), or
    - is the input of a later one, where the submodule is given x too (then y has x in it, as in BLOOM).

    Returns:
        The names, and whether y has x in it.

    Raises:
        UserError: if a block has no such submodule, as those of state-space models.
    """
    _, blocks = decoder_of(model)
    calls: dict[int, list[Call]] = {index: [] for index in layers}
    handles = []
    for index in layers:
        for name, module in [("", blocks[index]), *blocks[index].named_children()]:
            before, behind = _recorder(calls[index], name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(behind))
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
        model(ids.to(device_of(model.get_input_embeddings())), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    sites = [_site(calls[index], torch.finfo(model.dtype).eps) for index in layers]
    if None in sites:
        raise UserError(
            f"meta-attention cannot be added to a {type(model).__name__}: block {layers[sites.index(None)]} has no "
            "attention whose output joins the residual stream ahead of a feed-forward layer, or beside one."
        )
    names, has_residual = zip(*sites, strict=True) if sites else ((), (False,))
    return names, any(has_residual)


def _recorder(calls: list[Call], name: str) -> tuple[Any, Any]:
    pending: list[Call] = []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        pending.append(Call(name, [_flat(one) for one in (*args, *kwargs.values()) if _is_state(one)]))
        calls.append(pending[-1])

    def behind(module: nn.Module, args: tuple, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        pending.pop().output = _flat(output) if _is_state(output) else None

    return before, behind


def _is_state(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _flat(x: Tensor) -> Tensor:
    return x.detach().float().cpu().flatten().clone()  # some blocks add in place, and some merge batch and length


def _site(calls: list[Call], eps: float) -> tuple[str, bool] | None:
    """A block's site from its own call, which is the first, and those of its submodules."""
    x, z = calls[0].inputs[0], calls[0].output
    names = [call.name for call in calls]

    def same(a: Tensor, b: Tensor | None) -> bool:
        return b is not None and a.shape == b.shape and bool((a - b).abs().max() <= 8 * eps * b.abs().max())

    for number, call in enumerate(calls[1:], start=2):
        y = call.output
        if y is None or y.shape != x.shape or names.count(call.name) > 1:  # a hook could not tell two calls apart
            continue
        states = [one for later in calls[number:] for one in later.inputs if one.shape == x.shape]
        shares = [((state - x) @ y) / (y @ y) for state in states]
        if any(share.abs() > 0.01 and same(x + share * y, state) for share, state in zip(shares, states, strict=True)):
            return call.name, False
        if any(
            later.output is not None and later.output.shape == x.shape and same(x + y + later.output, z)
            for later in calls[number:]
        ):
            return call.name, False
        if any(same(x, one) for one in call.inputs[1:]) and any(same(y, state) for state in states):
            return call.name, True
    return None


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes, also where accelerate keeps its weights elsewhere."""
    hook: Any = getattr(module, "_hf_hook", None)
    if getattr(hook, "execution_device", None) is not None:
        return torch.device(hook.execution_device)
    own = (one.device for name, one in module.named_parameters() if "meta_" not in name and one.device.type != "meta")
    return next(own, torch.device("cpu"))
