"""`generate_batch` of transformers against `generate`, one prompt after the other."""

from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from tests.model.tiny_models import META, SECOND, parametrize, tiny_model

NEW = 12
# Prompts of more than 32 tokens are read in pieces.
ENGINE = {"page_size": 8, "max_batch_tokens": 32}


def some_prompts(meta_token_id: int, lengths: tuple[int, ...] = (5, 9, 17, 28, 3, 26)) -> list[list[int]]:
    """Prompts with meta-tokens, the last three with a beginning in common, and one without any."""
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for length in lengths:
        ids = torch.randint(1, meta_token_id, (length,), generator=generator)
        ids[2::4] = meta_token_id
        prompts.append(ids.tolist())
    begun = max(prompts, key=len)[:24]
    return [*prompts, [7, 8, 9], [*begun, 5, meta_token_id, 6], [*begun, 4], begun]


def apart(model: PreTrainedModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """What `generate` gives for each prompt."""
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return [model.generate(torch.tensor([one]), **given)[0, len(one) :].tolist() for one in prompts]


def together(
    model: PreTrainedModel, prompts: list[list[int]], blocks: int = 64, eos: int = -1, **options: Any
) -> list[list[int]]:
    """What `generate_batch` gives for all prompts."""
    outputs = model.generate_batch(
        prompts,
        GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=eos),
        ContinuousBatchingConfig(**ENGINE, num_blocks=blocks),
        **options,
    )
    assert [one.error for one in outputs.values()] == [None] * len(prompts)
    return [one.generated_tokens for one in outputs.values()]


@SECOND
@pytest.mark.parametrize("meta_every", [0, 1, 3])
def test_it_equals_generate(second_attention: str, meta_every: int) -> None:
    model, prompts = tiny_model(second_attention=second_attention), some_prompts(META)
    expected = apart(model, prompts, meta_every=meta_every)
    assert together(model, prompts, meta_every=meta_every) == expected
    assert all(len(one) == NEW for one in expected)


@parametrize([{"position_embedding": "learned"}, {"position_embedding": "none"}, {"rope_layers": [1]}])
def test_all_positions(fields: dict[str, Any]) -> None:
    model, prompts = tiny_model(**fields), some_prompts(META)
    assert together(model, prompts, meta_every=2) == apart(model, prompts, meta_every=2)


@pytest.mark.quick(second_attention=["meta"])
@SECOND
def test_more_requests_than_blocks(second_attention: str) -> None:
    """64 requests have about 200 blocks; where 12 are left, the engine takes some back, and reads them again."""
    model, prompts = tiny_model(second_attention=second_attention), some_prompts(META, tuple(range(1, 28)) * 2)
    prompts = [*prompts, *prompts[:6]][:64]
    assert together(model, prompts, blocks=12, meta_every=5) == apart(model, prompts, meta_every=5)


def test_an_end_of_text_ends_a_request() -> None:
    model, prompts = tiny_model(), some_prompts(META)
    eos = apart(model, prompts, meta_every=3)[0][5]
    expected = apart(model, prompts, meta_every=3, eos_token_id=eos)
    assert len(expected[0]) <= 6
    assert together(model, prompts, eos=eos, meta_every=3) == expected


def test_the_generation_configuration_sets_meta_every() -> None:
    model, prompts = tiny_model(), some_prompts(META)
    expected = apart(model, prompts, meta_every=3)
    model.generation_config.meta_every = 3
    assert together(model, prompts) == expected
    assert together(model, prompts, meta_every=0) == apart(tiny_model(), prompts)
    with pytest.raises(UserError, match="meta_every is -1"):
        together(model, prompts, meta_every=-1)


def test_a_model_in_half_precision() -> None:
    model, prompts = tiny_model().bfloat16(), some_prompts(META)
    assert together(model, prompts, meta_every=3) == apart(model, prompts, meta_every=3)


@parametrize([{"text_window": 4}, {"attention_scale": "log_length"}])
def test_what_pages_do_not_show_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="continuous batching does not go with"):
        tiny_model(**fields).generate_batch([[1, 2, META, 3]])


def test_the_server_of_transformers_finds_the_class() -> None:
    assert transformers.MetaGPT2ForCausalLM is MetaGPT2ForCausalLM
