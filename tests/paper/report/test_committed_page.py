"""The committed report of the small grid: what its committed lines give, and what plain Python makes of them."""

import gzip
import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from metatokens.paper.report.page import write_report
from tests.paper.report.made_lines import Line, wilson
from tests.paper.report.pages import table

ROOT = Path(__file__).parents[3]
LINES = ROOT / "results" / "small"
SPEEDS = [ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in ("decode_1", "decode_8", "prefill")]
NUMBERS = json.loads((ROOT / "src/metatokens/paper/report/paper_numbers.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("undrawn")
def test_the_committed_page_is_what_the_committed_lines_give(tmp_path: Path) -> None:
    write_report([LINES, *SPEEDS], tmp_path)
    assert (tmp_path / "report.md").read_bytes() == (LINES / "report" / "report.md").read_bytes()


def test_what_was_not_measured_is_no_number() -> None:
    page = (LINES / "report" / "report.md").read_text(encoding="utf-8")
    assert "| nan |" not in page
    assert re.search(r"\| List recall \| long.*prompt \| .*\| - \|", page)  # 4,096 tokens, of short cuts


@cache
def lines(name: str) -> list[Line]:
    text = gzip.decompress((LINES / f"{name}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.split("\n") if line]


def found(name: str, **fields: Any) -> dict[int, Line]:
    """The last line with these fields, and none of the others that a plain figure has not, of each seed."""
    return {one["seed"]: one for one in lines(name) if all(one.get(key) == value for key, value in fields.items())}


def shown(title: str) -> dict[str, dict[str, str]]:
    """The cells of a table of the committed report, by the first words of its rows."""
    cells = table((LINES / "report" / "report.md").read_text(encoding="utf-8"), title)
    return {label.split(" (")[0]: row for label, row in cells.items()}


@pytest.mark.parametrize(
    ("number", "task"), [(7, "list_recall"), (8, "segment_counting"), (9, "parity"), (10, "copying")]
)
def test_accuracies_by_length(number: int, task: str) -> None:
    [paper] = (one for one in NUMBERS["tables"] if one["table"] == number)
    printed = {frozenset(({"train_length": 512} | row["fields"]).items()): row["values"] for row in paper["rows"]}
    name = task.replace("_", " ").capitalize()
    cells_of = shown(f"{name} (Table {number}): answers exactly right, %")
    compared = 0
    for label, cells in cells_of.items():
        if label in ("floor", "n"):
            continue
        model, position, trained = label.split(", ")
        own: Line = {"model": model, "position_embedding": position, "train_length": int(trained)}
        values = dict(zip(cells, printed[frozenset(own.items())], strict=True))
        about = {"task": task, "condition": "paper", "train_condition": "paper", "recipe": "small"} | own
        for column, cell in cells.items():
            length = int(column.replace(",", ""))
            seeds = found("results", metric="exact_match", intervention=None, length=length, **about)
            expected = "\u2026"
            if run := [one for _, one in sorted(seeds.items()) if one.get("value") is not None]:
                ends = [fmean(all_) for all_ in zip(*(wilson(one["value"], one["n"]) for one in run), strict=True)]
                mean = fmean(one["value"] for one in run)
                expected = f"{100 * mean:.1f} ({100 * ends[0]:.1f}\u2013{100 * ends[1]:.1f})"
                compared += 1
            elif seeds:
                expected = "-"
            theirs = values[column]
            expected += " paper \u2014" if theirs is None else f" paper {theirs:.1f}"
            if len(run) > 1:
                expected += " seeds " + " ".join(f"{100 * one['value']:.0f}" for one in run)
            assert cell == expected, (label, column)
    of_row = ("model", "position_embedding", "train_length")
    plain = {"task": task, "metric": "exact_match", "recipe": "small", "condition": "paper", "train_condition": "paper"}
    measured = {
        (*(one[key] for key in of_row), one["length"])
        for one in lines("results")
        if plain.items() <= one.items() and one.get("value") is not None and "intervention" not in one
        if frozenset({key: one[key] for key in of_row}.items()) in printed
    }
    assert compared == len(measured) >= 40  # a row that was measured is not left out


def inner_figure(fields: Line) -> str:
    seeds = [one for _, one in sorted(found("analysis", **fields).items())]
    value, low, high = (f"{fmean(one[end] for one in seeds):z.3f}" for end in ("value", "low", "high"))
    several = " seeds " + " / ".join(f"{one['value']:z.3f}" for one in seeds) if len(seeds) > 1 else ""
    return f"{value} ({low} to {high}){several}".replace("-", "\u2212")


def test_what_was_measured_inside() -> None:
    entropy = {"metric": "attention_entropy_change", "module": "attention", "layer": None, "head": None}
    logit = {"metric": "output_answer_logit_change", "marker": "final"}
    cosine = {"metric": "similarity_centred", "marker": "context", "layer": 4}
    for title, row, fields in (
        ("What the meta-tokens' embeddings change", "attention entropy of rows that see one", entropy),
        ("What the meta-tokens' embeddings change", "the answer's logit at the end", logit),
        ("Cosine with the tokens before", "1 before, meta-token", cosine | {"subject": "meta", "distance": 1}),
        ("Cosine with the tokens before", "32 before, text control", cosine | {"subject": "text", "distance": 32}),
    ):
        cells = shown(title)[row]
        assert len(cells) == 4
        for column, cell in cells.items():
            model, position = column.split(" ")[0].strip(","), column.split(" ")[1]
            own = {"model": model, "position_embedding": position, "recipe": "small"} | fields
            assert cell == inner_figure(own), (row, column)
