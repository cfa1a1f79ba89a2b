"""Hooks of MkDocs: a page made from the code, and the pages from outside this folder."""

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# The site keeps their paths in the repository, so links hold in both, except for docs/. README.md is its home page.
REPORT = ("results/small/report/report.md", "results/small/report/tables.md")
PICTURES = (
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / REPORT[0]).parent.glob("figures/*.png"))
)
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/LOG.md",
    "examples/any_decoder.py",
    "examples/first_ten_minutes.ipynb",
    "results/counting_log.md",
    "results/covered_text/README.md",
    "results/forget/README.md",
    "results/more_text/README.md",
    "results/pilot.md",
    "results/shrink/README.md",
    *REPORT,
    *PICTURES,
)
FROM_ELSEWHERE = re.compile(
    r"""<(script|img|iframe|source)\b[^>]*\bsrc=["']?(https?:)?//|<link\b[^>]*\bhref=["']?(https?:)?//"""
    r"""|@import\s|\burl\(["']?(https?:)?//"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the commands, and the files from outside docs/."""
    command = [
        sys.executable,
        "-m",
        "typer",
        "metatokens.cli",
        "utils",
        "docs",
        "--name",
        "metatokens",
    ]
    commands = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files.append(File.generated(config, "command_line.md", content=commands))
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and the files outside it."""
    if page.file.src_uri in REPORT:  # its hundreds of tables would crowd out other hits
        page.meta["search"] = {"exclude": True}
    folder = posixpath.dirname(page.file.src_uri)
    here = folder if page.file.src_uri in OUTSIDE else posixpath.join("docs", folder)

    def inside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[1]))
        return f"]({posixpath.relpath(target.removeprefix('docs/'), folder or '.')}"

    return re.sub(r"\]\((?!\w+:|[#/])([^)#\s]+)", inside, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would load anything from another host."""
    for path in Path(config.site_dir).rglob("*"):
        if path.suffix in (".html", ".css") and FROM_ELSEWHERE.search(
            path.read_text(encoding="utf-8")
        ):
            raise PluginError(f"{path} loads something from elsewhere.")
