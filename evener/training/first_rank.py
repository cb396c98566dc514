"""Start only the first rank of a program, and the other ranks once it creates a process group.

This way, a script that uses one GPU runs only once, and a program that starts processes itself can
use all devices. Each launcher sets its own environment variables for the rank and the run id. They
show which launcher started a process.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

RELEASE = "EVENER_RELEASE"  # the file that the other ranks wait for
STARTED_AS = "EVENER_STARTED_AS"  # this process's rank at its start, in the form of describe_rank
POLL_SECONDS = 0.05
# the variables that PyTorch's elastic agent sets for a rank
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)


def describe_rank() -> str:
    """Return this process's rank, number of processes and run id as text.

    They are read from environment variables.
    """
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    return " ".join(os.environ.get(name, "-") for name in names)


def is_eveners_rank() -> bool:
    """Return True if evener, and not another launcher, gave this process its rank."""
    return os.environ.get(STARTED_AS) == describe_rank()


def is_first_process() -> bool:
    """Return True if this process is the first rank itself, and not one of its child processes."""
    path = os.environ.get(RELEASE)
    if not path:
        return False
    with suppress(OSError):
        return Path(f"{path}.first").read_text() == str(os.getpid())
    return False


def is_in_other_run() -> bool:
    """Return True if another launcher, such as torchrun, has started this process."""
    started = os.environ.get(STARTED_AS)
    return started is not None and started.split(" ")[2] != describe_rank().split(" ")[2]


def is_released() -> bool:
    """Return True if the other ranks may start, or don't have to wait for the first rank."""
    path = os.environ.get(RELEASE)
    return not path or os.path.exists(path)


def release_others() -> None:
    """Let the other ranks start. Only the first rank calls this, while the others wait."""
    path = os.environ.get(RELEASE)
    if path:
        with suppress(OSError):  # the launcher may have ended
            Path(path).touch()


def wait_for_release(path: str, rank: int) -> None:
    """Wait until the first rank lets this rank start.

    If the first rank ends without doing so, this process exits with code 0. The first rank itself
    doesn't wait, but writes its process id to a file for the others.
    """
    first = Path(f"{path}.first")
    if rank == 0:
        written = Path(f"{path}.writing")
        written.write_text(str(os.getpid()))
        written.rename(first)
        return
    while not first.exists():
        time.sleep(POLL_SECONDS)
    try:
        held = os.pidfd_open(int(first.read_text()))
    except ProcessLookupError:
        held = -1
    while not os.path.exists(path):
        has_ended = held < 0 or select.select([held], [], [], POLL_SECONDS)[0]
        if has_ended and not os.path.exists(path):
            sys.exit(0)
    if held >= 0:
        os.close(held)
