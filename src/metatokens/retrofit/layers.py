"""The modules that are added to a decoder, and the hooks that connect them.

Each forward pass of the decoder finds the positions of the meta-tokens once. Every block receives them as an argument,
so a block with activation checkpointing sees the same ones when it is recomputed. The state that hooks share is
thread-local, so several threads may run one model at once.
"""

import threading
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, DynamicCache
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metatokens.errors import UserError
from metatokens.model.attention import AttentionFunction, MetaAttention
from metatokens.model.cache import SecondStore, add_second_layers, give
from metatokens.model.inputs import InputSpan
from metatokens.model.paged import engine_of
from metatokens.model.positions import Rotary, check_positions, packed_sequences, position_ids_from_mask, rotary_tables
from metatokens.model.rows import BREAKS_GRAPH, AllRows, MetaRows, least_rows, positions_of, shown
from metatokens.model.window import TextRule, check_remembering
from metatokens.retrofit.settings import MetaSettings


@dataclass(frozen=True, slots=True)
class Pass:
    """The rows of meta-attention in one forward pass, and what it needs with them.

    Attributes:
        rows: those of meta-tokens; all rows where an engine owns the batch, and in a compiled graph.
        rotary: rotary tables for their positions.
        mask: (batch, 1, length, total), which positions each position may attend to; None unless the model was given a
            mask of four dimensions, or one was made of all positions.
        attend: the attention function of the base, for `AllRows`.
        engine: as in `AttentionKwargs`.
    """

    rows: MetaRows | AllRows
    rotary: Rotary
    mask: Tensor | None
    attend: AttentionFunction | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Pass":
        """Move to another device; accelerate calls this when layers are on several devices."""
        if self.rotary[0].device == torch.device(device):
            return self
        cos, sin = (table.to(device, non_blocking=non_blocking) for table in self.rotary)
        mask = None if self.mask is None else self.mask.to(device, non_blocking=non_blocking)
        rows = self.rows.to(device, non_blocking=non_blocking)
        return replace(self, rows=rows, rotary=(cos, sin), mask=mask)


class _State:
    """The forward pass of a decoder, and the current block with its input, pass and cache.

    Attributes:
        sequences: numbers of the packed sequences, until the first block's mask is checked.
        masks: the mask that every block is given, and the one of the blocks that see all text.
        is_running: whether a pass of the decoder runs.
    """

    step: Pass | None = None
    sequences: Tensor | None = None
    masks: tuple[Any, Any] | None = None
    is_running = False
    block: "tuple[MetaBlock, Tensor, Pass, Cache | None] | None" = None


class _Thread(_State, threading.local):
    """The state of one thread."""


_thread, _traced = _Thread(), _State()
FULL_MASK = "mask_of_full_blocks"  # an attribute of the mask that all blocks are given
_OUTSIDE = (
    "a block of a retrofitted model ran outside a pass of its model, as a wrapper for activation checkpointing runs it "
    "again; use model.gradient_checkpointing_enable() in its place."
)
_JOINED = "this base lets sequences that are packed into one row see one another; give each its own row."


def _state() -> _State:
    """The state; while a graph of the whole pass is traced, one that torch.compile can trace."""
    return _traced if torch.compiler.is_compiling() and _traced.step is not None else _thread


class MetaRow(nn.Module):
    """The meta-token's embedding, a parameter of its own, so that the table can stay frozen."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def start(self) -> None:
        """Set the initial weights."""
        init.normal_(self.weight, std=0.02)

    def forward(self, embeddings: Tensor, is_meta: Tensor) -> Tensor:
        """Replace `embeddings`, (batch, length, width), by the row where `is_meta`, (batch, length)."""
        return torch.where(is_meta[..., None], self.weight.to(embeddings), embeddings)


class MetaEmbedding(nn.Module):
    """Mixin for a table of embeddings, in which the meta-token's is a separate parameter."""

    meta_token: MetaRow
    meta_token_id: int

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Embeddings (batch, length, width) of ids (batch, length)."""
        return self.meta_token(super().forward(input, *args, **kwargs), input == self.meta_token_id)


class MetaModule(nn.Module):
    """LayerNorm and meta-attention of one block, computed at meta-tokens only."""

    def __init__(self, settings: MetaSettings, block: int, layer_idx: int):
        super().__init__()
        self.norm = nn.LayerNorm(settings.hidden_size, eps=settings.layer_norm_epsilon, bias=False)
        self.attention = MetaAttention(settings, block, layer_idx)  # type: ignore[arg-type]  # some are class variables

    def start(self) -> None:
        """Set initial weights with which the module adds exactly zero."""
        init.ones_(self.norm.weight)
        init.normal_(self.attention.qkv_proj.weight, std=0.02)
        init.zeros_(self.attention.out_proj.weight)

    def forward(self, x: Tensor, step: Pass, cache: Cache | None) -> Tensor:
        """Meta-attention's output for the residual stream x, at the meta-tokens alone: (batch, most, width)."""
        if cache is not None and isinstance(step.rows, MetaRows):
            give(cache.layers[self.attention.block], SecondStore)
        if not torch.is_autocast_enabled(x.device.type):  # the base may be in another precision
            x = x.to(self.norm.weight.dtype)
        rotary = step.rotary[0].to(x.dtype), step.rotary[1].to(x.dtype)
        given = {"rows": step.rows, "mask": step.mask, "attend": step.attend, "engine": step.engine}
        return self.attention(self.norm(x), rotary=rotary, cache=cache, **given)[0]


class MetaBlock(nn.Module):
    """Mixin for a block of a decoder: meta-attention between its attention and its feed-forward layer."""

    meta_attention: MetaModule
    meta_site_has_residual: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block with the current pass."""
        if _thread.sequences is not None:
            _check_apart(_thread.sequences, (*args, *kwargs.values()))
        elif torch.compiler.is_compiling() and _traced.sequences is not None:  # the graph checks it when it runs
            torch._assert_async(~_are_joined(_traced.sequences, (*args, *kwargs.values())), _JOINED)
            _traced.sequences = None
        # Not in `forward`, which activation checkpointing runs again, after the pass.
        if (step := _state().step) is None:
            _check_inside()
        return super().__call__(*args, meta_step=step, **kwargs)

    def forward(self, hidden_states: Tensor, *args: Any, meta_step: Pass | None = None, **kwargs: Any) -> Any:
        """Run the block, with meta-attention in it if there are meta-tokens, and otherwise unchanged."""
        if meta_step is None:
            return super().forward(hidden_states, *args, **kwargs)
        cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, Cache)), None)
        state = _state()
        state.block = self, hidden_states, meta_step, cache
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:  # checkpointing may end the recomputation early, by an exception
            state.block = None


class FullBlock(nn.Module):
    """Mixin for a block of a decoder that forgets text: this block may see all of it."""

    sees_all_text: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block, with its own mask in place of that of the other blocks."""
        if not self.sees_all_text:
            return super().__call__(*args, **kwargs)
        given, own = _state().masks or _masks_among((*args, *kwargs.values()))
        if given is None:
            _check_inside()
            return super().__call__(*args, **kwargs)
        kwargs = {name: own if one is given else one for name, one in kwargs.items()}
        return super().__call__(*(own if one is given else one for one in args), **kwargs)


def _masks_among(given: tuple) -> tuple[Any, Any]:
    """The masks of a pass that is over, by what a block is given when its activations are computed again."""
    if torch.compiler.is_compiling():
        return None, None
    return next(((one, getattr(one, FULL_MASK)) for one in given if hasattr(one, FULL_MASK)), (None, None))


def _check_inside() -> None:
    """Refuse a block that is run again, after the pass: it would lack what the pass hands to blocks."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not _thread.is_running:
        raise UserError(_OUTSIDE)


def choose_full(blocks: Iterable[nn.Module], full: Collection[int]) -> None:
    """Have the blocks `full`, and no others, see all text in a decoder that forgets text."""
    for number, block in enumerate(blocks):
        if number in full:
            give(block, FullBlock)
        if isinstance(block, FullBlock):
            block.sees_all_text = number in full


@torch.compiler.disable  # as `_begin`
def _check_apart(sequences: Tensor, given: tuple) -> None:
    """Refuse packed sequences that see one another."""
    _thread.sequences = None
    if bool(_are_joined(sequences, given)):
        raise UserError(_JOINED)


def _are_joined(sequences: Tensor, given: tuple) -> Tensor:
    """Whether packed sequences see one another by the mask that a block is given; some bases make such masks."""
    begins, size = sequences.diff()[:, None] > 0, (sequences.shape[1],) * 2
    for mask in given:
        # Whether a token sees the one before it, (batch or 1, heads or 1, length - 1).
        if isinstance(mask, BlockMask):
            rows, places = (torch.arange(size, device=sequences.device) for size in begins.shape[::2])
            zero = torch.zeros_like(rows[:1])
            sees = mask.mask_mod(rows[:, None], zero, places + 1, places)[:, None]
        elif isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2:] == size:
            sees = _seen(mask).diagonal(-1, 2, 3)
        else:
            continue
        return (sees & begins.to(sees.device)).any()
    return begins.any()


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that were added to a base, by name."""
    own = {"meta_attention", "meta_token"}
    return {name: one for name, one in model.named_parameters() if own & set(name.split("."))}


def add_at_site(site: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a site: add meta-attention to the output, which joins the residual stream."""
    if (current := _state().block) is None:
        return output
    block, x, step, cache = current
    y = output[0] if isinstance(output, tuple) else output
    step = step.to(y.device)
    state = step.rows.gather(y)
    if not block.meta_site_has_residual:
        state = state + step.rows.gather(x.to(y.device))
    y = step.rows.scatter_add(y, block.meta_attention(state, step, cache))
    return (y, *output[1:]) if isinstance(output, tuple) else y


def leave_out(head: Any, args: tuple, logits: Tensor) -> Tensor:
    """Forward hook of the output head: mask the meta-token and unused rows, in place.

    The mask is finite, since label smoothing averages over all entries: the loss is then shifted by a constant, and its
    gradients do not change.
    """
    logits[..., head.meta_token_id] = logits[..., head.used_rows :] = -1e4
    return logits


def find_rows(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the decoder: find the meta-tokens of this pass, and hide forgotten text.

    Refuses what would be silently wrong: an adapter around the embeddings, a cache of packed sequences, and sequences
    beyond a learned table of positions.
    """
    if len(args) > 1:
        args, kwargs = (), by_name(decoder, args, kwargs)
    is_meta = _meta_tokens(decoder, args, kwargs)
    if is_meta is None:
        return None  # the base raises an error for it
    past = next((one for one in kwargs.values() if isinstance(one, Cache)), None)
    is_traced, engine = torch.compiler.is_compiling(), engine_of(kwargs)
    if not is_traced:
        _thread.is_running = True
    if not (is_traced or decoder.meta_has_trained) and decoder.training and torch.is_grad_enabled():
        _look_at_first_step(decoder, is_meta)
    use_cache = kwargs.get("use_cache")
    makes_cache = getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache
    is_whole = is_traced and past is None and not makes_cache  # a cache that grows holds gathered meta-tokens
    is_dense = bool(engine) or is_whole or (past is not None and _has_room(decoder, past))
    if not is_dense:
        sequences = _begin(decoder, is_meta, past, kwargs)
    else:
        sequences = None if engine else _packed(is_meta, past, kwargs)
    if sequences is not None:  # next to a cache, even an empty one, transformers does not look for several sequences
        kwargs = kwargs | {"use_cache": False}
    rule = None
    if decoder.meta_config.text_window is None:
        check_remembering(past)
    else:
        rule, changed = _forgetting(decoder, is_meta, past, kwargs, sequences)
        kwargs = kwargs | changed
        if rule.full is not None:
            masks = kwargs["attention_mask"], rule.full.mask(decoder.config, decoder.dtype)
            if is_whole:
                _traced.masks = masks
            else:
                _hold_masks(masks)
    if is_dense:
        (_traced if is_traced else _thread).step = _all_rows(decoder, is_meta, past, rule, sequences, kwargs, engine)
        if is_traced:
            _traced.sequences = sequences if _has_masks(decoder) else None
    return args, kwargs


def by_name(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All inputs of a model's forward by their names; a TypeError if one is given twice, or there are too many."""
    return dict(**signature(model.forward).bind_partial(*args).arguments, **kwargs)


def _meta_tokens(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Where the meta-tokens are, (batch, length) bool; None without any input.

    A `meta_token_mask` among the named inputs, which is taken out of them, decides; without one, `input_ids` do, or
    `inputs_embeds` that equal the meta-token's.
    """
    ids, embeddings = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
    given, table = kwargs.pop("meta_token_mask", None), decoder.get_input_embeddings()
    if not hasattr(table, "meta_token_id"):  # PEFT would merge such an adapter into a row that is never read
        raise UserError(
            f"a {type(table).__name__} around the embeddings bypasses the meta-token's; train them by modules_to_save."
        )
    if given is not None:
        return given.bool()
    if ids is not None:
        return ids == table.meta_token_id
    if embeddings is None:
        return None
    row = table(torch.tensor([[table.meta_token_id]], device=embeddings.device)).to(embeddings)
    return (embeddings == row).all(dim=-1)


def _has_room(decoder: Any, cache: Cache) -> bool:
    """Whether a cache is of a fixed size, and now has further layers for meta-attention."""
    settings = decoder.meta_settings
    return bool(settings.layers) and add_second_layers(cache, decoder.meta_cache_layers, settings.head_size)


def _all_rows(
    decoder: Any,
    is_meta: Tensor,
    past: Cache | None,
    rule: TextRule | None,
    sequences: Tensor | None,
    given: Mapping[str, Any],
    engine: Any,
) -> Pass:
    """The pass in the dense form. It reads no value of a tensor, so that it can be part of a graph."""
    settings, length, positions = decoder.meta_settings, is_meta.shape[1], _row_positions(is_meta, given)
    cached = 0 if past is None else past.get_seq_length()
    mask = given.get("attention_mask") if engine else _full_mask(decoder, given.get("attention_mask"), past)
    if not torch.compiler.is_compiling():
        _check_positions(decoder.config, int(cached) + length, mask, positions)
    slots = (torch.arange(length, device=is_meta.device) + cached)[None]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        is_meta = is_meta & mask[:, slots[0]].bool()
    rows = AllRows(is_meta)
    if engine:
        mask = mask["full_attention"] if isinstance(mask, dict) else mask
    elif rule is not None:
        mask = rule.seen()[:, None]
    elif mask is not None and mask.ndim == 4:
        mask = _seen(mask)
    elif past is not None:
        mask = rows.mask(cached, past.layers[-1].max_cache_len)
    elif sequences is not None:
        mask = rows.mask(0, length) & (sequences[:, None, :, None] == sequences[:, None, None, :])
    else:
        mask = None  # one of two dimensions hides padding, which is no meta-token
    rotary = rotary_tables(slots if positions is None else positions, settings.head_size, settings.rope_theta)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(decoder.config._attn_implementation, None) if engine else None
    return Pass(rows, rotary, mask, attend, engine)


def _row_positions(is_meta: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """The positions that a pass was given, (batch or 1, length); None for the three axes of multimodal models.

    A model with four axes has the positions of a row in the first.
    """
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]
    is_one_axis = isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == is_meta.shape[1]
    return positions if is_one_axis else None


def _packed(is_meta: Tensor, past: Cache | None, given: Mapping[str, Any]) -> Tensor | None:
    """The `packed_sequences` of a pass."""
    positions = _row_positions(is_meta, given)
    return packed_sequences(given.get("attention_mask"), positions, past, given.get("cu_seq_lens_q"))


def _seen(mask: Tensor) -> Tensor:
    """Which positions any head sees by a mask of four dimensions, (batch, 1, length, total) bool."""
    return shown(mask).any(dim=1, keepdim=True)


def _has_masks(decoder: Any) -> bool:
    """Whether the first block is given a mask that shows packed sequences."""
    return decoder.config._attn_implementation in ("sdpa", "eager", "flex_attention") and not _has_states(decoder)


def _has_states(decoder: Any) -> bool:
    """Whether blocks have a recurrent state."""
    return "linear_attention" in (getattr(decoder.config, "layer_types", None) or ())


@torch.compiler.disable
def _look_at_first_step(decoder: Any, is_meta: Tensor) -> None:
    """Warn, in the first training step, if nothing that was added is trained, or the batch has no meta-token."""
    decoder.meta_has_trained, own = True, own_parameters(decoder)
    is_added = {name in own for name, one in decoder.named_parameters() if one.requires_grad}
    if is_added == {False}:
        warnings.warn(
            "nothing of what add_meta_attention added is trained. For PEFT, put into LoraConfig: exclude_modules="
            '".*meta_attention.*", modules_to_save=["meta_attention", "meta_token"].',
            stacklevel=2,
        )
    elif is_added and decoder.meta_settings.layers and not bool(is_meta.any()):
        warnings.warn(
            "no meta-token is in this batch, so meta-attention learns nothing from it. MetaTokenCollator inserts them.",
            stacklevel=2,
        )


# The number of meta-tokens is data-dependent, and thread-local state would be traced once.
@torch.compiler.disable(reason=BREAKS_GRAPH)
def _begin(decoder: Any, is_meta: Tensor, past: Cache | None, given: dict[str, Any]) -> Tensor | None:
    """Set this thread's pass, for the blocks; None if there are no meta-tokens. Return the `packed_sequences`."""
    if torch.compiler.is_exporting():
        raise UserError(BREAKS_GRAPH)
    mask, positions = given.get("attention_mask"), _row_positions(is_meta, given)
    _thread.is_running, _thread.step, least, length = True, None, least_rows(decoder), is_meta.shape[1]
    cached = 0 if past is None else int(past.get_seq_length())
    _check_positions(decoder.config, cached + length, mask, positions)
    sequences = _packed(is_meta, past, given)
    if _has_states(decoder) and sequences is not None and not {"cu_seq_lens_q", "seq_idx"} <= given.keys():
        raise UserError(
            "this base has blocks with a state, which keep packed sequences apart by cu_seq_lens_q and seq_idx alone: "
            "give these too, or each sequence its own row."
        )
    _thread.sequences = sequences if _has_masks(decoder) else None
    if not (least or bool(is_meta.any())):  # only text
        return sequences
    mask, seen = _full_mask(decoder, mask, past), None
    if mask is not None and mask.ndim == 4:
        seen = _seen(mask)
    elif mask is not None:  # longer than what was read, with a cache of a fixed size
        is_meta = is_meta & mask[:, : cached + length][:, -length:].bool()
    settings = decoder.meta_settings
    rows = MetaRows.at(positions_of(is_meta, least=least), cached, positions, sequences)
    if rows is None:
        return sequences
    if past is not None and settings.layers and settings.layers[0] < len(past.layers):
        store = past.layers[settings.layers[0]]
        if isinstance(store, SecondStore):
            store.check_second(rows, is_masked=seen is not None)
    rotary = rotary_tables(rows.positions.clamp(min=0), settings.head_size, settings.rope_theta)
    _thread.step = Pass(rows, rotary, seen)
    return sequences


def _forgetting(
    decoder: Any, is_meta: Tensor, past: Cache | None, given: dict[str, Any], sequences: Tensor | None
) -> tuple[TextRule, dict[str, Any]]:
    """The rule by which this pass forgets text, and the inputs that follow from it: a mask, positions, and a cache."""
    padding, positions, use_cache = (given.get(name) for name in ("attention_mask", "position_ids", "use_cache"))
    if past is None and not decoder.training and (decoder.config.use_cache if use_cache is None else use_cache):
        past = DynamicCache(config=decoder.config)
    own = _row_positions(is_meta, given)
    own = InputSpan.of(is_meta, padding, past).position_ids() if own is None else own
    rule = TextRule.of(decoder.meta_config, own, is_meta, padding, past, sequences)
    mask = rule.mask(decoder.config, decoder.dtype)
    # Multimodal models have several axes of positions, which stay.
    positions = own if positions is None else positions
    return rule, {"attention_mask": mask, "position_ids": positions, "past_key_values": past}


@torch.compiler.disable  # as `_begin`
def _hold_masks(masks: tuple[Any, Any]) -> None:
    """Set this thread's masks. The mask that blocks are given leads to the other one after the pass, too."""
    _thread.masks = masks
    setattr(masks[0], FULL_MASK, masks[1])


def _check_positions(config: Any, length: int, mask: Any, positions: Tensor | None) -> None:
    """Refuse a sequence of `length` tokens, cached ones included, that a learned table of positions does not hold."""
    if getattr(config, "position_embedding", None) != "learned":
        return
    if positions is None and isinstance(mask, Tensor) and mask.ndim == 2:  # padding has no positions
        positions = position_ids_from_mask(mask[:, :length])
    check_positions(config, length, torch.tensor(length - 1) if positions is None else positions)


def _full_mask(decoder: Any, mask: Any, past: Cache | None) -> Tensor | None:
    """The mask without a sliding window, of two or four dimensions, among the masks given; None if there is none.

    In a model with a sliding window, a single mask of four dimensions may contain the window, and is refused. With a
    cache of a fixed size, `generate()` makes such a mask. No sequences are packed then, so it can be ignored.
    """
    is_by_kind = isinstance(mask, dict)
    if is_by_kind:
        mask = mask.get("full_attention")
    if not isinstance(mask, Tensor):
        return None
    if not is_by_kind and mask.ndim == 4 and getattr(decoder.config.get_text_config(), "sliding_window", None):
        if past is None or not past.is_compileable:
            raise UserError(
                "in a model with a sliding window, a mask of four dimensions does not define which meta-tokens see one "
                'another; give a dictionary with one for "full_attention", or each sequence its own row.'
            )
        return None
    return mask


def forget_rows(decoder: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of the decoder: the pass is over."""
    state = _state()
    state.step = state.sequences = state.masks = None
    state.is_running = False
