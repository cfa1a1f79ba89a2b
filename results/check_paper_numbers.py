"""Compares every number of `paper_numbers.json` with the paper's LaTeX source, which arXiv offers for download.

python results/check_paper_numbers.py learned_meta_tokens.tex
"""

import re
import sys
from pathlib import Path
from typing import Any

from metatokens.paper.report.paper_numbers import PaperTable, paper_table

TABLES = (1, 2, 3, *range(7, 18))
SPLITS = {"small": 128, "medium": 256, "hard": 512, "extra-hard": 1024, "long": 2048}
HEADINGS: dict[str, dict[str, object]] = {
    "Full": {"intervention": ""}, "No Pos": {"intervention": "no_pos"}, "No Embed": {"intervention": "no_embed"},
    "Neither": {"intervention": "neither"}, "No meta/pause tokens": {"model": "gpt2"},
    "With meta/pause tokens": {"model": "meta"}, "Noise 0.0": {"intervention": ""},
}  # fmt: skip


def rows_of(body: str) -> list[list[str]]:
    """The rows of a LaTeX table as bare cells."""
    tabular = re.search(r"\\begin\{tabular\}.*?\n(.*)\\end\{tabular\}", body, re.DOTALL)
    assert tabular
    text = re.sub(
        r"\\(toprule|midrule|bottomrule|addlinespace|hline)|\\multirow\{\d\}\{\*\}\{\w+\}",
        "",
        tabular[1],
    )
    text = (
        re.sub(r"\\textbf\{((?:[^{}]|\{[^}]*\})*)\}", r"\1", text)
        .replace("\\quad", "")
        .replace("\\%", "")
    )
    return [[cell.strip() for cell in row.split("&")] for row in text.split("\\\\") if row.strip()]


def number_of(cell: str) -> float | None:
    """A printed number; None for the dashes that the paper uses."""
    cell = re.sub(r"^\u2013(?=\d)", "-", cell)
    return None if cell in ("---", "\u2014", "\\textemdash") else float(cell)


def fields_of(label: str) -> dict[str, object]:
    """The model, its positions, its train length and its split, by the label of a row."""
    if "GPT-Neo" in label:
        return {"model": "gpt-neo", "position_embedding": "learned"}
    if not label.startswith(("Meta", "GPT-2")):
        return {"length": SPLITS[label]} if label in SPLITS else {}
    in_brackets = re.search(r"\(([^)]*)\)", label)
    assert in_brackets
    *split, trained = in_brackets[1].split(", ")
    return {
        "model": "meta" if label.startswith("Meta") else "gpt2",
        "position_embedding": "rope" if "RoPE" in label else "learned",
        "train_length": int(trained),
    } | ({"length": SPLITS[split[0]]} if split else {})


def column_of(heading: str) -> dict[str, object]:
    """The fields of a column, by its heading."""
    if heading in HEADINGS:
        return HEADINGS[heading]
    if heading.startswith("$\\Delta$"):
        return {"metric": "gain", "intervention": "no_pos"}
    if heading.startswith("Noise"):
        return {"intervention": f"noise:{float(heading.split()[1]):g}"}
    return {"length": 1024 * int(heading[:-1]) if heading.endswith("k") else int(heading)}


def check(number: int, body: str) -> None:
    """Compare a table's numbers, labels and columns."""
    table: PaperTable = paper_table(number)
    headings, *rows = rows_of(body)
    assert f"\\label{{{table.label}}}" in body
    headings = headings[1 + (number == 1) :]
    assert [column_of(heading) for heading in headings] == [*table.columns]
    group, seen = "", list[tuple[str, str, Any]]()
    for label, *cells in rows:
        if label.startswith("Meta") and not any(cells):
            group = label
            continue
        if number == 1:
            label, *cells = cells
        assert not any(cells[len(table.columns) :])
        seen.append((group, label, tuple(number_of(cell) for cell in cells[: len(table.columns)])))
    assert [(label, values) for _, label, values in seen] == [
        (row.printed, row.values) for row in table.rows
    ]
    for (group, label, _), row in zip(seen, table.rows, strict=True):
        known = table.fields | row.fields
        for name, value in (fields_of(group) | fields_of(label)).items():
            assert known.get(name) == value, (number, label, name)


if __name__ == "__main__":
    source = Path(sys.argv[1]).read_text(encoding="utf-8")
    # LaTeX numbers tables in order, starred or not.
    bodies = re.findall(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", source, flags=re.DOTALL)
    for number in TABLES:
        check(number, bodies[number - 1])
    print(f"{len(TABLES)} tables are the paper's")
