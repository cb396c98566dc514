"""The child of a probe: builds one workload and runs the steps that it is told to, on its own cores.

Its protocol has a private copy of standard output; descriptor 1 leads to standard error, so that no chatter of a
framework can be taken for a reply. It ends with its parent, however that ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from evener.balancer.probes import protocol
from evener.balancer.probes.procfs import start_time
from evener.balancer.probes.protocol import (
    Begin,
    Build,
    Built,
    Order,
    Prepare,
    Prepared,
    Profile,
    Profiled,
    Ran,
    Ready,
    Reply,
    Run,
    Trouble,
)
from evener.devices.child_environment import cap_address_space
from evener.workloads.protocol import Workload

PARENT_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Obey orders from standard input until there is nobody left to give any."""
    replies = _private_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker()
    for text in sys.stdin.buffer:
        order = protocol.orders.decode(text)
        try:
            reply = worker.obey(order)
        except BaseException as error:
            reply = worker.explain(error)
        replies.write(protocol.line(reply))
        replies.flush()
        if isinstance(reply, Trouble):
            break  # what failed once is never used again
    _leave()
    return 0


class Worker:
    """The one workload of this process and how it is stepped."""

    def __init__(self) -> None:
        self._workload: Workload | None = None
        self._build: Build | None = None
        self._busy_seconds = 0.0  # of the last step: what a slowed process spins by

    def obey(self, order: Order) -> Reply:
        """Do one thing and say what came of it."""
        match order:
            case Begin():
                return _begin(order)
            case Build():
                return self._raise_up(order)
            case Prepare():
                return self._prepare(order)
            case Run():
                return self._run(order)
            case Profile():
                return self._profile(order.steps)
            case _:
                raise ValueError(f"no such order: {order}")

    def explain(self, error: BaseException) -> Trouble:
        """The error as its class names and its text; with the user's own line where it passed through one."""
        types = tuple(kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException, Exception))
        text = (str(error) or type(error).__name__).encode(errors="replace").decode()
        print("".join(traceback.format_exception(error))[-20_000:], file=sys.stderr)
        return Trouble(types, text[: protocol.LONGEST_TEXT], self._users_line(error))

    def _raise_up(self, order: Build) -> Built:
        from evener.workloads import registry

        self._build = order
        if order.room_bytes is not None and ":" not in order.workload:
            registry.factory(registry.find(order.workload, order.framework))
            cap_address_space(order.room_bytes)
        self._workload = registry.build(order.workload, order.place, order.settings, order.framework)
        if order.room_bytes is not None and ":" in order.workload:
            cap_address_space(order.room_bytes)  # only the user's own code imports what it needs
        return Built({str(key): str(value) for key, value in self._workload.facts().items()})

    def _prepare(self, order: Prepare) -> Prepared:
        workload, _ = self._built()
        gc.unfreeze()
        self._busy_seconds = 0.0
        workload.prepare(order.shares)
        started = time.perf_counter()
        workload.step()
        workload.synchronize()
        first = time.perf_counter() - started
        gc.collect()
        gc.freeze()  # what lives now lives on: a collection between blocks need not look at it again
        return Prepared(first)

    def _run(self, order: Run) -> Ran:
        workload, build = self._built()
        gc.disable()
        spun, steps = 0.0, 0
        cpu, started = time.process_time(), time.perf_counter()
        while not steps or time.perf_counter() - started < order.seconds:
            spun += self._steps(order.steps, workload, build)
            steps += order.steps
        wall = time.perf_counter() - started
        cpu = time.process_time() - cpu
        gc.enable()
        gc.collect()
        return Ran(steps, wall, max(0.0, cpu - spun), spun, tuple(workload.peak_memory_bytes()) or (None,))

    def _profile(self, steps: int) -> Profiled:
        """Once without the profiler, which slows what it looks at, and once with it."""
        from evener.workloads import profiling

        workload, build = self._built()

        def run() -> None:
            for _ in range(steps):
                workload.step()
            workload.synchronize()

        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        return Profiled(steps, seconds, profiling.profile(build.framework, run))

    def _steps(self, count: int, workload: Workload, build: Build) -> float:
        """Run steps until the devices are done with them; gives the time spun."""
        if build.compute < 1:
            return sum(self._slow_step(workload, build) for _ in range(count))
        for _ in range(count):
            workload.step()
        workload.synchronize()
        return 0.0

    def _slow_step(self, workload: Workload, build: Build) -> float:
        """Spin, so as to be as slow as told, then step; gives the time spun.

        It spins before the step, for what the step before it took, so that in a group the others wait for this rank as
        for a slow one. Alone, wall time counts; in a group only own work, as waiting for others is not slowness.
        """
        spun = _spin(self._busy_seconds * (1 / build.compute - 1))
        cpu, wall = time.process_time(), time.perf_counter()
        workload.step()
        workload.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._busy_seconds = wall if build.place.world == 1 else min(wall, cpu / build.parallelism)
        return spun

    def _built(self) -> tuple[Workload, Build]:
        if self._workload is None or self._build is None:
            raise ValueError("nothing is built yet")
        return self._workload, self._build

    def _users_line(self, error: BaseException) -> str:
        home = self._build.workload.rpartition(":")[0] if self._build else ""
        if not home:
            return ""
        module = sys.modules.get(home)
        name = getattr(module, "__file__", None) or home
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).resolve() == Path(name).resolve()]
        return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _begin(order: Begin) -> Ready:
    """Bind this process to its parent and its cores."""
    _end_with(order.parent_pid, order.parent_start)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    with suppress(OSError):  # if the kernel must kill somebody for memory, it shall be the probe
        Path("/proc/self/oom_score_adj").write_text("1000")
    return Ready(os.getpid())


def _end_with(parent_pid: int, parent_start: float) -> None:
    """The kernel kills this process with its parent; a thread looks too, should the kernel not."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def look() -> None:
        while os.getppid() == parent_pid and start_time(parent_pid) == parent_start:
            time.sleep(PARENT_LOOK_SECONDS)
        _leave()

    threading.Thread(target=look, name="parent", daemon=True).start()


def _leave() -> None:
    """End this process at once, with whatever it started: the group is its own."""
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _private_output() -> BinaryIO:
    """Standard output for the protocol alone: descriptor 1 leads to standard error from here on."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "wb")


def _spin(seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Keep the core busy, as a slower one would be; gives the time that it really took."""
    started = clock()
    while (spent := clock() - started) < seconds:
        pass
    return spent


if __name__ == "__main__":
    sys.exit(main())
