"""Settings persist from one start to the next. A bad file gives one message, and is ignored."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from evener.tui.settings import AlertSettings, Settings, load_settings, save_settings
from evener.tui.widgets.lists import Ticks
from evener.tui.widgets.timelines import TimelinePanel
from tests.support.pilots import text, until

CHANGED = Settings(
    theme="light",
    interval_seconds=2.0,
    graph_seconds=300.0,
    common_scale=False,
    log_axes=False,
    hidden_columns=("clock", "links"),
    alerts=AlertSettings(bell=True, command="notify-send evener", plan_percent=80.0),
)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "settings.toml"
    save_settings(path, CHANGED)
    assert load_settings(path) == (CHANGED, "")
    save_settings(path, Settings())
    assert tomllib.loads(path.read_text()) == {}, "only what differs is in the file"
    assert load_settings(tmp_path / "nowhere.toml") == (Settings(), "")


@pytest.mark.parametrize(
    "content",
    [b"theme = 3", b"theme = 'pink'", b"tehme = 'dark'", b"[[", b"\xff", b"interval_seconds = 0.0"],
)
def test_a_bad_file_is_a_one_line_warning_and_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    settings, ignored = load_settings(path)
    assert settings == Settings()
    assert str(path) in ignored
    assert "\n" not in ignored
    assert load_settings(tmp_path)[1], "a folder can't be read"


async def test_what_is_chosen_in_the_app_is_kept(app_of: Any, script: Any, tmp_path: Path) -> None:
    """These are the theme, the interval, the time and scale of the graphs, and the columns."""
    path = tmp_path / "settings.toml"
    app = app_of(script.snapshot(), settings_file=path)

    async def ready(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the devices")

    async with app.run_test(size=(200, 60)) as pilot:
        await ready(pilot)
        assert "MHz" in text(app, "#devices")
        await pilot.press("T", "minus", "right_square_bracket", "l", "C")
        ticks = app.screen.query_one(Ticks)
        place = next(at for at, row in enumerate(ticks.rows) if row[0] == "clock")
        ticks.cursor = place
        await pilot.press("space", "escape")
        await until(pilot, lambda: "MHz" not in text(app, "#devices"), "one column less")
    kept, _ = load_settings(path)
    assert kept == Settings(
        theme="light",
        interval_seconds=2.0,
        graph_seconds=300.0,
        common_scale=False,
        hidden_columns=("clock",),
    )
    app = app_of(script.snapshot(), settings=kept)
    async with app.run_test(size=(200, 60)) as pilot:
        await ready(pilot)
        assert "MHz" not in text(app, "#devices")
        assert app.screen.query_one(TimelinePanel).span == 300.0


def test_the_linux_console_gets_signs_that_its_font_has(
    app_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = app_of()
    assert app.ascii
    assert app.to_drawable("⣿ ±5 ▸").isascii()
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not app_of().ascii
