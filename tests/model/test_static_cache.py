"""Caches of a fixed size, of both callers, against caches that grow and whole passes."""

from typing import Any

import pytest
import torch
from transformers import StaticCache

from metatokens.errors import UserError
from tests.model.agreement import assert_close
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import LENGTH, META, logits, with_meta_tokens, with_padding
from tests.retrofit.callers import SETTINGS, rounded, shared_model_of

RETROFITS = ("llama", "gpt_neox", "gemma3_text", "mistral", "qwen3")


@pytest.mark.quick(
    caller=["learned-meta", "rope-causal", "log_length-none-meta", "llama", "gemma3_text"]
)
@pytest.mark.parametrize(
    "options",
    [{"do_sample": False, "meta_every": 3}, {"do_sample": True}, {"num_beams": 3, "meta_every": 1}],
    ids=str,
)
@pytest.mark.parametrize("caller", [*SETTINGS, *RETROFITS])
def test_generation_is_that_of_a_cache_that_grows(caller: str, options: dict[str, Any]) -> None:
    model, (ids, mask) = shared_model_of(caller), with_padding(with_meta_tokens())
    options = {"attention_mask": mask, "max_new_tokens": 9, "disable_compile": True} | options
    outputs = []
    for kind in ("static", "dynamic"):
        torch.manual_seed(0)
        outputs.append(model.generate(ids, cache_implementation=kind, **options))

    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "caller", ["rope-meta", "rope-causal", "rope-none", "llama", "gemma3_text"]
)
@torch.no_grad()
def test_a_cache_that_the_user_makes(caller: str) -> None:
    model, ids = shared_model_of(caller), with_meta_tokens()
    cache = StaticCache(model.config, max_cache_len=LENGTH + 4)
    expected = logits(model, ids)
    for _ in range(2):
        pieces = [
            model(part, past_key_values=cache).logits for part in ids.split((9, 1, 1, 5, 8), dim=1)
        ]
        assert_close(torch.cat(pieces, dim=1)[..., :META], expected, rounded(model))
        cache.reset()


def test_a_cache_that_was_reset_begins_anew() -> None:
    model, ids = shared_model_of("rope-meta"), with_meta_tokens()
    cache = StaticCache(model.config, max_cache_len=LENGTH + 9)
    options = {"max_new_tokens": 4, "do_sample": False, "past_key_values": cache}
    generated = []
    for _ in range(2):
        generated.append(model.generate(ids, meta_every=2, **options))
        cache.reset()

    assert torch.equal(*generated)


def test_positions_beyond_a_learned_table_are_refused() -> None:
    model = tiny_model(position_embedding="learned", max_position_embeddings=6)
    cache = StaticCache(model.config, max_cache_len=9)
    model(torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=cache)

    with pytest.raises(UserError, match="6 learned positions"):
        model(torch.tensor([[6, 7]]), past_key_values=cache)
