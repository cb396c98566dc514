"""Starts a script as several ranks, like torchrun, and waits for them."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS = 240.0  # longer than any rank takes: it hangs


def free_port() -> int:
    """Return a port that nothing listens on, outside the range that systems assign by themselves.

    So no other process gets it before it is used.
    """
    while True:
        # Ray's workers listen on lower ports
        port = random.SystemRandom().randrange(20_000, 32_768)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(gpus: bool = False) -> dict[str, str]:
    """Return the environment that all ranks share."""
    root, given = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    common = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [root, given]))
    return common if gpus else {**common, "CUDA_VISIBLE_DEVICES": ""}


def run_ranks(
    script: Path, world: int, arguments: Callable[[int], Sequence[str]], folder: Path
) -> None:
    """Run `script` in `world` processes that see the GPUs; AssertionError as soon as one fails."""
    places = {
        "WORLD_SIZE": str(world),
        "MASTER_PORT": str(free_port()),
        "EVENER_LIVE_DIR": str(folder / "live"),
    }
    children, logs = [], [folder / f"rank{rank}.txt" for rank in range(world)]
    for rank, log in enumerate(logs):
        place = {
            **rank_environment(gpus=True),
            **places,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        command = [sys.executable, "-W", "ignore", str(script), *arguments(rank)]
        with log.open("w") as stream:
            children.append(subprocess.Popen(command, env={**os.environ, **place}, stderr=stream))
    ended, deadline = [child.poll() for child in children], time.monotonic() + SECONDS
    while None in ended and not any(ended) and time.monotonic() < deadline:
        time.sleep(0.02)
        ended = [child.poll() for child in children]
    for child in children:
        child.kill()  # it would wait for the one that failed
        child.wait()
    assert ended == [0] * world, "\n".join(log.read_text()[-4000:] for log in logs)
