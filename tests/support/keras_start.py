"""Starts programs with Keras, alone or as a group on loopback, and reads their JSON.

They are scripts, or ranks of a RankServer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[2]


def start(script: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start one process of a script with additional environment variables."""
    command = [sys.executable, str(script), *words]
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HOME))))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def free_peers(size: int) -> list[str]:
    """Return loopback addresses that were free a moment ago."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    peers = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    for door in doors:
        door.close()
    return peers


def make_configs(roles: Sequence[str]) -> list[str]:
    """Return TF_CONFIG for each process of a group with these roles, `chief` or `worker`."""
    cluster: dict[str, list[str]] = {}
    tasks = []
    for role, peer in zip(roles, free_peers(len(roles)), strict=True):
        peers = cluster.setdefault(role, [])
        tasks.append({"type": role, "index": len(peers)})
        peers.append(peer)
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


def start_group(
    script: Path, *words: str, roles: Sequence[str], variables: Sequence[dict[str, str]] = ()
) -> list[subprocess.Popen[str]]:
    """Start a process for each role, with its place in the group and its environment variables."""
    own = variables or [{} for _ in roles]
    pairs = zip(make_configs(roles), own, strict=True)
    return [start(script, *words, TF_CONFIG=config, **each) for config, each in pairs]


def read_all(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[Any]:
    """Return what they printed, in rank order, and kill them all."""
    try:
        return [_read(process, seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _read(process: subprocess.Popen[str], seconds: float) -> Any:
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output)


def save(folder: Path, rank: int, function: str, *arguments: Any) -> None:
    """Save what a function of a module returns to one rank, as JSON.

    It waits for the rest of its group, which may still read the last sum from this process.
    """
    module, _, name = function.rpartition(".")
    found = getattr(import_module(module), name)(rank, *arguments)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
    ranks = range(sum(map(len, cluster.values())))
    while not all((folder / f"{each}.json").exists() for each in ranks):
        time.sleep(0.01)


class Answers:
    """The results of `find`, called once for each name.

    If it fails, it is called once more, and the second failure is raised for every caller.
    """

    def __init__(self, find: Callable[[str], list[Any]]) -> None:
        self._find = find
        self._found: dict[str, list[Any] | AssertionError] = {}
        self._failed: set[str] = set()

    def __call__(self, name: str) -> list[Any]:
        """Return the results in rank order."""
        if name not in self._found:
            try:
                self._found[name] = self._find(name)
            except AssertionError as error:
                if name not in self._failed:
                    self._failed.add(name)  # a test that is repeated calls it again
                    raise
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, AssertionError):
            raise found
        return found
