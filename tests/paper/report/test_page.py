"""The page: what it says first, what it leaves out, and that the same lines give the same bytes."""

import re
from math import log

import pytest

from metatokens.errors import UserError
from metatokens.paper.claims import claims, judge
from metatokens.paper.frame import load
from metatokens.paper.report import overview
from metatokens.paper.report.page import write_report
from metatokens.paper.rule import Effect
from tests.paper.report.made_lines import (
    Line,
    accuracy,
    covered,
    demo,
    grid,
    perplexity,
    recall,
    shortcut,
    write,
)
from tests.paper.report.pages import Page, undrawn, write_quick_report


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("lines"))


@pytest.fixture(scope="module")
def judged(lines):
    """The claims on the grid, by text."""
    inputs = load(lines)
    return {claim.text: judge(inputs, claim) for claim in claims()}


@pytest.fixture(scope="module")
def report(lines, tmp_path_factory):
    """The grid's report, with white pictures."""
    out = tmp_path_factory.mktemp("report")
    with undrawn():
        write_report(lines, out)
    return out


@pytest.fixture
def grid_page(report):
    """The Markdown of the grid's report."""
    return (report / "report.md").read_text(encoding="utf-8")


def page_of(folder, results):
    """The Markdown of a report of some lines."""
    run = write(folder / "run", results=results)
    return write_quick_report([run], folder / "report")


def quoted(page):
    return re.findall(r"^> (.*)", page, flags=re.MULTILINE)


def headings(page):
    return re.findall(r"^## (.*)", page, flags=re.MULTILINE)


def test_a_grid_first_counts_its_verdicts_and_says_its_main_claims_task_by_task(grid_page, judged):
    counted, *main_claims = quoted(grid_page)

    assert counted.startswith("The paper makes 26 claims. 4 are true by construction: ")
    counts = [
        int(count) for count in re.findall(r"(\d+) (?=[a-z])", counted.split("other 22 are:")[1])
    ]
    assert sum(counts) == 22
    primary = [result for result in judged.values() if result.claim.primary and result.strata]
    assert len(main_claims) == len(primary) == 3
    for said, result in zip(main_claims, primary, strict=True):
        assert said.startswith(f"Main claim, \u201c{result.claim.text}\u201d: list recall ")
        assert said.endswith(f": {overview.verdict(result)}.")


def test_every_claim_has_a_row_with_its_verdict_and_its_settings_are_in_the_full_tables(
    report, grid_page, judged
):
    full = (report / "tables.md").read_text(encoding="utf-8")
    claims_on_page = grid_page.split("## Claims")[1].split("\n## ")[0]

    for text, result in judged.items():
        escaped = text.replace(">", "&gt;")
        assert escaped in claims_on_page
        is_in_full = f"{escaped}: {overview.verdict(result)}**" in full
        assert is_in_full == (result.verdict != "not measured")


def test_a_claim_shows_its_effect_means_runs_and_what_was_left_out(read):
    lines = []
    for model, length, values in (
        ("meta", 128, (0.99, 0.99, 0.99)),
        ("gpt2", 128, (0.99, 1.0, 1.0)),
        ("meta", 512, (0.9, 0.8, 0.85)),
        ("gpt2", 512, (0.6, 0.6, 0.6)),
    ):
        for seed, value in enumerate(values):
            lines.append(accuracy(value, model=model, length=length, seed=seed, task="parity"))
    [claim] = (claim for claim in claims() if claim.number == 1)

    result = judge(read(lines), claim)

    [(task, effect, means, runs, settings)] = overview.evidence(result).rows
    assert (task, means, runs) == ("Parity", "85.0, 60.0", "3 and 3")
    assert effect == overview.amount(result.effect, "points")
    assert effect.startswith("+25.0 points (")
    assert settings == "both exceed 98 %: to 512 \u2192 128; counted: to 512 \u2192 512"


def test_a_claim_that_one_task_supports_says_so(read):
    lines = []
    for task, of_meta, of_gpt2 in (("parity", 0.6, 0.62), ("list_recall", 0.9, 0.5)):
        for seed in range(3):
            of_run = {"task": task, "seed": seed}
            lines.append(accuracy(of_meta + 0.01 * seed, **of_run))
            lines.append(accuracy(of_gpt2 + 0.01 * seed, **of_run, model="gpt2"))
    [claim] = (claim for claim in claims() if claim.number == 1)

    result = judge(read(lines), claim)

    assert overview.verdict(result) == "supported only with list recall"
    assert result.without["list_recall"].value == pytest.approx(-0.02)


def test_amounts():
    assert overview.amount(Effect(0.112, 0.04, 0.184), "points") == "+11.2 points (+4.0 to +18.4)"
    assert overview.amount(Effect(-0.5), "nats") == "\u22120.50 nats"
    lower = Effect(-log(0.8), -log(0.9), -log(0.5))
    assert overview.amount(lower, "percent") == "\u221220.0 % perplexity (\u221250.0 to \u221210.0)"
    assert overview.amount(Effect(-log(1.049)), "percent") == "+4.9 % perplexity"
    assert overview.amount(Effect(), "points") == "\u2013"


def test_a_run_that_covered_the_text_begins_with_it(tmp_path):
    page = write_quick_report([covered(tmp_path / "run")], tmp_path / "report")

    assert quoted(page) == [
        'The paper "Language Modeling with Learned Meta-Tokens" puts learned tokens between the words of a text: a '
        "language model reads such a meta-token, and is never asked to predict it.",
        "We trained meta (GPT-2 with meta-tokens and a second attention among these alone) and pause (GPT-2 with "
        "meta-tokens), once each, on questions about texts that they saw whole, with a meta-token right after what is "
        "asked for.",
        "Then we covered the texts: a question sees their meta-tokens alone, 1.3 % of the keys and values. Of 500 "
        "questions of list recall, meta answers 99.8 % (with the text in sight 99.2 %) and pause answers 0.4 % (with "
        "the text in sight 19.0 %); guessing gives 10.0 %.",
    ]
    pair = page.partition('<div class="pair">')[2].partition("</div>")[0]
    in_sight, hidden, _ = pair.split("</figure>")
    assert "<del>" not in in_sight
    assert re.findall("<li>.*</li>", in_sight) == [
        "<li><code>meta</code> answers <b>peach</b>: right</li>",
        "<li><code>twin</code> answers <b>peach</b>: right</li>",
        "<li><code>pause</code> answers <b>peach</b>: right</li>",
        "<li><code>gpt2</code> answers <b>peach</b>: right</li>",
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


def test_without_answers_or_an_example_the_covered_text_is_measured_all_the_same(tmp_path):
    trained: Line = {"train_length": 128, "length": 128, "recipe": "demo"}
    in_sight = accuracy(1.0, **trained)
    hidden = accuracy(0.9, **trained, intervention="landmarks_alone", kv_kept=0.013)

    page = page_of(tmp_path, [in_sight, hidden])

    assert "meta answers 90.0 %" in quoted(page)[2]
    assert "pair" not in page
    assert "figures/covered.png" in page


def test_the_demos_page_says_what_was_trained_and_links_to_the_looks(tmp_path):
    run = demo(tmp_path / "run")
    (run / "looks").mkdir()
    (run / "looks" / "list_recall.html").write_text("<!doctype html>")

    page = write_quick_report([run], run / "report")

    assert quoted(page) == [
        "One or two runs of a model do not show what is luck: a claim needs three of each."
    ]
    assert "[list recall](../looks/list_recall.html)" in page
    assert "](../looks/list_recall.html)" in page.split("## Examples")[1]
    assert "claims.png" not in page
    assert "## Claims" not in page
    assert "`metatokens reproduce --preset demo --out DIR`" in page
    assert 'href="../looks/list_recall.html"' in (run / "report" / "index.html").read_text(
        encoding="utf-8"
    )


def test_every_section_of_a_grid_has_its_heading(grid_page):
    assert headings(grid_page) == [
        "Which model learned which task",
        "Claims",
        "Accuracy by length",
        "Other prompts",
        "Trained among landmarks",
        "Other recipes",
        "Learning curves",
        "Without position, without embedding, with noise",
        "Sharper attention",
        "Cached context",
        "Rate and distortion",
        "Inference cost",
        "Perplexity",
        "Examples",
        "What was run",
    ]


def test_a_page_of_perplexities_alone(tmp_path):
    page = page_of(tmp_path, [perplexity(80, 2, recipe="mine")])

    assert "80.0 (78.0 to 82.0)" in page


def test_a_page_of_learning_curves_alone(tmp_path):
    curves = [recall(step, step / 1000, seed=seed) for step in (100, 500) for seed in range(3)]
    run = write(tmp_path / "run", curves=curves)

    page = write_quick_report([run], tmp_path / "report")

    assert "figures/learning.png" in page


def test_what_was_only_asked_with_the_text_covered_has_no_other_figure(tmp_path):
    hidden = {"train_length": 128, "length": 128, "recipe": "demo", "kv_kept": 0.013}
    of_pause = accuracy(0.3, model="pause", intervention="landmarks_alone", **hidden)

    page = page_of(tmp_path, [accuracy(0.8, **hidden), of_pause])

    assert "pause answers 30.0 %; guessing" in quoted(page)[-1]


def test_models_whose_train_length_is_unknown_are_shown(tmp_path):
    page = page_of(tmp_path, [accuracy(0.5, train_length=None, train_condition=None)])

    assert "Which model learned which task" in headings(page)


@pytest.mark.slow  # two drawn reports; that equal figures give equal bytes is tested without a page
def test_the_same_lines_give_the_same_bytes(tmp_path, contents):
    run = write(
        tmp_path / "run",
        results=[perplexity(80, 2), accuracy(0.5), shortcut(0.2, "parity", 512)],
    )

    write_report([run], tmp_path / "first")
    write_report([run], tmp_path / "second")

    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert len(first) > 4
    assert first == second


def test_the_html_is_the_markdown_in_a_frame(report, grid_page):
    page = Page((report / "index.html").read_text(encoding="utf-8"))

    assert page.texts["h2"] == headings(grid_page)
    assert len(page.texts["table"]) == len(re.findall(r"^\|---", grid_page, flags=re.MULTILINE))
    assert page.texts["title"] == page.texts["h1"] == ["Do learned meta-tokens help?"]
    links = {str(fields["href"]) for tag, fields in page.elements if tag == "a"}
    anchors = {f"#{fields['id']}" for tag, fields in page.elements if tag == "h2"}
    assert links == anchors | {"tables.html"}
    assert "report.md" not in (report / "tables.html").read_text(encoding="utf-8")


@pytest.mark.quick(name=["tables.md"])
@pytest.mark.parametrize("name", ["tables.md", "figures/by_length.png"])
def test_what_is_no_report_is_kept(name, tmp_path):
    foreign = tmp_path / "report" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")

    with pytest.raises(UserError, match=f"{name} belongs to no report"):
        page_of(tmp_path, [accuracy(0.5)])

    files = [path for path in (tmp_path / "report").rglob("*") if path.is_file()]
    assert files == [foreign]
    assert foreign.read_text() == "mine"
