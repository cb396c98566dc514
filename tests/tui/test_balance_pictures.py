"""Pictures of the Balance screen at three sizes: the form, a running search, its result.

They are compared only with the library versions with which they were made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from evener.balancer.events import Event, Finished
from evener.balancer.verdict import Chosen, MeasuredRate, Rival, Verdict
from tests.support.pilots import open_form, text, until
from tests.tui.test_pictures import pytestmark as made_with

pytestmark = made_with
SIZES = [(80, 24), (120, 40), (200, 60)]
NAMES = ["80x24", "120x40", "200x60"]


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set one time zone, and a folder with one model."""
    monkeypatch.setattr(time, "localtime", time.gmtime)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\ndef build():\n    return torch.zeros(1)\n")


def _with_verdict(events: Sequence[Event]) -> list[Event]:
    """Return the scripted search, whose end has a verdict with fields."""
    labels = ("SIM:0", "SIM:1")
    even = Rival(
        "equal_shares",
        "equal shares",
        labels,
        (710, 710),
        1420,
        MeasuredRate(1801, 1792, 1810),
        0.18,
    )
    chosen = Chosen(
        "split", "other_shares", "820 + 568 on SIM:0 + SIM:1", labels, (820, 568), (820, 568), 1388
    )
    found = Verdict(
        chosen=chosen, rate=MeasuredRate(2127, 2118, 2136), simulated=True, rivals=(even,)
    )
    *before, end = events
    assert isinstance(end, Finished)
    return [*before, msgspec.structs.replace(end, found=found)]


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_the_form_looks_as_it_did(
    snap_compare: Callable[..., bool], app_of: Any, size: tuple[int, int]
) -> None:
    app = app_of()

    async def form(pilot: Pilot[Any]) -> None:
        await open_form(pilot)
        await until(pilot, lambda: "(o) train.py:build" in text(app, "#pick-workload"), "it")
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=size, run_before=form)


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("hold", [True, False], ids=["search", "result"])
def test_a_search_looks_as_it_did(
    snap_compare: Callable[..., bool],
    app_of: Any,
    events: Any,
    session_of: Any,
    size: tuple[int, int],
    hold: bool,
) -> None:
    session = session_of(_with_verdict(events), hold=hold)
    app = app_of(session_maker=lambda _: session)

    async def search(pilot: Pilot[Any]) -> None:
        await open_form(pilot)
        await pilot.press("ctrl+s")
        if hold:
            await until(pilot, lambda: app.balance.probes == 6, "its measurements")
        else:
            await until(pilot, lambda: app.balance.ended, "the result")
        await pilot.pause(0.3)

    assert snap_compare(app, terminal_size=size, run_before=search)
