"""The page: what it says first, what it leaves out, and that the same lines give the same bytes."""

import re
from collections.abc import Callable
from math import log
from pathlib import Path

import pytest

from metatokens.errors import UserError
from metatokens.paper.claims import ClaimResult, claims, judge
from metatokens.paper.frame import Inputs, load
from metatokens.paper.report import overview
from metatokens.paper.report.page import write_report
from metatokens.paper.report.tables import Tables
from metatokens.paper.rule import Effect
from tests.paper.report.made_lines import Line, accuracy, covered, demo, grid, perplexity, shortcut, write
from tests.paper.report.pages import Page, undrawn

Read = Callable[..., Inputs]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return grid(tmp_path_factory.mktemp("lines"))


@pytest.fixture(scope="module")
def judged(lines: list[Path]) -> dict[str, ClaimResult]:
    """The claims on the grid, by text."""
    inputs = load(lines)
    return {one.text: judge(inputs, one) for one in claims()}


@pytest.fixture(scope="module")
def report(lines: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The grid's report, with white pictures."""
    out = tmp_path_factory.mktemp("report")
    with undrawn():
        write_report(lines, out)
    return out


def of(folder: Path, results: list[Line], **files: list[Line]) -> str:
    """The Markdown of a report of some lines."""
    with undrawn():
        write_report([write(folder / "run", results=results, **files)], folder / "report")
    return (folder / "report" / "report.md").read_text(encoding="utf-8")


def quoted(page: str) -> list[str]:
    return re.findall(r"^> (.*)", page, flags=re.MULTILINE)


def test_a_grid_first_counts_its_verdicts_and_names_its_main_claims(
    report: Path, judged: dict[str, ClaimResult]
) -> None:
    first, second, third = quoted((report / "report.md").read_text(encoding="utf-8"))
    counts = re.findall(r"(\d+) (?:is|are) (supported|contradicted|equivalent|inconclusive|not run)", first)
    told = [one.verdict for one in judged.values() if one.claim.number]
    assert {verdict: int(count) for count, verdict in counts} == {one: told.count(one) for one in set(told)}
    for one in judged.values():
        if one.claim.primary and one.strata:
            assert f"\u201c{one.claim.text}\u201d is {one.verdict}: " in second
    assert third.startswith("At 128 tokens, ")


def test_every_claim_that_was_run_opens_to_its_tasks_settings_and_command(
    report: Path, judged: dict[str, ClaimResult]
) -> None:
    page = (report / "report.md").read_text(encoding="utf-8")
    opened = dict(re.findall(r"<summary>(.*?)</summary>(.*?)</details>", page, flags=re.DOTALL))
    assert len(opened) == sum(one.verdict != "not run" for one in judged.values()) > 5
    for text, one in judged.items():
        if one.verdict == "not run":
            assert text.replace(">", "&gt;") in page
            continue
        wanted = rf". (Main claim: )?(\d+\. )?{re.escape(text.replace('>', '&gt;'))}: {one.verdict}, .*"
        [body] = (own for title, own in opened.items() if re.fullmatch(wanted, title))
        assert len(re.findall(r"^\| .*\|$", body, flags=re.MULTILINE)) == 1 + len(one.strata) + len(one.empty_strata)
        assert "Supported above " in body
        assert re.search("`(metatokens reproduce --preset small.*|python -m benchmarks.*)`", body)


def test_a_claim_shows_its_effect_means_runs_and_what_was_left_out(read: Read) -> None:
    about = {"task": "parity", "train_length": 512}
    values = {
        ("meta", 128): (0.99, 0.99),
        ("gpt2", 128): (0.99, 1.0),
        ("meta", 512): (0.9, 0.8),
        ("gpt2", 512): (0.6, 0.6),
    }
    inputs = read([accuracy(value, model=model, length=length, seed=seed, **about)
                   for (model, length), own in values.items() for seed, value in enumerate(own)])  # fmt: skip
    [claim] = (one for one in claims() if one.number == 1)
    found = judge(inputs, claim)
    [(task, effect, means, runs, settings)] = overview.evidence(found).rows
    assert (task, means, runs) == ("Parity", "85.0, 60.0", "2 and 2")
    assert effect == overview.amount(found.effect, "points")
    assert effect.startswith("+25.0 points (")
    assert settings == "512 \u2192 512; left out (both exceed 98 %): 512 \u2192 128"
    assert overview.title(found).startswith(
        "\u25cb Main claim: 1. meta beats gpt2 up to 512 tokens: inconclusive, +25.0"
    )


def test_amounts() -> None:
    assert overview.amount(Effect(0.112, 0.04, 0.184), "points") == "+11.2 points (+4.0 to +18.4)"
    assert overview.amount(Effect(-0.5), "nats") == "\u22120.50 nats"
    assert overview.amount(Effect(-log(0.8), -log(0.9), -log(0.5)), "steps") == "20 % fewer steps (10 to 50)"
    assert overview.amount(Effect(), "points") == "\u2013"


def test_a_command_names_the_preset_and_the_stages(judged: dict[str, ClaimResult]) -> None:
    one = judged["meta beats gpt2 up to 512 tokens"]
    assert (
        overview.command(one, "small")
        == "metatokens reproduce --preset small --only figure1 --corpus TEXT --book BOOK --out DIR"
    )
    assert overview.command(one, "demo") == "metatokens reproduce --preset demo --out DIR"
    assert overview.command(one, None) == overview.command(one, "<script>") == ""


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_covered_the_text_begins_with_it(tmp_path: Path) -> None:
    write_report([covered(tmp_path / "run")], tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert quoted(page) == [
        "A meta-token is a learned token between the words of a text: a language model reads it, and is never asked to "
        "predict it.",
        "We trained meta (a second attention among its meta-tokens) and pause (meta-tokens alone), once each, on "
        "questions about texts that they saw whole.",
        "Then we covered the texts: a question sees their meta-tokens alone, 1.3 % of the keys and values. Of 500 "
        "questions of list recall, meta answers 99.8 % (with the text in sight 99.2 %) and pause answers 0.4 % (with "
        "the text in sight 19.0 %); guessing gives 10.0 %.",
    ]
    in_sight, hidden = page.partition('<div class="pair">')[2].partition("</div>")[0].split("</figure>")[:2]
    assert "<del>" not in in_sight
    assert re.findall("<li>.*</li>", in_sight) == [
        f"<li><code>{model}</code> answers <b>peach</b>: right</li>" for model in ("meta", "twin", "pause", "gpt2")
    ]
    assert re.findall("<pre>.*</pre>", hidden) == [
        "<pre><del>Fruits: orange &lt;u&gt;peach&#10;Q: none</del> <kbd>_PAUSE_</kbd><del> pear</del>&#10;"
        "Q: What is item 2 of Fruits? <kbd>_PAUSE_</kbd></pre>"
    ]
    assert re.findall("<li>.*</li>", hidden) == [
        "<li><code>meta</code> answers <b>peach</b>: right</li>",
        "<li><code>pause</code> answers <b>&lt;i&gt;\u23ce</b>: wrong</li>",
    ]
    assert page.index("figures/covered.png") < page.index("figures/by_length.png")


def test_without_answers_or_an_example_the_covered_text_is_measured_all_the_same(tmp_path: Path) -> None:
    about: Line = {"train_length": 128, "length": 128, "recipe": "demo"}
    lines = [accuracy(1.0, **about), accuracy(0.9, **about, intervention="landmarks_alone", kv_kept=0.013)]
    page = of(tmp_path, lines)
    assert "meta answers 90.0 %" in quoted(page)[2]
    assert "pair" not in page
    assert "figures/covered.png" in page


@pytest.mark.usefixtures("undrawn")
def test_the_demos_page_says_what_was_seen_and_links_to_the_looks(tmp_path: Path) -> None:
    run = demo(tmp_path / "run")
    (run / "looks").mkdir()
    (run / "looks" / "list_recall.html").write_text("<!doctype html>")
    write_report([run], tmp_path / "run" / "report")
    page = (run / "report" / "report.md").read_text(encoding="utf-8")
    assert quoted(page) == [
        "You see gpt2, pause, twin and meta (0.36, 0.36, 0.39 and 0.39 million parameters), each trained once and "
        "tested on list recall, segment counting, parity and copying.",
        "At 128 tokens, every model is above the best shortcut in list recall, segment counting and copying; "
        "only twin and meta are above the best shortcut in parity.",
    ]
    assert "[list recall](../looks/list_recall.html)" in page
    assert "](../looks/list_recall.html)" in page.split("## Examples")[1]
    assert "forest" not in page
    assert "one run does not show what is luck" in page
    assert 'href="../looks/list_recall.html"' in (run / "report" / "index.html").read_text(encoding="utf-8")


def test_a_shortcut_that_is_always_right_takes_a_task_out_of_what_was_learned(read: Read) -> None:
    lines = [accuracy(1.0), accuracy(1.0, model="gpt2"), shortcut(1.0, "list_recall", 512)]
    assert overview.sentences(Tables(read(lines)), [])[-1] == (
        "At 512 tokens, in list recall a shortcut is always right, so that accuracy does not show what was learned."
    )
    few = [accuracy(0.12, task="parity"), accuracy(0.9, task="parity", model="gpt2"), shortcut(0.2, "parity", 512)]
    assert overview.sentences(Tables(read(few)), [])[-1] == (
        "At 512 tokens, only gpt2 is above the best shortcut in parity."
    )


def test_a_section_without_data_is_left_out(tmp_path: Path, report: Path) -> None:
    bare = of(tmp_path, [accuracy(0.5, recipe="mine", position_embedding=None, task="mine", train_condition=None)])
    assert re.findall("^## (.*)", bare, flags=re.MULTILINE) == [
        "Which model learned which task", "Accuracy by length", "What was run"
    ]  # fmt: skip
    whole = re.findall("^## (.*)", (report / "report.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert whole == [
        "Which model learned which task", "Claims", "Accuracy by length", "Other prompts", "Trained among landmarks",
        "Other recipes", "How soon", "Loss",
        "Longer windows with YaRN", "Without position, without embedding, with noise", "Sharper attention",
        "Cached context", "Rate and distortion", "Inference cost", "Perplexity", "Examples", "What was run",
    ]  # fmt: skip


def test_a_page_of_perplexities_alone(tmp_path: Path) -> None:
    page = of(tmp_path, [perplexity(80, 2, recipe="mine")])
    assert quoted(page) == ["No accuracy was measured."]
    assert "80.0 (78.0 to 82.0)" in page


def test_the_same_lines_give_the_same_bytes(tmp_path: Path, contents: Callable[[Path], dict[str, bytes]]) -> None:
    run = write(tmp_path / "run", results=[perplexity(80, 2), accuracy(0.5), shortcut(0.2, "parity", 512)])
    for report in ("first", "second"):
        write_report([run], tmp_path / report)
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert len(first) > 4
    assert first == second


def test_the_html_is_the_markdown_in_a_frame(report: Path) -> None:
    page = Page((report / "index.html").read_text(encoding="utf-8"))
    markdown = (report / "report.md").read_text(encoding="utf-8")
    assert page.texts["h2"] == re.findall("^## (.*)", markdown, flags=re.MULTILINE)
    assert len(page.texts["table"]) == len(re.findall(r"^\|---", markdown, flags=re.MULTILINE))
    assert page.texts["title"] == page.texts["h1"] == ["Do learned meta-tokens help?"]
    links = [str(fields["href"]) for tag, fields in page.elements if tag == "a"]
    ids = {fields["id"] for tag, fields in page.elements if tag == "h2"}
    assert {link.removeprefix("#") for link in links if link.startswith("#")} == ids
    assert {link for link in links if not link.startswith("#")} == {"tables.html"}
    assert "report.md" not in (report / "tables.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tables.md", "figures/forest.png"])
def test_what_is_no_report_is_kept(name: str, lines: list[Path], tmp_path: Path) -> None:
    report = tmp_path / "report"
    (report / name).parent.mkdir(parents=True)
    (report / name).write_text("mine")
    with undrawn(), pytest.raises(UserError, match=f"{name} belongs to no report"):
        write_report(lines, report)
    assert [path.read_text() for path in report.rglob("*.*")] == ["mine"]
