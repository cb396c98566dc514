"""The monitor's list of processes: marks, signals, and keys that are offered only if they work."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from evener.balancer.request import Request
from evener.devices.types import value
from evener.tui.screens.monitor import ProcessPanel
from evener.tui.widgets.timelines import TimelinePanel
from tests.support.pilots import asks, text, until


async def _ready(pilot: Pilot[Any]) -> ProcessPanel:
    await until(pilot, lambda: "GPU:0" in text(pilot.app, "#devices"), "the first snapshot")
    panel = pilot.app.screen.query_one(ProcessPanel)
    panel.focus()
    await pilot.pause()
    return panel


def _keys(app: Any) -> dict[str, str]:
    """Return the keys that the footer offers."""
    return {
        active.binding.key: active.binding.description
        for active in app.screen.active_bindings.values()
        if active.binding.show
    }


async def test_a_process_that_ended_keeps_its_row_for_a_moment(app_of: Any, script: Any) -> None:
    """Children of probes come and go. The key K on it shows that it has ended."""
    snapshot = script.snapshot(processes=(script.process(71), script.process(72)))
    app = app_of(snapshot)

    def push(seconds: float, *processes: Any) -> None:
        at_seconds = snapshot.at_seconds + seconds
        app.publisher.push(
            msgspec.structs.replace(snapshot, at_seconds=at_seconds, processes=processes)
        )

    async with app.run_test(size=(120, 40)) as pilot:
        panel = await _ready(pilot)
        push(1, script.process(72))
        await until(pilot, lambda: "ended: python train.py" in text(app, "#processes"), "the end")
        gone = next(row for row in panel.rows if row.ended)
        assert gone.sample.pid == 71
        assert "~87" in text(app, "#processes"), "its last figures are old"
        panel.cursor = panel.rows.index(gone)
        await pilot.press("K")
        await until(
            pilot,
            lambda: "Process 71 has ended." in [note.message for note in app._notifications],
            "the note",
        )
        assert not asks(app, "k")
        push(2, script.process(71), script.process(72))
        await until(pilot, lambda: "ended:" not in text(app, "#processes"), "another one like it")
        push(3, script.process(72))
        push(9, script.process(72))
        await until(pilot, lambda: panel.count == 1, "its row to go")


async def test_marked_processes_get_one_signal(
    app_of: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets it once, also if it is on two devices. Escape removes the marks."""
    sent: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "evener.tui.screens.dialogs.send_signal", lambda row, name: sent.append((row.pid, name))
    )
    rows = (script.process(1, 0), script.process(1, 1), script.process(2), script.process(3))
    app = app_of(script.snapshot(processes=rows))
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await _ready(pilot)
        panel.action_sort("pid")
        await pilot.press("home", "down", "space", "space", "space")
        assert text(app, "#processes").count("◆") == 3
        await pilot.press("K", "t")
        await until(pilot, lambda: asks(app, "y"), "the question")
        assert "Send SIGTERM to 2 processes: " in " ".join(text(app, "#question").split())
        await pilot.press("y")
        await until(pilot, lambda: len(sent) == 2, "the signals")
        assert sorted(sent) == [(1, "TERM"), (2, "TERM")]
        await pilot.press("escape", "home", "K")
        await until(pilot, lambda: asks(app, "k"), "the choice")
        assert app.screen.query_one("Text").text.splitlines()[0].startswith("3 ada")


async def test_the_footer_names_what_a_key_does_now(app_of: Any, script: Any) -> None:
    """p pauses or resumes. Without processes, or with --readonly, no signal is offered."""
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert (_keys(app)["p"], _keys(app)["K"]) == ("Pause", "Signal")
        await pilot.press("p")
        assert _keys(app)["p"] == "Resume"
        await until(pilot, lambda: "p Resume" in text(app, "#keys"), "the footer")
        await pilot.press("p")
        app.publisher.push(script.snapshot(processes=()))
        await until(pilot, lambda: "K" not in _keys(app), "no signal without a process")
    app = app_of(readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert "K" not in _keys(app)


async def test_a_cursor_over_the_graphs_reads_out_a_moment(app_of: Any, script: Any) -> None:
    """Arrows or a click move it. Escape hides it before it ends a filter."""
    app = app_of(script.snapshot())
    async with app.run_test(size=(200, 60)) as pilot:
        await _ready(pilot)
        for tick in range(1, 200):
            watts = tuple(script.sample(index, power_watts=value(100 + tick)) for index in (0, 1))
            app.publisher.push(
                script.snapshot(devices=watts, at_seconds=script.snapshot().at_seconds + tick)
            )
        await until(pilot, lambda: " 299 " in text(app, "#graphs"), "the newest watts")
        await pilot.press("left", "left", "left")
        graphs = app.screen.query_one(TimelinePanel)
        await until(pilot, lambda: " 299 " not in text(app, "#graphs"), "the watts before")
        assert text(app, "#graphs").splitlines()[-1].count(":") == 10, "the time, five times"
        at = graphs.cursor
        await pilot.click(graphs, offset=(22, 5))
        assert graphs.cursor is not None
        assert graphs.cursor < at
        await pilot.press("escape")
        assert graphs.cursor is None
        shown = text(app, "#graphs").splitlines()[-1]
        await pilot.press("right_square_bracket")
        assert "5:00" in str(graphs.border_title)
        assert text(app, "#graphs").splitlines()[-1] != shown


@pytest.mark.parametrize(
    "key", ["q", "question_mark", "slash"], ids=("the Quit dialog", "help", "a field")
)
async def test_ctrl_c_quits_at_once_from_everywhere(
    app_of: Any, events: Any, session_of: Any, key: str
) -> None:
    """While a search runs, and also from the dialog that asks about it."""
    session = session_of(events, hold=True)
    app = app_of(session_maker=lambda _: session)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        app.start_session(Request(), app.trainable)
        await until(pilot, lambda: app.balance.probes == 6, "the measurements")
        await pilot.press(key)
        await pilot.pause()
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app._exit, "the end")
    assert session.calls[-1] == "close"
