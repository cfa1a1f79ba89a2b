"""Whatever text a record holds, the report shows it as text, in HTML and in Markdown."""

import base64
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from metatokens.paper.report.page import write_report
from metatokens.records import MARKER
from tests.paper.report.made_lines import inner, timing
from tests.paper.report.pages import Page, undrawn

PAYLOADS = {
    "script": "<script>alert(1)</script>",
    "closing": "</pre></table></style></title></svg></main><script src=//x></script>",
    "quoted": "\"><img src=x onerror='alert(1)'>",
    "single": "' onmouseover='alert(1)",
    "backtick": "` onfocus=alert(1) autofocus `",
    "markdown": "](javascript:alert(1)) [a](javascript:alert(1)) ![b](javascript:alert(1)) `<b>` *c* _d_ |e|",
    "entity": "&lt;script&gt; &#60;script&#62; &amp;",
    "template": "{{ 7 * 7 }} {% for x in () %} ${7*7} #{7*7}",
    "lines": "a\n\n# heading\n\n<b>bold</b>\n\n- item\n\n[x]: javascript:alert(1)",
    "comment": "--> <!-- <![CDATA[ ]]>",
    "math": "$\\frac{a}{b}$ \\input{x} $$",
    "css": "red; background: url(javascript:alert(1)) }",
}
ALLOWED = {
    "html", "head", "meta", "link", "title", "style", "body", "main", "nav", "p", "h1", "h2", "h3", "a", "em", "strong",
    "blockquote", "div", "br", "code", "table", "thead", "tbody", "tr", "th", "td", "picture", "source", "img",
    "details", "summary", "pre", "kbd",
}  # fmt: skip


def record(payload: str, recipe: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"m {payload}", "position_embedding": f"rope {payload}", "task": f"t {payload}",
        "condition": f"c {payload}", "train_condition": f"c {payload}", "train_length": 128, "length": 128,
        "intervention": None, "metric": "exact_match", "value": 0.5, "n": 20, "low": 0.3, "high": 0.7, "chance": 0.1,
        "seed": 0, "recipe": recipe, "versions": {f"v {payload}": payload},
        "created": f"2026-01-01T00:00:00 {payload}",
    } | fields  # fmt: skip


def write_inputs(folder: Path, payload: str, recipe: str) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"condition": f"other {payload}"}, {"model": "meta", "length": 256}, {"metric": "token_accuracy"},
        {"metric": "perplexity", "value": 30.0, "task": None}, {"intervention": payload},
        {"metric": "shortcut", "model": f"answer {payload}"},
    ]  # fmt: skip
    results = [record(payload, recipe, **one) for one in changes]
    curves = [
        {"model": f"m {payload}", "position_embedding": payload, "task": task, "seed": 0, "step": step, "loss": 1.0}
        for step in (1, 2) for task in (None, f"t {payload}")
    ]  # fmt: skip
    prompt = f"{payload}{MARKER} {payload}"
    shown = {
        "task": f"t {payload}",
        "prompt": prompt,
        "markers": [len(payload)],
        "completion": f" {payload}",
    }
    run = {
        "command": f"metatokens {payload}", "preset": payload, "platform": payload, "python": payload, "cores": 2,
        "created": payload, "finished": payload, "versions": {payload: payload}, "corpus": {payload: payload},
        "recipes": {payload: {payload: {payload: payload}}}, "stages": [{"name": payload, "seconds": 5}],
        "models": {f"m {payload}": {"parameters": 5, "description": f"d {payload}"}},
    }  # fmt: skip
    curves = [point | {"recipe": recipe} for point in curves]
    analysis = [
        inner("residual", "similarity_centred", 0.5, task=payload, marker="context", subject="meta", layer=2,
              distance=1, recipe=recipe)
    ]  # fmt: skip
    speeds = [timing("prefill", "meta", 1.0, device=payload, shape=payload, dtype=payload)]
    files = {"results": results, "curves": curves, "examples": [shown], "analysis": analysis, "speeds": speeds}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(run))


def write_page(folder: Path, payload: str, recipe: str, *, is_drawn: bool = False) -> Path:
    write_inputs(folder, payload, recipe)
    with nullcontext() if is_drawn else undrawn():
        return write_report([folder, folder / "speeds.jsonl"], folder / "report").parent


CASES = {name: (payload, f"r {payload}") for name, payload in PAYLOADS.items()}
CASES |= {f"grid-{name}": (PAYLOADS[name], "small") for name in ("closing", "markdown")}


QUICK = {"lines", "grid-closing"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()
    ],
)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """A payload, the recipe of the lines, and a report in which it stands wherever a record can hold text."""
    payload, recipe = request.param
    return payload, recipe, write_page(tmp_path_factory.mktemp("escaping"), payload, recipe)


def test_a_page_has_only_elements_of_its_own(page: tuple[str, str, Path]) -> None:
    payload, _, folder = page
    found = Page((folder / "index.html").read_text())
    assert {tag for tag, _ in found.elements} <= ALLOWED
    assert [comment.strip() for comment in found.other] == ["metatokens report"]
    for tag, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in {"href", "src", "srcset", "action", "formaction", "xlink:href"} & attributes.keys():
            target = attributes[name] or ""
            wanted = r"#[\w-]+|data:,|tables\.html|data:image/png;base64,[\w+/=]+"
            assert re.fullmatch(wanted, target), (tag, name, target[:80])
        assert payload not in "".join(value or "" for value in attributes.values())
    text = " ".join(found.texts["html"][0].split())
    assert text.count(" ".join(payload.split())) >= 10  # shown, as it is
    policies = [a["content"] for tag, a in found.elements if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A report of the same records without a payload, of a grid or of another run."""

    @cache
    def plain(recipe: str) -> Path:
        return write_page(tmp_path_factory.mktemp("plain"), "plain", recipe)

    return lambda recipe: plain(recipe if recipe == "small" else "other")


def test_a_page_is_the_same_but_for_the_text(page: tuple[str, str, Path], plain: Callable[[str], Path]) -> None:
    _, recipe, folder = page
    files = (folder / "index.html", plain(recipe) / "index.html")
    tags = [[(tag, sorted(attributes)) for tag, attributes in Page(file.read_text()).elements] for file in files]
    assert tags[0] == tags[1]


def test_markdown_shows_text(page: tuple[str, str, Path]) -> None:
    text = (page[2] / "report.md").read_text()
    found = Page(re.sub(r"\\(.)", "", text))  # the HTML that a Markdown file may hold
    assert {tag for tag, _ in found.elements} <= {"details", "summary", "pre", "kbd", "br"}
    assert all(set(attributes) <= {"markdown"} for _, attributes in found.elements)
    assert [comment.strip() for comment in found.other] == ["metatokens report"]
    outside = re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    unescaped = re.sub(r"\\.", "", outside)
    for target in re.findall(r"\]\(([^)]*)\)", unescaped):
        assert re.fullmatch(r"figures/\w+\.png|tables\.md", target), target
    assert not re.search(r"^\[[^\]]*\]:", unescaped, flags=re.MULTILINE)
    headings = [line for line in outside.split("\n") if line.startswith("#")]
    assert "# heading" not in headings
    rows = [line for line in unescaped.split("\n") if line.startswith("|")]
    assert rows
    tables = "\n".join(line for line in unescaped.split("\n") if line).split("\n\n")
    assert all(line.endswith("|") for table in tables for line in table.split("\n") if line.startswith("|"))


def test_pictures_are_pictures(tmp_path: Path) -> None:
    payload = PAYLOADS["math"]  # what a figure would read as markup of its own
    folder = write_page(tmp_path, payload, f"r {payload}", is_drawn=True)
    pictures = [picture.read_bytes() for picture in (folder / "figures").iterdir()]
    pictures += [
        base64.b64decode(encoded, validate=True)
        for encoded in re.findall(r"data:image/png;base64,([\w+/=]+)", (folder / "index.html").read_text())
    ]
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        assert payload.encode() not in picture
