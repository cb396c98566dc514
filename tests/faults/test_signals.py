"""Real signals, lost terminals and lost readers at random moments of `evener balance`.

`EVENER_SIGNALS` is the number of moments; the suite uses few, a run by hand hundreds.
"""

from __future__ import annotations

import contextlib
import os
import pty
import random
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import evener
from evener.balancer import journal
from evener.balancer.journal import AskedEntry
from evener.balancer.types import Stage, Timed
from evener.plan.file import load_plan
from tests.support.python_path import python_path

HOME = Path(evener.__file__).parents[1]
MOMENTS = int(os.environ.get("EVENER_SIGNALS", "7"))
SEED = os.environ.get("EVENER_SEED", "1")
STAGES = ("start", "import", "build", "warm-up", "measure", "race", "export")
BLOWS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "terminal": 129, "pipe": 141}
CPU = (
    "--devices",
    "cpu",
    "--workload",
    "synthetic",
    "--set",
    "base_ms=60",
    "--max-global-batch",
    "64",
)
SIMULATED = ("--devices", "sim:gtx1080ti,gtx1080", "--max-global-batch", "256")
SITE = """
import os, pathlib, sys, time
def tell(stage):
    (pathlib.Path({folder!r}) / stage).touch()
    time.sleep(0.3)
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "synthetic_workload":
            sys.meta_path.remove(Finder)
            tell("build")
if "worker" in " ".join(sys.orig_argv):
    tell("import")
    sys.meta_path.insert(0, Finder)
"""
GONE_SECONDS = 60.0  # 2 would do on an idle machine
END_SECONDS = 60.0
OWN_START = (
    "<frozen ",
    "/runpy.py",
    "/site.py",
    "sitecustomize.py",
    "/encodings/",
)  # frames of Python itself, before evener's first line


class Struck:
    """A running `evener balance` with an export, on a terminal or on pipes."""

    def __init__(self, folder: Path, stage: str, on_terminal: bool) -> None:
        self.folder, self.stage = folder, stage
        for name in ("site", "tmp", "work", "marks", "state"):
            (folder / name).mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE.format(folder=str(folder / "marks")))
        what = SIMULATED if stage == "export" else (*CPU, "--budget", "5s")
        self.terminal, theirs = pty.openpty() if on_terminal else (-1, -1)
        self.modes = termios.tcgetattr(theirs) if on_terminal else None
        self.reader, writing = os.pipe()
        self.errors = (folder / "errors").open("w+b")
        ends: dict[str, Any] = {
            "stdin": theirs,
            "stdout": theirs,
            "stderr": theirs,
            "preexec_fn": _own_terminal,
        }
        if not on_terminal:
            ends = {
                "stdin": subprocess.DEVNULL,
                "stdout": writing,
                "stderr": self.errors,
                "preexec_fn": _own_session,
            }
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(folder / "site", HOME),
            "XDG_STATE_HOME": str(folder / "state"),
            "TMPDIR": str(folder / "tmp"),
        }
        command = [sys.executable, "-m", "evener", "balance", *what, "--export", "plan.toml"]
        self.process = subprocess.Popen(command, cwd=folder / "work", env=environment, **ends)
        os.close(writing)
        self.theirs = theirs
        self.drawn = b""
        self.children: list[psutil.Process] = []

    def wait(self, draw: random.Random) -> None:
        """Wait for a random moment of the stage."""
        mark = {"import": "import", "build": "build", "warm-up": "build", "measure": "build"}.get(
            self.stage
        )
        until = time.monotonic() + 180
        while mark and not (self.folder / "marks" / mark).exists() and self.process.poll() is None:
            self.drain()
            assert time.monotonic() < until
        while self.stage == "race" and not self._races() and self.process.poll() is None:
            self.drain()
            assert time.monotonic() < until
        low, high = {"warm-up": (0.3, 0.7), "measure": (0.7, 2.0), "export": (0.3, 1.2)}.get(
            self.stage, (0.0, 0.4)
        )
        until = time.monotonic() + draw.uniform(low, high)
        while time.monotonic() < until:
            self.drain()

    def strike(self, blow: str) -> None:
        """Send the signal, or close the terminal or the reader."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children = psutil.Process(self.process.pid).children(recursive=True)
        if blow == "terminal":
            os.close(self.theirs)
            os.close(self.terminal)
            self.terminal = -1
        elif blow == "pipe":
            os.close(self.reader)
            self.reader = -1
        else:
            self.process.send_signal(getattr(signal, blow))

    def ended(self) -> int:
        """Return the exit code; check that the children exit, too."""
        until = time.monotonic() + END_SECONDS
        while self.process.poll() is None:
            self.drain()
            assert time.monotonic() < until, f"{self.stage}: it doesn't end"
        until = time.monotonic() + GONE_SECONDS
        while any(
            child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self.children
        ):
            assert time.monotonic() < until, f"{self.stage}: children outlive it"
            time.sleep(0.02)
        self.drain()
        return self.process.returncode

    def drain(self) -> None:
        """Read the output."""
        if self.terminal < 0:
            time.sleep(0.01)
            return
        while select.select([self.terminal], [], [], 0.01)[0]:
            self.drawn += os.read(self.terminal, 1 << 16)

    def words(self) -> str:
        """Return the output, from wherever it was written."""
        self.errors.seek(0)
        return (self.errors.read() + self.drawn).decode(errors="replace")

    def record(self) -> journal.JournalContents | None:
        """Return the run's journal."""
        paths = list((self.folder / "state").glob("evener/runs/*/journal.jsonl"))
        return journal.read(paths[0]) if paths and paths[0].stat().st_size else None

    def close(self) -> None:
        """Remove everything that is left of it."""
        self.process.kill()
        self.process.wait()
        for child in self.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.errors.close()
        for descriptor in (self.terminal, self.reader, self.theirs if self.terminal >= 0 else -1):
            if descriptor >= 0:
                os.close(descriptor)

    def _races(self) -> bool:
        record = self.record()
        asked = (
            [entry for entry in record.entries if isinstance(entry, AskedEntry)] if record else []
        )
        return any(probe.stage == Stage.RACE for entry in asked for probe in entry.probes)


def _own_session() -> None:
    os.setsid()
    # the parent of the tests may ignore the signal, like nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _own_terminal() -> None:
    import fcntl

    _own_session()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def moments() -> Iterator[tuple[int, str, str]]:
    """Yield all stages and events in turn, in a seeded random order."""
    pairs = [(stage, blow) for stage in STAGES for blow in BLOWS]
    draw = random.Random(SEED)
    chosen: list[tuple[str, str]] = []
    while len(chosen) < MOMENTS:
        stages, blows = draw.sample(STAGES, len(STAGES)), draw.sample(list(BLOWS), len(BLOWS))
        chosen += zip(stages, (blows * 2)[: len(stages)], strict=True)
    assert set(chosen) <= set(pairs)
    for number, (stage, blow) in enumerate(chosen[:MOMENTS]):
        yield number, stage, blow


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stage", "blow"), moments(), ids=lambda part: str(part))
def test_struck_at_any_moment_it_ends_clean_with_the_best_plan_so_far(
    tmp_path: Path, number: int, stage: str, blow: str
) -> None:
    """The exit code is that of the event, or 0 if the command had finished.

    No child, temporary file or traceback is left; the plan is complete. A terminal is restored and
    shows its cursor.
    """
    draw = random.Random(f"{SEED} {number}")
    on_terminal = blow == "terminal" or (blow in ("SIGINT", "SIGTERM") and draw.random() < 0.5)
    struck = Struck(tmp_path, stage, on_terminal)
    try:
        struck.wait(draw)
        struck.strike(blow)
        code = struck.ended()
        said = struck.words()
        # before Python handles signals, the signal kills it
        exit_code = code if code >= 0 else 128 - code
        early = {1} if stage == "start" else set()  # while Python itself starts
        assert exit_code in {BLOWS[blow], 0} | early, said
        assert _sound(said), said
        _check_plan(struck, code)
        if struck.terminal >= 0 and code >= 0:
            assert struck.drawn.count(b"\x1b[?25l") == struck.drawn.count(b"\x1b[?25h")
            assert termios.tcgetattr(struck.theirs) == struck.modes
    finally:
        struck.close()


def _sound(said: str) -> bool:
    """True without a traceback, except Python's own from before evener's first line."""
    files = [line for line in said.splitlines() if line.strip().startswith("File ")]
    return "Traceback" not in said or all(any(own in line for own in OWN_START) for line in files)


def _check_plan(struck: Struck, code: int) -> None:
    """Check that the plan has what was measured, and that no partial file is left."""
    record = struck.record()
    path = struck.folder / "work" / "plan.toml"
    assert {one.name for one in path.parent.iterdir()} <= {"plan.toml"}
    assert not list((struck.folder / "tmp").iterdir())
    if path.exists():
        assert load_plan(path).layout.global_batch
    if (
        record is not None
        and code >= 0
        and any(isinstance(entry.seen, Timed) for entry in record.seen)
    ):
        assert record.ended is not None
        assert path.exists()
        assert load_plan(path) == record.ended.plan
