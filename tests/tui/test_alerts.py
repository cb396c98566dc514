"""An alert is raised once if a problem lasts, and again after it has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.devices.types import Reading, State, value
from evener.live.files import Training
from evener.tui.alert_command import start_command
from evener.tui.settings import AlertSettings, Settings
from evener.tui.view.alerts import SECONDS, Alert, AlertRules, AlertWatch
from tests.support.pilots import text, until
from tests.support.trainings import make_ranks


def _watch(script: Any, seconds: int, sample: Any = None, reports: Any = ()) -> list[Alert]:
    """Return the alerts after some seconds in this state."""
    watch = AlertWatch(AlertRules())
    found: list[Alert] = []
    for second in range(seconds):
        at_seconds = script.snapshot().at_seconds + second
        moved = tuple(msgspec.structs.replace(each, updated_at=at_seconds) for each in reports)
        devices = (sample,) if sample is not None else ()
        found += watch.update(
            script.snapshot(devices=devices, at_seconds=at_seconds, reports=moved)
        )
    return found


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("hot", {"temperature_celsius": value(87)}, "87 °C"),
        ("throttled", {"throttled_percent": value(40), "throttle_reasons": ("heat",)}, "heat"),
        (
            "silent",
            {"utilization_percent": Reading(State.LOST), "note": "GPU is lost"},
            "GPU is lost",
        ),
    ],
)
def test_a_lasting_condition_is_reported_once(
    script: Any, kind: str, changed: Any, words: str
) -> None:
    sample = script.sample(0, **changed)
    assert _watch(script, int(SECONDS[kind]), sample) == [], "it may pass"
    found = _watch(script, int(SECONDS[kind]) + 100, sample)
    assert [each.kind for each in found] == [kind]
    assert words in found[0].text
    assert "GPU:0" in found[0].text
    assert _watch(script, 400, script.sample(0)) == []


def test_a_condition_is_reported_again_when_it_comes_back(script: Any) -> None:
    watch = AlertWatch(AlertRules())
    alerts = 0
    for second in range(60):
        hot = second % 30 < 15
        sample = script.sample(0, temperature_celsius=value(88 if hot else 50))
        at_seconds = script.snapshot().at_seconds + second
        alerts += len(watch.update(script.snapshot(devices=(sample,), at_seconds=at_seconds)))
    assert alerts == 2
    assert watch.reported == frozenset()


def test_a_device_that_a_training_waits_for_is_reported(script: Any) -> None:
    reports = make_ranks()
    device = msgspec.structs.replace(script.device(0), id=reports[0].devices[0].id)
    idle = script.sample(0, device=device, utilization_percent=value(1))
    found = _watch(script, 70, idle, reports)
    assert [each.kind for each in found] == ["idle"]
    assert _watch(script, 70, idle) == [], "without a training it may rest"


def test_a_training_below_its_plan_is_reported_after_five_minutes(script: Any) -> None:
    def reports(part: float) -> list[Training]:
        ranks = make_ranks()
        plan = sum(each.samples_per_second for each in ranks) / part
        return [msgspec.structs.replace(each, plan_samples_per_second=plan) for each in ranks]

    assert _watch(script, 290, reports=reports(0.6)) == []
    found = _watch(script, 400, reports=reports(0.6))
    assert [each.kind for each in found] == ["below plan"]
    assert "60 % of its plan" in found[0].text
    assert _watch(script, 400, reports=reports(0.95)) == []
    assert _watch(script, 400, reports=reports(0.6)[:1]) == [], "a rank's report is missing"


def test_the_user_s_command_gets_the_alert(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "tell.py"
    program.write_text(
        "import os\n"
        f"open({str(seen)!r} + '.new', 'w').write(os.environ['EVENER_TEXT'])\n"
        f"os.rename({str(seen)!r} + '.new', {str(seen)!r})\n"
    )
    alert = Alert("hot", "gpu-0", "GPU:0", "GPU:0 is hot; rm -rf $HOME")
    assert start_command(f"{sys.executable} {program}", alert) == ""
    for _ in range(2000):
        if seen.exists():
            break
        import time

        time.sleep(0.01)
    assert seen.read_text() == alert.text
    assert "can't be started" in start_command("/nowhere/program", alert)
    assert "can't be started" in start_command("a 'b", alert)


async def test_an_alert_is_on_the_screen_until_it_was_read(
    app_of: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rang: list[bool] = []
    app = app_of(settings=Settings(alerts=AlertSettings(bell=True)))
    monkeypatch.setattr(app, "bell", lambda: rang.append(True))
    async with app.run_test(size=(120, 40)) as pilot:
        for second in range(20):
            hot = script.sample(0, temperature_celsius=value(88))
            at_seconds = script.snapshot().at_seconds + second
            app.publisher.push(script.snapshot(devices=(hot,), at_seconds=at_seconds))
            await pilot.pause()
        await until(pilot, lambda: "GPU:0 is hot" in text(app, "#notes"), "the alert")
        assert "!GPU:0" in text(app, "#devices")
        assert rang == [True]
        await pilot.press("a")
        await until(pilot, lambda: "GPU:0 is hot" in app.screen.query_one("Text").text, "the list")
        await pilot.press("escape")
        await until(pilot, lambda: "hot" not in text(app, "#notes"), "it was read")
