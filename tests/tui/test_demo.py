"""`evener demo`: a search and a training on simulated cards, in the app and as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.balancer.events import Finished
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.plan.file import Plan
from evener.tui import demo
from evener.tui.cli.main import run
from evener.tui.simulated_training import (
    HOT_FROM,
    HOT_UNTIL,
    PAIR,
    PERIOD_SECONDS,
    SLOWED,
    TrainingSource,
)
from evener.tui.view.trainings import join_trainings
from tests.support.pilots import text, until


@pytest.fixture
def plan() -> Plan:
    session = Session(open_run(Request(devices=PAIR)))
    try:
        return next(event.plan for event in session.events() if isinstance(event, Finished))
    finally:
        session.close()


def test_shares_follow_a_hot_card_and_come_back(plan: Plan) -> None:
    """The global batch stays the same.

    The hot card has fewer rows while it is hot, and as many as planned before and after.
    """
    seconds = 0.0
    source = TrainingSource(lambda: seconds)
    source.train(plan)
    for second in range(round(3 * PERIOD_SECONDS)):
        seconds = float(second)
        snapshot = source.sample()
        (row,) = join_trainings(snapshot)
        shares = [rank.share for rank in row.ranks]
        assert sum(shares) == plan.layout.global_batch
        phase = seconds % PERIOD_SECONDS
        hot = HOT_FROM <= phase < HOT_UNTIL
        assert snapshot.devices[0].throttled_percent.current == (100 * SLOWED if hot else 0)
        if HOT_FROM + 6 < phase < HOT_UNTIL:
            assert shares[0] < 0.9 * plan.batches[0]
            assert 0.7 < row.of_plan < 0.95
        elif phase > HOT_UNTIL + 6 or second < HOT_FROM:
            assert abs(shares[0] - plan.batches[0]) <= 0.02 * plan.layout.global_batch
            assert row.of_plan > 0.97
    assert len(row.changes) == 3


async def test_the_app_goes_from_the_search_to_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shows the result, the search and the training without any key.

    A key opens another screen as usual.
    """
    for name in ("FIRST_SECONDS", "RESULT_SECONDS", "READING_SECONDS"):
        monkeypatch.setattr(demo, name, 0.05)
    monkeypatch.setattr(demo, "REPLAY_SPEED", 1000.0)
    app = demo.DemoApp()
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: app.balance.finished is not None, "the result")
        await until(pilot, lambda: app.replays, "how it was found")
        await until(pilot, lambda: app.current_mode == "trainings", "the training")
        await until(pilot, lambda: "SIM:1" in text(app, "#ranks"), "its ranks")
        await pilot.press("2")
        assert app.current_mode == "balance"


def test_without_a_terminal_it_is_text_and_keeps_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict, then the training before and after the card gets hot.

    The user's folder of runs isn't changed.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run(["demo", "--plain", "--ascii"]) == 0
    said = capsys.readouterr().out
    assert "% over equal shares" in said
    assert "SIM:0 is throttled 30 % of the time" in said
    assert "SIM:0 slower by" in said.partition("After 20 s")[2]
    assert list(tmp_path.iterdir()) == []
