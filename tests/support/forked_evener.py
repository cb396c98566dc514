"""Run evener's commands as forks of a RankServer's process, which has imported them and PyTorch's
agent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

from tests.support.rank_server import RankServer


class ForkedEvener:
    """`evener WORDS` in a folder, with the interface of a Popen that tests use.

    Its output, process and exit code are in `files`.
    """

    def __init__(
        self,
        server: RankServer,
        cwd: Path,
        files: Path,
        words: Sequence[str],
        variables: dict[str, str],
    ) -> None:
        self._files = files
        run = partial(server.run, "tests.support.script_ranks.run_evener", files, str(cwd), *words)
        given = {"ranks": [{**os.environ, **variables}], "imports": "evener.launch.restarts"}
        self._thread = Thread(target=self._run, args=(partial(run, **given),), daemon=True)
        self._thread.start()
        while not self._read("pid") and self._thread.is_alive():
            time.sleep(0.01)
        self.pid = int(self._read("pid"))

    def _run(self, run: partial[None]) -> None:
        with suppress(AssertionError):  # it was killed
            run()

    def _read(self, name: str) -> str:
        path = self._files / name
        return path.read_text() if path.exists() else ""

    @property
    def returncode(self) -> int:
        """The exit code, once it has exited."""
        return int(self._read("code"))

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> None:
        """Wait until it exits. Raises TimeoutExpired."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("evener", timeout)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return its output and errors once it has exited."""
        self.wait(timeout)
        return self._read("out"), self._read("err")

    def kill(self) -> None:
        """Kill it if it is still running."""
        if self._thread.is_alive():
            with suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
        self._thread.join()
