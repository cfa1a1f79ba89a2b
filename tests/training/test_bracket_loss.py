"""The auxiliary loss of counting: the tokens that it is on, its value, and that it leaves nothing behind."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.tasks.curriculum import TaskData
from metatokens.training.bracket_loss import bracket_labels, bracket_loss
from metatokens.training.finetune import finetune
from metatokens.training.pretrain import new_gpt_neo
from tests.numbers import ROUNDED
from tests.training.conftest import Finetuning, Models, interrupt, result

STAGE = "task.stages=[{lists: [1, 2], items: [3, 4], max_steps: 5, bracket_loss: 2.0}]"


def slow_labels(row: Sequence[int], meta: int) -> tuple[list[bool], list[bool]]:
    """For each token: whether the loss is on it; whether that is so and it is in the bracket."""
    meta_indices = [index for index, token in enumerate(row) if token == meta]
    is_scored, is_inside = [], []
    for index, token in enumerate(row):
        before = sum(meta_index < index for meta_index in meta_indices)
        is_scored.append(token != meta and before < len(meta_indices))
        is_inside.append(is_scored[-1] and before == 1)
    return is_scored, is_inside


def test_the_bracket_is_between_the_first_two_meta_tokens_of_the_prompt() -> None:
    meta = 9
    draw = np.random.default_rng(0)
    rows = draw.choice([5, 6, 7, meta], size=(50, 20), p=[0.3, 0.3, 0.2, 0.2]).tolist()
    rows.append([5] * 20)
    is_scored, is_inside = bracket_labels(torch.tensor(rows), meta)
    for number, row in enumerate(rows):
        labels = is_scored[number].tolist(), is_inside[number].tolist()
        assert labels == slow_labels(row, meta)


@pytest.mark.parametrize("architecture", ["meta_gpt2", "gpt_neo"])
def test_the_auxiliary_loss_is_that_of_a_linear_head_after_each_block_but_the_last(
    architecture: str, small_model: Models, small_store: TokenStore
) -> None:
    if architecture == "gpt_neo":
        config = load_model(
            small_model(position_embedding="learned", second_attention="none")
        ).config
        model: Any = new_gpt_neo(config, small_store.tokenizer).double()
    else:
        model = load_model(small_model(num_hidden_layers=2)).double()
    example = TaskData("segment_counting", tokenizer=small_store.tokenizer).train(0, 64)
    ids = torch.tensor([example.input_ids])
    model.train()
    plain = float(model(input_ids=ids, labels=ids).loss.detach())
    with bracket_loss(model, 0.5, 4):
        model.bracket_heads.double()
        (head,) = model.bracket_heads
        weight = head.weight[0].detach().numpy()
        bias = head.bias.item()
        in_training = float(model(input_ids=ids, labels=ids).loss.detach())
        in_evaluation = float(model.eval()(input_ids=ids, labels=ids).loss.detach())
    output = model(input_ids=ids, output_hidden_states=True)
    states = output.hidden_states[1][0].detach().numpy()
    is_scored, is_inside = slow_labels(ids[0].tolist(), small_store.tokenizer.meta_token_id)
    losses = []
    for index in np.flatnonzero(is_scored):
        state = states[index]
        normed = (state - state.mean()) / np.sqrt(state.var() + 1e-5)
        probability = 1 / (1 + np.exp(-(weight @ normed + bias)))
        if is_inside[index]:
            losses.append(-3 * np.log(probability))
        else:
            losses.append(-np.log(1 - probability))
    expected = 0.5 / 4 * np.mean(losses)
    assert in_training - plain == pytest.approx(expected, abs=ROUNDED * plain)
    assert in_evaluation == pytest.approx(plain, rel=ROUNDED)
    assert not hasattr(model, "bracket_heads")


@pytest.mark.quick(optimizer=["muon"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stage_with_the_auxiliary_loss_leaves_no_head_and_begins_again(
    optimizer: str, model: Path, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    recipe = finetuning(STAGE, f"training.optimizer={optimizer}", "training.max_steps=1")
    finetune(recipe, model, tmp_path / "undisturbed", task="segment_counting")
    run = partial(finetune, recipe, model, tmp_path / "run", task="segment_counting")
    interrupt(run, steps, 4)
    checkpoints = list((tmp_path / "run" / "stage-1").glob("checkpoints/*"))
    rest = steps()
    run(progress=rest)
    trained = load_model(tmp_path / "run" / "stage-1").state_dict()
    assert checkpoints == []
    assert rest == [1, 2, 3, 4, 5, 6]
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")
    assert trained.keys() == load_model(model).state_dict().keys()
