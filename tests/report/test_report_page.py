"""The report's two files: self-contained, escaped, repeatable, and honest about what is missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from metatokens.errors import UserError
from metatokens.records import append_records
from metatokens.report.page import write_report
from tests.report.report_inputs import (
    EXAMPLES,
    accuracies,
    accuracy,
    all_equal,
    meta_best,
    other_results,
    write_run,
)


class Page(HTMLParser):
    """Tags with their attributes, and the text of chosen elements."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("pre", "mark", "p", "td", "th"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts[tag][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "demo")


@pytest.fixture(scope="module")
def index(run: Path) -> Path:
    return write_report([run], run / "report")


@pytest.fixture(scope="module")
def page(index: Path) -> Page:
    return Page(index.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_but_itself(page: Page) -> None:
    references = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "srcset", "href", "data", "action")
    ]
    assert len([value for value in references if value and value.startswith("data:image/png")]) == 2 * 4
    assert all(value and (value.startswith("data:") or value.startswith("#")) for value in references)
    assert "script" not in {tag for tag, _ in page.tags}


def test_links_lead_to_sections(page: Page) -> None:
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    targets = [str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"]
    assert targets
    assert set(targets) <= ids


def test_every_picture_says_what_came_out(page: Page) -> None:
    alts = [attributes["alt"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(alts) == 4
    assert alts[0].startswith("List recall: at 128 tokens (train)")


def test_text_from_files_is_shown_and_never_run(page: Page) -> None:
    prompts = "\n".join(page.texts["pre"])
    assert "A literal _PAUSE_ and <script>alert('x')</script> & more are text" in prompts
    assert page.texts["mark"] == ["_PAUSE_"] * sum(len(example["markers"]) for example in EXAMPLES)


def test_hostile_names_are_escaped_everywhere(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>|`_*"
    append_records(tmp_path / "results.jsonl", [accuracy(hostile, hostile, hostile, 128, 0.5)])
    run = {"command": hostile, "models": {hostile: {"description": hostile}}, "recipes": {hostile: {hostile: hostile}}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    index = write_report([tmp_path], tmp_path / "out")
    page = Page(index.read_text(encoding="utf-8"))
    assert "onerror" not in {name for _, attributes in page.tags for name in attributes}
    assert any(hostile in text for text in page.texts["td"])
    assert "<img" not in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_markdown_has_the_tables_and_its_pictures(index: Path) -> None:
    text = (index.parent / "report.md").read_text(encoding="utf-8")
    assert "| meta | 100.0 (99.2\u2013100.0) | 86.0 (80.5\u201390.1) | 55.5 (48.6\u201362.2) |\n" in text
    pictures = re.findall(r"^!\[[^\n]+\]\((figures/[^)]+\.png)\)$", text, flags=re.MULTILINE)
    assert len(pictures) == 4
    assert all((index.parent / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "<kbd>_PAUSE_</kbd>" in text
    assert "A literal _PAUSE_ and &lt;script&gt;" in text
    assert all(line.count("|") >= 3 for line in text.splitlines() if line.startswith("| "))


def test_markdown_and_html_show_the_same_figures(index: Path, page: Page) -> None:
    text = (index.parent / "report.md").read_text(encoding="utf-8")
    cells = {cell.strip() for line in text.splitlines() if line.startswith("| ") for cell in line.split("|")}
    figures = {cell for cell in cells if re.match(r"[\d.]+ \(\d", cell)}
    shown = {" ".join(cell.split()) for cell in page.texts["td"]}
    assert figures
    assert figures <= shown


def test_the_same_inputs_give_the_same_bytes(run: Path, index: Path, tmp_path: Path) -> None:
    again = write_report([run], tmp_path / "again")
    files = sorted(path.relative_to(index.parent) for path in index.parent.rglob("*") if path.is_file())
    assert len(files) == 2 + 4
    for file in files:
        assert (index.parent / file).read_bytes() == (again.parent / file).read_bytes()


def test_the_first_words_follow_the_numbers(index: Path, tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", accuracies(all_equal, tasks=("list_recall",)))
    equal = write_report([tmp_path / "r.jsonl"], tmp_path / "out").read_text(encoding="utf-8")
    best = index.read_text(encoding="utf-8")
    verdicts = [re.search(r'<p class="verdict">(.*)</p>', text) for text in (best, equal)]
    assert [match and match[1] for match in verdicts] == [
        "List recall: at 128 tokens (train), 256 tokens (2\u00d7) and 1,024 tokens (8\u00d7), meta is above pause, "
        "and the control twin explains part of the gain.",
        "List recall: at 128 tokens (train), 256 tokens (2\u00d7) and 1,024 tokens (8\u00d7), "
        "meta gains nothing measurable over gpt2.",
    ]


def test_what_is_absent_is_said(tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", [accuracy("meta", "parity", "paper", 128, 0.5)])
    text = write_report([tmp_path / "r.jsonl"], tmp_path / "out").read_text(encoding="utf-8")
    for said in (
        "there is no curves.jsonl",
        "there is no examples.jsonl",
        "There is no run.json",
        "No perplexity was measured",
        "No majority rate was measured",
        "Only one marker condition was measured",
    ):
        assert said in text


def test_a_report_without_any_accuracy(tmp_path: Path) -> None:
    perplexities = [result for result in other_results() if result.metric == "perplexity"]
    append_records(tmp_path / "r.jsonl", perplexities)
    assert "No accuracy was measured." in write_report([tmp_path / "r.jsonl"], tmp_path / "out").read_text()


def test_results_without_length_task_or_condition(tmp_path: Path) -> None:
    blank = {"task": None, "condition": None, "length": None, "train_length": None, "chance": None}
    results = [accuracy(model, "-", "-", 0, 0.5).model_copy(update=blank) for model in ("mine", "yours")]
    append_records(tmp_path / "r.jsonl", results)
    assert "gains nothing measurable over" in write_report([tmp_path / "r.jsonl"], tmp_path / "out").read_text()


def test_several_runs_are_described_one_by_one(tmp_path: Path) -> None:
    runs = [tmp_path / model for model in ("gpt2", "meta")]
    for run in runs:
        run.mkdir()
        append_records(run / "results.jsonl", accuracies(meta_best, (run.name,), ("parity",)))
        (run / "run.json").write_text(json.dumps({"command": f"made {run.name}"}))
    text = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    for said in ("What was run where: run 1", "made gpt2", "What was run where: run 2", "made meta"):
        assert said in text
    assert "meta is above gpt2" in text


def test_a_rerun_replaces_the_report_but_no_other_file(tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", accuracies(all_equal, tasks=("parity",)))
    out = tmp_path / "out"
    write_report([tmp_path / "r.jsonl"], out)
    write_report([tmp_path / "r.jsonl"], out)
    (out / "index.html").write_text("my own page")
    with pytest.raises(UserError, match=r"index\.html is not a report"):
        write_report([tmp_path / "r.jsonl"], out)
    assert (out / "index.html").read_text() == "my own page"


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", [accuracy("meta", "parity", "paper", 128, 0.5)])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write the report"):
        write_report([tmp_path / "r.jsonl"], tmp_path / "file" / "out")


def test_nothing_is_written_for_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_report([tmp_path / "absent.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
