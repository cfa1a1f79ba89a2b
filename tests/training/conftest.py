"""Recipes of seconds, and runs that can be cut off at any step."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from metatokens.data.store import TokenStore
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe

TRAINING = ("training.save_steps=2", "training.logging_steps=1", "training.warmup_steps=1", "training.eval_steps=0")


@pytest.fixture(scope="session")
def pretraining(small_store: TokenStore) -> Callable[..., PretrainRecipe]:
    """A pretraining recipe of 8 steps with checkpoints after every second one, and overrides."""
    model = ("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2")
    sizes = ("data.block_size=32", "training.max_steps=8", "training.per_device_train_batch_size=4")
    data = f"data.tokens={small_store.path}"
    return lambda *overrides: load_recipe(PretrainRecipe, "demo", [data, *model, *sizes, *TRAINING, *overrides])


@pytest.fixture(scope="session")
def finetuning() -> Callable[..., FinetuneRecipe]:
    """A fine-tuning recipe of 4 steps a train length with checkpoints after every second one, and overrides."""
    sizes = ("task.train_lengths=[64]", "training.max_steps=4", "training.per_device_train_batch_size=4")
    return lambda *overrides: load_recipe(FinetuneRecipe, "demo_finetune", [*sizes, *TRAINING, *overrides])


@pytest.fixture(scope="session")
def model(small_model: Callable[..., Path]) -> Path:
    """A model to fine-tune."""
    return small_model()


def curve(folder: Path) -> list[dict[str, float]]:
    """What a run logged, by step."""
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


class Steps(list[int]):
    """Progress that notes every step and its figures, and interrupts the run at one."""

    def __init__(self, stop_at: int | None = None):
        super().__init__()
        self.stop_at = stop_at
        self.figures: list[dict[str, float]] = []
        self.measured_at: list[dict[str, int]] = []

    def __call__(self, done: int, total: int, figures: Mapping[str, tuple[float, int]]) -> None:
        self.append(done)
        self.figures.append({name: value for name, (value, _) in figures.items()})
        self.measured_at.append({name: step for name, (_, step) in figures.items()})
        if done == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> type[Steps]:
    """Makes every step be reported, as if each took longer than the reports are apart."""
    clock = SimpleNamespace(monotonic=itertools.count(start=2, step=2).__next__)
    monkeypatch.setattr("metatokens.training.trainer.time", clock)
    return Steps
