"""The report as one HTML file that needs nothing else, and as Markdown with its pictures beside it."""

import base64
import html
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from metatokens.errors import UserError
from metatokens.files import write_whole
from metatokens.looking.style import palette, swatch
from metatokens.paper.report import grid_page, run_page
from metatokens.paper.report.blocks import Picture
from metatokens.paper.report.frame import Inputs, load
from metatokens.paper.report.labels import in_order, labelled, of_models
from metatokens.paper.report.provenance import provenance
from metatokens.paper.report.tables.claims import MARKS, PLURALS, SIDES, counts, quote, so_far, tally
from metatokens.paper.report.text import name

SIGNATURE = "metatokens report"  # in both files; a file without it is never overwritten


def write_report(paths: Sequence[Path], out: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """Write `index.html`, `report.md` and `figures/*.png`. The same inputs give the same bytes.

    Args:
        paths: run folders (`results.jsonl` and, where there are, `analysis.jsonl`, `curves.jsonl`, `examples.jsonl`,
            `run.json`, and pages in `looks`) or files of lines of results or of benchmarks.
        out: the folder to write, made where it is missing; a report in it is replaced.
        say: called with a sentence before each step of the work; the steps may take minutes.

    Returns:
        The path of `index.html`.

    Raises:
        UserError: if an input is missing, empty or malformed, if `out` cannot be written, or if it holds an
            `index.html` or `report.md` that is not a report.
    """
    inputs = load(paths)
    say(f"read {len(inputs.figures):,} figures; making the tables")
    content = _content(inputs)
    say("drawing and writing the page")
    files: dict[Path, bytes] = {
        out / "index.html": _rendered("page.html.j2", content, out, autoescape=True),
        # Every value is escaped where it is printed, but for what a template marks as markup.
        out / "report.md": _rendered("page.md.j2", content, out, finalize=_escape_markdown),
    }
    for file in files:
        if file.is_file() and SIGNATURE.encode() not in file.read_bytes():
            raise UserError(f"{file} is not a report; choose another folder for --out, or remove it.")
    pictures = [content["overview"].picture] if content["overview"] else []
    pictures += [block for section in content["sections"] for block in section.blocks if isinstance(block, Picture)]
    files |= {out / "figures" / f"{picture.file}.png": picture.page for picture in pictures}
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            write_whole(file, data)
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror}.") from error
    return out / "index.html"


def _content(inputs: Inputs) -> dict[str, Any]:
    """What both templates show: of a grid all claims, of another run the comparison of its models."""
    dates = [one.created for one in inputs.read.results]
    dates += [run.finished or run.created for run in inputs.read.runs]
    content: dict[str, Any] = {
        "signature": SIGNATURE,
        "presets": list(dict.fromkeys(run.preset for run in inputs.read.runs if run.preset)),
        "created": max(filter(None, dates), default=""),
        "headline": None,
        "overview": None,
        "marks": MARKS,
        "plurals": PLURALS,
        "sides": SIDES,
        "swatches": {},
    }
    if inputs.preset is not None:
        first = grid_page.overview(inputs)
        judged = list(chain.from_iterable(first.questions.values()))
        shown = [*grid_page.sections(inputs, judged), *provenance(inputs)]
        return content | {"overview": first, "verdict": first.sentences[0], "sections": shown}
    inputs = replace(inputs, figures=labelled(inputs.figures))
    measured, trained = of_models(inputs.figures)["label"], labelled(inputs.curves)["label"]
    styles = palette([*in_order(measured), *in_order(trained)])
    headline = run_page.headline(inputs)
    return content | {
        "headline": headline,
        "verdict": headline.verdict,
        "sections": [*run_page.sections(inputs, styles), *provenance(inputs)],
        "swatches": {label: swatch(style) for label, style in styles.items()},
    }


def _rendered(template: str, content: Mapping[str, Any], out: Path, **options: Any) -> bytes:
    environment = Environment(
        loader=PackageLoader("metatokens.paper.report", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )
    environment.tests["kind"] = lambda block, kind: type(block).__name__ == kind
    filters = (_data_uri, _verdict_class, name, so_far, counts, quote, tally)
    environment.filters |= {"markup": Markup} | {one.__name__.removeprefix("_"): one for one in filters}
    environment.filters["href"] = lambda page: quote_url(os.path.relpath(page, out))
    return environment.get_template(template).render(content).encode()


def _verdict_class(verdict: str) -> str:
    return verdict.removesuffix(" at this scale").replace(" ", "-")


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _escape_markdown(value: object) -> object:
    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(text, quote=False))
