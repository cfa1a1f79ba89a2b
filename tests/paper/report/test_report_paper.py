"""The paper's numbers were typed right: every one is compared with the paper's own source, parsed here anew."""

import re
from pathlib import Path

import pytest

from metatokens.paper.report.paper import paper_figure, paper_table, printed

SOURCE = Path(__file__).parents[4] / "shared" / "paper" / "learned_meta_tokens.tex"
TABLES = (1, 2, 3, *range(7, 18))
SPLITS = {"small": 128, "medium": 256, "hard": 512, "extra-hard": 1024, "long": 2048}

needs_source = pytest.mark.skipif(not SOURCE.is_file(), reason="the paper's source is not beside this checkout")


def bodies() -> dict[int, str]:
    """The tables' contents by number: LaTeX numbers them in order, starred or not."""
    text = SOURCE.read_text(encoding="utf-8")
    found = re.findall(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", text, flags=re.DOTALL)
    return {number: re.search(r"\\begin\{tabular\}.*?\n(.*)\\end\{tabular\}", body, re.DOTALL)[1]  # type: ignore[index]
            for number, body in enumerate(found, start=1)}  # fmt: skip


def rows(number: int) -> list[list[str]]:
    """The rows of a table as bare cells."""
    text = re.sub(
        r"\\(toprule|midrule|bottomrule|addlinespace|hline)|\\multirow\{\d\}\{\*\}\{\w+\}", "", bodies()[number]
    )
    text = re.sub(r"\\textbf\{((?:[^{}]|\{[^}]*\})*)\}", r"\1", text).replace("\\quad", "").replace("\\%", "")
    return [[cell.strip() for cell in row.split("&")] for row in text.split("\\\\") if row.strip()]


def number_of(cell: str) -> float | None:
    """A printed number; None for the dashes that the paper uses."""
    cell = re.sub(r"^\u2013(?=\d)", "-", cell)
    return None if cell in ("---", "\u2014", "\\textemdash") else float(cell)


def fields_of(label: str) -> dict[str, object]:
    """What the name of a row says of the model, its positions, its train length and its split."""
    fields: dict[str, object] = {}
    if "GPT-Neo" in label:
        return {"model": "gpt-neo", "position_embedding": "learned"}
    if label.startswith(("Meta", "GPT-2")):
        fields["model"] = "meta" if label.startswith("Meta") else "gpt2"
        fields["position_embedding"] = "rope" if "RoPE" in label else "learned"
        *split, trained = re.search(r"\(([^)]*)\)", label)[1].split(", ")  # type: ignore[index]
        fields["train_length"] = int(trained)
        if split:
            fields["length"] = SPLITS[split[0]]
    return fields


@needs_source
@pytest.mark.parametrize("number", TABLES)
def test_every_number_is_the_papers(number: int) -> None:
    table, group, seen = paper_table(number), "", []
    for label, *cells in rows(number)[1:]:
        if label.startswith("Meta") and not any(cells):
            group = label
            continue
        if number == 1:
            label, *cells = cells
        assert not any(cells[len(table.columns) :])
        seen.append((group, label, tuple(number_of(cell) for cell in cells[: len(table.columns)])))
    assert [(label, values) for _, label, values in seen] == [(row.printed, row.values) for row in table.rows]
    for (group, label, _), row in zip(seen, table.rows, strict=True):
        said = fields_of(group) | fields_of(label) | ({"length": SPLITS[label]} if label in SPLITS else {})
        known = table.fields | row.fields
        assert {name: known.get(name) for name in said} == said


@needs_source
@pytest.mark.parametrize("number", TABLES)
def test_columns_stand_under_the_papers_headings(number: int) -> None:
    table, headings = paper_table(number), rows(number)[0]
    headings = headings[2:] if number == 1 else headings[1:]
    meant = {
        "Full": {"intervention": ""}, "No Pos": {"intervention": "no_pos"}, "No Embed": {"intervention": "no_embed"},
        "Neither": {"intervention": "neither"}, "No meta/pause tokens": {"model": "gpt2"},
        "With meta/pause tokens": {"model": "meta"}, "Noise 0.0": {"intervention": ""},
    }  # fmt: skip
    for heading, column in zip(headings, table.columns, strict=True):
        if heading.startswith("$\\Delta$"):
            assert column == {"metric": "gain", "intervention": "no_pos"}
        elif heading.startswith("Noise") and heading not in meant:
            assert column == {"intervention": f"noise:{float(heading.split()[1]):g}"}
        elif re.fullmatch(r"\d+k?", heading):
            length = 1024 * int(heading[:-1]) if heading.endswith("k") else int(heading)
            assert column == {"length": length}
        else:
            assert column == meant[heading]


@needs_source
@pytest.mark.parametrize("number", TABLES)
def test_labels_are_the_papers(number: int) -> None:
    found = re.findall(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", SOURCE.read_text(encoding="utf-8"), re.DOTALL)
    assert f"\\label{{{paper_table(number).label}}}" in found[number - 1]


def test_all_tables_with_results_are_there() -> None:
    assert all(paper_table(number).rows for number in TABLES)
    assert [paper_figure(number).figure for number in (1, 2, 3)] == [1, 2, 3]


def test_a_number_is_found_by_the_fields_of_its_result() -> None:
    table = paper_table(7)
    where = {"model": "meta", "position_embedding": "rope", "train_length": 512}
    assert [table.value(**where, length=length) for length in (128, 256, 512, 1024, 2048)] == [
        100.0,
        100.0,
        99.3,
        58.9,
        5.6,
    ]
    assert table.value(**where, length=4096) is None
    assert table.value(model="gpt-neo", length=1024) is None
    assert paper_table(11).value(position_embedding="rope", train_length=128, intervention="no_embed") == 32.4


def test_printed_numbers() -> None:
    assert [printed(value) for value in (5.6, 0.0, None)] == ["5.6", "0.0", "\u2014"]
