"""The Trainer's settings, trackers, several GPUs, and a loss that is no number."""

import math
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from metatokens.data.blocks import BlockDataset
from metatokens.errors import UserError
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.training import trainer as trainer_module
from metatokens.training.pretrain import pretrain
from metatokens.training.trainer import MetaTokenTrainer, last_good_checkpoint
from tests.training.conftest import Pretraining, TrainerOf, curve, weights

# --- learning rate and weight decay, of the trainer that a run really makes


@pytest.fixture
def papers_trainer(pretraining: Pretraining, trainer_of: TrainerOf, tmp_path: Path) -> MetaTokenTrainer:
    """A small model's trainer with the settings of the paper's recipe."""
    paper = load_recipe(PretrainRecipe, "paper", ["training.bf16=false", "training.torch_compile=false"])
    recipe = pretraining().model_copy(update={"training": paper.training})
    return trainer_of(partial(pretrain, recipe, tmp_path / "run"))


def test_learning_rate_of_the_paper(papers_trainer: MetaTokenTrainer) -> None:
    (schedule,) = set(papers_trainer.lr_scheduler.lr_lambdas)
    middle = 6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * (100_000 - 2_000) / (600_000 - 2_000))) / 2
    rates = {0: 0.0, 1_000: 3e-4, 2_000: 6e-4, 100_000: middle, 600_000: 6e-5}
    assert {step: 6e-4 * schedule(step) for step in rates} == pytest.approx(rates, rel=1e-9)
    assert 6e-4 * schedule(200_000) == pytest.approx(4.67e-4, abs=5e-7)  # where the paper's run ends


def test_the_optimizer_is_the_papers(papers_trainer: MetaTokenTrainer) -> None:
    assert isinstance(papers_trainer.optimizer, torch.optim.AdamW)
    assert all(group["betas"] == (0.9, 0.95) for group in papers_trainer.optimizer.param_groups)
    arguments = papers_trainer.args
    assert (arguments.max_grad_norm, arguments.max_steps, arguments.gradient_accumulation_steps) == (1.0, 200_000, 40)
    assert arguments.report_to == []


def test_the_operations_of_a_step_are_the_trainers(papers_trainer: MetaTokenTrainer) -> None:
    for shape in ((2, 8), (3, 5)):  # the parameters are counted once
        inputs = {"input_ids": torch.zeros(shape, dtype=torch.long)}
        expected = Trainer.floating_point_ops(papers_trainer, inputs)
        assert papers_trainer.floating_point_ops(inputs) == expected > 0


@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_weight_decay_on_all_matrices_and_nothing_else(
    second_attention: str, pretraining: Pretraining, trainer_of: TrainerOf, tmp_path: Path
) -> None:
    settings = (f"model.second_attention={second_attention}", "model.bias=true", "model.position_embedding=learned")
    recipe = pretraining(*settings, "training.weight_decay=0.1")
    trainer = trainer_of(partial(pretrain, recipe, tmp_path / "run"))
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    decayed: dict[float, list[str]] = {0.1: [], 0.0: []}
    for group in trainer.optimizer.param_groups:
        decayed[group["weight_decay"]] += [names[parameter] for parameter in group["params"]]
    assert sorted(decayed[0.1]) == sorted(name for parameter, name in names.items() if parameter.ndim == 2)
    assert sorted(decayed[0.0]) == sorted(name for parameter, name in names.items() if parameter.ndim == 1)
    assert any("bias" in name for name in decayed[0.0])


def test_a_run_follows_its_own_schedule(pretraining: Pretraining, tmp_path: Path) -> None:
    settings = ("learning_rate=0.01", "min_learning_rate=0.001", "warmup_steps=2", "decay_steps=16")
    pretrain(pretraining(*(f"training.{setting}" for setting in settings)), tmp_path / "run")
    used = [0, 0.005] + [0.001 + 0.009 * (1 + math.cos(math.pi * step / 14)) / 2 for step in range(6)]
    assert [point["step"] for point in curve(tmp_path / "run")] == list(range(1, 9))
    assert [point["learning_rate"] for point in curve(tmp_path / "run")] == pytest.approx(used)


# --- several GPUs, one process


def test_one_process_uses_one_of_several_gpus_and_says_how_to_use_all(
    pretraining: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []
    item = BlockDataset.__getitem__
    monkeypatch.setattr(BlockDataset, "__getitem__", lambda self, index: read.append(index) or item(self, index))
    pretrain(pretraining(), tmp_path / "one")
    of_one, read[:] = read.copy(), []
    assert capsys.readouterr().err == ""
    set_up = TrainingArguments._setup_devices.func

    def with_two(self: TrainingArguments) -> torch.device:
        device = set_up(self)
        self._n_gpu = 2
        return device

    devices = cached_property(with_two)
    devices.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", devices)
    pretrain(pretraining(), tmp_path / "two")
    assert read == of_one
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "one of the 2 GPUs; `torchrun --nproc-per-node 2 -m metatokens" in sentence


# --- trackers


class Tracker(TrainerCallback):
    """Stands for Weights & Biases and its like."""

    logged: list[float]
    held_out: list[float]

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **kwargs: object) -> None:
        self.logged += [logs["loss"]] if "loss" in logs else []
        self.held_out += [logs["eval_loss"]] if "eval_loss" in logs else []


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> type[Tracker]:
    monkeypatch.setattr(Tracker, "logged", [], raising=False)
    monkeypatch.setattr(Tracker, "held_out", [], raising=False)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    monkeypatch.setattr(trainer_module, "get_available_reporting_integrations", lambda: ["wandb"])
    return Tracker


def test_an_installed_tracker_receives_the_losses(
    tracker: type[Tracker], pretraining: Pretraining, tmp_path: Path
) -> None:
    pretrain(pretraining("training.report_to=wandb", "training.eval_steps=3"), tmp_path / "run")
    points = curve(tmp_path / "run")
    assert tracker.logged == [point["loss"] for point in points if "loss" in point]
    assert tracker.held_out == [point["eval_loss"] for point in points if "eval_loss" in point]
    assert (len(tracker.logged), len(tracker.held_out)) == (8, 2)


@pytest.mark.parametrize("report_to", ["mlflow", "wandb,mlflow", "none,wandb"])
def test_other_trackers_are_refused_before_a_folder_is_made(
    report_to: str, tracker: type[Tracker], pretraining: Pretraining, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"not installed; give none, all, or some of: wandb\.$"):
        pretrain(pretraining(f"training.report_to={report_to}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- a loss that is no number


def test_a_loss_that_is_no_number_stops_and_leaves_the_last_good_checkpoint(
    pretraining: Pretraining,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: dict[str, bytes] = {}
    step, checkpoints = MetaTokenTrainer.training_step, tmp_path / "run" / "checkpoints"

    def spoil(self: MetaTokenTrainer, *args: object, **kwargs: object) -> torch.Tensor:
        if self.state.global_step == 5:
            kept.update(contents(checkpoints))
            with torch.no_grad():
                next(self.model.parameters()).mul_(math.inf)
        return step(self, *args, **kwargs)

    assert last_good_checkpoint(checkpoints) is None
    with monkeypatch.context() as patch:
        patch.setattr(MetaTokenTrainer, "training_step", spoil)
        with pytest.raises(UserError) as caught:
            pretrain(pretraining(), tmp_path / "run")
    for part in ("before step 6: the loss is nan", "on the items 20 to 23 of the", "at learning rate 0.00"):
        assert part in str(caught.value)
    assert contents(checkpoints) == kept
    assert last_good_checkpoint(checkpoints) == checkpoints / "checkpoint-4"
    pretrain(pretraining(), tmp_path / "run")
    pretrain(pretraining(), tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")


def test_a_learning_rate_that_makes_the_weights_overflow(pretraining: Pretraining, tmp_path: Path) -> None:
    overrides = ("training.learning_rate=1.0e+38", "training.warmup_steps=0", "training.save_steps=1")
    with pytest.raises(UserError, match=r"before step 2: .* at learning rate 9"):
        pretrain(pretraining(*overrides), tmp_path / "run")
