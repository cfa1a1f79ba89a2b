"""The report: a Markdown page, its tables in full next to it, and both as HTML in one frame."""

import base64
import html
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

from metatokens.errors import UserError
from metatokens.files import write_whole
from metatokens.looking.style import page_templates, png
from metatokens.paper.claims import ClaimResult, claims, judge
from metatokens.paper.frame import SPEEDS, Inputs, load
from metatokens.paper.report import covered, figures, overview
from metatokens.paper.report.paper_numbers import paper_table
from metatokens.paper.report.tables import Tables
from metatokens.paper.report.text import CONTENT, escape, number, words

SIGNATURE = "metatokens report"  # in every page; a page without it is never overwritten
# The pages in Markdown, and the HTML that is made from each.
_PAGES = {"report.md": "index.html", "tables.md": "tables.html"}

Pictures = dict[str, bytes]
"""PNG files, by name."""


def write_report(
    paths: Sequence[Path], out: Path, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Write `index.html`, `tables.html`, `report.md`, `tables.md` and `figures/*.png`; equal inputs give equal bytes.

    Args:
        paths: run folders (`results.jsonl` and, where there are, `analysis.jsonl`, `curves.jsonl`, `examples.jsonl`,
            `run.json`, and pages in `looks`) or files of lines of results or of benchmarks.
        out: the folder to write, made where it is missing; a report in it is replaced.
        say: called with a sentence before each step of the work; the steps may take minutes.

    Returns:
        The path of `index.html`.

    Raises:
        UserError: if an input is missing, empty or malformed, if `out` cannot be written, or if it holds a page or a
            picture that is not a report's.
    """
    inputs = load(paths)
    say(f"read {len(inputs.figures):,} figures; making the tables and drawing")
    pictures: Pictures = {}
    texts = _markdown(inputs, out, pictures)
    pages = {out / _PAGES[page]: _html(text, pictures).encode() for page, text in texts.items()}
    pages |= {out / page: text.encode() for page, text in texts.items()}
    drawn = {out / "figures" / f"{name}.png": picture for name, picture in pictures.items()}
    _refuse_to_replace(pages, drawn)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for file, data in (pages | drawn).items():
            write_whole(file, data)
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror}.") from error
    return out / "index.html"


def _refuse_to_replace(pages: Iterable[Path], pictures: Iterable[Path]) -> None:
    """Refuse a folder with a page that is no report's, or with pictures that are not next to one."""
    existing = [page for page in pages if page.is_file()]
    foreign = [page for page in existing if SIGNATURE.encode() not in page.read_bytes()]
    if not existing:
        foreign += [picture for picture in pictures if picture.exists()]
    if foreign:
        raise UserError(
            f"{foreign[0]} belongs to no report; choose another folder for --out, or remove it."
        )


# --- The Markdown


def _markdown(inputs: Inputs, out: Path, pictures: Pictures) -> dict[str, str]:
    """The pages in Markdown; their pictures are drawn into `pictures`."""
    results = [judge(inputs, claim) for claim in claims()]

    # Every value is escaped where it is printed, except for what a template marks as markup.
    environment = _environment(finalize=escape)
    environment.filters |= {
        "words": words,
        "number": number,
        "duration": lambda seconds: timedelta(seconds=round(seconds)),
        "evidence": overview.evidence,
        "markdown": lambda table: Markup(table.markdown()),
        "href": lambda page: Markup(quote_url(os.path.relpath(page, out))),
        "html": lambda text: Markup(html.escape(text, quote=False).replace("\n", "&#10;")),
    }
    content = _content(inputs) | {
        "results": results,
        "has_intervals": any(math.isfinite(result.effect.low) for result in results),
    }
    texts = {}
    for page in _PAGES:
        tables = Tables(inputs, by_seed=page == "tables.md")
        of_page = {
            "page": page,
            "sections": CONTENT["pages"][page],
            "tables": tables,
            "picture": partial(_picture, tables, results, pictures),
        }
        text = environment.get_template("page.md.j2").render(content | of_page)
        texts[page] = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    return texts


def _picture(
    tables: Tables, results: Sequence[ClaimResult], pictures: Pictures, name: str
) -> Markup:
    """The Markdown of a picture, which is drawn into `pictures`; empty if nothing of it was measured."""
    measured = results if name == "claims" else tables
    drawn = getattr(figures, name)(measured)
    if not drawn.axes:
        return Markup("")
    pictures[name] = png(drawn)
    return Markup(f"![{escape(CONTENT['alternatives'][name])}](figures/{name}.png)")


def _content(inputs: Inputs) -> dict[str, Any]:
    """The values that the template shows."""
    read = inputs.read
    models: dict[str, list[Any]] = {}
    for run in read.runs:
        for name, info in run.models.items():
            models.setdefault(re.sub(r"-seed\d+", "", name), []).append(info)
    dates = [line.created for line in read.results]
    dates += [run.finished or run.created for run in read.runs]
    return {
        "inputs": inputs,
        "runs": read.runs,
        "models": models,
        "created": max(filter(None, dates), default=""),
        "covered": covered,
        "overview": overview,
        "benchmarks": SPEEDS,
        "paper_table": paper_table,
    }


def _environment(**options: Any) -> Environment:
    environment = page_templates("metatokens.paper.report", **options)
    environment.globals["signature"] = SIGNATURE
    return environment


# --- The HTML


class _Renderer(RendererHTML):
    """Tables that scroll, headings with anchors, and pictures inside the page."""

    def table_open(self, *_: Any) -> str:
        return '<div class="scroll" role="region" tabindex="0"><table>\n'

    def table_close(self, *_: Any) -> str:
        return "</table></div>\n"

    def heading_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        return f'<{tokens[index].tag} id="{_anchor(tokens[index + 1])}">'

    def image(self, tokens: Sequence[Token], index: int, options: Any, pictures: Any) -> str:
        image = tokens[index]
        data = base64.b64encode(pictures[Path(str(image.attrs["src"])).stem]).decode()
        shown = f'<img src="data:image/png;base64,{data}" alt="{html.escape(image.content)}">'
        return f'<span class="picture">{shown}</span>'


def _html(markdown: str, pictures: Pictures) -> str:
    """A page of Markdown as HTML that needs nothing else."""
    for linked, target in _PAGES.items():
        markdown = markdown.replace(f"]({linked})", f"]({target})")
    parser = MarkdownIt("commonmark", {"html": True}, renderer_cls=_Renderer).enable("table")
    tokens = parser.parse(markdown)
    headings = [
        (_anchor(heading), _text(heading))
        for opening, heading in pairwise(tokens)
        if opening.type == "heading_open" and opening.tag == "h2"
    ]
    title = next(_text(token) for token in tokens if token.type == "inline")
    body = Markup(parser.renderer.render(tokens, parser.options, pictures))
    page = _environment().get_template("page.html.j2")
    return page.render(title=title, headings=headings, body=body)


def _text(heading: Token) -> str:
    return "".join(child.content for child in heading.children or ())


def _anchor(heading: Token) -> str:
    """The name of a heading in links."""
    return re.sub(r"\W+", "-", _text(heading).lower()).strip("-")
