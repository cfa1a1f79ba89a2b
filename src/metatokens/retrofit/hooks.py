"""The hooks of a decoder: a forward pass finds the positions of the meta-tokens once, and blocks add meta-attention."""

import warnings
from inspect import signature
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metatokens.errors import UserError
from metatokens.model.cache import add_second_layers
from metatokens.model.forgetting_cache import full_heads_by_block
from metatokens.model.paged_cache import engine_of
from metatokens.model.positions import packed_sequences, rotary_tables
from metatokens.model.releases import CACHE, with_cache_renamed
from metatokens.model.rows import BREAKS_GRAPH, check_graph, minimum_rows
from metatokens.model.visibility import (
    MetaAttentionForm,
    Visibility,
    meta_attention_form,
    meta_tokens,
)
from metatokens.model.vocabulary import check_ids
from metatokens.retrofit.context import ForwardContext, Pass, current
from metatokens.retrofit.full_heads import set_attention_by_heads
from metatokens.retrofit.layers import added_parameters, check_table


def add_at_injection_point(point: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of an injection point: add meta-attention to the output, which joins the residual stream."""
    entered = current().block
    if entered is None:
        return output
    block, x, context, cache = entered
    y = output[0] if isinstance(output, tuple) else output
    if context.rotary[0].device != y.device:  # where layers are spread over several devices
        context = send_to_device(context, y.device)
    state = context.rows.gather(y)
    if not block.meta_point_has_residual:
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
    """Forward pre-hook of the decoder: decide what the tokens of this pass see, and hide forgotten text.

    Refuses what would be silently wrong, such as an adapter around the embeddings, a cache of packed sequences, and
    sequences beyond a learned table of positions.
    """
    if len(args) > 1:
        args, kwargs = (), bind_inputs(decoder, args, kwargs)
    kwargs = with_cache_renamed(kwargs)
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    is_meta = _meta_tokens(decoder, input_ids, kwargs)
    if is_meta is None:
        return None  # the base raises an error for it
    _check_depth(decoder)
    if not (torch.compiler.is_compiling() or decoder.meta_has_trained):
        _look_at_first_step(decoder, is_meta, input_ids)
    # The attention function may have been changed since the last pass.
    has_full_heads = bool(full_heads_by_block(decoder.meta_config))
    set_attention_by_heads(decoder.config, has_full_heads=has_full_heads)
    cache = _cache_with_room(decoder, kwargs)
    makes_cache = _makes_cache(decoder, kwargs)
    form = meta_attention_form(cache, engine_of(kwargs), gathers_in_graph=makes_cache)
    see = _visibility if form == "dense" else _visibility_outside_graph
    visibility = see(decoder, is_meta, kwargs, cache, form)
    forward_pass: Any = current().forward_pass
    forward_pass.context = _context(decoder, visibility)
    return args, kwargs | _for_base_and_blocks(decoder, visibility, forward_pass, kwargs)


def _cache_with_room(decoder: Any, kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the inputs, if there is one; a cache of a fixed size gets layers for meta-attention."""
    cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    if cache is not None and decoder.meta_settings.layers:
        add_second_layers(cache, decoder.meta_cache_layers)
    return cache


def _for_base_and_blocks(
    decoder: Any, visibility: Visibility, forward_pass: Pass, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Put what the blocks need into the pass, and return the inputs that replace those of the base."""
    if visibility.sequences is not None:  # then nothing forgets text
        if decoder.config._attn_implementation in ("sdpa", "eager", "flex_attention"):
            # The first block checks by its mask that the base keeps them apart.
            forward_pass.sequences = visibility.sequences
        # The base would make a cache, and transformers does not keep packed sequences apart where there is one.
        return {"use_cache": False}
    rule = visibility.rule
    if rule is None:
        return {}
    mask = rule.mask(decoder.config, decoder.dtype)
    if rule.full is not None:
        forward_pass.masks = mask, rule.full.mask(decoder.config, decoder.dtype)
    inputs = {"attention_mask": mask, CACHE: visibility.cache}
    # Multimodal models have several axes of positions, which stay.
    if kwargs.get("position_ids") is None:
        inputs["position_ids"] = visibility.positions
    return inputs


def _visibility(
    decoder: Any,
    is_meta: Tensor,
    kwargs: dict[str, Any],
    cache: Cache | None,
    form: MetaAttentionForm,
) -> Visibility:
    """What the tokens of this pass see, by the inputs that the decoder was given."""
    engine = engine_of(kwargs)
    position_ids = _positions_of_rows(is_meta, kwargs.get("position_ids"))
    attention_mask = kwargs.get("attention_mask")
    sequences = None
    if not engine:
        lengths = kwargs.get("cu_seq_lens_q")
        # Where the base has a cache, transformers does not look for sequences.
        at_jumps = cache is None and not _makes_cache(decoder, kwargs)
        sequences = packed_sequences(
            attention_mask, position_ids, cache, lengths, at_jumps=at_jumps
        )
    kinds_of_blocks = getattr(decoder.config, "layer_types", None) or ()
    if sequences is not None and "linear_attention" in kinds_of_blocks:
        raise UserError("this base has blocks with a state; give each packed sequence its own row.")
    forgets = decoder.meta_config.text_window is not None
    if forgets and cache is None and not decoder.training and _makes_cache(decoder, kwargs):
        cache = DynamicCache(config=decoder.config)
    return Visibility.of(
        decoder.meta_config,
        is_meta,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cache=cache,
        sequences=sequences,
        engine=engine,
        form=form,
        rotates_by_place=True,  # as most bases count all tokens
        minimum_rows=minimum_rows(decoder),
        needs_weights=kwargs.get("output_attentions", decoder.config.output_attentions),
    )


@torch.compiler.disable(reason=BREAKS_GRAPH)  # the number of meta-tokens is data-dependent
def _visibility_outside_graph(*inputs: Any) -> Visibility:
    """`_visibility`, outside a compiled graph: the gathered form needs the number of meta-tokens."""
    check_graph()
    return _visibility(*inputs)


def _context(decoder: Any, visibility: Visibility) -> ForwardContext | None:
    """What meta-attention needs in this pass; None if there are no meta-tokens, or no meta-attention."""
    settings, rows = decoder.meta_settings, visibility.rows
    if rows is None or not settings.layers:
        return None
    cos, sin = rotary_tables(visibility.rotary_positions, settings.head_size, settings.rope_theta)
    rotary = rows.gather(cos), rows.gather(sin)
    if not visibility.engine:
        mask = visibility.meta_mask_of_retrofit(decoder.config)
        return ForwardContext(rows, rotary, mask, attend=None, engine={})
    mask, attend = visibility.attention_mask, None
    if isinstance(mask, dict):
        mask = mask["full_attention"]
    if mask is None:  # flash attention's kernels hide by lengths
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(decoder.config._attn_implementation, None)
    return ForwardContext(rows, rotary, mask, attend, visibility.engine)


def _check_depth(decoder: Any) -> None:
    """Refuse a model whose blocks are others than those that got meta-attention."""
    if getattr(decoder.config, "num_hidden_layers", None) != decoder.meta_depth:
        raise UserError(
            "this model's blocks are others than those that got meta-attention, as with PEFT's layer_replication: "
            "change the base's blocks before add_meta_attention."
        )


def _makes_cache(decoder: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the base makes a cache if it is given none."""
    use_cache = kwargs.get("use_cache")
    return getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache


def bind_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All inputs of a model's forward by their names; a TypeError if one is given twice, or there are too many."""
    return dict(**signature(model.forward).bind_partial(*args).arguments, **kwargs)


def _meta_tokens(decoder: Any, input_ids: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """Where the meta-tokens are, (batch, length) bool; None without any input.

    A `meta_token_mask` among the named inputs, which is taken out of them, decides; without one, `input_ids` do, or
    `inputs_embeds` that equal the meta-token's.
    """
    embeddings = kwargs.get("inputs_embeds")
    meta_token_mask = kwargs.pop("meta_token_mask", None)
    table = decoder.get_input_embeddings()
    check_table(table)
    if meta_token_mask is None and input_ids is None and embeddings is None:
        return None
    return meta_tokens(table, table.meta_token_id, input_ids, embeddings, meta_token_mask)


def _positions_of_rows(is_meta: Tensor, position_ids: Any) -> Tensor | None:
    """The positions that a pass was given, (batch or 1, length); None for the three axes of multimodal models.

    A model with four axes has the positions of a row in the first.
    """
    if not isinstance(position_ids, Tensor):
        return None
    if position_ids.ndim == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]
    is_of_rows = position_ids.ndim == 2 and position_ids.shape[1] == is_meta.shape[1]
    return position_ids if is_of_rows else None


@torch.compiler.disable
def _look_at_first_step(decoder: Any, is_meta: Tensor, input_ids: Tensor | None) -> None:
    """Warn, in the first training step, if nothing that was added is trained, or the batch has no meta-token.

    Refuses ids of unused rows.
    """
    if not decoder.training or not torch.is_grad_enabled():
        return
    if input_ids is not None:
        check_ids(input_ids, decoder.meta_config.unpadded_vocab_size)
    decoder.meta_has_trained = True
    trained = {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    if not trained:
        return
    added = added_parameters(decoder).keys()
    has_meta, has_modules = bool(is_meta.any()), bool(decoder.meta_settings.layers)
    # Without modules, whoever trains the base for a text window needs no meta-token.
    needs_meta = has_modules or trained <= added
    if trained.isdisjoint(added) and (has_meta or has_modules):
        warnings.warn(
            "nothing of what add_meta_attention added is trained. For PEFT, put into LoraConfig: exclude_modules="
            '".*meta_attention.*", modules_to_save=["meta_attention", "meta_token"].',
            stacklevel=2,
        )
    elif needs_meta and not has_meta:
        warnings.warn(
            "no meta-token is in this batch, so nothing that add_meta_attention added learns from it. "
            "MetaTokenCollator inserts them. freeze=False or adapters train the base itself.",
            stacklevel=2,
        )
