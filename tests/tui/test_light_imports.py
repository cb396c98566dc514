"""What the app's parts load: rows without a screen, a screen without frameworks, charts only where they are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def _loaded(code: str, tmp_path: Path) -> set[str]:
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\n{SHOW}"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    return set(json.loads(answer.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "evener.tui.cli.commands.monitor",
        "evener.devices.recording",
        "evener.tui.view.plain",
        "evener.tui.view.balance_lines",
        "evener.tui.view.runs",
    ],
)
def test_what_works_without_a_screen_loads_none(module: str, tmp_path: Path) -> None:
    assert not {name.partition(".")[0] for name in _loaded(f"import {module}", tmp_path)} & {
        "textual",
        "rich",
        "plotext",
    }


def test_the_app_loads_no_framework_and_the_monitor_no_chart_library(tmp_path: Path) -> None:
    loaded = _loaded("import evener.tui.app.app, evener.tui.screens.monitor", tmp_path)
    assert not loaded & {
        "tensorflow",
        "keras",
        "torch",
        "plotext",
        "textual_plotext",
        "evener.balancer.session",
        "typer",
    }
