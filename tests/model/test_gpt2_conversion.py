"""A GPT-2 of transformers, converted: the same function, and a second module that adds nothing at first."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from tests.model.tiny_models import pad, random_rows, randomize
from tests.numbers import ROUNDED, ROUNDED_DOUBLE


def random_gpt2(**options: Any) -> GPT2LMHeadModel:
    defaults = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 72}
    model = GPT2LMHeadModel(GPT2Config(**(defaults | {"bos_token_id": None, "eos_token_id": None} | options))).eval()
    randomize(model, seed=1)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, ROUNDED), (torch.float64, ROUNDED_DOUBLE)])
@pytest.mark.parametrize("second_attention", ["none", "meta", "causal"])
def test_converted_model_gives_the_same_logits_and_tokens(
    second_attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    gpt2 = random_gpt2().to(dtype)
    before = {name: weight.clone() for name, weight in gpt2.state_dict().items()}
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2, second_attention)
    ids, mask = pad(random_rows((15, 9, 4), meta_rate=0.0))
    ids[mask == 0] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # outside `generate`, GPT-2 counts the padding
    expected = gpt2(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    actual = model(ids, attention_mask=mask).logits[mask.bool()]
    assert expected.std() > 1  # wide enough to be a test
    assert (actual[:, :64] - expected).abs().max() < tolerance * expected.abs().max()
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if second_attention != "none":  # the new rows of the vocabulary are not text
        arguments["suppress_tokens"] = list(range(64, 128))
    generated = model.generate(ids, **arguments)
    arguments.pop("suppress_tokens", None)
    assert torch.equal(generated, gpt2.generate(ids, **arguments))
    assert all(torch.equal(weight, before[name]) for name, weight in gpt2.state_dict().items())


@pytest.mark.parametrize("second_attention", ["none", "meta"])
def test_settings_of_generation_are_kept(second_attention: str) -> None:
    gpt2 = random_gpt2(eos_token_id=2)
    gpt2.generation_config.update(eos_token_id=[2, 15], repetition_penalty=1.3, max_new_tokens=7)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2, second_attention)
    assert model.generation_config.to_diff_dict() == gpt2.generation_config.to_diff_dict()
    model.generation_config.max_new_tokens = 9
    assert gpt2.generation_config.max_new_tokens == 7


def test_plain_conversion_keeps_the_vocabulary_and_adds_no_parameter() -> None:
    gpt2 = random_gpt2(vocab_size=61)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2)
    assert model.config.vocab_size == 61
    assert model.config.meta_token_id is None
    assert model.num_parameters() == gpt2.num_parameters()
    assert not model.training


@pytest.mark.parametrize(("vocabulary", "padded"), [(61, 64), (63, 64), (64, 128), (65, 128)])
def test_the_meta_token_is_the_first_row_after_the_text(vocabulary: int, padded: int) -> None:
    gpt2 = random_gpt2(vocab_size=vocabulary)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2, "meta")
    assert model.config.vocab_size == padded
    assert model.config.meta_token_id == vocabulary
    embedding = model.get_input_embeddings().weight
    assert embedding.shape == (padded, 32)
    torch.testing.assert_close(embedding[vocabulary], gpt2.transformer.wte.weight.mean(dim=0))
    assert model.lm_head.weight is embedding


def test_the_new_module_changes_nothing_until_it_is_trained() -> None:
    gpt2 = random_gpt2(vocab_size=63)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2.train(), "meta")
    assert model.training
    ids = torch.tensor(random_rows((12, 12), meta_rate=0.5))
    control = MetaGPT2ForCausalLM.from_gpt2(gpt2, "causal")
    assert torch.equal(model.eval()(ids).logits, control.eval()(ids).logits)
    model(ids, labels=ids).loss.backward()
    assert all(layer.second_attention.out_proj.weight.grad.abs().max() > 0 for layer in model.model.layers)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "plain GPT-2"),
        ({"scale_attn_weights": False}, "plain GPT-2"),
        ({"add_cross_attention": True}, "plain GPT-2"),
        ({"tie_word_embeddings": False}, "a separate head"),
    ],
)
def test_options_that_this_family_lacks_are_refused(option: dict[str, bool], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MetaGPT2ForCausalLM.from_gpt2(random_gpt2(**option))


def test_another_kind_of_model_is_refused() -> None:
    with pytest.raises(UserError, match="a Linear cannot be converted; give transformers' GPT2LMHeadModel"):
        MetaGPT2ForCausalLM.from_gpt2(torch.nn.Linear(1, 1))
