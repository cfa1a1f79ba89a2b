"""Tiny random models and ragged batches that the model's tests share."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM

META = 63  # the meta-token of every tiny model; the ids below are text
Fields = dict[str, Any]  # of a configuration
SECOND_ATTENTIONS = ("meta", "causal", "none")
SECOND = pytest.mark.parametrize("second_attention", SECOND_ATTENTIONS)


def parametrize(cases: Sequence[Fields]) -> pytest.MarkDecorator:
    """Run a test with each of the configurations, as its argument `fields`."""
    return pytest.mark.parametrize(
        "fields", cases, ids=lambda fields: "-".join(map(str, fields.values()))
    )


FAMILY: list[Fields] = [
    {"position_embedding": positions, "second_attention": second}
    for positions, second in product(("learned", "rope", "none"), SECOND_ATTENTIONS)
]
OPTIONS: list[Fields] = [
    {"attention_scale": "log_length", "position_embedding": "none"},
    {"rope_layers": [1], "num_hidden_layers": 3},
    {"rope_layers": [0, 2], "num_hidden_layers": 3},
]
VARIANT_FIELDS: list[Fields] = FAMILY + [
    option | {"second_attention": second} for option, second in product(OPTIONS, SECOND_ATTENTIONS)
]
# All positions, second attentions and options once.
FEW_VARIANTS = [VARIANT_FIELDS[number] for number in (0, 4, 8, 9, 13)]
FAMILIES = parametrize(FAMILY)
VARIANTS = parametrize(VARIANT_FIELDS)


def tiny_config(**overrides: Any) -> MetaGPT2Config:
    """A configuration of two narrow layers, with biases, so that these are tested too."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
    }
    tokens = {"vocab_size": 64, "meta_token_id": META, "bos_token_id": None, "eos_token_id": None}
    return MetaGPT2Config(**({"bias": True} | sizes | tokens | overrides))


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw all parameters from a wide range: attention is far from uniform, and no bias or scale is trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                parameter += 1.0


def tiny_model(
    *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> MetaGPT2ForCausalLM:
    """A random model in evaluation mode, by default in float64, so that tolerances can be tight."""
    model = MetaGPT2ForCausalLM(tiny_config(**overrides)).to(dtype).eval()
    randomize(model, seed)
    return model


def random_rows(
    lengths: Sequence[int], *, seed: int = 0, meta_rate: float = 0.3
) -> list[list[int]]:
    """Sequences of text ids and, at the given rate, meta-tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        text = torch.randint(0, META, (length,), generator=generator)
        is_meta = torch.rand(length, generator=generator) < meta_rate
        rows.append(text.masked_fill(is_meta, META).tolist())
    return rows


def pad(rows: Sequence[Sequence[int]], side: str = "left") -> tuple[Tensor, Tensor]:
    """A batch (rows, longest) and its attention mask; padded with meta-tokens, which must not count as such."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), META)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        columns = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[number, columns] = torch.tensor(row)
        mask[number, columns] = 1
    return ids, mask


def shared_model(**overrides: Any) -> MetaGPT2ForCausalLM:
    """A `tiny_model` made once, for tests that run it many times and do not change it."""
    return _shared_model(json.dumps(overrides, sort_keys=True))


@cache
def _shared_model(overrides: str) -> MetaGPT2ForCausalLM:
    return tiny_model(**json.loads(overrides))
