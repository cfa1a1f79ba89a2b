"""The script that times both forms of meta-attention next to the plain base, at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dense_form import SIZES, TASKS, Switch, units
from metatokens.model.attention import MetaAttention

TINY = ("tiny", "tiny GPT-2")


@pytest.mark.parametrize("size", TINY)
def test_each_unit_runs_the_form_that_it_names(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, model = SIZES[size]()
    calls = []
    ours = MetaAttention._dense
    monkeypatch.setattr(MetaAttention, "_dense", lambda *args: calls.append(1) or ours(*args))
    for name, unit in units(base, model, 32, 9, "cpu").items():
        calls.clear()
        unit.prepare()
        unit.work()
        assert bool(calls) == ("dense" in name), name


@pytest.mark.parametrize("size", TINY)
def test_both_forms_are_one_function(size: str) -> None:
    model: Any = SIZES[size]()[1]
    for name, weight in model.named_parameters():  # a retrofit starts with an output of zero
        if "out_proj" in name:
            weight.data.normal_(std=0.1)
    switch, ids = Switch(model.eval()), torch.randint(1, 60, (1, 40))
    ids[:, 3::5] = model.config.meta_token_id
    with torch.no_grad():
        gathered = model(input_ids=ids, use_cache=False).logits
        switch.is_dense = True
        dense = model(input_ids=ids, use_cache=False).logits
    assert 0 < (dense - gathered).abs().max() < 1e-4


def test_it_writes_a_line_for_each_comparison(tmp_path: Path) -> None:
    sizes = [
        "--size",
        TINY[0],
        "--length",
        "32",
        "--new-tokens",
        "9",
        "--rounds",
        "2",
        "--threads",
        "1",
    ]
    line = [
        sys.executable,
        "-m",
        "benchmarks.dense_form",
        *sizes,
        "--out",
        str(tmp_path / "lines.jsonl"),
    ]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        json.loads(line)
        for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {line["task"] for line in lines} == set(TASKS)
    assert len(lines) == 9
    assert all(line["ratio"] > 0 and line["n"] == 2 for line in lines)
