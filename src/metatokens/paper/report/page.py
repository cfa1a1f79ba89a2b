"""The report: a Markdown page that a template makes, its tables in full next to it, and both as HTML in one frame."""

import base64
import html
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from matplotlib.figure import Figure

from metatokens.errors import UserError
from metatokens.files import write_whole
from metatokens.looking.style import PAGE, PHONE, png
from metatokens.paper.claims import claims, judge
from metatokens.paper.frame import Inputs, load
from metatokens.paper.report import covered, figures, overview
from metatokens.paper.report.paper import paper_figure
from metatokens.paper.report.tables import Tables
from metatokens.paper.report.text import TOKENS_RIGHT, escape, name, number

SIGNATURE = "metatokens report"  # in every page; a page without it is never overwritten
_PAGES = {"index.html": "report.md", "tables.html": "tables.md"}  # and the Markdown that each is made from

Pictures = dict[str, tuple[bytes, bytes]]
"""By name, for a page and for a phone."""


def write_report(paths: Sequence[Path], out: Path, say: Callable[[str], None] = lambda text: None) -> Path:
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
    files = {out / page: _html(texts[source], pictures).encode() for page, source in _PAGES.items()}
    files |= {out / page: text.encode() for page, text in texts.items()}
    drawn = {out / "figures" / f"{picture}.png": page for picture, (page, _) in pictures.items()}
    pages = [file for file in files if file.is_file()]
    foreign = [file for file in pages if SIGNATURE.encode() not in file.read_bytes()]
    foreign += [] if pages else [file for file in drawn if file.exists()]  # a picture next to a report is its own
    if foreign:
        raise UserError(f"{foreign[0]} belongs to no report; choose another folder for --out, or remove it.")
    files |= drawn
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            write_whole(file, data)
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror}.") from error
    return out / "index.html"


def _markdown(inputs: Inputs, out: Path, pictures: Pictures) -> dict[str, str]:
    """The pages in Markdown; their pictures are drawn into `pictures`."""

    def picture(draw: Callable[..., Figure], about: Any, alt: str) -> Markup:
        drawn = draw(about, PAGE)
        if not drawn.axes:  # nothing was measured
            return Markup("")
        pictures[draw.__name__] = png(drawn), png(draw(about, PHONE))
        return Markup(f"![{escape(alt)}](figures/{draw.__name__}.png)")

    # Every value is escaped where it is printed, except for what a template marks as markup.
    environment = _environment(autoescape=True, finalize=escape)
    environment.filters["markdown"] = lambda table: Markup(table.markdown())
    environment.filters["href"] = lambda page: Markup(quote_url(os.path.relpath(page, out)))
    environment.filters["html"] = lambda text: Markup(html.escape(text, quote=False).replace("\n", "&#10;"))
    environment.filters["inline"] = lambda text: Markup(html.escape(" ".join(text.split()), quote=False))
    judged = [judge(inputs, claim) for claim in claims()]
    dates = [one.created for one in inputs.read.results] + [run.finished or run.created for run in inputs.read.runs]
    recipes = (one.recipe for one in inputs.read.results if one.recipe)  # of a run under way, which has no run.json
    named = [run.preset for run in inputs.read.runs if run.preset]
    presets = [*named, *(recipe.partition("/")[0] for recipe in recipes), None]
    content = {
        "inputs": inputs,
        "judged": judged,
        "questions": {
            text: [one for one in judged if one.claim.question == text]
            for text in dict.fromkeys(one.claim.question for one in judged)
        },
        "told": [one for one in judged if one.strata],
        "has_intervals": any(math.isfinite(one.effect.low) for one in judged),
        "created": max(filter(None, dates), default=""),
        "command": lambda one: overview.command(one, presets[0]),
        "picture": picture,
        "draw": figures,
        "covered": covered,
        "overview": overview,
        "paper_figure": paper_figure,
        "tokens_right": TOKENS_RIGHT,
    }
    texts = {}
    for page in _PAGES.values():
        own = Tables(inputs, by_seed=page == "tables.md")
        text = environment.get_template(f"{page}.j2").render(content, tables=own)
        texts[page] = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    return texts


def _environment(**options: Any) -> Environment:
    environment = Environment(
        loader=PackageLoader("metatokens.paper.report", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.globals["signature"] = SIGNATURE
    environment.filters |= {"name": name, "number": number, "markup": Markup}
    return environment


def _html(markdown: str, pictures: Pictures) -> str:
    """A page of Markdown as HTML that needs nothing else."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    rules: Mapping[str, Callable[[Sequence[Token], int], str]] = {
        "table_open": lambda tokens, place: '<div class="scroll" role="region" tabindex="0"><table>\n',
        "table_close": lambda tokens, place: "</table></div>\n",
        "heading_open": lambda tokens, place: f'<{tokens[place].tag} id="{_anchor(tokens[place + 1])}">',
        "image": lambda tokens, place: _picture(tokens[place], pictures),
    }
    for rule, render in rules.items():
        parser.add_render_rule(rule, lambda _, tokens, place, *rest, render=render: render(tokens, place))
    tokens = parser.parse(markdown)
    headings = [
        (_anchor(own), _text(own))
        for before, own in pairwise(tokens)
        if before.type == "heading_open" and before.tag == "h2"
    ]
    title = next((_text(own) for own in tokens if own.type == "inline"), "")
    for own in tokens:
        for child in own.children or ():
            if child.type == "link_open" and child.attrs["href"] in _PAGES.values():
                child.attrs["href"] = next(page for page, source in _PAGES.items() if source == child.attrs["href"])
    body = Markup(parser.renderer.render(tokens, parser.options, {}))
    return _environment(autoescape=True).get_template("page.html.j2").render(title=title, headings=headings, body=body)


def _text(heading: Token) -> str:
    return "".join(child.content for child in heading.children or ())


def _anchor(heading: Token) -> str:
    """The name of a heading in links."""
    return re.sub(r"\W+", "-", _text(heading).lower()).strip("-")


def _picture(image: Token, pictures: Pictures) -> str:
    drawn = pictures[Path(str(image.attrs["src"])).stem]
    page, phone = (f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in drawn)
    phone_source = f'<source media="(max-width: 40rem)" srcset="{phone}">'
    return f'<picture>{phone_source}<img src="{page}" alt="{html.escape(image.content)}"></picture>'
