"""The committed report of the small grid: what its committed lines give, and what plain Python makes of them."""

import gzip
import json
from collections import defaultdict
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import pytest
from scipy import stats

from metatokens.paper.report.page import write_report
from tests.paper.report.made_lines import Line
from tests.paper.report.pages import table

ROOT = Path(__file__).parents[3]
LINES = ROOT / "results" / "small"
PAGE = LINES / "report" / "report.md"
SPEEDS = [
    ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    for name in ("decode_1", "decode_8", "prefill")
]
PAPER = json.loads(
    (ROOT / "src/metatokens/paper/report/paper_numbers.json").read_text(encoding="utf-8")
)
CONDITIONS = {"landmarks": "landmark", "decoys": "decoy", "long prompts": "long_prompt"}
LENGTH_TABLES = {"list_recall": 7, "segment_counting": 8, "parity": 9, "copying": 10}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_committed_pages_are_what_the_committed_lines_give(tmp_path):
    write_report([LINES, *SPEEDS], tmp_path)

    for page in ("report.md", "tables.md"):
        assert (tmp_path / page).read_bytes() == (LINES / "report" / page).read_bytes()


class Setting(NamedTuple):
    """What a cell is of."""

    condition: str
    model: str
    position_embedding: str
    train_length: int
    length: int


@cache
def results():
    text = gzip.decompress((LINES / "results.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def accuracies(task):
    """The last line of each seed of the plain runs, by what was measured."""
    by_setting: dict[Setting, dict[int, Line]] = defaultdict(dict)
    for line in results():
        is_plain = line.get("recipe") == "small" and line.get("train_condition") == "paper"
        is_accuracy = line["metric"] == "exact_match" and line.get("value") is not None
        if line.get("task") == task and is_plain and is_accuracy and "intervention" not in line:
            setting = Setting(*(line[field] for field in Setting._fields))
            by_setting[setting][line["seed"]] = line
    return by_setting


def shown_mean(lines):
    """What a cell of twelve runs may show: a mean just between two figures may be rounded either way."""
    values = [line["value"] for line in lines]
    reach = 100 * stats.t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    mean = 100 * fmean(values)
    return {f"{mean + nudge:.1f} \u00b1 {reach:.1f}" for nudge in (-1e-9, 1e-9)}


def papers(task, setting):
    """The paper's figure below ours, if there is one."""
    [paper] = (table for table in PAPER["tables"] if table["table"] == LENGTH_TABLES[task])
    fields = setting._asdict()
    for row in paper["rows"]:
        for column, value in zip(paper["columns"], row["values"], strict=True):
            cell = row["fields"] | column
            if value is not None and cell.items() <= fields.items():
                return f"<br>paper {value:.1f}"
    return ""


def setting_of(row, column):
    """What a cell is of; a label leaves out the fields in which all rows agree."""
    model, *words = row.split(", ")
    fields = {"position_embedding": "rope", "train_length": 128, "condition": "paper"}
    for word in words:
        fields["train_length"] = int(word.removeprefix("to "))
    condition, _, length = column.rpartition(", ")
    if condition:
        fields["condition"] = CONDITIONS[condition]
    return Setting(model=model, length=int(length.replace(",", "")), **fields)


@pytest.mark.parametrize("task", LENGTH_TABLES)
def test_every_accuracy_is_recomputed_from_the_lines(task):
    page = PAGE.read_text(encoding="utf-8")
    title = f"{task.replace('_', ' ').capitalize()}**"
    measured = accuracies(task)
    compared = set()

    for section in ("## Accuracy by length", "## Other prompts"):
        shown = table(page.split(section)[1], title)
        for row, cells in shown.items():
            if row in ("best shortcut", "guessing"):
                continue
            for column, cell in cells.items():
                setting = setting_of(row, column)
                lines = list(measured.get(setting, {}).values())
                if not lines:
                    assert cell == "\u2013"
                    continue
                below = papers(task, setting) if setting.condition == "paper" else ""
                assert cell.removesuffix(below) in shown_mean(lines), setting
                assert cell.endswith(below)
                compared.add(setting)

    expected = {
        setting
        for setting in measured
        if setting.condition == "paper" or setting.train_length == 128
    }
    assert compared == expected
    assert compared
