"""Position jumps: how they are drawn, and which steps have them."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from scipy.stats import chisquare
from transformers import FalconConfig, FalconForCausalLM

from metatokens.checkpoint import load_model
from metatokens.decoder import position_embedding_of
from metatokens.errors import UserError
from metatokens.training.positions import jumped_positions, position_jumps
from metatokens.training.pretrain import pretrain
from tests.numbers import ROUNDED
from tests.retrofit.architectures import base
from tests.training.conftest import Models, Pretraining

IDS = torch.arange(24).view(2, 12)


def test_half_of_the_sequences_have_one_jump_at_any_place_and_of_any_size() -> None:
    torch.manual_seed(0)
    drawn = jumped_positions(8000, 10, 30)
    before_the_first = drawn[:, :1]
    gaps = torch.cat([before_the_first, drawn.diff(dim=1) - 1], dim=1)
    jumps_of_a_row = gaps.gt(0).sum(dim=1)
    has_jump = jumps_of_a_row == 1
    indices = np.bincount(gaps[has_jump].argmax(dim=1), minlength=10)
    sizes = np.bincount(gaps[has_jump].sum(dim=1), minlength=21)[1:]
    assert jumps_of_a_row.max() == 1
    # A jump may be of size 0.
    assert has_jump.double().mean().item() == pytest.approx(0.5 * 20 / 21, abs=0.03)
    assert chisquare(indices).pvalue > 1e-3
    assert chisquare(sizes).pvalue > 1e-3
    assert drawn.max() == 29


def test_a_row_that_fills_the_limit_has_plain_positions() -> None:
    assert jumped_positions(3, 20, 20).tolist() == [list(range(20))] * 3


@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
def test_training_sees_the_drawn_positions_and_evaluation_the_plain_ones(
    small_model: Models, position_embedding: str
) -> None:
    folder = small_model(position_embedding=position_embedding, max_position_embeddings=64)
    model, plain = load_model(folder), load_model(folder).eval()
    with position_jumps(model, 40):
        torch.manual_seed(3)
        in_training = model.train()(input_ids=IDS, labels=IDS).loss.item()
        drawn_afterwards = torch.rand(1)
        in_evaluation = model.eval()(input_ids=IDS, labels=IDS).loss.item()
    torch.manual_seed(3)
    positions = jumped_positions(2, 12, 40)
    with_jumps = plain(IDS, labels=IDS, position_ids=positions).loss.item()
    without = plain(IDS, labels=IDS).loss.item()
    assert drawn_afterwards == torch.rand(1)  # one draw a step
    assert positions.max() > 11
    assert in_training == pytest.approx(with_jumps, rel=ROUNDED)
    assert in_evaluation == pytest.approx(without, rel=ROUNDED)
    assert in_training != pytest.approx(without, rel=ROUNDED)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_adapters_do_not_make_a_jump_the_begin_of_a_sequence() -> None:
    """PEFT gives its model a mask that is None."""
    losses = []
    for adapts in (False, True):
        model: Any = base("llama").train()
        model.config.position_embedding = "rope"
        with position_jumps(model, 40):
            wrapped = (
                peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
                if adapts
                else model
            )
            torch.manual_seed(3)
            losses.append(wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss.item())

    assert losses[0] == pytest.approx(losses[1], rel=ROUNDED)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_a_model_without_position_ids_is_refused(name: str) -> None:
    model: Any = base(name)
    if name == "falcon":
        model = FalconForCausalLM(FalconConfig(**model.config.to_dict() | {"alibi": True}))
    model.config.position_embedding = position_embedding_of(model)

    with pytest.raises(UserError, match="no effect in a model without"), position_jumps(model, 40):
        pass


def test_a_learned_table_must_hold_the_limit(small_model: Models) -> None:
    model = load_model(small_model(position_embedding="learned", max_position_embeddings=48))
    with (
        pytest.raises(UserError, match="longer than the 48 learned positions"),
        position_jumps(model, 49),
    ):
        pass


def test_fewer_positions_than_tokens_are_refused(pretraining: Pretraining, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 32 tokens, and training\.position_jumps offers 31"):
        pretrain(pretraining("training.position_jumps=31"), tmp_path / "run")
