"""Two processes train what one does: the same global batch, the same losses, one run folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metatokens.checkpoint import load_model, verify_manifest
from metatokens.data.store import TokenStore
from metatokens.training.trainer import RunCallback
from tests.forked import PATIENCE, QUIET, Run, Start, command
from tests.training.conftest import figures_of

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


def overrides(*settings: str) -> list[str]:
    """The options of a command for some settings of its recipe."""
    return [option for setting in settings for option in ("--set", setting)]


def pretraining(store: TokenStore, out: Path, *, processes: int) -> list[object]:
    """The arguments of a run whose steps read eight blocks, however many processes share them."""
    settings = overrides(
        f"data.tokens={store.path}",
        "data.block_size=32",
        "model.hidden_size=16",
        "model.num_hidden_layers=1",
        "model.num_attention_heads=2",
        "training.max_steps=20",
        "training.logging_steps=1",
        "training.save_steps=10",
        "training.warmup_steps=5",
        "training.eval_steps=0",
        f"training.per_device_train_batch_size={8 // processes}",
    )
    return ["pretrain", "--recipe", "demo", "--out", out, *settings]


def tuning(model: Path, *options: object, steps: int, processes: int) -> list[object]:
    """The arguments of a fine-tuning whose steps read four examples, however many processes share them."""
    settings = overrides(
        f"training.max_steps={steps}",
        "training.logging_steps=1",
        f"training.save_steps={steps}",
        "training.learning_rate=0.01",
        f"training.per_device_train_batch_size={4 // processes}",
    )
    return ["finetune", "--model", model, *options, *settings]


def assert_same_training(ours: Path, theirs: Path) -> None:
    for figure in ("loss", "grad_norm"):
        assert figures_of(ours, figure) == pytest.approx(
            figures_of(theirs, figure), rel=1e-4, abs=0
        )
    torch.testing.assert_close(
        load_model(ours).state_dict(), load_model(theirs).state_dict(), rtol=1e-3, atol=1e-4
    )


@pytest.fixture(scope="module")
def alone(
    small_store: TokenStore, tmp_path_factory: pytest.TempPathFactory, run_ranks: Run
) -> Path:
    """Pretrained by one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run_ranks(1, command, *pretraining(small_store, out, processes=1))
    return out


def torchrun(processes: int, *arguments: object) -> str:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    program = [*launcher, "-m", "metatokens", *map(str, arguments)]
    done = subprocess.run(
        program, env=os.environ | QUIET, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("is_by_torchrun", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_two_processes_follow_the_losses_of_one_and_save_once(
    is_by_torchrun: bool, small_store: TokenStore, alone: Path, tmp_path: Path, run_ranks: Run
) -> None:
    arguments = pretraining(small_store, tmp_path / "run", processes=2)
    said = torchrun(2, *arguments) if is_by_torchrun else run_ranks(2, command, *arguments)
    assert said.count("model: ") == 1
    assert_same_training(tmp_path / "run", alone)
    verify_manifest(tmp_path / "run")


def command_that_stalls(*arguments: object) -> None:
    """The command, which does nothing more once it has saved a checkpoint."""
    save = RunCallback.on_save

    def save_and_stall(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        signal.pause()

    RunCallback.on_save = save_and_stall
    command(*arguments)


@pytest.mark.quick(before=[2])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_is_gone_on_with_by_another_number_of_processes(
    before: int,
    after: int,
    small_store: TokenStore,
    alone: Path,
    tmp_path: Path,
    start_ranks: Start,
    run_ranks: Run,
) -> None:
    out = tmp_path / "run"
    ranks = start_ranks(
        before, command_that_stalls, *pretraining(small_store, out, processes=before)
    )
    checkpoint = out / "checkpoints" / "checkpoint-10" / "manifest.json"
    end = time.monotonic() + PATIENCE
    while not checkpoint.exists() and ranks[0].status is None and time.monotonic() < end:
        time.sleep(0.01)
    assert checkpoint.exists()
    for rank in ranks:
        rank.end()
    assert not (out / "manifest.json").exists()
    run_ranks(after, command, *pretraining(small_store, out, processes=after))
    assert_same_training(out, alone)


def command_that_parts(*arguments: object) -> None:
    """The command, which leaves no thread of the backend to the interpreter's end."""
    try:
        command(*arguments)
    finally:
        assert not torch.distributed.is_initialized()


def test_labels_are_counted_over_all_processes(
    small_model: Callable[..., Path], tmp_path: Path, run_ranks: Run
) -> None:
    long = {"prompt": "two dogs", "completion": " ".join(["the cat sat on a mat"] * 8)}
    short = {"prompt": "two dogs", "completion": "the cat sat on a mat"}
    records, model = tmp_path / "records.jsonl", small_model()
    records.write_text(f"{json.dumps(long)}\n{json.dumps(short)}\n" * 8)
    for processes in (1, 2):
        arguments = tuning(model, "--data", records, steps=4, processes=processes)
        run_ranks(processes, command_that_parts, *arguments, "--out", tmp_path / str(processes))
    assert_same_training(tmp_path / "2" / "data", tmp_path / "1" / "data")


# PEFT's own.
@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")
def test_all_processes_train_the_adapters_of_the_length_before(
    small_model: Callable[..., Path], tmp_path: Path, run_ranks: Run
) -> None:
    model = small_model()
    for processes in (1, 2):
        options = overrides(
            "task.train_lengths=[48,64]",
            "training.lora_rank=2",
        )
        arguments = tuning(model, "--task", "parity", *options, steps=2, processes=processes)
        run_ranks(processes, command, *arguments, "--out", tmp_path / str(processes))
    assert_same_training(tmp_path / "2" / "64", tmp_path / "1" / "64")
