"""The report in a real browser: images load, nothing is logged, nothing overflows, and the first screen says enough."""

import json
import shutil
import subprocess
import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from metatokens.report.page import write_report
from tests.report.report_inputs import write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
PHONE, DESKTOP = (375, 812), (1280, 800)

# Frames stand in for screens: a window has a least width of its own. What is folded is opened before measuring.
PROBE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
const measure = async ([width, height]) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:${height}px;border:0`;
  frame.src = "index.html";
  document.body.append(frame);
  await new Promise(loaded => frame.onload = loaded);
  const page = frame.contentDocument, size = element => parseFloat(getComputedStyle(element).fontSize);
  const bottom = selector => page.querySelector(selector)?.getBoundingClientRect().bottom;
  const first = {verdict: bottom(".verdict"), table: bottom("table"), caution: bottom(".caution")};
  page.querySelectorAll("details").forEach(fold => fold.open = true);
  await Promise.all([...page.images].map(image => image.decode().catch(() => null)));
  const texts = [...page.body.querySelectorAll("*")].filter(element => element.checkVisibility()
    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {
    first,
    innerWidth: frame.contentWindow.innerWidth,
    scrollWidth: page.documentElement.scrollWidth,
    images: [...page.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width]),
    base: size(page.body),
    smallest: Math.min(...texts.map(size)),
  };
};
(async () => {
  const findings = [];
  for (const screen of SCREENS) findings.push(await measure(screen));
  await fetch("findings", {method: "POST", body: JSON.stringify(findings)});
})();
</script>"""


@dataclass
class Sight:
    """What a browser saw: measurements by screen, console lines, requested paths."""

    screens: list[dict[str, Any]]
    console: list[str]
    requested: set[str]


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, notes what was asked for, and takes the probe's findings."""

    requested: ClassVar[set[str]]
    findings: ClassVar[list[bytes]]
    done: ClassVar[threading.Event]

    def do_GET(self) -> None:
        self.requested.add(self.path)
        super().do_GET()

    def do_POST(self) -> None:
        self.findings.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def look(folder: Path, *screens: tuple[int, int]) -> Sight:
    """Open `index.html` of the folder in a browser, at each size."""
    assert CHROMIUM is not None
    (folder / "probe.html").write_text(PROBE.replace("SCREENS", json.dumps(screens)), encoding="utf-8")
    state = {"requested": set(), "findings": [], "done": threading.Event()}
    handler: Any = type("Handler", (Handler,), state)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --no-proxy-server "
        "--enable-logging=stderr --v=0 --window-size=1400,1000 --remote-debugging-port=0"
    )
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server,
        (folder / "browser.log").open("w+", encoding="utf-8", errors="replace") as log,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/probe.html"
        command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", address]
        with subprocess.Popen(command, stdout=log, stderr=log) as browser:
            answered = handler.done.wait(timeout=180)
            browser.terminate()
        server.shutdown()
        log.seek(0)
        lines = log.read().splitlines()
    assert answered, "\n".join(lines[-20:])
    return Sight(json.loads(handler.findings[0]), [line for line in lines if "CONSOLE" in line], handler.requested)


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on the path")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Sight:
    folder = tmp_path_factory.mktemp("report")
    write_report([write_run(folder / "run")], folder)
    return look(folder, PHONE, DESKTOP)


def test_every_image_loads_at_both_widths(seen: Sight) -> None:
    for screen in seen.screens:
        assert len(screen["images"]) == 4
        assert all(natural > 0 for natural, _ in screen["images"])


def test_a_phone_gets_pictures_of_its_own(seen: Sight) -> None:
    phone, desktop = (screen["images"] for screen in seen.screens)
    for (small, _), (large, _) in zip(phone, desktop, strict=True):
        assert small < large
    # Dense enough for a screen with two dots a pixel, so that letters stay sharp.
    assert all(natural >= 1.5 * shown for natural, shown in phone + desktop)


def test_nothing_is_logged_and_nothing_else_is_loaded(seen: Sight) -> None:
    assert seen.console == []
    assert seen.requested == {"/probe.html", "/index.html"}


def test_nothing_overflows(seen: Sight) -> None:
    for screen, (width, _) in zip(seen.screens, (PHONE, DESKTOP), strict=True):
        assert screen["innerWidth"] == width
        assert screen["scrollWidth"] <= width


def test_text_is_large_enough_to_read(seen: Sight) -> None:
    for screen in seen.screens:
        assert screen["base"] >= 16
        assert screen["smallest"] >= 14


def test_the_first_screen_holds_what_came_out(seen: Sight) -> None:
    phone, desktop = (screen["first"] for screen in seen.screens)
    assert phone["verdict"] < PHONE[1]
    assert max(desktop.values()) < DESKTOP[1]


def test_the_probe_sees_faults(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<!doctype html><p style="width:600px;font-size:9px">wide</p><img src="absent.png">'
        '<script>console.error("a fault")</script>'
    )
    sight = look(tmp_path, PHONE)
    assert sight.screens[0]["images"][0][0] == 0
    assert sight.screens[0]["scrollWidth"] > PHONE[0]
    assert sight.screens[0]["smallest"] == 9
    assert any("a fault" in line for line in sight.console)
    assert "/absent.png" in sight.requested
