"""A command that is killed at any moment and run again ends like one that nothing disturbed.

The quick run kills each command once; a thorough one three times, with four seeds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.commands import Commands, left, verbs_of


@pytest.fixture(scope="session")
def verbs(
    small_corpus: Path, small_store: Any, small_model: Callable[..., Path]
) -> dict[str, list[str]]:
    """The commands, without `--out`."""
    return verbs_of(small_corpus, small_store.path, small_model(), steps=24, tuned=8, prompts=40)


@pytest.fixture(scope="session")
def undisturbed(
    verbs: dict[str, list[str]], commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, float]]:
    """The output of an undisturbed command, and how many seconds it took."""
    done: dict[str, tuple[Path, float]] = {}

    def give(verb: str) -> tuple[Path, float]:
        if verb not in done:
            out = tmp_path_factory.mktemp(verb) / "out"
            commands.carry_through(["--help"], out)  # once this returns, the imports are done
            fate = commands.carry_through(verbs[verb], out)
            assert fate["status"] == 0, fate["said"]
            done[verb] = out, fate["seconds"]
        return done[verb]

    return give


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))]
)
@pytest.mark.parametrize("verb", ["tokenize", "pretrain", "finetune", "evaluate"])
def test_killed_at_random_moments(
    verb: str,
    seed: int,
    is_thorough: bool,
    verbs: dict[str, list[str]],
    commands: Commands,
    undisturbed: Callable[[str], tuple[Path, float]],
    tmp_path: Path,
) -> None:
    expected, seconds = undisturbed(verb)
    kills, killed = 3 if is_thorough else 1, 0
    while not killed:
        # A command that ends before its kill is not killed, as where the machine has less to do now than before. Then
        # another one is killed sooner.
        seconds /= 2
        out = tmp_path / str(seconds)
        fate = commands.carry_through(verbs[verb], out, kills=kills, seed=seed, seconds=seconds)
        assert fate["status"] == 0, fate["said"]
        assert left(out) == left(expected)
        killed = fate["killed"]


@pytest.mark.parametrize(
    ("verb", "inside", "call"),
    [
        ("pretrain", "transformers.modeling_utils:safe_save_file", 1),
        ("pretrain", "metatokens.training.trainer:write_manifest", 2),
        ("finetune", "metatokens.checkpoint:write_manifest", 1),
        pytest.param(
            "pretrain", "metatokens.training.trainer:save_model", 1, marks=pytest.mark.thorough
        ),
        pytest.param(
            "finetune", "transformers.modeling_utils:safe_save_file", 3, marks=pytest.mark.thorough
        ),
        pytest.param(
            "finetune", "metatokens.training.trainer:write_manifest", 1, marks=pytest.mark.thorough
        ),
    ],
)
def test_killed_while_a_checkpoint_is_written(
    verb: str,
    inside: str,
    call: int,
    verbs: dict[str, list[str]],
    commands: Commands,
    undisturbed: Callable[[str], tuple[Path, float]],
    tmp_path: Path,
) -> None:
    expected, _ = undisturbed(verb)
    fate = commands.carry_through(verbs[verb], tmp_path / "out", kills=2, inside=(inside, call))
    assert fate["killed"] == 2
    assert fate["status"] == 0, fate["said"]
    assert left(tmp_path / "out") == left(expected)
