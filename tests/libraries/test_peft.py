"""Adapters of PEFT: LoRA, prompt tuning and prefix tuning, trained, used for generation, saved and loaded."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache, encode_prompt
from metatokens.errors import UserError
from tests.gradients import far
from tests.numbers import ROUNDED
from tests.retrofit.architectures import error, fit, logits, retrofitted, with_meta_tokens

pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")  # its own

ADAPTERS = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["qkv_proj", "out_proj"], r=2),
    "all linear layers": peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=2, token_dim=16, num_attention_heads=2
    ),
}


LINEAR = {"target_modules": "all-linear", "exclude_modules": r".*meta_attention.*"}


def adapt(fresh: Callable[[], Any], adapter: peft.PeftConfig, ids: Tensor, folder: Path) -> set[str]:
    """Train an adapter, generate with it, save it, load it and, if it can be, merge it; returns what was trained."""
    torch.manual_seed(0)
    model = peft.get_peft_model(fresh(), deepcopy(adapter))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    mask = torch.ones_like(ids)
    fit(model, ids, steps=6, rate=0.03)
    assert {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])} == trained
    model.eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.generate(input_ids=ids, attention_mask=mask, **options)
    # Without a cache: each id is the likeliest one after all before it.
    for length in range(ids.shape[1], out.shape[1]):
        known = out[:, :length]
        found = model(input_ids=known, attention_mask=torch.ones_like(known)).logits[:, -1]
        found[:, model.config.meta_token_id] = -torch.inf
        assert torch.equal(out[:, length], found.argmax(-1))
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(fresh(), folder).eval()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(again(input_ids=ids, attention_mask=mask).logits, expected)
        if isinstance(adapter, peft.LoraConfig):
            inserted = again.generate(input_ids=ids, meta_every=2, **options)
            merged = again.merge_and_unload()
            assert far(merged(ids).logits, expected) < ROUNDED
            assert torch.equal(merged.generate(ids, meta_every=2, **options), inserted)
    return trained


@pytest.fixture
def ids(folder: Path) -> Tensor:
    """Two prompts with meta-tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ("the cat _PAUSE_ sat on a mat _PAUSE_", "two dogs ran _PAUSE_ over green hills _PAUSE_")
    rows = [encode_prompt(tokenizer, text, markers="_PAUSE_") for text in texts]
    shortest = min(map(len, rows))
    return torch.tensor([row[-shortest:] for row in rows])


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_an_adapter_trains_generates_and_comes_back(
    name: str, second_attention: str, small_model: Any, ids: Tensor, tmp_path: Path
) -> None:
    folder = small_model(second_attention=second_attention)
    trained = adapt(lambda: MetaGPT2ForCausalLM.from_pretrained(folder), ADAPTERS[name], ids, tmp_path)
    assert not any("base_layer" in one for one in trained)


# transformers' GPT-2 has no linear layers, only what PEFT's default for it names.
@pytest.mark.parametrize(
    ("name", "choices"), [("gpt2", {}), *((name, one) for name in ("llama", "phi", "gemma2") for one in ({}, LINEAR))]
)
def test_an_adapter_of_a_retrofitted_model(name: str, choices: dict[str, Any], tmp_path: Path) -> None:
    fresh = partial(retrofitted, name, freeze=True)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, modules_to_save=["meta_attention", "meta_token"], **choices)
    ids = with_meta_tokens()
    assert error(logits(peft.get_peft_model(fresh(), deepcopy(lora)).eval(), ids), logits(fresh(), ids)) == 0.0
    trained = adapt(fresh, lora, ids, tmp_path)
    added = {"meta_attention" in one or "meta_token" in one for one in trained}
    assert added == {True, False}
    assert all(("lora_" in one) != ("meta_" in one) for one in trained)


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_learned_prompts_of_a_retrofitted_model(config: type[peft.PeftConfig], tmp_path: Path) -> None:
    prompts = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trained = adapt(partial(retrofitted, "llama", freeze=True), prompts, with_meta_tokens(), tmp_path)
    assert all("prompt_encoder" in name for name in trained)


@pytest.mark.parametrize("name", ["prompt", "prefix"])
def test_learned_prompts_leave_the_meta_tokens_where_they_are(name: str, folder: Path, ids: Tensor) -> None:
    base = MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    caches = []
    base.model.register_forward_hook(lambda module, args, output: caches.append(output.past_key_values))
    model = peft.get_peft_model(base, deepcopy(ADAPTERS[name])).eval()
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    expected = [(row == base.config.meta_token_id).nonzero()[:, 0] + 3 for row in ids]
    assert [row[row >= 0].tolist() for row in caches[-1].layers[0].second.slots] == [row.tolist() for row in expected]


def test_a_prefix_is_seen_by_causal_attention_and_not_by_the_second_module(folder: Path, ids: Tensor) -> None:
    base = MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    model = peft.get_peft_model(base, deepcopy(ADAPTERS["prefix"])).eval()
    prefix = model.get_prompt(batch_size=2)
    keys = [layer.keys for layer in prefix.layers]
    tuned = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    # By hand: a cache whose first store is the prefix.
    cache = MetaTokenCache(base.config)
    for number, layer in enumerate(prefix.layers):
        cache.update(keys[number], layer.values, number)
    mask = torch.ones(2, 3 + ids.shape[1])
    torch.testing.assert_close(base(ids, attention_mask=mask, past_key_values=cache).logits, tuned)
    assert (tuned - base(ids).logits).abs().max() > 1e-3


def test_meta_tokens_are_not_inserted_behind_learned_prompts(folder: Path, ids: Tensor) -> None:
    model = peft.get_peft_model(MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS["prompt"]))
    with pytest.raises(UserError, match="cannot be inserted after learned prompts"):
        model.generate(input_ids=ids, max_new_tokens=6, meta_every=2, pad_token_id=0)
    lora = peft.get_peft_model(MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS["lora"]))
    out = lora.generate(input_ids=ids, max_new_tokens=6, meta_every=2, pad_token_id=0, do_sample=False)
    assert out.shape[1] == ids.shape[1] + 6


@pytest.mark.parametrize("name", ["prompt", "prefix"])
def test_a_peft_that_does_not_find_the_cache_is_refused(name: str, folder: Path, ids: Tensor) -> None:
    model = peft.get_peft_model(MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS[name]))
    prepare = model.base_model_prepare_inputs_for_generation

    def under_another_name(*args: Any, **kwargs: Any) -> dict[str, Any]:
        step = prepare(*args, **kwargs)
        return step | {"past_key_values": None, "renamed": step["past_key_values"]}

    model.base_model_prepare_inputs_for_generation = under_another_name
    with pytest.raises(UserError, match="does not find the model's cache"):
        model.generate(input_ids=ids, max_new_tokens=2, pad_token_id=0)


def test_without_a_cache_prompts_are_learned_embeddings_and_no_prefix(folder: Path, ids: Tensor) -> None:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompts = peft.get_peft_model(MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS["prompt"])).eval()
    out = prompts.generate(input_ids=ids, use_cache=False, **options)
    assert torch.equal(out, prompts.generate(input_ids=ids, **options))
    prefix = peft.get_peft_model(MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS["prefix"]))
    with pytest.raises(UserError, match="needs use_cache=True"):
        prefix.generate(input_ids=ids, use_cache=False, **options)
