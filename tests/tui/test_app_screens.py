"""Each screen's main path, by keys and by mouse, over scripted snapshots and events."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from evener.devices.types import LOST, value
from evener.plan.file import load_plan
from evener.tui.base_app import BaseApp, Sampled
from evener.tui.screens.dialogs import DetailsDialog
from evener.tui.screens.monitor import DevicePanel, ProcessPanel
from evener.tui.screens.run_dialogs import SaveDialog
from tests.support.pilots import asks, text, until
from tests.support.whole_sessions import make_runs


async def _ready(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: "GPU:0" in text(pilot.app, "#devices"), "the first snapshot")


async def test_the_monitor_shows_host_devices_graphs_and_processes(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert "node7" in text(app, "#top")
        assert "41 %" in text(app, "#host")
        assert "115 932" in text(app, "#devices")
        graphs = text(app, "#graphs")
        assert "utilisation %" in graphs
        assert " 116k " in graphs, "the samples/s of the first device"
        assert "python train.py --rank 1" in text(app, "#processes")
    assert app.publisher.stopped


async def test_a_screen_that_opens_without_the_focus_shows_its_keys(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        app.app_focus = False  # another window has the focus, as during a demo
        app.switch_mode("runs")
        await until(pilot, lambda: "q Quit" in text(app, "#keys"), "the keys")


async def test_keys_move_open_and_close_details(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("j")
        assert app.screen.query_one(DevicePanel).cursor == 1
        await until(
            pilot,
            lambda: "▸GPU:1" in text(app, "#graphs"),
            "the graphs follow",
        )
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "details")
        await until(
            pilot, lambda: "12.0 % of the time" in app.screen.query_one("Text").text, "the facts"
        )
        await pilot.press("escape")
        assert not isinstance(app.screen, DetailsDialog)


async def test_the_mouse_chooses_sorts_and_opens(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.click("#devices", offset=(10, 3))
        assert app.screen.query_one(DevicePanel).cursor == 1
        title = text(app, "#processes").splitlines()[0]
        await pilot.click("#processes", offset=(title.index("pid") + 1, 1))
        assert app.screen.query_one(ProcessPanel).order.key == "pid"
        assert [row.sample.pid for row in app.screen.query_one(ProcessPanel).rows] == [4001, 4000]
        await pilot.click("#processes", offset=(10, 3), times=2)
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "details of a process")
        await pilot.press("escape")
        top = text(app, "#top")
        await pilot.click("#top", offset=(top.index("Runs") + 1, 0))
        await until(pilot, lambda: app.current_mode == "runs", "the Runs screen")


async def test_the_filter_narrows_while_typing_and_escape_ends_it(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("slash", *"rank", "space", "1", "enter")
        panel = app.screen.query_one(ProcessPanel)
        assert [row.sample.pid for row in panel.rows] == [4001]
        assert " 1 of 2: rank 1" in text(app, "#processes").splitlines()[0]
        await pilot.press("escape")
        assert len(panel.rows) == 2


async def test_sorting_goes_round_the_columns_and_keeps_the_process(
    app_of: Any, script: Any
) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("tab", "end")
        panel = app.screen.query_one(ProcessPanel)
        chosen = panel.chosen.sample.pid
        await pilot.press("s", "S", "s")
        assert panel.chosen.sample.pid == chosen
        app.post_message(
            Sampled(script.snapshot(processes=(script.process(chosen), script.process(1))))
        )
        await until(
            pilot,
            lambda: len(panel.rows) == 2 and panel.rows[0].sample.pid in (1, chosen),
            "the next tick",
        )
        assert panel.chosen.sample.pid == chosen


async def test_a_signal_needs_a_choice_and_a_confirmation(
    app_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "evener.tui.screens.dialogs.send_signal", lambda row, name: sent.append((row.pid, name))
    )
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("tab", "K")
        await until(pilot, lambda: asks(app, "k"), "the choice of a signal")
        await pilot.press("enter")
        assert not sent, "the button in focus is the harmless one"
        await pilot.press("K", "t")
        await until(pilot, lambda: asks(app, "y"), "the question")
        await pilot.press("n")
        assert not sent
        await pilot.press("K", "t", "y")
        await until(pilot, lambda: sent, "the signal")
        assert sent == [(4001, "TERM")]


async def test_readonly_sends_no_signals(app_of: Any) -> None:
    app = app_of(readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("tab", "K")
        assert not asks(app, "k")


async def test_pause_holds_the_picture_while_sampling_goes_on(app_of: Any, script: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("p")
        before = text(app, "#devices")
        app.publisher.push(script.snapshot(1))
        await until(pilot, lambda: len(app.snapshot.devices) == 1, "the tick")
        assert text(app, "#devices") == before
        assert "paused" in text(app, "#host")
        await pilot.press("p")
        await until(pilot, lambda: "GPU:1" not in text(app, "#devices"), "the newest picture")


async def test_help_tells_keys_marks_and_notes(app_of: Any, script: Any) -> None:
    app = app_of(script.snapshot(notes=("No driver: libnvidia-ml is missing.",)))
    async with app.run_test(size=(100, 50)) as pilot:
        await _ready(pilot)
        assert "No driver" in text(app, "#notes")
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "help")
        page = app.screen.query_one("Text").text
        assert "send a signal" in page
        assert "this user may not read it" in page
        assert "No driver: libnvidia-ml is missing." in page
        await pilot.press("escape")


async def test_themes_turn_and_others_have_the_colours_too(app_of: Any) -> None:
    app = app_of(theme="dark")
    async with app.run_test(size=(100, 30)) as pilot:
        await _ready(pilot)
        for name in ("dark", "light", "contrast", "dark"):
            assert app.theme == f"evener-{name}"
            assert "GPU:0" in text(app, "#devices")
            await pilot.press("T")
        app.theme = "nord"
        await pilot.pause()
        assert "GPU:0" in text(app, "#devices")


async def test_the_palette_offers_screens(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(100, 30)) as pilot:
        await _ready(pilot)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Show Monitor", "Show Balance", "Show Runs", "Next theme", "Quit"} <= titles
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press("escape")


async def test_the_interval_changes_in_steps(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(100, 30)) as pilot:
        await _ready(pilot)
        await pilot.press("minus")
        assert app.publisher.interval_seconds == 2.0
        await pilot.press("plus", "plus")
        assert app.publisher.interval_seconds == 0.5


async def test_a_search_from_form_to_exported_plan(
    app_of: Any, searches: Any, tmp_path: Path
) -> None:
    app = app_of(session_maker=searches)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: app.screen.query("#pick-devices"), "the form")
        await until(pilot, lambda: "[x] GPU:1" in text(app, "#pick-devices"), "the devices")
        app.screen.query_one("#global_batch", Input).value = "512"
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query_one("#row-engine").display, "all options")
        app.screen.query_one("#engine").focus()
        await pilot.press("right", "right", "ctrl+s")
        await until(pilot, lambda: app.balance.ended, "the verdict")
        loads = [load for load in app.publisher.loads if load]
        assert loads[0]["gpu-0"][0] == 683.0, "probes load the simulated devices"
        assert app.publisher.loads[-1] == {}
        (request,) = searches.requests
        assert (request.devices, request.global_batch, request.engine) == (
            "gpu:0,1",
            512,
            "multiworker",
        )
        await until(
            pilot,
            lambda: "18 % faster than equal shares" in text(app, "#result"),
            "the verdict's words",
        )
        assert "equal shares" in text(app, "#result")
        assert "the fastest so far" in text(app, "#log")
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, SaveDialog), "the export dialog")
        target = tmp_path / "plan.json"
        app.screen.query_one("#path", Input).value = str(target)
        await pilot.press("enter")
        await until(pilot, target.exists, "the file")
        assert json.loads(target.read_text())["layout"]["global_batch"] == 1388
        assert load_plan(target).batches == (820, 568)


async def test_a_search_shows_its_devices_is_paused_stopped_and_its_plan_kept(
    app_of: Any, events: Any, session_of: Any, script: Any
) -> None:
    """Each device's utilisation and temperature are shown beside its measurement, tick by tick."""
    session = session_of(events, hold=True)
    app = app_of(session_maker=lambda _: session)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("2", "ctrl+s")
        await until(pilot, lambda: app.balance.probes == 6, "the measurements")
        await until(pilot, lambda: "61°C" in text(app, "#search-devices"), "the devices' readings")
        hot = script.sample(0, temperature_celsius=value(83), utilization_percent=value(7))
        app.publisher.push(script.snapshot(devices=(hot, script.sample(1))))
        await until(pilot, lambda: "83°C" in text(app, "#search-devices"), "the next tick")
        assert "7 %" in text(app, "#search-devices")
        await pilot.press("p")
        assert app.balance.paused
        await pilot.press("p", "x")
        await until(pilot, lambda: asks(app, "y"), "the question")
        await pilot.click("#answer-y")
        await until(
            pilot, lambda: app.balance.finished is not None and app.balance.ended, "the plan so far"
        )
        assert session.calls[:3] == ["pause", "unpause", "stop"]


async def test_leaving_the_app_ends_a_running_search(
    app_of: Any, events: Any, session_of: Any
) -> None:
    session = session_of(events, hold=True)
    app = app_of(session_maker=lambda _: session)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("2", "ctrl+s")
        await until(pilot, lambda: app.balance.probes == 6, "the measurements")
        await pilot.press("ctrl+p", *"quit", "down", "enter")
        await until(pilot, lambda: asks(app, "y"), "the question, from the palette too")
        await pilot.press("n")
        await until(pilot, lambda: not asks(app, "y"), "the search again")
        await pilot.press("q")
        await until(pilot, lambda: asks(app, "y"), "the question")
        assert "stop" not in session.calls
        await pilot.press("y")
    assert "stop" in session.calls
    assert session.calls[-1] == "close"
    assert app.publisher.stopped


@pytest.mark.usefixtures("quick_replays")
async def test_real_simulated_runs_are_listed_compared_replayed_exported_and_deleted(
    app_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of()
    monkeypatch.setattr(BaseApp, "replay", functools.partialmethod(BaseApp.replay, speed=1e6))
    await asyncio.to_thread(make_runs, 2)
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("3")
        await until(pilot, lambda: "finished" in text(app, "#runs"), "the list")
        await until(pilot, lambda: "the plan" in text(app, "#left"), "the plan")
        await pilot.press("space", "down")
        await until(pilot, lambda: "the plan" in text(app, "#right"), "the other plan")
        monkeypatch.chdir(tmp_path)
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, SaveDialog), "the export dialog")
        await pilot.press("enter")
        await until(pilot, (tmp_path / "plan.toml").exists, "the file")
        assert load_plan(tmp_path / "plan.toml").workload
        await pilot.press("r")
        await until(pilot, lambda: app.screen.query("#log"), "the replay")
        await until(pilot, lambda: app.balance.finished is not None, "the replayed verdict")
        await until(pilot, lambda: " check " in text(app, "#log"), "its measurements")
        await pilot.press("3")
        await pilot.press("d", "y")
        await until(pilot, lambda: text(app, "#runs").count("finished") == 1, "one run less")


async def test_a_lost_device_and_driver_are_reported_and_come_back(
    app_of: Any, script: Any
) -> None:
    lost = script.sample(0, utilization_percent=LOST, note="GPU is lost: XID 79.")
    app = app_of(script.snapshot(devices=(lost, script.sample(1))))
    async with app.run_test(size=(80, 24)) as pilot:
        await _ready(pilot)
        assert "GPU is lost: XID 79." in text(app, "#devices")
        app.publisher.push(
            script.snapshot(devices=(), processes=(), notes=("The driver went away.",))
        )
        await until(pilot, lambda: "The driver went away." in text(app, "#notes"), "the note")
        await pilot.press("down", "enter", "K")
        app.publisher.push(script.snapshot())
        await until(pilot, lambda: "116k" in text(app, "#devices"), "the driver is back")


async def test_the_app_runs_in_any_size_of_terminal(app_of: Any, script: Any) -> None:
    """Each screen takes many sizes in a row, down to one cell, with ticks in between."""
    app = app_of(script.snapshot(16))
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        for mode in ("1", "2", "3"):
            await pilot.press(mode)
            for size in ((1, 1), (200, 60), (2, 50), (40, 10), (120, 40)):
                await pilot.resize_terminal(*size)
                app.publisher.push(script.snapshot(16))
        await pilot.press("1")
        await until(pilot, lambda: "GPU:15" in text(app, "#devices"), "every device again")


async def test_ascii_draws_nothing_else(app_of: Any) -> None:
    """This is checked on every screen, with a scroll bar, a message, and the palette."""
    app = app_of(ascii=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await _ready(pilot)
        for keys in ("1", "2", "3", "4", "?", "escape", "comma", "escape", "ctrl+p", "escape"):
            await pilot.press("question_mark" if keys == "?" else keys)
            await pilot.pause(0.3)
            _check_ascii(app, keys)
        app.show_message("A message ± of the app.")
        await pilot.pause(0.3)
        _check_ascii(app, "a message")


def _check_ascii(app: Any, where: str) -> None:
    """Check that everything drawn now is ASCII."""
    strips = app.screen._compositor.render_strips()
    beyond = {sign for strip in strips for sign in strip.text if not sign.isascii()}
    assert not beyond, f"{where} draws {beyond}"


async def test_the_form_says_what_its_fields_mean(app_of: Any) -> None:
    """The focused row or field is explained in full. An error stays until the form is
    sent again.
    """
    app = app_of()
    async with app.run_test(size=(80, 20)) as pilot:
        await _ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: "[x] GPU:1" in text(app, "#pick-devices"), "the devices")
        assert "▼" in text(app, "#pick-workload"), "more workloads than rows, and it says so"
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query_one("#row-tolerance").display, "all options")
        app.screen.query_one("#tolerance", Input).focus()
        await until(
            pilot, lambda: "smallest that is nearly" in text(app, "#problem"), "what a tolerance is"
        )
        app.screen.query_one("#tolerance", Input).value = "much"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "is not a number" in text(app, "#problem"), "the complaint")
        app.screen.query_one("#pick-workload").focus()
        await pilot.press("down")
        assert "is not a number" in text(app, "#problem")
