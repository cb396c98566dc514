"""The form: its tasks and fields, and a start that fails. The help page lists every key."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.events import Key, Paste
from textual.widgets import Input, Static

from evener.balancer.families import FAMILIES
from evener.balancer.store.runs import RunSummary
from evener.balancer.trials import DryRunDevice, DryRunResult
from evener.errors import DeviceError, RequestError
from evener.tui.app import EvenerApp
from evener.tui.screens.balance import BalanceScreen
from evener.tui.screens.balance_form import BalanceForm, to_form_terms
from evener.tui.screens.base import SortedScreen
from evener.tui.screens.dialogs import help_lines
from evener.tui.screens.monitor import MonitorScreen, ProcessPanel
from evener.tui.screens.runs import RunPanel, RunsScreen
from evener.tui.widgets.balance import ResultPanel
from evener.tui.widgets.lists import ListPanel, OneOf, SortedPanel, Ticks
from tests.support.pilots import open_form, text, until

LOCKED = DeviceError(
    "GPU:0 is being measured by another evener (process 12).", "Wait for it, or use --share."
)
MISSING = RequestError("There is no file nope.py.", "Check the path.")


def _label(app: Any, field: str) -> str:
    return str(app.screen.query_one(f"#row-{field} .label", Static).content)


def _has_focus(app: Any, field: str) -> bool:
    return app.screen.focused is not None and app.screen.focused.id == field


def test_a_complaint_is_in_the_form_s_words() -> None:
    """Options are named as fields, and the first of them is marked."""
    assert to_form_terms("--max-global-batch 3 is below --multiple-of 4.") == (
        "max global batch 3 is below multiple of 4.",
        "max_global_batch",
    )
    assert to_form_terms("--set 'x' is not key=value.") == (
        "settings 'x' is not key=value.",
        "settings",
    )
    assert to_form_terms("There is no GPU.") == ("There is no GPU.", "")


@pytest.mark.parametrize(
    ("fault", "field", "said"),
    [
        (LOCKED, "share", "or use share"),
        (MISSING, "own", "no file nope.py"),
        (RequestError("--multiple-of is 0.", "Give 1."), "pick-devices", "multiple of is 0"),
    ],
    ids=("locked devices", "a missing file", "nothing of the form"),
)
async def test_a_start_that_fails_stays_in_the_form(
    app_of: Any, fault: Exception, field: str, said: str
) -> None:
    """The field is marked and focused, with the message. Nothing looks finished."""

    def fail(_request: Any) -> Any:
        raise fault

    app = app_of(session_maker=fail)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        if field == "own":
            app.screen.query_one("#own", Input).value = "nope.py:build"
            await until(
                pilot, lambda: not app.screen.query_one(BalanceForm).model.name, "another file"
            )
        await pilot.press("ctrl+s")
        await until(pilot, lambda: said in " ".join(text(app, "#problem").split()), "the reason")
        assert "--" not in text(app, "#problem")
        assert app.screen.query_one("#switch").current == "setup"
        assert not app.balance.active
        assert field == "pick-devices" or _label(app, field).startswith("!")
        await until(
            pilot,
            lambda: app.screen.focused is not None and app.screen.focused.id == field,
            "the focus",
        )


async def test_an_error_is_shown_beside_its_field_and_nothing_starts(app_of: Any) -> None:
    """Wrong are a number, a missing device, and a user's workload without a name."""
    app = app_of(session_maker=lambda _: pytest.fail("nothing may start"))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_form(pilot)
        for field, label in (
            ("global_batch", "global batch"),
            ("max_global_batch", "max global batch"),
        ):
            app.screen.query_one(f"#{field}", Input).value = "many"
            await pilot.press("ctrl+s")
            assert f"{label} 'many' is not a whole number" in text(app, "#problem")
            assert _label(app, field) == f"!{label}"
            await until(pilot, partial(_has_focus, app, field), "the focus")
            app.screen.query_one(f"#{field}", Input).value = ""
        app.screen.query_one("#pick-devices").focus()
        await until(pilot, lambda: "▸" in text(app, "#pick-devices"), "the cursor")
        await pilot.press("space", "down", "space", "ctrl+s")
        assert "No device is chosen" in text(app, "#problem")
        await pilot.press("space", "up", "space")
        app.screen.query_one("#pick-workload").focus()
        await until(pilot, lambda: "▸" in text(app, "#pick-workload"), "the cursor moves")
        assert "▸" not in text(app, "#pick-devices"), (
            "two cursors would leave open where the keys go"
        )
        await pilot.press("home", "space", "ctrl+s")
        assert "No workload of your own is named" in text(app, "#problem"), (
            "nothing else is measured in its place"
        )
        app.screen.query_one("#global_batch", Input).focus()
        await pilot.press("enter")
        await until(pilot, lambda: app.screen.focused.id == "budget", "the next field")
        assert not app.balance.active


async def test_a_wrong_field_is_marked_until_the_form_is_right(
    app_of: Any, events: Any, session_of: Any
) -> None:
    app = app_of(session_maker=lambda _: session_of(events))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_form(pilot)
        app.screen.query_one("#budget", Input).value = "soon"
        await pilot.press("ctrl+s")
        assert "budget 'soon' is not a time." in text(app, "#problem")
        assert _label(app, "budget") == "!budget"
        app.screen.query_one("#budget", Input).value = "5m"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.balance.ended, "the end")
        assert _label(app, "budget") == " budget"


async def test_keys_are_taken_in_the_order_in_which_they_were_pressed(app_of: Any) -> None:
    """They may come very fast: text after Ctrl-U stays, and text after three Tabs is in the third
    field.
    """
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_form(pilot)
        app.screen.query_one("#pick-devices").focus()
        await until(pilot, lambda: app.screen.focused.id == "pick-devices", "the focus")
        tabs = [Key("tab", "\t")]
        rows = [*map(_key, "9"), Key("ctrl+u", "\x15"), *map(_key, "512")]
        for key in (*tabs, *rows, *tabs, *map(_key, "0")):
            app.post_message(key)
        budget = app.screen.query_one("#budget", Input)
        await until(pilot, lambda: budget.value != "120s", "the last field")
        fields = {each.id: each.value for each in app.screen.query(Input) if each.value}
        assert fields == {"global_batch": "512", "budget": "120s0", "tolerance": "0.02"}


def _key(sign: str) -> Key:
    return Key(sign, sign)


async def test_efficiency_a_comparison_and_sharing_are_chosen_in_the_form(
    app_of: Any, searches: Any
) -> None:
    app = app_of(session_maker=searches)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_form(pilot)
        row = app.screen.query_one("#row-max_slowdown")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query_one("#row-tolerance").display, "all options")
        assert not row.display
        app.screen.query_one("#max_slowdown", Input).value = "5%"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.balance.ended, "the end of a search by speed")
        await pilot.press("n")
        await until(
            pilot, lambda: app.screen.query_one("#switch").current == "setup", "the form again"
        )
        app.screen.query_one("#objective", OneOf).action_change(-1)
        await until(pilot, lambda: row.display, "the field of how much slower it may be")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: len(searches.requests) == 2, "the second search")
        asked = [(request.objective, request.max_slowdown) for request in searches.requests]
        assert asked == [("throughput", 0.1), ("samples-per-joule", 0.05)]
        assert not searches.requests[1].share
        await until(pilot, lambda: app.balance.ended, "its end")
        await pilot.press("n")
        await until(
            pilot, lambda: app.screen.query_one("#switch").current == "setup", "the form once more"
        )
        assert not app.screen.query_one("#row-layouts").display
        app.screen.query_one("#task", OneOf).action_change(1)
        app.screen.query_one("#share", OneOf).action_change(1)
        await until(
            pilot, lambda: app.screen.query_one("#row-layouts").display, "the field of a comparison"
        )
        await pilot.press("ctrl+s")
        await until(pilot, lambda: len(searches.requests) == 3, "the comparison")
        assert searches.requests[2].share
        assert searches.requests[2].compare.families == tuple(FAMILIES)


def test_every_key_is_in_the_footer_or_on_the_help_page() -> None:
    """Users find every key without reading the code."""
    names = {
        "question_mark": "?",
        "slash": "/",
        "plus": "+",
        "minus": "-",
        "space": "Space",
        "escape": "Esc",
        "enter": "Enter",
        "up": "↑",
        "left_square_bracket": "[",
        "right_square_bracket": "]",
        "left": "←",
        "right": "→",
        "down": "↓",
        "pageup": "Page Up",
        "pagedown": "Page Down",
        "home": "Home",
        "end": "End",
        "ctrl+c": "Ctrl-C",
        "ctrl+s": "Ctrl-S",
        "ctrl+t": "Ctrl-T",
        "ctrl+o": "Ctrl-O",
        "delete": "Delete",
        "comma": ",",
    }
    page = "\n".join(row.text for row in help_lines((), 100))
    widgets = (SortedPanel, ProcessPanel, ListPanel, RunPanel, Ticks, BalanceForm, ResultPanel)
    for kind in (EvenerApp, MonitorScreen, BalanceScreen, RunsScreen, SortedScreen, *widgets):
        for binding in kind.BINDINGS:
            assert isinstance(binding, Binding)
            for key in binding.key.split(","):
                name = names.get(key, key.upper() if key[1:].isdigit() else key)
                if key.startswith("shift+"):
                    name = "Shift"
                assert binding.show or re.search(
                    rf"(^|[ ,]){re.escape(name)}($|[ ,;:])", page, re.MULTILINE
                ), key


async def test_a_function_of_this_folder_comes_first_and_one_key_starts_it(
    app_of: Any, searches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that build a model are found only in files that import a framework."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cnn.py").write_text(
        "import torch\ndef helper(x):\n    return x\ndef build():\n    return torch.zeros(1)\n"
    )
    (tmp_path / "notes.py").write_text("def build():\n    return 1\n")
    (tmp_path / "broken.py").write_text("import torch\ndef build(:\n")
    app = app_of(session_maker=searches)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await until(
            pilot, lambda: "(o) cnn.py:build" in text(app, "#pick-workload"), "the function"
        )
        listed = text(app, "#pick-workload")
        assert listed.splitlines()[0].startswith("▸(o) cnn.py:build")
        assert "helper" not in listed
        assert "notes.py" not in listed
        assert "broken.py" not in listed
        await pilot.press("ctrl+s")
        await until(pilot, lambda: searches.requests, "the search")
    (request,) = searches.requests
    assert (request.workload, request.framework) == ("cnn.py:build", "torch")


async def test_the_model_that_was_balanced_last_is_the_first(
    app_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds as long as its file exists. What the user ticks meanwhile stays ticked."""
    script = tmp_path / "mine.py"
    script.write_text("import torch\ndef build():\n    return 1\ndef other():\n    return 2\n")
    last = RunSummary(
        "20260101-000000-aaaa",
        "2026-01-01T00:00:00Z",
        ("GPU:0",),
        f"{script}:other",
        "finished",
        9,
        512.0,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evener.tui.screens.balance_form.runs.list_runs", lambda: (last,))
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_form(pilot)
        await until(pilot, lambda: "(o) mine.py:other" in text(app, "#pick-workload"), "the last")
        assert "512.0 samples/s" in text(app, "#pick-workload")
        assert text(app, "#pick-workload").count("mine.py:other") == 1
        script.unlink()
        form = app.screen.query_one(BalanceForm)
        await pilot.press("down", "space")
        await form.find_own_models()
        assert "mine.py" not in text(app, "#pick-workload")


async def test_a_dry_run_says_what_fits_and_starts_the_search(
    app_of: Any, searches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = DryRunResult(
        "cnn.py:build",
        "torch",
        (DryRunDevice("GPU:0", "H200", 1 << 37, 4096),),
        ((8, 0.01), (64, 0.02)),
        3.0,
        120.0,
    )
    monkeypatch.setattr("evener.tui.screens.dry_run.make_job", lambda request: request)
    monkeypatch.setattr("evener.tui.screens.dry_run.dry_run", lambda *_: result)
    app = app_of(session_maker=searches)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "about 4096 samples" in text(app, "#findings"), "what fits")
        assert not searches.requests
        await pilot.press("enter")
        await until(pilot, lambda: searches.requests, "the search")


async def test_a_dry_run_that_fails_says_why_and_closes(
    app_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_request: Any) -> Any:
        raise MISSING

    monkeypatch.setattr("evener.tui.screens.dry_run.make_job", fail)
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "no file nope.py" in text(app, "#findings"), "the reason")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen.query("#problem"), "the form again")
        assert not app.balance.active


async def test_the_four_fields_and_the_hint_fit_a_small_terminal(app_of: Any) -> None:
    """The others are hidden until they are opened; then the form scrolls."""
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        shown = [row.id for row in app.screen.query(".field") if row.display]
        expected = ["pick-workload", "pick-devices", "global_batch", "budget", "more"]
        assert shown == [f"row-{name}" for name in expected]
        for name in expected:
            assert app.screen.query_one(f"#row-{name}").region.bottom <= 20, name
        app.screen.query_one("#global_batch", Input).focus()
        await until(pilot, lambda: "trains fastest" in text(app, "#problem"), "the explanation")
        assert "…" not in text(app, "#problem")


async def test_a_pasted_path_goes_into_its_field(app_of: Any, own_folder: Path) -> None:
    """It arrives as a bracketed paste: the lines after the first aren't typed as keys."""
    name = f"{'long_' * 30}model.py:build"
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        models = app.screen.query_one("#pick-workload", Ticks)
        models.tick_only([row[0] for row in models.rows].index("another file"))
        app.screen.query_one(BalanceForm).show_rows()
        field = app.screen.query_one("#own", Input)
        await until(pilot, lambda: field.display and field.region.width, "the field")
        field.focus()
        await pilot.pause()
        app.post_message(Paste(f"{name}\nq"))
        await until(pilot, lambda: field.value == name, "the path")
        assert app.is_running
        assert app.current_mode == "balance"
