"""`generate_batch` of transformers, for both callers, against `generate`, one prompt after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from tests.model.tiny_models import SECOND_ATTENTIONS
from tests.retrofit.architectures import META, fails_in, retrofitted
from tests.retrofit.callers import SETTINGS, model_of, shared_model_of

NEW = 12
# Prompts of more than 32 tokens are read in pieces.
ENGINE = {"page_size": 8, "max_batch_tokens": 32}
BOTH_CALLERS = pytest.mark.parametrize("caller", ["rope-meta", "llama"])
RETROFITS = (
    "cohere2", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "granite", "llama", "mixtral", "olmo2", "phi", "qwen3",
    "smollm3", "starcoder2",
    fails_in("5.24.0", "gpt_neox", why="it updates a cache without the engine's arguments: a TypeError, no text"),
    fails_in("5.24.0", "opt", why="it asks the engine's cache for its length: an AttributeError, no text"),
)  # fmt: skip
WITHOUT_SCALE = [name for name in SETTINGS if not name.startswith("log_length")]


def prompts_of(lengths: tuple[int, ...] = (5, 9, 17, 28, 3, 26)) -> list[list[int]]:
    """Prompts with meta-tokens, the last three with a beginning in common, and one without any."""
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for length in lengths:
        ids = torch.randint(1, META, (length,), generator=generator)
        ids[2::4] = META
        prompts.append(ids.tolist())
    beginning = max(prompts, key=len)[:24]
    return [*prompts, [7, 8, 9], [*beginning, 5, META, 6], [*beginning, 4], beginning]


PROMPTS = prompts_of()


def apart(
    model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **options: Any
) -> list[list[int]]:
    """What `generate` gives for each prompt."""
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    } | options
    rows = [(prompt, model.generate(torch.tensor([prompt]), **options)[0]) for prompt in prompts]
    return [row[len(prompt) :].tolist() for prompt, row in rows]


def together(
    model: PreTrainedModel,
    prompts: list[list[int]] = PROMPTS,
    blocks: int = 24,
    eos: int = -1,
    **options: Any,
) -> list[list[int]]:
    """What `generate_batch` gives for all prompts."""
    outputs = model.generate_batch(
        prompts,
        GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=eos),
        ContinuousBatchingConfig(**ENGINE, num_blocks=blocks),
        **options,
    )
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.quick(
    caller=["learned-causal", "none-meta", "rope-none", "gemma3_text", "gpt2", "llama"]
)
@pytest.mark.parametrize("meta_every", [0, 1, 3])
@pytest.mark.parametrize("caller", [*WITHOUT_SCALE, *RETROFITS])
def test_it_equals_generate(caller: str, meta_every: int) -> None:
    model = model_of(caller)
    expected = apart(model, meta_every=meta_every)
    assert together(model, meta_every=meta_every) == expected
    assert {len(text) for text in expected} == {NEW}


@pytest.mark.quick(caller=["rope-meta"])
@pytest.mark.parametrize("caller", [f"rope-{second}" for second in SECOND_ATTENTIONS])
def test_more_requests_than_blocks(caller: str) -> None:
    """64 requests have about 200 blocks; where 12 are left, the engine takes some back, and reads them again."""
    model, prompts = model_of(caller), prompts_of(tuple(range(1, 28)) * 2)
    prompts = [*prompts, *prompts[:6]][:64]
    assert together(model, prompts, blocks=12, meta_every=5) == apart(model, prompts, meta_every=5)


@BOTH_CALLERS
def test_an_end_of_text_ends_a_request(caller: str) -> None:
    model = model_of(caller)
    eos = apart(model, meta_every=3)[0][5]
    expected = apart(model, meta_every=3, eos_token_id=eos)

    assert len(expected[0]) <= 6
    assert together(model, eos=eos, meta_every=3) == expected


@BOTH_CALLERS
def test_the_generation_configuration_sets_meta_every(caller: str) -> None:
    model = model_of(caller)
    never, every_third = (apart(model, meta_every=every) for every in (0, 3))
    model.generation_config.meta_every = 3

    assert together(model) == every_third
    assert together(model, meta_every=0) == never
    with pytest.raises(UserError, match="meta_every is -1"):
        together(model, meta_every=-1)


def test_a_saved_model(tmp_path: Path) -> None:
    """As `transformers serve` loads it, by the name of its class."""
    model = retrofitted("llama")
    model.generation_config.meta_every = 4
    model.save_pretrained(tmp_path)
    saved_class = getattr(transformers, AutoConfig.from_pretrained(tmp_path).architectures[0])
    loaded = saved_class.from_pretrained(tmp_path, eos_token_id=None).eval()

    assert together(loaded) == apart(model, meta_every=4)
    assert transformers.MetaGPT2ForCausalLM is MetaGPT2ForCausalLM


def test_heads_that_need_several_layers() -> None:
    model = retrofitted("llama", num_key_value_heads=1)
    expected = apart(model, meta_every=2)

    assert together(model, meta_every=2) == expected
    # A cache of a fixed size has one layer for each module, also after an engine had several.
    assert (
        apart(model, meta_every=2, cache_implementation="static", disable_compile=True) == expected
    )


@pytest.mark.parametrize(
    ("caller", "fields", "complaint"),
    [
        ("rope-meta", {"text_window": 4}, "continuous batching does not go with"),
        ("log_length-none-meta", {}, "continuous batching does not go with"),
        ("bloom", {}, "whose attention reads no pages"),
        ("mistral", {}, "needs a block without a sliding window"),
    ],
)
def test_what_an_engine_would_get_wrong_is_refused(
    caller: str, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        model_of(caller, **fields).generate_batch([[1, 2, META, 3]])


@BOTH_CALLERS
def test_other_engines_than_that_of_transformers_are_refused(caller: str) -> None:
    with pytest.raises(UserError, match="does not run in vLLM or SGLang"):
        shared_model_of(caller)(torch.tensor([[1, 2, 3]]), use_cache=False, attention_instances={})
