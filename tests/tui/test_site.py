"""The site built by `make site`: its search finds instructions before measurements.

Without a site that is newer than its pages these tests are skipped; CI builds one first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import BROWSER, Chromium

REPO = Path(__file__).parents[2]
SITE = REPO / "build" / "site"
ASKED = {
    "out of memory": "howto/out_of_memory.html",
    "slow": "slow.html",
    "two GPUs": "slow.html",
    "resume": "howto/resume.html",
    "batch": "howto/batch.html",
}
NODES = "[...document.querySelectorAll('*')]"
ROOTS = f"[document, ...{NODES}.map(node => node.shadowRoot).filter(Boolean)]"
KEY = "{key: 'k', ctrlKey: true, bubbles: true}"
OPEN = f"document.dispatchEvent(new KeyboardEvent('keydown', {KEY}))"
FIELD = f"{ROOTS}.map(root => root.querySelector('input[aria-label=Search]')).find(Boolean)"
LINKS = f"{ROOTS}.flatMap(root => [...root.querySelectorAll('a[href*=\"?h=\"]')])"
RESULTS = f"JSON.stringify({LINKS}.map(a => a.href))"


def is_built() -> bool:
    """Return True if the site was built after the last change of a page."""
    pages = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), REPO / "zensical.toml"]
    index = SITE / "index.html"
    return index.exists() and index.stat().st_mtime > max(each.stat().st_mtime for each in pages)


pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is on the path"),
    pytest.mark.skipif(not is_built(), reason="`make site` hasn't run since a page changed"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """Yield a browser of desktop size."""
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    chromium.call(
        "Emulation.setDeviceMetricsOverride",
        width=1200,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    yield chromium
    chromium.close()


def _wait_for(browser: Chromium, script: str) -> str:
    """Return the value of a script's expression once it has one."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = browser.evaluate(script)
        if found and found != "[]":
            return str(found)
        time.sleep(0.05)
    raise AssertionError(f"nothing came of {script}")


@pytest.mark.slow
@pytest.mark.parametrize("words", ASKED)
def test_a_question_finds_a_how_to_first(browser: Chromium, words: str) -> None:
    browser.events.clear()
    browser.navigate((SITE / "index.html").as_uri())
    _wait_for(browser, f"{OPEN} && !!({FIELD})")
    browser.evaluate(f"({FIELD}).focus()")
    browser.call("Input.insertText", text=words)
    first = json.loads(_wait_for(browser, RESULTS))[0]
    assert first.removeprefix(f"{SITE.as_uri()}/").split("?")[0] == ASKED[words]


@pytest.mark.slow
def test_pages_say_which_version_they_are_about(browser: Chromium) -> None:
    from evener import __version__

    browser.events.clear()
    browser.navigate((SITE / "howto" / "batch.html").as_uri())
    assert f"evener {__version__}" in browser.evaluate("document.querySelector('header').innerText")
