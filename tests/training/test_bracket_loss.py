"""The auxiliary loss of counting: the tokens that it is on, its value, and that it leaves nothing behind."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.tasks.curriculum import TaskData
from metatokens.training.bracket_loss import bracket_labels, bracket_loss
from metatokens.training.finetune import finetune
from metatokens.training.pretrain import new_gpt_neo
from tests.numbers import ROUNDED
from tests.training.conftest import Finetuning, Models, interrupt, result


def slow_labels(row: Sequence[int], meta: int) -> list[tuple[bool, bool]]:
    """For each token: whether the loss is on it, and whether it is inside."""
    places = [place for place, one in enumerate(row) if one == meta]
    end = places[-1] if places else 0
    return [
        (one != meta and place < end, len(places) > 1 and places[0] < place < places[1])
        for place, one in enumerate(row)
    ]


def test_bracket_loss_is_between_the_first_two_meta_tokens_of_the_prompt(small_store: TokenStore) -> None:
    meta, draw = 9, np.random.default_rng(0)
    rows = [[draw.choice([5, 6, 7, meta], p=[0.3, 0.3, 0.2, 0.2]) for _ in range(20)] for _ in range(50)]
    rows.append([5] * 20)
    source = TaskData("segment_counting", tokenizer=small_store.tokenizer)
    for cases, marker in ((rows, meta), ([source.train(i, 128).input_ids for i in range(20)], 768)):
        for row in cases:
            asked, inside = bracket_labels(torch.tensor([row]), marker)
            assert [*zip(asked[0].tolist(), inside[0].tolist(), strict=True)] == [
                (a, a and b) for a, b in slow_labels(row, marker)
            ]
    counted = source.train(0, 128)
    _, inside = bracket_labels(torch.tensor([counted.input_ids]), 768)
    words = small_store.tokenizer.decode(torch.tensor(counted.input_ids)[inside[0]]).split()
    asked_item = re.search(r"does (\w+) appear", counted.prompt)
    assert asked_item is not None
    assert words.count(asked_item.group(1)) == int(counted.completion)


@pytest.mark.parametrize("architecture", ["meta_gpt2", "gpt_neo"])
def test_the_auxiliary_loss_is_that_of_a_linear_head_after_each_block_but_the_last(
    architecture: str, small_model: Models, small_store: TokenStore
) -> None:
    changes = {"position_embedding": "learned", "second_attention": "none"} if architecture == "gpt_neo" else {}
    model: Any = load_model(small_model(num_hidden_layers=3, **changes))
    model = (new_gpt_neo(model.config, small_store.tokenizer) if changes else model).double()
    meta = small_store.manifest.meta_token_id
    source = TaskData("segment_counting", tokenizer=small_store.tokenizer)
    examples = [source.train(index, 64) for index in range(3)]
    ids = torch.zeros(3, 70, dtype=torch.long)
    for row, example in enumerate(examples):
        ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
    labels = torch.where(torch.arange(70) == 40, ids, -100)
    model.train()
    plain = model(input_ids=ids, labels=labels).loss
    torch.manual_seed(1)
    with bracket_loss(model, 0.5, 4):
        model.bracket_heads.double()
        heads = [(head.weight.detach().clone(), head.bias.detach().clone()) for head in model.bracket_heads]
        both = model(input_ids=ids, labels=labels).loss
        assert float(model.eval()(input_ids=ids, labels=labels).loss.detach()) == pytest.approx(
            float(plain.detach()), rel=ROUNDED
        )
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    expected = 0.0
    for (weight, bias), hidden in zip(heads, states[1:3], strict=True):
        losses = []
        for row in range(3):
            for place, (asked, inside) in enumerate(slow_labels(ids[row].tolist(), meta)):
                x = hidden[row, place].detach().numpy()
                x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
                p = 1 / (1 + np.exp(-(weight.numpy()[0] @ x + bias.item())))
                if asked:
                    losses.append(-3 * np.log(p) if inside else -np.log(1 - p))
        expected += np.mean(losses)
    assert len(heads) == 2
    assert float((both - plain).detach()) == pytest.approx(0.5 / 4 * expected, abs=ROUNDED * float(plain.detach()))
    assert not hasattr(model, "bracket_heads")
    assert torch.equal(model.train()(input_ids=ids, labels=labels).loss, plain)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stage_with_the_auxiliary_loss_leaves_no_head_and_begins_again(
    optimizer: str, small_model: Models, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    model = small_model()
    stages = "task.stages=[{lists: [1, 2], items: [3, 4], max_steps: 5, inside_loss: 2.0}]"
    recipe = finetuning(stages, f"training.optimizer={optimizer}")
    finetune(recipe, model, tmp_path / "undisturbed", task="segment_counting")
    run = partial(finetune, recipe, model, tmp_path / "run", task="segment_counting")
    interrupt(run, steps, 4)
    assert not list((tmp_path / "run" / "stage-1").glob("checkpoints/*"))
    rest = steps()
    run(progress=rest)
    assert rest == list(range(1, 10))
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")
    plain = finetuning(stages.replace(", inside_loss: 2.0", ""), f"training.optimizer={optimizer}")
    finetune(plain, model, tmp_path / "plain", task="segment_counting")
    ours, others = (load_model(tmp_path / name / "stage-1").state_dict() for name in ("run", "plain"))
    assert {*ours} == {*others}
    assert any(not torch.equal(ours[name], others[name]) for name in ours)


def test_a_model_without_a_block_before_the_last(small_model: Models, finetuning: Finetuning, tmp_path: Path) -> None:
    recipe = finetuning("task.stages=[{lists: [1, 2], items: [3, 4], max_steps: 4, inside_loss: 1.0}]")
    with pytest.raises(UserError, match="after each block but the last, and the model has one"):
        finetune(recipe, small_model(num_hidden_layers=1), tmp_path / "run", task="segment_counting")
    assert not (tmp_path / "run").exists()
