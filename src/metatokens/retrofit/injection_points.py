"""The injection point of meta-attention in a block: the submodule whose output joins the residual stream first."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.decoder import decoder_of
from metatokens.errors import UserError, one_line
from metatokens.model.releases import CACHE

_STEPS = "meta-attention cannot be added to a {}: it must read text alone, also in steps of two tokens with a cache"


@torch.no_grad()
def find_injection_points(model: PreTrainedModel, layers: Sequence[int]) -> tuple[list[str], bool]:
    """Find the injection point of each block from what its submodules compute for a few tokens, whatever their names.

    With x the block's input and z its output, it is the first submodule whose output y satisfies one of these:
    - x + c y is the input of a later submodule (c is 1, except in models that scale it);
    - x + c y + y' is z, with y' the output of a later submodule (attention parallel to the feed-forward layer);
    - c y is the input of a later submodule, and the submodule itself received x as an input after its first (so y
      contains x, as in BLOOM).

    Random numbers replace x, and y of one submodule after another. Their magnitudes are similar, so that x + y differs
    from x in half precision too; and they vary by position, so that the output of a norm is not taken for them.

    Returns:
        The names of these submodules, and whether their outputs contain x.

    Raises:
        UserError: if a block has no such submodule, as in state-space models, or the model cannot read text alone or in
            steps with a cache.
    """
    plain = _blocks_in_pass(model, layers, replaced=None)
    names = {call.name for block in plain.values() for call in block.calls}
    contains_x = {
        (layer, name): block.contains_x(name)
        for name in names
        for layer, block in _blocks_in_pass(model, layers, replaced=name).items()
    }
    points = []
    for layer, block in plain.items():
        joining = [call.name for call in block.calls if contains_x[layer, call.name] is not None]
        if not joining:
            raise UserError(
                f"meta-attention cannot be added to a {type(model).__name__}: block {layer} has no attention whose "
                "output joins the residual stream ahead of a feed-forward layer, or next to one."
            )
        points.append(joining[0])
    _check_steps(model)
    return points, any(contains_x[point] for point in zip(layers, points, strict=True))


def _check_steps(model: PreTrainedModel) -> None:
    """Refuse a model that drops a state in a step of two tokens: generation reads an inserted meta-token in such."""
    with probe_ids(model, _STEPS) as ids:
        one_by_one = _logits_in_steps(model, ids, (6, 1, 1))
        together = _logits_in_steps(model, ids, (6, 2))
        if (one_by_one - together).norm() > 0.2 * one_by_one.norm():
            raise ValueError("two tokens read in one step give other logits than one by one")


def _logits_in_steps(model: PreTrainedModel, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The logits after the first step, when a text is read in steps of these lengths with a cache."""
    cache, logits = None, []
    for step in ids.split(lengths, dim=1):
        output = model(step, use_cache=True, **{CACHE: cache})
        cache = getattr(output, CACHE)
        cache.get_seq_length()  # raises for a cache of recurrent states only
        logits.append(output.logits.float())
    return torch.cat(logits[1:], dim=1)


@contextmanager
def probe_ids(model: PreTrainedModel, complaint: str, length: int = 8) -> Iterator[Tensor]:
    """Yield ids, (1, length), with a model in evaluation mode; an exception becomes a UserError with the complaint."""
    was_training = model.training
    ids = torch.arange(length)[None] % model.config.get_text_config().vocab_size
    device = device_of(model.get_input_embeddings())
    try:
        model.eval()
        with torch.autocast(torch.device(device).type, enabled=False):  # outputs are compared
            yield ids.to(device)
    except Exception as error:  # the base's own code may raise any
        reason = f"({type(error).__name__}: {one_line(error)[:200]})"
        raise UserError(f"{complaint.format(type(model).__name__)}, and fails {reason}.") from error
    finally:
        model.train(was_training)


class Call(NamedTuple):
    """One call of a submodule: its inputs and its output, flattened, in the formats that they have in the model."""

    name: str
    inputs: list[Tensor]
    output: Tensor | None


class BlockInPass:
    """What a block computed in a pass: its input x, its output z, and the calls of its submodules in their order."""

    x: Tensor
    z: Tensor | None

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def begin(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace x by random numbers, as a pre-hook of the block."""
        if args:
            x = _random_like(args[0], seed=0)
            args = (x, *args[1:])
        else:
            x = _random_like(kwargs["hidden_states"], seed=0)
            kwargs = kwargs | {"hidden_states": x}
        self.x = _flat(x)
        return args, kwargs

    def end(self, block: nn.Module, args: tuple, output: Any) -> None:
        """Record z, as a hook of the block."""
        self.z = _flat(output[0] if isinstance(output, tuple) else output)

    def record(
        self,
        name: str,
        is_replaced: bool,
        module: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Record a call of a submodule, as a hook of it; with `is_replaced`, its output becomes random."""
        inputs = [_flat(value) for value in (*args, *kwargs.values()) if _is_state(value)]
        y = output[0] if isinstance(output, tuple) else output
        if is_replaced and _is_state(y) and y.numel() == self.x.numel():
            y = _random_like(y, seed=1)
            output = (y, *output[1:]) if isinstance(output, tuple) else y
        self.calls.append(Call(name, inputs, _flat(y) if _is_state(y) else None))
        return output

    def contains_x(self, name: str) -> bool | None:
        """Whether the output y of a submodule contains x; None if y does not join the residual stream."""
        names = [call.name for call in self.calls]
        if names.count(name) != 1:  # a hook cannot separate several calls
            return None
        number = names.index(name)
        (_, inputs, y), later = self.calls[number], self.calls[number + 1 :]
        read_later = [state for call in later for state in call.inputs]
        adds_y = any(_is_sum(state, [self.x], y) for state in read_later)
        adds_both = any(_is_sum(self.z, [self.x, parallel.output], y) for parallel in later)
        if adds_y or adds_both:
            return False
        is_y_read = any(_is_sum(state, [], y) for state in read_later)
        gets_x = any(_is_sum(state, [], self.x) for state in inputs[1:])
        return True if is_y_read and gets_x else None


def _blocks_in_pass(
    model: PreTrainedModel, layers: Sequence[int], replaced: str | None
) -> dict[int, BlockInPass]:
    """What some blocks computed in a pass over text; the outputs of the submodule called `replaced` are random."""
    _, modules = decoder_of(model)
    blocks = {layer: BlockInPass() for layer in layers}
    with ExitStack() as hooks:
        for layer, block in blocks.items():
            hooks.enter_context(
                modules[layer].register_forward_pre_hook(block.begin, with_kwargs=True)
            )
            hooks.enter_context(modules[layer].register_forward_hook(block.end))
            for name, submodule in modules[layer].named_children():
                record = partial(block.record, name, name == replaced)
                hooks.enter_context(submodule.register_forward_hook(record, with_kwargs=True))
        with probe_ids(model, _STEPS) as ids:
            model(ids, use_cache=False)
    return blocks


def _random_like(x: Tensor, *, seed: int) -> Tensor:
    """Random numbers of the shape of x, (..., width), larger at later positions."""
    width = x.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(x.numel() // width, width, generator=generator)
    scales = torch.linspace(0.5, 2.0, len(numbers))
    return (numbers * scales[:, None]).view(x.shape).to(x)


def _is_state(x: Any) -> bool:
    """Whether a module's input or output is a tensor of real numbers, such as hidden states."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _flat(x: Tensor) -> Tensor:
    """A flattened copy: some blocks add in place, and some merge batch and length."""
    return x.detach().cpu().flatten().clone()


def _is_sum(total: Tensor | None, others: Sequence[Tensor | None], y: Tensor | None) -> bool:
    """Whether a total is the sum of the others and c y, for any c that is not small, except for what rounding changes.

    A model rounds each number up to four times, to the coarsest format of its states: a scaled summand and up to two
    sums, and our estimate of c is off by as much. Each time it is off by half of eps, relative to the summands. We
    leave room for twice as many. Here the dot products of c are rounded in float64, at each of their terms.
    """
    states = [state for state in (total, *others, y) if state is not None]
    if len(states) < len(others) + 2 or len({state.shape for state in states}) > 1:
        return False
    eps = max(torch.finfo(state.dtype).eps for state in states)
    whole, *rest, direction = (state.double() for state in states)
    share = whole - sum(rest)
    c = float(share @ direction / direction.square().sum())
    relative = 4 * eps + len(whole) * torch.finfo(torch.float64).eps
    magnitude = abs(c) * direction.abs().max() + sum(state.abs().max() for state in rest)
    error = (share - c * direction).abs().max()
    return abs(c) > 0.01 and bool(error <= relative * magnitude)


def device_of(module: nn.Module) -> torch.device:
    """The device a module computes on, which is not that of its weights if accelerate offloads them."""
    hook: Any = getattr(module, "_hf_hook", None)
    if getattr(hook, "execution_device", None) is not None:
        return torch.device(hook.execution_device)
    for name, parameter in module.named_parameters():
        if "meta_" not in name and parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")
