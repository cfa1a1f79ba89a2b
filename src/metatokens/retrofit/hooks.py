"""The hooks of a decoder: a forward pass finds the positions of the meta-tokens once, and blocks add meta-attention."""

import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metatokens.errors import UserError
from metatokens.model.cache import SecondStore, add_second_layers
from metatokens.model.inputs import InputSpan, meta_tokens
from metatokens.model.paged import engine_of
from metatokens.model.positions import packed_sequences, rotary_tables
from metatokens.model.releases import CACHE, with_cache_renamed
from metatokens.model.rows import BREAKS_GRAPH, AllRows, MetaRows, check_graph, least_rows, positions_of
from metatokens.model.vocabulary import check_ids
from metatokens.model.window import TextRule, check_remembering
from metatokens.retrofit.context import FULL_MASK, ForwardContext, current, seen_by_a_head
from metatokens.retrofit.layers import added_parameters, check_table


def add_at_site(site: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a site: add meta-attention to the output, which joins the residual stream."""
    if (running := current().block) is None:
        return output
    block, x, context, cache = running
    y = output[0] if isinstance(output, tuple) else output
    context = context.to(y.device)
    state = context.rows.gather(y)
    if not block.meta_site_has_residual:
        state = state + context.rows.gather(x.to(y.device))
    y = context.rows.scatter_add(y, block.meta_attention(state, context, cache))
    return (y, *output[1:]) if isinstance(output, tuple) else y


def mask_logits(head: Any, args: tuple, logits: Tensor) -> Tensor:
    """Forward hook of the output head: mask the meta-token and unused rows, in place.

    The mask is finite, since label smoothing averages over all entries: the loss is then shifted by a constant, and its
    gradients do not change.
    """
    logits[..., head.meta_token_id] = logits[..., head.used_rows :] = -1e4
    return logits


def begin_pass(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the decoder: find the meta-tokens of this pass, and hide forgotten text.

    Refuses what would be silently wrong: an adapter around the embeddings, a cache of packed sequences, and sequences
    beyond a learned table of positions.
    """
    if len(args) > 1:
        args, kwargs = (), bind_inputs(decoder, args, kwargs)
    kwargs = with_cache_renamed(kwargs)
    is_meta = _meta_tokens(decoder, args, kwargs)
    if is_meta is None:
        return None  # the base raises an error for it
    past = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    is_traced, engine = torch.compiler.is_compiling(), engine_of(kwargs)
    if getattr(decoder.config, "num_hidden_layers", None) != decoder.meta_depth:
        raise UserError(
            "this model's blocks are others than those that got meta-attention, as with PEFT's layer_replication: "
            "change the base's blocks before add_meta_attention."
        )
    if not (is_traced or decoder.meta_has_trained) and decoder.training and torch.is_grad_enabled():
        _look_at_first_step(decoder, is_meta, kwargs.get("input_ids", args[0] if args else None))
    use_cache = kwargs.get("use_cache")
    makes_cache = getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache
    is_whole = is_traced and past is None and not makes_cache  # a cache that grows holds gathered meta-tokens
    is_dense = bool(engine) or is_whole or (past is not None and _has_room(decoder, past))
    span, chosen = InputSpan.of(is_meta, _padding_mask(kwargs), past), _row_positions(is_meta, kwargs)
    is_meta, forgets = span.real(is_meta), decoder.meta_config.text_window is not None
    positions = span.positions(chosen)
    if getattr(decoder.config, "position_embedding", None) == "learned":
        span.check_positions(decoder.config, positions)
    # Where neither the caller nor a window chooses positions, the base does, and meta-attention counts all tokens.
    meta_positions = positions if forgets or chosen is not None else None
    running: Any = current().running
    if not is_dense:
        sequences, running.context = _gathered(decoder, is_meta, span, meta_positions, past, kwargs)
    else:
        sequences = None if engine else _packed(is_meta, past, kwargs)
    running.sequences = sequences if _has_masks(decoder) else None
    if sequences is not None:  # next to a cache, even an empty one, transformers does not look for several sequences
        kwargs = kwargs | {"use_cache": False}
    rule = None
    if not forgets:
        check_remembering(past)
    else:
        rule, changed = _forgetting(decoder, is_meta, positions, past, kwargs, sequences, are_given=chosen is not None)
        kwargs = kwargs | changed
        if rule.full is not None:
            running.masks = kwargs["attention_mask"], rule.full.mask(decoder.config, decoder.dtype)
            if not is_whole:
                _join_masks(*running.masks)
    if is_dense:
        running.context = _all_rows(decoder, is_meta, span, meta_positions, past, rule, sequences, kwargs, engine)
    return args, kwargs


def bind_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All inputs of a model's forward by their names; a TypeError if one is given twice, or there are too many."""
    return dict(**signature(model.forward).bind_partial(*args).arguments, **kwargs)


def _meta_tokens(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Where the meta-tokens are, (batch, length) bool; None without any input.

    A `meta_token_mask` among the named inputs, which is taken out of them, decides; without one, `input_ids` do, or
    `inputs_embeds` that equal the meta-token's.
    """
    ids, embeddings = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
    given, table = kwargs.pop("meta_token_mask", None), decoder.get_input_embeddings()
    check_table(table)
    if given is None and ids is None and embeddings is None:
        return None
    return meta_tokens(table, table.meta_token_id, ids, embeddings, given)


def _has_room(decoder: Any, cache: Cache) -> bool:
    """Whether a cache is of a fixed size, and now has further layers for meta-attention."""
    settings = decoder.meta_settings
    return bool(settings.layers) and add_second_layers(cache, decoder.meta_cache_layers, settings.head_size)


def _all_rows(
    decoder: Any,
    is_meta: Tensor,
    span: InputSpan,
    positions: Tensor | None,
    past: Cache | None,
    rule: TextRule | None,
    sequences: Tensor | None,
    given: Mapping[str, Any],
    engine: Any,
) -> ForwardContext:
    """The pass in the dense form. It reads no value of a tensor, so that it can be part of a graph."""
    settings, length, rows = decoder.meta_settings, is_meta.shape[1], AllRows(is_meta)
    mask = given.get("attention_mask") if engine else _full_mask(decoder, given.get("attention_mask"), past)
    if engine:
        mask = mask["full_attention"] if isinstance(mask, dict) else mask
    elif rule is not None:
        mask = rule.seen()[:, None]
    elif mask is not None and mask.ndim == 4:
        mask = seen_by_a_head(mask)
    elif past is not None:
        mask = rows.mask(span.cached, past.layers[-1].max_cache_len)
    elif sequences is not None:
        mask = rows.mask(0, length) & (sequences[:, None, :, None] == sequences[:, None, None, :])
    else:
        mask = None  # one of two dimensions hides padding, which is no meta-token
    slots = span.cache_position[None]
    rotary = rotary_tables(slots if positions is None else positions, settings.head_size, settings.rope_theta)
    attend = None
    if engine and mask is None:  # flash attention's kernels hide by lengths
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(decoder.config._attn_implementation, None)
    return ForwardContext(rows, rotary, mask, attend, engine)


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
    mask, lengths = given.get("attention_mask"), given.get("cu_seq_lens_q")
    return packed_sequences(mask, positions, past, lengths, at_jumps=past is None)


def _has_masks(decoder: Any) -> bool:
    """Whether the first block is given a mask that shows packed sequences."""
    return decoder.config._attn_implementation in ("sdpa", "eager", "flex_attention") and not _has_states(decoder)


def _has_states(decoder: Any) -> bool:
    """Whether blocks have a recurrent state."""
    return "linear_attention" in (getattr(decoder.config, "layer_types", None) or ())


@torch.compiler.disable
def _look_at_first_step(decoder: Any, is_meta: Tensor, ids: Tensor | None) -> None:
    """Warn, in the first training step, if nothing that was added is trained, or the batch has no meta-token.

    Refuses ids of unused rows.
    """
    if ids is not None:
        check_ids(ids, decoder.meta_config.unpadded_vocab_size)
    decoder.meta_has_trained, own = True, added_parameters(decoder)
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


@torch.compiler.disable(reason=BREAKS_GRAPH)  # the number of meta-tokens is data-dependent
def _gathered(
    decoder: Any,
    is_meta: Tensor,
    span: InputSpan,
    positions: Tensor | None,
    past: Cache | None,
    given: Mapping[str, Any],
) -> tuple[Tensor | None, ForwardContext | None]:
    """The `packed_sequences`, and the pass in the gathered form; None if there are no meta-tokens."""
    check_graph()
    sequences, least = _packed(is_meta, past, given), least_rows(decoder)
    if _has_states(decoder) and sequences is not None and not {"cu_seq_lens_q", "seq_idx"} <= given.keys():
        raise UserError(
            "this base has blocks with a state, which keep packed sequences apart by cu_seq_lens_q and seq_idx alone: "
            "give these too, or each sequence its own row."
        )
    if not (least or bool(is_meta.any())):  # only text
        return sequences, None
    mask, seen = _full_mask(decoder, given.get("attention_mask"), past), None
    if mask is not None and mask.ndim == 4:
        seen = seen_by_a_head(mask)
    settings = decoder.meta_settings
    rows = MetaRows.at(positions_of(is_meta, least=least), int(span.cached), positions, sequences)
    if rows is None:
        return sequences, None
    if past is not None and settings.layers and settings.layers[0] < len(past.layers):
        store = past.layers[settings.layers[0]]
        if isinstance(store, SecondStore):
            store.check_second(rows, is_masked=seen is not None)
    rotary = rotary_tables(rows.positions.clamp(min=0), settings.head_size, settings.rope_theta)
    return sequences, ForwardContext(rows, rotary, seen)


def _forgetting(
    decoder: Any,
    is_meta: Tensor,
    positions: Tensor,
    past: Cache | None,
    given: Mapping[str, Any],
    sequences: Tensor | None,
    *,
    are_given: bool,
) -> tuple[TextRule, dict[str, Any]]:
    """The rule by which this pass forgets text, and the inputs that follow from it: a mask, positions, and a cache."""
    padding, chosen, use_cache = (given.get(name) for name in ("attention_mask", "position_ids", "use_cache"))
    if past is None and not decoder.training and (decoder.config.use_cache if use_cache is None else use_cache):
        past = DynamicCache(config=decoder.config)
    rule = TextRule.of(decoder.meta_config, positions, is_meta, padding, past, sequences, are_given=are_given)
    if past is not None and given.get("output_attentions", decoder.config.output_attentions):
        past.check_weights()
    mask = rule.mask(decoder.config, decoder.dtype)
    # Multimodal models have several axes of positions, which stay.
    chosen = positions if chosen is None else chosen
    return rule, {"attention_mask": mask, "position_ids": chosen, CACHE: past}


@torch.compiler.disable  # it could not trace the attribute
def _join_masks(shared: Any, full: Any) -> None:
    """Have the mask that all blocks are given lead to that of the blocks that see all text, after the pass too."""
    setattr(shared, FULL_MASK, full)


def _padding_mask(given: Mapping[str, Any]) -> Tensor | None:
    """The mask of two dimensions among the inputs of a pass; None if there is none, or one of four dimensions."""
    mask = given.get("attention_mask")
    mask = mask.get("full_attention") if isinstance(mask, dict) else mask
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


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


def note_tokens_read(decoder: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of the decoder: note how many tokens were read, in layers that do not count them."""
    if torch.compiler.is_compiling():
        return
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    for cache in (value for value in values if isinstance(value, Cache)):
        for layer in cache.layers:
            if isinstance(layer, SecondStore) and not hasattr(layer, "get_seq_length"):
                layer.tokens_read = int(cache.get_seq_length())
