"""Setting a text window: a model then forgets text that is neither near, nor a meta-token, nor at the start."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from metatokens.decoder import decoder_of, own_blocks
from metatokens.errors import UserError, one_line
from metatokens.model.configuration import UNSAVED, MetaGPT2Config
from metatokens.model.releases import CACHE
from metatokens.model.wrappers import takes_wrapped
from metatokens.retrofit.classes import MetaConfig
from metatokens.retrofit.injection_points import probe_ids
from metatokens.retrofit.layers import set_full_layers
from metatokens.retrofit.settings import MetaSettings

_READS = "a {} cannot have a text_window: it must take masks of four dimensions, and a cache that drops entries"


@takes_wrapped
def set_text_window(
    model: PreTrainedModel,
    window: int | None,
    sinks: int | None = None,
    full_layers: Sequence[int] | None = None,
) -> None:
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
            None: the same as before, which is none at first.

    Raises:
        UserError: if a number is too small, or the model has no meta-token or masks of its own, such as a sliding
            window, or does not have such blocks. The model is then unchanged.
    """
    before = text_window_of(model.config)
    apply_text_window(model, window, sinks, full_layers)
    if text_window_of(model.config) != before and model.config.name_or_path:
        base: Any = getattr(model, "get_base_model", lambda: model)()
        base.saved_as = base.name_or_path = base.config.name_or_path = UNSAVED
        for adapter in getattr(model, "peft_config", {}).values():
            adapter.base_model_name_or_path = UNSAVED


def text_window_of(config: Any) -> dict[str, Any]:
    """The arguments of `set_text_window` that a model was given; none if it cannot have a window."""
    names = {"window": "text_window", "sinks": "text_sinks", "full_layers": "text_full_layers"}
    return {name: getattr(config, field) for name, field in names.items() if hasattr(config, field)}


def apply_text_window(
    model: PreTrainedModel,
    window: int | None,
    sinks: int | None = None,
    full_layers: Sequence[int] | None = None,
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
    sinks = config.text_sinks if sinks is None else sinks
    full_layers = config.text_full_layers if full_layers is None else full_layers
    full = None if window is None else list(full_layers or ()) or None
    fields = {"text_window": window, "text_sinks": sinks, "text_full_layers": full}
    if isinstance(config, MetaConfig):
        settings = MetaSettings.checked(**config.meta_attention | fields)
        _, blocks = decoder_of(model)
        settings.check_blocks(own_blocks(config))
        if window is not None:
            _check(model)
        set_full_layers(blocks, full or ())
        config.meta_attention = settings.model_dump()
    else:
        try:
            type(config).from_dict(config.to_dict() | fields)  # refuses what does not fit
        except StrictDataclassError as error:
            raise UserError(
                f"the model cannot have this text window: {one_line(error)}."
            ) from error
        config.text_window, config.text_sinks, config.text_full_layers = window, sinks, full


@contextmanager
def _with_fields(config: Any, **fields: Any) -> Iterator[None]:
    """Have a retrofitted model's configuration hold these fields of `meta_attention`."""
    before = config.meta_attention
    config.meta_attention = before | fields
    try:
        yield
    finally:
        config.meta_attention = before


@torch.no_grad()
def _check(model: PreTrainedModel) -> None:
    """Refuse a base that does not forget by masks, or whose attention depends on the places of cached keys.

    With a window of 1, text that is no sink changes nothing after it, whether a mask hides it or a cache drops it. So
    the pass over a text and the steps over the same text with another token at place 8 must give the same from 12 on.
    """
    (decoder, _), config = decoder_of(model), model.config
    layers = DynamicCache(config=decoder.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers) or hasattr(
        decoder.config, "attention_types"
    ):
        raise UserError(
            "this base cannot have a text_window: some of its blocks have a sliding window of their own, or a state "
            "instead of a cache."
        )
    with (
        _with_fields(config, text_window=1, text_sinks=1, text_full_layers=None),
        probe_ids(model, _READS, 24) as ids,
    ):
        ids = torch.cat([ids, pad(ids[:, :19], (5, 0))])  # the second row is padded
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        ids[:, 10] = config.meta_token_id
        other = ids.clone()
        other[:, 8] += 1
        whole = decoder(other, attention_mask=mask, use_cache=False)[0]
        cache, in_steps = None, []
        for start, end in pairwise([0, *range(20, 25)]):
            inputs = {"attention_mask": mask[:, :end], CACHE: cache}
            out = decoder(ids[:, start:end], use_cache=True, **inputs)
            cache = out[CACHE]
            in_steps.append(out[0])
        of_steps = torch.cat(in_steps, dim=1)[:, 12:]
        expected = whole[:, 12:]
        # Bases in float64 compute a part in float32.
        eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
        if (of_steps - expected).norm() > eps**0.5 * expected.norm():
            raise ValueError("text that is forgotten changes what it predicts")
