"""Whatever text a record holds, the report shows it as text, in HTML and in Markdown."""

import base64
import re
from typing import NamedTuple

import pytest

from metatokens.paper.report.page import write_report
from metatokens.records import MARKER
from tests.paper.report.made_lines import inner, timing, write
from tests.paper.report.pages import Page, main_claims_alone, write_quick_report

MATH = "$\\frac{a}{b}$ \\input{x} $$"  # what a figure would read as markup of its own
PAYLOADS = (
    "<script>alert(1)</script>",
    "</pre></table></style></title></svg></main><script src=//x></script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)",
    "` onfocus=alert(1) autofocus `",
    "](javascript:alert(1)) [a](javascript:alert(1)) ![b](javascript:alert(1)) `<b>` *c* _d_ |e|",
    "&lt;script&gt; &#60;script&#62; &amp;",
    "{{ 7 * 7 }} {% for x in () %} ${7*7} #{7*7}",
    "a\n\n# heading\n\n<b>bold</b>\n\n- item\n\n[x]: javascript:alert(1)",
    "--> <!-- <![CDATA[ ]]>",
    MATH,
    "red; background: url(javascript:alert(1)) }",
)
HOSTILE = " ".join(PAYLOADS)
ADDRESSES = {"href", "src", "srcset", "action", "formaction", "xlink:href"}
OWN_ADDRESS = re.compile(r"#[\w-]+|data:,|tables\.html|data:image/png;base64,[\w+/=]+")


def result(payload, recipe, **fields):
    line = {
        "model": f"m {payload}",
        "position_embedding": f"rope {payload}",
        "task": f"t {payload}",
        "condition": f"c {payload}",
        "train_condition": f"c {payload}",
        "train_length": 128,
        "length": 128,
        "intervention": None,
        "metric": "exact_match",
        "value": 0.5,
        "n": 20,
        "low": 0.3,
        "high": 0.7,
        "chance": 0.1,
        "seed": 0,
        "recipe": recipe,
        "versions": {f"v {payload}": payload},
        "created": f"2026-01-01T00:00:00 {payload}",
    }
    return line | fields


def loss(payload, recipe, task, step):
    return {
        "model": f"m {payload}",
        "position_embedding": payload,
        "task": task,
        "seed": 0,
        "step": step,
        "loss": 1.0,
        "recipe": recipe,
    }


def write_inputs(folder, payload, recipe):
    """A run and a benchmark's file in which the payload stands wherever a record can hold text."""
    shown_example = {
        "task": f"t {payload}",
        "prompt": f"{payload}{MARKER} {payload}",
        "markers": [len(payload)],
        "completion": f" {payload}",
    }
    similarity = inner(
        "residual",
        "similarity_centred",
        0.5,
        task=payload,
        marker="context",
        subject="meta",
        layer=2,
        distance=1,
        recipe=recipe,
    )
    run = {
        "command": f"metatokens {payload}",
        "preset": payload,
        "platform": payload,
        "cores": 2,
        "created": payload,
        "finished": payload,
        "versions": {payload: payload},
        "corpus": {payload: payload},
        "recipes": {payload: {payload: {payload: payload}}},
        "stages": [{"name": payload, "seconds": 5, "cpu_seconds": 5}],
        "models": {f"m {payload}": {"parameters": 5, "description": f"d {payload}"}},
    }
    write(
        folder,
        run,
        results=[
            result(payload, recipe),
            result(payload, recipe, condition=f"other {payload}"),
            result(payload, recipe, model="meta", length=256),
            result(payload, recipe, metric="token_accuracy"),
            result(payload, recipe, metric="perplexity", value=30.0, task=None),
            result(payload, recipe, intervention=payload),
            result(payload, recipe, metric="shortcut", model=f"answer {payload}"),
        ],
        curves=[
            loss(payload, recipe, None, step=1),
            loss(payload, recipe, f"t {payload}", step=1),
            loss(payload, recipe, None, step=2),
            loss(payload, recipe, f"t {payload}", step=2),
        ],
        examples=[shown_example],
        analysis=[similarity],
        speeds=[timing("prefill", "meta", 1.0, device=payload, shape=payload, dtype=payload)],
    )
    return [folder, folder / "speeds.jsonl"]


class Written(NamedTuple):
    """A report of hostile records."""

    html: str
    markdown: str


@pytest.fixture(scope="module", params=["of a run", "of a grid"])
def report(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    is_grid = request.param == "of a grid"
    hostile_lines = write_inputs(folder, HOSTILE, "small" if is_grid else f"r {HOSTILE}")
    markdown = write_quick_report(hostile_lines, folder / "report")
    return Written((folder / "report" / "index.html").read_text(), markdown)


def test_no_text_becomes_an_address_or_a_handler(report):
    page = Page(report.html)

    comments = [comment.strip() for comment in page.other]
    assert comments == ["metatokens report"]
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ADDRESSES:
                assert OWN_ADDRESS.fullmatch(value or ""), (tag, name)
            for payload in PAYLOADS:
                assert payload not in (value or "")


def test_a_page_shows_the_text_as_it_is(report):
    shown = " ".join(Page(report.html).texts["html"][0].split())

    assert shown.count(" ".join(HOSTILE.split())) >= 10


def test_a_page_forbids_scripts(report):
    policies = []
    for tag, attributes in Page(report.html).elements:
        if tag == "meta" and "http-equiv" in attributes:
            policies.append(attributes["content"])

    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_markdown_has_no_elements_but_its_own(report):
    page = Page(re.sub(r"\\(.)", "", report.markdown))  # the HTML that a Markdown file may hold

    tags = {tag for tag, _ in page.elements}
    assert tags <= {"pre", "kbd", "br"}
    for _, attributes in page.elements:
        assert attributes == {}
    comments = [comment.strip() for comment in page.other]
    assert comments == ["metatokens report"]


def test_markdown_shows_text(report):
    without_prompts = re.sub(r"<pre>.*?</pre>", "", report.markdown, flags=re.DOTALL)
    unescaped = re.sub(r"\\.", "", without_prompts)
    rows = [line for line in unescaped.split("\n") if line.startswith("|")]

    for target in re.findall(r"\]\(([^)]*)\)", unescaped):
        assert re.fullmatch(r"figures/\w+\.png|tables\.md", target), target
    assert not re.search(r"^\[[^\]]*\]:", unescaped, flags=re.MULTILINE)
    assert "# heading" not in without_prompts.split("\n")
    assert rows
    for row in rows:
        assert row.endswith("|")


def test_pictures_are_pictures(tmp_path):
    lines = write_inputs(tmp_path, MATH, f"r {MATH}")
    with main_claims_alone():
        page = write_report(lines, tmp_path / "report")

    pictures = [picture.read_bytes() for picture in (tmp_path / "report" / "figures").iterdir()]
    for encoded in re.findall(r"data:image/png;base64,([\w+/=]+)", page.read_text()):
        pictures.append(base64.b64decode(encoded, validate=True))
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        assert MATH.encode() not in picture
