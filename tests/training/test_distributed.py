"""Two processes train what one does: the same global batch, the same losses, one run folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from metatokens.data.store import TokenStore
from metatokens.model.checkpoint import load_model, verify_manifest
from tests.training import distributed_gradients

PATIENCE = 300  # seconds
SIZES = {
    "model.hidden_size": 16,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "data.block_size": 32,
    "training.max_steps": 50,
    "training.logging_steps": 1,
    "training.save_steps": 10,
    "training.warmup_steps": 5,
    "training.eval_steps": 0,
}

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def start(processes: int, arguments: Sequence[object]) -> subprocess.Popen[str]:
    """The command, or under torchrun one process of it for each rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launcher = [*launcher, "--no-python", sys.executable] if processes > 1 else [sys.executable]
    return subprocess.Popen(
        [*launcher, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(processes: int, *arguments: object) -> str:
    with start(processes, arguments) as process:
        error = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, error
    return error


def pretraining(store: TokenStore, out: Path, *, processes: int) -> list[object]:
    """The arguments of a run whose steps read eight blocks, however many processes share them."""
    settings = SIZES | {"data.tokens": store.path, "training.per_device_train_batch_size": 8 // processes}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["-m", "metatokens", "pretrain", "--recipe", "demo", "--out", out, *overrides]


def curve(folder: Path) -> dict[str, torch.Tensor]:
    points = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return {key: torch.tensor([point[key] for point in points]) for key in ("loss", "grad_norm")}


def assert_same_training(ours: Path, theirs: Path) -> None:
    for key, values in curve(ours).items():
        torch.testing.assert_close(values, curve(theirs)[key], rtol=1e-4, atol=0)
    weights = [load_model(folder).state_dict() for folder in (ours, theirs)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def alone(small_store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pretrained by one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(1, *pretraining(small_store, out, processes=1))
    return out


def test_two_processes_follow_the_losses_of_one_and_save_once(
    small_store: TokenStore, alone: Path, tmp_path: Path
) -> None:
    error = run(2, *pretraining(small_store, tmp_path / "run", processes=2))
    assert error.count("model: ") == 1
    assert len(curve(tmp_path / "run")["loss"]) == 50
    assert_same_training(tmp_path / "run", alone)
    verify_manifest(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in alone.iterdir()}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_is_gone_on_with_by_another_number_of_processes(
    before: int, after: int, small_store: TokenStore, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with start(before, pretraining(small_store, out, processes=before)) as process:
        checkpoint = out / "checkpoints" / "checkpoint-10" / "manifest.json"
        end = time.monotonic() + PATIENCE
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert checkpoint.exists()
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()
        process.communicate()
    assert not (out / "manifest.json").exists()
    run(after, *pretraining(small_store, out, processes=after))
    assert_same_training(out, alone)


def test_another_whole_batch_is_another_run(small_store: TokenStore, alone: Path) -> None:
    with start(1, pretraining(small_store, alone, processes=2)) as process:
        _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "batch was 8 and is now 4" in error


def test_labels_are_counted_over_all_processes(small_model: Callable[..., Path], tmp_path: Path) -> None:
    words = ["the cat sat on a mat"] * 8
    long, short = ({"prompt": "two dogs", "completion": " ".join(words[:count])} for count in (8, 1))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (long, short) * 8))
    for processes in (1, 2):
        sizes = ["training.max_steps=4", "training.logging_steps=1", "training.save_steps=4"]
        sizes += ["training.learning_rate=0.01", f"training.per_device_train_batch_size={4 // processes}"]
        overrides = [part for setting in sizes for part in ("--set", setting)]
        tuning = ["finetune", "--model", small_model(), "--data", tmp_path / "records.jsonl", *overrides]
        run(processes, "-m", "metatokens", *tuning, "--out", tmp_path / str(processes))
    assert_same_training(tmp_path / "2" / "data", tmp_path / "1" / "data")


def test_sharded_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    run(2, distributed_gradients.__file__, tmp_path / "gradients.pt")
    sharded = torch.load(tmp_path / "gradients.pt", weights_only=True)
    model = distributed_gradients.model()
    ids, labels = distributed_gradients.batch()
    model(ids, labels=labels, use_cache=False).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert sharded.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-5, atol=1e-7)
