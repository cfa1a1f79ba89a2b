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
from transformers import AutoTokenizer, DynamicCache

from metatokens import MetaGPT2ForCausalLM, encode_prompt, freeze_base
from metatokens.errors import UserError
from tests.gradients import far
from tests.model.tiny_models import META
from tests.numbers import ROUNDED
from tests.retrofit.architectures import error, fit, logits, retrofitted, with_meta_tokens
from tests.retrofit.forgetful import forgetful_retrofit

# Its own.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning"
)

ADAPTERS = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=3,
        num_layers=2,
        token_dim=16,
        num_attention_heads=2,
    ),
}


GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def adapt(
    fresh: Callable[[], Any], adapter: peft.PeftConfig, ids: Tensor, folder: Path
) -> set[str]:
    """Train an adapter, generate with it, save it, load it and, if it can be, merge it; returns what was trained."""
    torch.manual_seed(0)
    model = peft.get_peft_model(fresh(), deepcopy(adapter))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    fit(model, ids, steps=6, rate=0.03)
    changed = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert changed == trainable
    check_generation(model.eval(), ids)
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(fresh(), folder).eval()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = model(**inputs).logits
        torch.testing.assert_close(loaded(**inputs).logits, expected)
        if isinstance(adapter, peft.LoraConfig):
            inserted = loaded.generate(input_ids=ids, meta_every=2, **GREEDY)
            merged = loaded.merge_and_unload()
            assert far(merged(ids).logits, expected) < ROUNDED
            assert torch.equal(merged.generate(ids, meta_every=2, **GREEDY), inserted)
    return trainable


def check_generation(model: Any, ids: Tensor) -> None:
    """Check that each generated id is the likeliest one after all before it, without a cache."""
    generated = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
    for length in range(ids.shape[1], generated.shape[1]):
        text = generated[:, :length]
        logits = model(input_ids=text, attention_mask=torch.ones_like(text)).logits[:, -1]
        logits[:, model.config.meta_token_id] = -torch.inf
        assert torch.equal(generated[:, length], logits.argmax(-1))


@pytest.fixture
def ids(folder: Path) -> Tensor:
    """Two prompts with meta-tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = (
        "the cat _PAUSE_ sat on a mat _PAUSE_",
        "two dogs ran _PAUSE_ over green hills _PAUSE_",
    )
    rows = [encode_prompt(tokenizer, text, markers="_PAUSE_") for text in texts]
    shortest = min(map(len, rows))
    return torch.tensor([row[-shortest:] for row in rows])


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_an_adapter_trains_generates_and_comes_back(
    name: str, second_attention: str, small_model: Any, ids: Tensor, tmp_path: Path
) -> None:
    folder = small_model(second_attention=second_attention)
    trained = adapt(
        lambda: MetaGPT2ForCausalLM.from_pretrained(folder), ADAPTERS[name], ids, tmp_path
    )
    of_base = [weight for weight in trained if "base_layer" in weight]
    assert of_base == []


LINEAR = {"target_modules": "all-linear", "exclude_modules": r".*meta_attention.*"}


# transformers' GPT-2 has no linear layers, only what PEFT's default for it names.
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("gpt2", {}),
        ("llama", LINEAR),
        ("phi", {}),
        ("gemma2", LINEAR),
    ],
)
def test_an_adapter_of_a_retrofitted_model(
    name: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    fresh = partial(retrofitted, name, freeze=True)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, modules_to_save=["meta_attention", "meta_token"], **choices
    )
    ids = with_meta_tokens()
    untrained = peft.get_peft_model(fresh(), deepcopy(lora)).eval()
    trained = adapt(fresh, lora, ids, tmp_path)
    adapters = {weight for weight in trained if "lora_" in weight}
    added = {weight for weight in trained if "meta_" in weight}
    assert error(logits(untrained, ids), logits(fresh(), ids)) == 0.0
    assert adapters
    assert added
    assert adapters ^ added == trained


def adapted(folder: Path, name: str) -> peft.PeftModel:
    """A model with an untrained adapter."""
    torch.manual_seed(0)
    return peft.get_peft_model(
        MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS[name])
    ).eval()


def test_a_prefix_is_seen_by_causal_attention_and_not_by_the_second_module(
    folder: Path, ids: Tensor
) -> None:
    model, base = adapted(folder, "prefix"), MetaGPT2ForCausalLM.from_pretrained(folder).eval()
    prefix = model.get_prompt(batch_size=2)
    cache = DynamicCache(config=base.config)  # by hand: its first store is the prefix
    for number, layer in enumerate(prefix.layers):
        cache.update(layer.keys.clone(), layer.values, number)
    mask = torch.ones(2, 3 + ids.shape[1])
    tuned = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    by_hand = base(ids, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(by_hand, tuned)
    assert (tuned - base(ids).logits).abs().max() > 1e-3


def test_meta_tokens_are_not_inserted_behind_learned_prompts(folder: Path, ids: Tensor) -> None:
    model = adapted(folder, "prompt")
    with pytest.raises(UserError, match="cannot be inserted after learned prompts"):
        model.generate(input_ids=ids, max_new_tokens=6, meta_every=2, pad_token_id=0)


def test_a_long_prompt_behind_a_learned_one_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("metatokens.model.generation.READ_AT_ONCE", 8)
    model = peft.get_peft_model(forgetful_retrofit("llama"), deepcopy(ADAPTERS["prompt"]))
    check_generation(model.eval(), torch.randint(3, META, (1, 20)))


def test_adapters_decide_what_is_trained() -> None:
    model = peft.get_peft_model(retrofitted("llama"), deepcopy(ADAPTERS["lora"]))
    with pytest.raises(UserError, match="call freeze_base before they are added"):
        freeze_base(model)


def test_a_model_is_not_named_after_its_adapters(tmp_path: Path) -> None:
    model = retrofitted("llama")
    model.save_pretrained(tmp_path / "model")
    try:
        model.add_adapter(deepcopy(ADAPTERS["lora"]))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers refuses this PEFT: {error}")
    model.save_pretrained(tmp_path / "adapters")

    assert model.config.name_or_path == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["prompt", "prefix"])
def test_learned_prompts_need_a_cache(name: str, folder: Path, ids: Tensor) -> None:
    with pytest.raises(UserError, match="with use_cache=True"):
        adapted(folder, name).generate(input_ids=ids, use_cache=False, **GREEDY)
