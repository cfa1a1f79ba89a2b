"""Decoders of transformers with meta-attention: nothing changes but at meta-tokens, and all ways to run them agree."""

import pytest
import torch

from metatokens import add_meta_attention
from tests.retrofit.architectures import (
    ARCHITECTURES,
    CHECKS,
    META,
    SOME,
    base,
    error,
    logits,
    retrofitted,
    with_meta_tokens,
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SOME)
def test_an_architecture(name: str, check: str) -> None:
    measure, most = CHECKS[check]
    assert measure(name) <= most


def test_none_was_taken_off_the_list() -> None:
    assert len(ARCHITECTURES) >= 47  # and Mamba, which is refused


@pytest.mark.parametrize("name", SOME)
def test_meta_attention_does_something_at_meta_tokens_and_behind_them(name: str) -> None:
    ids, model = with_meta_tokens(), retrofitted(name)
    start = add_meta_attention(base(name), meta_token_id=META, heads=2, head_size=16)
    if hasattr(model.config, "_experts_implementation"):
        for one in (start, model):  # each token by itself: in groups of other sizes its products may round otherwise
            one.set_experts_implementation("batched_mm")
    before, after = logits(start, ids), logits(model, ids)
    assert torch.equal(before[0, :3], after[0, :3])
    assert error(before[0, 3], after[0, 3]) > 0.01
    # Nothing is seen ahead of time: as many meta-tokens elsewhere, so that products have as many rows, then others.
    elsewhere, others = ids.clone(), ids.clone()
    elsewhere[:, 20:], others[:, 20:] = ids[:, 20:].flip(1), META
    assert not torch.equal(elsewhere == META, ids == META)
    assert torch.equal(logits(model, elsewhere)[:, :20], after[:, :20])
    assert error(logits(model, others)[:, :20], after[:, :20]) < 1e-5
