"""The cache of a `MetaGPT2`: steps of any size give the logits of one pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.model.agreement import assert_close
from tests.model.in_pieces import in_steps
from tests.model.tiny_models import (
    FEW_VARIANTS,
    META,
    VARIANTS,
    Fields,
    pad,
    random_rows,
    shared_model,
)
from tests.numbers import ROUNDED_DOUBLE

ROWS = [*random_rows((13, 9, 6)), random_rows((11,), seed=3, meta_rate=0.0)[0]]


@pytest.mark.quick(fields=FEW_VARIANTS)
@VARIANTS
@given(cuts=st.sets(st.integers(1, 12)))
def test_steps_of_any_size_give_the_logits_of_one_pass(fields: Fields, cuts: set[int]) -> None:
    model, (ids, mask) = shared_model(**fields), pad(ROWS)
    expected = model(ids, attention_mask=mask).logits

    logits, _ = in_steps(model, ids, mask, sorted(cuts), DynamicCache())
    # A whole row.
    without_mask, _ = in_steps(model, ids[:1], None, sorted(cuts), DynamicCache())

    assert_close(logits[mask.bool()], expected[mask.bool()], ROUNDED_DOUBLE)
    assert_close(without_mask, expected[:1], ROUNDED_DOUBLE)


@torch.no_grad()
def test_what_was_read_of_a_cache_stays_when_it_is_cropped() -> None:
    model, cache = shared_model(), DynamicCache()
    ids = torch.tensor(random_rows((12,)))
    for part in (ids[:, :6], ids[:, 6:]):
        model(part, past_key_values=cache)
    held = cache.layers[0].keys
    before = held.clone()

    cache.crop(-4)
    model(ids[:, :4], past_key_values=cache)

    assert torch.equal(held, before)


def test_meta_attention_stores_keys_of_meta_tokens_alone() -> None:
    model, (ids, mask) = shared_model(), pad(ROWS)
    _, cache = in_steps(model, ids, mask, [6])
    is_meta = (ids == META) & mask.bool()
    longest = [int(half.sum(dim=1).max()) for half in is_meta.split([6, 7], dim=1)]

    for layer in cache.layers:
        assert layer.second.keys.shape == layer.second.values.shape == (4, 4, sum(longest), 8)


@pytest.mark.parametrize(
    "contexts",
    [(torch.inference_mode, torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad)],
)
def test_a_cache_filled_without_gradients_goes_on_with_them_and_the_other_way_round(
    contexts: tuple,
) -> None:
    model, cache = shared_model(), DynamicCache()
    ids = torch.tensor(random_rows((12, 12)))
    expected = model(ids).logits.detach()
    for number, context in enumerate(contexts):
        part = slice(4 * number, 4 * number + 4)
        with context():
            logits = model(ids[:, part], past_key_values=cache).logits.clone()
        assert_close(logits, expected[:, part], ROUNDED_DOUBLE)


@torch.no_grad()
def test_a_cache_of_another_batch_is_refused() -> None:
    model, cache = shared_model(second_attention="none"), DynamicCache()
    model(torch.tensor(random_rows((9, 9))), past_key_values=cache)
    with pytest.raises(RuntimeError):  # assigning the row would broadcast it
        model(torch.tensor(random_rows((3,))), past_key_values=cache)
