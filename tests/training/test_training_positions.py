"""Randomised positions in training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from metatokens.errors import UserError
from metatokens.model.checkpoint import load_model
from metatokens.recipe import PretrainRecipe
from metatokens.training.positions import randomized_positions, sample_positions
from metatokens.training.pretrain import pretrain

IDS = torch.arange(24).view(2, 12)


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


@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
def test_training_sees_the_drawn_positions_and_evaluation_the_plain_ones(
    small_model: Callable[..., Path], position_embedding: str
) -> None:
    folder = small_model(position_embedding=position_embedding, max_position_embeddings=64)
    model, plain = load_model(folder), load_model(folder).eval()
    for _ in range(2):  # as in two phases of fine-tuning: the first one's draws end with it
        with randomized_positions(model, 40):
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
    with pytest.raises(UserError, match="longer than the 48 learned positions"), randomized_positions(model, 49):
        pass


def test_a_run_with_random_positions_is_another_run_and_resumes_exactly(
    pretraining: Callable[..., PretrainRecipe], steps: type, tmp_path: Path
) -> None:
    recipe = pretraining("training.random_positions=100")
    pretrain(recipe, tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path / "run", progress=steps(stop_at=5))
    pretrain(recipe, tmp_path / "run")
    pretrain(pretraining(), tmp_path / "plain")
    ours, theirs, plain = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "undisturbed", "plain")
    )
    assert ours == theirs != plain


def test_fewer_positions_than_tokens_are_refused(pretraining: Callable[..., PretrainRecipe], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 32 tokens, and training\.random_positions offers 31"):
        pretrain(pretraining("training.random_positions=31"), tmp_path / "run")
