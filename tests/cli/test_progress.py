"""Progress of training: a bar on a terminal, lines elsewhere."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from metatokens.cli.output import progress_bar
from metatokens.data.store import TokenStore
from tests.cli.command_lines import PRETRAIN, Run


def test_figures_are_printed_where_no_terminal_is(workplace: Path, small_store: TokenStore, metatokens: Run) -> None:
    (workplace / "tokens").symlink_to(small_store.path)
    longer = PRETRAIN.replace("training.max_steps=2", "training.max_steps=4") + " --set training.eval_steps=3"
    number = r"[0-9.,e+-]+"
    figures = rf"loss {number}, learning rate {number}, {number} tokens/s(; step 3: held-out loss {number})?"
    lines = metatokens(f"{longer} --out base")[2].splitlines()
    assert [re.sub(figures, "FIGURES", line) for line in lines] == [
        "pretrain 1/4: FIGURES", "pretrain 4/4: FIGURES", "model: base"
    ]  # fmt: skip
    assert ["held-out" in line for line in lines] == [False, True, False]


def test_lines_of_figures_are_half_a_minute_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(sys.modules["metatokens.cli.output"], "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress_bar("finetune") as progress:
        for step in range(1, 1001):
            now[0] += 1.0
            progress(step, 1000, {} if step < 5 else {"loss": (2.5, step), "eval_exact_match": (0.5, step)})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "finetune 5/1,000: loss 2.5, held-out exact match 50.0%"
    steps = [int(line.split()[1].split("/")[0].replace(",", "")) for line in lines]
    assert all(later - earlier <= 31 for earlier, later in pairwise(steps))
    assert len(steps) < 40
    assert steps[-1] == 1000
    monkeypatch.setenv("RANK", "1")  # of processes that train together, the first one speaks
    with progress_bar("finetune") as progress:
        progress(4, 4, {"loss": (1.0, 4)})
    assert capsys.readouterr().err == ""


def test_the_bar_on_a_terminal_shows_the_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("pretrain") as progress:
        latest = {"loss": 2.5, "learning_rate": 6e-4, "tokens_per_second": 12345.6}
        progress(5, 10, {name: (value, 5) for name, value in latest.items()} | {"eval_loss": (2.75, 4)})
    shown = capsys.readouterr().err
    assert "loss 2.5, learning rate 0.0006, 12,346 tokens/s; step 4: held-out loss 2.75" in shown
    assert "5/10" in shown
