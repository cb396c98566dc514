"""The report's page in a real browser: nothing is fetched, no errors, and everything is
readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.tui.cli.main import run
from tests.support.chromium import BROWSER, Chromium

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is on the path")
LEAST_CONTRAST = 4.5  # WCAG 2.1, 1.4.3, level AA, for text
LEAST_GRAPHIC = 3.0  # 1.4.11, for the parts of a picture that carry meaning
SCRIPT = """(() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = text => { const [r, g, b] = parts(text).map(channel); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x+0.05)/(y+0.05); };
  const ground = node => { for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor; const all = parts(colour);
    if (all.length < 4 || all[3] > 0) return colour; } return 'rgb(255, 255, 255)'; };
  const texts = [...document.querySelectorAll('h1, h2, p, td, th, svg text')];
  const ink = node => node.closest('svg') ? getComputedStyle(node).fill : getComputedStyle(node).color;
  const worst = texts.map(node => [contrast(ink(node), ground(node)), node.textContent.trim() || node.tagName]);
  const drawn = [...document.querySelectorAll('svg path, svg use')].filter(node => !node.closest('defs, clipPath'));
  const marks = drawn.map(node => getComputedStyle(node)).flatMap(style =>
    [style.fill, style.stroke]).filter(colour => /^rgb\\(/.test(colour));
  return JSON.stringify({
    texts: texts.length, worst: worst.sort((a, b) => a[0] - b[0])[0],
    graphics: [...new Set(marks)].map(colour => [contrast(colour, ground(document.body)), colour]),
    paper: ground(document.body), headings: [...document.querySelectorAll('h2')].map(node => node.textContent),
    figures: [...document.querySelectorAll('figure svg')].map(node => node.getBoundingClientRect().height),
    rows: [...document.querySelectorAll('table')].map(node => node.rows.length),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth});
})()"""  # noqa: E501


def _open(chromium: Chromium, page: Path, scheme: str, width: int) -> Any:
    """Return the page in this colour scheme, laid out, and what the script finds in it."""
    chromium.events.clear()
    chromium.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    chromium.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    chromium.navigate(page.as_uri())
    return json.loads(chromium.evaluate(SCRIPT))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a comparison with packs, a placement, a memory limit and several
    devices.
    """
    folder = tmp_path_factory.mktemp("report")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    try:
        assert run(["compare", "-d", "sim:gtx1080ti,gtx1080", "--json"]) == 0
        assert run(["report", "last", "-o", str(folder / "report.html")]) == 0
    finally:
        patch.undo()
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """Yield one browser for all tests."""
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 420])
def test_the_page_reads_well_and_asks_for_nothing(
    browser: Chromium, page: Path, scheme: str, width: int
) -> None:
    """It is opened in a wide and a narrow window, in both colour schemes."""
    seen = _open(browser, page, scheme, width)
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if "requestWillBeSent" in event["method"]
    ]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    printed = [
        event
        for event in browser.events
        if event["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled")
    ]
    assert printed == []
    assert (int(seen["paper"].split("(")[1].split(",")[0]) < 64) == (scheme == "dark")
    assert seen["texts"] > 60
    assert seen["worst"][0] >= LEAST_CONTRAST, seen["worst"]
    faint = [colour for contrast, colour in seen["graphics"] if contrast < LEAST_GRAPHIC]
    assert len(faint) <= 1, "the grid's lines alone may be faint"
    assert seen["wide"] <= 0, "wide pictures and tables scroll by themselves"


def test_every_picture_and_table_is_there(browser: Chromium, page: Path) -> None:
    seen = _open(browser, page, "light", 1100)
    titles = ("The plan", "Throughput of each device alone", "Ranking", "Timeline of probes")
    for title in (*titles, "How it was measured"):
        assert [heading for heading in seen["headings"] if heading.startswith(title)], title
    assert len(seen["figures"]) == 1
    assert min(seen["figures"]) > 80
    assert len(seen["rows"]) == 6, "gains, shares, curves, ranking, timeline, facts"
    assert min(seen["rows"]) >= 2


SEEN = """(() => {
  const head = word => [...document.querySelectorAll('th')].filter(node => node.textContent === word);
  const right = node => node.getBoundingClientRect().right;
  const shown = node => getComputedStyle(node).display !== 'none';
  const tables = [...document.querySelectorAll('.wide')].filter(node => node.querySelector('table').offsetHeight);
  return JSON.stringify({
    speeds: head('samples/s').filter(shown).map(right).filter(Boolean),
    page: document.documentElement.clientWidth,
    scrolled: tables.map(node => node.scrollHeight - node.clientHeight)});
})()"""  # noqa: E501


@pytest.mark.parametrize("width", [1100, 420])
def test_speeds_are_in_sight_and_the_timeline_is_whole(
    browser: Chromium, page: Path, width: int
) -> None:
    """Readers needn't scroll within a table for the number that the page is about."""
    _open(browser, page, "light", width)
    seen = json.loads(browser.evaluate(SEEN))
    assert len(seen["speeds"]) >= 2
    assert max(seen["speeds"]) <= seen["page"]
    assert max(seen["scrolled"]) <= 1
