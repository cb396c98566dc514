"""A probe process: builds one workload, and runs its steps when its parent sends commands.

It runs on CPU cores of its own. When this module is run as a program, it is the fork server, which
imports the framework and then forks a probe process for each request.

Commands and replies use private copies of standard input and output. Descriptor 0 is then empty and
descriptor 1 leads to standard error, so a workload can neither read commands nor write replies. The
kernel kills the process when its parent exits.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

import msgspec

from evener.live.reporter import Reporter
from evener.shares.curves import Work
from evener.system.cores import cap_address_space, free_memory_bytes
from evener.system.taken_cores import (
    CoreWatch,
    Starvation,
    name_competitors,
    read_process_use,
)
from evener.workloads import user_code
from evener.workloads.protocol import Workload
from evener.workloads.torch_backend.driver_free_imports import (
    initialize_driver,
    prevent_driver_initialization,
)

from . import protocol
from .failures import error_is_memory, is_host_memory
from .fork_server import NO_CHANNEL, ForkServer, adopt_orphans, die_with_parent, import_first
from .gc_clock import GcClock
from .shared_build import BuildChannel, SharedRecipe

NAMED_FROM = 0.05  # fraction of a block's time without a core above which competitors are named
LOOK_SECONDS = 0.5  # seconds between two looks at all processes
IDLE_SECONDS = 1.0  # seconds without a command after which a child no longer counts as training


def main() -> None:
    """Run the fork server: import the given modules, then fork probe processes on request.

    The arguments of the program are the file descriptor of a socket, then module names.
    """
    die_with_parent()
    adopt_orphans()
    faulthandler.register(protocol.STACK_SIGNAL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [protocol.STACK_SIGNAL])
    prevent_driver_initialization()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        import_first(sys.argv[2:], initialize_driver)
        ForkServer(channel, run_child).serve()


def run_child(parent: int, channel: int = NO_CHANNEL, shared: SharedRecipe | None = None) -> None:
    """Run a probe process: execute commands from standard input until the input ends.

    It also ends when a command fails, unless it recovers from the failure.

    - `parent`: the process id of the fork server; this process is killed when the server exits.
    - `channel`: file descriptor of a socket for requests to fork more processes. A copy of this
      process, which has the built workload in memory, answers them. NO_CHANNEL if there is none.
    - `shared`: the workload that was built before this process was forked, if any.
    """
    _end_with_parent(parent)
    commands, replies = _private_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # if memory runs out, the kernel should kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    building = BuildChannel(channel, run_child) if channel != NO_CHANNEL else None
    worker = Worker(building, shared)
    replies.write(protocol.encode_line(protocol.Ready()))
    replies.flush()
    for text in _read_lines(commands, worker.report_idle):
        command = protocol.command_decoder.decode(text)
        try:
            reply = worker.execute(command)
        except BaseException as error:
            reply = worker.describe_error(error)
            if isinstance(command, (protocol.Build, protocol.Prepare, protocol.RunSteps)):
                reply = worker.recover(error, reply)
        replies.write(protocol.encode_line(reply))
        replies.flush()
        if isinstance(reply, protocol.ChildError) and not reply.recovered:
            break  # a child that failed without recovering is never reused
    _exit_now()


class Worker:
    """Executes the parent's commands on the user's workload in a probe process."""

    def __init__(
        self, building: BuildChannel | None = None, shared: SharedRecipe | None = None
    ) -> None:
        self._building, self._shared = building, shared
        # the ancestor of all processes of this search
        self._server_pid = shared.server_pid if shared else os.getppid()
        self._workload: Workload | None = None
        self._build: protocol.Build | None = None
        self._busy_seconds = 0.0  # duration of the last step; a slowed process spins accordingly
        self._shares: tuple[int, ...] = ()  # shares of this process's devices
        self._steps = 0  # steps since the workload was built
        self._not_finite_step = 0
        self._reporter = Reporter()
        self._cores = CoreWatch()
        self._gc = GcClock()
        self._use = read_process_use()
        self._takers = ""

    def execute(self, command: protocol.Command) -> protocol.Reply:
        """Execute a command and return its reply; exceptions of the workload are passed on.

        Raises ValueError if the command needs a workload before one was built.
        """
        match command:
            case protocol.Build():
                return self._build_workload(command)
            case protocol.Prepare():
                return self._prepare(command)
            case protocol.RunSteps():
                return self._run(command)
            case protocol.KeepBatch():
                return protocol.BatchKept(self._built()[0].keep_batch(command.kept))
            case protocol.MeasureLink():
                return protocol.LinkMeasured(self._built()[0].measure_link())
            case protocol.TimeOnDevice():
                return protocol.TimedOnDevice(self._built()[0].time_on_device())
            case protocol.ReleaseMemory():
                return protocol.MemoryReleased(tuple(self._built()[0].release_memory()) or (None,))
            case _:
                raise ValueError(f"unknown command: {command}")

    def report_idle(self) -> None:
        """Remove this process from the monitor's list of training runs, until its next step."""
        self._reporter.close()

    def describe_error(self, error: BaseException) -> protocol.ChildError:
        """Return a reply about an exception, with its traceback and the line of the user's code.

        Also prints the traceback to standard error.
        """
        trace = _encodable(
            "".join(traceback.format_exception(error))[-protocol.LONGEST_TRACEBACK :]
        )
        print(trace, file=sys.stderr)
        name = "" if self._build is None else self._build.workload
        where = user_code.find_line(error, name) if ":" in name else ""
        types = tuple(
            kind.__name__
            for kind in type(error).__mro__
            if kind not in (object, BaseException, Exception)
        )
        text = _without_middle(_encodable(str(error) or type(error).__name__))
        return protocol.ChildError(types, text, where, trace)

    def recover(self, error: BaseException, reply: protocol.ChildError) -> protocol.ChildError:
        """Try to free memory after a step ran out of memory, so that the process can continue.

        Returns `reply` with the outcome added, or unchanged if the error isn't about memory. Before
        the workload is built, nothing is freed; the returned reply then only says whether the
        memory of the host or of a device ran out.
        """
        if not error_is_memory(reply.types, reply.text):
            return reply
        if self._workload is None:
            on_gpu = self._build is not None and not self._build.in_host_memory
            if on_gpu and is_host_memory(reply.types, reply.text):
                return msgspec.structs.replace(reply, host_free_bytes=free_memory_bytes())
            return msgspec.structs.replace(reply, fits_no_rows=True)
        updates = self._workload.is_updating
        seen: BaseException | None = error
        while seen is not None:  # frames hold what the step allocated
            traceback.clear_frames(seen.__traceback__)
            seen.__traceback__ = None
            seen = seen.__context__
        try:
            recovered = self._workload.recover()
        except Exception:
            recovered = False
        return msgspec.structs.replace(reply, recovered=recovered, fits_no_rows=updates)

    def _build_workload(self, command: protocol.Build) -> protocol.Built:
        from evener.workloads import registry

        self._build = command
        size = command.address_space_bytes
        if size is not None and ":" not in command.workload:
            import_module(registry.find(command.workload, command.framework).home.partition(":")[0])
            cap_address_space(size)
        if self._building is not None:
            self._shared = self._building.build(command)
        if self._shared is not None and self._shared.suits(command):
            self._workload = self._shared.finish(command.setup)
        else:
            self._workload = registry.build(
                command.workload, command.setup, command.settings, command.framework
            )
        if size is not None and ":" in command.workload:
            cap_address_space(size)  # only the user's own code imports its own modules
        facts = {str(key): str(value) for key, value in self._workload.facts().items()}
        if self._building is not None and self._building.obstacle:
            facts |= {
                "build_seconds": f"{self._building.seconds:.3f}",
                "builds_again": self._building.obstacle,
            }
        return protocol.Built(facts)

    def _prepare(self, command: protocol.Prepare) -> protocol.Prepared:
        workload, build = self._built()
        gc.unfreeze()  # a training's collections visit all objects, also those of imports
        self._busy_seconds = 0.0
        _prepare_rows(workload, command)
        started = time.perf_counter()
        workload.step()
        workload.synchronize()
        first = time.perf_counter() - started
        shortage = workload.read_shortage()
        if shortage:
            raise MemoryError(shortage)
        rank, grouped = build.setup.rank, build.setup.world > 1
        self._shares = command.shares[rank : rank + 1] if grouped else command.shares
        self._check_loss_and_report(1, workload, build, timed=False)
        gc.collect()  # it copies the memory of objects that this process shares with others
        return protocol.Prepared(first)

    def _run(self, command: protocol.RunSteps) -> protocol.Ran:
        workload, build = self._built()
        spun, steps, before = 0.0, 0, workload.work()
        workload.read_waits()  # discard the waits of steps before this block
        workload.read_phases()
        retries = workload.count_memory_retries()
        self._cores.read()
        self._gc.read()
        cpu, started = time.process_time(), time.perf_counter()
        while not steps or time.perf_counter() - started < command.seconds:
            spun += self._run_steps(command.steps, workload, build)
            steps += command.steps
        wall_seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu
        starved = self._cores.read()
        gc_seconds, longest_gc_seconds = self._gc.read()
        memory = tuple(workload.max_memory_bytes()) or (None,)
        work = _subtract(workload.work(), before)
        self._check_loss_and_report(steps, workload, build)
        phases = workload.read_phases()
        return protocol.Ran(
            steps=steps,
            wall_seconds=wall_seconds,
            cpu_seconds=max(0.0, cpu - spun),
            spun_seconds=spun,
            memory_bytes=memory,
            not_finite_step=self._not_finite_step,
            work=work,
            waited_seconds=workload.read_waits(),
            input_seconds=phases.input_seconds,
            update_seconds=phases.update_seconds,
            starved_seconds=starved.starved_s if self._cores.known else None,
            taken_by=self._name_competitors(starved),
            memory_retries=max(0, workload.count_memory_retries() - retries),
            gc_seconds=min(gc_seconds, wall_seconds),
            longest_gc_seconds=longest_gc_seconds,
        )

    def _name_competitors(self, starved: Starvation) -> str:
        """Return the names of programs that competed with this process for its CPU cores.

        Returns "" if `starved` shows that they took hardly any CPU time from it.
        """
        if starved.part < NAMED_FROM:
            return ""
        if time.perf_counter() - self._use.at_s >= LOOK_SECONDS:
            before, self._use = self._use, read_process_use()
            # processes of this search aren't named: the fork server is their ancestor
            server, own = self._server_pid, os.getpid()
            self._takers = name_competitors(
                before, self._use, server, starved.throttled_s, training_pid=own
            )
        return self._takers

    def _check_loss_and_report(
        self, steps: int, workload: Workload, build: protocol.Build, timed: bool = True
    ) -> None:
        """Record whether the loss is still finite, and report the steps to the monitor."""
        self._steps += steps
        if not self._not_finite_step and not workload.loss_is_finite():
            self._not_finite_step = self._steps
        self._reporter.report(
            steps * sum(self._shares),
            devices=build.device_ids,
            batches=self._shares if len(self._shares) == len(build.device_ids) else None,
            workload=build.workload,
            framework=build.framework,
            timed=timed,
        )

    def _run_steps(self, count: int, workload: Workload, build: protocol.Build) -> float:
        """Run steps, and return the seconds spent spinning to imitate a slower device."""
        if build.compute < 1:
            return sum(self._run_slowed_step(workload, build) for _ in range(count))
        for _ in range(count):
            workload.step()
        workload.synchronize()
        return 0.0

    def _run_slowed_step(self, workload: Workload, build: protocol.Build) -> float:
        """Spin to imitate a slower device, then run a step; return the seconds spent spinning."""
        # spinning comes first, because the other ranks then wait for this one as for a slow device
        spun = _spin(self._busy_seconds * (1 / build.compute - 1))
        cpu, wall = time.process_time(), time.perf_counter()
        workload.step()
        workload.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        # in a group, only the compute time counts: a slower device wouldn't wait longer for others
        self._busy_seconds = wall if build.setup.world == 1 else min(wall, cpu / build.parallelism)
        return spun

    def _built(self) -> tuple[Workload, protocol.Build]:
        if self._workload is None or self._build is None:
            raise ValueError("nothing is built yet")
        return self._workload, self._build


def _prepare_rows(workload: Workload, command: protocol.Prepare) -> None:
    if command.costs:
        workload.prepare_assigned(command.shares, command.costs, command.tokens)
    elif command.length:
        workload.prepare_length(command.shares, command.micro, command.length)
    else:
        workload.prepare(command.shares, command.micro)


def _subtract(now: Work | None, before: Work | None) -> Work | None:
    if now is None or before is None:
        return now
    pairs = zip(msgspec.structs.astuple(now), msgspec.structs.astuple(before), strict=True)
    return Work(*(after - first for after, first in pairs))


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _without_middle(text: str) -> str:
    """Shorten a long error text to its first and last lines."""
    if len(text) <= protocol.LONGEST_TEXT:
        return text
    # TensorFlow's errors begin with the place where an operation was made, which may take pages,
    # and end with the cause
    half = protocol.LONGEST_TEXT // 2
    begin, end = text[:half].rpartition("\n")[0], text[-half:].partition("\n")[2]
    return f"{begin or text[:half]}\n{end or text[-half:]}"


def _end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits, or exit now if it already has."""
    die_with_parent()
    # the parent may have exited before
    if os.getppid() != parent:
        _exit_now()


def _exit_now() -> None:
    """Kill this process and its group without cleaning up."""
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return streams for commands and replies to which the user's code has no access."""
    # afterwards, descriptor 0 is empty and descriptor 1 writes to standard error
    commands, replies = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return os.fdopen(commands, "rb"), os.fdopen(replies, "wb")


def _read_lines(stream: BinaryIO, on_idle: Callable[[], None]) -> Iterator[bytes]:
    """Yield lines until the stream ends. Call `on_idle` if no line arrives within IDLE_SECONDS."""
    while True:
        if not select.select([stream], [], [], IDLE_SECONDS)[0]:
            on_idle()
        line = stream.readline()
        if not line:
            return
        yield line


def _spin(seconds: float) -> float:
    """Keep a core busy for this many seconds, and return the seconds that it really took."""
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        pass
    return spent


if __name__ == "__main__":
    main()
