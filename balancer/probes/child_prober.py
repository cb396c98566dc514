"""Measures probes by training in real processes.

Processes are started when a layout needs them, kept for later probes if memory allows, and replaced
after a failure. Usually, there is one process per device. The processes of a split run each step
together; on one host, they communicate over loopback. If one process can drive all devices of a
split, there is only one. TensorFlow can do so with GPUs that have no limits on compute or memory.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import cast

import msgspec

from evener.devices.backend import ChildEnvironment
from evener.devices.cluster.agents import HostLostError
from evener.devices.registry import all_backends
from evener.devices.types import Device
from evener.errors import DeviceError

from ..events import Report
from ..request import Job, assigns_by_cost
from ..types import (
    HOST_MEMORY,
    Facts,
    Failed,
    KnownLink,
    Layout,
    ModelState,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
)
from .children import ChildGroup, Inbox
from .failures import GroupError, RankFailure, StoppedError
from .hosts import Hosts
from .interference import read_idle
from .launch_plan import (
    MemoryBudget,
    RankMap,
    assign_devices,
    build_commands,
    choose_engine,
    map_ranks,
    runs_in_one_process,
)
from .links import name_path, read_switches
from .measurement import Measurement, ProgressReporter, Timeouts
from .protocol import Built, LinkMeasured, MeasureLink, Ran, Ready, RunSteps, Stack
from .simulated import SimulatedProber

MOST_LOOKS = 3  # probes of a layout in which steps without input are timed
WARM_UP_SHARE = 16  # most rows: any other size works, and a small one is made quickly
REPEAT_SECONDS = 0.5  # seconds between two reports on a silent probe
# one step at a time, to check every 0.05 s whether other probes still run
GO_ON = RunSteps(1, 0.05)
LINK_SECONDS = 20.0  # timeout in seconds for a few all-reduces, which take a second
PORT_TRIES = 3  # attempts: a port may be taken between its choice and its use
LARGEST_ERROR_FILE_BYTES = 4 << 20  # a hundred tracebacks of `protocol.LONGEST_TRACEBACK`
_FRAMEWORKS = ("tensorflow", "keras", "torch")
_PORT_TAKEN = ("address already in use", "failed to bind", "could not start grpc server")


class ChildProber:
    """Measures probes on the devices of a job by training in real processes.

    - `start_seconds`: initial time of the search's clock; above 0 for a resumed run.
    - `error_file`: tracebacks and output of failed probe processes are appended to this file.
    - `link`: the speed of the link between the devices, if an earlier run has measured it.
    """

    def __init__(
        self,
        job: Job,
        timeouts: Timeouts | None = None,
        start_seconds: float = 0.0,
        error_file: Path | None = None,
        link: KnownLink | None = None,
    ) -> None:
        self._resolved = job
        self._devices = job.devices
        self._timeouts = timeouts or Timeouts()
        self._error_file = error_file
        self._began = time.monotonic() - start_seconds
        self._idle: dict[Layout, ChildGroup] = {}
        self._running: set[Probe] = set()  # probes of this round that aren't timed yet
        self._hosts = Hosts(self._devices, job.framework, job.workload)
        self._memory = MemoryBudget(self._devices, self._hosts.available_memory_bytes)
        self._busy_cores: dict[int, float] = {}  # position -> cores that a step alone keeps busy
        self._facts = Facts(driver=job.driver, link=link)
        # layout -> number of probes that may still time its steps without input
        self._looks_left: dict[Layout, int] = {}
        # positions of devices that took part in a probe and are therefore watched
        self._used: set[int] = set()
        self._unused: tuple[int, ...] = ()  # devices in `_used` that no running probe uses
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def measure(
        self,
        probes: tuple[Probe, ...],
        report: Report,
        stop: threading.Event,
        finished: tuple[Probe, ...] = (),
    ) -> Iterator[Observation]:
        """Run probes at the same time, and yield the outcome of each as it ends.

        - `report`: called with progress, from several threads.
        - `stop`: once it is set, running probes end without an outcome.
        - `finished`: probes of the same round that have ended already; their devices don't
          count as idle when idle power is measured.
        """
        # no idle power is read for the devices of `finished` probes
        self._free_memory(probes)
        busy = {position for probe in (*probes, *finished) for position in probe.layout.active}
        self._unused = tuple(sorted(self._used - busy))
        self._used |= busy
        results: queue.SimpleQueue[tuple[Probe, Observation | BaseException | None]] = (
            queue.SimpleQueue()
        )
        running = {probe: ProgressReporter(probe, report, self.now) for probe in probes}
        self._running = set(probes)

        def drive(probe: Probe) -> None:
            try:
                results.put((probe, self._run_probe(probe, running[probe], stop)))
            except BaseException as error:
                results.put((probe, error))
            self._running.discard(probe)

        for probe in probes:
            threading.Thread(target=drive, args=(probe,), name="probe", daemon=True).start()
        while running:
            try:
                probe, seen = results.get(timeout=REPEAT_SECONDS)
            except queue.Empty:
                for progress in running.values():
                    progress.repeat()
                continue
            del running[probe]
            if isinstance(seen, BaseException):
                raise seen
            if seen is not None:
                yield seen

    def now(self) -> float:
        """Return the seconds since the search began."""
        return time.monotonic() - self._began

    def facts(self) -> Facts:
        """Return what the processes have reported so far about software, workload and data."""
        return self._facts

    def close(self) -> None:
        """Kill all processes. Probes that are running end without an outcome.

        May be called more than once, and from any thread.
        """
        self._closed.set()
        self._hosts.close()
        self._idle.clear()

    def _run_probe(
        self, probe: Probe, progress: ProgressReporter, stop: threading.Event
    ) -> Observation | None:
        """Run one probe, and return its outcome, or None if the probe was stopped."""
        started = time.monotonic()
        # try again if another program took a port that the children need
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                return self._attempt(probe, progress, stop, started)
            except StoppedError as stopped:
                if stopped.stack is not None and not self._closed.is_set():
                    self._explain_stop(probe, progress, stopped.stack)
                return None
            except (GroupError, HostLostError) as error:
                if self._closed.is_set():
                    return None
                if isinstance(error, HostLostError):
                    error = self._host_failure(probe, error)
                if not tries_left or not any(
                    sign in error.root.detail.lower() for sign in _PORT_TAKEN
                ):
                    return self._failed(
                        probe, error.root, progress.phase, time.monotonic() - started
                    )
        raise AssertionError("unreachable")

    def _host_failure(self, probe: Probe, lost: HostLostError) -> GroupError:
        """Return the failure of a probe that has lost the connection to one of its hosts."""
        active = probe.layout.active
        rank = next(
            rank
            for rank, position in enumerate(active)
            if self._devices[position].host == lost.host
        )
        return GroupError(RankFailure(rank, "device", lost.message))

    def _attempt(
        self, probe: Probe, progress: ProgressReporter, stop: threading.Event, started: float
    ) -> Timed:
        key = probe.layout.group_key
        idle = read_idle(self._hosts, self._unused)
        self._hosts.wait_for_drivers(key.active, stop)
        group = self._take_idle(key)
        try:
            short_bytes = self._measure_memory_of_others(key, group is None)
            if group is None:
                group = self._start_children(key, progress, stop)
            row_tokens = fmean(self._facts.lengths or (0,))
            measurement = Measurement(
                probe,
                group,
                self._timeouts,
                progress,
                self._hosts,
                row_tokens,
                idle,
                measure_limits=self._should_time_without_loading(probe),
            )
            seen = measurement.run(stop, started, self._warm_up_share(probe, group), short_bytes)
            if seen.kept is None:
                with self._lock:
                    self._looks_left[probe.layout] = 0  # it doesn't wait for input
        except GroupError as error:
            if group is not None and not self._keep_recovered_children(key, group, error):
                group.end()
            raise
        except BaseException:
            if group is not None:
                group.end()
            raise
        self._running.discard(probe)
        self._keep_children(key, group, seen, measurement.busy_cores, stop)
        return seen

    def _keep_recovered_children(
        self, group_key: Layout, group: ChildGroup, error: GroupError
    ) -> bool:
        """Keep probe processes for later probes if they only ran out of memory and can go on.

        Returns False if they failed for another reason, or couldn't release their memory.
        """
        if not error.recovered:
            # another failure, or a silent rank that may be waiting in an all-reduce
            return False
        try:
            kept = group.release_memory(self._timeouts.prepare, self._closed)
        except (GroupError, HostLostError, StoppedError):
            return False
        group.fresh = False
        for position in group_key.active:
            # TensorFlow's allocator keeps what it had and doesn't report it: perhaps all memory
            group.held_bytes[position] = kept.get(position, self._memory.usable_bytes(position))
        with self._lock:
            self._idle[group_key] = group
        return True

    def _should_time_without_loading(self, probe: Probe) -> bool:
        """Return whether a probe should also time steps without data loading.

        The difference shows how long a step waits for data. It is measured in at most MOST_LOOKS
        probes of a layout. It isn't measured again if the layout doesn't wait for data, or if the
        workload can't reuse a batch.
        """
        # such steps are timed in a layout's first probes, if it may become the plan and its batches
        # come from host memory; once if it doesn't wait for input
        explores = probe.stage == Stage.PART or (
            probe.stage == Stage.SOLO and len(self._devices) > 1
        )
        if explores or self._resolved.request.input != "host":
            return False
        with self._lock:
            left = self._looks_left.get(probe.layout, MOST_LOOKS)
            self._looks_left[probe.layout] = max(0, left - 1)
        return left > 0

    def _take_idle(self, group_key: Layout) -> ChildGroup | None:
        with self._lock:
            group = self._idle.pop(group_key, None)
        if group is not None and not group.alive:
            group.end()
            return None
        return group

    def _keep_children(
        self,
        group_key: Layout,
        group: ChildGroup,
        measurement: Timed,
        busy_cores: float | None,
        stop: threading.Event,
    ) -> None:
        """Keep the processes of a probe for later probes, and record how much memory they hold.

        While other probes of the round are still being timed, these processes go on training, so
        that every probe is measured under the same load.
        """
        layout = measurement.probe.layout
        group.fresh = False
        try:
            # devices that share cores or caches slow each other, so the children step until the
            # round ends
            while self._running:
                group.call(lambda _: GO_ON, Ran, self._timeouts.prepare, stop)
            kept = group.release_memory(self._timeouts.prepare, self._closed)
        except (GroupError, HostLostError, StoppedError):
            group.end()  # its earlier measurements are still valid
            return
        with self._lock:
            if busy_cores is not None:
                self._busy_cores[group_key.active[0]] = busy_cores
            for i, peak in enumerate(measurement.memory_bytes):
                if peak is not None:
                    held = self._memory.estimate_held(i, peak)
                    group.held_bytes[i] = kept.get(i, max(held, group.held_bytes.get(i, 0)))
                    if not layout.traits.sharded:
                        self._memory.record_held(i, layout.pass_rows[i], held // layout.processes)
            self._idle[group_key] = group

    def _measure_memory_of_others(self, group_key: Layout, is_unused: bool) -> tuple[int, ...]:
        """Return the bytes that other programs hold on each device.

        Returns an empty tuple if they are unknown. `is_unused` means that no process of this layout
        is running yet. `group_key` is the layout without its sizes.
        """
        if group_key.traits.side_by_side:
            return ()  # under MPS, the memory counts as the daemon's
        with self._lock:
            taken = {position for other in self._idle for position in other.active}
        short = self._hosts.measure_taken_memory(
            group_key.active, set(group_key.active) - taken if is_unused else set()
        )
        with self._lock:
            for position, size in short.items():
                self._memory.record_taken(position, size)
        is_known = any(short.values()) or set(group_key.active) <= short.keys()
        return tuple(short.get(i, 0) for i in range(len(self._devices))) if is_known else ()

    def _warm_up_share(self, probe: Probe, group: ChildGroup) -> int:
        """Return the most rows per device in an extra first step; 0 if no such step is needed.

        TensorFlow traces a function for the first batch size. At the second batch size, it traces
        it once more, for all sizes. The extra step has a smaller batch than the probe, so that both
        traces are done before steps are timed.
        """
        request = self._resolved.request
        traced = (
            self._resolved.framework == "tensorflow" and not request.xla and not probe.layout.knobs
        )
        return WARM_UP_SHARE if traced and group.fresh else 0

    def _start_children(
        self, group_key: Layout, progress: ProgressReporter, stop: threading.Event
    ) -> ChildGroup:
        """Start the processes of a layout, and let them build the workload.

        `group_key` is the layout without its sizes. Raises GroupError if a process fails; the other
        processes are then ended.
        """
        progress.enter("starting")
        assigned = assign_devices(self._resolved, group_key)
        environments = [self._child_environment(devices, group_key) for devices in assigned]
        ranks = map_ranks(self._resolved, group_key, environments, self._busy_cores)
        group = self._start_processes(assigned, environments, ranks)
        started = time.monotonic()
        try:
            group.receive(Ready, self._timeouts.build, stop)
            group.import_seconds = time.monotonic() - started
            progress.enter("building")
            grouped = group_key.traits.together and len(assigned) > 1
            peers = (
                self._hosts.find_addresses([devices[0] for devices in assigned]) if grouped else ()
            )
            commands = build_commands(
                self._resolved, group_key, assigned, environments, ranks, peers
            )
            replies = group.call(lambda rank: commands[rank], Built, self._timeouts.build, stop)
        except BaseException:
            group.end()
            raise
        if grouped and needs_link_check(self._resolved.framework, [each[0] for each in assigned]):
            progress.enter("building")
            self._measure_link(group, group_key, stop)
        facts = cast(Built, replies[0]).facts
        engine = choose_engine(self._resolved, group_key)
        engine = facts.get("engine", engine) if engine not in ("", "auto") else ""
        with self._lock:
            self._facts = add_facts(self._facts, facts, engine, self._resolved)
        return group

    def _measure_link(self, group: ChildGroup, group_key: Layout, stop: threading.Event) -> None:
        """Measure and record the link between the ranks of a new group.

        If that fails, the group is ended, and the error is raised.
        """
        try:
            link = self._measure_all_reduce(group, group_key, stop)
            group.link_speed = link.bytes_per_second
            group.link_path = name_path(
                [self._devices[i] for i in group_key.active], read_switches(os.environ)
            )
        except BaseException:
            group.end()
            raise
        if link.bytes_per_second:
            with self._lock:
                self._facts = msgspec.structs.replace(self._facts, link=link)

    def _measure_all_reduce(
        self, group: ChildGroup, group_key: Layout, stop: threading.Event
    ) -> KnownLink:
        """Time an all-reduce between the ranks.

        Raises GroupError if it hangs or gives wrong results.
        """
        who = " – ".join(self._devices[i].label for i in group_key.active)
        remedy = "evener doctor --links finds the pair, and the variable of NCCL that cures it"
        try:
            replies = group.call(lambda _: MeasureLink(), LinkMeasured, LINK_SECONDS, stop)
        except GroupError as error:
            if error.root.cause != "timeout":
                raise
            why = f"an all-reduce between {who} hangs for over {LINK_SECONDS:.0f} s; {remedy}"
            raise GroupError(RankFailure(error.root.rank, "timeout", why)) from None
        measured = [cast(LinkMeasured, reply).speed for reply in replies]
        speeds = [speed for speed in measured if speed is not None]
        wrong = next((speed.wrong for speed in speeds if speed.wrong), "")
        if wrong:
            why = f"an all-reduce between {who} gives wrong sums ({wrong}); {remedy}"
            raise GroupError(RankFailure(0, "raised", why))
        # the slowest rank counts; 0 if the workload doesn't measure links
        return KnownLink(
            len(group_key.active),
            min((speed.bytes_per_second for speed in speeds), default=0.0),
            max((speed.latency_seconds for speed in speeds), default=0.0),
        )

    def _child_environment(self, devices: Sequence[Device], group_key: Layout) -> ChildEnvironment:
        """Return the environment variables and limits for a probe process on these devices.

        Raises GroupError if the devices can't be limited as requested.
        """
        if (
            group_key.traits.side_by_side and group_key.placement == "mps"
        ):  # a resumed run of an older version
            raise GroupError(RankFailure(0, "unsupported", "Packs use MPS where its daemon runs."))
        try:
            environment: ChildEnvironment = self._hosts.find(devices[0]).ask(
                "make_environment", tuple(devices)
            )
        except HostLostError:
            raise
        except DeviceError as error:
            raise GroupError(RankFailure(0, "unsupported", error.message)) from None
        return environment

    def _start_processes(
        self,
        assigned: Sequence[Sequence[Device]],
        environments: Sequence[ChildEnvironment],
        ranks: RankMap,
    ) -> ChildGroup:
        inbox: Inbox = queue.Queue(1000)
        group = ChildGroup([], inbox, ranks)
        try:
            for rank, (devices, environment) in enumerate(zip(assigned, environments, strict=True)):
                cap = devices[0].usable_memory_bytes if devices[0].on_cpu else None
                group.children.append(
                    self._hosts.find(devices[0]).start_child(rank, inbox, environment, cap)
                )
        except BaseException as error:
            group.end()
            if self._closed.is_set():
                raise StoppedError from None
            if isinstance(error, OSError | RuntimeError | CancelledError):
                raise GroupError(
                    RankFailure(0, "exit", f"no process could be started: {error}")
                ) from None
            raise
        return group

    def _failed(
        self, probe: Probe, failure: RankFailure, phase: str, elapsed_seconds: float
    ) -> OutOfMemory | Failed:
        key = probe.layout.group_key
        devices = self._find_devices(key, failure)
        on_cpus = any(self._devices[i].on_cpu for i in key.active)
        # the memory of CPU slices is the host's; in steps, fewer rows may need less of it
        if failure.killed and phase in ("starting", "building") and not on_cpus:
            failure = msgspec.structs.replace(
                failure,
                out_of_memory=False,
                detail=f"{HOST_MEMORY}, so Linux killed its process",
            )
        if failure.out_of_memory:
            short_bytes: tuple[int, ...] = ()
            with suppress(HostLostError):
                short_bytes = self._measure_memory_of_others(key, True)
            return OutOfMemory(
                probe,
                devices,
                failure.detail,
                elapsed_seconds,
                short_bytes,
                key in self._idle,
                failure.fits_no_rows,
            )
        devices = devices or key.active
        detail = f"{', '.join(self._devices[i].label for i in devices)}, {phase}: {failure.detail}"
        if failure.output.strip() and self._save_output(detail, failure.output):
            what = {"raised": "traceback", "timeout": "stack"}.get(failure.cause, "output")
            detail += f" ({what} in {self._error_file})"
        return Failed(probe, failure.cause, detail, devices, elapsed_seconds, failure.user_code)

    def _find_devices(self, group_key: Layout, failure: RankFailure) -> tuple[int, ...]:
        """Return the positions of the devices on which a rank has failed.

        Returns an empty tuple if the rank's process drives several devices, and its error doesn't
        name a GPU.
        """
        if not runs_in_one_process(self._resolved, group_key):
            return (group_key.active[failure.rank % len(group_key.active)],)
        if len(group_key.active) == 1:
            return group_key.active
        # one process drives several devices: the error may name the one that failed
        return () if failure.gpu is None else group_key.active[failure.gpu : failure.gpu + 1]

    def _explain_stop(self, probe: Probe, progress: ProgressReporter, stack: Stack) -> None:
        """Save the stack of a stopped probe, and report it.

        The report says which line of the user's code was running.
        """
        labels = ", ".join(self._devices[i].label for i in probe.layout.active)
        # the stack is saved if it contains a line of the user's code
        saved = stack.where and self._save_output(
            f"{labels}, {progress.phase}: stopped at {stack.where}", stack.text
        )
        progress.report_stop(stack, f" (stack in {self._error_file})" if saved else "")

    def _save_output(self, title: str, output: str) -> bool:
        """Append a probe process's output to the run's error file, under a title.

        Returns False if that fails, or if the run has no error file.
        """
        if self._error_file is None:
            return False
        with (
            self._lock,
            suppress(OSError),
            self._error_file.open("a", encoding="utf-8", errors="replace") as stream,
        ):
            # a large file doesn't grow any more
            if stream.tell() < LARGEST_ERROR_FILE_BYTES:
                stream.write(f"{title}\n\n{output.strip()}\n\n\n")
            return True
        return False

    def _free_memory(self, probes: tuple[Probe, ...]) -> None:
        """End idle probe processes if the next probes need the memory that they hold."""
        held = {key: group.held_bytes for key, group in self._idle.items()}
        for key in self._memory.groups_to_end(probes, held):
            self._idle.pop(key).end()


def needs_link_check(framework: str, devices: Sequence[Device]) -> bool:
    """Return whether an all-reduce between these devices must be tested before they train.

    This is needed for GPUs under PyTorch: NCCL hangs if the driver reports a path between them that
    the board doesn't have.
    """
    return framework == "torch" and not any(device.on_cpu for device in devices)


def add_facts(known: Facts, reported: Mapping[str, str], engine: str, job: Job) -> Facts:
    """Return the facts about a job, updated by what rank 0 has reported about its build."""
    names = (*_FRAMEWORKS, *(name for backend in all_backends() for name in backend.device_words))
    parts = [job.workload, job.request.settings, reported.get("parameters", "")]
    own = reported.get("digest") or blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()
    by_cost = assigns_by_cost(job.request, job.framework)
    return Facts(
        versions=known.versions | {name: reported[name] for name in names if name in reported},
        driver=known.driver,
        engine=engine or known.engine,
        workload_digest=known.workload_digest or own,
        batch_statistics=reported.get("batch_statistics", ""),
        bfloat16="bfloat16" in reported.get("computes", ""),
        rows=int(reported.get("rows", 0)),
        lengths=tuple(map(int, reported.get("lengths", "").split())) if by_cost else (),
        longest_row=int(reported.get("longest_row", -1)),
        state=ModelState(*map(int, reported["state"].split()))
        if "state" in reported
        else known.state,
        link=known.link,
        gradient_bytes=int(reported.get("gradient_bytes", 0)),
        parameter_bytes=int(reported.get("parameter_bytes", 0)),
        build_seconds=float(reported.get("build_seconds", known.build_seconds)),
        builds_again=reported.get("builds_again", known.builds_again),
    )


Prober = ChildProber | SimulatedProber


def make_prober(
    job: Job,
    start_seconds: float = 0.0,
    error_file: Path | None = None,
    end_seconds: float = math.inf,
    link: KnownLink | None = None,
) -> Prober:
    """Return the prober for a job: a simulated one if its devices are simulated, else a real one.

    - `start_seconds`: initial time of the prober's clock; above 0 for a resumed run.
    - `error_file`: tracebacks of failed processes are appended to this file.
    - `end_seconds`: the time on that clock at which a simulated prober stops.
    - `link`: the speed of the link between the devices, if an earlier run has saved it.
    """
    # the session stops real probes
    if job.machine is not None:
        return SimulatedProber(
            job.machine, job.request.seed, job.request.pace, start_seconds, end_seconds
        )
    return ChildProber(job, start_seconds=start_seconds, error_file=error_file, link=link)
