"""The Trainer's settings, trackers, several GPUs, and a loss that is no number."""

import math
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from metatokens.data.blocks import BlockDataset
from metatokens.errors import UserError
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.training.pretrain import pretrain
from metatokens.training.trainer import MetaTokenTrainer, last_good_checkpoint
from tests.training.conftest import (
    Pretraining,
    Steps,
    TrainerOf,
    cosine_decay,
    figures_of,
    weights,
)

# --- learning rate and weight decay, of the trainer that a run really makes


@pytest.fixture
def papers_trainer(
    pretraining: Pretraining, trainer_of: TrainerOf, tmp_path: Path
) -> MetaTokenTrainer:
    """A small model's trainer with the settings of the paper's recipe."""
    paper = load_recipe(
        PretrainRecipe, "paper", ["training.bf16=false", "training.torch_compile=false"]
    )
    recipe = pretraining().model_copy(update={"training": paper.training})
    return trainer_of(partial(pretrain, recipe, tmp_path / "run"))


def test_learning_rate_of_the_paper(papers_trainer: MetaTokenTrainer) -> None:
    (factor,) = set(papers_trainer.lr_scheduler.lr_lambdas)
    middle = cosine_decay(6e-4, 6e-5, steps=99, horizon=598)[98]  # in thousands
    rates = {0: 0.0, 1_000: 3e-4, 2_000: 6e-4, 100_000: middle, 600_000: 6e-5}
    ours = {step: 6e-4 * factor(step) for step in rates}
    assert ours == pytest.approx(rates, rel=1e-9)
    assert 6e-4 * factor(200_000) == pytest.approx(4.67e-4, abs=5e-7)  # where the paper's run ends


def test_the_optimizer_is_the_papers(papers_trainer: MetaTokenTrainer) -> None:
    arguments = papers_trainer.args
    betas = {group["betas"] for group in papers_trainer.optimizer.param_groups}
    assert isinstance(papers_trainer.optimizer, torch.optim.AdamW)
    assert betas == {(0.9, 0.95)}
    assert (
        arguments.max_grad_norm,
        arguments.max_steps,
        arguments.gradient_accumulation_steps,
    ) == (1.0, 200_000, 40)


def test_weight_decay_on_all_matrices_and_nothing_else(
    pretraining: Pretraining, trainer_of: TrainerOf, tmp_path: Path
) -> None:
    recipe = pretraining(
        "model.bias=true", "model.position_embedding=learned", "training.weight_decay=0.1"
    )
    trainer = trainer_of(partial(pretrain, recipe, tmp_path / "run"))
    decayed, plain = trainer.optimizer.param_groups
    dimensions = [{parameter.ndim for parameter in group["params"]} for group in (decayed, plain)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert dimensions == [{2}, {1}]
    count = len(list(trainer.model.parameters()))
    assert len(decayed["params"] + plain["params"]) == count


def test_a_run_follows_its_own_schedule(pretraining: Pretraining, tmp_path: Path) -> None:
    recipe = pretraining(
        "training.learning_rate=0.01",
        "training.min_learning_rate=0.001",
        "training.warmup_steps=2",
        "training.decay_steps=16",
    )
    pretrain(recipe, tmp_path / "run")
    decay = cosine_decay(0.01, 0.001, steps=6, horizon=14)
    assert figures_of(tmp_path / "run", "learning_rate") == pytest.approx([0, 0.005, *decay])


# --- several GPUs, one process


def test_one_process_uses_one_of_several_gpus_and_says_how_to_use_all(
    pretraining: Pretraining,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretrain(pretraining(), tmp_path / "one")
    set_up = TrainingArguments._setup_devices.func

    def with_two(self: TrainingArguments) -> torch.device:
        device = set_up(self)
        self._n_gpu = 2
        return device

    devices = cached_property(with_two)
    devices.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", devices)
    pretrain(pretraining(), tmp_path / "two")
    (sentence,) = capsys.readouterr().err.splitlines()
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert "one of several GPUs is used; torchrun starts a process for each" in sentence


def test_the_precision_is_that_of_the_settings_whatever_the_launcher_asks_for(
    pretraining: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(pretraining(), tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    pretrain(pretraining(), tmp_path / "launched")
    assert weights(tmp_path / "launched") == weights(tmp_path / "plain")


# --- progress


def test_progress_is_reported_once_in_a_second_and_at_the_end(
    pretraining: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("metatokens.training.trainer.time", standing_clock)
    reported = Steps()
    pretrain(pretraining(), tmp_path / "run", progress=reported)
    assert reported == [1, 8]


# --- a loss that is no number


def test_a_loss_that_is_no_number_stops_and_leaves_the_last_good_checkpoint(
    pretraining: Pretraining,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before: dict[str, bytes] = {}
    step, checkpoints = MetaTokenTrainer.training_step, tmp_path / "run" / "checkpoints"

    def spoil(self: MetaTokenTrainer, *args: object, **kwargs: object) -> torch.Tensor:
        if self.state.global_step == 5:
            before.update(contents(checkpoints))
            with torch.no_grad():
                next(self.model.parameters()).mul_(math.inf)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(MetaTokenTrainer, "training_step", spoil)
    steady = pretraining("training.learning_rate=0.01", "training.min_learning_rate=0.01")
    with pytest.raises(
        UserError,
        match=r"before step 6: the gradient.s norm is nan, at learning rate 0\.01, on the items 20 to 23 in the order",
    ):
        pretrain(steady, tmp_path / "run")
    assert contents(checkpoints) == before
    assert last_good_checkpoint(checkpoints) == checkpoints / "checkpoint-4"


def test_an_error_of_the_data_does_not_end_a_training_quietly(
    pretraining: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item_of = BlockDataset.__getitem__

    def stops(dataset: BlockDataset, number: int) -> object:
        if number == 12:
            raise StopIteration
        return item_of(dataset, number)

    monkeypatch.setattr(BlockDataset, "__getitem__", stops)
    with pytest.raises(RuntimeError, match="the training ended after 3 of 8 steps"):
        pretrain(pretraining(), tmp_path / "run")
