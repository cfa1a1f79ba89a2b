"""Retrofitted models that forget text, and the same models under masks that are written pair by pair."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens import add_meta_attention, set_text_window
from metatokens.decoder import decoder_of
from tests.model import generating
from tests.model.text_window import FULL, SINKS, WINDOW, seen_by_layers
from tests.model.tiny_models import META
from tests.retrofit.architectures import base, train_like

NAMES = (
    "cohere", "deepseek_v3", "falcon", "gemma", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama", "mixtral",
    "olmo2", "opt", "phi", "qwen3", "smollm3", "stablelm", "xglm",
)  # fmt: skip
FEW = ("gpt2", "gpt_neox", "llama", "mixtral", "opt")
EOS = 2
BLOCKS = pytest.mark.parametrize("full", [(), tuple(FULL)], ids=["text_window", "text_full_layers"])


def model_of(name: str, full: Sequence[int] | None = FULL, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A retrofitted model whose meta-attention has an effect, and whose blocks `full` keep all text; None: all do."""
    plain = base(name).to(dtype)
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16, freeze=False))
    if full is not None:
        set_text_window(model, WINDOW, SINKS, full)
    return model


shared = functools.cache(model_of)


def masked(model: PreTrainedModel, masks: Sequence[Tensor], **inputs: Any) -> Any:
    """The output of a model that sees everything, whose block i gets `masks[i]`, (batch, 1, T, T) bool."""
    handles, dtype = [], model.dtype
    for block, mask in zip(decoder_of(model)[1], masks, strict=True):
        own = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

        def change(block: Any, args: tuple, kwargs: dict[str, Any], own: Tensor = own) -> Any:
            is_mask = lambda one: isinstance(one, Tensor) and one.shape[-2:] == own.shape[-2:] and one.ndim == 4  # noqa: E731
            changed = {name: own if is_mask(one) else one for name, one in kwargs.items()}
            return tuple(own if is_mask(one) else one for one in args), changed

        handles.append(block.register_forward_pre_hook(change, with_kwargs=True))
    try:
        length = masks[0].shape[-1]
        given = torch.zeros(len(masks[0]), 1, length, length, dtype=dtype)
        given = given.masked_fill(~torch.ones(length, length).tril().bool(), torch.finfo(dtype).min)
        positions = torch.arange(length).expand(len(masks[0]), -1)
        return model(attention_mask=given, position_ids=positions, use_cache=False, **inputs)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def dense(name: str, row: Sequence[int], full: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits (length, vocabulary) under masks by the rule."""
    model = shared(name, None, dtype)
    masks = seen_by_layers(row, len(decoder_of(model)[1]), full)
    return masked(model, masks[:, None, None], input_ids=torch.tensor([row])).logits[0]


def generate(model: PreTrainedModel, rows: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The new ids for left-padded rows, which do not end early."""
    return generating.generate(model, rows, suppress_tokens=[EOS], **options).tolist()
