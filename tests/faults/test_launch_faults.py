"""`evener launch` killed at random moments, and trainings that end in odd ways: real processes, no framework."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killed_launchers import list_processes

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("EVENER_KILLS", "24"))  # random moments; 200 and more by hand
SECONDS = float(os.environ.get("EVENER_SECONDS", "60"))  # until all has gone: 5 on a machine that isn't busy


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose processes are killed behind the test."""
    yield tmp_path
    for words in list_processes(tmp_path):
        os.kill(int(words.split()[0]), signal.SIGKILL)


def test_a_killed_launcher_leaves_nothing_behind(folder: Path) -> None:
    """No rank, nothing that a rank has started, and no temporary folder, after `kill -9` at any moment."""
    module, seed = "tests.support.killed_launchers", os.environ.get("EVENER_SEED", "1")
    words = [sys.executable, "-m", module, str(folder), str(KILLS), seed, str(SECONDS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120 + KILLS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
