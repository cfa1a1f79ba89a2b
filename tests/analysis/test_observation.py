"""Observations of decoders of many architectures, against the states and weights that the models return."""

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metatokens import add_meta_attention
from metatokens.analysis import rate_distortion
from metatokens.analysis.observation import PromptIds, observe
from metatokens.analysis.rate_distortion import final_states
from metatokens.analysis.residual import residual
from metatokens.analysis.sharpness import sharpness
from metatokens.errors import UserError
from metatokens.records import About
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
from tests.retrofit.full_heads import expected_logits, masks_of_heads, with_full_heads

# These compute attention without a function that transformers lets a caller choose; two of them before its 5.24.
COMPUTED_INSIDE = {"bloom", "falcon", "gpt_neo", "mpt", "xglm"}
if Version(transformers.__version__) < Version("5.24"):
    COMPUTED_INSIDE |= {"codegen", "gptj"}
SINKS = {"gpt_oss"}


def prompt():
    """A prompt whose last meta-token is not its last token."""
    return PromptIds.of(bare_example(with_meta_tokens()[0].tolist()), META)


def weights_of(inputs):
    """(heads, rows, rows)."""
    rows = torch.arange(len(inputs.positions))
    return inputs.logits(rows).softmax(dim=-1)


@pytest.mark.quick(
    name=["gemma3_text", "gpt2", "gpt_neox", "llama", "mixtral", "opt", "qwen3_next"]
)
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - COMPUTED_INSIDE - SINKS))
def test_states_weights_and_logits_are_those_that_the_model_returns(name):
    model, ids = retrofitted(name), prompt().ids

    seen = observe(model, ids)

    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(
            ids[None],
            output_attentions=True,
            output_hidden_states=True,
            use_cache=False,
        )
    assert error(seen.logits[:, :META], out.logits[0, :, :META]) < ROUNDED
    assert len(seen.states) == len(out.hidden_states)
    # The last one has passed a norm.
    for state, expected in zip(seen.states[:-1], out.hidden_states, strict=False):
        assert error(state, expected[0]) < ROUNDED
    first = [inputs for (module, _), inputs in seen.attention.items() if module == "attention"]
    returned = [weights for weights in out.attentions if weights is not None]
    assert returned
    for inputs, expected in zip(first, returned, strict=True):
        assert error(weights_of(inputs), expected[0]) < ROUNDED_WEIGHT
    second = [layer for module, layer in seen.attention if module == "second_attention"]
    assert second == list(range(model.config.num_hidden_layers))


@pytest.mark.parametrize("name", sorted(COMPUTED_INSIDE | SINKS))
def test_what_cannot_be_read_is_refused_and_the_model_stays_as_it_was(name):
    model = retrofitted(name)
    before = logits(model, with_meta_tokens())

    with pytest.raises(
        UserError,
        match="has sinks" if name in SINKS else "computes its attention itself",
    ):
        observe(model, prompt().ids)

    assert torch.equal(logits(model, with_meta_tokens()), before)


def test_the_model_stays_as_it_was():
    model = retrofitted("llama").train()
    before = logits(retrofitted("llama"), with_meta_tokens())
    functions = set(ALL_ATTENTION_FUNCTIONS)

    observe(model, prompt().ids)

    assert not model.training
    assert set(ALL_ATTENTION_FUNCTIONS) == functions
    assert torch.equal(logits(model, with_meta_tokens()), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "opt", "gemma2"])
def test_the_final_states_are_what_the_head_reads(name, monkeypatch):
    monkeypatch.setattr(rate_distortion, "TOKENS_A_BATCH", 48)
    model = retrofitted(name)
    ids = with_meta_tokens()[0]
    rows = [ids[:length].tolist() for length in (24, 14, 19)]

    states = final_states(model, [bare_example(row) for row in rows])

    read_by_head = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, arguments: read_by_head.append(arguments[0][0]))
    for number, row in enumerate(rows):
        logits(model, torch.tensor([row]))
        last_meta = len(row) - 1 - row[::-1].index(META)
        assert error(states["meta"][number], read_by_head[-1][last_meta]) < ROUNDED
        assert error(states["text"][number], read_by_head[-1][last_meta - 1]) < ROUNDED


@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_are_observed_with_their_model():
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model, ids = peft.get_peft_model(retrofitted("llama"), lora), prompt().ids

    seen = observe(model, ids)

    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    without = observe(retrofitted("llama"), ids)
    assert error(seen.logits, expected) < ROUNDED
    assert error(seen.logits, without.logits) > 1e-3


def test_heads_that_forget_are_told_from_those_that_do_not():
    row = with_meta_tokens()[0].tolist()
    model = with_full_heads("llama")

    seen = observe(model, torch.tensor(row))

    assert error(seen.logits[:, :META], expected_logits("llama", row)[:, :META]) < ROUNDED
    for block, masks in enumerate(masks_of_heads(model, row)):
        sees = weights_of(seen.attention["attention", block]) > 0
        assert torch.equal(sees, masks[0].expand_as(sees))
    with torch.no_grad():
        logits = model(torch.tensor([row]), use_cache=False).logits[0]
    assert error(seen.logits[:, :META], logits[:, :META]) < ROUNDED


@pytest.fixture
def windowed():
    """A Mistral with a window of 8 tokens, and meta-attention in its second block only."""
    options = {"meta_token_id": META, "heads": 2, "head_size": 16, "layers": [1]}
    return train_like(add_meta_attention(base("mistral"), **options))


def test_keys_behind_a_window_are_not_counted(windowed):
    ids = with_meta_tokens()[0].tolist()
    in_window, rows_with_keys, in_sight = 0, set(), 0
    for row in range(1, len(ids)):
        for key in range(row + 1):
            if ids[key] == META:
                in_sight += 1
                if row - 8 < key:
                    in_window += 1
                    rows_with_keys.add(row)

    measurements = sharpness(windowed, [bare_example(ids)], About(model="mistral"))

    heads = windowed.config.num_hidden_layers * windowed.config.num_attention_heads
    counts = {
        measurement.metric: measurement.n
        for measurement in measurements
        if measurement.module == "attention"
    }
    assert in_window < in_sight
    assert counts["attention_logit_change"] == heads * in_window
    assert counts["attention_entropy_change"] == heads * len(rows_with_keys)


def test_a_module_that_the_first_block_lacks_is_measured(windowed):
    example = bare_example(with_meta_tokens()[0].tolist())

    measurements = residual(windowed, [example], About(model="mistral"))

    uniform = {line.module for line in measurements if line.metric == "attention_weight_if_uniform"}
    layers = set()
    for line in measurements:
        if (line.metric, line.module, line.keys) == (
            "attention_weight",
            "second_attention",
            "earlier_meta",
        ):
            layers.add(line.layer)
            assert 0 < line.value < 1
    assert uniform == {"attention", "second_attention"}
    assert layers == {1}


def test_even_attention_is_over_the_keys_that_a_window_shows(windowed):
    ids = with_meta_tokens()[0].tolist()
    final = max(position for position, token in enumerate(ids) if token == META)
    seen = range(max(0, final - 7), final + 1)
    earlier = [position for position in seen if ids[position] == META and position < final]

    measurements = residual(windowed, [bare_example(ids)], About(model="mistral"))

    even = {
        line.keys: line.value
        for line in measurements
        if (line.metric, line.module) == ("attention_weight_if_uniform", "attention")
    }
    assert sum(even.values()) == pytest.approx(1)
    assert even["itself"] == pytest.approx(1 / len(seen))
    assert even["earlier_meta"] == pytest.approx(len(earlier) / len(seen))
    assert len(seen) < final
