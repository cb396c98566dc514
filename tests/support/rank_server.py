"""Ranks that are forked from one process, which imports their framework once; run as a script, it is that process.

It imports what trains without computing anything, so a forked rank is as good as a new one and starts at once. It is no
child of the tests' process: others of its tests count their children, or kill them.

Ranks on GPUs are processes of their own, as CUDA may not be forked: the script with a function is one of them.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.torch_start import free_port, rank_environment, run_ranks

SECONDS = 300  # no rank takes so long, so it hangs
HANGING_SECONDS = 60  # after which one on a GPU says what it is at


class RankServer:
    """Starts functions of modules as ranks, which have imported `module`; use it as a context."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._asked = 0  # requests so far

    def __enter__(self) -> RankServer:
        own = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.rank_server", self._module]
        root = Path(__file__).parents[2]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen(command, env={**own, **rank_environment()}, cwd=root, text=True, **pipes)
        self._process.wait()
        return self

    def __exit__(self, *_: Any) -> None:
        with self._process:
            self._process.stdin.close()

    def run(
        self, function: str, folder: Path, *arguments: Any, ranks: Sequence[dict[str, str]], seconds: int = SECONDS
    ) -> None:
        """`module.function(folder, rank, *arguments)` in a process for each of the environments of `ranks`.

        AssertionError if one fails, or takes more seconds.
        """
        folder.mkdir(exist_ok=True)
        self._asked += 1
        request = {"function": function, "folder": str(folder), "arguments": arguments, "seconds": seconds}
        own = [{"EVENER_LIVE_DIR": str(folder / "live"), **rank} for rank in ranks]
        self._process.stdin.write(json.dumps({**request, "environments": own, "number": self._asked}) + "\n")
        self._process.stdin.flush()
        number, failed = 0, [0]
        while number != self._asked:  # earlier ones are for tests that were ended while they waited
            number, failed = json.loads(self._process.stdout.readline())
        assert not failed, "\n".join((folder / f"rank{rank}.txt").read_text()[-4000:] for rank in failed)


def place_ranks(world: int) -> list[dict[str, str]]:
    """What PyTorch's launchers tell each of several ranks; nothing where there is one."""
    common = {"MASTER_PORT": str(free_port())}
    if world == 1:
        return [common]
    places = [{"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [{**common, **place} for place in places]


def run_on_gpus(function: str, folder: Path, *arguments: Any, world: int = 2) -> None:
    """As `RankServer.run`, each rank on a GPU."""
    folder.mkdir(exist_ok=True)
    given = json.dumps(arguments)
    run_ranks(Path(__file__), world, lambda rank: [function, str(folder), str(rank), given], folder)


def serve(module: str) -> None:
    """Fork the ranks of each request, and answer with its number and who failed, until nobody can ask any more."""
    if os.fork():
        os._exit(0)
    import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        called = find_function(request["function"])
        gc.freeze()  # trainers collect garbage often, which would go through all modules each time
        ranks = {fork_rank(called, request, rank): rank for rank in range(len(request["environments"]))}
        print(json.dumps([request["number"], wait_for(ranks)]), file=answers, flush=True)
    os._exit(0)  # taking all modules down takes seconds


def find_function(path: str) -> Any:
    """`module.function`."""
    module, _, function = path.rpartition(".")
    return getattr(import_module(module), function)


def fork_rank(called: Any, request: dict[str, Any], rank: int) -> int:
    """The process of one rank."""
    process = os.fork()
    if process:
        return process
    folder = Path(request["folder"])
    log = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(request["environments"][rank])
    signal.alarm(request["seconds"])
    try:
        called(folder, rank, *request["arguments"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def wait_for(ranks: dict[int, int]) -> list[int]:
    """The ranks that failed by themselves; once one has, the others would wait for it."""
    left = dict(ranks)
    failed: list[int] = []
    while left:
        process, status = os.wait()
        rank = left.pop(process)
        if status and not failed:
            failed.append(rank)
            for other in left:
                os.kill(other, 9)
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 2:
        name, folder, rank, given = sys.argv[1:]
        faulthandler.dump_traceback_later(HANGING_SECONDS, repeat=True)
        called = find_function(name)
        gc.freeze()
        called(Path(folder), int(rank), *json.loads(given))
    else:
        serve(sys.argv[1])
