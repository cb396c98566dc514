"""Clean up after a launcher, even if the launcher itself is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import RequestError
from ..system.files import new_run_id
from ..system.signals import caught_signals
from ..training.launched import RUN
from . import watcher


class GuardedTraining:
    """The name and temporary folder of a training run that is cleaned up when it ends.

    Set `succeeded` before the context of `start_guard` ends; otherwise, processes of the run that
    still exist are killed.
    """

    def __init__(self, run: str, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.succeeded = False


@contextmanager
def start_guard(prefix: str) -> Iterator[GuardedTraining]:
    """Create a temporary folder for a training run, and delete it at the end of the context.

    The folder's name begins with `prefix`. A separate process, the watcher, deletes the folder,
    even if this process is killed. Unless the run succeeded, it first kills the run's remaining
    processes. Raises RequestError if no temporary folder can be created.
    """
    # the name is unpredictable
    run = new_run_id()
    own = {name: value for name, value in os.environ.items() if name != RUN}
    watching = subprocess.Popen(
        [sys.executable, "-I", watcher.__file__, run, prefix],
        env=own,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert watching.stdout is not None
    guard = GuardedTraining(run, Path())
    try:
        guard.folder = Path(os.fsdecode(watching.stdout.read()))
        if not guard.folder.is_absolute():
            _, reason = watching.communicate()
            raise RequestError(
                f"No temporary folder can be made: {reason.decode().strip()}.",
                "Free some space, or set TMPDIR to another folder.",
            )
        yield guard
    finally:
        with caught_signals():
            if watching.poll() is None:
                watching.communicate(watcher.SUCCEEDED if guard.succeeded else b"")
