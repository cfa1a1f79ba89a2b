"""The report of a grid: its tables, its claims, and what it says is missing."""

import re
from pathlib import Path
from statistics import fmean

import pytest

from metatokens.paper.report.page import write_report
from tests.paper.report import pages
from tests.paper.report.made_lines import accuracy, grid, inner, skilled, wilson, write
from tests.paper.report.pages import Page, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grid")
    with pages.undrawn():
        return write_report(grid(made), made / "report").parent


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report.md").read_text(encoding="utf-8")


def with_interval(*values: float) -> str:
    low, high = (100 * fmean(ends) for ends in zip(*(wilson(value, 500) for value in values), strict=True))
    return f"{100 * fmean(values):.1f} ({low:.1f}\u2013{high:.1f})"


def test_floor_and_n_are_below_or_beside(text: str) -> None:
    rows = table(text, "Parity (Table 9)")
    assert rows["floor"] | rows["n (prompts a seed)"] == dict.fromkeys(rows["floor"], "500")
    assert set(rows["floor"].values()) == {"52.0"}  # the commonest answer, above chance
    row = table(text, "What each addition brings")["Parity, 512 \u2192 512"]
    assert (row["floor"], row["n (prompts a seed)"]) == ("52.0", "500")
    tokens = table(text, "List recall: answer tokens right")
    assert list(tokens)[-1] == "n (tokens a seed)"
    assert "floor" not in tokens


def test_differences_are_of_the_seeds_that_both_have(text: str) -> None:
    row = table(text, "What each addition brings")["List recall, 512 \u2192 2,048"]
    assert row["pause (seed 0)"] == with_interval(skilled("pause", "list_recall", 2048, 512))
    gap = 100 * (skilled("meta", "list_recall", 2048, 512) - skilled("twin", "list_recall", 2048, 512))
    assert row["meta \u2212 twin"].startswith(f"+{gap:.1f} (+")


def test_a_row_of_ablations_is_of_the_seeds_that_all_its_cells_have(text: str) -> None:
    row = table(text, "List recall (Table 11)")["meta, rope, 512"]
    whole = skilled("meta", "list_recall", 512, 512)
    assert row["full"] == f"{with_interval(whole, whole - 0.02)} paper 100.0 seeds 99 97"
    assert row["no position"] == f"{with_interval(0.5, 0.6)} paper 100.0 seeds 50 60"
    assert row["neither"] == "\u2026 paper 25.2"
    zeroed = table(text, "List recall, no position at the meta-tokens")["rope, 512 \u2192 512"]
    assert zeroed["difference, points"].startswith(f"\u2212{100 * (whole - 0.01 - 0.55):.1f} (\u2212")


def test_tables_of_what_is_no_accuracy(text: str) -> None:
    learning = table(text, "List recall, trained to 128 tokens")
    assert list(learning["meta, rope"].values()) == ["900 k / 1.2 M", "3 M", "200"]
    assert learning["gpt2, rope"]["text tokens to 90 %, by seed"] == "2.7 M"
    sooner = table(text, "Steps until so many prompts are answered right")
    assert {label: row["List recall"] for label, row in sooner.items() if label.startswith("meta")} == {
        "meta, 80 %": "300 / 400", "meta, 95 %": "300 / 400"
    }  # fmt: skip
    assert sooner["meta, 95 %"]["Parity"] == "\u2026"
    steps = table(text, "Steps until the answer loss stays under 0.1, rope")
    assert [row["List recall"] for row in steps.values()] == ["650", "650", "1,000", "1.54"]
    perplexity = table(text, "Perplexity of text tokens")
    assert perplexity["meta, rope"] == {"held-out text, alone": "78.00 (75.50\u201380.50) 77.00 / 79.00"}
    assert perplexity["unigram"] == {"held-out text, alone": "412.0"}
    speed = text.split("**Inference with meta-tokens")[1].split("\n\n")[1]
    rows = ["decoding, batch 1 | dense, inserting / gpt2 | 165 |  | 1.555 (1.544 to 1.566) | 1.11 | 1.111 | 5"]
    rows += ["first token after 461 of text, batch 1 | dense / gpt2 | 144 | 3,200 | 1.600 (1.590 to 1.610) | 1.02 |"]
    assert all(f"| {row} " in speed for row in rows)
    distortion = table(text, "Distortion (nats) at a rate")["held out: meta, last meta-token"]
    assert list(distortion.values())[1] == "1.850 1.800 to 1.900"
    weights = table(text, "What the final meta-token attends to")
    assert weights["attention: itself"] == {"meta, rope list recall, 512 \u2192 256": "20.0 (15.0 to 25.0) evenly 20.0"}


def test_a_model_of_the_users_own_stands_beside_the_others(tmp_path: Path, undrawn: None) -> None:
    changes = [inner("sharpness", "output_entropy_change", 1.0, model=one, marker="final", quantiles=[0.0] * 7)
               for one in ("mine", "meta")]  # fmt: skip
    folder = write(tmp_path, results=[accuracy(0.5)], analysis=changes)
    text = (write_report([folder], tmp_path / "out").parent / "report.md").read_text(encoding="utf-8")
    columns = table(text, "What the meta-tokens' embeddings change")["output entropy at the end"]
    assert [column.split(",")[0] for column in columns] == ["meta", "mine"]


def test_the_first_screen_counts_the_verdicts_of_the_papers_claims(text: str) -> None:
    rows = re.findall(r"^\| \[(.*)\]\(#[\w-]+\) \| (.) (.*?) \| (.*) \| (.*) \| (.*) \|$", text, flags=re.MULTILINE)
    papers = [mark for _, mark, *_, source in rows if source not in ("control", "beyond the paper")]
    holds, fails, divided, open_ = (papers.count(mark) for mark in "\u2713\u2717\u25d0?")
    first = (
        f"Of {len(papers)} claims of the paper {holds} hold at this scale, {fails} do not, {divided} hold in part, and "
        f"{open_} cannot be told."
    )
    assert text.split("\n\n")[4] == first
    assert min(holds, fails, open_) > 0
    counted = re.search(rf"\? {open_} cannot be told: (\d+) because too few .*, (\d+) because the comparisons", text)
    assert counted
    assert sum(map(int, counted.groups())) == open_
    found = {claim: (verdict, tally, quoted) for claim, _, verdict, tally, quoted, _ in rows}
    assert found["Meta-attention helps: meta beats pause"][:2] == ("holds (one seed, so far)", "9 : 0 of 9, 27 not run")
    assert found["Trained where no marker tells the answer, meta beats twin"] == (
        "cannot be told at this scale (not run)",
        "\u2026",
        "",
    )
    sentence = (
        "\u2713 Holds (one seed, so far): Meta-attention helps: meta beats pause (list recall, rope, 512 \u2192 1,024: "
    )
    assert f"\n{sentence}64.8 v 15.6 (seed 0); 9 for, 0 against of 9, 27 not run; median +" in text


def test_every_comparison_stands_below_its_claim(text: str) -> None:
    rows = table(text, "Data-efficient: fewer tokens of fine-tuning than gpt2 to 90 % recall")
    [(label, row)] = rows.items()
    assert (label, row["figures"], row["says"]) == (
        "text tokens to 90 %", "900 k / 1.2 M v 2.7 M", "uninformative"
    )  # fmt: skip
    assert row["difference (95 % interval)"] == "all before"
    noise = table(text, "Noise of 0.1 and 0.5 on positions loses nothing")
    assert noise["List recall, rope, 512 \u2192 128, noise 0.1"]["says"] == "against"
    assert noise["Copying, rope, 512 \u2192 128, noise 0.1"]["difference (95 % interval)"] == "\u2026"


def test_where_it_was_run_and_what_it_cost(text: str) -> None:
    assert "3.0 core-hours in 3 stages, of which 2 trained a model." in text
    costs = table(text, "One core each")
    assert {what: tuple(row.values()) for what, row in costs.items()} == {
        "tokenize": ("1", "1 h 0 min"), "pretrain": ("1", "1 h 0 min"), "finetune": ("1", "1 h 0 min"),
        "in all": ("3", "3 h 0 min"),
    }  # fmt: skip
    assert "Models of 0.362 to 0.395 million parameters; the paper's has 152." in text


def test_the_page_shows_what_the_markdown_shows(folder: Path, text: str) -> None:
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    cells = {" ".join(cell.split()) for cell in page.texts["td"]}
    figures = {cell.strip() for line in text.split("\n") if line.startswith("| ") for cell in line.split(" |")[1:]}
    figures = {one for one in figures if re.match(r"[\d.]+ \([\d.]+\u2013|\u2026 paper", one)}
    assert len(figures) > 100
    assert figures <= cells
    targets = {str(attributes["href"])[1:] for tag, attributes in page.elements if tag == "a"}
    assert targets
    assert targets <= {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert targets <= set(re.findall(r'^<a id="([\w-]+)"></a>$', text, flags=re.MULTILINE))
