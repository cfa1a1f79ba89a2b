"""A command that is killed at any moment, and given again, ends like one that nothing disturbed.

By default a few kills of each kind; `make reliability` sets METATOKENS_RELIABILITY=long for all of them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KILLING = Path(__file__).parent / "killing.py"
IS_LONG = os.environ.get("METATOKENS_RELIABILITY") == "long"
ROUNDS = range(4 if IS_LONG else 1)  # of three kills each

TRAINING = ["training.save_steps=2", "training.logging_steps=1", "training.per_device_train_batch_size=4"]
SIZES = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2", "data.block_size=32"]


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


@pytest.fixture(scope="session")
def verbs(small_corpus: Path, small_store: Any, small_model: Callable[..., Path]) -> dict[str, list[str]]:
    """The commands; each is given `--out`."""
    pretraining = settings(f"data.tokens={small_store.path}", "training.max_steps=24", *SIZES, *TRAINING)
    tuning = settings("task.train_lengths=[64, 128]", "training.max_steps=8", *TRAINING)
    return {
        "tokenize": ["tokenize", "--corpus", str(small_corpus), "--tokenizer", "train:400"],
        "pretrain": ["pretrain", "--recipe", "demo", *pretraining],
        "finetune": ["finetune", "--task", "parity", "--model", str(small_model()), *tuning],
        "evaluate": ["evaluate", "--task", "parity", "--model", str(small_model()), "--lengths", "64,128", "-n", "40"],
    }


class Killer:
    """The script, at work: its imports take longer than most commands."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(KILLING)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def carry_through(self, arguments: list[str], out: Path, **plan: Any) -> dict[str, Any]:
        """Run the command, killed as planned; its fate, what it printed, and the seconds that it took."""
        said = out.with_name(f"{out.name}.said")
        plan |= {"arguments": [*arguments, "--out", str(out)], "said": str(said)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began = time.monotonic()
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        fate = json.loads(self._process.stdout.readline())
        return fate | {"said": said.read_text() if said.exists() else "", "seconds": time.monotonic() - began}

    def stop(self) -> None:
        """End the script."""
        self._process.communicate()


@pytest.fixture(scope="session")
def killer() -> Iterator[Killer]:
    started = Killer()
    yield started
    started.stop()


def left(out: Path) -> dict[str, Any]:
    """What counts of a run's folder or of a result file: not the checkpoints, the lock, and when results were made."""
    if out.is_file():
        return {"lines": [json.loads(line) | {"created": None} for line in out.read_text().splitlines()]}
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts and path.name != ".lock"
    }


@pytest.fixture(scope="session")
def undisturbed(
    verbs: dict[str, list[str]], killer: Killer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, float]]:
    """The output of a command that nobody disturbed, and the seconds that it took."""
    done: dict[str, tuple[Path, float]] = {}

    def give(verb: str) -> tuple[Path, float]:
        if verb not in done:
            out = tmp_path_factory.mktemp(verb) / "out"
            killer.carry_through(["--help"], out, kills=0)  # when it answers, its imports are done
            fate = killer.carry_through(verbs[verb], out, kills=0)
            assert fate["status"] == 0, fate["said"]
            done[verb] = out, fate["seconds"]
        return done[verb]

    return give


@pytest.mark.parametrize("seed", ROUNDS)
@pytest.mark.parametrize("verb", ["tokenize", "pretrain", "finetune", "evaluate"])
def test_killed_at_random_moments(
    verb: str,
    seed: int,
    verbs: dict[str, list[str]],
    killer: Killer,
    undisturbed: Callable[[str], tuple[Path, float]],
    tmp_path: Path,
) -> None:
    expected, seconds = undisturbed(verb)
    # A try that goes on has less to do, and one that is done before its kill is not killed.
    fate = killer.carry_through(verbs[verb], tmp_path / "out", kills=3, seed=seed, seconds=seconds / 2)
    assert fate["status"] == 0, fate["said"]
    assert left(tmp_path / "out") == left(expected)
    print(f"{verb}, seed {seed}: {fate['killed']} kills")


@pytest.mark.parametrize(
    ("inside", "call"),
    [
        ("transformers.modeling_utils:safe_save_file", 1),
        ("transformers.modeling_utils:safe_save_file", 3),
        ("metatokens.training.trainer:write_manifest", 1),
        ("metatokens.training.trainer:write_manifest", 2),
        ("metatokens.training.trainer:save_model", 1),
        ("metatokens.model.checkpoint:write_manifest", 1),
    ],
)
@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_killed_while_a_checkpoint_is_written(
    verb: str,
    inside: str,
    call: int,
    verbs: dict[str, list[str]],
    killer: Killer,
    undisturbed: Callable[[str], tuple[Path, float]],
    tmp_path: Path,
) -> None:
    if verb == "finetune" and not IS_LONG:
        pytest.skip("the quick run does this for pretraining alone; make reliability does it for fine-tuning too")
    expected, _ = undisturbed(verb)
    fate = killer.carry_through(verbs[verb], tmp_path / "out", kills=2, inside=inside, call=call)
    assert fate["killed"] == 2
    assert fate["status"] == 0, fate["said"]
    assert left(tmp_path / "out") == left(expected)
    if call > 1 or "save_model" in inside:
        return
    # The checkpoint that was being written is never taken for a good one, and a message says so.
    is_of_checkpoint = inside != "metatokens.model.checkpoint:write_manifest"
    assert ("It is dropped, and an earlier one is used." in fate["said"]) == is_of_checkpoint
