"""Starts scripts that use Keras, alone or as a group on loopback, and reads the JSON that they print."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[2]


def start(script: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """One process of a script, with these environment variables."""
    command = [sys.executable, str(script), *words]
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HOME))))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def free_peers(size: int) -> list[str]:
    """Loopback addresses that were free a moment ago."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    peers = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    for door in doors:
        door.close()
    return peers


def start_group(
    script: Path, *words: str, roles: Sequence[str], variables: Sequence[dict[str, str]] = ()
) -> list[subprocess.Popen[str]]:
    """A process for each role, `chief` or `worker`, with its place in the group and its own environment variables."""
    cluster: dict[str, list[str]] = {}
    tasks = []
    for role, peer in zip(roles, free_peers(len(roles)), strict=True):
        peers = cluster.setdefault(role, [])
        tasks.append({"type": role, "index": len(peers)})
        peers.append(peer)
    configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
    own = variables or [{} for _ in roles]
    return [start(script, *words, TF_CONFIG=config, **each) for config, each in zip(configs, own, strict=True)]


class Answers:
    """What processes printed, by a name for each group of them; each is waited for when it is first asked for."""

    def __init__(self, running: dict[str, list[subprocess.Popen[str]]], seconds: float) -> None:
        self._running = running
        self._seconds = seconds
        self._printed: dict[str, list[Any] | Exception] = {}

    def __call__(self, name: str) -> list[Any]:
        """In rank order; what went wrong, again for every test that asks."""
        if name not in self._printed:
            try:
                self._printed[name] = [self._read(process) for process in self._running[name]]
            except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                self._printed[name] = error
        found = self._printed[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _read(self, process: subprocess.Popen[str]) -> Any:
        output, errors = process.communicate(timeout=self._seconds)
        assert process.returncode == 0, errors[-3000:]
        return json.loads(output)

    def close(self) -> None:
        """End what still runs."""
        for process in (each for group in self._running.values() for each in group):
            process.kill()
            process.communicate()
