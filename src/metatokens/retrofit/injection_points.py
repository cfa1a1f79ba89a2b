"""The site of meta-attention in a block: the submodule whose output joins the residual stream."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.decoder import decoder_of
from metatokens.errors import UserError, one_line
from metatokens.model.releases import CACHE

_STEPS = "meta-attention cannot be added to a {}: it must read text alone, also in steps of two tokens with a cache"


@dataclass
class Call:
    """One call of a module: its inputs and its output, flattened, in the formats that they have in the model."""

    name: str
    inputs: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None


@torch.no_grad()
def find_sites(model: PreTrainedModel, layers: Sequence[int]) -> tuple[tuple[str, ...], bool]:
    """Find the site of each block from what its submodules compute for a few tokens, whatever their names.

    With x the block's input and z its output, the site is the first submodule whose output y satisfies one of these:
    - x + c y is the input of a later submodule (c is 1, except in models that scale it);
    - x + y + y' is z, with y' the output of a later submodule (attention parallel to the feed-forward layer);
    - y is the input of a later submodule, and the submodule itself received x as an input after its first (so y
      contains x, as in BLOOM).

    Random numbers replace x, and y of one submodule after another. Their magnitudes are similar, so that x + y differs
    from x in half precision too; and they vary by position, so that the output of a norm is not taken for them.

    Returns:
        The names of the sites, and whether their outputs contain x.

    Raises:
        UserError: if a block has no such submodule, as in state-space models, or the model cannot read text alone or in
            steps with a cache.
    """
    called = _calls(model, layers, None)
    names = dict.fromkeys(call.name for calls in called.values() for call in calls[1:])
    joining: dict[int, dict[str, bool]] = {index: {} for index in layers}
    for name in names:
        for index, calls in _calls(model, layers, name).items():
            has_residual = _joins(calls, name)
            if has_residual is not None:
                joining[index][name] = has_residual
    sites = [next((call.name for call in called[i] if call.name in joining[i]), None) for i in layers]
    if None in sites:
        raise UserError(
            f"meta-attention cannot be added to a {type(model).__name__}: block {layers[sites.index(None)]} has no "
            "attention whose output joins the residual stream ahead of a feed-forward layer, or next to one."
        )
    with probe_ids(model, _STEPS) as ids:  # generation reads an inserted meta-token together with the token before it
        apart, together = _in_steps(model, ids, (6, 1, 1)), _in_steps(model, ids, (6, 2))
        if (apart - together).norm() > 0.2 * apart.norm():  # for example if a step of two tokens drops a state
            raise ValueError("two tokens read in one step give other logits than one by one")
    return tuple(filter(None, sites)), any(joining[i][name] for i, name in zip(layers, sites, strict=True) if name)


def _calls(model: PreTrainedModel, layers: Sequence[int], replaced: str | None) -> dict[int, list[Call]]:
    """The calls of each block: its own, then its submodules'. The outputs of the one called `replaced` are random."""
    _, blocks = decoder_of(model)
    calls: dict[int, list[Call]] = {index: [] for index in layers}
    with ExitStack() as hooks:
        for index in layers:
            for name, module in [("", blocks[index]), *blocks[index].named_children()]:
                before, after = _recorder(calls[index], name, name == replaced)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after))
        with probe_ids(model, _STEPS) as ids:
            model(ids, use_cache=False)
    return calls


def _in_steps(model: PreTrainedModel, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The logits after the first step, when a text is read in steps of these lengths with a cache."""
    past, logits = None, []
    for step in ids.split(lengths, dim=1):
        out = model(step, use_cache=True, **{CACHE: past})
        past = getattr(out, CACHE)
        past.get_seq_length()  # raises for a cache of recurrent states only
        logits.append(out.logits.float())
    return torch.cat(logits[1:], dim=1)


@contextmanager
def probe_ids(model: PreTrainedModel, complaint: str, length: int = 8) -> Iterator[Tensor]:
    """Yield ids, (1, length), with a model in evaluation mode; an exception becomes a UserError with the complaint."""
    modes = {module: module.training for module in model.modules()}
    ids = torch.arange(length)[None] % model.config.get_text_config().vocab_size
    device = device_of(model.get_input_embeddings())
    try:
        model.eval()
        with torch.autocast(torch.device(device).type, enabled=False):  # outputs are compared
            yield ids.to(device)
    except Exception as error:  # of any type
        reason = f"({type(error).__name__}: {one_line(error)[:200]})"
        raise UserError(f"{complaint.format(type(model).__name__)}, and fails {reason}.") from error
    finally:
        for module, mode in modes.items():
            module.training = mode


def _recorder(calls: list[Call], name: str, is_replaced: bool) -> tuple[Any, Any]:
    """A pre-hook and a hook that append a module's calls to `calls`; a block's own input is replaced too."""
    pending: list[Call] = []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not name and args:
            args = (_stand_in(args[0], 0), *args[1:])
        elif not name:
            kwargs = kwargs | {"hidden_states": _stand_in(kwargs["hidden_states"], 0)}
        pending.append(Call(name, [_flat(one) for one in (*args, *kwargs.values()) if _is_state(one)]))
        calls.append(pending[-1])
        return args, kwargs

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        y = output[0] if isinstance(output, tuple) else output
        if is_replaced and _is_state(y) and y.numel() == calls[0].inputs[0].numel():
            y = _stand_in(y, 1)
            output = (y, *output[1:]) if isinstance(output, tuple) else y
        pending.pop().output = _flat(y) if _is_state(y) else None
        return output

    return before, after


def _stand_in(x: Tensor, seed: int) -> Tensor:
    """Random numbers of the shape of x, (..., width), larger at later positions."""
    numbers = torch.randn(x.numel() // x.shape[-1], x.shape[-1], generator=torch.Generator().manual_seed(seed))
    return (numbers * torch.linspace(0.5, 2.0, len(numbers))[:, None]).view(x.shape).to(x)


def _is_state(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _flat(x: Tensor) -> Tensor:
    return x.detach().cpu().flatten().clone()  # some blocks add in place, and some merge batch and length


def _joins(calls: list[Call], name: str) -> bool | None:
    """Whether the output y of a submodule contains the block's input; None if y does not join the residual stream."""
    x, z = calls[0].inputs[0], calls[0].output
    numbers = [number for number, call in enumerate(calls) if call.name == name]
    if len(numbers) != 1:  # a hook cannot separate two calls
        return None
    call, later = calls[numbers[0]], calls[numbers[0] + 1 :]
    y = call.output
    if y is None or y.shape != x.shape:
        return None
    states = [state for call in later for state in call.inputs if state.shape == x.shape]
    if any(_is_scaled_sum(state, x, y) for state in states):
        return False
    outputs = [call.output for call in later if call.output is not None and call.output.shape == x.shape]
    if any(_is_sum(z, [x, y, output]) for output in outputs):
        return False
    if any(_is_sum(state, [x]) for state in call.inputs[1:]) and any(_is_sum(state, [y]) for state in states):
        return True
    return None


def _is_scaled_sum(total: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether a total of the shape of x and y is x + c y, for any c that is not small."""
    share = (total.double() - x.double()) @ y.double() / y.double().square().sum()
    return bool(share.abs() > 0.01) and _is_sum(total, [x, y], [1.0, float(share)])


def _is_sum(total: Tensor | None, summands: list[Tensor], shares: Sequence[float] = (1.0, 1.0, 1.0)) -> bool:
    """Whether a total is the sum of these shares of the summands, except for what rounding changes.

    A model rounds each number up to four times, to the coarsest format of its states: a scaled summand and up to two
    sums, and our estimate of a share is off by as much. Each time it is off by half of eps, relative to the summands.
    We leave room for twice as many. Here the dot products of a share are rounded in float64, at each of their terms.
    """
    if total is None or total.shape != summands[0].shape:
        return False
    parts = [share * summand.double() for share, summand in zip(shares, summands, strict=False)]
    eps = max(torch.finfo(state.dtype).eps for state in (total, *summands))
    relative = 4 * eps + total.numel() * torch.finfo(torch.float64).eps
    return bool((sum(parts) - total.double()).abs().max() <= relative * sum(part.abs().max() for part in parts))


def device_of(module: nn.Module) -> torch.device:
    """The device a module computes on, which is not that of its weights if accelerate offloads them."""
    hook: Any = getattr(module, "_hf_hook", None)
    if getattr(hook, "execution_device", None) is not None:
        return torch.device(hook.execution_device)
    own = (one.device for name, one in module.named_parameters() if "meta_" not in name and one.device.type != "meta")
    return next(own, torch.device("cpu"))
