"""The tasks of newcomers take a dozen keys at most, in a terminal of 80 x 24."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textual.command import CommandPalette
from textual.pilot import Pilot

from evener.devices.types import value
from evener.tui.screens.settings_dialog import LABELS, SettingsDialog
from evener.tui.view.devices import DEVICES, device_rows
from tests.support.pilots import open_runs, text, until
from tests.support.whole_sessions import make_runs

SMALL = (80, 24)
MOST_KEYS = 12


class Typist:
    """Presses keys and counts them."""

    def __init__(self, pilot: Pilot[Any]) -> None:
        self._pilot = pilot
        self.keys = 0

    async def press(self, *keys: str) -> None:
        """Press the keys one after the other."""
        self.keys += len(keys)
        assert self.keys <= MOST_KEYS
        await self._pilot.press(*keys)


async def test_a_model_is_balanced_and_its_plan_written(
    app_of: Any, searches: Any, own_folder: Path
) -> None:
    """The user begins at the card of the first start, in a folder with a script."""
    (own_folder / "train.py").write_text("import torch\n\n\ndef build():\n    return 1\n")
    app = app_of(session_maker=searches, first_start=True)
    async with app.run_test(size=SMALL) as pilot:
        balancing, writing = Typist(pilot), Typist(pilot)
        await pilot.pause()
        await balancing.press("b")
        await until(pilot, lambda: "(o) train.py:build" in text(app, "#pick-workload"), "the form")
        await balancing.press("ctrl+s")
        await until(pilot, lambda: app.balance.finished is not None, "the result")
        assert searches.requests[0].workload.endswith("train.py:build")
        await until(pilot, lambda: "write the plan" in text(app, "#result"), "the panel")
        await writing.press("e", "enter")
        await until(pilot, (own_folder / "plan.toml").exists, "the file")


async def test_two_runs_are_compared(app_of: Any, own_folder: Path) -> None:
    make_runs(2)
    app = app_of()
    async with app.run_test(size=SMALL) as pilot:
        await open_runs(pilot, 2)
        typist = Typist(pilot)
        await typist.press("3", "space")
        await until(pilot, lambda: "samples/s" in text(app, "#differences"), "the differences")


async def test_a_setting_is_found_by_a_word_and_changed(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=SMALL) as pilot:
        typist = Typist(pilot)
        await typist.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette), "the palette")
        await typist.press(*"bell")
        await until(pilot, lambda: app.screen.query("OptionList").first().option_count, "hits")
        await typist.press("enter")
        await until(pilot, lambda: isinstance(app.screen, SettingsDialog), "the settings")
        await typist.press("right")
        await until(pilot, lambda: app.settings.alerts.bell, "the bell")


async def test_every_setting_is_on_the_page_and_holds_at_once(app_of: Any, tmp_path: Path) -> None:
    """Going down changes nothing. Right changes each setting, and the file has it."""
    path = tmp_path / "settings.toml"
    app = app_of(settings_file=path)
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("comma")
        await until(pilot, lambda: isinstance(app.screen, SettingsDialog), "the page")
        usual = app.settings
        for _ in LABELS:
            await pilot.press("down")
        assert app.settings == usual
        for _ in LABELS[:-1]:
            await pilot.press("right", "down")
        await pilot.press(*"echo")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SettingsDialog), "its end")
    for name in ("theme", "interval_seconds", "graph_seconds", "common_scale", "log_axes"):
        assert getattr(app.settings, name) != getattr(usual, name), name
    for name in ("bell", "throttled_percent", "plan_percent", "command"):
        assert getattr(app.settings.alerts, name) != getattr(usual.alerts, name), name
    assert app.publisher.interval_seconds == app.settings.interval_seconds
    assert app.alert_watch.rules.plan_percent == app.settings.alerts.plan_percent
    assert app.theme == f"evener-{app.settings.theme}"
    assert 'command = "echo"' in path.read_text()


async def test_the_hot_card_stands_out_without_a_key(app_of: Any, script: Any) -> None:
    """Its temperature is shown at 80 columns in the tone of an error; the others' isn't."""
    heat = [61, 62, 88, 63, 61, 60, 62, 61]
    devices = tuple(
        script.sample(index, temperature_celsius=value(degrees))
        for index, degrees in enumerate(heat)
    )
    snapshot = script.snapshot(8, devices=devices)
    app = app_of(snapshot)
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: " 88 " in text(app, "#devices"), "the figure")
    widths = DEVICES.widths(80, device_rows(snapshot))
    (column,) = [each for each in DEVICES.columns if each.key == "temperature"]
    rows = device_rows(snapshot)
    tones = [column.draw(row, widths["temperature"])[0].tone for row in rows]
    assert tones.count("bad") == 1
    assert tones[2] == "bad"
