"""What the app's parts import: rows without a screen, a screen without frameworks, charts only when
drawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def _loaded(code: str, tmp_path: Path) -> set[str]:
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\n{SHOW}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    return set(json.loads(answer.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "evener.tui.cli.monitor",
        "evener.tui.view.balance_lines",
        "evener.tui.view.runs",
    ],
)
def test_what_works_without_a_screen_loads_none(module: str, tmp_path: Path) -> None:
    assert not {name.partition(".")[0] for name in _loaded(f"import {module}", tmp_path)} & {
        "textual",
        "rich",
    }


FIRST_FRAME = """
import asyncio
from evener.tui.app import EvenerApp
from evener.devices.sampler import open_sampler

async def draw():
    app = EvenerApp(open_sampler("sim:gtx1080ti", None)[0])
    async with app.run_test() as pilot:
        while "SIM:0" not in app.screen.query_one("#devices").text:
            await pilot.pause(0.01)

asyncio.run(draw())
"""
LATER = {
    "tensorflow",
    "keras",
    "torch",
    "numpy",
    "pynvml",
    "ray",
    "typer",
    "evener.tui.view.plot",
    "aiohttp",
    "prometheus_client",
    "textual_serve",
    "markdown_it",
    "pygments",
    "rich.traceback",
    "rich.markdown",
    "rich.progress",
    "importlib.metadata",
    "hashlib",
    "multiprocessing",
    "evener.balancer.session",
    "evener.balancer.search.search",
    "evener.balancer.store.runs",
    "evener.devices.nvidia.source",
    "evener.devices.cpu",
    "evener.tui.screens.dialogs",
    "evener.tui.screens.balance",
    "evener.tui.screens.runs",
    "evener.tui.screens.trainings",
    "evener.tui.view.trainings",
    "evener.tui.text.page",
}


def test_what_the_first_frame_does_without_is_loaded_later(tmp_path: Path) -> None:
    """Frameworks, charts, searches, dialogs and other screens aren't imported at the start."""
    assert _loaded(FIRST_FRAME, tmp_path) & LATER == set()


WITHOUT_THE_APP = """
import sys
sys.modules["textual"] = None
from evener.tui.cli import monitor
from evener.tui.cli.main import run
pair = ["--devices", "sim:gtx1080ti,gtx1080"]
codes = [
    run(words)
    for words in (
        ["devices", *pair], ["monitor", "--once", *pair], ["balance", *pair], ["compare", *pair], ["runs"],
        ["runs", "show", "last"], ["probe", "--batches", "820,568", *pair], ["export", "last"], ["launch", "--help"],
        ["demo", "--plain"],
    )
]
assert codes == [0] * 10, codes
monitor.draws_screens = lambda: True
assert run(["demo"]) == 0
raise SystemExit(run(pair))
"""  # noqa: E501


def test_without_textual_all_but_the_app_works(tmp_path: Path) -> None:
    """The user who opens the app gets the command that installs it."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_APP],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    said = done.stderr.splitlines()[-1]
    assert (done.returncode, said) == (
        2,
        (
            "evener: The app isn't installed. Install it: pip install 'evener[app]'. Every other "
            "command works without it."
        ),
    )
