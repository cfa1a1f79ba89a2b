"""YaRN's rotary tables against the authors' formula, and where they are used."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from metatokens.training.extend import apply_yarn
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import SECOND, random_rows, tiny_model

ORIGINAL, HEAD_SIZE = 1024, 64  # the paper's
FACTORS = pytest.mark.parametrize("factor", [4.0, 8.0])


def yarn(factor: float) -> dict[str, Any]:
    """The settings that transformers reads."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": ORIGINAL,
    }


def extended(factor: float) -> MetaGPT2ForCausalLM:
    """A model of the paper's head size and context, extended; the rest is tiny."""
    sizes = {
        "hidden_size": HEAD_SIZE,
        "num_attention_heads": 1,
        "max_position_embeddings": ORIGINAL,
    }
    model = tiny_model(**sizes, num_hidden_layers=1, dtype=torch.float32)
    apply_yarn(model, factor, ORIGINAL)
    return model


def authors_frequencies(size: int, original: int, factor: float) -> list[float]:
    """The frequencies of the authors' code: a ramp that is linear in the index of the frequency."""

    def index_that_turns(
        times: float,
    ) -> float:  # original / (2 pi base^(2i/size)) = times, solved for i
        return size * math.log(original / (2 * math.pi * times)) / (2 * math.log(10000))

    low = max(math.floor(index_that_turns(32)), 0)
    high = min(math.ceil(index_that_turns(1)), size - 1)
    frequencies = []
    for i in range(size // 2):
        plain = 10000 ** (-2 * i / size)
        interpolated = min(max((i - low) / (high - low), 0), 1)
        frequencies.append(plain * (1 - interpolated) + plain / factor * interpolated)
    return frequencies


@FACTORS
def test_frequencies_are_those_of_the_authors(factor: float) -> None:
    model = extended(factor)
    expected = torch.tensor(authors_frequencies(HEAD_SIZE, ORIGINAL, factor))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)


@SECOND
def test_both_attentions_use_them(second_attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequence = tiny_model(second_attention=second_attention), random_rows((40,))[0]
    plain = model(torch.tensor([sequence])).logits[0]
    apply_yarn(model, 4.0, 12)
    frequencies = torch.tensor(authors_frequencies(8, 12, 4.0), dtype=torch.float64)

    def rotate_by_position(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        scale = torch.full_like(angle, 0.1 * math.log(4) + 1)
        first, second = x.tensor_split(2, dim=-1)
        turned = torch.complex(first, second) * torch.polar(scale, angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    monkeypatch.setattr("tests.model.dense_oracle.rotate_by_position", rotate_by_position)
    expected = DenseOracle(model).logits(sequence)
    extended_logits = model(torch.tensor([sequence])).logits[0]
    largest = expected.abs().max().item()
    torch.testing.assert_close(
        extended_logits, expected, rtol=0, atol=3e-6 * largest, check_dtype=False
    )
    assert (plain - expected).abs().max() > 0.05 * largest


def test_the_models_own_base_is_kept() -> None:
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    apply_yarn(model, 2.0, 48)
    # One turn in 48 tokens is a frequency of 0.13, one below it divided by 2: the last of 500^(-2i/8).
    assert model.model.rotary_emb.inv_freq[-1].item() == pytest.approx(500**-0.75 / 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"position_embedding": "none"},
            "position_embedding 'none'; YaRN extends rotary positions",
        ),
        (
            {"rope_parameters": yarn(4.0)},
            r"scaled already \(rope_type 'yarn'\); extend the model that it came from",
        ),
    ],
)
def test_other_positions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_yarn(tiny_model(**fields), 4.0, 48)


@pytest.mark.parametrize("factor", [1.0, 1.3, math.nan])
def test_a_factor_that_gives_no_longer_context_is_refused(factor: float) -> None:
    model = tiny_model()
    with pytest.raises(
        UserError, match=f"^factor {factor:g} extends 48 tokens to .*; it must be above 1"
    ):
        apply_yarn(model, factor, 48)
    assert model.config.rope_parameters["rope_type"] == "default"
