"""Activations by name, against an independent dense recomputation and the models' own outputs."""

import math

import pytest
import torch

from metatokens import run_with_cache
from metatokens.errors import UserError
from tests.analysis.recording_oracle import RecordingOracle
from tests.model.tiny_models import META, tiny_model
from tests.retrofit.architectures import (
    ROUNDED,
    ROUNDED_WEIGHT,
    error,
    retrofitted,
    with_meta_tokens,
)

IDS = torch.tensor([3, META, 1, 4, META, 1, 5, META, 2])
METAS = [1, 4, 7]


@pytest.mark.parametrize("second", ["none", "meta", "causal"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_patterns_and_states_are_those_of_the_dense_recomputation(second, position):
    model = tiny_model(second_attention=second, position_embedding=position)
    oracle = RecordingOracle(model)
    expected = oracle.logits(IDS).detach()
    last = model.config.num_hidden_layers - 1

    logits, cache = run_with_cache(model, IDS)

    assert error(logits[:, :META], expected[:, :META]) < ROUNDED
    for layer, states in enumerate(oracle.states[:-1]):
        assert error(cache[f"blocks.{layer}.resid_pre"], states) < ROUNDED
    assert error(cache[f"blocks.{last}.resid_post"], oracle.states[-1]) < ROUNDED
    assert oracle.scores
    for (module, layer), scores in oracle.scores.items():
        name = f"blocks.{layer}.{module}"
        rows = METAS if (second, module) == ("meta", "second_attention") else list(range(9))
        scores_of_rows = scores[:, rows][:, :, rows]
        assert cache[f"{name}.positions"].tolist() == rows
        assert torch.equal(cache[f"{name}.scores"] == -math.inf, scores_of_rows == -math.inf)
        assert error(cache[f"{name}.pattern"], scores_of_rows.softmax(dim=-1)) < ROUNDED_WEIGHT


def test_values_weighted_by_the_pattern_are_what_the_output_projection_reads():
    model, ids, read = retrofitted("llama"), with_meta_tokens()[0], []
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0][0]))

    _, cache = run_with_cache(model, ids, lambda name: name.startswith("blocks.1.attention."))

    mixed = cache["blocks.1.attention.pattern"] @ cache["blocks.1.attention.values"]
    assert error(mixed.transpose(0, 1).flatten(1), read[0]) < ROUNDED_WEIGHT


def test_several_prompts_are_refused():
    with pytest.raises(UserError, match=r"takes one prompt, and input_ids has the shape \(2, 24\)"):
        run_with_cache(retrofitted("llama"), with_meta_tokens()[:1].repeat(2, 1))
