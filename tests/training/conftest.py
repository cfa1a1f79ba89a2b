"""Recipes of seconds, runs that can be interrupted at any step, and what runs leave behind."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.blocks import BlockDataset
from metatokens.data.store import TokenStore
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.training.trainer import MetaTokenTrainer

Models = Callable[..., Path]
Pretraining = Callable[..., PretrainRecipe]
Finetuning = Callable[..., FinetuneRecipe]
TrainerOf = Callable[[Callable[[], object]], MetaTokenTrainer]
TRAINING = (
    "training.save_steps=2",
    "training.logging_steps=1",
    "training.warmup_steps=1",
    "training.eval_steps=0",
)
# Of learning rate 0: the model stays as it is.
ONE_STEP = (
    "training.max_steps=1",
    "training.save_steps=1",
)


@pytest.fixture(scope="session")
def pretraining(small_store: TokenStore) -> Pretraining:
    """A pretraining recipe of 8 steps with checkpoints after every second one, and overrides."""
    model = ("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2")
    sizes = ("data.block_size=32", "training.max_steps=8", "training.per_device_train_batch_size=4")
    data = f"data.tokens={small_store.path}"
    return lambda *overrides: load_recipe(
        PretrainRecipe, "demo", [data, *model, *sizes, *TRAINING, *overrides]
    )


@pytest.fixture(scope="session")
def finetuning() -> Finetuning:
    """A fine-tuning recipe of 4 steps a train length with checkpoints after every second one, and overrides."""
    sizes = (
        "task.train_lengths=[64]",
        "training.max_steps=4",
        "training.per_device_train_batch_size=4",
    )
    return lambda *overrides: load_recipe(
        FinetuneRecipe, "demo_finetune", [*sizes, *TRAINING, *overrides]
    )


@pytest.fixture(scope="session")
def model(small_model: Models) -> Path:
    """A model to fine-tune."""
    return small_model()


class Steps(list[int]):
    """Progress that records every step and its figures, and interrupts the run at one."""

    def __init__(self, stop_at: int | None = None):
        super().__init__()
        self.stop_at = stop_at
        self.figures: list[dict[str, float]] = []

    def __call__(self, done: int, total: int, figures: Mapping[str, float]) -> None:
        self.append(done)
        self.figures.append(dict(figures))
        if done == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> type[Steps]:
    """Makes a run report every step, as if each took longer than the time between two reports."""
    clock = SimpleNamespace(monotonic=itertools.count(start=2, step=2).__next__)
    monkeypatch.setattr("metatokens.training.trainer.time", clock)
    return Steps


@pytest.fixture
def trainer_of(monkeypatch: pytest.MonkeyPatch) -> TrainerOf:
    """The trainer that a run makes, about to start."""

    def make(run: Callable[[], object]) -> MetaTokenTrainer:
        made: list[MetaTokenTrainer] = []
        monkeypatch.setattr(MetaTokenTrainer, "train", lambda self, **_: made.append(self))
        run()
        (trainer,) = made
        trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
        return trainer

    return make


def interrupt(run: Callable[..., Any], steps: type[Steps], *cuts: int) -> None:
    """Start a run once for each of the cuts, and interrupt it there."""
    for cut in cuts:
        with pytest.raises(KeyboardInterrupt):
            run(progress=steps(stop_at=cut))


def curve(folder: Path) -> list[dict[str, float]]:
    """The points of a run's curve, by step."""
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


def figures_of(folder: Path, name: str) -> list[float]:
    """The values of one figure in a run's curve, by step."""
    return [point[name] for point in curve(folder) if name in point]


def first_loss(folder: Path) -> float:
    """The loss of a run's first step."""
    return figures_of(folder, "loss")[0]


def cosine_decay(start: float, end: float, *, steps: int, horizon: int) -> list[float]:
    """The values of so many steps of a cosine that falls from `start` to `end` within a horizon."""
    phases = [math.pi * step / horizon for step in range(steps)]
    return [end + (start - end) * (1 + math.cos(phase)) / 2 for phase in phases]


def weights(folder: Path) -> bytes:
    """The weights of the model that a run wrote."""
    return (folder / "model.safetensors").read_bytes()


def result(folder: Path) -> dict[str, bytes]:
    """Every file of a run, by its relative path, except its checkpoints."""
    files = [
        path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def text_loss(
    folder: Path, store: TokenStore, split: str, blocks: int, *, size: int = 32, seed: int = 0
) -> float:
    """The mean loss of a model over the text tokens of the first blocks of a split, token by token in double."""
    model = load_model(folder).double()
    dataset = BlockDataset(
        store, split, block_size=size, fraction=0.1, placement="uniform", seed=seed
    )
    losses = []
    for index in range(blocks):
        ids, labels = dataset[index]["input_ids"], dataset[index]["labels"]
        losses += token_losses(model, ids, [i for i in range(1, size) if labels[i] != -100])
    return sum(losses) / len(losses)


@torch.no_grad()
def token_losses(model: Any, ids: Sequence[int], indices: Iterable[int]) -> list[float]:
    """A model's losses at some tokens of one sequence, by the indices of these tokens."""
    log_probabilities = model(torch.tensor([[*ids]])).logits[0].log_softmax(-1)
    return [-log_probabilities[index - 1, ids[index]].item() for index in indices]
