"""Measures the links between devices by all-reduces.

Each pair of devices is measured, and all devices together. They are first measured over the
driver's default transport, and then with some of NCCL's transports disabled. Variables of the
user's environment that disable transports are ignored in these measurements. If they select a
combination of transports that isn't among the measured ones, it is measured too.

Each rank has its own process, and each reply has a deadline. If an all-reduce hangs, its devices
are reported and the other links are still measured. An all-reduce may hang or give wrong sums over
the default transport. It is then tried again with some transports disabled, to find environment
variables that make it work.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from evener.devices.registry import child_environment, find_backend, import_path
from evener.devices.types import Device
from evener.system.memory_files import make_memory_file

from .link_rank import (
    Arrived,
    Join,
    Joined,
    LinkCommand,
    LinkReply,
    RankFailed,
    RankReady,
    Sum,
    Summed,
)

START_SECONDS = 120.0  # timeout in seconds for the first rank to import its framework
LATE_SECONDS = 15.0  # timeout in seconds for the other ranks, after the first one
JOIN_SECONDS = 15.0  # timeout in seconds for all ranks to rendezvous
SUM_SECONDS = 15.0  # timeout in seconds for the sums of a measurement; they take a second or two
LONGEST_LINE = 1 << 16
PROGRAM = (sys.executable, "-P", "-m", "evener.balancer.probes.link_rank")

# the variables of NCCL that choose how GPUs of one host exchange data
P2P_OFF, P2P_LEVEL, SHARED_OFF = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"
NEVER_P2P = ("LOC", "0")  # levels that switch P2P off
NO_P2P = "PCIe, no P2P"  # the path between two devices without P2P
SET_HERE: Final = "as set here"
Transport = Literal["as it is", "no P2P", "sockets", "as set here"]
# as the driver has it, and with transports disabled; `SET_HERE` depends on the environment
TRANSPORTS: Mapping[Transport, Mapping[str, str]] = {
    "as it is": {},
    "no P2P": {P2P_OFF: "1"},
    "sockets": {P2P_OFF: "1", SHARED_OFF: "1"},
}
Outcome = Literal["ok", "hangs", "wrong", "failed"]
_Reply = TypeVar("_Reply", RankReady, Arrived, Joined, Summed)


# the stored names of fields, as in files of earlier versions
STORED = {"transport": "way", "remedy": "cure", "ranks_met": "met"}


class LinkMeasurement(msgspec.Struct, frozen=True, rename=STORED):
    """Bandwidth and latency of an all-reduce between devices, or how it failed."""

    devices: tuple[str, ...]  # labels
    transport: Transport
    outcome: Outcome
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    detail: str = ""
    ranks_met: bool = True  # False if the ranks hadn't joined, so that the link isn't at fault
    remedy: str = ""  # the variables with which it works, such as NCCL_P2P_DISABLE=1
    path: str = ""  # path between the devices, such as NVLink; empty: unknown
    variables: str = ""  # for "as set here": the variables that were set


class RankTask(NamedTuple):
    """What ranks are doing, for error messages: two verb forms, such as "join" and "joined"."""

    verb: str
    past: str


START = RankTask("start", "started")
JOIN = RankTask("join", "joined the others")
END = RankTask("end its all-reduce", "ended its all-reduce")


class LinkError(Exception):
    """An all-reduce failed or hung, so the speed of the link can't be measured."""

    def __init__(self, outcome: Outcome, detail: str, ranks_met: bool) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome
        self.detail = detail
        self.ranks_met = ranks_met  # True if the ranks had joined before the error

    def describe(self, labels: tuple[str, ...], transport: Transport) -> LinkMeasurement:
        """Return a LinkMeasurement with this error, for the devices with these labels."""
        return LinkMeasurement(
            labels, transport, self.outcome, detail=self.detail, ranks_met=self.ranks_met
        )


def measure_links(
    devices: Sequence[Device],
    report: Callable[[LinkMeasurement], None] = lambda _: None,
    program: Sequence[str] = PROGRAM,
) -> tuple[LinkMeasurement, ...]:
    """Measure all-reduces between each pair of devices, and between all of them together.

    GPUs are measured over each transport. If a link fails over NCCL's default transport, this
    function also looks for environment variables that make it work. `report` is called after each
    measurement; `program` is the command that runs a rank.
    """
    sets: list[tuple[int, ...]] = [*combinations(range(len(devices)), 2)]
    if len(devices) > 2:
        sets.append(tuple(range(len(devices))))
    on_gpus = not any(device.on_cpu for device in devices)
    transports: list[Transport] = [*TRANSPORTS] if on_gpus else ["as it is"]
    if find_transport(devices) == SET_HERE:
        transports.append(SET_HERE)
    found: list[LinkMeasurement] = []
    for transport in transports:
        for measurement in _measure_over_transport(devices, sets, transport, program):
            report(measurement)
            if measurement.outcome != "ok" and measurement.ranks_met and transport == "as it is":
                members = [device for device in devices if device.label in measurement.devices]
                measurement = msgspec.structs.replace(
                    measurement, remedy=find_remedy(members, program)
                )
            found.append(measurement)
    return tuple(found)


def find_remedy(devices: Sequence[Device], program: Sequence[str] = PROGRAM) -> str:
    """Return NCCL environment variables that make an all-reduce work between these devices.

    The result has the form "NCCL_P2P_DISABLE=1"; "" if no variables help. `program` is the command
    that runs a rank.
    """
    everyone = [tuple(range(len(devices)))]
    for transport, variables in TRANSPORTS.items():
        if not variables:
            continue
        (measurement,) = _measure_over_transport(devices, everyone, transport, program)
        if measurement.outcome == "ok":
            return write_variables(variables)
    return ""


def read_switches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the NCCL variables of an environment that switch transports off.

    Settings that mean the same give the same result: for example, a P2P level of "LOC" becomes
    NCCL_P2P_DISABLE=1.
    """
    found = {}
    for name in (P2P_OFF, SHARED_OFF):
        if environment.get(name, "") not in ("", "0"):
            found[name] = "1"
    level = environment.get(P2P_LEVEL, "")
    if level in NEVER_P2P:
        found[P2P_OFF] = "1"
    elif level and P2P_OFF not in found:
        found[P2P_LEVEL] = level
    return dict(sorted(found.items()))


def find_transport(devices: Sequence[Device]) -> Transport:
    """Return the NCCL transport that environment variables select for these devices."""
    # the variables concern only GPUs
    switches = {} if any(device.on_cpu for device in devices) else read_switches(os.environ)
    for transport, variables in TRANSPORTS.items():
        if variables == switches:
            return transport
    return SET_HERE


def switches_of(transport: Transport) -> Mapping[str, str]:
    """Return the NCCL environment variables that select this transport."""
    return read_switches(os.environ) if transport == SET_HERE else TRANSPORTS[transport]


def name_path(devices: Sequence[Device], switches: Mapping[str, str]) -> str:
    """Return the slowest path between devices of one host, such as "NVLink".

    Returns "" if it is unknown. `switches` are NCCL environment variables with their values. If
    they switch off P2P, the result says so.
    """
    kinds = {device.kind for device in devices}
    if len(kinds) > 1 or any(device.host for device in devices):
        return ""
    backend = find_backend(kinds.pop())
    paths = {backend.name_path(*pair) for pair in combinations(devices, 2)}
    slowest = "" if "" in paths else max(paths, key=len, default="")
    if slowest and slowest != NO_P2P and P2P_OFF in switches:
        return f"{slowest}, off by {P2P_OFF}"
    return slowest


def write_variables(variables: Mapping[str, str]) -> str:
    """Write environment variables as in a shell command, such as "A=1 B=2"."""
    return " ".join(f"{name}={text}" for name, text in variables.items())


def _measure_over_transport(
    devices: Sequence[Device],
    index_sets: Sequence[tuple[int, ...]],
    transport: Transport,
    program: Sequence[str],
) -> Iterator[LinkMeasurement]:
    """Measure all-reduces within each set of devices over one NCCL transport.

    `index_sets` lists the indices of the devices in each set. Yields one measurement for each set.
    """
    group: LinkGroup | None = None
    everyone = tuple(range(len(devices)))
    if len(index_sets) > 1:
        try:
            group = LinkGroup(devices, switches_of(transport), index_sets, program)
        except LinkError as fault:
            labels = tuple(device.label for device in devices)
            yield fault.describe(labels, transport)
            index_sets = [members for members in index_sets if members != everyone]
    try:
        for members in index_sets:
            chosen = [devices[i] for i in members]
            labels = tuple(device.label for device in chosen)
            if group is None:
                yield _measure_with_new_processes(chosen, labels, transport, program)
                continue
            try:
                yield _describe(chosen, transport, group.measure(members))
            except LinkError as fault:
                # each remaining set gets new processes
                group.close()
                group = None
                yield fault.describe(labels, transport)
    finally:
        if group is not None:
            group.close()


def _measure_with_new_processes(
    devices: Sequence[Device], labels: tuple[str, ...], transport: Transport, program: Sequence[str]
) -> LinkMeasurement:
    """Measure a single set of devices in processes that are started for this measurement.

    This is done after other processes have failed, or if there is only one set to measure.
    """
    group: LinkGroup | None = None
    try:
        everyone = tuple(range(len(devices)))
        group = LinkGroup(devices, switches_of(transport), [everyone], program)
        return _describe(devices, transport, group.measure(everyone))
    except LinkError as fault:
        return fault.describe(labels, transport)
    finally:
        if group is not None:
            group.close()


def _describe(devices: Sequence[Device], transport: Transport, summed: Summed) -> LinkMeasurement:
    return LinkMeasurement(
        tuple(device.label for device in devices),
        transport,
        "wrong" if summed.wrong else "ok",
        summed.bytes_per_second,
        summed.latency_seconds,
        summed.wrong,
        path=name_path(devices, switches_of(transport)),
        variables=write_variables(switches_of(transport)) if transport == SET_HERE else "",
    )


class LinkGroup:
    """Processes that form a process group to measure links: one rank on each device.

    `rank_sets` are the sets of ranks that will be measured. Raises LinkError if the ranks can't
    form the group.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        variables: Mapping[str, str],
        rank_sets: Sequence[tuple[int, ...]],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._devices = devices
        self._sets = tuple(rank_sets)
        self._ranks: list[_RankProcess] = []
        try:
            for device in devices:
                self._ranks.append(_RankProcess(device, variables, program))
            self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> None:
        everyone = range(len(self._ranks))
        self._receive_replies(RankReady, everyone, START_SECONDS, START, LATE_SECONDS)
        file = make_memory_file()
        world = len(self._ranks)
        until = time.monotonic() + JOIN_SECONDS
        for rank, process in enumerate(self._ranks):
            process.send(Join(file, rank, world, process.place, JOIN_SECONDS, self._sets))
        self._receive_replies(Arrived, everyone, JOIN_SECONDS, JOIN)
        self._receive_replies(Joined, everyone, until - time.monotonic(), JOIN)

    def measure(self, members: tuple[int, ...]) -> Summed:
        """Time all-reduces among these ranks, and return the results of the slowest rank.

        Raises LinkError if a rank fails or hangs.
        """
        for rank in members:
            self._ranks[rank].send(Sum(members))
        replies = self._receive_replies(Summed, members, SUM_SECONDS, END)
        return Summed(
            max(reply.latency_seconds for reply in replies),
            min(reply.bytes_per_second for reply in replies),
            next((reply.wrong for reply in replies if reply.wrong), ""),
        )

    def close(self) -> None:
        """Kill all processes."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()

    def _receive_replies(
        self,
        kind: type[_Reply],
        members: Sequence[int],
        seconds: float,
        task: RankTask,
        late_seconds: float | None = None,
    ) -> list[_Reply]:
        """Wait for a reply of this kind from each member; return them in the order of `members`.

        `task` says what the ranks are doing, for error messages. If `late_seconds` is given, the
        other ranks have only this long after the first reply. Raises LinkError if a rank fails or
        doesn't reply in time.
        """
        began = time.monotonic()
        until = began + seconds
        waiting = set(members)
        found: dict[int, _Reply] = {}
        while waiting:
            streams = {self._ranks[rank].replies: rank for rank in waiting}
            ready = [stream for stream, rank in streams.items() if self._ranks[rank].has_reply]
            if not ready:
                left_s = max(0.0, until - time.monotonic())
                ready, _, _ = select.select(list(streams), [], [], left_s)
            if not ready:
                silent = self._name_silent(waiting, members, task, until - began)
                raise LinkError("hangs", silent, task is END)
            for stream in ready:
                rank = streams[stream]
                reply = self._ranks[rank].receive()
                if not isinstance(reply, kind):
                    why = f"{self._devices[rank].label}: {_explain(reply)}"
                    raise LinkError("failed", why, task is END)
                found[rank] = reply
                waiting.discard(rank)
                if late_seconds is not None and len(found) == 1:
                    until = min(until, time.monotonic() + late_seconds)
        return [found[rank] for rank in members]

    def _name_silent(
        self, waiting: set[int], members: Sequence[int], task: RankTask, seconds: float
    ) -> str:
        if len(waiting) == len(members):
            return f"no rank {task.past} within {seconds:.0f} s"
        who = ", ".join(self._devices[rank].label for rank in sorted(waiting))
        return f"{who} didn't {task.verb} within {seconds:.0f} s, and the others wait"


def _explain(reply: LinkReply | None) -> str:
    if isinstance(reply, RankFailed):
        return reply.error
    return "its process ended" if reply is None else "an answer to another command"


class _RankProcess:
    """The process of one rank, which uses one device."""

    def __init__(
        self, device: Device, variables: Mapping[str, str], program: Sequence[str]
    ) -> None:
        environment = child_environment([device], "torch")
        self.place = find_backend(device.kind).name_in("torch", 0)
        loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        path = {"PYTHONPATH": import_path(os.environ.get("PYTHONPATH", ""))}
        switches = (P2P_OFF, P2P_LEVEL, SHARED_OFF)
        own = {name: text for name, text in os.environ.items() if name not in switches}
        inherited = {**own, **environment.variables, **loopback, **path, **variables}
        cores = environment.cores
        self._process = subprocess.Popen(
            list(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited,
            start_new_session=True,
        )
        if cores:
            with suppress(OSError):  # it has exited
                os.sched_setaffinity(self._process.pid, cores)
        assert self._process.stdout is not None
        self.replies = self._process.stdout.fileno()
        self._buffer = b""
        self._decoder: msgspec.json.Decoder[LinkReply] = msgspec.json.Decoder(LinkReply)

    def send(self, command: LinkCommand) -> None:
        """Send a command; this has no effect if the process has exited."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()

    @property
    def has_reply(self) -> bool:
        """Whether a complete reply is waiting in the buffer."""
        return b"\n" in self._buffer

    def receive(self) -> LinkReply | None:
        """Return the next reply.

        Returns None if the process has ended, or wrote something else.
        """
        while b"\n" not in self._buffer and len(self._buffer) < LONGEST_LINE:
            # this blocks, so call it only once a part of a reply has arrived
            piece = os.read(self.replies, LONGEST_LINE)
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        with suppress(msgspec.DecodeError):
            return self._decoder.decode(line)
        return None

    def kill(self) -> None:
        """Kill the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process has exited, and close its streams."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # input that it no longer read
                    stream.close()
