"""The report in a real browser: images load, nothing is logged, nothing overflows, and the first screen says enough."""

import json
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple

import pytest

from metatokens.paper.report.page import write_report
from tests.forked import PATIENCE
from tests.paper.report.made_lines import covered, grid
from tests.paper.report.pages import main_claims_alone, write_quick_report

PHONE, DESKTOP = (375, 812), (1280, 800)

FAULTY = """<!doctype html>
<p style="width:600px;font-size:9px">wide</p><img src="absent.png">
<div class="scroll" style="overflow-x:auto"><p style="width:900px">scrolls</p></div>
<script>console.error("a fault")</script>"""

# Frames stand in for screens: a window has a least width of its own.
PROBE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
const measure = async (path, [width, height]) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:${height}px;border:0`;
  frame.src = path;
  document.body.append(frame);
  await new Promise(loaded => frame.onload = loaded);
  const page = frame.contentDocument, view = frame.contentWindow;
  const size = element => parseFloat(view.getComputedStyle(element).fontSize);
  const all = selector => [...page.querySelectorAll(selector)];
  const box = selector => page.querySelector(selector)?.getBoundingClientRect();
  const first = {};
  for (const part of ["blockquote", ".picture", "table"])
    if (box(part)) first[part] = [box(part).top, box(part).bottom];
  await Promise.all([...page.images].map(image => image.decode().catch(() => null)));
  view.scrollTo({top: page.body.scrollHeight / 2, behavior: "instant"});
  const contents = box(".contents summary"), scrolled = view.scrollY;
  page.querySelector(".contents")?.setAttribute("open", "");
  const texts = all("body *").filter(element => element.checkVisibility()
    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {
    first, scrolled, contents: contents && [contents.top, contents.bottom],
    links: all(".contents a").length,
    innerWidth: view.innerWidth, scrollWidth: page.documentElement.scrollWidth,
    wide: all("body *").filter(element => !element.parentElement.closest(".scroll, .picture")
      && element.getBoundingClientRect().right > width + 0.5).map(element => element.outerHTML.slice(0, 90)),
    cut: all("body *").filter(element => element.scrollWidth > element.clientWidth + 1 && element.clientWidth
      && view.getComputedStyle(element).overflowX === "hidden").length,
    images: [...page.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width]),
    base: size(page.body), smallest: Math.min(...texts.map(size)),
  };
};
(async () => {
  const findings = [];
  for (const [path, screen] of SIGHTS) findings.push(await measure(path, screen));
  await fetch("findings", {method: "POST", body: JSON.stringify(findings)});
})();
</script>"""


class Sight(NamedTuple):
    """What a browser saw: measurements in the order asked for, console lines, requested paths."""

    screens: list[dict[str, Any]]
    console: list[str]
    requested: set[str]


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, notes what was asked for, and takes the probe's findings."""

    requested: ClassVar[set[str]] = set()
    findings: ClassVar[list[bytes]] = []
    done: ClassVar[threading.Event] = threading.Event()

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


def look(chromium, folder, *sights):
    """Open pages of a folder in a browser, each on a screen of some size."""
    (folder / "probe.html").write_text(
        PROBE.replace("SIGHTS", json.dumps(sights)), encoding="utf-8"
    )
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --no-proxy-server "
        "--enable-logging=stderr --v=0 --window-size=1400,1000 --remote-debugging-port=0"
    )
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server,
        (folder / "browser.log").open("w+", encoding="utf-8", errors="replace") as log,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/probe.html"
        command = [
            chromium,
            *flags.split(),
            f"--user-data-dir={folder / 'profile'}",
            address,
        ]
        with subprocess.Popen(command, stdout=log, stderr=log) as browser:
            answered = Handler.done.wait(PATIENCE)
            browser.terminate()
        server.shutdown()
        log.seek(0)
        lines = log.read().splitlines()
    assert answered, "\n".join(lines[-20:])
    console = [line for line in lines if "CONSOLE" in line]
    return Sight(json.loads(Handler.findings[0]), console, Handler.requested)


@pytest.fixture(scope="module")
def seen(chromium, tmp_path_factory):
    """The demo's page, the grid's with white pictures, each on a phone and on a desk, and a page with faults."""
    folder = tmp_path_factory.mktemp("report")
    with main_claims_alone():
        write_report([covered(folder / "run")], folder / "demo")
    write_quick_report(grid(folder / "lines"), folder / "grid")
    (folder / "faulty").mkdir()
    (folder / "faulty" / "index.html").write_text(FAULTY)
    return look(
        chromium,
        folder,
        ("demo/index.html", PHONE),
        ("demo/index.html", DESKTOP),
        ("grid/index.html", PHONE),
        ("grid/index.html", DESKTOP),
        ("faulty/index.html", PHONE),
    )


@pytest.fixture(scope="module")
def screens(seen):
    """What was measured on each screen of the two reports, and the screen's width and height."""
    *reports, _ = seen.screens
    return list(zip(reports, (PHONE, DESKTOP, PHONE, DESKTOP), strict=True))


def test_every_image_loads_and_keeps_its_size_on_a_phone(seen):
    demo_on_phone, demo_on_desk, grid_on_phone, grid_on_desk, _ = (
        screen["images"] for screen in seen.screens
    )

    assert (len(demo_on_phone), len(demo_on_desk)) == (2, 2)
    assert len(grid_on_phone) == len(grid_on_desk) > 5
    for natural_width, _ in grid_on_phone + grid_on_desk:
        assert natural_width > 0
    for natural_width, shown_width in demo_on_phone + demo_on_desk:
        # Dense enough for a screen with two dots a pixel, so that letters stay sharp.
        assert natural_width >= 1.5 * shown_width
        assert shown_width > 700


def test_nothing_is_logged_and_nothing_else_is_loaded(seen):
    from_reports = [line for line in seen.console if "/faulty/" not in line]
    requested = {path for path in seen.requested if not path.startswith("/faulty/")}

    assert from_reports == []
    assert requested == {"/probe.html", "/demo/index.html", "/grid/index.html"}


def test_nothing_is_wider_than_the_page(screens):
    for screen, (width, _) in screens:
        assert screen["wide"] == []
        assert screen["cut"] == 0
        assert screen["innerWidth"] == width
        assert screen["scrollWidth"] <= width


def test_text_is_large_enough_to_read(screens):
    for screen, _ in screens:
        assert screen["base"] >= 16
        assert screen["smallest"] >= 14


def test_the_first_screen_holds_what_came_out(screens):
    for screen, size in screens:
        top_of_sentences, bottom_of_sentences = screen["first"]["blockquote"]
        top_of_picture, _ = screen["first"][".picture"]
        top_of_table, _ = screen["first"]["table"]
        assert top_of_sentences <= top_of_picture <= top_of_table
        assert top_of_sentences < size[1] / 3
        if size == DESKTOP:
            assert bottom_of_sentences < DESKTOP[1]
            assert top_of_picture < DESKTOP[1]


def test_the_contents_stay_within_reach(screens):
    for screen, (_, height) in screens:
        top, bottom = screen["contents"]
        assert screen["scrolled"] > 1000
        assert 0 <= top < bottom < height / 4
        assert screen["links"] >= 6


def test_the_probe_sees_faults(seen):
    faulty = seen.screens[-1]
    [wide] = faulty["wide"]
    [logged] = (line for line in seen.console if "/faulty/" in line and "a fault" in line)

    assert faulty["images"][0][0] == 0
    assert faulty["scrollWidth"] > PHONE[0]
    assert faulty["smallest"] == 9
    assert wide.startswith('<p style="width:600p')
    assert "CONSOLE" in logged
    assert "/faulty/absent.png" in seen.requested
