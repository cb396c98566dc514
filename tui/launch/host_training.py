"""Runs on another host: `evener launch` there, with the plan and the script that came with the call."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evener.balancer.probes.script_copy import ScriptCopy, WrittenScript
from evener.training.launched import REPLACED_PLAN

READ_SECONDS = 1.0
END_SECONDS = 35.0  # after SIGTERM: a little more than launch gives its own processes
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class HostTraining:
    """A host's part of a training; its output is read from afar. It ends with this process.

    A script that names the file `planned` trains by `plan`.
    """

    def __init__(
        self,
        plan: bytes,
        planned: str,
        script: ScriptCopy | None,
        options: Sequence[str],
        command: Sequence[str],
        folder: str,
    ) -> None:
        self._written = WrittenScript(script) if script else None
        path = Path(tempfile.mkdtemp(prefix="evener-"), "plan.toml")
        path.write_bytes(plan)
        self._plan = path
        words = [self._written.path, *command[1:]] if self._written else list(command)
        self._command = [sys.executable, "-m", "evener", "launch", *options, str(path), *words]
        self._environment = {**os.environ, REPLACED_PLAN: planned}
        self._folder = folder if os.access(folder, os.X_OK) else None
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(1000)
        self._started = threading.Event()
        threading.Thread(target=self._run, name="launch", daemon=True).start()

    def read(self) -> tuple[list[bytes], int | None]:
        """The lines that it has written since; once there are no more, how it ended."""
        lines: list[bytes | None] = []
        with suppress(queue.Empty):
            lines.append(self._lines.get(timeout=READ_SECONDS))
            while True:
                lines.append(self._lines.get_nowait())
        ended = bool(lines) and lines[-1] is None
        if ended:
            self._lines.put(None)  # for a reader that waits for more
        written = [line for line in lines if line is not None]
        return written, self._code if ended and not written else None

    def stop(self) -> None:
        """Ask the training to end and wait until it has; by force if it doesn't."""
        self._started.wait()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
        os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and remove its files."""
        self.stop()
        self._plan.unlink()
        self._plan.parent.rmdir()
        if self._written:
            self._written.close()

    def _run(self) -> None:
        """Run in a thread that lasts as long: the kernel ends the process with the thread that started it."""
        try:
            self._process = process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            self._lines.put(f"evener: {error}\n".encode())
            self._code = 1
        else:
            self._started.set()
            assert process.stdout is not None
            for line in process.stdout:
                self._lines.put(line)
            self._code = process.wait()
        self._started.set()
        self._lines.put(None)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
