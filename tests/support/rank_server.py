"""Forks ranks from one process that imports their framework once; run as a script, it is that
process.

It imports training libraries without computing anything, so a forked rank behaves like a new
process and starts at once. It isn't a child of the tests' process, as other tests count their
children or kill them. All workers of a test run share it.

CUDA doesn't work in forked processes, so ranks on GPUs are separate processes that run this script
with a function.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.children import MARK
from tests.support.torch_start import free_port, rank_environment, run_ranks

SECONDS = 300  # longer than any rank takes: it hangs
HANGING_SECONDS = 60  # after which a rank on a GPU prints where it hangs


class RankServer:
    """Runs functions of modules as ranks, in processes that have imported `module`; use it as a
    context.

    Servers with the same folder share one process, which ends with the process `owner`; without a
    folder it ends with the context.
    """

    def __init__(self, module: str, folder: Path | None = None, owner: int = 0) -> None:
        self._module, self._owner = module, owner or os.getpid()
        self._own = None if folder else TemporaryDirectory()
        self._address = Path(folder or self._own.name, f"{module.rpartition('.')[2]}.ranks")  # type: ignore[union-attr]

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._own:
            self._connect().close()  # connects without a request
            self._own.cleanup()

    def _connect(self) -> socket.socket:
        """Return a socket to the process, and start the process if it isn't running."""
        line = socket.socket(socket.AF_UNIX)
        with self._address.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                line.connect(str(self._address))
            except OSError:
                self._address.unlink(missing_ok=True)
                self._start()
                line.connect(str(self._address))
        return line

    def _start(self) -> None:
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
        }
        # it outlives this test worker, whose environment marks the processes it must stop
        if self._owner != os.getpid():
            own[MARK] = own[MARK].rpartition(",")[0]
        words = [self._module, str(self._address), str(self._owner)]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.support.rank_server",
            "serve",
            *words,
        ]
        root = Path(__file__).parents[2]
        with self._address.with_suffix(".txt").open("w") as log:
            quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            subprocess.run(
                command, env={**own, **rank_environment()}, cwd=root, check=True, **quiet
            )

    def run(
        self,
        function: str,
        folder: Path,
        *arguments: Any,
        ranks: Sequence[dict[str, str]],
        seconds: int = SECONDS,
        imports: str = "",
    ) -> None:
        """Run `module.function(folder, rank, *arguments)` in a process for each environment of
        `ranks`.

        They are forked with the module `imports` imported, too. Raises AssertionError if one fails
        or takes longer than `seconds`. If the waiting test ends, so do the ranks.
        """
        folder.mkdir(exist_ok=True)
        request = {
            "function": function,
            "folder": str(folder),
            "arguments": arguments,
            "seconds": seconds,
        }
        request["imports"] = imports
        own = [{"EVENER_LIVE_DIR": str(folder / "live"), **rank} for rank in ranks]
        with self._connect() as line:
            line.sendall((json.dumps({**request, "environments": own}) + "\n").encode())
            failed = json.loads(line.makefile().readline())
        assert not failed, "\n".join(
            (folder / f"rank{rank}.txt").read_text()[-4000:] for rank in failed
        )


def place_ranks(world: int) -> list[dict[str, str]]:
    """Return the variables that PyTorch's launchers set for each rank; none for a single one."""
    common = {"MASTER_PORT": str(free_port())}
    if world == 1:
        return [common]
    places = [
        {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(world)
    ]
    return [{**common, **place} for place in places]


def run_on_gpus(function: str, folder: Path, *arguments: Any, world: int = 2) -> None:
    """Do the same as `RankServer.run`, with each rank on a GPU."""
    folder.mkdir(exist_ok=True)
    given = json.dumps(arguments)
    run_ranks(Path(__file__), world, lambda rank: [function, str(folder), str(rank), given], folder)


def serve(module: str, address: str, owner: int) -> None:
    """Answer each request in a process of its own.

    It returns when the owner ends, or when someone connects without a request.
    """
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    import_module(module)
    alive = os.pidfd_open(owner)
    while alive not in wait_for_any([door.fileno(), alive]):
        line, _ = door.accept()
        text = line.makefile().readline()
        if not text:
            break
        request = json.loads(text)
        with suppress(Exception):  # its ranks report the error
            find_function(request["function"])
            if request["imports"]:
                import_module(request["imports"])
        # trainers often collect garbage, which would search all imported modules each time
        gc.freeze()
        if os.fork() == 0:
            door.close()
            answer(request, line)
            os._exit(0)
        line.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)  # unloading all modules takes seconds


def wait_for_any(handles: list[int]) -> list[int]:
    """Return the handles that can be read; that of a process can be once it has ended."""
    return select.select(handles, [], [])[0]


def answer(request: dict[str, Any], line: socket.socket) -> None:
    """Fork the ranks of a request, and send which of them failed by themselves."""
    ranks = {os.pidfd_open(process): (process, rank) for process, rank in fork_ranks(request)}
    failed = wait_for(ranks, line)
    with suppress(OSError):
        line.sendall((json.dumps(failed) + "\n").encode())


def fork_ranks(request: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the (process, rank) of each."""
    return [(fork_rank(request, rank), rank) for rank in range(len(request["environments"]))]


def find_function(path: str) -> Any:
    """Return the function `module.function`."""
    module, _, function = path.rpartition(".")
    return getattr(import_module(module), function)


def fork_rank(request: dict[str, Any], rank: int) -> int:
    """Return the id of a new process for one rank."""
    process = os.fork()
    if process:
        return process
    folder = Path(request["folder"])
    log = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(request["environments"][rank])
    signal.alarm(request["seconds"])
    faulthandler.dump_traceback_later(request["seconds"] - 2)  # prints where a hanging rank is
    try:
        find_function(request["function"])(folder, rank, *request["arguments"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def wait_for(ranks: dict[int, tuple[int, int]], line: socket.socket) -> list[int]:
    """Return the ranks that failed by themselves.

    Once one has failed, or the client is gone, the others are killed.
    """
    left = dict(ranks)
    failed: list[int] = []
    while left and not failed:
        ended = wait_for_any([line.fileno(), *left])
        if line.fileno() in ended:
            break
        failed = [rank for process, rank in map(left.pop, ended) if os.waitpid(process, 0)[1]]
    for handle, (process, _) in left.items():
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.waitpid(process, 0)
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        name, folder, rank, given = sys.argv[1:]
        faulthandler.dump_traceback_later(HANGING_SECONDS, repeat=True)
        called = find_function(name)
        gc.freeze()
        called(Path(folder), int(rank), *json.loads(given))
        sys.stderr.flush()
        os._exit(
            0
            # NCCL's watchdog thread of a group that wasn't destroyed may outlive the driver and
            # abort
        )
