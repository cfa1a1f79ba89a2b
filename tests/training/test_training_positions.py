"""Positions that training draws: random ones, and jumps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from metatokens.checkpoint import load_model
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, TrainingSettings
from metatokens.training.finetune import finetune
from metatokens.training.positions import drawn_positions, jumped_positions, sample_positions
from metatokens.training.pretrain import pretrain

IDS = torch.arange(24).view(2, 12)


def settings(**fields: int) -> TrainingSettings:
    return TrainingSettings(max_steps=1, **fields)


def test_positions_are_distinct_and_ascending_and_every_one_is_as_likely() -> None:
    torch.manual_seed(0)
    drawn = sample_positions(4000, 5, 20)
    assert drawn.shape == (4000, 5)
    assert (drawn.diff(dim=1) > 0).all()
    counts = np.bincount(drawn.flatten().numpy(), minlength=20)
    assert len(counts) == 20
    # Draws without replacement vary less than independent ones, so the test is on the safe side.
    assert chisquare(counts).pvalue > 1e-3
    assert sample_positions(3, 20, 20).tolist() == [list(range(20))] * 3


def test_with_a_range_of_its_own_a_sequence_is_dense_as_often_as_it_is_sparse() -> None:
    torch.manual_seed(0)
    drawn = sample_positions(4000, 10, 1000, 1)
    assert (drawn.diff(dim=1) > 0).all()
    assert drawn.min() == 0
    # Of a sample of 10 below l, the largest is at (l + 1) * 10 / 11 - 1 on average; log l is uniform from 10 to 1,000.
    spans = (drawn[:, -1] + 1).double()
    shares = [((low < spans) & (spans <= 10 * low)).double().mean().item() for low in (10, 100)]
    assert shares == pytest.approx([0.5, 0.5], abs=0.05)
    assert (spans == 10).double().mean().item() > 0.01  # as plain positions are
    assert sample_positions(4000, 10, 1000)[:, -1].min() > 300  # never, from the whole
    assert sample_positions(500, 10, 1000, 900).max(dim=1).values.min() > 300
    assert sample_positions(3, 20, 20, 1).tolist() == [list(range(20))] * 3


def test_half_of_the_sequences_have_one_jump_at_any_place_and_of_any_size() -> None:
    torch.manual_seed(0)
    drawn = jumped_positions(8000, 10, 30)
    gaps = torch.cat([drawn[:, :1], drawn.diff(dim=1) - 1], dim=1)  # before the first position too
    jumps, rows = gaps.gt(0).sum(dim=1), gaps.gt(0).any(dim=1)
    assert set(jumps.tolist()) == {0, 1}
    assert rows.double().mean().item() == pytest.approx(0.5 * 20 / 21, abs=0.03)  # a jump may be of size 0
    places, sizes = np.bincount(gaps[rows].argmax(dim=1)), np.bincount(gaps[rows].sum(dim=1))
    assert (len(places), len(sizes), sizes[0]) == (10, 21, 0)
    assert chisquare(places).pvalue > 1e-3 < chisquare(sizes[1:]).pvalue
    assert drawn.max() == 29
    assert jumped_positions(3, 20, 20).tolist() == [list(range(20))] * 3


@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
def test_training_sees_the_drawn_positions_and_evaluation_the_plain_ones(
    small_model: Callable[..., Path], position_embedding: str
) -> None:
    folder = small_model(position_embedding=position_embedding, max_position_embeddings=64)
    model, plain = load_model(folder), load_model(folder).eval()
    for _ in range(2):  # as in two phases of fine-tuning: the first one's draws end with it
        with drawn_positions(model, settings(random_positions=40)):
            torch.manual_seed(3)
            loss = model.train()(input_ids=IDS, labels=IDS).loss
            drawn = torch.rand(1)
    torch.manual_seed(3)
    sample_positions(2, 12, 40)
    assert drawn == torch.rand(1)  # one sample a step
    assert model(input_ids=IDS, labels=IDS).loss != loss
    torch.manual_seed(3)
    positions = sample_positions(2, 12, 40)
    assert loss.item() == pytest.approx(plain(IDS, labels=IDS, position_ids=positions).loss.item(), rel=1e-5)
    assert torch.equal(model.eval()(IDS).logits, plain(IDS).logits)


def test_a_learned_table_must_hold_the_limit(small_model: Callable[..., Path]) -> None:
    model = load_model(small_model(position_embedding="learned", max_position_embeddings=48))
    with (
        pytest.raises(UserError, match="longer than the 48 learned positions"),
        drawn_positions(model, settings(random_positions=49)),
    ):
        pass


def test_a_run_with_random_positions_is_another_run_and_resumes_exactly(
    pretraining: Callable[..., PretrainRecipe], steps: type, tmp_path: Path
) -> None:
    recipe = pretraining("training.random_positions=100", "training.random_positions_from=40")
    pretrain(recipe, tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path / "run", progress=steps(stop_at=5))
    pretrain(recipe, tmp_path / "run")
    pretrain(pretraining(), tmp_path / "plain")
    pretrain(pretraining("training.random_positions=100"), tmp_path / "whole")
    ours, theirs, *others = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "undisturbed", "plain", "whole")
    )
    assert ours == theirs
    assert len({ours, *others}) == 3


def test_jumps_are_drawn_at_the_train_lengths_and_not_in_stages(
    model: Path, finetuning: Callable[..., FinetuneRecipe], steps: type, tmp_path: Path
) -> None:
    stages = "task.stages=[{lists: [2, 3], items: [3, 4], max_steps: 4}]"
    recipe = finetuning(stages, "training.position_jumps=500")
    finetune(recipe, model, tmp_path / "undisturbed", task="parity")
    with pytest.raises(KeyboardInterrupt):
        finetune(recipe, model, tmp_path / "run", task="parity", progress=steps(stop_at=7))
    finetune(recipe, model, tmp_path / "run", task="parity")
    finetune(finetuning(stages), model, tmp_path / "plain", task="parity")
    ours, theirs, plain = (
        [(tmp_path / name / phase / "model.safetensors").read_bytes() for phase in ("stage-1", "64")]
        for name in ("run", "undisturbed", "plain")
    )
    assert ours == theirs
    assert [one == other for one, other in zip(ours, plain, strict=True)] == [True, False]


@pytest.mark.parametrize("setting", ["random_positions", "position_jumps"])
def test_fewer_positions_than_tokens_are_refused(
    setting: str, pretraining: Callable[..., PretrainRecipe], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"has 32 tokens, and training\.{setting} offers 31"):
        pretrain(pretraining(f"training.{setting}=31"), tmp_path / "run")


def test_two_ways_of_drawing_are_refused(pretraining: Callable[..., PretrainRecipe]) -> None:
    with pytest.raises(UserError, match=r"training\.random_positions and training\.position_jumps both say"):
        pretraining("training.random_positions=100", "training.position_jumps=100")


@pytest.mark.parametrize(("positions", "said"), [("null", "None"), ("31", "31")])
def test_a_range_without_a_far_end_is_refused(
    pretraining: Callable[..., PretrainRecipe], positions: str, said: str
) -> None:
    with pytest.raises(UserError, match=f"random_positions_from is 32, and training.random_positions {said}; the"):
        pretraining(f"training.random_positions={positions}", "training.random_positions_from=32")
