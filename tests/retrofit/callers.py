"""Models of both callers with equal vocabularies: `MetaGPT2` by the name of its settings, and retrofits by theirs."""

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.model.tiny_models import VARIANT_FIELDS, tiny_model
from tests.numbers import ROUNDED_DOUBLE
from tests.retrofit.architectures import META, ROUNDED, ROWS, retrofitted

SETTINGS = {"-".join(map(str, fields.values())): fields for fields in VARIANT_FIELDS}


def model_of(caller: str, *, dtype: torch.dtype | None = None, **fields: Any) -> PreTrainedModel:
    """A model to change; `MetaGPT2` in float64 unless another type is asked for, with further fields."""
    if caller not in SETTINGS:
        return retrofitted(caller, dtype=dtype or torch.float32, **fields)
    settings = {"max_position_embeddings": 64} | SETTINGS[caller] | fields
    return tiny_model(vocab_size=ROWS, meta_token_id=META, dtype=dtype or torch.float64, **settings)


shared_model_of = cache(model_of)  # for tests that do not change it


def rounded(model: PreTrainedModel) -> float:
    """How far logits that were computed in two ways may be apart."""
    return ROUNDED_DOUBLE if model.dtype == torch.float64 else ROUNDED
