"""Setting a text window: a model then forgets text that is neither near, nor a meta-token, nor at the start."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from metatokens.decoder import decoder_of, own_blocks
from metatokens.errors import UserError, one_line
from metatokens.model.configuration import UNSAVED, MetaGPT2Config
from metatokens.model.forgetting_cache import full_heads_by_block
from metatokens.model.releases import CACHE
from metatokens.model.wrappers import takes_wrapped
from metatokens.retrofit.classes import MetaConfig
from metatokens.retrofit.full_heads import set_attention_by_heads
from metatokens.retrofit.injection_points import probe_ids
from metatokens.retrofit.layers import set_full
from metatokens.retrofit.settings import MetaSettings

# A probe's text: places of tokens. The tokens before _STEPS are read at once, the others one by one.
_PADDING, _FORGOTTEN, _META, _COMPARED, _STEPS, _LENGTH = 5, 8, 10, 12, 20, 24
# Fields of `meta_attention` in probes.
_FORGETS = {"text_window": 1, "text_sinks": 1}
_NOTHING_FULL = {"text_full_layers": None, "text_full_heads": None}
_HEADS = "the heads of a {} cannot be told apart by what its cache holds"
_READS = "a {} cannot have a text_window: it must take masks of four dimensions, and a cache that drops entries"


@takes_wrapped
def set_text_window(
    model: PreTrainedModel,
    window: int | None,
    sinks: int | None = None,
    full_layers: Sequence[int] | None = None,
    full_heads: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Make a model forget text from now on, in training, evaluation and generation.

    A query then sees all earlier meta-tokens, the first positions, and a window, and a cache that grows holds little
    else. Train the model with the window: before that, its meta-tokens hold nothing.

    A folder that the model came from has no such window. So the model loses its name, by which PEFT and TRL would load
    that folder, until it is saved.

    Args:
        model: a `MetaGPT2ForCausalLM` or a retrofitted model.
        window: how many of the last positions a query sees, itself included; None: everything.
        sinks: all queries see the positions below this number, by `position_ids` if they are given; None: as many as
            before, which is 4 at first.
        full_layers: the blocks, counted from 0, that keep all text and see it. Models look things up in few blocks.
        full_heads: the key-value heads of a retrofitted model that do the same: pairs of a block and a head, counted
            from 0. They need `sdpa`. A block all of whose heads are full becomes one of the full layers. If neither
            blocks nor heads are given, they are the same as before; without a window there are none.

    Returns:
        The arguments that were set before. `before = set_text_window(model, None)` gives the full cache, and
        `set_text_window(model, **before)` the window again.

    Raises:
        UserError: if a number is too small; if the model has no meta-token, or has masks of its own, such as a sliding
            window; or if it has no such blocks or heads. The model is then unchanged.
    """
    before = text_window_of(model.config)
    apply_text_window(model, window, sinks, full_layers, full_heads)
    if text_window_of(model.config) != before and model.config.name_or_path:
        base: Any = getattr(model, "get_base_model", lambda: model)()
        base.saved_as = base.name_or_path = base.config.name_or_path = UNSAVED
        for adapter in getattr(model, "peft_config", {}).values():
            adapter.base_model_name_or_path = UNSAVED
    # None would leave them as they are, and a list that is empty means that there were none.
    for name in before.keys() & {"full_layers", "full_heads"}:
        before[name] = before[name] or []
    return before


def text_window_of(config: Any) -> dict[str, Any]:
    """The arguments of `set_text_window` that a model was given; none if it cannot have a window."""
    return {
        name: getattr(config, f"text_{name}")
        for name in ("window", "sinks", "full_layers", "full_heads")
        if hasattr(config, f"text_{name}")
    }


def apply_text_window(
    model: PreTrainedModel,
    window: int | None,
    sinks: int | None = None,
    full_layers: Sequence[int] | None = None,
    full_heads: Sequence[Sequence[int]] | None = None,
) -> None:
    """Do as `set_text_window` does, but keep the model's name: its folder has the window, or will have it.

    Raises:
        UserError: as `set_text_window`.
    """
    config = model.config
    if not isinstance(config, MetaConfig | MetaGPT2Config):
        raise UserError(
            "a text_window needs meta-tokens, and this model has none: call add_meta_attention first."
        )
    if full_layers is None and full_heads is None:
        full_layers = config.text_full_layers
        full_heads = getattr(config, "text_full_heads", None)
    if window is None:
        full_layers = full_heads = None
    try:
        layers = [] if full_layers is None else list(full_layers)
        pairs = [] if full_heads is None else sorted([*pair] for pair in full_heads)
    except TypeError as error:
        raise UserError(
            "full_layers are a list of blocks, such as [18], and full_heads one of pairs of a block and a head, such "
            "as [(18, 2)]."
        ) from error
    fields: dict[str, Any] = {
        "text_window": window,
        "text_sinks": config.text_sinks if sinks is None else sinks,
        "text_full_layers": layers or None,
    }
    if isinstance(config, MetaConfig):
        fields["text_full_heads"] = pairs or None
        _apply_to_retrofit(model, fields)
    elif pairs:
        raise UserError("full_heads are for pretrained models; give full_layers to this one.")
    else:
        _apply_to_meta_gpt2(config, fields)


def _apply_to_meta_gpt2(config: MetaGPT2Config, fields: dict[str, Any]) -> None:
    """Set the fields of the window in the configuration of a `MetaGPT2`, which may be wrong."""
    try:
        type(config).from_dict(config.to_dict() | fields)  # refuses what does not fit
    except StrictDataclassError as error:
        raise UserError(f"the model cannot have this text window: {one_line(error)}.") from error
    config.update(fields)


def _apply_to_retrofit(model: PreTrainedModel, fields: dict[str, Any]) -> None:
    """Set the fields of a retrofitted model's window, which may be wrong."""
    config: Any = model.config
    before = config.meta_attention
    settings = MetaSettings.checked(**before | fields)
    settings.check_blocks(own_blocks(config))
    if settings.text_window is not None:
        _check(model)
    if settings.text_full_heads is not None:
        settings = settings.model_copy(update=_blocks_and_heads(model, settings))
    try:
        _set_fields(model, settings.model_dump())
        if settings.text_full_heads is not None:
            _check_heads(model)
    except UserError:
        _set_fields(model, before)
        raise


def _blocks_and_heads(model: PreTrainedModel, settings: MetaSettings) -> dict[str, Any]:
    """The fields of full blocks, among them those all of whose heads are full, and of full heads in other blocks."""
    counts = key_value_heads(model)
    full_heads = settings.text_full_heads or []
    full_layers = set(settings.text_full_layers or ())
    for block, head in full_heads:
        if head >= counts[block]:
            raise UserError(
                f"text_full_heads has head {head} of block {block}, which has {counts[block]} key-value heads."
            )
    of_block = Counter(block for block, _ in full_heads)
    full_layers |= {block for block, count in of_block.items() if count == counts[block]}
    rest = [pair for pair in full_heads if pair[0] not in full_layers]
    return {"text_full_layers": sorted(full_layers) or None, "text_full_heads": rest or None}


def _set_fields(model: PreTrainedModel, fields: dict[str, Any]) -> None:
    """Have a retrofitted model's configuration and its blocks hold these fields of `meta_attention`."""
    config: Any = model.config
    config.meta_attention = fields
    decoder, blocks = decoder_of(model)
    full_heads = full_heads_by_block(config)
    set_full(blocks, config.text_full_layers or (), full_heads)
    set_attention_by_heads(decoder.config, has_full_heads=bool(full_heads))


@torch.no_grad()
def _check(model: PreTrainedModel) -> None:
    """Refuse a base that does not forget by masks, or whose attention depends on the places of cached keys.

    With a window of 1, text that is no sink changes nothing after it, whether a mask hides it or a cache drops it. So
    the pass over a text and the steps over the same text with another token, at a place before, must give the same.
    """
    decoder, _ = decoder_of(model)
    config = model.config
    layers = DynamicCache(config=decoder.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers) or hasattr(
        decoder.config, "attention_types"
    ):
        raise UserError(
            "this base cannot have a text_window: some of its blocks have a sliding window of their own, or a state "
            "instead of a cache."
        )
    with (
        patch.dict(config.meta_attention, _FORGETS | _NOTHING_FULL),
        probe_ids(model, _READS, _LENGTH) as ids,
    ):
        meta = config.meta_token_id
        ids, mask = _two_rows(ids + (ids >= meta))  # text alone
        ids[:, _META] = meta
        other = ids.clone()
        other[:, _FORGOTTEN] = ids[:, _FORGOTTEN + 1]
        if not _read_alike(model, other, ids, mask):
            raise ValueError("text that is forgotten changes what it predicts")


@torch.no_grad()
def _check_heads(model: PreTrainedModel) -> None:
    """Refuse a base that mixes key-value heads: the pass over a text and the steps over it must give the same."""
    with (
        patch.dict(model.config.meta_attention, _FORGETS),
        probe_ids(model, _HEADS, _LENGTH) as ids,
    ):
        ids, mask = _two_rows(ids)
        if not _read_alike(model, ids, ids, mask):
            raise ValueError("a cache of full heads changes what it predicts")


def _two_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids, (1, length), and the same with padding before them, (2, length), with their mask."""
    ids = torch.cat([ids, pad(ids[:, :-_PADDING], (_PADDING, 0))])
    mask = torch.ones_like(ids)
    mask[1, :_PADDING] = 0
    return ids, mask


def _read_alike(model: PreTrainedModel, whole: Tensor, ids: Tensor, mask: Tensor) -> bool:
    """Whether a pass over `whole` gives the same from _COMPARED on as steps over `ids`, (rows, _LENGTH) each.

    In half precision, rounding may change what a base predicts for a token or two. So a row's median decides.
    """
    decoder, _ = decoder_of(model)
    expected = decoder(whole, attention_mask=mask, use_cache=False)[0]
    cache, in_steps = None, []
    for start, end in pairwise([0, *range(_STEPS, _LENGTH + 1)]):
        inputs = {"attention_mask": mask[:, :end], CACHE: cache}
        out = decoder(ids[:, start:end], use_cache=True, **inputs)
        cache = out[CACHE]
        in_steps.append(out[0])
    errors = (torch.cat(in_steps, dim=1) - expected).norm(dim=2) / expected.norm(dim=2)
    # Bases in float64 compute a part in float32.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    at_once = errors[:, _COMPARED:_STEPS].median(dim=1).values
    by_steps = errors[:, _STEPS:].median(dim=1).values
    return bool(torch.stack([at_once, by_steps]).max() <= eps**0.5)


@torch.no_grad()
def key_value_heads(model: PreTrainedModel) -> list[int]:
    """How many key-value heads each block of a retrofitted model has."""
    decoder, _ = decoder_of(model)
    with (
        patch.dict(model.config.meta_attention, _NOTHING_FULL, text_window=None),
        probe_ids(model, _HEADS, 1) as ids,
    ):
        cache = decoder(ids, use_cache=True)[CACHE]
        return [layer.keys.shape[1] for layer in cache.layers[: own_blocks(model.config)]]
