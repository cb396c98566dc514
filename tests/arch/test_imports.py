"""What static contracts can't see: which modules a command really loads, and whose packages they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = {"tensorflow", "keras", "torch"}
SCREEN = {"textual", "textual_plotext", "plotext"}


def modules_after(code: str, tmp_path: Path) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running `code`."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    return set(json.loads(answer.stdout.splitlines()[-1]))


def command(*arguments: str) -> str:
    """Code that runs the command line to its end and goes on."""
    return f"from evener.tui.cli.main import run\nassert run({list(arguments)!r}) == 0"


def test_import_evener_loads_no_framework(tmp_path: Path) -> None:
    """A training script pays for nothing but the plan."""
    loaded = modules_after("import evener; evener.load_plan; evener.report", tmp_path)
    assert not loaded & (FRAMEWORKS | SCREEN | {"rich", "typer", "psutil", "pynvml", "numpy"})


def test_a_headless_balance_loads_no_screen_and_no_framework(tmp_path: Path) -> None:
    """Simulated, start to end, with JSON out."""
    loaded = modules_after(command("balance", "--devices", "sim:gtx1080ti,gtx1080", "--json"), tmp_path)
    assert not loaded & (FRAMEWORKS | SCREEN)


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices", "--devices", "cpu"),
        ("runs",),
        ("monitor", "--once", "--devices", "cpu"),
        ("monitor", "--json", "--devices", "sim:gtx1080ti"),
        ("compare", "--devices", "sim:gtx1080ti,gtx1080", "--json"),
    ],
    ids=" ".join,
)
def test_headless_commands_load_no_screen_and_no_framework(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever prints lines starts as fast as a shell user expects."""
    assert not modules_after(command(*arguments), tmp_path) & (FRAMEWORKS | SCREEN)


def test_the_version_is_answered_before_anything_is_imported(tmp_path: Path) -> None:
    """`evener --version` loads neither the parser nor the records."""
    code = "import sys; sys.argv = ['evener', '--version']\nfrom evener.__main__ import main\nmain()"
    assert not modules_after(code, tmp_path) & {"typer", "msgspec", "rich", "psutil"}


def test_evener_is_the_only_name_that_an_install_offers(tmp_path: Path) -> None:
    """A user's own `devices.py` or `tui.py` can neither be shadowed by ours nor shadow it."""
    ours = "evener", "balancer", "benchmarks", "devices", "docs", "tests", "tui", "workloads"
    program = f"import importlib.util\nprint([n for n in {ours!r} if importlib.util.find_spec(n)])"
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": ""},
        check=True,
    )
    assert answer.stdout.strip() == "['evener']"
