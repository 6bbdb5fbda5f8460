"""The page in a real browser: no console error, everything in the DOM, the read-out works, nothing overflows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from changeover.report.page import render_page
from tests.browser import open_page
from tests.report import journals
from tests.report.pages import Page

pytestmark = pytest.mark.browser

# Moves the pointer to the middle of every chart and keeps what the read-out says there.
POINT_AT_CHARTS = """<script>
for (const plot of document.querySelectorAll(".plot")) {
  const box = plot.querySelector("svg").getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 5 }));
}
</script>"""
# Tells the page around it how wide the page is and what sticks out of it to the right.
MEASURE = """<script>
const page = document.documentElement;
const out = [...document.querySelectorAll("body *")].filter((one) => !one.closest(".scroll"))
  .filter((one) => one.getBoundingClientRect().right > page.clientWidth + 1)
  .map((one) => `${one.tagName} ${one.textContent.trim().slice(0, 40)}`);
parent.postMessage(`${page.clientWidth} ${page.scrollWidth} ${out.slice(0, 5).join("; ")}`, "*");
</script>"""
FRAME = """<!doctype html><body data-measured="nothing"><script>
addEventListener("message", (event) => { document.body.dataset.measured = event.data; });
</script><iframe src="page.html" style="border:0;width:WIDTHpx;height:900px"></iframe></body>"""


@pytest.mark.parametrize("make", [journals.finished, journals.failed])
def test_page_opens_without_a_console_message(chromium: str, tmp_path: Path, make):
    path = tmp_path / "page.html"
    path.write_text(render_page(make()) + POINT_AT_CHARTS, encoding="utf-8")
    dom, console = open_page(chromium, path)
    assert console == []
    page = Page(dom)
    assert len(page.tags("section")) == 7
    numbers = [found["id"] for found in page.with_class("changeover") if found.get("id")]
    assert numbers == [
        f"changeover-{c}" for c in range(1, 1 + sum(e.event == "changeover.cleared" for e in make()))
    ]
    assert len(page.tags("svg")) > 30
    assert len(page.tags("h2")) >= 7
    charts = len(page.with_class("plot"))
    assert len(page.with_class("readout")) == charts > 0
    assert "processes: Processes" not in page.words


def test_read_out_gives_the_value_under_the_pointer(chromium: str, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(render_page(journals.finished()) + POINT_AT_CHARTS, encoding="utf-8")
    dom, _ = open_page(chromium, path)
    said = re.findall(r'<div class="readout">([^<]*)</div>', dom)
    assert "4: baseline 33.8, speculative 46.64 tok/s" in said


def test_the_check_notices_a_console_error(chromium: str, tmp_path: Path):
    path = tmp_path / "page.html"
    broken = render_page([]).replace('"use strict";', '"use strict"; missing.call();')
    path.write_text(broken, encoding="utf-8")
    _, console = open_page(chromium, path)
    assert any("missing is not defined" in line for line in console)


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("make", [journals.finished, journals.failed])
def test_nothing_sticks_out_of_a_narrow_or_a_wide_screen(chromium: str, tmp_path: Path, make, width: int):
    (tmp_path / "page.html").write_text(render_page(make()) + MEASURE, encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    dom, _ = open_page(chromium, frame, "--window-size=1300,1000")
    measured = Page(dom).tags("body")[0]["data-measured"]
    assert measured == f"{width} {width} "


def test_screenshot_is_drawn(chromium: str, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(render_page(journals.finished()), encoding="utf-8")
    picture = tmp_path / "page.png"
    open_page(chromium, path, f"--screenshot={picture}", "--window-size=1280,2000")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
