"""Attention logits that grow with the logarithm of the number of keys: what the tests of all variants leave out."""

import math
from pathlib import Path

import pytest
import torch

from metatokens import MetaGPT2ForCausalLM
from metatokens.analysis.observation import observe
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import pad, random_rows, tiny_model
from tests.numbers import ROUNDED, ROUNDED_DOUBLE


def test_the_logits_that_an_analysis_reads_are_scaled() -> None:
    model = tiny_model(attention_scale="log_length")
    (row,) = random_rows((13,), meta_rate=0.4)
    oracle = DenseOracle(model)
    oracle.logits(row)
    inputs = observe(model, torch.tensor(row)).attention["attention", 1]
    weights = inputs.logits(torch.arange(len(row))).softmax(dim=-1)
    assert (weights - oracle.seen["model.layers.1.attention"]).abs().max() < ROUNDED


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
    model = tiny_model(attention_scale="log_length")
    expected = model(ids, attention_mask=padding).logits
    found = model(ids, attention_mask=mask, position_ids=positions).logits
    assert (found - expected)[padding.bool()].abs().max() < ROUNDED_DOUBLE
