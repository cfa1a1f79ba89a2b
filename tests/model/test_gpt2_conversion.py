"""A GPT-2 of transformers, converted: the same function, and a second module that adds nothing at first."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from tests.model.tiny_models import SECOND, pad, random_rows, randomize
from tests.numbers import ROUNDED, ROUNDED_DOUBLE


def random_gpt2(**options: Any) -> GPT2LMHeadModel:
    sizes = {
        "vocab_size": 64,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 72,
    }
    model = GPT2LMHeadModel(
        GPT2Config(**sizes | {"bos_token_id": None, "eos_token_id": None} | options)
    ).eval()
    randomize(model, seed=1)
    return model


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, ROUNDED), (torch.float64, ROUNDED_DOUBLE)]
)
@SECOND
def test_a_converted_model_gives_the_same_logits_and_tokens(
    second_attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    gpt2 = random_gpt2().to(dtype)
    before = {name: weight.clone() for name, weight in gpt2.state_dict().items()}
    ids, mask = pad(random_rows((15, 9, 4), meta_rate=0.0))
    ids[mask == 0] = 0
    # Outside `generate`, GPT-2 counts the padding.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = gpt2(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    assert expected.std() > 1  # wide enough to be a test

    model = MetaGPT2ForCausalLM.from_gpt2(gpt2, second_attention)

    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    assert (logits[:, :64] - expected).abs().max() < tolerance * expected.abs().max()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    new_rows = None if second_attention == "none" else list(range(64, 128))  # which are no text
    generated = model.generate(ids, suppress_tokens=new_rows, **options)
    assert torch.equal(generated, gpt2.generate(ids, **options))
    for name, weight in gpt2.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_settings_of_generation_are_copied() -> None:
    gpt2 = random_gpt2(eos_token_id=2)
    gpt2.generation_config.update(eos_token_id=[2, 15], repetition_penalty=1.3, max_new_tokens=7)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2, "meta")

    assert model.generation_config.to_diff_dict() == gpt2.generation_config.to_diff_dict()
    model.generation_config.max_new_tokens = 9
    assert gpt2.generation_config.max_new_tokens == 7


def test_plain_conversion_keeps_the_vocabulary_and_adds_no_parameter() -> None:
    gpt2 = random_gpt2(vocab_size=61)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2)
    assert (model.config.vocab_size, model.config.meta_token_id) == (61, None)
    assert model.num_parameters() == gpt2.num_parameters()


@pytest.mark.parametrize(("vocabulary", "padded"), [(63, 64), (64, 128)])
def test_the_meta_token_is_the_first_row_after_the_text(vocabulary: int, padded: int) -> None:
    gpt2 = random_gpt2(vocab_size=vocabulary)
    model = MetaGPT2ForCausalLM.from_gpt2(gpt2, "meta")

    assert (model.config.vocab_size, model.config.meta_token_id) == (padded, vocabulary)
    embedding = model.get_input_embeddings().weight
    assert embedding.shape == (padded, 32)
    torch.testing.assert_close(embedding[vocabulary], gpt2.transformer.wte.weight.mean(dim=0))
    assert model.lm_head.weight is embedding


def test_the_new_module_changes_nothing_until_it_is_trained() -> None:
    gpt2 = random_gpt2(vocab_size=63).train()
    model, control = (MetaGPT2ForCausalLM.from_gpt2(gpt2, second) for second in ("meta", "causal"))

    assert model.training
    ids = torch.tensor(random_rows((12, 12), meta_rate=0.5))
    assert torch.equal(model.eval()(ids).logits, control.eval()(ids).logits)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        assert layer.second_attention.out_proj.weight.grad.abs().max() > 0


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
