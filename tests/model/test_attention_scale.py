"""Attention logits that grow with the logarithm of the number of keys: what the tests of all variants leave out."""

import math
from pathlib import Path

import pytest
import torch

from metatokens import MetaGPT2ForCausalLM
from metatokens.analysis.observation import observe
from tests.model.agreement import assert_close
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import random_rows, tiny_model
from tests.numbers import ROUNDED


def test_the_logits_that_an_analysis_reads_are_scaled() -> None:
    model, [row] = tiny_model(attention_scale="log_length"), random_rows((13,), meta_rate=0.4)
    oracle = DenseOracle(model)
    oracle.logits(row)
    inputs = observe(model, torch.tensor(row)).attention["attention", 1]
    weights = inputs.logits(torch.arange(len(row))).softmax(dim=-1)

    assert_close(weights, oracle.seen["model.layers.1.attention"], ROUNDED)


def test_a_plain_checkpoint_begins_with_scales_of_one_at_the_usual_number_of_keys(
    tmp_path: Path,
) -> None:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    model = MetaGPT2ForCausalLM.from_pretrained(tmp_path, attention_scale="log_length")

    for block in model.model.layers:
        assert block.attention.length_scale.tolist() == pytest.approx([1 / math.log(64)] * 4)
        assert block.second_attention.length_scale.tolist() == pytest.approx([1 / math.log(3)] * 4)
