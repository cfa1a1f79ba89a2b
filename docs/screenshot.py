"""Takes the picture of `metatokens look` with the distribution's Chromium: `python docs/screenshot.py`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how_to/look_inside.md"
HEIGHT = 1100  # how much of the page is shown, in pixels


def prompt() -> str:
    """The prompt of the page that shows the picture."""
    [text] = re.findall(
        r'metatokens look --model example [^"]*"([^"]+)"', PAGE.read_text(encoding="utf-8")
    )
    return text


def take(picture: Path) -> None:
    """Write the picture of the page."""
    with TemporaryDirectory() as folder, sync_playwright() as play:
        page = Path(folder) / "look.html"
        command = [
            sys.executable,
            "-m",
            "metatokens",
            "look",
            "--model",
            "example",
            prompt(),
            "--out",
            str(page),
        ]
        subprocess.run(command, check=True)
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": HEIGHT})
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready]")
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    take(ROOT / "docs/images/look.png")
