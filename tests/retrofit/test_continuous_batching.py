"""`generate_batch` of retrofitted models, and of one that was saved, as `transformers serve` calls it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from metatokens import add_meta_attention
from metatokens.errors import UserError
from tests.model.test_continuous_batching import apart, some_prompts, together
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import ARCHITECTURES, META, fails_in, retrofitted, train_like

NAMES = (
    "cohere2", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "granite", "llama", "mixtral", "olmo2", "phi", "qwen3",
    "smollm3", "starcoder2",
    fails_in("5.24.0", "gpt_neox", why="it updates a cache without the engine's arguments: a TypeError, no text"),
    fails_in("5.24.0", "opt", why="it asks the engine's cache for its length: an AttributeError, no text"),
)  # fmt: skip


@pytest.mark.quick(name=["gemma3_text", "gpt2", "llama"])
@pytest.mark.parametrize("name", NAMES)
def test_it_equals_generate(name: str) -> None:
    model, prompts = retrofitted(name), some_prompts(META)
    assert together(model, prompts, blocks=24, meta_every=3) == apart(model, prompts, meta_every=3, eos_token_id=None)


def test_a_saved_model(tmp_path: Path) -> None:
    model, prompts = retrofitted("llama"), some_prompts(META)
    model.generation_config.meta_every = 4
    model.save_pretrained(tmp_path)
    architecture = getattr(transformers, AutoConfig.from_pretrained(tmp_path).architectures[0])
    again = architecture.from_pretrained(tmp_path, eos_token_id=None).eval()
    assert together(again, prompts) == apart(model, prompts, meta_every=4, eos_token_id=None)


def test_heads_that_need_several_layers() -> None:
    plain = LlamaForCausalLM(LlamaConfig(**ARCHITECTURES["llama"] | {"num_key_value_heads": 1}))
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16)).eval()
    prompts = some_prompts(META)
    options = {"meta_every": 2, "eos_token_id": None}
    expected = apart(model, prompts, **options)
    assert together(model, prompts, meta_every=2) == expected
    # A cache of a fixed size has one layer for each module, also after an engine had several.
    assert apart(model, prompts, cache_implementation="static", disable_compile=True, **options) == expected


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("bloom", "whose attention reads no pages"), ("mistral", "needs a block without a sliding window")],
)
def test_bases_that_an_engine_would_get_wrong_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        retrofitted(name).generate_batch([[1, 2, META, 3]])


@pytest.mark.parametrize("make", [tiny_model, partial(retrofitted, "llama")])
def test_other_engines_than_that_of_transformers_are_refused(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(UserError, match="does not run in vLLM or SGLang"):
        make()(torch.tensor([[1, 2, 3]]), use_cache=False, attention_instances={})
