"""Takes the README's picture of `metatokens look`, in a Chromium of the distribution: `python docs/screenshot.py`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
HEIGHT = 1100  # of the page's beginning that is shown, in pixels


def prompt() -> str:
    """That of the README."""
    [found] = re.findall(r'metatokens look --model example "([^"]+)"', (ROOT / "README.md").read_text(encoding="utf-8"))
    return found


def take(picture: Path) -> None:
    """Write the picture of the page."""
    with TemporaryDirectory() as folder, sync_playwright() as play:
        page = Path(folder) / "look.html"
        command = [sys.executable, "-m", "metatokens", "look", "--model", "example", prompt(), "--out", str(page)]
        subprocess.run(command, check=True)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": HEIGHT})
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready]")
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    take(ROOT / "docs/images/look.png")
