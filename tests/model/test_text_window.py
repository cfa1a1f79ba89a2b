"""Text that is forgotten: masks and a cache that drops entries, against the oracle with a mask written pair by pair."""

import functools
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, StaticCache

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.model.dense_oracle import DenseOracle
from tests.model.test_attention_oracle import TOLERANCE, assert_close, assert_same_gradients
from tests.model.test_generation import count_tokens_read, insert
from tests.model.tiny_models import (
    META,
    QUICK,
    SECOND,
    SECOND_ATTENTIONS,
    VARIANTS,
    Fields,
    pad,
    parametrize,
    random_rows,
    shared_model,
    tiny_model,
)

WINDOW, SINKS, SLACK = 5, 2, 16  # a cache drops nothing before 16 entries have piled up
SMALL = {"text_window": WINDOW, "text_sinks": SINKS, "max_position_embeddings": 96}
ROWS = random_rows((44, 31, 12, 1), seed=3, meta_rate=0.2)
PROMPTS = random_rows((34, 25, 6), seed=5, meta_rate=0.2)
EDGES = [{"text_window": 1, "text_sinks": 0}, {"text_window": 1}, {"text_window": 40}, {"text_sinks": 0}]


def seen(row: Sequence[int], window: int = WINDOW, sinks: int = SINKS) -> Tensor:
    """Which keys each query sees, (T, T): the rule, pair by pair."""
    mask = torch.zeros(len(row), len(row), dtype=torch.bool)
    for query in range(len(row)):
        for key in range(query + 1):
            mask[query, key] = row[key] == META or key < sinks or query - key < window
    return mask


def expected(model: MetaGPT2ForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """The oracle's logits of all tokens, row after row."""
    oracle, (window, sinks) = DenseOracle(model), (model.config.text_window, model.config.text_sinks)
    return torch.cat([oracle.logits(row, seen(row, window, sinks)) for row in rows]).detach()


@functools.cache
def expected_once(model: MetaGPT2ForCausalLM) -> Tensor:
    """`expected` of `ROWS`, for a shared model."""
    return expected(model, ROWS)


def in_steps(
    model: MetaGPT2ForCausalLM, ids: Tensor, mask: Tensor, cuts: Sequence[int], cache: DynamicCache
) -> list[Tensor]:
    """The logits of each piece between `cuts`."""
    pieces, before = [], mask.shape[1] - ids.shape[1]
    for start, end in pairwise([0, *cuts, ids.shape[1]]):
        given = {"attention_mask": mask[:, : before + end], "past_key_values": cache}
        pieces.append(model(ids[:, start:end], **given).logits)
    return pieces


def held(cache: DynamicCache) -> list[int]:
    """The number of entries of each layer."""
    return [layer.keys.shape[2] for layer in cache.layers]


@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
def test_a_pass_is_the_masked_formula_forward_and_backward(fields: Fields, side: str) -> None:
    model = tiny_model(**fields | SMALL)
    oracle = DenseOracle(model)
    ids, mask = pad(ROWS, side)
    actual = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    wanted = torch.cat([oracle.logits(row, seen(row)) for row in ROWS])
    weigh = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (actual * weigh).sum().backward()
    (wanted * weigh).sum().backward()
    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(actual, wanted, tolerance)
    assert_same_gradients(model, oracle, 20 * tolerance)


@parametrize(EDGES)
def test_windows_of_other_sizes(fields: Fields) -> None:
    model = tiny_model(**{"position_embedding": "none"} | SMALL | fields)
    ids, mask = pad(ROWS)
    wanted = expected(model, ROWS)
    cuts = (*range(3, 44, 4),)
    for logits in (
        model(ids, attention_mask=mask).logits,
        torch.cat(in_steps(model, ids, mask, cuts, cache_of(model)), 1),
    ):
        assert_close(logits[mask.bool()], wanted, 1e-11)


def cache_of(model: MetaGPT2ForCausalLM) -> MetaTokenCache:
    return MetaTokenCache(model.config)


def test_a_window_as_long_as_the_text_changes_nothing() -> None:
    ids, mask = pad(ROWS)
    found, wanted = (
        model(ids, attention_mask=mask).logits[mask.bool()] for model in (shared_model(text_window=44), shared_model())
    )
    assert_close(found, wanted, 1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@SECOND
def test_the_eager_attention_function(second_attention: str, side: str) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **SMALL)
    model.set_attn_implementation("eager")
    ids, mask = pad(ROWS, side)
    wanted = expected(model, ROWS)
    pieces = in_steps(model, ids, mask, (20, 40), cache_of(model))
    for logits in (model(ids, attention_mask=mask).logits, torch.cat(pieces, dim=1)):
        assert_close(logits[mask.bool()], wanted, 2e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles flex attention with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it compiles
def test_flex_attention() -> None:
    for second_attention in SECOND_ATTENTIONS:
        model = tiny_model(second_attention=second_attention, dtype=torch.float32, **SMALL)
        model.set_attn_implementation("flex_attention")
        ids, mask = pad(ROWS)
        with torch.no_grad():  # gradients need a GPU, and so do lengths that change from step to step
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        assert_close(logits[mask.bool()], expected(model, ROWS), 2e-5)


def test_the_weights_of_forgotten_text_are_zero() -> None:
    model = tiny_model(dtype=torch.float32, **SMALL)
    outputs = model(torch.tensor(ROWS[:1]), output_attentions=True)
    oracle = DenseOracle(model)
    oracle.logits(ROWS[0], seen(ROWS[0]))
    for layer in range(2):
        for name, found in (("attention", outputs.attentions), ("second_attention", outputs.meta_attentions)):
            assert (found[layer][0] - oracle.seen[f"model.layers.{layer}.{name}"]).abs().max() < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
@settings(QUICK, max_examples=8)
@given(cuts=st.sets(st.integers(1, 43)))
def test_steps_of_any_size_give_the_masked_formula(fields: Fields, side: str, cuts: set[int]) -> None:
    model = shared_model(**fields | SMALL)
    ids, mask = pad(ROWS, side)
    cache = cache_of(model)
    with torch.no_grad():
        pieces = in_steps(model, ids, mask, sorted(cuts), cache)
    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(torch.cat(pieces, dim=1)[mask.bool()], expected_once(model), tolerance)
    assert cache.get_seq_length() == 44


def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16, **SMALL)
    ids, mask = pad(ROWS)
    whole = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    pieces = in_steps(model, ids, mask, (*range(1, 44),), cache_of(model))
    wanted = expected(model, ROWS)
    for logits in (whole, torch.cat(pieces, dim=1)[mask.bool()]):
        assert (logits - wanted).abs().mean() < 0.02 * wanted.abs().mean()


Score = Callable[[Sequence[int]], Tensor]  # log probabilities of the next token, by a dense pass over everything read


def score_of(oracle: DenseOracle) -> Score:
    """The scores of a `MetaGPT2ForCausalLM`."""

    def score(read: Sequence[int]) -> Tensor:
        with torch.no_grad():
            scores = oracle.logits(read, seen(read))[-1].log_softmax(dim=-1)
        scores[META] = -torch.inf
        return scores

    return score


def slow_beams(score: Score, prompt: list[int], length: int, meta_every: int | None, beams: int) -> list[int]:
    """The text that beam search finds; with one beam, greedy search."""
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        extended = [
            (total + gain, [*text, token])
            for total, text in kept
            for token, gain in enumerate(score(insert(prompt, text, meta_every)).tolist())
        ]
        kept = sorted(extended, reverse=True)[:beams]
    return kept[0][1]


def slow_samples(score: Score, prompts: Sequence[list[int]], length: int, meta_every: int | None) -> list[list[int]]:
    """Texts that are drawn with the seed 8, as transformers draws them."""
    torch.manual_seed(8)
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(length):
        reads = (insert(prompt, text, meta_every) for prompt, text in zip(prompts, texts, strict=True))
        scores = torch.stack([score(read) for read in reads])
        for text, token in zip(texts, torch.multinomial(scores.float().softmax(-1), 1).flatten().tolist(), strict=True):
            text.append(token)
    return texts


def generate(model: MetaGPT2ForCausalLM, rows: Sequence[Sequence[int]], **options: Any) -> Tensor:
    """The new ids for left-padded rows."""
    ids, mask = pad(rows)
    torch.manual_seed(8)
    out = model.generate(ids, attention_mask=mask, **({"do_sample": False, "pad_token_id": 0} | options))
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("meta_every", [None, 3])
@VARIANTS
def test_generation_is_the_dense_recomputation(fields: Fields, meta_every: int | None) -> None:
    model = shared_model(**fields | SMALL)
    score = score_of(DenseOracle(model))
    greedy = [slow_beams(score, row, 12, meta_every, 1) for row in PROMPTS]
    sampled = slow_samples(score, PROMPTS, 12, meta_every)
    beams = [slow_beams(score, row, 5, meta_every, 3) for row in PROMPTS]
    for chunk in (None, 7):
        options = {"max_new_tokens": 12, "meta_every": meta_every, "prefill_chunk_size": chunk}
        cache = cache_of(model)
        assert generate(model, PROMPTS, past_key_values=cache, **options).tolist() == greedy
        assert cache.has_dropped
        assert generate(model, PROMPTS, do_sample=True, top_k=0, **options).tolist() == sampled
        assert generate(model, PROMPTS, num_beams=3, **options | {"max_new_tokens": 5}).tolist() == beams


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
@SECOND
def test_a_chat_goes_on_with_the_same_cache(
    second_attention: str, chunk: int | None, meta_every: int | None, mode: dict[str, Any]
) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    ids, mask = pad(PROMPTS)
    cache = cache_of(model)
    options = {"pad_token_id": 0, "prefill_chunk_size": chunk, "meta_every": meta_every}
    ids = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False, **options)
    ids = torch.cat([ids, torch.tensor(random_rows([9] * 3, seed=6))], dim=1)
    mask = torch.cat([mask, torch.ones(3, 15, dtype=torch.long)], dim=1)
    is_text = torch.ones(ids.shape[1] + len(cache.inserted), dtype=torch.bool)
    is_text[[text + number for number, text in enumerate(cache.inserted)]] = False
    whole, whole_mask = ids.new_full((3, len(is_text)), META), mask.new_ones((3, len(is_text)))
    whole[:, is_text], whole_mask[:, is_text] = ids, mask
    options |= {"max_new_tokens": 7} | mode
    torch.manual_seed(5)
    fresh = {"use_cache": False, "prefill_chunk_size": None}
    wanted = model.generate(whole, attention_mask=whole_mask, **options | fresh)[:, len(is_text) :]
    cached = cache.get_seq_length()
    read, hook = count_tokens_read(model)
    torch.manual_seed(5)
    cache.batch_repeat_interleave(mode.get("num_beams", 1))
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, ids.shape[1] :]
    hook.remove()
    assert torch.equal(found, wanted)
    assert cache.has_dropped
    unread = len(is_text) - cached  # the cached tokens are not read again
    assert read[: unread // 4] == ([4] * (unread // 4) if chunk else [unread, *read[1 : unread // 4]])


@pytest.mark.parametrize(
    "way", [{"prompt_lookup_num_tokens": 3}, {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 4}]
)
@SECOND
def test_guesses_that_are_cropped_change_nothing(second_attention: str, way: dict[str, int]) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
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
    cache, full = cache_of(model), cache_of(model)
    generate(model, LONG, past_key_values=cache, max_new_tokens=30, prefill_chunk_size=25)
    most = METAS + 4 + 20 + SLACK
    assert [shape[2] for shape in shapes] == [25] * 12 + [1] * 29
    assert max(shape[3] for shape in shapes[:12]) <= most + 2 * 25
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
    cache = cache_of(model)
    in_steps(model, ids, mask, (20, 40, 41, 42, 43), cache)
    assert cache.has_dropped
    return ids, mask, cache


def assert_continues(model: MetaGPT2ForCausalLM, ids: Tensor, mask: Tensor, cache: MetaTokenCache) -> None:
    """New tokens after what the cache holds get the logits of a pass over everything."""
    assert cache.get_seq_length() == ids.shape[1]
    new = torch.tensor(random_rows([24] * len(ids), seed=7, meta_rate=0.3))
    mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    wanted = model(torch.cat([ids, new], dim=1), attention_mask=mask, use_cache=False).logits[:, -24:]
    assert_close(torch.cat(in_steps(model, new, mask, (1, 3, 22), cache), dim=1), wanted, 1e-11)


@SECOND
def test_rows_padded_on_the_right_go_on(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL)
    assert_continues(model, *filled(model, "right"))


@SECOND
def test_positions_that_jump_make_a_query_forget(second_attention: str) -> None:
    model = shared_model(second_attention=second_attention, **SMALL | {"position_embedding": "none"})
    positions = torch.tensor([0, 1, 4, 5, 6, *range(9, 20), *range(22, 50)])
    ids, cache = torch.tensor(ROWS[:1]), cache_of(model)
    mask = torch.tensor(
        [
            [
                before <= query
                and (token == META or positions[before] < SINKS or positions[query] - positions[before] < WINDOW)
                for before, token in enumerate(ROWS[0])
            ]
            for query in range(44)
        ]
    )
    wanted = DenseOracle(model).logits(ROWS[0], mask)
    pieces = [
        model(ids[:, place], position_ids=positions[None, place], past_key_values=cache).logits
        for place in (slice(0, 25), *(slice(one, one + 1) for one in range(25, 44)))
    ]
    for logits in (model(ids, position_ids=positions[None]).logits, torch.cat(pieces, dim=1)):
        assert_close(logits[0], wanted, 1e-11)
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
    cache = cache_of(model)
    in_steps(model, ids[:, :12], mask[:, :12], (), cache)
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
    cache = DynamicCache()
    pieces = in_steps(model, ids, mask, (20, 40), cache)
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(torch.cat(pieces, dim=1)[mask.bool()], wanted[mask.bool()], 1e-11)
    assert max(held(cache)) < 44


@SECOND
def test_a_training_step_compiles_and_may_be_checkpointed(second_attention: str) -> None:
    torch._dynamo.reset()
    ids = torch.tensor(random_rows((30, 30), meta_rate=0.2))
    places = torch.stack([torch.nn.functional.pad(row.nonzero()[:, 0], (0, 16), value=-1)[:16] for row in ids == META])
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == META, -100), "meta_positions": places}
    ahead = torch.arange(29).expand(2, -1).masked_fill(batch["labels"][:, 1:] == -100, -1)
    batch["scored_positions"] = ahead.sort(dim=1, descending=True).values
    model = tiny_model(second_attention=second_attention, **SMALL).train()
    model(**batch).loss.backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    for change in ("compiled", "checkpointed"):
        model.zero_grad()
        if change == "compiled":
            torch.compile(model, backend="eager", fullgraph=True)(**batch).loss.backward()
        else:
            checkpoint_activations(model)
            model(**batch).loss.backward()
        for name, gradient in wanted.items():
            assert (model.get_parameter(name).grad - gradient).abs().max() < 1e-6, (change, name)


def small_cache(model: MetaGPT2ForCausalLM, size: int) -> StaticCache:
    return StaticCache(model.config, max_cache_len=size)


@SECOND
@pytest.mark.parametrize("meta_every", [None, 3])
def test_a_cache_of_a_fixed_size(second_attention: str, meta_every: int | None) -> None:
    """One for all tokens, and one that is smaller than the text, whose places are taken again."""
    model = shared_model(second_attention=second_attention, **SMALL)
    score = score_of(DenseOracle(model))
    greedy = [slow_beams(score, row, 20, meta_every, 1) for row in PROMPTS]
    beams = [slow_beams(score, row, 5, meta_every, 3) for row in PROMPTS]
    options = {"max_new_tokens": 20, "meta_every": meta_every, "disable_compile": True}
    assert generate(model, PROMPTS, cache_implementation="static", **options).tolist() == greedy
    cache = small_cache(model, 32)
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
        cache = small_cache(model, 32)
        model(ids[:, :12], past_key_values=cache)
        step = torch.compile(model, backend="eager", fullgraph=True)
        for place in range(12, 44):
            assert_close(step(ids[:, place : place + 1], past_key_values=cache).logits[:, 0], wanted[:, place], 1e-11)


def filled_static(model: MetaGPT2ForCausalLM) -> StaticCache:
    return model(IDS, past_key_values=small_cache(model, 60)).past_key_values


IDS = torch.tensor(ROWS[:1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(IDS, past_key_values=small_cache(model, 40)), "a cache of 40 tokens is too small for the"),
        (lambda model: filled_static(model).crop(-1), "a cache of a fixed size that forgets text cannot be cropped"),
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


def test_a_cache_with_other_entries_is_refused() -> None:
    model = shared_model(**SMALL)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    with pytest.raises(UserError, match="learned prompts"):
        model(IDS, past_key_values=cache, attention_mask=torch.ones(1, 47))


def test_an_attention_function_without_masks_is_refused() -> None:
    model = tiny_model(**SMALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="a text_window needs attention that takes masks"):
        model(IDS)
