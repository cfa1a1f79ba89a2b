"""The report in a real browser: images load, nothing is logged, nothing overflows, and the first screen says enough."""

import json
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from metatokens.paper.report.page import write_report
from tests.forked import PATIENCE
from tests.paper.report.made_lines import covered, grid
from tests.paper.report.pages import undrawn

PHONE, DESKTOP = (375, 812), (1280, 800)

# Frames stand in for screens: a window has a least width of its own. What is folded is opened before measuring.
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
  for (const part of ["blockquote", "picture", "table"]) if (box(part)) first[part] = [box(part).top, box(part).bottom];
  const claim = page.querySelector("main details"), shown = () => claim.querySelector("p").checkVisibility();
  const opened = claim ? [shown(), (claim.querySelector("summary").click(), shown())] : [];
  all("details:not(.contents)").forEach(fold => fold.open = true);
  await Promise.all([...page.images].map(image => image.decode().catch(() => null)));
  view.scrollTo({top: page.body.scrollHeight / 2, behavior: "instant"});
  const contents = box(".contents summary"), scrolled = view.scrollY;
  page.querySelector(".contents")?.setAttribute("open", "");
  const texts = all("body *").filter(element => element.checkVisibility()
    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {
    first, opened, scrolled, contents: contents && [contents.top, contents.bottom],
    links: all(".contents a").length,
    innerWidth: view.innerWidth, scrollWidth: page.documentElement.scrollWidth,
    wide: all("body *").filter(element => !element.parentElement.closest(".scroll")
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


def look(chromium: str, folder: Path, *sights: tuple[str, tuple[int, int]]) -> Sight:
    """Open pages of a folder in a browser, each on a screen of some size."""
    (folder / "probe.html").write_text(PROBE.replace("SIGHTS", json.dumps(sights)), encoding="utf-8")
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
        command = [chromium, *flags.split(), f"--user-data-dir={folder / 'profile'}", address]
        with subprocess.Popen(command, stdout=log, stderr=log) as browser:
            answered = handler.done.wait(PATIENCE)
            browser.terminate()
        server.shutdown()
        log.seek(0)
        lines = log.read().splitlines()
    assert answered, "\n".join(lines[-20:])
    return Sight(json.loads(handler.findings[0]), [line for line in lines if "CONSOLE" in line], handler.requested)


@pytest.fixture(scope="module")
def seen(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Sight:
    """The demo's page, and the grid's with white pictures, each on a phone and on a desk."""
    folder = tmp_path_factory.mktemp("report")
    write_report([covered(folder / "run")], folder / "demo")
    with undrawn():
        write_report(grid(folder / "lines"), folder / "grid")
    sights = product((f"{page}/index.html" for page in ("demo", "grid")), (PHONE, DESKTOP))
    return look(chromium, folder, *sights)


def test_every_image_loads_and_a_phone_gets_pictures_of_its_own(seen: Sight) -> None:
    phone, desktop, *of_grid = (screen["images"] for screen in seen.screens)
    assert [len(images) for images in (phone, desktop)] == [3, 3]
    assert [len(images) for images in of_grid] == [8, 8]
    assert all(natural > 0 for images in of_grid for natural, _ in images)
    assert all(0 < small < large for (small, _), (large, _) in zip(phone, desktop, strict=True))
    # Dense enough for a screen with two dots a pixel, so that letters stay sharp.
    assert all(natural >= 1.5 * shown for natural, shown in phone + desktop)


def test_nothing_is_logged_and_nothing_else_is_loaded(seen: Sight) -> None:
    assert seen.console == []
    assert seen.requested == {"/probe.html", "/demo/index.html", "/grid/index.html"}


def test_nothing_is_wider_than_the_page(seen: Sight) -> None:
    for screen, (width, _) in zip(seen.screens, (PHONE, DESKTOP) * 2, strict=True):
        assert screen["wide"] == []
        assert screen["cut"] == 0
        assert screen["innerWidth"] == width
        assert screen["scrollWidth"] <= width


def test_text_is_large_enough_to_read(seen: Sight) -> None:
    for screen in seen.screens:
        assert screen["base"] >= 16
        assert screen["smallest"] >= 14


def test_the_first_screen_holds_what_came_out(seen: Sight) -> None:
    for screen, (_, height) in zip(seen.screens, (PHONE, DESKTOP) * 2, strict=True):
        first = screen["first"]
        tops = [first[part][0] for part in ("blockquote", "picture", "table")]
        assert tops == sorted(tops)
        assert first["blockquote"][1] < height
    assert all(screen["first"]["picture"][0] < DESKTOP[1] for screen in seen.screens[1::2])


def test_a_claim_opens_at_a_click(seen: Sight) -> None:
    assert [screen["opened"] for screen in seen.screens] == [[False, True]] * 4


def test_the_contents_stay_within_reach(seen: Sight) -> None:
    for screen, (_, height) in zip(seen.screens, (PHONE, DESKTOP) * 2, strict=True):
        top, bottom = screen["contents"]
        assert screen["scrolled"] > 1000
        assert 0 <= top < bottom < height / 4
        assert screen["links"] >= 6


def test_the_probe_sees_faults(chromium: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<!doctype html><p style="width:600px;font-size:9px">wide</p><img src="absent.png">'
        '<div class="scroll" style="overflow-x:auto"><p style="width:900px">scrolls</p></div>'
        '<script>console.error("a fault")</script>'
    )
    sight = look(chromium, tmp_path, ("index.html", PHONE))
    [screen] = sight.screens
    assert screen["images"][0][0] == 0
    assert screen["scrollWidth"] > PHONE[0]
    assert screen["smallest"] == 9
    assert [html[:20] for html in screen["wide"]] == ['<p style="width:600p']
    assert any("a fault" in line for line in sight.console)
    assert "/absent.png" in sight.requested
