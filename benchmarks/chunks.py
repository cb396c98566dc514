"""Runs many trainings in a few processes: one that hangs or dies ends its processes, and the rest
goes on in others.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.rank_server import RankServer, place_ranks

# A training that takes longer hangs: it computes for CPU_SECONDS, or waits until SECONDS are over,
# which are many, as a busy machine may give it a tenth of a core.
CPU_SECONDS, SECONDS = 90, 600
CHUNK_SECONDS = 3600
Found = dict[str, dict[str, Any]]


class Chunks:
    """Asks `server` for functions of `module`, which call `say` for each of the names that they
    get.
    """

    def __init__(self, server: RankServer, folder: Path, module: str) -> None:
        self._server, self._folder, self._module = server, folder, module

    def run(self, function: str, names: Sequence[str], given: Any, world: int = 1) -> Found:
        """What the first rank said of each name; "ended" is why its processes ended where it said
        nothing.
        """
        found: Found = {}
        for path in self._folder.glob(f"{function}*.jsonl"):
            path.unlink()
        path = self._folder / f"{function}0.jsonl"
        while True:
            left = [name for name in names if name not in found]
            if not left:
                break
            reason = self._try(function, left, given, world)
            found |= {each["name"]: each for each in _lines(path)}
            stuck = next((name for name in left if name not in found), "")
            if reason and stuck:
                found[stuck] = {
                    "name": stuck,
                    "ended": (self._raised(function, stuck) or reason)[:300],
                }
        return found

    def _try(self, function: str, names: Sequence[str], given: Any, world: int) -> str:
        """Why the processes ended early; empty if they didn't."""
        try:
            called = f"{self._module}.{function}"
            ranks = place_ranks(world)
            self._server.run(called, self._folder, names, given, ranks=ranks, seconds=CHUNK_SECONDS)
        except AssertionError as error:
            return last_error(str(error))
        return ""

    def _raised(self, function: str, name: str) -> str:
        """What another rank than the first said of the name that ended them."""
        lines = _lines(self._folder / f"{function}1.jsonl")
        return next(
            (
                str(each["raised"])
                for each in lines[::-1]
                if each["name"] == name and "raised" in each
            ),
            "",
        )


def last_error(log: str) -> str:
    """The last line of a log that names one; a process that was ended by its alarm wrote none."""
    lines = [
        line for line in log.splitlines() if re.match(r"[\w.]*(Error|Exception)\b|terminate", line)
    ]
    return lines[-1] if lines else "it took too long"


def say(path: Path, name: str, called: Callable[[], dict[str, Any]]) -> None:
    """Append what `called` finds of this name; what it raises ends the process, once it is written
    down.
    """
    signal.alarm(SECONDS)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    began = time.monotonic()
    try:
        found = called()
    except BaseException as error:
        _append(
            path,
            {
                "name": name,
                "raised": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            },
        )
        raise
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    _append(path, {"name": name, "seconds": time.monotonic() - began, **found})


def _append(path: Path, found: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()] if path.exists() else []
