"""An MPS daemon of evener's own: in its own folder, and ended whatever happens to this process.

A guard process starts NVIDIA's control program and holds a pipe from us. When the pipe closes, because we closed it or
because this process died, it tells the daemon to quit, kills what is left of it and removes the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from evener.errors import DeviceError

from ..registry import import_path

PROGRAM = "nvidia-cuda-mps-control"
FOLDER = "/tmp/nvidia-mps"  # where NVIDIA's own daemon listens
PROGRAM_FAMILY = "nvidia-cuda-mps"  # the control program and its servers
START_SECONDS = 15.0  # for the daemon to listen
QUIT_SECONDS = 5.0  # for it to end in order
LOOK_SECONDS = 0.05
CLOSE_SECONDS = 20.0  # for the guard to have done all of that


def find_program() -> str | None:
    """The path of the control program; None if it isn't installed."""
    return shutil.which(PROGRAM)


def runs() -> bool:
    """True if a control daemon listens where CUDA programs look for one."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or FOLDER)
    with suppress(OSError, ValueError, OverflowError):
        pid = int((folder / f"{PROGRAM}.pid").read_text().strip("\0 \n"))
        return pid > 0 and psutil.pid_exists(pid)
    return False


class MpsDaemon:
    """A daemon that starts when it is first needed."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[str] | None = None
        self._folder = ""

    def variables(self) -> dict[str, str]:
        """The variables that lead a CUDA program to this daemon, started if needed; DeviceError if it can't start."""
        if self._guard is None or self._guard.poll() is not None:
            self._start()
        return folder_variables(self._folder)

    def close(self) -> None:
        """End the daemon and wait until it has gone; it may be called twice."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        try:
            guard.communicate(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.communicate()

    def _start(self) -> None:
        program = find_program()
        if program is None:
            raise DeviceError(
                f"There is no MPS daemon to start: {PROGRAM} is not installed.", "Omit --mps, or install it."
            )
        guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "evener.devices.nvidia.mps", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for us to act on
            env={**os.environ, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", ""))},
        )
        assert guard.stdout is not None
        word, _, rest = guard.stdout.readline().strip().partition(" ")
        if word != "ready":
            self._guard = guard
            self.close()
            raise DeviceError(f"The MPS daemon did not start: {rest or 'no answer'}.", "Omit --mps.")
        self._guard, self._folder = guard, rest


def folder_variables(folder: str) -> dict[str, str]:
    """The environment of a daemon in this folder, and of its clients."""
    return {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}


def guard(program: str) -> int:
    """Run the daemon until standard input closes; says `ready FOLDER` or `failed WHY` first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe counts
    folder = tempfile.mkdtemp(prefix="evener-mps-")
    environment = {**os.environ, **folder_variables(folder)}
    try:
        started = subprocess.run(
            [program, "-d"], env=environment, capture_output=True, text=True, timeout=START_SECONDS
        )
        if started.returncode != 0:
            return _say(f"failed {(started.stderr or started.stdout).strip() or f'exit code {started.returncode}'}")
        _say(f"ready {folder}")
        sys.stdin.buffer.read()
        return 0
    except (OSError, subprocess.TimeoutExpired) as error:
        return _say(f"failed {error}")
    finally:
        _quit(program, environment)
        _kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> int:
    print(" ".join(line.split()), flush=True)
    return 0 if line.startswith("ready") else 1


def _quit(program: str, environment: dict[str, str]) -> None:
    """Ask the daemon to end, its servers with it."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [program], input="quit -t 1\n", env=environment, capture_output=True, text=True, timeout=QUIT_SECONDS
        )


def _kill_all(folder: str) -> None:
    """Kill whatever of the daemon still has our folder in its environment, until it has gone."""
    until = time.monotonic() + QUIT_SECONDS
    while (left := _left(folder)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=LOOK_SECONDS)


def _left(folder: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if PROGRAM_FAMILY in " ".join(process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("CUDA_MPS_PIPE_DIRECTORY") == folder
    ]


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1]))
