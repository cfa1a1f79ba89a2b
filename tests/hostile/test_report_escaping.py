"""Whatever text a record holds, the report shows it as text, in HTML and in Markdown."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from metatokens.report.page import write_report
from metatokens.tasks.example import MARKER

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
    "html", "head", "meta", "link", "title", "style", "body", "header", "main", "footer", "section", "nav", "p",
    "h1", "h2", "h3", "a", "b", "ul", "li", "div", "span", "small", "table", "thead", "tbody", "tfoot", "tr", "th",
    "td", "figure", "picture", "source", "img", "details", "summary", "pre", "mark", "svg", "path", "polygon",
    "rect",
}  # fmt: skip


class Page(HTMLParser):
    """The elements and texts of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.other: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    handle_pi = unknown_decl = handle_comment


def record(payload: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"m {payload}", "position_embedding": f"rope {payload}", "task": f"t {payload}",
        "condition": f"c {payload}", "train_condition": f"c {payload}", "train_length": 128, "length": 128,
        "intervention": None, "metric": "exact_match", "value": 0.5, "n": 20, "low": 0.3, "high": 0.7, "chance": 0.1,
        "seed": 0, "recipe": f"r {payload}", "versions": {f"v {payload}": payload},
        "created": f"2026-01-01T00:00:00 {payload}",
    } | fields  # fmt: skip


def write_inputs(folder: Path, payload: str) -> None:
    results = [
        record(payload), record(payload, condition=f"other {payload}"), record(payload, model="meta", length=256),
        record(payload, metric="token_accuracy"), record(payload, metric="perplexity", value=30.0, task=None),
        record(payload, metric="majority_rate", model=f"answer {payload}"), record(payload, intervention=payload),
    ]  # fmt: skip
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
        "split": payload,
    }
    run = {
        "command": f"metatokens {payload}", "preset": payload, "platform": payload, "python": payload, "cores": 2,
        "created": payload, "finished": payload, "versions": {payload: payload}, "corpus": {payload: payload},
        "recipes": {payload: {payload: {payload: payload}}}, "stages": [{"name": payload, "seconds": 5}],
        "models": {f"m {payload}": {"parameters": 5, "description": f"d {payload}"}},
    }  # fmt: skip
    for name, lines in {"results": results, "curves": curves, "examples": [shown]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(run))


@pytest.fixture(scope="module", params=PAYLOADS.values(), ids=PAYLOADS)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A payload, and a report in which it stands wherever a record can hold text."""
    folder = tmp_path_factory.mktemp("escaping")
    write_inputs(folder, request.param)
    write_report([folder], folder / "report")
    return request.param, folder / "report"


def test_a_page_has_only_elements_of_its_own(drawn: tuple[str, Path]) -> None:
    payload, folder = drawn
    page = Page()
    page.feed((folder / "index.html").read_text())
    page.close()
    assert {tag for tag, _ in page.elements} <= ALLOWED
    assert page.other == []
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in {"href", "src", "srcset", "action", "formaction", "xlink:href"} & attributes.keys():
            target = attributes[name] or ""
            assert re.fullmatch(r"#[\w-]+|data:,|data:image/png;base64,[\w+/=]+", target), (tag, name, target[:80])
        if tag in ("meta", "link", "style", "svg", "path", "polygon", "rect", "section", "a", "details", "table", "th"):
            assert payload not in "".join(value or "" for name, value in attributes.items() if name != "aria-label")
    text = " ".join("".join(page.text).split())
    assert text.count(" ".join(payload.split())) >= 10  # shown, as it is
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the same records without a payload."""
    folder = tmp_path_factory.mktemp("plain")
    write_inputs(folder, "plain")
    write_report([folder], folder / "report")
    return folder / "report"


def test_a_page_is_the_same_but_for_the_text(drawn: tuple[str, Path], plain: Path) -> None:
    _, folder = drawn
    tags = []
    for file in (folder / "index.html", plain / "index.html"):
        page = Page()
        page.feed(file.read_text())
        tags.append([(tag, sorted(attributes)) for tag, attributes in page.elements])
    assert tags[0] == tags[1]


def test_markdown_shows_text(drawn: tuple[str, Path]) -> None:
    _, folder = drawn
    text = (folder / "report.md").read_text()
    page = Page()  # of the HTML that a Markdown file may hold
    page.feed(re.sub(r"\\(.)", "", text))
    assert {tag for tag, _ in page.elements} <= {"details", "summary", "pre", "kbd", "a"}
    assert all(set(attributes) <= {"id"} for _, attributes in page.elements)
    assert [comment.strip() for comment in page.other] == ["metatokens report"]
    outside = re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    unescaped = re.sub(r"\\.", "", outside)
    for target in re.findall(r"\]\(([^)]*)\)", unescaped):
        assert re.fullmatch(r"figures/\w+\.png", target), target
    assert not re.search(r"^\[[^\]]*\]:", unescaped, flags=re.MULTILINE)
    headings = [line for line in outside.split("\n") if line.startswith("#")]
    assert "# heading" not in headings
    rows = [line for line in unescaped.split("\n") if line.startswith("|")]
    assert rows
    tables = "\n".join(line for line in unescaped.split("\n") if line).split("\n\n")
    assert all(line.endswith("|") for table in tables for line in table.split("\n") if line.startswith("|"))


def test_pictures_are_pictures(drawn: tuple[str, Path]) -> None:
    payload, folder = drawn
    for picture in (folder / "figures").iterdir():
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert payload.encode() not in data
    html = (folder / "index.html").read_text()
    for encoded in re.findall(r"data:image/png;base64,([\w+/=]+)", html):
        assert base64.b64decode(encoded, validate=True).startswith(b"\x89PNG\r\n\x1a\n")
