"""The app on a real terminal: it starts, exits cleanly in every way, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

RUN = "import sys; from evener.tui.start import run_app; sys.exit(run_app({devices!r}))"
UNFLUSHED = """
import sys
from evener.tui.start import run_app
code = run_app("cpu")
print(end="not flushed yet", file=sys.stderr)
sys.exit(code)
"""
BREAK = """
import sys
from evener.tui.start import run_app
from evener.tui.screens.monitor import MonitorScreen
def broken(self): raise ZeroDivisionError("planted")
MonitorScreen.action_refresh = broken
sys.exit(run_app("sim:gtx1080ti"))
"""
CONTINUED = """
import os, signal, sys
from textual.drivers.linux_driver import LinuxDriver
from evener.tui.start import run_app
disable = LinuxDriver.disable_input
def continued(self):
    disable(self)
    os.kill(os.getpid(), signal.SIGCONT)
LinuxDriver.disable_input = continued
sys.exit(run_app("sim:gtx1080ti"))
"""
ALTERNATE_SCREEN_ON, ALTERNATE_SCREEN_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A child on a pseudo-terminal of 100 x 30."""

    def __init__(self, code: str, state: Path, redirect: str = "") -> None:
        self.primary, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(state)}
        self.child = subprocess.Popen(
            ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env=environment,
            start_new_session=True,
        )
        os.close(secondary)
        self.seen = b""

    def read_until(self, wanted: bytes, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self._read(0.2)

    def _read(self, seconds: float) -> bool:
        if not select.select([self.primary], [], [], seconds)[0]:
            return False
        try:
            part = os.read(self.primary, 65536)
        except OSError:
            return False
        self.seen += part
        return bool(part)

    def press(self, keys: bytes) -> None:
        os.write(self.primary, keys)

    def wait(self) -> int:
        """Return the exit code, after reading everything that was still written."""
        deadline = time.monotonic() + 60
        while self.child.poll() is None:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.child.returncode

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.primary)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    """Yield a function that opens terminals with their own state folder, and close them.

    The folder has a run, because at the very first start a card would take the keys.
    """
    opened: list[Terminal] = []
    run = tmp_path / "evener" / "runs" / "20260101-000000-0000"
    run.mkdir(parents=True)
    (run / "journal.jsonl").touch()

    class Opened(Terminal):
        def __init__(self, code: str, redirect: str = "") -> None:
            super().__init__(code, tmp_path, redirect)
            opened.append(self)

    yield Opened
    for one in opened:
        one.close()


@pytest.mark.parametrize("redirect", ["2>{file}", "2>&-"])
def test_the_app_leaves_the_terminal_as_it_was_wherever_stderr_goes(
    terminal: Open, tmp_path: Path, redirect: str
) -> None:
    """Textual draws on stderr. A log file must not get the screen, but it must get printed
    messages.
    """
    log = tmp_path / "err.log"
    code = (
        "import sys; from evener.tui.cli.main import main; code = main(['-d', 'sim:gtx1080ti']); "
    )
    one = terminal(
        f"{code}print('after', file=sys.stderr); sys.exit(code)", redirect.format(file=log)
    )
    one.read_until(b"1080 Ti")
    one.press(b"q")
    assert one.wait() == 0
    assert one.seen.rindex(ALTERNATE_SCREEN_OFF) > one.seen.rindex(ALTERNATE_SCREEN_ON)
    if log.exists():
        assert log.read_text() == "after\n"


def test_a_terminal_that_goes_without_a_signal_ends_the_app(terminal: Open) -> None:
    """The app has its own session here, so it gets no signal, and its writer would wait forever.

    Printed messages don't change the exit code.
    """
    one = terminal(UNFLUSHED)
    one.read_until(b"Monitor")
    os.close(one.primary)
    one.primary = os.open(os.devnull, os.O_RDONLY)
    assert one.child.wait(30) == 129


def test_a_signal_to_go_on_as_the_app_ends_leaves_no_reader(terminal: Open) -> None:
    """The kernel sends SIGCONT with SIGHUP.

    Textual then reads the terminal again, and the reader would never end.
    """
    one = terminal(CONTINUED)
    one.read_until(b"1080 Ti")
    one.press(b"q")
    assert one.wait() == 0


def test_a_crash_leaves_a_log_and_a_clean_terminal(terminal: Open, tmp_path: Path) -> None:
    one = terminal(BREAK)
    one.read_until(b"1080 Ti")
    one.press(b"r")
    assert one.wait() == 70
    logs = list(tmp_path.rglob("crash-*.log"))
    assert len(logs) == 1
    assert "planted" in logs[0].read_text()
    after = one.seen[one.seen.rindex(ALTERNATE_SCREEN_OFF) :]
    assert str(logs[0]).encode() in after.replace(b"\r\n", b"")
    assert b"Traceback" not in after


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_no_probe_child_outlives_the_app(terminal: Open, ending: signal.Signals) -> None:
    one = terminal(RUN.format(devices="cpu"))
    one.read_until(b"CPU:1")
    one.press(b"2")
    one.read_until(b"global batch")
    one.press(b"\x13")
    app = psutil.Process(one.child.pid)
    deadline = time.monotonic() + 60
    while not (children := app.children(recursive=True)):
        assert time.monotonic() < deadline, "no probe child started"
        one._read(0.1)
    one.child.send_signal(ending)
    one.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
