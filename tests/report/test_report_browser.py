"""The report in a real browser: images load, nothing is logged, nothing overflows, and the first screen says enough."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from report_inputs import write_run

from metatokens.report.page import write_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
PHONE, DESKTOP = (375, 812), (1280, 800)

# Frames stand in for screens: a browser's own window has a least width. Everything folded is opened before measuring.
PROBE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><pre id="findings"></pre><script>
const screens = %s, page = "%s";
const measure = async ([width, height]) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:${height}px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(loaded => frame.onload = loaded);
  const page_ = frame.contentDocument, bottom = selector => page_.querySelector(selector)?.getBoundingClientRect().bottom;
  const first = {verdict: bottom(".verdict"), table: bottom("table"), caution: bottom(".caution")};
  page_.querySelectorAll("details").forEach(fold => fold.open = true);
  await Promise.all([...page_.images].map(image => image.decode().catch(() => null)));
  const texts = [...page_.body.querySelectorAll("*")].filter(
    element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {
    first,
    innerWidth: frame.contentWindow.innerWidth,
    scrollWidth: page_.documentElement.scrollWidth,
    images: [...page_.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width]),
    base: parseFloat(frame.contentWindow.getComputedStyle(page_.body).fontSize),
    smallest: Math.min(...texts.map(text => parseFloat(frame.contentWindow.getComputedStyle(text).fontSize))),
  };
};
(async () => {
  const findings = [];
  for (const screen of screens) findings.push(await measure(screen));
  document.getElementById("findings").textContent = JSON.stringify(findings);
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder and notes what was asked for."""

    requested: list[str]

    def do_GET(self) -> None:
        self.requested.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def look(folder: Path, screens: list[tuple[int, int]]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """What a browser finds on `index.html` in the folder: measurements by screen, console lines, requested paths."""
    assert CHROMIUM is not None
    (folder / "probe.html").write_text(PROBE % (json.dumps(screens), "index.html"), encoding="utf-8")
    handler = type("Recorder", (Handler,), {"requested": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --no-proxy-server --disable-dev-shm-usage "
            "--enable-logging=stderr --v=0 --virtual-time-budget=20000 --window-size=1400,1000 --dump-dom"
        )
        address = f"http://127.0.0.1:{server.server_port}/probe.html"
        profile = f"--user-data-dir={folder / 'profile'}"
        command = [CHROMIUM, *flags.split(), profile, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        server.shutdown()
    found = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stdout[-500:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(found[1]), console, handler.requested  # type: ignore[attr-defined]


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on the path")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, Any]], list[str], list[str]]]:
    folder = tmp_path_factory.mktemp("report")
    write_report([write_run(folder / "run")], folder)
    yield look(folder, [PHONE, DESKTOP])


def test_every_image_loads_at_both_widths(seen: tuple) -> None:
    for screen in seen[0]:
        assert len(screen["images"]) == 4
        assert all(natural > 0 for natural, _ in screen["images"])


def test_a_phone_gets_pictures_of_its_own(seen: tuple) -> None:
    phone, desktop = (screen["images"] for screen in seen[0])
    for (small, _), (large, _) in zip(phone, desktop, strict=True):
        assert small < large
    # Dense enough for a screen with two dots a pixel, so that letters stay sharp.
    assert all(natural >= 1.5 * shown for natural, shown in phone + desktop)


def test_nothing_is_logged_and_nothing_else_is_loaded(seen: tuple) -> None:
    _, console, requested = seen
    assert console == []
    assert set(requested) == {"/probe.html", "/index.html"}


def test_nothing_overflows(seen: tuple) -> None:
    for screen, (width, _) in zip(seen[0], (PHONE, DESKTOP), strict=True):
        assert screen["innerWidth"] == width
        assert screen["scrollWidth"] <= width


def test_text_is_large_enough_to_read(seen: tuple) -> None:
    for screen in seen[0]:
        assert screen["base"] >= 16
        assert screen["smallest"] >= 14


def test_the_first_screen_holds_what_came_out(seen: tuple) -> None:
    phone, desktop = (screen["first"] for screen in seen[0])
    assert phone["verdict"] < PHONE[1]
    assert max(desktop.values()) < DESKTOP[1]


def test_the_probe_sees_faults(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<!doctype html><p style="width:600px;font-size:9px">wide</p><img src="absent.png">'
        '<script>console.error("a fault")</script>'
    )
    [screen], console, requested = look(tmp_path, [PHONE])
    assert screen["images"][0][0] == 0
    assert screen["scrollWidth"] > PHONE[0]
    assert screen["smallest"] == 9
    assert any("a fault" in line for line in console)
    assert "/absent.png" in requested
