"""The modules that are added to a decoder.

Every block receives the pass of its decoder as an argument, so a block with activation checkpointing sees the same
meta-tokens when it is recomputed.
"""

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers import initialization as init

from metatokens.errors import UserError
from metatokens.model.attention import MetaAttention
from metatokens.model.cache import SecondStore
from metatokens.model.forgetting_cache import FullHeads
from metatokens.model.mixins import add_mixin
from metatokens.model.rows import GatheredRows
from metatokens.model.visibility import seen_by_a_head
from metatokens.retrofit.context import ForwardContext, Pass, current, thread, traced
from metatokens.retrofit.full_heads import MasksOfHeads
from metatokens.retrofit.settings import MetaSettings

ADDED = {"meta_attention", "meta_token"}  # the names of the modules that are added
_OUTSIDE = (
    "a block of a retrofitted model ran outside a pass of its model, as a wrapper for activation checkpointing runs it "
    "again; use model.gradient_checkpointing_enable() in its place."
)
_OWN_MASKS = (
    "this base does not hand its blocks the mask that it is given, so that none can see all text: leave "
    "text_full_layers and text_full_heads out."
)
_JOINED = (
    "this base lets sequences that are packed into one row see one another; give each its own row."
)


class MetaTokenEmbedding(nn.Module):
    """The meta-token's embedding, a parameter of its own, so that the table can stay frozen."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        """Set the initial weights."""
        init.normal_(self.weight, std=0.02)

    def forward(self, embeddings: Tensor, is_meta: Tensor) -> Tensor:
        """Replace `embeddings`, (batch, length, width), by the row where `is_meta`, (batch, length)."""
        return torch.where(is_meta[..., None], self.weight.to(embeddings), embeddings)


class MetaEmbeddingTable(nn.Module):
    """Mixin for a table of embeddings, in which the meta-token's is a separate parameter."""

    meta_token: MetaTokenEmbedding
    meta_token_id: int

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Embeddings (batch, length, width) of ids (batch, length)."""
        return self.meta_token(super().forward(input, *args, **kwargs), input == self.meta_token_id)


def check_table(table: nn.Module) -> None:
    """Refuse wrappers of PEFT around a table of embeddings that do not reach its meta-token, or only in part."""
    if isinstance(table, MetaEmbeddingTable):
        return
    # PEFT would merge such an adapter into a row that is never read.
    if not hasattr(table, "meta_token_id"):
        raise UserError(
            "an adapter around the embeddings bypasses the meta-token's; train them by modules_to_save."
        )
    if any(type(part) is type(table) for part in table.modules() if part is not table):
        raise UserError(
            "adapters name in modules_to_save the table of embeddings, which includes the meta-token, and the "
            "meta-token besides: name the table alone, in each of them."
        )


class MetaModule(nn.Module):
    """LayerNorm and meta-attention of one block, computed at meta-tokens only."""

    def __init__(self, settings: MetaSettings, block: int, layer_idx: int):
        super().__init__()
        self.norm = nn.LayerNorm(settings.hidden_size, eps=settings.layer_norm_epsilon, bias=False)
        self.attention = MetaAttention(settings, block, layer_idx)  # type: ignore[arg-type]  # some are class variables

    def reset_parameters(self) -> None:
        """Set initial weights with which the module adds exactly zero."""
        init.ones_(self.norm.weight)
        init.normal_(self.attention.qkv_proj.weight, std=0.02)
        init.zeros_(self.attention.out_proj.weight)

    def forward(self, x: Tensor, context: ForwardContext, cache: Cache | None) -> Tensor:
        """Meta-attention's output for x, the residual stream at `context.rows`; both are (batch, most, width)."""
        if cache is not None and isinstance(context.rows, GatheredRows):
            add_mixin(cache.layers[self.attention.block], SecondStore)
        if not torch.is_autocast_enabled(x.device.type):  # the base may be in another precision
            x = x.to(self.norm.weight.dtype)
        cos, sin = context.rotary
        rotary = cos.to(x.dtype), sin.to(x.dtype)
        output, _ = self.attention(
            self.norm(x),
            rows=context.rows,
            cache=cache,
            attend=context.attend,
            mask=context.mask,
            rotary=rotary,
            engine=context.engine,
        )
        return output


class MetaDecoder(nn.Module):
    """Mixin for the decoder: each call is a pass, which ends with the call, and may run inside another one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the decoder; its hooks and blocks find the pass in `current()`."""
        state = traced if torch.compiler.is_compiling() else thread
        outer, state.forward_pass = state.forward_pass, Pass()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            state.forward_pass = outer


class MetaBlock(nn.Module):
    """Mixin for a block of a decoder: meta-attention between its attention and its feed-forward layer.

    Attributes:
        sees_all_text: whether the block has, in a decoder that forgets text, a mask that shows all of it.
        full_heads: if only some of its key-value heads do, which.
    """

    meta_attention: MetaModule
    meta_point_has_residual: bool
    sees_all_text = False
    full_heads: FullHeads | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block with the current pass."""
        forward_pass = current().forward_pass
        if forward_pass is None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise UserError(_OUTSIDE)
            return super().__call__(*args, **kwargs)
        if forward_pass.sequences is not None:
            _refuse_joined(forward_pass.sequences, (*args, *kwargs.values()))
            forward_pass.sequences = None  # the other blocks have the same mask
        if forward_pass.masks is not None:
            args, kwargs = self._with_mask(forward_pass.masks, args, kwargs)
        # Not in `forward`, which activation checkpointing runs again, after the pass.
        return super().__call__(*args, meta_context=forward_pass.context, **kwargs)

    def _with_mask(
        self, masks: tuple[Any, Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The inputs of the block, with its mask in place of the one that every block is given."""
        shared, full = masks
        if self.full_heads is not None:
            mask = MasksOfHeads(shared, full, self.full_heads)
        elif self.sees_all_text:
            mask = full
        else:
            return args, kwargs
        if not any(value is shared for value in (*args, *kwargs.values())):
            raise UserError(_OWN_MASKS)
        args = tuple(mask if value is shared else value for value in args)
        return args, {name: mask if value is shared else value for name, value in kwargs.items()}

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        meta_context: ForwardContext | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the block; if there are meta-tokens, `add_at_injection_point` adds meta-attention in it."""
        block = None
        if meta_context is not None:
            cache = next(
                (value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None
            )
            block = self, hidden_states, meta_context, cache
        state = current()
        outer, state.block = state.block, block
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:  # checkpointing may end the recomputation early, by an exception
            state.block = outer


def set_full(
    blocks: Iterable[nn.Module], full_layers: Collection[int], full_heads: dict[int, FullHeads]
) -> None:
    """Have these blocks, these heads of other blocks, and no others see all text in a decoder that forgets text."""
    for number, block in enumerate(blocks):
        if number in full_layers or number in full_heads:
            change_class(block, MetaBlock)
        if isinstance(block, MetaBlock):
            block.sees_all_text = number in full_layers
            block.full_heads = full_heads.get(number)


def change_class(module: Any, mixin: type) -> None:
    """Put a mixin in front of a module's class."""
    add_mixin(module, mixin)
    run_new_forward(module)


def run_new_forward(module: Any) -> None:
    """Have a module whose class was changed run the new class's forward, also where accelerate moves its weights.

    accelerate keeps the forward of the class that it met on the object.
    """
    if "_old_forward" in vars(module):
        module._old_forward = functools.partial(type(module).forward, module)


def _refuse_joined(sequences: Tensor, inputs: tuple) -> None:
    """Refuse a base whose blocks let packed sequences see one another; a graph refuses it when it runs."""
    joined = _are_joined(sequences, inputs)
    if torch.compiler.is_compiling():
        torch._assert_async(~joined, _JOINED)
    elif bool(joined):
        raise UserError(_JOINED)


def _are_joined(sequences: Tensor, inputs: tuple) -> Tensor:
    """Whether packed sequences see one another by the mask that a block is given; some bases make such masks."""
    begins = sequences.diff()[:, None] > 0
    for mask in inputs:
        sees_previous = _sees_previous(mask, sequences)
        if sees_previous is not None:
            return (sees_previous & begins.to(sees_previous.device)).any()
    return begins.any()


def _sees_previous(mask: Any, sequences: Tensor) -> Tensor | None:
    """Whether each token but the first sees the one before it, (batch or 1, heads or 1, length - 1); None: no mask."""
    rows, length = sequences.shape
    if isinstance(mask, BlockMask):
        row = torch.arange(rows, device=sequences.device)[:, None]
        key = torch.arange(length - 1, device=sequences.device)
        return mask.mask_mod(row, torch.zeros_like(key[:1]), key + 1, key)[:, None]
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2:] == (length, length):
        return seen_by_a_head(mask).diagonal(-1, 2, 3)
    return None


def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that were added to a base, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ADDED & set(name.split("."))
    }
