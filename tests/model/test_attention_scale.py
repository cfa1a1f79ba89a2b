"""Attention logits that grow with the logarithm of the number of keys, against the formula; with a cache too."""

import math
from pathlib import Path

import pytest
import torch

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.analysis.observation import observe
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, pad, random_rows, tiny_model

ROWS = [*random_rows((13, 8, 1), meta_rate=0.4), [META] * 6, random_rows([10], seed=1, meta_rate=0.0)[0]]
SECOND = pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def scaled_model(**overrides: object) -> MetaGPT2ForCausalLM:
    return tiny_model(attention_scale="log_length", **overrides)


@SIDES
@SECOND
def test_the_model_is_the_formulas_forward_and_backward(second_attention: str, side: str) -> None:
    model = scaled_model(second_attention=second_attention, position_embedding="none")
    oracle = DenseOracle(model)
    ids, mask = pad(ROWS, side)
    actual = model(ids, attention_mask=mask).logits[mask.bool()]
    expected = torch.cat([oracle.logits(row) for row in ROWS])
    assert (actual - expected).abs().max() < 1e-11
    weigh = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (actual * weigh).sum().backward()
    (expected * weigh).sum().backward()
    scales = {name: own.grad for name, own in model.named_parameters() if name.endswith("length_scale")}
    assert len(scales) == (2 if second_attention == "none" else 4)
    for name, gradient in scales.items():
        assert gradient.abs().max() > 1e-6
        assert torch.allclose(gradient, oracle.weights[name].grad, rtol=1e-9, atol=1e-9)
    plain = tiny_model(second_attention=second_attention, position_embedding="none")
    plain.load_state_dict({name: own for name, own in model.state_dict().items() if name not in scales})
    assert (plain(ids, attention_mask=mask).logits[mask.bool()] - actual).abs().max() > 0.1


@SECOND
def test_a_cache_counts_the_keys_of_the_whole_sequence(second_attention: str) -> None:
    model = scaled_model(second_attention=second_attention)
    ids, mask = pad(ROWS)
    whole, cache, found = model(ids, attention_mask=mask).logits, MetaTokenCache(model.config), []
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 13)):
        step = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        found.append(step.logits)
    assert (torch.cat(found, dim=1) - whole)[mask.bool()].abs().max() < 1e-11
    row = torch.tensor(ROWS[:1])
    begun = model(row[:, :5])
    rest = model(row[:, 5:], past_key_values=begun.past_key_values)  # without a mask
    assert (rest.logits - whole[:1, 5:]).abs().max() < 1e-11


def test_the_logits_that_an_analysis_reads_are_scaled() -> None:
    model = scaled_model()
    row = ROWS[0]
    oracle = DenseOracle(model)
    oracle.logits(row)
    inputs = observe(model, torch.tensor(row)).attention["attention", 1]
    weights = inputs.logits(torch.arange(len(row))).softmax(dim=-1)
    assert (weights - oracle.seen["model.layers.1.attention"]).abs().max() < 1e-5


def test_a_plain_checkpoint_begins_with_scales_of_one_at_the_usual_number_of_keys(tmp_path: Path) -> None:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    model = MetaGPT2ForCausalLM.from_pretrained(tmp_path, attention_scale="log_length")
    for block in model.model.layers:
        for module, keys in ((block.attention, 64), (block.second_attention, 3)):
            assert module.length_scale.tolist() == pytest.approx([1 / math.log(keys)] * 4)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_keys_are_counted_in_a_mask_of_four_dimensions(kind: torch.dtype) -> None:
    ids, padding = pad(random_rows((12, 7), seed=1))
    seen = padding[:, None, None, :].bool() & torch.ones(12, 12, dtype=torch.bool).tril()
    seen |= torch.eye(12, dtype=torch.bool)  # padding sees something
    mask = seen if kind == torch.bool else torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)
    ids = ids.masked_fill(padding == 0, 1)  # which such a mask does not say is no token
    positions = (padding.cumsum(dim=1) - 1).clamp(min=0)
    model = scaled_model()
    expected = model(ids, attention_mask=padding).logits
    found = model(ids, attention_mask=mask, position_ids=positions).logits
    assert (found - expected)[padding.bool()].abs().max() < 1e-10
