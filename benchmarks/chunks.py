"""Run many training runs in a few processes.

A run that hangs or crashes ends only its own processes; the remaining ones continue in new
processes.
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

# A run is taken to hang after CPU_SECONDS of CPU time or SECONDS of wall time, which are many,
# because a busy machine may give it a tenth of a core.
CPU_SECONDS, SECONDS = 90, 600
CHUNK_SECONDS = 3600
Found = dict[str, dict[str, Any]]


class Chunks:
    """Runs functions of `module` on `server` for lists of names.

    Such a function calls `append_result` for each name that it is given.
    """

    def __init__(self, server: RankServer, folder: Path, module: str) -> None:
        self._server, self._folder, self._module = server, folder, module

    def run(self, function: str, names: Sequence[str], given: Any, world: int = 1) -> Found:
        """Return by name what the first rank recorded.

        A name without a record gets "ended": the reason why its processes ended.
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
        """Return why the processes ended early; empty if they didn't."""
        try:
            called = f"{self._module}.{function}"
            ranks = place_ranks(world)
            self._server.run(called, self._folder, names, given, ranks=ranks, seconds=CHUNK_SECONDS)
        except AssertionError as error:
            return last_error(str(error))
        return ""

    def _raised(self, function: str, name: str) -> str:
        """Return the error that the second rank recorded for a name; empty without one."""
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
    """Return the last line of a log that names an error; processes killed by a timeout log none."""
    lines = [
        line for line in log.splitlines() if re.match(r"[\w.]*(Error|Exception)\b|terminate", line)
    ]
    return lines[-1] if lines else "it took too long"


def append_result(path: Path, name: str, called: Callable[[], dict[str, Any]]) -> None:
    """Append the result of `called` for a name to a file.

    If `called` raises, the error is recorded and raised again, which ends the process.
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
