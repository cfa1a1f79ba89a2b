"""Muon on the matrices inside the blocks, AdamW on the rest, in one optimizer."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from metatokens.training import muon
from metatokens.training.bracket_loss import bracket_loss
from metatokens.training.finetune import finetune
from metatokens.training.muon import MuonWithAdamW, block_matrices
from metatokens.training.trainer import MetaTokenTrainer
from tests.training.conftest import Finetuning, Models, TrainerOf


def orthogonalized(gradient: np.ndarray) -> np.ndarray:
    """Newton-Schulz as Jordan et al. (2024) print it: X <- aX + b(XX')X + c(XX')(XX')X, five times, in float64.

    An odd polynomial of a matrix is that polynomial of its singular values, which is how it is computed here.
    """
    left, values, right = np.linalg.svd(gradient / np.linalg.norm(gradient), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return np.asarray(left @ np.diag(values) @ right)


@pytest.mark.parametrize("shape", [(12, 4), (6, 6), (4, 12)])
def test_two_steps_of_a_matrix_are_those_of_the_paper(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    draw, count = np.random.default_rng(0), 3
    monkeypatch.setattr(muon, "STACKED", 2 * math.prod(shape))  # a stack of two matrices, and the third by itself
    starts, gradients = draw.normal(size=(count, *shape)), draw.normal(size=(2, count, *shape))
    matrices = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    untrained = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))  # without a gradient
    vector, alone = (torch.nn.Parameter(torch.tensor(starts[0, 0])) for _ in range(2))
    adamw = torch.optim.AdamW([*matrices, untrained, vector], lr=0.004, weight_decay=0.1)
    optimizer = MuonWithAdamW([untrained, *matrices], adamw, 0.02)
    other = torch.optim.AdamW([alone], lr=0.004, weight_decay=0.1)
    momenta, expected = np.zeros_like(starts), starts
    for step in gradients:
        for matrix, gradient in zip(matrices, step, strict=True):
            matrix.grad = torch.tensor(gradient)
        vector.grad, alone.grad = (torch.tensor(step[0, 0]) for _ in range(2))
        optimizer.step()
        other.step()
        momenta = 0.95 * momenta + 0.05 * step
        updates = [orthogonalized(one) for one in 0.05 * step + 0.95 * momenta]
        expected = expected - 0.02 * math.sqrt(max(1, shape[0] / shape[1])) * np.array(updates)
    change = np.array([matrix.detach().numpy() for matrix in matrices]) - starts
    like = expected - starts
    assert np.abs(like).max() > 0.01
    assert np.abs(change - like).max() < 1e-5 * np.abs(like).max()
    # A checkpoint has the momentum of each matrix by itself, whatever was stacked.
    buffers = [optimizer.state[matrix]["momentum_buffer"] for matrix in matrices]
    np.testing.assert_allclose(np.array(buffers), momenta, rtol=1e-12)
    assert not untrained.any()
    assert torch.equal(vector, alone)


@pytest.fixture
def trainer(small_model: Models, finetuning: Finetuning, trainer_of: TrainerOf, tmp_path: Path) -> MetaTokenTrainer:
    """The trainer of a run with Muon, about to start."""
    settings = ("optimizer=muon", "learning_rate=0.004", "min_learning_rate=0.001", "weight_decay=0.1")
    recipe = finetuning(*(f"training.{one}" for one in settings))
    model = small_model(bias=True, position_embedding="learned", max_position_embeddings=64)
    return trainer_of(partial(finetune, recipe, model, tmp_path, task="parity"))


def test_embeddings_biases_and_norms_are_adamws(trainer: MetaTokenTrainer) -> None:
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    decayed, plain, matrices = trainer.optimizer.param_groups
    assert {names[one] for one in matrices["params"]} == {
        name for one, name in names.items() if one.ndim == 2 and ".layers." in name
    }
    assert len(matrices["params"]) == 2 * 6  # of each block: two attentions' two projections and the feed-forward's two
    assert {names[one] for one in decayed["params"]} == {"model.embed_tokens.weight", "model.learned_positions.weight"}
    assert {one.ndim for one in plain["params"]} == {1}
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(names)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert "weight_decay" not in matrices
    assert (decayed["betas"], matrices["momentum"]) == ((0.9, 0.95), 0.95)


@pytest.mark.parametrize("kind", ["bloom", "gpt_neox", "llama", "mpt"])  # their lists of blocks have other names
def test_the_blocks_of_any_decoder_are_found(kind: str) -> None:
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.get_input_embeddings().weight.requires_grad_(False)
    rows = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    expected = {name for name, one in model.named_parameters() if one.ndim == 2 and id(one) not in rows}
    names = {one: name for name, one in model.named_parameters()}
    assert {names[one] for one in block_matrices(model)} == expected
    model.tower = torch.nn.Sequential(torch.nn.Linear(4, 4))  # such as for images
    assert {names[one] for one in block_matrices(model)} == expected
    model.config.meta_token_id = 47
    with bracket_loss(model, 1.0, 1):
        assert {*block_matrices(model)} - names.keys() == {head.weight for head in model.bracket_heads}
    del model.tower
    frozen = names.keys() - set(block_matrices(model))
    for one in model.parameters():
        one.requires_grad_(one in frozen)
    assert block_matrices(model) == []


@pytest.mark.parametrize("trained", [0, 1])
def test_without_a_matrix_to_train_all_is_adamws(trained: int, trainer: MetaTokenTrainer) -> None:
    for name, one in trainer.model.named_parameters():
        one.requires_grad_(one.ndim == 1 or (trained == 1 and name.endswith("layers.0.mlp.in_proj.weight")))
    trainer.optimizer = None  # type: ignore[assignment]
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, MuonWithAdamW) == bool(trained)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == sum(
        one.requires_grad for one in trainer.model.parameters()
    )


def test_the_schedule_scales_both_rates(trainer: MetaTokenTrainer) -> None:
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    factors = [0, 1, *(0.25 + 0.75 * (1 + math.cos(math.pi * step / 3)) / 2 for step in (1, 2, 3))]
    np.testing.assert_allclose(rates, [[0.004 * one, 0.004 * one, 0.02 * one] for one in factors], atol=1e-12)
