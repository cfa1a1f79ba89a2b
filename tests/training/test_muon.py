"""Muon on the matrices inside the blocks, AdamW on the rest, in one optimizer."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from metatokens.training import muon
from metatokens.training.bracket_loss import bracket_loss
from metatokens.training.finetune import finetune
from metatokens.training.muon import MuonWithAdamW, block_matrices, inputs_first
from metatokens.training.trainer import MetaTokenTrainer
from tests.training.conftest import Finetuning, Models, TrainerOf, cosine_decay


def orthogonalized(gradient: np.ndarray) -> np.ndarray:
    """Newton-Schulz as Jordan et al. (2024) print it: X <- aX + b(XX')X + c(XX')(XX')X, five times, in float64.

    An odd polynomial of a matrix is that polynomial of its singular values, which is how it is computed here.
    """
    left, values, right = np.linalg.svd(gradient / np.linalg.norm(gradient), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return np.asarray(left @ np.diag(values) @ right)


def papers_update(momentum: np.ndarray, gradient: np.ndarray, learning_rate: float) -> np.ndarray:
    """The change of a matrix: Nesterov's momentum, orthogonalized, and larger for tall matrices."""
    rows, columns = gradient.shape
    nesterov = 0.05 * gradient + 0.95 * momentum
    scale = math.sqrt(max(1, rows / columns))
    return -learning_rate * scale * orthogonalized(nesterov)


@pytest.mark.parametrize("shape", [(12, 4), (6, 6), (4, 12)])
def test_two_steps_of_a_matrix_are_those_of_the_paper(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stack of two matrices, and the third by itself.
    monkeypatch.setattr(muon, "STACKED", 2 * math.prod(shape))
    draw = np.random.default_rng(0)
    starts = draw.normal(size=(3, *shape))
    gradients = draw.normal(size=(2, 3, *shape))
    matrices = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    adamw = torch.optim.AdamW(matrices, lr=0.004)
    optimizer = MuonWithAdamW(matrices, adamw, 0.02)
    for step in gradients:
        for matrix, gradient in zip(matrices, step, strict=True):
            matrix.grad = torch.tensor(gradient)
        optimizer.step()
    for matrix, start, (first, second) in zip(
        matrices, starts, gradients.swapaxes(0, 1), strict=True
    ):
        momentum = 0.05 * first
        change = papers_update(momentum, first, 0.02)
        momentum = 0.95 * momentum + 0.05 * second
        change += papers_update(momentum, second, 0.02)
        ours = matrix.detach().numpy() - start
        # A checkpoint has the momentum of each matrix by itself, whatever was stacked.
        buffer = optimizer.state[matrix]["momentum_buffer"]
        np.testing.assert_allclose(ours, change, atol=1e-5 * np.abs(change).max())
        np.testing.assert_allclose(buffer, momentum, rtol=1e-12)


def test_a_matrix_of_gpt2_that_has_its_inputs_first_steps_as_its_transpose() -> None:
    stored = Conv1D(12, 4)  # 4 inputs, 12 outputs
    plain = torch.nn.Linear(4, 12)
    with torch.no_grad():
        plain.weight.copy_(stored.weight.T)
    gradient = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    for layer, of_layer in ((stored, gradient), (plain, gradient.T)):
        adamw = torch.optim.AdamW([layer.weight], lr=0.004)
        layer.weight.grad = of_layer.clone()
        first = inputs_first(torch.nn.Sequential(layer))
        MuonWithAdamW([layer.weight], adamw, 0.02, inputs_first=first).step()

    torch.testing.assert_close(stored.weight.T, plain.weight)


def test_the_other_parameters_are_adamws() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    vector = torch.nn.Parameter(torch.ones(3))
    expected = torch.nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([matrix, vector], lr=0.004, weight_decay=0.1)
    other = torch.optim.AdamW([expected], lr=0.004, weight_decay=0.1)
    optimizer = MuonWithAdamW([matrix], adamw, 0.02)
    for _ in range(2):
        vector.grad, expected.grad = torch.arange(3.0), torch.arange(3.0)
        optimizer.step()
        other.step()
    assert torch.equal(vector, expected)


@pytest.fixture
def trainer(
    small_model: Models, finetuning: Finetuning, trainer_of: TrainerOf, tmp_path: Path
) -> MetaTokenTrainer:
    """The trainer of a run with Muon, about to start."""
    recipe = finetuning(
        "training.optimizer=muon",
        "training.learning_rate=0.004",
        "training.min_learning_rate=0.001",
        "training.weight_decay=0.1",
    )
    model = small_model(bias=True, position_embedding="learned", max_position_embeddings=72)
    return trainer_of(partial(finetune, recipe, model, tmp_path, task="parity"))


def test_embeddings_biases_and_norms_are_adamws(trainer: MetaTokenTrainer) -> None:
    decayed, plain, matrices = trainer.optimizer.param_groups
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    tables = {names[parameter] for parameter in decayed["params"]}
    dimensions = {parameter.ndim for parameter in plain["params"]}
    by_muon = {names[parameter] for parameter in matrices["params"]}
    rest = {*names.values()} - by_muon - tables
    assert tables == {"model.embed_tokens.weight", "model.learned_positions.weight"}
    assert dimensions == {1}
    # Of each block: two attentions' two projections and the feed-forward's two.
    assert len(by_muon) == 2 * 6
    assert len(rest) == len(plain["params"])
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert "weight_decay" not in matrices


# Their lists of blocks have other names.
@pytest.mark.parametrize("kind", ["bloom", "gpt_neox", "llama", "mpt"])
def test_the_blocks_of_any_decoder_are_found(kind: str) -> None:
    config = AutoConfig.for_model(
        kind,
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    expected = {parameter for parameter in model.parameters() if parameter.ndim == 2} - tables
    model.tower = torch.nn.Linear(4, 4)  # such as for images
    model.config.meta_token_id = 47
    assert set(block_matrices(model)) == expected
    with bracket_loss(model, 1.0, 1):
        heads = {head.weight for head in model.bracket_heads}
        assert set(block_matrices(model)) == expected | heads


def test_the_schedule_scales_both_rates(trainer: MetaTokenTrainer) -> None:
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    factors = [0.0, *cosine_decay(1.0, 0.25, steps=4, horizon=3)]
    np.testing.assert_allclose(rates, np.outer(factors, [0.004, 0.004, 0.02]), atol=1e-12)
