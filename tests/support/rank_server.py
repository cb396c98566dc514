"""Ranks that are forked from one process, which imports their framework once; run as a script, it
is that process.

It imports what trains without computing anything, so a forked rank is as good as a new one and
starts at once. It is no child of the tests' process: others of its tests count their children, or
kill them. All workers of a test run share it.

Ranks on GPUs are processes of their own, as CUDA may not be forked: the script with a function is
one of them.
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

SECONDS = 300  # no rank takes so long, so it hangs
HANGING_SECONDS = 60  # after which one on a GPU says what it is at


class RankServer:
    """Starts functions of modules as ranks, which have imported `module`; use it as a context.

    Those with the same folder are one process, which ends with the process `owner`; without a
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
            self._connect().close()  # without a request
            self._own.cleanup()

    def _connect(self) -> socket.socket:
        """A line to the process, which is started if it isn't there."""
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
        if self._owner != os.getpid():  # it outlives this worker, whose mark is the last
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
        """`module.function(folder, rank, *arguments)` in a process for each of the environments of
        `ranks`.

        They are forked with the module `imports` imported, too. AssertionError if one fails, or
        takes more seconds. A test that ends while it waits ends them.
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
    """What PyTorch's launchers tell each of several ranks; nothing where there is one."""
    common = {"MASTER_PORT": str(free_port())}
    if world == 1:
        return [common]
    places = [
        {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(world)
    ]
    return [{**common, **place} for place in places]


def run_on_gpus(function: str, folder: Path, *arguments: Any, world: int = 2) -> None:
    """As `RankServer.run`, each rank on a GPU."""
    folder.mkdir(exist_ok=True)
    given = json.dumps(arguments)
    run_ranks(Path(__file__), world, lambda rank: [function, str(folder), str(rank), given], folder)


def serve(module: str, address: str, owner: int) -> None:
    """Answer each request in a process of its own, until the owner ends or one who connects has
    none.
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
        with suppress(Exception):  # its ranks say it
            find_function(request["function"])
            if request["imports"]:
                import_module(request["imports"])
        gc.freeze()  # trainers collect garbage often, which would go through all modules each time
        if os.fork() == 0:
            door.close()
            answer(request, line)
            os._exit(0)
        line.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)  # taking all modules down takes seconds


def wait_for_any(handles: list[int]) -> list[int]:
    """Those that can be read; of a process, that it has ended."""
    return select.select(handles, [], [])[0]


def answer(request: dict[str, Any], line: socket.socket) -> None:
    """Fork the ranks of a request, and say which failed by themselves."""
    ranks = {os.pidfd_open(process): (process, rank) for process, rank in fork_ranks(request)}
    failed = wait_for(ranks, line)
    with suppress(OSError):
        line.sendall((json.dumps(failed) + "\n").encode())


def fork_ranks(request: dict[str, Any]) -> list[tuple[int, int]]:
    """(process, rank) of each."""
    return [(fork_rank(request, rank), rank) for rank in range(len(request["environments"]))]


def find_function(path: str) -> Any:
    """`module.function`."""
    module, _, function = path.rpartition(".")
    return getattr(import_module(module), function)


def fork_rank(request: dict[str, Any], rank: int) -> int:
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
    faulthandler.dump_traceback_later(request["seconds"] - 2)  # what a hanging rank is at
    try:
        find_function(request["function"])(folder, rank, *request["arguments"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def wait_for(ranks: dict[int, tuple[int, int]], line: socket.socket) -> list[int]:
    """The ranks that failed by themselves; once one has, or nobody waits for them, the others are
    ended.
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
            # NCCL's watchdog of a group that nobody leaves may outlive the driver, and abort the
            # process
        )
