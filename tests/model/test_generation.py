"""`generate()`, for both callers, against a slow loop of whole passes, and the rules for meta-tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
)

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from tests.model.generating import (
    assert_a_chat_goes_on,
    beam_text,
    count_tokens_read,
    generate,
    greedy_text,
    sampled_texts,
)
from tests.model.in_pieces import full_layers_alone_hold_all, sizes_of
from tests.model.text_window import PROMPTS
from tests.model.tiny_models import META, pad, random_rows, shared_model, tiny_model
from tests.retrofit.callers import SETTINGS, shared_model_of
from tests.retrofit.forgetful import (
    ALL_BLOCKS,
    EACH_CALLER,
    EOS,
    QUICK_CALLERS,
    RETROFITS,
    Blocks,
    expected_scores,
    generate_texts,
    shared_forgetful,
)

PROMPT = torch.tensor([[1, 2, 3]])
ROW, ROWS = random_rows((7,), seed=4)[0], random_rows((11, 8, 3, 1, 9, 6, 11, 5), seed=5)


def always(model: MetaGPT2ForCausalLM, token: int) -> MetaGPT2ForCausalLM:
    """The model, changed so that this token is always the likeliest."""
    with torch.no_grad():
        model.model.norm.weight.mul_(0.1)
        model.lm_head.weight[token] = 20 * model.model.norm.bias
    return model


# --- what it returns


@pytest.mark.quick(caller=QUICK_CALLERS)
@ALL_BLOCKS
@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("caller", [*SETTINGS, *RETROFITS])
def test_generation_is_a_loop_of_whole_passes(
    caller: str, meta_every: int | None, full: Blocks
) -> None:
    model, score = shared_forgetful(caller, full), expected_scores(caller, full)
    greedy = [greedy_text(score, row, 8, meta_every) for row in PROMPTS]
    beams = [beam_text(score, row, 4, meta_every, 3) for row in PROMPTS]
    sampled = sampled_texts(score, PROMPTS, 8, meta_every)
    for chunk in (None, 7):
        options = {"meta_every": meta_every, "prefill_chunk_size": chunk}
        cache = DynamicCache()
        assert (
            generate_texts(model, PROMPTS, max_new_tokens=8, past_key_values=cache, **options)
            == greedy
        )
        assert full is None or full_layers_alone_hold_all(model, cache)
        assert (
            generate_texts(model, PROMPTS, max_new_tokens=8, do_sample=True, top_k=0, **options)
            == sampled
        )
        assert generate_texts(model, PROMPTS, max_new_tokens=4, num_beams=3, **options) == beams


@pytest.mark.quick(caller=QUICK_CALLERS)
@pytest.mark.parametrize(
    "options",
    [
        {"meta_every": 3},
        {"do_sample": True},
        {"meta_every": 3, "num_beams": 3},
    ],
    ids=str,
)
@ALL_BLOCKS
@EACH_CALLER
def test_a_chat_goes_on_with_the_same_cache(
    caller: str, full: Blocks, options: dict[str, Any]
) -> None:
    model, (ids, mask), cache = shared_forgetful(caller, full), pad(PROMPTS), DynamicCache()
    greedy = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [EOS]}
    ids = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, **greedy
    )

    assert_a_chat_goes_on(model, ids, mask, cache, max_new_tokens=7, **greedy | options)
    assert full is None or min(sizes_of(cache)) < 40


@pytest.mark.parametrize("caller", ["rope-meta", "llama"])
def test_guesses_that_are_cropped_change_nothing(caller: str) -> None:
    model, rows = shared_model_of(caller), [[5, META, 9] * 12]
    expected = generate_texts(model, rows, max_new_tokens=20, use_cache=False)
    options = {"prompt_lookup_num_tokens": 3}
    assert generate_texts(model, rows, max_new_tokens=20, **options) == expected


@pytest.mark.parametrize("meta_every", [None, 2])
def test_rows_that_end_early(meta_every: int | None) -> None:
    model, options = shared_model(), {"max_new_tokens": 9, "meta_every": meta_every}
    unbounded = generate(model, ROWS, **options)
    ends = unbounded[
        ::2, 3
    ].tolist()  # tokens that some rows reach, each after another number of steps

    bounded = generate(model, ROWS, eos_token_id=ends, **options)

    for row, free in zip(bounded.tolist(), unbounded.tolist(), strict=True):
        length = next((count for count, token in enumerate(free, start=1) if token in ends), 9)
        assert row == (free[:length] + [0] * 9)[: bounded.shape[1]]
    beams = {"num_beams": 3, "eos_token_id": ends, **options}
    assert torch.equal(
        generate(model, ROWS, **beams), generate(model, ROWS, use_cache=False, **beams)
    )


# --- tokens that are not generated


@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "top_k": 1}, {"num_beams": 3}], ids=str)
def test_a_meta_token_is_suppressed_though_it_is_the_likeliest(mode: dict[str, Any]) -> None:
    model = always(tiny_model(), META)
    ids = torch.tensor(random_rows((6, 6)))
    options = {
        "max_new_tokens": 5,
        "meta_every": 2,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    out = model.generate(ids, **options, **mode)

    assert (torch.stack(out.logits).argmax(dim=-1) == META).all()
    assert not (out.sequences[:, 6:] == META).any()


def test_a_model_without_meta_token_generates_any_token() -> None:
    model = always(tiny_model(meta_token_id=None, second_attention="none"), META)
    assert (generate(model, [ROW], max_new_tokens=3) == META).all()


def test_padding_rows_of_the_vocabulary_are_suppressed_though_they_are_the_likeliest() -> None:
    model = always(
        tiny_model(vocab_size=128, meta_token_id=META + 6, unpadded_vocab_size=META + 7), 100
    )
    options = {"max_new_tokens": 5, "do_sample": False}

    assert (model.generate(PROMPT, **options) <= META + 6).all()
    model.resize_token_embeddings(101, pad_to_multiple_of=64)  # it is an added token's now
    assert (model.generate(PROMPT, **options)[:, 3:] == 100).all()


# --- inserted meta-tokens


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_inserted_tokens_share_the_passes_of_text_tokens(options: dict[str, Any]) -> None:
    model = tiny_model()
    counts, _ = count_tokens_read(model)
    generate(model, [ROW], max_new_tokens=9, **options)

    assert counts == [7] + [1] * 8
    counts.clear()
    generate(model, [ROW], max_new_tokens=9, meta_every=4, **options)
    assert counts == [7, 1, 1, 1, 2, 1, 1, 1, 2]


def test_a_generation_configuration_sets_meta_every(tmp_path: Path) -> None:
    model, options = tiny_model(), {"max_new_tokens": 9, "do_sample": False}
    ids = torch.tensor([ROW])
    never, every_second = (model.generate(ids, meta_every=every, **options) for every in (0, 2))
    assert not torch.equal(never, every_second)
    assert torch.equal(model.generate(ids, GenerationConfig(meta_every=2, **options)), every_second)

    model.generation_config.meta_every = 2
    assert torch.equal(model.generate(ids, **options), every_second)
    assert torch.equal(model.generate(ids, meta_every=0, **options), never)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.generate(ids, **options), every_second)
    with pytest.raises(UserError, match="meta_every is 'two'"):
        loaded.generate(ids, generation_config=GenerationConfig(meta_every="two", **options))


def test_no_token_is_inserted_in_training_mode_or_between_positions_of_the_caller() -> None:
    model, ids = tiny_model(), torch.tensor([ROW])
    with pytest.raises(UserError, match="position_ids do not support inserted meta-tokens"):
        model.generate(
            ids, position_ids=torch.arange(len(ROW))[None], meta_every=2, max_new_tokens=3
        )
    model.train()
    model.generate(ids, meta_every=2, max_new_tokens=3)
    model.generation_config.meta_every = 2
    with pytest.raises(
        UserError, match="inserts meta-tokens in training mode: a trainer that generates"
    ):
        model.generate(ids, max_new_tokens=3)


SHORT_TABLE = {"position_embedding": "learned", "max_position_embeddings": 6}
WHOLE = "give generate\\(\\) the whole sequence as input_ids"


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"meta_every": -1}, "meta_every is -1; it must be a whole number, at least 1"),
        (
            {"meta_token_id": None, "second_attention": "none"},
            {"meta_every": 4},
            "needs a model with a meta_token_id",
        ),
        ({}, {"meta_every": 2, "inputs": None}, WHOLE),
        ({}, {"meta_every": 2, "attention_mask": torch.ones(1, 9)}, WHOLE),
        ({}, {"meta_token_mask": PROMPT == META}, "generate\\(\\) finds meta-tokens by their ids"),
        (
            {},
            {"meta_every": 2, "prompt_lookup_num_tokens": 2},
            "assisted generation supports neither inserted",
        ),
        ({}, {"assistant_early_exit": 1}, "assistant_early_exit changes the number of blocks"),
        (
            {},
            {"token_healing": True, "inputs": torch.tensor([[1, META, 2]])},
            "token_healing writes the prompt as text",
        ),
        ({}, {"meta_every": 2, "guidance_scale": 1.5}, "guidance_scale does not support inserted"),
        (SHORT_TABLE, {"cache_implementation": "static"}, "6 learned positions"),
        (SHORT_TABLE, {"meta_every": 2}, "6 learned positions"),
    ],
)
def test_impossible_requests_are_refused(
    fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    request = {"inputs": PROMPT, "max_new_tokens": 5, "do_sample": False} | options
    with pytest.raises(UserError, match=message):
        tiny_model(**fields).generate(**request)


@pytest.mark.parametrize("caller", ["rope-meta", "llama"])
def test_a_cache_with_inserted_meta_tokens_does_not_go_on(caller: str) -> None:
    model, cache = shared_model_of(caller), DynamicCache()
    options = {"past_key_values": cache, "max_new_tokens": 6, "do_sample": False}
    ids = model.generate(torch.tensor([[1, 2]]), meta_every=2, **options)
    assert (cache.inserted, cache.get_seq_length()) == ([4, 6], 9)  # 2 prompt, 5 text, 2 inserted

    with pytest.raises(UserError, match="meta-tokens were inserted into what this cache holds"):
        model.generate(ids, **options)


@pytest.mark.parametrize("caller", ["rope-meta", "llama"])
def test_a_cache_that_is_cropped_to_the_prompt_goes_on(caller: str) -> None:
    model, cache, ids = shared_model_of(caller), DynamicCache(), torch.tensor([[1, 2, 3, 4]])
    options = {"max_new_tokens": 6, "do_sample": False, "meta_every": 2}
    expected = model.generate(ids, **options)
    model.generate(ids, past_key_values=cache, **options)
    cache.crop(3 - cache.get_seq_length())

    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)


def test_a_draft_inserts_nothing_whatever_its_setting() -> None:
    model, draft = tiny_model(), tiny_model(num_hidden_layers=1)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(PROMPT, **options)
    draft.generation_config.meta_every = 2
    assert torch.equal(model.generate(PROMPT, assistant_model=draft, **options), expected)
    model.generation_config.meta_every = 2
    without = model.generate(PROMPT, assistant_model=draft, meta_every=0, **options)
    assert torch.equal(without, expected)


def test_a_prompt_without_meta_tokens_may_be_healed(tmp_path: Path) -> None:
    """It then fails for another reason: transformers needs the tokenizer for it."""
    with pytest.raises(ValueError, match="tokenizer"):
        tiny_model().generate(torch.tensor([[1, 2]]), token_healing=True, max_new_tokens=2)
