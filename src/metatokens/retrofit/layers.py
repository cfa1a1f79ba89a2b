"""The modules that are added to a decoder.

Every block receives the pass of its decoder as an argument, so a block with activation checkpointing sees the same
meta-tokens when it is recomputed.
"""

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
from metatokens.model.mixins import add_mixin
from metatokens.model.rows import GatheredRows
from metatokens.model.visibility import seen_by_a_head
from metatokens.retrofit.context import FULL_MASK, ForwardContext, Pass, current, thread, traced
from metatokens.retrofit.settings import MetaSettings

ADDED = {"meta_attention", "meta_token"}  # the names of the modules that are added
_OUTSIDE = (
    "a block of a retrofitted model ran outside a pass of its model, as a wrapper for activation checkpointing runs it "
    "again; use model.gradient_checkpointing_enable() in its place."
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
    wrapper = type(table)
    # PEFT would merge such an adapter into a row that is never read.
    if not hasattr(table, "meta_token_id"):
        raise UserError(
            f"a {wrapper.__name__} around the embeddings bypasses the meta-token's; train them by modules_to_save."
        )
    if any(type(part) is wrapper for part in table.modules() if part is not table):
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
        outer, state.running = state.running, Pass()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            state.running = outer


class MetaBlock(nn.Module):
    """Mixin for a block of a decoder: meta-attention between its attention and its feed-forward layer."""

    meta_attention: MetaModule
    meta_site_has_residual: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block with the current pass."""
        if (running := current().running) is None:
            _check_inside()
            return super().__call__(*args, **kwargs)
        if running.sequences is not None:
            joined = _are_joined(running.sequences, (*args, *kwargs.values()))
            if torch.compiler.is_compiling():  # the graph checks it when it runs
                torch._assert_async(~joined, _JOINED)
            elif bool(joined):
                raise UserError(_JOINED)
            running.sequences = None
        # Not in `forward`, which activation checkpointing runs again, after the pass.
        return super().__call__(*args, meta_context=running.context, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        meta_context: ForwardContext | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the block, with meta-attention in it if there are meta-tokens, and otherwise unchanged."""
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


class FullBlock(nn.Module):
    """Mixin for a block of a decoder that forgets text: this block may see all of it."""

    sees_all_text: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block, with its own mask in place of that of the other blocks."""
        if not self.sees_all_text:
            return super().__call__(*args, **kwargs)
        shared, full = _masks((*args, *kwargs.values()))
        if shared is None:
            _check_inside()
            return super().__call__(*args, **kwargs)
        kwargs = {name: full if value is shared else value for name, value in kwargs.items()}
        return super().__call__(*(full if value is shared else value for value in args), **kwargs)


def _masks(inputs: tuple) -> tuple[Any, Any]:
    """The mask that all blocks are given, and that of the blocks that see all text; None twice without a window.

    The first leads to the second also where a block is computed again, after its pass and maybe inside another one.
    """
    if not torch.compiler.is_compiling():
        for value in inputs:
            if hasattr(value, FULL_MASK):
                return value, getattr(value, FULL_MASK)
    running = current().running
    return (None, None) if running is None or running.masks is None else running.masks


def _check_inside() -> None:
    """Refuse a block that is run again, after the pass: it would lack what the pass hands to blocks."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and thread.running is None:
        raise UserError(_OUTSIDE)


def set_full_layers(blocks: Iterable[nn.Module], full: Collection[int]) -> None:
    """Have the blocks `full`, and no others, see all text in a decoder that forgets text."""
    for number, block in enumerate(blocks):
        if number in full:
            add_mixin(block, FullBlock)
        if isinstance(block, FullBlock):
            block.sees_all_text = number in full


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
