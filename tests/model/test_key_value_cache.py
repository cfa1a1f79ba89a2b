"""The cache: steps of any size give the logits of one pass, and rows and ends can be moved, copied and cut off."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.errors import UserError
from tests.model.in_pieces import assert_continues, in_steps
from tests.model.tiny_models import FAMILY, META, SECOND, VARIANTS, Fields, pad, random_rows, shared_model
from tests.numbers import ROUNDED_DOUBLE

ROWS = [*random_rows((13, 9, 6)), random_rows((11,), seed=3, meta_rate=0.0)[0]]
TOLERANCE = ROUNDED_DOUBLE


def filled(model: MetaGPT2ForCausalLM, rows: list[list[int]]) -> tuple[Tensor, Tensor, MetaTokenCache]:
    ids, mask = pad(rows)
    _, cache = in_steps(model, ids, mask, [ids.shape[1] // 2])
    return ids, mask, cache


@pytest.mark.quick(fields=FAMILY)
@VARIANTS
@given(cuts=st.sets(st.integers(1, 12)))
def test_steps_of_any_size_give_the_logits_of_one_pass(fields: Fields, cuts: set[int]) -> None:
    model = shared_model(**fields)
    ids, mask = pad(ROWS)
    expected = model(ids, attention_mask=mask).logits
    actual, _ = in_steps(model, ids, mask, sorted(cuts), MetaTokenCache(model.config))
    assert (actual - expected)[mask.bool()].abs().max() < TOLERANCE
    without_mask, _ = in_steps(model, ids[:1], None, sorted(cuts), MetaTokenCache(model.config))  # a whole row
    assert (without_mask - expected[:1]).abs().max() < TOLERANCE


@VARIANTS
def test_a_mask_may_have_columns_for_tokens_to_come(fields: Fields) -> None:
    model, (ids, mask) = shared_model(**fields), pad(ROWS)
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    mask = torch.nn.functional.pad(mask, (0, 7), value=1)
    whole, cache = model(ids, attention_mask=mask, use_cache=False).logits, MetaTokenCache(model.config)
    pieces = [model(piece, attention_mask=mask, past_key_values=cache).logits for piece in ids.split(3, dim=1)]
    for logits in (whole, torch.cat(pieces, dim=1)):
        assert (logits - wanted)[mask[:, :-7].bool()].abs().max() < TOLERANCE


def test_a_mask_without_the_cached_columns_is_refused() -> None:
    model, (ids, mask) = shared_model(), pad(ROWS)
    cache = model(ids, attention_mask=mask).past_key_values
    with pytest.raises(UserError, match="a column for each cached token"):
        model(ids[:, :2], attention_mask=mask[:, :2], past_key_values=cache)


def test_a_step_over_text_does_not_touch_the_second_store() -> None:
    model = shared_model()
    cache = MetaTokenCache(model.config)
    for token in ROWS[0]:
        before = cache.layers[0].second
        model(torch.tensor([[token]]), past_key_values=cache)
        assert (cache.layers[0].second is before) == (token != META)


def test_second_store_of_a_ragged_batch_is_as_long_as_its_longest_row() -> None:
    ids, mask, cache = filled(shared_model(), ROWS)
    real = (ids == META) & mask.bool()
    halves = real.split([6, 7], dim=1)
    for layer in cache.layers:
        entries = sum(int(half.sum(dim=1).max()) for half in halves)
        assert layer.second.keys.shape == layer.second.values.shape == (4, 4, entries, 8)
        for slots, row in zip(layer.second.slots, real, strict=True):
            assert slots[slots >= 0].tolist() == row.nonzero().squeeze(1).tolist()


def test_second_store_of_the_controls() -> None:
    for second_attention, layers in (("causal", 4), ("none", 2)):
        ids, _, cache = filled(shared_model(second_attention=second_attention), ROWS)
        assert [layer.keys.shape for layer in cache.layers] == [(4, 4, ids.shape[1], 8)] * layers
        assert all(layer.second is None for layer in cache.layers)


@SECOND
@given(removed=st.integers(0, 13))
def test_crop_forgets_the_end(second_attention: str, removed: int) -> None:
    model = shared_model(second_attention=second_attention)
    ids, mask, cache = filled(model, ROWS)
    cache.crop(-removed)
    kept = ids.shape[1] - removed
    if second_attention == "meta":
        slots = cache.layers[0].second.slots
        assert (slots < kept).all()
        assert (slots >= 0).any(dim=0).all()  # no entry that every row has lost is kept
    assert_continues(model, ids[:, :kept], mask[:, :kept], cache)


@SECOND
def test_rows_can_be_reordered_selected_and_repeated(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention)
    order = torch.tensor([2, 0, 0, 3])
    ids, mask, cache = filled(model, ROWS)
    cache.reorder_cache(order)
    assert_continues(model, ids[order], mask[order], cache)
    ids, mask, cache = filled(model, ROWS)
    cache.batch_select_indices(order[:2])
    assert_continues(model, ids[order[:2]], mask[order[:2]], cache)
    ids, mask, cache = filled(model, ROWS)
    cache.batch_repeat_interleave(3)
    assert_continues(model, ids.repeat_interleave(3, dim=0), mask.repeat_interleave(3, dim=0), cache)


@SECOND
def test_reset_forgets_everything(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention)
    _, _, cache = filled(model, ROWS)
    cache.reset()
    cache.crop(0)
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 0
    assert_continues(model, torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, 0, dtype=torch.long), cache)


def test_a_step_writes_after_the_cached_entries_without_copying_them() -> None:
    model = shared_model()
    ids, mask = pad(random_rows((13, 9)))
    cache = MetaTokenCache(model.config)
    with torch.no_grad():
        in_steps(model, ids, mask, [6, 7], cache)
        layer = cache.layers[0]
        before = layer.keys.data_ptr(), layer.values.data_ptr()
        more = torch.tensor(random_rows([40] * 2, seed=5))
        in_steps(model, more, torch.cat([mask, torch.ones_like(more)], dim=1), list(range(1, 40)), cache)
        assert (layer.keys.data_ptr(), layer.values.data_ptr()) == before
        copy = cache.layers[0].keys.clone()
        in_steps(model, more, torch.ones(2, 93, dtype=torch.long), list(range(1, 40)), cache)  # beyond the room
    assert layer.keys.data_ptr() != before[0]
    assert torch.equal(layer.keys[:, :, : copy.shape[2]], copy)


def test_a_cache_filled_without_gradients_goes_on_with_them_and_the_other_way_round() -> None:
    model = shared_model()
    ids, mask = pad(random_rows((12, 12)))
    expected = model(ids, attention_mask=mask).logits
    for contexts in ((torch.inference_mode, torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad)):
        cache, pieces = MetaTokenCache(model.config), []
        for number, context in enumerate(contexts):
            with context():
                part = ids[:, 4 * number : 4 * number + 4]
                seen = mask[:, : 4 * number + 4]
                pieces.append(model(part, attention_mask=seen, past_key_values=cache).logits.clone())
        done = torch.cat([piece.detach() for piece in pieces], dim=1)
        assert (done - expected[:, : done.shape[1]]).abs().max() < TOLERANCE
