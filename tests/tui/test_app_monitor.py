"""The monitor's list of processes: a tree, marks, the environment; and keys that are offered only where they work."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import psutil
import pytest
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey

from evener.balancer.request import Request
from evener.devices.snapshot_builder import OnDevice, SnapshotBuilder, TrainingRates
from evener.tui.screens.dialogs import ConfirmDialog, DetailsDialog, SignalDialog
from evener.tui.screens.monitor import ProcessPanel
from tests.support.pilots import text, until


async def _ready(pilot: Pilot[Any]) -> ProcessPanel:
    await until(pilot, lambda: "GPU:0" in text(pilot.app, "#devices"), "the first snapshot")
    panel = pilot.app.screen.query_one(ProcessPanel)
    panel.focus()
    await pilot.pause()
    return panel


def _keys(app: Any) -> dict[str, str]:
    """The keys that the footer offers."""
    return {
        active.binding.key: active.binding.description
        for active in app.screen.active_bindings.values()
        if active.binding.show
    }


def test_a_snapshot_says_what_started_its_processes(script: Any) -> None:
    """Up to the shell, which leads the session; this process is one of them, whatever it leads."""
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()']); print(p.pid); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        builder = SnapshotBuilder(TrainingRates(lambda: ()))
        sample = script.sample(0)
        snapshot = builder.snapshot([sample], seen={sample.device.id: [OnDevice(pid)]})
        psutil.Process(pid).kill()
    assert [row.parent_pid for row in snapshot.processes] == [launcher.pid]
    parents = {row.pid: row for row in snapshot.parents}
    assert parents[launcher.pid].parent_pid == os.getpid()
    assert os.getpid() in parents
    assert 1 not in parents
    assert parents[launcher.pid].device_label == ""


async def test_t_shows_processes_under_what_started_them(app_of: Any, script: Any) -> None:
    launcher = script.process(70, device_id="", device_label="", command="torchrun train.py")
    ranks = tuple(script.process(71 + place, place, parent_pid=70) for place in range(2))
    app = app_of(script.snapshot(processes=ranks, parents=(launcher,)))
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert "torchrun" not in text(app, "#processes")
        await pilot.press("t")
        rows = text(app, "#processes").splitlines()
        assert "torchrun train.py" in rows[1]
        assert "├─ python train.py" in rows[2]
        assert "└─ python train.py" in rows[3]
        await pilot.press("t")
        assert "torchrun" not in text(app, "#processes")


async def test_a_process_that_ended_keeps_its_row_for_a_moment(app_of: Any, script: Any) -> None:
    """As the children of probes, which come and go; K on it says that it has ended."""
    snapshot = script.snapshot(processes=(script.process(71), script.process(72)))
    app = app_of(snapshot)

    def push(seconds: float, *processes: Any) -> None:
        at_seconds = snapshot.at_seconds + seconds
        app.publisher.push(msgspec.structs.replace(snapshot, at_seconds=at_seconds, processes=processes))

    async with app.run_test(size=(120, 40)) as pilot:
        panel = await _ready(pilot)
        push(1, script.process(72))
        await until(pilot, lambda: "ended: python train.py" in text(app, "#processes"), "the end")
        gone = next(row for row in panel.rows if row.ended)
        assert gone.sample.pid == 71
        assert "~87" in text(app, "#processes"), "its last figures are old"
        panel.cursor = panel.rows.index(gone)
        await pilot.press("K")
        await until(pilot, lambda: "Process 71 has ended." in [note.message for note in app._notifications], "the note")
        assert not isinstance(app.screen, SignalDialog)
        push(2, script.process(71), script.process(72))
        await until(pilot, lambda: "ended:" not in text(app, "#processes"), "another one like it")
        push(3, script.process(72))
        push(9, script.process(72))
        await until(pilot, lambda: panel.count == 1, "its row to go")


async def test_marked_processes_get_one_signal(app_of: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, also if it is on two devices; Escape removes the marks."""
    sent: list[tuple[int, str]] = []
    monkeypatch.setattr("evener.tui.screens.dialogs.send_signal", lambda row, name: sent.append((row.pid, name)))
    rows = (script.process(1, 0), script.process(1, 1), script.process(2), script.process(3))
    app = app_of(script.snapshot(processes=rows))
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await _ready(pilot)
        panel.action_sort("pid")
        await pilot.press("home", "down", "space", "space", "space")
        assert text(app, "#processes").count("◆") == 3
        await pilot.press("K", "t")
        await until(pilot, lambda: isinstance(app.screen, ConfirmDialog), "the question")
        assert "Send SIGTERM to 2 processes: " in " ".join(text(app, "#question").split())
        await pilot.press("y")
        await until(pilot, lambda: len(sent) == 2, "the signals")
        assert sorted(sent) == [(1, "TERM"), (2, "TERM")]
        await pilot.press("escape", "home", "K")
        await until(pilot, lambda: isinstance(app.screen, SignalDialog), "the choice")
        assert app.screen.query_one("Text").text.splitlines()[0].startswith("3 ada")


async def test_e_shows_a_process_s_environment_whole(app_of: Any, script: Any) -> None:
    """Long values too; a pid that is another process's by now is refused."""
    variables = {**os.environ, "EVENER_TEST": "x" * 300, "A": "first"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=variables) as child:
        row = script.process(child.pid, start_time=psutil.Process(child.pid).create_time())
        app = app_of(script.snapshot(processes=(row, script.process(child.pid, 1, start_time=5.0))))
        async with app.run_test(size=(80, 24)) as pilot:
            panel = await _ready(pilot)
            panel.action_sort("device")
            await pilot.press("home", "e")
            await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "the environment")
            await until(pilot, lambda: app.screen.query_one("Text").text, "its lines")
            shown = app.screen.query_one("Text").text
            assert shown.startswith("A=first\n")
            assert "EVENER_TEST=" + "x" * 300 in shown.replace("\n", "")
            await pilot.press("escape", "down", "e")
            await pilot.pause()
            assert not isinstance(app.screen, DetailsDialog)
        child.kill()


async def test_the_footer_names_what_a_key_does_now(app_of: Any, script: Any) -> None:
    """p pauses or resumes; without processes, or under --readonly, no signal is offered."""
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert (_keys(app)["p"], _keys(app)["K"]) == ("Pause", "Signal")
        await pilot.press("p")
        assert _keys(app)["p"] == "Resume"
        await until(pilot, lambda: "Resume" in {key.description for key in app.screen.query(FooterKey)}, "the footer")
        await pilot.press("p")
        app.publisher.push(script.snapshot(processes=()))
        await until(pilot, lambda: "K" not in _keys(app), "no signal without a process")
    app = app_of(readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert "K" not in _keys(app)
        assert "e" in _keys(app)


@pytest.mark.parametrize("key", ["q", "question_mark", "slash"], ids=("the Quit dialog", "help", "a field"))
async def test_ctrl_c_quits_at_once_from_everywhere(app_of: Any, events: Any, session_of: Any, key: str) -> None:
    """While a search runs; also from the dialog that asks about it."""
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
