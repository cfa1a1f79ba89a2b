"""Caches that drop text which no later query sees, for both callers."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from metatokens import set_text_window
from metatokens.errors import UserError
from metatokens.model.releases import SPLITS_LATER_TURNS
from tests.model.agreement import assert_close
from tests.model.dense_oracle import DenseOracle
from tests.model.generating import count_tokens_read, generate
from tests.model.in_pieces import assert_continues, in_steps, sizes_of
from tests.model.text_window import FULL, ROWS, SINKS, SMALL, WINDOW, seen
from tests.model.tiny_models import META, pad, random_rows, shared_model, tiny_model
from tests.numbers import ROUNDED_DOUBLE
from tests.retrofit.forgetful import (
    BOTH_CALLERS,
    expected_logits,
    shared_forgetful,
    tolerance_of,
)

IDS = torch.tensor(ROWS[:1])


def filled(
    model: PreTrainedModel, rows: list[list[int]] = ROWS
) -> tuple[Tensor, Tensor, DynamicCache]:
    """Ids, mask, and a cache that has read them and dropped text; the last four tokens came one by one."""
    ids, mask = pad(rows)
    _, cache = in_steps(model, ids, mask, (20, 40, 41, 42, 43), DynamicCache())
    assert max(sizes_of(cache)) < 44
    return ids, mask, cache


LONG = [
    [META if (position + 1) % every == 0 else token for position, token in enumerate(row)]
    for every, row in zip(
        (8, 20, 300), random_rows((300, 260, 220), seed=9, meta_rate=0), strict=True
    )
]


def test_a_long_prompt_is_read_in_chunks_and_its_cache_stays_small() -> None:
    model = tiny_model(position_embedding="none", text_window=20)
    masks: list[torch.Size] = []
    model.model.layers[0].attention.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["mask"].shape), with_kwargs=True
    )
    cache = DynamicCache()

    generate(model, LONG, past_key_values=cache, max_new_tokens=30, prefill_chunk_size=25)

    # Meta-tokens, sinks, the window, and what piles up before text is dropped.
    largest = 300 // 8 + 4 + 20 + 16
    assert [shape[2] for shape in masks] == [25] * 12 + [1] * 29
    assert max(shape[3] for shape in masks[:12]) <= largest + 25
    assert max(shape[3] for shape in masks[20:]) <= largest + 1
    assert cache.get_seq_length() == 329
    assert max(sizes_of(cache)) <= largest


@BOTH_CALLERS
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "new ids"])
def test_a_later_turn_is_read_in_chunks_too(caller: str, is_whole: bool) -> None:
    model = shared_forgetful(caller)
    ids = torch.tensor(random_rows((60,), seed=3))
    cache = DynamicCache()
    model.generate(ids[:, :20], past_key_values=cache, max_new_tokens=1, do_sample=False)
    expected = model.generate(
        ids, past_key_values=deepcopy(cache), max_new_tokens=5, do_sample=False
    )
    counts, hook = count_tokens_read(model)

    turn = model.generate(
        ids if is_whole else ids[:, 20:],
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=5,
        do_sample=False,
        prefill_chunk_size=16,
    )
    hook.remove()

    assert counts == [*([16, 16, 8] if SPLITS_LATER_TURNS else [40]), 1, 1, 1, 1]
    assert turn[:, -5:].tolist() == expected[:, -5:].tolist()


def test_chunks_are_the_default() -> None:
    model = shared_model(position_embedding="none", text_window=20)
    counts, hook = count_tokens_read(model)
    for meta_every in (None, 2):
        generate(model, random_rows((1030,)), max_new_tokens=3, meta_every=meta_every)
    hook.remove()

    assert counts == [512, 512, 6, 1, 1, 512, 512, 6, 1, 2]


# --- changes of the cache


@BOTH_CALLERS
def test_a_cache_can_be_cropped_where_nothing_was_dropped(caller: str) -> None:
    model = shared_forgetful(caller)
    ids, mask, cache = filled(model)
    with pytest.raises(UserError, match="text was dropped from this cache, so that it cannot be"):
        cache.crop(-1)

    _, cache = in_steps(model, ids[:, :12], mask[:, :12], ())
    cache.crop(-7)
    assert_continues(model, ids[:, :5], mask[:, :5], cache)


@BOTH_CALLERS
def test_rows_can_be_reordered_selected_and_repeated_and_all_forgotten(caller: str) -> None:
    model, order = shared_forgetful(caller), torch.tensor([2, 0, 0, 1])
    ids, mask, cache = filled(model)
    cache.reorder_cache(order)
    ids, mask = ids[order], mask[order]

    assert_continues(model, ids, mask, deepcopy(cache))
    cache.batch_select_indices(order[:2])
    ids, mask = ids[order[:2]], mask[order[:2]]
    assert_continues(model, ids, mask, deepcopy(cache))
    cache.batch_repeat_interleave(2)
    ids, mask = ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0)
    assert_continues(model, ids, mask, cache)
    cache.reset()
    assert_continues(model, ids[:, :0], mask[:, :0], cache)


def test_positions_that_jump_make_a_query_forget() -> None:
    model = shared_model(**SMALL | {"position_embedding": "none"})
    positions = [0, 1, 4, 5, 6, *range(9, 20), *range(22, 50)]
    expected = DenseOracle(model).logits(ROWS[0], seen(ROWS[0], positions=positions))
    position_ids, cache = torch.tensor([positions]), DynamicCache()

    whole = model(IDS, position_ids=position_ids).logits
    pieces = []
    for part in [slice(0, 25), *(slice(start, start + 1) for start in range(25, 44))]:
        out = model(IDS[:, part], position_ids=position_ids[:, part], past_key_values=cache)
        pieces.append(out.logits)

    assert_close(whole[0], expected, ROUNDED_DOUBLE)
    assert_close(torch.cat(pieces, dim=1)[0], expected, ROUNDED_DOUBLE)
    assert max(sizes_of(cache)) < 44


# --- what would be wrong is refused


def read_with_a_cache_of_a_fixed_size(model: PreTrainedModel) -> None:
    model(IDS, past_key_values=StaticCache(model.config, max_cache_len=60))


def read_a_mask_of_four_dimensions(model: PreTrainedModel) -> None:
    model(IDS, attention_mask=torch.ones(1, 1, 44, 44).bool())


def read_weights_of_dropped_text(model: PreTrainedModel) -> None:
    model(IDS, past_key_values=filled(model, ROWS[:1])[2], output_attentions=True)


def read_behind_learned_prompts(model: PreTrainedModel) -> None:
    filled_by_hand = DynamicCache()
    filled_by_hand.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    model(IDS, past_key_values=filled_by_hand, attention_mask=torch.ones(1, 47))


def read_with_an_offloaded_cache(model: PreTrainedModel) -> None:
    offloaded = DynamicCache()
    offloaded.offloading = True
    model(IDS, past_key_values=offloaded)


def hide_what_was_read_as_text(model: PreTrainedModel) -> None:
    """As in a batched chat, where a row ended early: `generate` read its padding as text."""
    ids = IDS[:, :30].repeat(2, 1)
    cache = model(ids, use_cache=True).past_key_values
    later = torch.ones(2, 33, dtype=torch.long)
    later[0, 26:30] = 0
    model(ids[:, :3], attention_mask=later, past_key_values=cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (read_with_a_cache_of_a_fixed_size, "a text_window needs a cache that grows"),
        (read_a_mask_of_four_dimensions, "would replace the text_window"),
        (read_weights_of_dropped_text, "a cache drops text, and attention weights with it"),
        (read_behind_learned_prompts, "learned prompts"),
        (read_with_an_offloaded_cache, "neither quantized nor offloaded"),
        (hide_what_was_read_as_text, "a cache the mask that it was filled with"),
    ],
)
@BOTH_CALLERS
def test_what_would_be_wrong_is_refused(
    caller: str, call: Callable[[PreTrainedModel], Any], message: str
) -> None:
    model = shared_forgetful(caller)
    with pytest.raises(UserError, match=message):
        call(model)


@pytest.mark.parametrize(
    "window",
    [(None,), (WINDOW + 9, SINKS, FULL), (WINDOW, SINKS + 9, FULL), (WINDOW, SINKS, [])],
    ids=str,
)
@BOTH_CALLERS
def test_a_cache_that_another_window_filled_is_refused(caller: str, window: tuple) -> None:
    model = deepcopy(shared_forgetful(caller, tuple(FULL)))
    _, cache = in_steps(model, IDS, torch.ones_like(IDS), (20, *range(30, 40)))
    set_text_window(model, *window)

    with pytest.raises(
        UserError,
        match="this cache was filled with another text window, or other full blocks or heads",
    ):
        model(IDS[:, 40:41], past_key_values=cache)


@BOTH_CALLERS
@torch.no_grad()
def test_a_cache_without_a_window_is_refused_and_stays_as_it_is(caller: str) -> None:
    model = deepcopy(shared_forgetful(caller))
    set_text_window(model, None)
    expected = model(IDS).logits
    cache = model(IDS[:, :30], use_cache=True).past_key_values

    set_text_window(model, WINDOW)
    with pytest.raises(UserError, match="has some that a text_window cannot place"):
        model(IDS[:, 30:], past_key_values=cache)
    set_text_window(model, None)
    logits = model(IDS[:, 30:], past_key_values=cache).logits

    assert_close(logits[..., :META], expected[:, 30:, :META], tolerance_of(model))


@BOTH_CALLERS
@torch.no_grad()
def test_positions_have_to_grow(caller: str) -> None:
    """By its position a key is before a query: positions that fall would show a query what comes after it."""
    model, mask = shared_forgetful(caller), torch.ones_like(IDS)
    growing = torch.arange(IDS.shape[1])[None]
    for positions in (growing % 20, growing // 2, growing.flip(1)):
        with pytest.raises(
            UserError, match="positions have to grow from each real token to the next"
        ):
            model(IDS, attention_mask=mask, position_ids=positions, use_cache=False)
    with pytest.raises(UserError, match="positions are whole numbers; these are fractions"):
        model(IDS, position_ids=growing.double(), use_cache=False)

    cache = model(IDS[:, :20], use_cache=True).past_key_values
    for first in (0, 19):
        with pytest.raises(UserError, match="positions have to grow"):
            model(IDS[:, 20:], position_ids=growing[:, :24] + first, past_key_values=cache)
    with pytest.raises(UserError, match="a column for each cached token"):
        model(IDS[:, 20:30], attention_mask=mask[:, :10], past_key_values=cache)
    # The cache is as it was.
    logits = model(IDS[:, 20:], attention_mask=mask, past_key_values=cache).logits[0, :, :META]
    assert_close(logits, expected_logits(caller, ROWS[0])[20:, :META], tolerance_of(model))
