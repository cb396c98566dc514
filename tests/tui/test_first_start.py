"""The first start, and a training started from the app: the tasks of newcomers by their keys."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer.events import Finished
from evener.errors import RequestError
from evener.plan.file import load_plan
from evener.tui.local_training import LocalTraining, read_command
from evener.tui.screens.run_dialogs import TrainDialog
from evener.tui.screens.welcome import WelcomeDialog
from tests.support.pilots import asks, open_form, text, until
from tests.support.waiting import wait_for


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a program in place of evener that prints its arguments and waits to be stopped."""
    script = tmp_path / "launcher"
    script.write_text(
        f"#!{sys.executable}\n"
        "import signal, sys, time\n"
        "print('loading\\rready', *sys.argv[4:], flush=True)\n"
        "try:\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(3)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("evener.tui.local_training.sys.executable", str(script))
    return script


def test_a_training_writes_its_log_and_ends_as_by_ctrl_c(launcher: Path, tmp_path: Path) -> None:
    """Text that a progress bar has overwritten isn't shown."""
    training = LocalTraining(["launch", "plan.toml", "train.py"], tmp_path / "logs" / "one.log")
    line = "ready launch plan.toml train.py"
    wait_for(lambda: training.read_tail(5) == [line], "its first line, whole")
    assert training.is_running
    assert f"kill -INT {training.pid}" in training.closing_lines()[-1]
    training.stop()
    wait_for(lambda: not training.is_running, "its end")
    assert training.exit_code == 3
    assert training.read_tail(1) == ["saved"]
    assert "exit code 3" in training.state_text()


def test_a_line_that_starts_something_else_is_refused() -> None:
    assert read_command("evener launch plan.toml 'my script.py' --rate 0.1") == [
        "launch",
        "plan.toml",
        "my script.py",
        "--rate",
        "0.1",
    ]
    for line in ("rm -rf x", "evener launch plan.toml", "evener launch 'plan.toml x"):
        with pytest.raises(RequestError):
            read_command(line)


async def test_the_start_choices_lead_on(app_of: Any, script: Any) -> None:
    """Balance and the Monitor open by their keys, the demo by the arrows.

    Escape leaves the card for later. The card says what runs on the devices.
    """
    app = app_of(first_start=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, WelcomeDialog), "the card")
        await until(
            pilot, lambda: "2 processes use the devices" in text(app, "#start-choices"), "them"
        )
        assert "evener run -- python train.py" in text(app, "#start-choices")
        assert "Nothing trains" not in text(app, "#start-choices")
        app.publisher.push(msgspec.structs.replace(script.snapshot(), processes=()))
        await until(
            pilot, lambda: "Nothing trains here yet" in text(app, "#start-choices"), "their end"
        )
        await pilot.press("escape")
        assert app.current_mode == "monitor"
        app.action_welcome()
        await until(pilot, lambda: app.screen.query("#start-choices"), "the card again")
        await pilot.press("b")
        await until(pilot, lambda: app.current_mode == "balance", "the form")
        assert not app.wants_demo
        app.action_welcome()
        await until(pilot, lambda: app.screen.query("#start-choices"), "the card once more")
        await pilot.press("down", "down", "enter")
    assert app.wants_demo


async def test_a_newcomer_balances_writes_the_plan_and_trains_by_it(
    app_of: Any,
    events: Any,
    session_of: Any,
    launcher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six keys are enough: b and Ctrl-S; e and Enter; g and Enter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\ndef build():\n    return torch.zeros(1)\n")
    end = events[-1]
    assert isinstance(end, Finished)
    plan = end.plan
    layout = plan.layout
    shares = tuple(
        msgspec.structs.replace(share, device=f"GPU-{place}")
        for place, share in enumerate(layout.share)
    )
    layout = msgspec.structs.replace(layout, share=shares)
    own = msgspec.structs.replace(plan, workload="train.py:build", layout=layout)
    ended = msgspec.structs.replace(end, plan=own)
    app = app_of(first_start=True, session_maker=lambda _: session_of([*events[:-1], ended]))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.screen.query("#start-choices"), "the card")
        await pilot.press("b")
        await open_form(pilot)
        await until(pilot, lambda: "(o) train.py:build" in text(app, "#pick-workload"), "it")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.balance.ended, "the result")
        await until(pilot, lambda: "g train with it here" in text(app, "#result"), "the keys")
        await pilot.press("e")
        await until(pilot, lambda: app.screen.query("#path"), "the path")
        await pilot.press("enter")
        await until(pilot, lambda: (tmp_path / "plan.toml").exists(), "the plan")
        assert load_plan(tmp_path / "plan.toml").batches == (820, 568)
        await until(pilot, lambda: not app.screen.query("#path"), "the result again")
        await pilot.press("g")
        await until(pilot, lambda: isinstance(app.screen, TrainDialog), "the line")
        await pilot.press("enter")
        await until(pilot, lambda: app.current_mode == "trainings", "the Trainings screen")
        assert app.training is not None
        app.publisher.push(app.snapshot)
        await until(pilot, lambda: app.training.read_tail(1), "its log")
        app.screen.redraw()
        assert "ready launch plan.toml train.py" in text(app, "#training-log")
        words = app.closing_lines(80)
        assert any("goes on as process" in line for line in words)
        await pilot.press("x")
        await until(pilot, lambda: asks(app, "y"), "the question")
        await pilot.press("y")
        await until(pilot, lambda: not app.training.is_running, "its end")
    assert os.path.exists(app.training.log)
