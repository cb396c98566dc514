"""Starts a script as ranks, as torchrun does, and waits for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(gpus: bool = False) -> dict[str, str]:
    """What every rank sees, whatever its number."""
    root, given = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    common = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [root, given]))
    return common if gpus else {**common, "CUDA_VISIBLE_DEVICES": ""}


def run_ranks(
    script: Path, world: int, arguments: Callable[[int], Sequence[str]], folder: Path, gpus: bool = False
) -> None:
    """Run `script` in `world` processes, each with the arguments of its rank; AssertionError if one fails."""
    places = {"WORLD_SIZE": str(world), "MASTER_PORT": str(free_port()), "EVENER_LIVE_DIR": str(folder / "live")}
    children = []
    for rank in range(world):
        place = {**rank_environment(gpus), **places, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-W", "ignore", str(script), *arguments(rank)]
        children.append(subprocess.Popen(command, env={**os.environ, **place}, stderr=subprocess.PIPE, text=True))
    errors = [child.communicate(timeout=240)[1] for child in children]
    assert [child.returncode for child in children] == [0] * world, "\n".join(errors)
