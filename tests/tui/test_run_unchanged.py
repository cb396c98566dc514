"""The summary of `evener run` for a program that trains unchanged, alone or with equal shares."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.live.reporter import FIRST_STEPS
from evener.training.step_sums import RankStep
from tests.support.cores import two_cores
from tests.support.forked_evener import ForkedEvener
from tests.support.frameworks import skip_without
from tests.support.launched_plan import UNEVEN
from tests.support.rank_server import RankServer
from tests.support.waiting import wait_for
from tests.tui.test_run import ROOT, make_variables

SCRIPT = str(ROOT / "tests/support/plain_program.py")
STEPS, READ_SECONDS, SAVE_SECONDS = 44, 0.002, 0.05  # of that script
ROWS, VALIDATION_ROWS, EPOCHS = 84, 16, 4
SECONDS = 240.0
Start = Callable[..., ForkedEvener]

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path, rank_server: Callable[[str], RankServer]) -> Start:
    """Return a function `start(rows, end, *options)` that runs the script with options of run."""
    skip_without("torch")
    (tmp_path / "plan.toml").write_text(UNEVEN)
    server = rank_server("tests.support.torch_imports")

    def run(rows: str, end: str, *options: str) -> ForkedEvener:
        words = ("run", *options, "--", "python", SCRIPT, rows, end)
        return ForkedEvener(server, tmp_path, tmp_path / "evener", words, make_variables(tmp_path))

    return run


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary that the one run of a test has left."""
    (path,) = (folder / "state/evener/runs").glob("*/summary.json")
    found: dict[str, Any] = json.loads(path.read_text())
    text = (path.parent / "summary.txt").read_text()
    assert text.startswith("speed: "), text
    return found


def test_a_loop_over_a_loader_is_summarized(start: Start, tmp_path: Path) -> None:
    """It exits by sys.exit, and validates by a plain loader after each epoch."""
    evener = start("loader", "exit", "--devices", "cpu/1")
    _, errors = evener.communicate(SECONDS)
    assert evener.returncode == 3
    assert " samples/s; " in errors
    summary = read_summary(tmp_path)
    assert summary["end"] == "failed"
    # the first steps aren't counted: one before the timer begins, and those of the reporter
    assert STEPS - 2 - FIRST_STEPS <= summary["steps"] + 1 <= STEPS
    (rank,) = summary["ranks"]
    assert rank["share"] == 8
    step = RankStep(*rank["step"])
    assert step.input_s >= 0.9 * READ_SECONDS * ROWS * EPOCHS / STEPS
    assert step.own_work_s > 0
    # a validation after each epoch but the last one, whose time isn't known
    validation_s = READ_SECONDS * VALIDATION_ROWS * (EPOCHS - 1)
    assert step.between_s >= 0.9 * validation_s / STEPS
    rows_per_step = summary["samples_per_second"] * summary["seconds"] / summary["steps"]
    assert rows_per_step == pytest.approx(ROWS * EPOCHS / STEPS, rel=0.05)


def test_a_loop_without_a_loader_is_summarized_by_its_updates(start: Start, tmp_path: Path) -> None:
    """It ends by an exception of its own, and runs on the first of two devices."""
    evener = start("tensors", "raise", "--plan", "plan.toml")
    _, errors = evener.communicate(SECONDS)
    assert evener.returncode == 1
    assert "a fault of its own" in errors
    assert " steps/s; " in errors
    assert "samples/s" not in errors
    summary = read_summary(tmp_path)
    assert summary["without_loader"]
    assert STEPS // 2 <= summary["steps"] <= STEPS
    step = RankStep(*summary["ranks"][0]["step"])
    assert (
        step.between_s >= 0.5 * SAVE_SECONDS / 11
    )  # the first steps, with a save, may be left out


@two_cores
def test_ranks_with_even_shares_that_ctrl_c_ends_are_summarized(
    start: Start, tmp_path: Path
) -> None:
    evener = start("ranks", "never", "--plan", "plan.toml")
    wait_for(lambda: (tmp_path / "begun").exists(), seconds=SECONDS)
    evener.send_signal(signal.SIGINT)
    _, errors = evener.communicate(SECONDS)
    assert evener.returncode == 130, errors
    assert "shares stay equal" in errors
    summary = read_summary(tmp_path)
    assert summary["end"] == "interrupted"
    assert summary["missing_ranks"] == 0
    assert [rank["share"] for rank in summary["ranks"]] == [8, 8]
    rows = summary["samples_per_second"] * summary["seconds"] / summary["steps"]
    assert rows == pytest.approx(2 * ROWS / 11, rel=0.15)


def test_a_program_that_trains_nothing_is_not_summarized(start: Start, tmp_path: Path) -> None:
    evener = start("nothing", "end", "--devices", "cpu/1")
    printed, errors = evener.communicate(SECONDS)
    assert not evener.returncode, errors
    assert float(printed) > 0
    assert [line for line in errors.splitlines() if ":" in line.removeprefix("evener: ")] == [
        "evener: plain_program.py starts on CPU:0, one device, so it has no shares to balance"
    ]
    assert not [*(tmp_path / "state/evener/runs").glob("*/*")]
