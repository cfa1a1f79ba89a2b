"""The committed report of the small grid: what its committed lines give, and what plain Python makes of them."""

import gzip
import json
import re
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats

from metatokens.paper.report.page import write_report
from tests.paper.report.made_lines import Line, wilson
from tests.paper.report.pages import table

ROOT = Path(__file__).parents[3]
LINES = ROOT / "results" / "small"
SPEEDS = [ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in ("decode_1", "decode_8", "prefill")]
NUMBERS = json.loads((ROOT / "src/metatokens/paper/report/paper_numbers.json").read_text(encoding="utf-8"))
POSITIONS = {"rotary positions": "rope", "learned positions": "learned", "without positions": "none"}
CONDITIONS = {"landmarks": "landmark", "decoys": "decoy", "long prompts": "long_prompt"}
LENGTH_TABLES = {"list_recall": 7, "segment_counting": 8, "parity": 9, "copying": 10}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_committed_pages_are_what_the_committed_lines_give(tmp_path: Path) -> None:
    write_report([LINES, *SPEEDS], tmp_path)
    for page in ("report.md", "tables.md"):
        assert (tmp_path / page).read_bytes() == (LINES / "report" / page).read_bytes()


def test_the_committed_page_is_short() -> None:
    text = (LINES / "report" / "report.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 4000
    assert not re.search(r"\bnan\b", text)


@cache
def lines(name: str) -> list[Line]:
    file = LINES / f"{name}.jsonl.gz"
    text = gzip.decompress(file.read_bytes()).decode() if file.exists() else (LINES / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n") if line]


@cache
def accuracies() -> dict[tuple[Any, ...], dict[int, Line]]:
    """The last line of each seed of the plain runs, by what was measured."""
    found: dict[tuple[Any, ...], dict[int, Line]] = {}
    for one in lines("results"):
        is_plain = one.get("recipe") == "small" and one.get("train_condition") == "paper" and "intervention" not in one
        if one["metric"] == "exact_match" and is_plain and one.get("value") is not None:
            key = tuple(
                one[key] for key in ("task", "condition", "model", "position_embedding", "train_length", "length")
            )
            found.setdefault(key, {})[one["seed"]] = one
    return found


def slow(seeds: dict[int, Line], most: int, nudge: float = 0) -> str:
    """What a cell shows; `nudge` decides which way a mean just between two figures is rounded."""
    values = [one["value"] for one in seeds.values()]
    fewer = f" \\[{len(values)}\\]" if len(values) < most else ""
    if len(values) == 1:
        ends = [100 * end for end in wilson(values[0], next(iter(seeds.values()))["n"])]
        return f"{100 * values[0]:.1f} ({ends[0]:.1f} to {ends[1]:.1f}){fewer}"
    reach = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return f"{100 * fmean(values) + nudge:.1f} \u00b1 {100 * reach:.1f}{fewer}"


def papers(task: str, **fields: Any) -> str:
    """The paper's figure, if there is one."""
    [paper] = (one for one in NUMBERS["tables"] if one["table"] == LENGTH_TABLES[task])
    for row in paper["rows"]:
        for column, value in zip(paper["columns"], row["values"], strict=True):
            cell = row["fields"] | column
            if value is not None and cell.items() <= fields.items():
                return f"<br>paper {value:.1f}"
    return ""


@pytest.mark.parametrize("task", LENGTH_TABLES)
def test_every_accuracy_is_recomputed_from_the_lines(task: str) -> None:
    page = (LINES / "report" / "report.md").read_text(encoding="utf-8")
    title = task.replace("_", " ").capitalize()
    mine = {key: seeds for key, seeds in accuracies().items() if key[0] == task}
    kinds = {position for _, _, _, position, _, _ in mine}
    compared = 0
    for name, is_main in ((f"{title}**", True), (f"{title}, other prompts**", False)):
        if f"\n**{name}" not in page:
            continue
        shown = {key: seeds for key, seeds in mine.items() if (key[1] == "paper") == is_main}
        most = max(len(seeds) for seeds in shown.values())
        trained = {key[4] for key in shown}
        for label, cells in table(page, name).items():
            if label in ("best shortcut", "guessing"):
                continue
            model, *rest = label.split(", ")
            said = [POSITIONS[one] for one in rest if one in POSITIONS] or [*{key[3] for key in shown}]
            [position] = said
            [train] = [int(one.removeprefix("to ").replace(",", "")) for one in rest if one.startswith("to ")] or [
                *trained
            ]
            for column, cell in cells.items():
                *condition, length = column.split(", ") if not column.replace(",", "").isdigit() else [column]
                what = CONDITIONS[condition[0]] if condition else "paper"
                where = {"model": model, "position_embedding": position, "train_length": train}
                where["length"] = int(length.replace(",", ""))
                seeds = shown.get((task, what, *where.values()), {})
                expected = {slow(seeds, most, nudge) for nudge in (-1e-9, 1e-9)} if seeds else {"\u2013"}
                own = papers(task, **where) if is_main else ""
                assert cell in {figure + own for figure in expected}, (label, column)
                compared += bool(seeds)
    assert compared == len(mine) > 0
    assert kinds


def test_perplexities_are_recomputed_from_the_lines() -> None:
    found: dict[str, list[float]] = {}
    for one in lines("results"):
        plain = {"metric": "perplexity", "condition": "none", "recipe": "small", "position_embedding": "rope"}
        if plain.items() <= one.items() and one.get("text", "held_out") == "held_out":
            found.setdefault(one["model"], []).append(one["value"])
    page = (LINES / "report" / "report.md").read_text(encoding="utf-8").split("## Perplexity")[1]
    compared = 0
    for model, values in found.items():
        if len(values) > 1:
            reach = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
            assert re.search(rf"\| {model}[^|]*\|.*{fmean(values):,.1f} \u00b1 {reach:,.1f}", page)
            compared += 1
    assert compared or not any(len(values) > 1 for values in found.values())
