"""Rotary positions in some of the layers, against the formula; with a cache too."""

from pathlib import Path

import pytest
import torch

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.errors import UserError
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import pad, random_rows, tiny_config, tiny_model

ROWS = random_rows((13, 8, 1), meta_rate=0.4)
SECOND = pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
LAYERS = pytest.mark.parametrize("layers", [[0], [1], [0, 2]])


def some_rotated(layers: list[int], **overrides: object) -> MetaGPT2ForCausalLM:
    return tiny_model(num_hidden_layers=3, rope_layers=layers, **overrides)


@LAYERS
@SECOND
def test_the_model_is_the_formulas(second_attention: str, layers: list[int]) -> None:
    model = some_rotated(layers, second_attention=second_attention)
    ids, mask = pad(ROWS)
    actual = model(ids, attention_mask=mask).logits[mask.bool()]
    expected = torch.cat([DenseOracle(model).logits(row) for row in ROWS])
    assert (actual - expected).abs().max() < 1e-5  # transformers' tables have 32 bits
    for other in (None, [2]):
        changed = tiny_model(num_hidden_layers=3, rope_layers=other, second_attention=second_attention)
        changed.load_state_dict(model.state_dict())
        assert (changed(ids, attention_mask=mask).logits[mask.bool()] - actual).abs().max() > 0.01


@LAYERS
@SECOND
def test_a_cached_step_is_the_whole_sequences(second_attention: str, layers: list[int]) -> None:
    model = some_rotated(layers, second_attention=second_attention)
    ids, mask = pad(ROWS, "left")
    whole, cache, found = model(ids, attention_mask=mask).logits, MetaTokenCache(model.config), []
    for start, end in ((0, 3), (3, 4), (4, 13)):
        step = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        found.append(step.logits)
    assert (torch.cat(found, dim=1) - whole)[mask.bool()].abs().max() < 1e-11


def test_all_layers_named_are_as_none_named() -> None:
    model, named = tiny_model(), tiny_model(rope_layers=[0, 1])
    ids = torch.tensor(ROWS[:1])
    assert torch.equal(model(ids).logits, named(ids).logits)


def test_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    model = some_rotated([1], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert MetaGPT2Config.from_pretrained(tmp_path).rope_layers == [1]
    ids = torch.tensor(ROWS[:1])
    assert torch.equal(MetaGPT2ForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("layers", [[], [2], [-1], [1, 0], [0, 0]])
def test_layers_that_there_are_not_are_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match="from 0 to 1"):
        tiny_config(rope_layers=layers)


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_other_positions_are_refused(positions: str) -> None:
    with pytest.raises(UserError, match=f"this model has '{positions}'"):
        tiny_config(position_embedding=positions, rope_layers=[0])
