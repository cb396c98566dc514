"""Killed tests leave no processes behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.probe_children import still_runs
from tests.support.waiting import wait_for

REPO = Path(__file__).parents[2]
TESTS = """
import subprocess, sys, time
from pathlib import Path

def test_that_starts_a_training_which_starts_another() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = "import subprocess, time, pathlib; p = subprocess.Popen(" + repr(sleep) + ", start_new_session=True);"
    write = f"pathlib.Path({str(Path(__file__).parent / 'other')!r}).write_text(str(p.pid)); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", other + write], start_new_session=True)
    Path(__file__).with_name("child").write_text(str(child.pid))
    time.sleep(600)
"""  # noqa: E501


def read_pid(path: Path) -> int:
    """Return the process id in a file, once it exists."""
    return int(wait_for(lambda: path.exists() and path.read_text(), "the test's child"))


def test_what_a_killed_test_had_started_ends_with_it(tmp_path: Path) -> None:
    """The test's child, which has its own session, and that child's child exit."""
    path = tmp_path / "test_that_is_killed.py"
    path.write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        str(path),
    ]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL) as tests:
        pids = [read_pid(tmp_path / "child"), read_pid(tmp_path / "other")]
        processes = [psutil.Process(pid) for pid in pids]
        tests.kill()
    deadline = time.monotonic() + 30
    while left := [process for process in processes if still_runs(process)]:
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            pytest.fail(f"{left} outlived the tests")
        time.sleep(0.02)
