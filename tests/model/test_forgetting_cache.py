"""Caches that drop text which no later query sees: generation, chats and crops, against dense recomputation."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache, set_text_window
from metatokens.errors import UserError
from tests.model.dense_oracle import DenseOracle
from tests.model.generating import assert_a_chat_goes_on, beams_of, count_tokens_read, generate, samples_of, score_of
from tests.model.in_pieces import assert_continues, assert_full_layers_alone_hold_all, held, in_steps
from tests.model.test_attention_oracle import assert_close
from tests.model.text_window import MIXED, PROMPTS, ROWS, SINKS, SMALL, WINDOW, WINDOWS, rule_of, seen
from tests.model.tiny_models import FAMILY, META, SECOND, VARIANTS, Fields, pad, random_rows, shared_model, tiny_model
from tests.numbers import ROUNDED_DOUBLE


@pytest.mark.quick(fields=FAMILY)
@WINDOWS
@pytest.mark.parametrize("meta_every", [None, 3])
@VARIANTS
def test_generation_is_the_dense_recomputation(fields: Fields, meta_every: int | None, window: Fields) -> None:
    model = shared_model(**fields | window)
    score = score_of(DenseOracle(model), rule_of(model))
    greedy = [beams_of(score, row, 12, meta_every, 1) for row in PROMPTS]
    sampled = samples_of(score, PROMPTS, 12, meta_every)
    beams = [beams_of(score, row, 5, meta_every, 3) for row in PROMPTS]
    for chunk in (None, 7):
        options = {"max_new_tokens": 12, "meta_every": meta_every, "prefill_chunk_size": chunk}
        cache = MetaTokenCache(model.config)
        assert generate(model, PROMPTS, past_key_values=cache, **options).tolist() == greedy
        assert cache.has_dropped
        assert_full_layers_alone_hold_all(model, cache)
        assert generate(model, PROMPTS, do_sample=True, top_k=0, **options).tolist() == sampled
        assert generate(model, PROMPTS, num_beams=3, **options | {"max_new_tokens": 5}).tolist() == beams
    assert generate(deepcopy(model).float(), PROMPTS, **options).tolist() == greedy


@WINDOWS
@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
@SECOND
def test_a_chat_goes_on_with_the_same_cache(
    second_attention: str, chunk: int | None, meta_every: int | None, mode: dict[str, Any], window: Fields
) -> None:
    model = shared_model(second_attention=second_attention, **window)
    ids, mask = pad(PROMPTS)
    cache = MetaTokenCache(model.config)
    options = {"pad_token_id": 0, "prefill_chunk_size": chunk, "meta_every": meta_every}
    ids = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False, **options)
    assert_a_chat_goes_on(model, ids, mask, cache, max_new_tokens=7, **options | mode)
    assert cache.has_dropped


@WINDOWS
@pytest.mark.parametrize(
    "way", [{"prompt_lookup_num_tokens": 3}, {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 4}]
)
@SECOND
def test_guesses_that_are_cropped_change_nothing(second_attention: str, way: dict[str, int], window: Fields) -> None:
    model = shared_model(second_attention=second_attention, **window)
    rows = [[5, META, 9] * 12]
    wanted = generate(model, rows, max_new_tokens=20, use_cache=False)
    assert torch.equal(generate(model, rows, max_new_tokens=20, **way), wanted)


@SECOND
def test_generation_from_embeddings(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    ids, mask = pad(PROMPTS)
    wanted = generate(model, PROMPTS, max_new_tokens=9, use_cache=False)
    embeddings = model.get_input_embeddings()(ids)
    found = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(found, wanted)


LONG = [
    [META if (place + 1) % every == 0 else text for place, text in enumerate(row)]
    for every, row in zip((8, 20, 300), random_rows((300, 260, 220), seed=9, meta_rate=0), strict=True)
]
METAS = 300 // 8


def test_a_long_prompt_is_read_in_chunks_and_kept_small() -> None:
    model = tiny_model(position_embedding="none", text_window=20)
    shapes: list[torch.Size] = []
    model.model.layers[0].attention.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["mask"].shape), with_kwargs=True
    )
    cache, full = MetaTokenCache(model.config), MetaTokenCache(model.config)
    generate(model, LONG, past_key_values=cache, max_new_tokens=30, prefill_chunk_size=25)
    most = METAS + 4 + 20 + 16  # a cache drops nothing before 16 entries have piled up
    assert [shape[2] for shape in shapes] == [25] * 12 + [1] * 29
    assert max(shape[3] for shape in shapes[:12]) <= most + 25
    assert max(shape[3] for shape in shapes[20:]) <= most + 1
    assert cache.get_seq_length() == 329
    assert max(held(cache)) <= most
    plain = tiny_model(position_embedding="none")
    generate(plain, LONG, past_key_values=full, max_new_tokens=30)
    assert max(held(full)) == 329
    sizes = [
        sum(x.untyped_storage().nbytes() for layer in one.layers for x in (layer.keys, layer.values))
        for one in (cache, full)
    ]
    # Both have room to grow: a quarter, and 64 entries.
    assert sizes[0] <= 2 * 2 * 3 * 4 * 8 * 8 * (1.25 * most + 64)
    assert sizes[0] < 0.4 * sizes[1]


def test_chunks_are_the_default() -> None:
    model = shared_model(position_embedding="none", text_window=20)
    counts, hook = count_tokens_read(model)
    generate(model, random_rows((1030,)), max_new_tokens=3)
    generate(model, random_rows((1030,)), max_new_tokens=3, meta_every=2)
    hook.remove()
    assert counts == [512, 512, 6, 1, 1, 512, 512, 6, 1, 2]


def filled(model: MetaGPT2ForCausalLM, side: str = "left") -> tuple[Tensor, Tensor, MetaTokenCache]:
    """A cache that has read the rows and dropped text; the last four tokens came one by one."""
    ids, mask = pad(ROWS, side)
    _, cache = in_steps(model, ids, mask, (20, 40, 41, 42, 43))
    assert cache.has_dropped
    return ids, mask, cache


@SECOND
def test_rows_padded_on_the_right_go_on(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    assert_continues(model, *filled(model, "right"))


@SECOND
def test_positions_that_jump_make_a_query_forget(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL | {"position_embedding": "none"})
    places = [0, 1, 4, 5, 6, *range(9, 20), *range(22, 50)]
    positions, ids, cache = torch.tensor(places), torch.tensor(ROWS[:1]), MetaTokenCache(model.config)
    wanted = DenseOracle(model).logits(ROWS[0], seen(ROWS[0], positions=places))
    pieces = [
        model(ids[:, place], position_ids=positions[None, place], past_key_values=cache).logits
        for place in (slice(0, 25), *(slice(one, one + 1) for one in range(25, 44)))
    ]
    for logits in (model(ids, position_ids=positions[None]).logits, torch.cat(pieces, dim=1)):
        assert_close(logits[0], wanted, ROUNDED_DOUBLE)
    assert cache.has_dropped


@SECOND
def test_a_cache_can_be_cropped_where_nothing_is_missing(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    ids, mask, cache = filled(model)
    cache.crop(-4)
    assert_continues(model, ids[:, :40], mask[:, :40], cache)
    ids, mask, cache = filled(model)
    with pytest.raises(UserError, match="text was dropped from this cache; only its last 4 tokens can be removed"):
        cache.crop(-5)
    assert_continues(model, ids, mask, cache)
    _, cache = in_steps(model, ids[:, :12], mask[:, :12], ())
    cache.crop(-7)  # nothing was dropped
    assert_continues(model, ids[:, :5], mask[:, :5], cache)


@SECOND
def test_rows_can_be_reordered_selected_and_repeated_and_all_forgotten(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    order = torch.tensor([2, 0, 0, 1])
    ids, mask, cache = filled(model)
    cache.reorder_cache(order)
    assert_continues(model, ids[order], mask[order], cache)
    ids, mask, cache = filled(model)
    cache.batch_select_indices(order[:2])
    cache.crop(-1)
    assert_continues(model, ids[order[:2], :-1], mask[order[:2], :-1], cache)
    ids, mask, cache = filled(model)
    cache.batch_repeat_interleave(2)
    assert_continues(model, ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0), cache)
    cache.reset()
    assert_continues(model, ids[:, :0], mask[:, :0], cache)


@SECOND
def test_a_cache_of_transformers_is_converted(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    ids, mask = pad(ROWS)
    logits, cache = in_steps(model, ids, mask, (20, 40), DynamicCache())
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(logits[mask.bool()], wanted[mask.bool()], ROUNDED_DOUBLE)
    assert max(held(cache)) < 44


@SECOND
@pytest.mark.parametrize("meta_every", [None, 3])
def test_a_cache_of_a_fixed_size(second_attention: str, meta_every: int | None) -> None:
    """One for all tokens, and one that is smaller than the text, whose places are taken again."""
    model = shared_model(second_attention=second_attention, **SMALL)
    score = score_of(DenseOracle(model), seen)
    greedy = [beams_of(score, row, 20, meta_every, 1) for row in PROMPTS]
    beams = [beams_of(score, row, 5, meta_every, 3) for row in PROMPTS]
    options = {"max_new_tokens": 20, "meta_every": meta_every, "disable_compile": True}
    assert generate(model, PROMPTS, cache_implementation="static", **options).tolist() == greedy
    cache = StaticCache(model.config, max_cache_len=32)
    assert generate(model, PROMPTS, past_key_values=cache, prefill_chunk_size=4, **options).tolist() == greedy
    layers = 2 if second_attention == "none" else 4  # and one that takes note of the entries
    assert (held(cache), int(cache.get_seq_length())) == ([32] * (layers + 1), 53 + (19 // 3 if meta_every else 0))
    cache.reset()
    again = generate(model, PROMPTS, past_key_values=cache, prefill_chunk_size=7, **options)
    assert again.tolist() == greedy
    assert (
        generate(model, PROMPTS, cache_implementation="static", num_beams=3, **options | {"max_new_tokens": 5}).tolist()
        == beams
    )


def test_a_step_with_a_small_cache_of_a_fixed_size_compiles() -> None:
    torch._dynamo.reset()
    model, ids = shared_model(second_attention="none", **SMALL), torch.tensor(ROWS[:1])
    wanted = model(ids, use_cache=False).logits
    with torch.no_grad():
        cache = StaticCache(model.config, max_cache_len=32)
        model(ids[:, :12], past_key_values=cache)
        step = torch.compile(model, backend="eager", fullgraph=True)
        for place in range(12, 44):
            assert_close(
                step(ids[:, place : place + 1], past_key_values=cache).logits[:, 0], wanted[:, place], ROUNDED_DOUBLE
            )


IDS = torch.tensor(ROWS[:1])


def static_cache(model: MetaGPT2ForCausalLM, size: int) -> StaticCache:
    """A cache of a fixed size that the model has filled."""
    return model(IDS, past_key_values=StaticCache(model.config, max_cache_len=size)).past_key_values


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: static_cache(model, 40), "a cache of 40 tokens is too small for the"),
        (lambda model: static_cache(model, 60).crop(-1), "a cache of a fixed size that forgets text cannot be cropped"),
        (lambda model: model(IDS, attention_mask=torch.ones(1, 1, 44, 44).bool()), "would replace the text_window"),
        (
            lambda model: model(IDS.repeat(4, 1), past_key_values=filled(model)[2], output_attentions=True),
            "and attention weights",
        ),
    ],
)
@pytest.mark.parametrize("second_attention", ["meta", "none"])
def test_what_would_be_wrong_is_refused(second_attention: str, call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(tiny_model(second_attention=second_attention, **SMALL))


@SECOND
def test_a_cache_that_does_not_go_with_full_layers_is_refused(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention, **MIXED)
    with pytest.raises(UserError, match="text_full_layers need a cache that grows"):
        static_cache(model, 60)
    cache = filled(model)[2]
    set_text_window(model, WINDOW, SINKS, [0])
    with pytest.raises(
        UserError, match="this cache was filled with another text_window, text_sinks or text_full_layers"
    ):
        model(IDS.repeat(4, 1), past_key_values=cache)


def test_a_cache_with_other_entries_is_refused() -> None:
    model = shared_model(**SMALL)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    with pytest.raises(UserError, match="learned prompts"):
        model(IDS, past_key_values=cache, attention_mask=torch.ones(1, 47))
