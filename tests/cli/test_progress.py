"""Progress of training: a bar on a terminal, lines elsewhere."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from metatokens.cli.output import progress_bar
from metatokens.data.store import TokenStore
from tests.cli.command_lines import PRETRAIN, Succeed

NUMBER = r"[0-9.,e+-]+"
FIGURES = rf"loss {NUMBER}, (held-out loss {NUMBER}, )?learning rate {NUMBER}, {NUMBER} tokens/s"


def test_figures_are_printed_where_no_terminal_is(
    workplace: Path, small_store: TokenStore, run: Succeed
) -> None:
    (workplace / "tokens").symlink_to(small_store.path)
    longer = PRETRAIN.replace("training.max_steps=2", "training.max_steps=4")

    _, error = run(f"{longer} --set training.eval_steps=3 --out base")

    first, last, model = error.splitlines()
    assert re.fullmatch(f"pretrain 1/4: {FIGURES}", first)
    assert re.fullmatch(f"pretrain 4/4: {FIGURES}", last)
    assert ("held-out" in first, "held-out" in last) == (False, True)
    assert model == "model: base"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that progress sees, which a test moves on."""
    shown = SimpleNamespace(seconds=1000.0)
    time = SimpleNamespace(monotonic=lambda: shown.seconds)
    monkeypatch.setattr(sys.modules["metatokens.cli.output"], "time", time)
    return shown


def test_lines_of_figures_are_half_a_minute_apart(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    with progress_bar("finetune") as progress:
        for step in range(1, 1001):
            clock.seconds += 1.0
            progress(
                step,
                1000,
                {} if step < 5 else {"loss": 2.5, "eval_exact_match": 0.5},
            )

    lines = capsys.readouterr().err.splitlines()
    steps = [int(line.split()[1].split("/")[0].replace(",", "")) for line in lines]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert lines[0] == "finetune 5/1,000, 17 min left: loss 2.5, held-out exact match 50.0%"
    assert steps[-1] == 1000
    assert max(gaps) == 31


def test_the_time_that_is_left_is_that_of_a_run_that_resumes(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    with progress_bar("train") as progress:
        progress(100, 300, {})  # those before were done by another process
        clock.seconds += 60.0
        progress(110, 300, {})

    assert capsys.readouterr().err == "train 110/300, 19 min left\n"


def test_a_step_without_figures_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("choose blocks") as progress:
        progress(1, 2, {})
        progress(2, 2, {})
    assert capsys.readouterr().err == "choose blocks 2/2\n"


def test_of_processes_that_train_together_the_first_one_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress_bar("finetune") as progress:
        progress(4, 4, {"loss": 1.0})
    assert capsys.readouterr().err == ""


def test_the_bar_on_a_terminal_shows_the_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")

    with progress_bar("pretrain") as progress:
        progress(5, 10, {"loss": 2.5, "learning_rate": 6e-4, "eval_loss": 2.75})

    shown = capsys.readouterr().err
    assert "loss 2.5, held-out loss 2.75, learning rate 0.0006" in shown
    assert "5/10" in shown
