"""`generate()`: the cache against recomputation and against a slow loop over the oracle, and the meta-token policy."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.errors import UserError
from metatokens.model.generation import SuppressMetaToken
from tests.gradients import far
from tests.model.dense_oracle import DenseOracle
from tests.model.generating import assert_a_chat_goes_on, beams_of, count_tokens_read, generate, insert, score_of
from tests.model.tiny_models import FAMILIES, META, SECOND, Fields, pad, random_rows, shared_model, tiny_model
from tests.numbers import ROUNDED
from tests.retrofit.architectures import retrofitted

ONE, EIGHT = random_rows((7,), seed=4), random_rows((11, 8, 3, 1, 9, 6, 11, 5), seed=5)
MODES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 20, "temperature": 1.5},
    {"do_sample": False, "num_beams": 3},
]


def always(model: MetaGPT2ForCausalLM, token: int) -> MetaGPT2ForCausalLM:
    """The model, changed so that this token is always the likeliest."""
    with torch.no_grad():
        model.model.norm.weight.mul_(0.1)
        model.lm_head.weight[token] = 20 * model.model.norm.bias
    return model


@pytest.mark.parametrize(("meta_every", "new_tokens"), [(None, 6), (1, 6), (4, 9), (10, 12)])
@FAMILIES
def test_cache_gives_the_tokens_of_recomputation(fields: Fields, meta_every: int | None, new_tokens: int) -> None:
    model = shared_model(**fields)
    for rows in (ONE, EIGHT):
        for mode in MODES:
            options = {"max_new_tokens": new_tokens, "meta_every": meta_every, **mode}
            cached = generate(model, rows, **options)
            assert cached.shape == (len(rows), new_tokens)
            assert torch.equal(cached, generate(model, rows, use_cache=False, **options)), options
            assert not (cached == META).any()


@pytest.mark.parametrize("meta_every", [None, 1, 4])
@FAMILIES
def test_greedy_search_is_the_slow_loop(fields: Fields, meta_every: int | None) -> None:
    model = shared_model(**fields)
    score = score_of(DenseOracle(model))
    found = generate(model, EIGHT[:4], max_new_tokens=9, meta_every=meta_every)
    assert found.tolist() == [beams_of(score, row, 9, meta_every, 1) for row in EIGHT[:4]]


@pytest.mark.parametrize("meta_every", [None, 2])
def test_beam_search_is_the_slow_loop(meta_every: int | None) -> None:
    model = shared_model()
    score = score_of(DenseOracle(model))
    found = generate(model, EIGHT[:3], max_new_tokens=7, num_beams=3, meta_every=meta_every)
    assert found.tolist() == [beams_of(score, row, 7, meta_every, 3) for row in EIGHT[:3]]


@pytest.mark.parametrize("meta_every", [None, 2])
def test_rows_that_end_early(meta_every: int | None) -> None:
    model = shared_model()
    free = generate(model, EIGHT, max_new_tokens=9, meta_every=meta_every)
    ends = free[::2, 3].tolist()  # tokens that some rows reach, each after another number of steps
    options = {"max_new_tokens": 9, "meta_every": meta_every, "eos_token_id": ends, "pad_token_id": 0}
    cached = generate(model, EIGHT, **options)
    for row, unbounded in zip(cached.tolist(), free.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(unbounded) if token in ends), 9)
        assert row == (unbounded[:end] + [0] * 9)[: cached.shape[1]]
    for mode in MODES[1:]:
        assert torch.equal(
            generate(model, EIGHT, **options, **mode), generate(model, EIGHT, use_cache=False, **options, **mode)
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second_attention", ["meta", "none"])
def test_meta_token_is_suppressed_though_it_is_the_likeliest(second_attention: str, mode: dict[str, Any]) -> None:
    model = always(tiny_model(second_attention=second_attention), META)
    ids = torch.tensor(random_rows((6, 6)))
    options = {**mode, "top_k": 1} if mode["do_sample"] else mode
    out = model.generate(
        ids, max_new_tokens=5, meta_every=2, output_logits=True, return_dict_in_generate=True, **options
    )
    assert all((logits.argmax(dim=-1) == META).all() for logits in out.logits)
    assert not (out.sequences[:, 6:] == META).any()


def test_suppression_follows_the_scores_to_their_device() -> None:
    scores = torch.zeros(1, 4, device="meta")  # as transformers keeps them where the prompt is, not the model
    assert SuppressMetaToken([2], device="cpu")(EIGHT, scores).device == scores.device


def test_tokens_that_the_user_suppresses_stay_suppressed() -> None:
    model = shared_model()
    first = generate(model, EIGHT, max_new_tokens=1)
    again = generate(model, EIGHT, max_new_tokens=4, suppress_tokens=first.flatten().tolist(), meta_every=2)
    assert not torch.isin(again, first).any()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_inserted_tokens_share_the_passes_of_text_tokens(options: dict[str, Any]) -> None:
    model = tiny_model()
    calls, _ = count_tokens_read(model)
    generate(model, ONE, max_new_tokens=9, **options)
    assert calls == [7] + [1] * 8
    calls.clear()
    generate(model, ONE, max_new_tokens=9, meta_every=4, **options)
    assert calls == [7, 1, 1, 1, 2, 1, 1, 1, 2]


def test_cache_after_generation_holds_the_inserted_tokens() -> None:
    prompt = [3, META, 5, META, 7]
    out = shared_model().generate(
        torch.tensor([prompt]), max_new_tokens=7, meta_every=3, do_sample=False, return_dict_in_generate=True
    )
    read = insert(prompt, out.sequences[0, 5:-1].tolist(), 3)  # the last token has not been read
    assert out.past_key_values.get_seq_length() == len(read)
    assert out.past_key_values.layers[0].second.slots.tolist() == [[i for i, t in enumerate(read) if t == META]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("first", "second"), [(None, None), (None, 3), (2, None), (2, 3), (1, 1), (3, 2)])
@SECOND
def test_a_cache_continues_a_conversation(
    second_attention: str, first: int | None, second: int | None, mode: dict[str, Any]
) -> None:
    model = shared_model(second_attention=second_attention)
    prompt, mask = pad(EIGHT)
    cache = MetaTokenCache(model.config)
    ids = model.generate(
        prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=5, meta_every=first, do_sample=False
    )
    assert list(cache.inserted) == [11 + text for text in range(first or 9, 5, first or 9)]  # the fifth id was not read
    assert_a_chat_goes_on(model, ids, mask, cache, max_new_tokens=6, meta_every=second, pad_token_id=0, **mode)


def test_unread_tokens_may_be_given_alone_with_a_mask_of_all() -> None:
    model = shared_model()
    ids, mask = pad(EIGHT)
    cache, options = MetaTokenCache(model.config), {"max_new_tokens": 4, "do_sample": False}
    model(ids[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
    out = model.generate(ids[:, 7:], attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(out[:, -4:], model.generate(ids, attention_mask=mask, **options)[:, -4:])


@pytest.mark.parametrize("make", [MetaTokenCache, lambda config: DynamicCache()])
def test_a_cropped_cache_forgets_what_was_inserted_later(make: Callable[[MetaGPT2Config], DynamicCache]) -> None:
    model = shared_model()
    cache = make(model.config)
    ids = model.generate(torch.tensor([[1, 2]]), past_key_values=cache, max_new_tokens=6, meta_every=2, do_sample=False)
    assert (cache.inserted, cache.get_seq_length()) == ([4, 6], 9)  # 2 prompt, 5 text, 2 inserted
    cache.crop(-3)
    assert (cache.inserted, cache.get_seq_length()) == ([4], 6)
    whole = torch.tensor([[*ids[0, :4].tolist(), META, *ids[0, 4:].tolist()]])
    expected = model.generate(whole, max_new_tokens=3, do_sample=False)[0, -3:]
    out = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(out[0, -3:], expected)
    cache.reset()
    out = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("mode", MODES)
@SECOND
def test_generation_from_embeddings(second_attention: str, mode: dict[str, Any]) -> None:
    model = shared_model(second_attention=second_attention)
    ids, mask = pad(EIGHT)
    expected = generate(model, EIGHT, max_new_tokens=5, **mode)
    embeddings = model.get_input_embeddings()(ids)
    for meta_token_mask in ({}, {"meta_token_mask": ids == META}):
        torch.manual_seed(8)
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 5, **mode, **meta_token_mask}
        assert torch.equal(model.generate(inputs_embeds=embeddings, attention_mask=mask, **options), expected)
    del options["meta_token_mask"]
    alone = ids[:1, mask[0].argmax() :]  # without padding, transformers drops the mask
    torch.manual_seed(8)
    expected = model.generate(alone, **options)
    torch.manual_seed(8)
    assert torch.equal(model.generate(alone, meta_token_mask=alone == META, **options), expected)


def test_padding_rows_of_the_vocabulary_are_suppressed_though_they_are_the_likeliest() -> None:
    model = always(tiny_model(vocab_size=128, meta_token_id=META + 6, unpadded_vocab_size=META + 7), 100)
    out = model.generate(PROMPT, max_new_tokens=5, output_logits=True, return_dict_in_generate=True, do_sample=False)
    assert all((logits.argmax(dim=-1) == 100).all() for logits in out.logits)
    assert (out.sequences <= META + 6).all()
    model.resize_token_embeddings(101, pad_to_multiple_of=64)  # it is an added token's now
    assert (model.generate(PROMPT, max_new_tokens=5, do_sample=False)[:, 3:] == 100).all()


@pytest.mark.parametrize(
    "way", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}, {"prefill_chunk_size": 4, "meta_every": 2}]
)
def test_guesses_that_are_cropped_and_a_prompt_in_chunks_change_nothing(way: dict[str, int]) -> None:
    rows = [[5, META, 9, 5, META, 9, 5]]
    expected = generate(shared_model(), rows, max_new_tokens=12, meta_every=way.get("meta_every"))
    assert torch.equal(generate(shared_model(), rows, max_new_tokens=12, **way), expected)


PROMPT = torch.tensor([[1, 2, 3]])
SHORT_TABLE = {"position_embedding": "learned", "max_position_embeddings": 6}
WHOLE = "give generate\\(\\) the whole sequence as input_ids"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {"meta_every": -1}, "meta_every is -1; it must be a whole number, at least 1"),
        ({"meta_token_id": None, "second_attention": "none"}, {"meta_every": 4}, "needs a model with a meta_token_id"),
        ({}, {"meta_every": 2, "inputs": None}, WHOLE),
        ({}, {"meta_every": 2, "attention_mask": torch.ones(1, 9)}, WHOLE),
        ({}, {"meta_every": 2, "meta_token_mask": PROMPT == META}, WHOLE),
        ({}, {"meta_every": 2, "prompt_lookup_num_tokens": 2}, "assisted generation does not support inserted"),
        ({}, {"meta_every": 2, "guidance_scale": 1.5}, "guidance_scale does not support inserted"),
        (
            {},
            {"meta_every": 2, "prefill_chunk_size": 2, "cache_implementation": "static"},
            "prefill_chunk_size and a cache",
        ),
        (
            {},
            {"meta_token_mask": PROMPT == 2, "prefill_chunk_size": 2, "cache_implementation": "static"},
            "or a meta_token_mask: leave one of the two out",
        ),
        ({}, {"cache_implementation": "offloaded"}, "cache_implementation 'offloaded' is not available"),
        (SHORT_TABLE, {"cache_implementation": "static"}, "6 learned positions"),
        (SHORT_TABLE, {"meta_every": 2}, "6 learned positions"),
    ],
)
def test_impossible_requests_are_refused(model: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_model(**model).generate(**({"inputs": PROMPT, "max_new_tokens": 5, "do_sample": False} | options))


def test_no_token_is_inserted_in_training_mode_or_among_given_positions() -> None:
    model, prompt = tiny_model(), torch.tensor(ONE)
    with pytest.raises(UserError, match="position_ids do not support inserted meta-tokens"):
        model.generate(prompt, position_ids=torch.arange(prompt.shape[1])[None], meta_every=2, max_new_tokens=3)
    model.train()
    model.generate(prompt, meta_every=2, max_new_tokens=3)
    model.generation_config.meta_every = 2
    with pytest.raises(UserError, match="inserts meta-tokens in training mode: a trainer that generates"):
        model.generate(prompt, max_new_tokens=3)


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("model", [tiny_model(position_embedding="rope"), retrofitted("llama")], ids=["own", "llama"])
def test_a_conversation_goes_on_where_a_row_ended_early(model: Any, every: int | None) -> None:
    """Meta-tokens that were inserted into the padding behind that row are padding too."""
    meta, how = model.config.meta_token_id, {"do_sample": False, "pad_token_id": 0}
    prompt, user = (torch.tensor(random_rows((length,) * 2, meta_rate=0, seed=length)) for length in (6, 4))
    begin: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "meta_every": 2, "max_new_tokens": 9, **how}
    free = model.generate(prompt, **begin, eos_token_id=None)
    end = next(token for token in free[0, 8:].tolist() if token not in free[1, 6:])  # it ends row 0
    last = free[0, 6:].tolist().index(end) + 7
    first = model.generate(prompt, **begin, eos_token_id=end, return_dict_in_generate=True)
    cache, ids = first.past_key_values, torch.cat([first.sequences, user], dim=1)
    mask = torch.ones_like(ids)
    mask[0, last:15] = 0
    said = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 6, "meta_every": every}
    found = model.generate(ids, **said, eos_token_id=None, **how)[:, 19:].tolist()
    assert cache.inserted[:4] == [8, 10, 12, 14]
    for row, stop in enumerate((last, 15)):
        read = []
        for place, token in enumerate(ids[row, :stop].tolist(), start=1):
            read += [token, meta] if place in (8, 10, 12, 14) else [token]
        read = torch.tensor([read + user[row].tolist()])
        for number, token in enumerate(found[row], start=1):
            with torch.no_grad():
                scores = model(read, use_cache=False).logits[0, -1].clone()
            scores[meta:] = -torch.inf
            assert int(scores.argmax()) == token
            new = [token, meta] if every and number % every == 0 else [token]
            read = torch.cat([read, torch.tensor([new])], dim=1)


def test_a_model_without_meta_token_generates_any_token() -> None:
    model = always(tiny_model(meta_token_id=None, second_attention="none"), META)
    assert (generate(model, ONE, max_new_tokens=3) == META).all()


def test_a_generation_configuration_sets_meta_every(tmp_path: Path) -> None:
    model, ids, options = tiny_model(), torch.tensor([ONE[0]]), {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(ids, meta_every=2, **options)
    assert not torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, generation_config=GenerationConfig(meta_every=2, **options)), expected)
    assert torch.equal(model.generate(ids, GenerationConfig(meta_every=2, **options)), expected)
    model.generation_config.meta_every = 2
    assert torch.equal(model.generate(ids, **options), expected)
    other = GenerationConfig(meta_every=3, **options)
    assert torch.equal(model.generate(ids, generation_config=other, meta_every=2), expected)
    assert not torch.equal(model.generate(ids, generation_config=other), expected)
    assert torch.equal(model.generate(ids, meta_every=0, **options), tiny_model().generate(ids, **options))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again.generate(ids, **options), expected)
    with pytest.raises(UserError, match="meta_every is 'two'"):
        again.generate(ids, generation_config=GenerationConfig(meta_every="two", **options))


def test_an_assistant_may_lack_the_tokens_that_are_suppressed() -> None:
    scores, suppress = torch.zeros(1, 5), SuppressMetaToken([3, 5, 9])
    assert suppress(torch.zeros(1, 1), scores).isinf().tolist() == [[False, False, False, True, False]]
    assert suppress(torch.zeros(1, 1), torch.zeros(1, 10)).isinf().nonzero()[:, 1].tolist() == [3, 5, 9]


class EveryThird(LogitsProcessor):
    """Chooses a meta-token in every third step."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (batch, vocabulary)."""
        chosen = torch.full_like(scores, -math.inf)
        chosen[:, META] = 0
        return chosen if input_ids.shape[1] % 3 == 0 else scores


@pytest.mark.parametrize("meta_every", [None, 2])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@SECOND
def test_a_processor_may_choose_meta_tokens(second_attention: str, cache: str, meta_every: int | None) -> None:
    model = shared_model(second_attention=second_attention)
    out = model.generate(
        torch.tensor(ONE),
        max_new_tokens=9,
        do_sample=False,
        cache_implementation=cache,
        meta_every=meta_every,
        logits_processor=LogitsProcessorList([EveryThird()]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    text, oracle = out.sequences[0, len(ONE[0]) :].tolist(), DenseOracle(model)
    assert text.count(META) == 3
    for step, found in enumerate(out.logits):
        wanted = oracle.logits(insert(ONE[0], text[:step], meta_every))[-1]
        assert far(found[0][:META], wanted[:META]) < ROUNDED  # generate() returns float32
