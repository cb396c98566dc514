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


def run_ranks(
    script: Path, world: int, arguments: Callable[[int], Sequence[str]], folder: Path, gpus: bool = False
) -> None:
    """Run `script` in `world` processes, each with the arguments of its rank; AssertionError if one fails."""
    common: dict[str, object] = {
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
        "EVENER_LIVE_DIR": folder / "live",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }
    if not gpus:
        common["CUDA_VISIBLE_DEVICES"] = ""
    children = []
    for rank in range(world):
        place = {**common, "RANK": rank, "LOCAL_RANK": rank}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        command = [sys.executable, "-W", "ignore", str(script), *arguments(rank)]
        children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [child.communicate(timeout=240)[1] for child in children]
    assert [child.returncode for child in children] == [0] * world, "\n".join(errors)
