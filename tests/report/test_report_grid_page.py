"""The page of a grid: claims first, each with a link to its section; whole, repeatable, and honest about gaps."""

import re
from pathlib import Path

import pytest
from grid_inputs import accuracy, write_grid

from metatokens.records import append_records
from metatokens.report.page import write_report


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    return write_report(write_grid(folder), folder / "report")


@pytest.fixture(scope="module")
def page(index: Path) -> str:
    return index.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def markdown(index: Path) -> str:
    return (index.parent / "report.md").read_text(encoding="utf-8")


def test_every_claim_stands_first_with_a_verdict_and_a_link(page: str, markdown: str) -> None:
    rows = re.findall(r'<tr><th scope="row"><a href="#([\w-]+)">([^<]+)</a></th><td class="told ([\w-]+)">', page)
    assert len(rows) > 40
    assert {verdict for *_, verdict in rows} == {"holds", "does-not-hold", "cannot-be-told"}
    assert {anchor for anchor, *_ in rows} <= set(re.findall(r'<section id="([\w-]+)">', page))
    assert page.index('class="claims') < page.index("<section")
    linked = re.findall(r"^\| \[(?:[^\]]|\\\])+\]\(#([\w-]+)\) \|", markdown, re.MULTILINE)
    assert linked == [anchor for anchor, *_ in rows]
    assert set(linked) <= set(re.findall(r'<a id="([\w-]+)"></a>', markdown))


def test_every_table_and_figure_of_the_paper_has_its_place(page: str, markdown: str) -> None:
    for number in (1, 3, *range(7, 17)):
        assert re.search(rf"Tables? [^<]*\b{number}\b", page), number
        assert f"(Table {number})" in markdown, number
    assert "Tables 2, 17" in page
    pictures = re.findall(r"^!\[[^\n]+\]\(figures/([^)]+)\.png\)$", markdown, re.MULTILINE)
    assert pictures == [
        "lengths", "training_rope", "learning", "sharpness", "similarity", "heat_map", "rate_distortion",
        "random_positions",
    ]  # fmt: skip


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    references = re.findall(r'(?:src|srcset|href)="([^"]+)"', page)
    assert all(reference.startswith(("data:", "#")) for reference in references)
    assert "<script" not in page


def test_both_forms_have_the_papers_number_beside_ours(page: str, markdown: str) -> None:
    assert "97.4 (95.7\u201398.4)\npaper 99.3\nseeds 99 97 96" in page
    assert "97.4 (95.7\u201398.4) paper 99.3 seeds 99 97 96" in markdown
    assert all(line.count("|") >= 3 for line in markdown.splitlines() if line.startswith("| "))


def test_the_noise_is_defined_where_it_is_shown(page: str) -> None:
    section = page[page.index('<section id="noise">') :]
    assert "standard deviation S" in section[: section.index("</section>")]


def test_whether_every_model_was_trained_long_enough_is_told_at_once(page: str, markdown: str) -> None:
    # made-up: pause, the slowest that learns, is there at step 540 of 1,000; gpt2 never is
    told = "Every model had 1.5 times the slowest learner's steps or more: List recall at 128 tokens"
    first, section = page[: page.index("<section")], page[page.index('<section id="training">') :]
    assert f"Training with rope: {told}".replace("'", "&#39;") in first
    assert told.replace("'", "&#39;") in section[: section.index("</section>")]
    assert "\n| \u00f7 slowest learner | 1.85 | 1.85 | 1.85 | 1.85 |\n" in markdown


def test_the_cost_is_told(page: str) -> None:
    assert "3.0 core-hours in 3 stages, of which 2 trained a model." in page


def test_the_same_lines_give_the_same_bytes_whatever_is_missing(tmp_path: Path) -> None:
    append_records(tmp_path / "results.jsonl", [accuracy(0.5), accuracy(0.6, model="gpt2")])
    first, second = (write_report([tmp_path], tmp_path / out) for out in ("a", "b"))
    files = sorted(path.relative_to(first.parent) for path in first.parent.rglob("*") if path.is_file())
    assert Path("figures/lengths.png") in files
    for file in files:
        assert (first.parent / file).read_bytes() == (second.parent / file).read_bytes()
    assert "\u2026" in first.read_text(encoding="utf-8")


def test_the_paper_s_numbers_come_with_the_package() -> None:
    import metatokens.report

    assert (Path(metatokens.report.__file__).parent / "paper_numbers.json").is_file()
