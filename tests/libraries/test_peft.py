"""Adapters of PEFT: LoRA, prompt tuning and prefix tuning, trained, used for generation, saved and loaded."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache, encode_prompt
from metatokens.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")  # its own

ADAPTERS = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["qkv_proj", "out_proj"], r=2),
    "all linear layers": peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=2, token_dim=16, num_attention_heads=2
    ),
}


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
    torch.manual_seed(0)
    model = peft.get_peft_model(MetaGPT2ForCausalLM.from_pretrained(folder), deepcopy(ADAPTERS[name]))
    mask = torch.ones_like(ids)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.03)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    # Without a cache of its own: each id is the likeliest one after all before it.
    for length in range(ids.shape[1], out.shape[1]):
        known = out[:, :length]
        logits = model(input_ids=known, attention_mask=torch.ones_like(known)).logits[:, -1]
        logits[:, model.config.meta_token_id] = -torch.inf
        assert torch.equal(out[:, length], logits.argmax(-1))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(MetaGPT2ForCausalLM.from_pretrained(folder), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            again(input_ids=ids, attention_mask=mask).logits, model(input_ids=ids, attention_mask=mask).logits
        )


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
