"""The report of a run that is no grid: sentences that are true whatever came out."""

import re
from collections.abc import Callable
from math import hypot
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from metatokens.errors import UserError
from metatokens.paper.report.page import write_report
from tests.paper.report.made_lines import (
    EXAMPLES,
    RUN,
    Line,
    accuracy,
    demo,
    loss,
    majority,
    perplexity,
    recall,
    skilled,
    wilson,
    write,
)
from tests.paper.report.pages import Page, table, undrawn

PLAIN: Line = {"recipe": "demo", "train_length": 128, "length": 128}
Text = Callable[..., str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of the demo, its figures drawn."""
    folder = demo(tmp_path_factory.mktemp("demo"))
    with undrawn():
        return (write_report([folder], folder / "report").parent / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def report(tmp_path: Path, undrawn: None) -> Text:
    """The report of some lines in Markdown."""

    def report(results: list[Line], run: Line | None = None, **files: list[Line]) -> str:
        folder = write(tmp_path / "run", run, results=results, **files)
        return (write_report([folder], tmp_path / "out").parent / "report.md").read_text(encoding="utf-8")

    return report


def learners(text: str) -> str:
    """Which models have learned what."""
    found = re.search(r"^\*\*(.*)\*\*$", text, flags=re.MULTILINE)
    assert found
    return found[1]


def verdict(text: str, task: str = "List recall") -> str:
    """What came out on a task."""
    found = re.search(rf"^- \*\*{task}:\*\* (.*)$", text, flags=re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0.3, 0.2, 0.6, 0.9), "meta is above gpt2, and the control twin explains part of the gain"),
        ((0.3, 0.5, 0.52, 0.9), "meta is above pause, and the control twin does not explain the gain"),
        ((0.3, 0.2, 0.88, 0.9), "meta is above gpt2, but not measurably above the control twin"),
        ((0.3, 0.2, 0.9, 0.6), "meta is above gpt2, and the control twin is above meta"),
        ((0.3, 0.2, 0.9, 0.32), "meta gains nothing measurable over gpt2, and the control twin is above meta"),
        ((0.3, None, None, 0.9), "meta is above gpt2"),
        ((0.6, 0.2, 0.3, 0.4), "meta is below gpt2"),
        ((0.5, 0.5, 0.5, 0.5), "meta gains nothing measurable over gpt2"),
        ((0.11, 0.1, 0.12, 0.12), "no model is above the floor"),
        ((None, None, None, 0.9), "only meta was measured"),
        ((0.9, 0.3, None, None), "gpt2 is above pause"),
    ],
)
def test_the_verdict(values: tuple[float | None, ...], said: str, report: Text) -> None:
    models = zip(("gpt2", "pause", "twin", "meta"), values, strict=True)
    text = report([accuracy(value, model=model, **PLAIN) for model, value in models if value is not None])
    assert verdict(text) == f"at 128 tokens (train), {said}."


def test_who_has_learned_a_task(report: Text) -> None:
    of = {"gpt2": 0.62, "twin": 0.55, "meta": 0.9}
    lines = [accuracy(value, model=model, task="parity", **PLAIN) for model, value in of.items()]
    lines += [accuracy(0.9, model=model, **PLAIN) for model in of]
    lines += [accuracy(0.2, model=model, task="segment_counting", **PLAIN) for model in of]
    floors = {"parity": 0.56, "list_recall": 1.0, "segment_counting": 0.3}
    text = report([*lines, *(majority(rate, task, 128, recipe="demo") for task, rate in floors.items())])
    assert learners(text) == (
        "At 128 tokens (train): in list recall and segment counting, no model is above the floor; in parity, meta is "
        "above gpt2, and the control twin does not explain the gain. "
        "List recall: tells nothing, since a short cut answers all of it. Segment counting: learned by no model. "
        "Parity: learned by gpt2 and meta, not by twin."
    )


def test_how_soon_it_was_learned(report: Text) -> None:
    def points(model: str, seed: int, *rates: float) -> list[Line]:
        return [recall(50 * place, rate, model=model, seed=seed, recipe="demo") for place, rate in enumerate(rates, 1)]

    curves = [*points("meta", 0, 0.2, 0.96, 0.9, 0.95, 0.97), *points("meta", 1, 0.95, 1.0)]
    curves += points("gpt2", 0, 0.2, 0.949)
    text = report([accuracy(0.5, model=model, seed=seed, **PLAIN) for model in ("gpt2", "meta") for seed in (0, 1)],
                  curves=curves)  # fmt: skip
    rows = dict(re.findall(r"^\| List recall \| (gpt2|meta) \| (.*) \|$", text, flags=re.MULTILINE)[:2])
    assert rows["meta"].split(" | ") == ["50.0", "200 / 50", "600 k / 150 k"]
    assert rows["gpt2"].split(" | ") == ["50.0", "not reached", ""]


def test_one_seed_against_is_no_difference(report: Text) -> None:
    text = report([accuracy(value, model=model, seed=seed, **PLAIN) for model, values in
                   {"gpt2": (0.5, 0.2, 0.2), "meta": (0.4, 0.9, 0.9)}.items()
                   for seed, value in enumerate(values)])  # fmt: skip
    assert verdict(text).endswith("meta gains nothing measurable over gpt2.")
    assert "| List recall | 128 tokens (train) | meta \u2212 gpt2 | +43.3 (+" in text
    assert "3 seeds (0, 1, 2): their figures and the ends of their intervals are averaged." in text


def test_the_first_screen_of_the_demo(text: str) -> None:
    assert verdict(text) == (
        "at 128 tokens (train), 256 tokens (2\u00d7) and 1,024 tokens (8\u00d7), meta is above pause, "
        "and the control twin explains part of the gain."
    )
    assert learners(text).startswith("At 128 tokens (train): in list recall,")
    assert " List recall: learned by gpt2, pause, twin and meta. " in learners(text)
    lines = re.findall(r"^\| List recall \| (\S+) \| (.*) \|$", text, flags=re.MULTILINE)[:5]
    rows = {label: figures.split(" | ") for label, figures in lines}
    for place, length in enumerate((128, 256, 1024)):
        assert rows["meta"][place] == f"{100 * skilled('meta', 'list_recall', length):.1f}"
    assert rows["floor"][0] == "10.0"
    shown = table(text, "List recall: answers exactly right in condition paper")["meta"]
    value = skilled("meta", "list_recall", 256)
    low, high = wilson(value, 500)
    assert shown["256"] == f"{100 * value:.1f} ({100 * low:.1f}\u2013{100 * high:.1f})"
    assert "- twin: what twin is\n" in text
    by_token = table(text, "List recall: answer tokens right in condition paper")
    assert [*by_token] == ["gpt2", "pause", "twin", "meta", "n (tokens a seed)"]
    assert "One training seed (0): intervals cover the draw of test prompts, not the luck of training." in text
    assert "0.362\u20130.395 million parameters; the paper's has 152 million." in text


def test_the_demo_says_which_models_it_leaves_out(report: Text) -> None:
    lines = [accuracy(0.5, model=model, **PLAIN) for model in ("gpt2", "meta")]
    assert "pause and twin are left to the preset small." in report(lines, RUN)
    assert "are left to" not in report(lines, RUN | {"preset": None})


def test_differences_are_those_by_hand(text: str) -> None:
    def points(a: float, b: float) -> str:
        (low, high), (base_low, base_high) = wilson(a, 500), wilson(b, 500)
        ends = (a - b, a - b - hypot(a - low, base_high - b), a - b + hypot(high - a, b - base_low))
        value, down, up = (f"{100 * end:+.1f}".replace("-", "\u2212") for end in ends)
        return f"{value} ({down} to {up})"

    meta, twin, pause = (skilled(model, "list_recall", 1024) for model in ("meta", "twin", "pause"))
    pairs = {"meta \u2212 pause": (meta, pause), "meta \u2212 twin": (meta, twin), "twin \u2212 pause": (twin, pause)}
    for pair, sides in pairs.items():
        row = f"| List recall | 1,024 tokens (8\u00d7) | {pair} | {points(*sides)} |"
        assert row in text.split("**Differences between models**")[1]
    effects = table(text, "List recall at 128 tokens (train), by condition")["meta"]
    assert effects["decoy \u2212 paper"] == points(0.1, skilled("meta", "list_recall", 128))


def test_a_model_that_cannot_be_run_has_a_dash(report: Text) -> None:
    lines = [accuracy(value, model=model, **PLAIN | {"length": length}) for model, length, value in (
        ("gpt2", 128, 0.3), ("meta", 128, 0.9), ("gpt2", 256, None), ("meta", 256, 0.8)
    )]  # fmt: skip
    text = report(lines)
    assert "at 256 tokens (2\u00d7), only meta was measured" in verdict(text)
    assert table(text, "List recall: answers exactly right")["gpt2"]["256"] == "-"


def test_the_budget_is_asked_of_every_task(report: Text) -> None:
    def losses(task: str, model: str, learned: int | None, steps: int) -> list[Line]:
        return [loss(step, 0.05 if learned and step >= learned else 1.0, task=task, model=model, train_length=128)
                for step in range(100, steps + 1, 100)]  # fmt: skip

    curves = losses("parity", "gpt2", 200, 300) + losses("parity", "meta", 100, 300)
    curves += losses("copying", "gpt2", 300, 400) + losses("list_recall", "meta", None, 200)
    text = report([accuracy(0.5, **PLAIN)], curves=curves)
    assert (
        "Learned by no model in the steps given: List recall at 128 tokens. "
        "Every model had 1.5 times the slowest learner's steps or more: Parity at 128 tokens. "
        "A model had less than 1.5 times the slowest learner's steps: Copying at 128 tokens (1.33)."
    ) in text
    steps = table(text, "Steps until the answer loss stays under 0.1")
    assert list(steps["gpt2"].values()) == ["", "200", "300"]
    assert list(steps["meta"].values()) == ["not reached", "100", ""]


def test_variants_of_a_model_are_told_apart(report: Text) -> None:
    fields: list[Line] = [{}, {"position_embedding": "learned"}, {"intervention": "no_pos"}]
    text = report([accuracy(0.5, **PLAIN | one) for one in fields])
    rows = table(text, "List recall: answers exactly right")
    assert [*rows][:3] == ["meta \u00b7 learned", "meta \u00b7 rope", "meta \u00b7 rope \u00b7 no\\_pos"]
    assert "Positions: learned, rope." in text


@pytest.mark.parametrize(
    "blank", [{"length": None, "train_length": None}, {"task": None}, {"condition": None}, {"chance": None}]
)
def test_results_that_say_less(blank: dict[str, Any], report: Text) -> None:
    text = report([accuracy(0.5, model=model, **PLAIN | blank) for model in ("mine", "yours")])
    assert "gains nothing measurable over" in text


def test_what_is_absent_is_said(report: Text) -> None:
    text = report([accuracy(0.5, **PLAIN)])
    for said in ("curves.jsonl", "examples.jsonl", "run.json"):
        assert re.search(rf"here is no {said} beside the results", text)
    for said in ("perplexity was measured", "short cut was measured"):
        assert f"No {said}." in text
    assert "Only one marker condition was measured." in text
    assert learners(report([perplexity(40, 1, recipe="demo")])) == "No accuracy was measured."


def test_several_runs_are_described_one_by_one(tmp_path: Path, undrawn: None) -> None:
    runs = [write(tmp_path / model, {"command": f"made {model}"}, results=[accuracy(value, model=model, **PLAIN)])
            for model, value in (("gpt2", 0.2), ("meta", 0.9))]  # fmt: skip
    text = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    for said in (
        "What was run where: run 1",
        "made gpt2",
        "What was run where: run 2",
        "made meta",
        "meta is above gpt2",
    ):
        assert said in text


# --- the files


def test_the_page_is_whole_and_shows_text_as_text(tmp_path: Path) -> None:
    results = [accuracy(0.5, condition=condition, **PLAIN) for condition in ("paper", "none")]
    curves = [loss(step, 2.0, task=task, recipe="demo") for step in (1, 2) for task in (None, "parity")]
    folder = write(tmp_path, RUN, results=results, curves=curves, examples=EXAMPLES)
    index = write_report([folder], tmp_path / "one")
    page = Page(index.read_text(encoding="utf-8"))
    references = [str(value) for _, attributes in page.elements for name, value in attributes.items()
                  if name in ("src", "srcset", "href", "data", "action")]  # fmt: skip
    assert len([value for value in references if value.startswith("data:image/png;base64,")]) == 2 * 4
    assert all(value.startswith(("data:", "#")) for value in references)
    assert "script" not in page.texts
    assert all(attributes["alt"] for tag, attributes in page.elements if tag == "img")
    assert any("A literal _PAUSE_ and <script>alert('x')</script> & more" in text for text in page.texts["pre"])
    assert page.texts["mark"] == ["_PAUSE_"] * 4
    markdown = (index.parent / "report.md").read_text(encoding="utf-8")
    pictures = re.findall(r"^!\[[^\n]+\]\((figures/[^)]+\.png)\)$", markdown, flags=re.MULTILINE)
    assert len(pictures) == 4
    assert all((index.parent / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    again = write_report([folder], tmp_path / "two")  # the same bytes
    files = [path.relative_to(index.parent) for path in index.parent.rglob("*") if path.is_file()]
    assert len(files) == 2 + 4
    assert all((index.parent / file).read_bytes() == (again.parent / file).read_bytes() for file in files)


def test_pages_of_what_models_attend_to_are_linked(tmp_path: Path, undrawn: None) -> None:
    run = write(tmp_path / "a run", RUN, results=[accuracy(0.5, **PLAIN)], examples=EXAMPLES)
    (run / "looks").mkdir()
    (run / "looks" / "copying.html").write_text("a page")
    index = write_report([run], tmp_path / "out" / "report")
    page = Page(index.read_text(encoding="utf-8"))
    [(link, text)] = [
        (str(attributes["href"]), text)
        for (_, attributes), text in zip([one for one in page.elements if one[0] == "a"], page.texts["a"], strict=True)
        if not str(attributes["href"]).startswith("#")
    ]
    assert (index.parent / unquote(link)).read_text() == "a page"
    assert f"[{text}]({link})" in (index.parent / "report.md").read_text(encoding="utf-8")


def test_a_report_is_replaced_and_no_other_file(tmp_path: Path, undrawn: None) -> None:
    folder, out = write(tmp_path / "run", RUN, results=[accuracy(0.5, **PLAIN)]), tmp_path / "out"
    write_report([folder], out)
    write_report([folder], out)
    (out / "index.html").write_text("my own page")
    with pytest.raises(UserError, match=r"index\.html is not a report; choose another folder"):
        write_report([folder], out)
    assert (out / "index.html").read_text() == "my own page"
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write the report to .*file/out: Not a directory"):
        write_report([folder], tmp_path / "file" / "out")
    with pytest.raises(UserError, match="absent"):
        write_report([tmp_path / "absent.jsonl"], tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
