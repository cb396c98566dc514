"""A few pictures of whole screens, in which every cell counts.

They are compared only with the library versions with which they were made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList

from evener.balancer.request import Request
from evener.devices.types import Snapshot, value
from evener.live.files import LastStep, ShareChange, Training
from evener.training.step_sums import StepSums
from evener.tui.screens.settings_dialog import SettingsDialog
from tests.support.pilots import open_runs, text, until
from tests.support.trainings import make_ranks
from tests.support.whole_sessions import finish

MADE_WITH = ("3.11", "8.2.8")
pytestmark = pytest.mark.skipif(
    (f"{sys.version_info.major}.{sys.version_info.minor}", version("textual")) != MADE_WITH,
    reason=f"pictures were made with Python {MADE_WITH[0]} and Textual {MADE_WITH[1]}",
)


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the time on the screen that of the snapshot, in one zone."""
    import time

    monkeypatch.setattr(time, "localtime", time.gmtime)
    monkeypatch.setenv("TZ", "UTC")


async def _drawn(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: "GPU:0" in text(pilot.app, "#devices"), "the devices")
    await pilot.wait_for_scheduled_animations()
    await pilot.pause(0.1)


def _two_minutes(script: Any, count: int) -> list[Snapshot]:
    """Return a reading per second, in which every device's load changes each time."""
    snapshots = []
    for second in range(130):
        samples = tuple(
            script.sample(
                index,
                utilization_percent=value(40 + (7 * second + 13 * index) % 60),
                temperature_celsius=value(50 + (second + 20 * index) // 8),
                power_watts=value(300 + (11 * second + 29 * index) % 390),
            )
            for index in range(count)
        )
        at_seconds = script.snapshot().at_seconds - 129 + second
        snapshots.append(script.snapshot(count, devices=samples, at_seconds=at_seconds))
    return snapshots


@pytest.mark.parametrize(
    ("count", "size", "theme"),
    [
        (8, (80, 24), "dark"),
        (2, (120, 40), "light"),
        (16, (200, 60), "dark"),
        (16, (80, 24), "dark"),
        (1, (200, 60), "dark"),
        (4, (120, 40), "contrast"),
    ],
    ids=[
        "eight-80x24",
        "two-120x40-light",
        "sixteen-200x60",
        "sixteen-80x24",
        "one-200x60",
        "four-120x40-contrast",
    ],
)
def test_the_monitor_looks_as_it_did(
    snap_compare: Callable[..., bool],
    app_of: Any,
    script: Any,
    count: int,
    size: tuple[int, int],
    theme: str,
) -> None:
    app = app_of(*_two_minutes(script, count), theme=theme)
    assert snap_compare(app, terminal_size=size, run_before=_drawn)


SIZES = [(80, 24), (120, 40), (200, 60)]
NAMES = ["80x24", "120x40", "200x60"]


def _make_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two searches with fixed ids and dates."""
    for hour, batch in ((8, 512), (9, 1024)):
        run = f"20260922-{hour:02}3000-ab1{hour}"
        created = f"2026-09-22T{hour:02}:30:00Z"
        monkeypatch.setattr("evener.balancer.run.new_run_id", lambda run=run: run)
        monkeypatch.setattr("time.strftime", lambda *_, created=created: created)
        finish(Request(devices="sim:gtx1080ti,gtx1080", global_batch=batch))
    monkeypatch.undo()


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("count", [0, 2], ids=["empty", "compared"])
def test_the_runs_look_as_they_did(
    snap_compare: Callable[..., bool],
    app_of: Any,
    size: tuple[int, int],
    count: int,
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if count:
            _make_runs(patched)

    async def compare(pilot: Pilot[Any]) -> None:
        panel = await open_runs(pilot, count)
        if count:
            await pilot.press("space")
            await until(pilot, lambda: panel.tagged, "the mark")
        await pilot.pause(0.3)

    assert snap_compare(app_of(), terminal_size=size, run_before=compare)


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_the_settings_look_as_they_did(
    snap_compare: Callable[..., bool], app_of: Any, size: tuple[int, int]
) -> None:
    async def show(pilot: Pilot[Any]) -> None:
        await _drawn(pilot)
        await pilot.press("comma")
        await until(pilot, lambda: isinstance(pilot.app.screen, SettingsDialog), "the page")
        await pilot.pause(0.2)

    assert snap_compare(app_of(), terminal_size=size, run_before=show)


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_the_first_start_looks_as_it_did(
    snap_compare: Callable[..., bool], app_of: Any, own_folder: Path, size: tuple[int, int]
) -> None:
    (own_folder / "train.py").write_text("import torch\ndef build():\n    return torch.zeros(1)\n")
    app = app_of(first_start=True)

    async def show(pilot: Pilot[Any]) -> None:
        await until(
            pilot, lambda: "train.py:build" in text(app, "#start-choices"), "the model found"
        )
        await pilot.pause(0.1)

    assert snap_compare(app, terminal_size=size, run_before=show)


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("key", ["question_mark", "ctrl+p"], ids=["help", "palette"])
def test_help_and_palette_look_as_they_did(
    snap_compare: Callable[..., bool], app_of: Any, size: tuple[int, int], key: str
) -> None:
    async def show(pilot: Pilot[Any]) -> None:
        await _drawn(pilot)
        await pilot.press(key)
        await until(pilot, lambda: isinstance(pilot.app.screen, ModalScreen), "the page")
        page = pilot.app.screen
        if key == "ctrl+p":
            page.query_one(Input).cursor_blink = False
            await until(pilot, lambda: page.query_one(OptionList).option_count > 10, "the entries")
        await pilot.pause(0.5)

    assert snap_compare(app_of(), terminal_size=size, run_before=show)


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("state", ["none", "runs", "ended"])
def test_the_trainings_look_as_they_did(
    snap_compare: Callable[..., bool],
    app_of: Any,
    script: Any,
    size: tuple[int, int],
    state: str,
) -> None:
    """There is no training yet; then one whose second rank delays the other; then it has ended."""
    snapshots = _two_minutes(script, 2)
    if state != "none":
        snapshots = [msgspec.structs.replace(each, reports=_train(each)) for each in snapshots]
    if state == "ended":
        last = snapshots[-1]
        at_seconds = last.at_seconds + 12
        snapshots.append(msgspec.structs.replace(last, reports=(), at_seconds=at_seconds))
    app = app_of(*snapshots[:-1])

    async def show(pilot: Pilot[Any]) -> None:
        await _drawn(pilot)
        await pilot.press("4")
        if state != "none":
            await until(pilot, lambda: "train.py" in text(app, "#trainings"), "the training")
        app.publisher.push(snapshots[-1])
        words = {"none": "No training", "runs": "12 345", "ended": "ended"}[state]
        await until(pilot, lambda: words[:9] in text(app, "#trainings"), "its state")
        await pilot.pause(0.3)

    assert snap_compare(app, terminal_size=size, run_before=show)


def _train(snapshot: Snapshot) -> tuple[Training, ...]:
    """Return two ranks at this moment, with their last steps and a change of shares."""
    at_seconds = snapshot.at_seconds
    change = ShareChange(
        9000, at_seconds - 300, (900, 488), (820, 568), "GPU:1 faster by 12 % since step 8990"
    )
    ranks = make_ranks(
        at_seconds=at_seconds, plan_samples_per_second=9600.0, between_s=0.006, changes=(change,)
    )
    return tuple(
        msgspec.structs.replace(
            each,
            last_steps=tuple(
                LastStep(number, 0.002, live.own_work_s, live.waiting_s, 0.006)
                for number in range(12_336, 12_346)
            ),
            recent=StepSums(
                10,
                input_s=0.02,
                own_work_s=10 * live.own_work_s,
                meeting_s=10 * live.waiting_s,
                update_s=0.04,
                between_s=0.02,
            ),
        )
        for each in ranks
        for live in each.devices
    )
