"""Observations of decoders of many architectures, against the states and weights that the models return."""

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metatokens import add_meta_attention
from metatokens.analysis import rate_distortion
from metatokens.analysis.observation import AttentionInputs, PromptIds, observe
from metatokens.analysis.rate_distortion import final_states
from metatokens.analysis.residual import residual
from metatokens.analysis.sharpness import sharpness
from metatokens.errors import UserError
from metatokens.model.interventions import NoEmbedding, intervene
from metatokens.records import About, Measurement
from tests.analysis.recording_oracle import bare_example
from tests.retrofit.architectures import (
    ARCHITECTURES,
    META,
    ROUNDED,
    ROUNDED_WEIGHT,
    base,
    error,
    logits,
    retrofitted,
    train_like,
    with_meta_tokens,
)

# These compute attention without a function that transformers lets a caller choose; two of them before its 5.24.
COMPUTED_INSIDE = {"bloom", "falcon", "gpt_neo", "mpt", "xglm"}
if Version(transformers.__version__) < Version("5.24"):
    COMPUTED_INSIDE |= {"codegen", "gptj"}
SINKS = {"gpt_oss"}


def prompt() -> PromptIds:
    """A prompt whose last meta-token is not its last token."""
    return PromptIds.of(bare_example(with_meta_tokens()[0].tolist()), META)


def weights(inputs: AttentionInputs) -> torch.Tensor:
    """(heads, rows, rows)."""
    return inputs.logits(torch.arange(len(inputs.positions))).softmax(dim=-1)


@pytest.mark.quick(name=["gemma3_text", "gpt2", "gpt_neox", "llama", "mixtral", "opt", "qwen3_next"])
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - COMPUTED_INSIDE - SINKS))
def test_states_weights_and_logits_are_those_that_the_model_returns(name: str) -> None:
    model, asked = retrofitted(name), prompt()
    seen = observe(model, asked.ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(asked.ids[None], output_attentions=True, output_hidden_states=True, use_cache=False)
    assert error(seen.logits[:, :META], out.logits[0, :, :META]) < ROUNDED
    layers = model.config.num_hidden_layers
    assert len(seen.states) == layers + 1
    for state, expected in zip(seen.states[:-1], out.hidden_states, strict=False):  # the last one has passed a norm
        assert error(state, expected[0]) < ROUNDED
    causal = [inputs for (module, _), inputs in seen.attention.items() if module == "attention"]
    returned = [one for one in out.attentions if one is not None]
    assert len(causal) == len(returned) > 0
    for inputs, expected in zip(causal, returned, strict=True):
        assert error(weights(inputs), expected[0]) < ROUNDED_WEIGHT
    assert {layer for module, layer in seen.attention if module == "second_attention"} == set(range(layers))


@pytest.mark.parametrize("name", sorted(COMPUTED_INSIDE | SINKS))
def test_what_cannot_be_read_is_refused_and_the_model_stays_as_it_was(name: str) -> None:
    model, before = retrofitted(name), logits(retrofitted(name), with_meta_tokens())
    with pytest.raises(UserError, match="has sinks" if name in SINKS else "computes its attention itself"):
        observe(model, prompt().ids)
    assert torch.equal(logits(model, with_meta_tokens()), before)


def test_the_model_stays_as_it_was() -> None:
    model, before = retrofitted("llama").train(), logits(retrofitted("llama"), with_meta_tokens())
    known = set(ALL_ATTENTION_FUNCTIONS)
    observe(model, prompt().ids)
    assert not model.training
    assert set(ALL_ATTENTION_FUNCTIONS) == known
    assert torch.equal(logits(model, with_meta_tokens()), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "opt", "gemma2"])
def test_the_final_states_are_what_the_head_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_distortion, "TOKENS_A_BATCH", 48)
    model, heard = retrofitted(name), []
    rows = [with_meta_tokens()[0, :length].tolist() for length in (24, 14, 19)]
    states = final_states(model, [bare_example(row) for row in rows])
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: heard.append(args[0][0]))
    for number, row in enumerate(rows):
        logits(model, torch.tensor([row]))
        last = max(i for i, one in enumerate(row) if one == META)
        assert error(states["meta"][number], heard[-1][last]) < ROUNDED
        assert error(states["text"][number], heard[-1][last - 1]) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom"])
def test_no_embed_is_a_row_of_zeros(name: str) -> None:
    model, ids = retrofitted(name), with_meta_tokens()
    row = model.get_input_embeddings().meta_token.weight
    with torch.no_grad():
        row.normal_()
    plain = logits(model, ids)
    with intervene(model, NoEmbedding()):
        without = logits(model, ids)
    with torch.no_grad():
        row.zero_()
    assert torch.equal(without, logits(model, ids))
    assert error(plain, without) > 0.01


@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_are_observed_with_their_model() -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model, plain = peft.get_peft_model(retrofitted("llama"), lora), retrofitted("llama")
    seen = observe(model, prompt().ids)
    with torch.no_grad():
        expected = model(prompt().ids[None], use_cache=False).logits[0]
    assert error(seen.logits, expected) < ROUNDED
    assert error(seen.logits, observe(plain, prompt().ids).logits) > 1e-3


def select(measurements: list[Measurement], metric: str, **fields: object) -> list[Measurement]:
    found = [one for one in measurements if one.metric == metric]
    return [one for one in found if all(getattr(one, key) == value for key, value in fields.items())]


def windowed() -> PreTrainedModel:
    """A Mistral with a window of 8 tokens, and meta-attention in its second block only."""
    options = {"meta_token_id": META, "heads": 2, "head_size": 16, "layers": [1]}
    return train_like(add_meta_attention(base("mistral"), **options))


def test_keys_behind_a_window_are_not_counted() -> None:
    ids = with_meta_tokens()[0].tolist()
    measured = sharpness(windowed(), [bare_example(ids)], About(model="mistral"))
    metas = [i for i, one in enumerate(ids) if one == META]
    pairs = [(row, meta) for row in range(1, len(ids)) for meta in metas if row - 8 < meta <= row]
    (logit,) = select(measured, "attention_logit_change", module="attention", layer=2, head=1)
    assert logit.n == len(pairs) < sum(row >= meta for row in range(len(ids)) for meta in metas)
    (rows,) = select(measured, "attention_entropy_change", module="attention", layer=2, head=1)
    assert rows.n == len({row for row, _ in pairs})
    second = [one for one in measured if one.module == "second_attention"]
    assert {one.layer for one in second} == {1, None}


def test_what_spread_attention_would_give_is_said_of_each_module() -> None:
    """Including a module that the first block lacks."""
    measured = residual(windowed(), [bare_example(with_meta_tokens()[0].tolist())], About(model="mistral"))
    uniform = select(measured, "attention_weight_if_uniform")
    assert {one.module for one in uniform} == {"attention", "second_attention"}
    earlier = select(measured, "attention_weight", module="second_attention", keys="earlier_meta")
    assert {one.layer for one in earlier} == {1}
    assert all(one.value is not None and 0 < one.value < 1 for one in earlier)
