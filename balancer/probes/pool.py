"""A session's children: started, kept between probes where memory allows, killed and started anew; deaths are data.

A solo probe has a child of its own. A split has one child over all its devices where one process can drive them (GPUs
without limits, in TensorFlow), else a child for each device, which step as a group over loopback.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from typing import Any, cast

import msgspec

from balancer.probes.child import Child, Inbox
from balancer.probes.party import BrokenError, Mishap, Party, StoppedError
from balancer.probes.prober import Facts, Report
from balancer.probes.procfs import available_memory
from balancer.probes.protocol import Build, Built, Ready
from balancer.probes.trial import Limits, Stand, Trial, Watch
from balancer.records import Failed, Layout, Observation, OutOfMemory, Probe, Timed
from devices.base import Device
from devices.environment import ChildEnvironment, child_environment
from workloads.base import Input, Place, Precision

PORT_TRIES = 3  # a port may be taken between its choice and its use
MIXED: Precision = "mixed_bfloat16"  # what the knob "mixed" means: no loss scaling is needed
KEPT_MEMORY = 0.92  # of a device, for all children that hold some
LOW_HOST_MEMORY_BYTES = 1 << 30
_PORT_TAKEN = ("address already in use", "failed to bind", "could not start grpc server")
_VERSIONS = ("tensorflow", "keras", "torch", "cuda", "cudnn", "nccl")


class Job(msgspec.Struct, frozen=True):
    """What the children train, and on what."""

    devices: tuple[Device, ...]
    workload: str
    framework: str  # tensorflow | torch | none
    settings: dict[str, Any] = {}
    precision: Precision = "float32"
    xla: bool = False
    input: Input = "host"
    driver: str = ""


class Key(msgspec.Struct, frozen=True):
    """Which children can run a layout: its devices and how it lies on them."""

    kind: str
    positions: tuple[int, ...]
    processes: int
    placement: str
    knobs: tuple[str, ...]


class _Standing:
    """A party that is built, and the most that each of its devices held for it."""

    def __init__(self, party: Party, stand: Stand, engine: str) -> None:
        self.party, self.stand, self.engine = party, stand, engine
        self.held: dict[int, int] = {}
        self.fresh = True


class ChildProber:
    """A Prober over real children."""

    def __init__(self, job: Job, limits: Limits | None = None, start_seconds: float = 0.0) -> None:
        self._job = job
        self._limits = limits or Limits()
        self._began = time.monotonic() - start_seconds
        self._idle: dict[Key, _Standing] = {}
        self._parties: set[Party] = set()
        self._peaks: dict[int, dict[int, int]] = {}  # position -> share -> bytes that a process held for it
        self._facts = Facts(driver=job.driver)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # the kernel ends a child with the *thread* that started it, so one thread that lasts starts them all
        self._starter = ThreadPoolExecutor(1, "child starter")

    def measure(
        self, probes: tuple[Probe, ...], report: Report, stop: threading.Event, beside: tuple[Probe, ...] = ()
    ) -> Iterator[Observation]:
        """All probes at once, each driven by a thread of its own."""
        self._make_room(probes)
        ended: queue.SimpleQueue[Observation | BaseException | None] = queue.SimpleQueue()

        def drive(probe: Probe) -> None:
            try:
                ended.put(self._observe(probe, report, stop))
            except BaseException as error:
                ended.put(error)

        for probe in probes:
            threading.Thread(target=drive, args=(probe,), name="probe", daemon=True).start()
        for _ in probes:
            seen = ended.get()
            if isinstance(seen, BaseException):
                raise seen
            if seen is not None:
                yield seen

    def now(self) -> float:
        """Wall seconds since the session began."""
        return time.monotonic() - self._began

    def facts(self) -> Facts:
        """What the children have told."""
        return self._facts

    def close(self) -> None:
        """Kill every child at once."""
        self._closed.set()
        for party in list(self._parties):
            party.end()
        self._idle.clear()
        self._starter.shutdown(wait=False, cancel_futures=True)

    def _observe(self, probe: Probe, report: Report, stop: threading.Event) -> Observation | None:
        """Measure with the children that stand, or new ones; again if somebody took a port of theirs."""
        started = time.monotonic()
        watch = Watch(probe, report, self.now)
        for left in reversed(range(PORT_TRIES)):
            try:
                return self._attempt(probe, watch, stop, started)
            except StoppedError:
                return None
            except BrokenError as broken:
                if self._closed.is_set():
                    return None
                first = broken.first
                if not left or not any(sign in first.detail.lower() for sign in _PORT_TAKEN):
                    return self._mishap(probe, first, watch.phase, time.monotonic() - started)
        raise AssertionError("unreachable")

    def _attempt(self, probe: Probe, watch: Watch, stop: threading.Event, started: float) -> Timed:
        key = key_of(probe.layout)
        with self._lock:
            standing = self._idle.pop(key, None)
        if standing is not None and not standing.party.usable:
            self._end(standing)
            standing = None
        if standing is None:
            standing = self._start(key, watch, stop)
        try:
            trial = Trial(probe, standing.party, standing.stand, self._limits, watch)
            seen = trial.run(self._other_shares(probe, standing), stop, started)
        except BaseException:
            self._end(standing)
            raise
        if standing.fresh:
            seen = msgspec.structs.replace(seen, start_seconds=max(0.0, trial.prepared - started))
        standing.fresh = False
        held = {i: size for i, size in enumerate(seen.memory_bytes) if size is not None}
        standing.held = {i: max(size, standing.held.get(i, 0)) for i, size in held.items()}
        with self._lock:
            for i, size in held.items():
                self._peaks.setdefault(i, {})[probe.layout.shares[i]] = size
            self._idle[key] = standing
        return seen

    def _other_shares(self, probe: Probe, standing: _Standing) -> tuple[int, ...] | None:
        """TensorFlow traces the first size for itself and the second for all sizes, so a new child sees two."""
        if not standing.fresh or self._job.framework != "tensorflow" or self._job.xla or probe.layout.knobs:
            return None
        shares = tuple(probe.layout.shares[i] for i in dict.fromkeys(standing.stand.positions))
        smaller = tuple(max(1, share // 2) for share in shares)
        return smaller if smaller != shares else None

    def _start(self, key: Key, watch: Watch, stop: threading.Event) -> _Standing:
        """New children, built; BrokenError if one of them dies or refuses."""
        watch.enter("starting")
        devices = [self._job.devices[i] for i in key.positions]
        engine = self.engine(key)
        groups = [devices] if engine == "towers" or key.kind == "place" else [[device] for device in devices]
        groups *= key.processes
        environments = [child_environment(group, self._job.framework) for group in groups]
        standing = _Standing(self._spawn(groups, environments), _stand(key, devices, len(groups), environments), engine)
        try:
            standing.party.hear(Ready, self._limits.start, stop)
            watch.enter("building")
            orders = self._orders(key, groups, environments, engine)
            replies = standing.party.order(lambda rank: orders[rank], Built, self._limits.build, stop)
        except BaseException:
            self._end(standing)
            raise
        self._learn(cast(Built, replies[0]).facts, engine)
        return standing

    def _spawn(self, groups: list[list[Device]], environments: list[ChildEnvironment]) -> Party:
        inbox: Inbox = queue.Queue(1000)

        def start() -> Party:
            children: list[Child] = []
            for rank, (group, environment) in enumerate(zip(groups, environments, strict=True)):
                cap = group[0].usable_memory_bytes if group[0].kind == "cpu" else None
                children.append(Child(rank, inbox, environment, cap))
            party = Party(tuple(children), inbox)
            self._parties.add(party)
            return party

        try:
            party = self._starter.submit(start).result()
        except (OSError, RuntimeError) as error:
            if self._closed.is_set():
                raise StoppedError from None
            raise BrokenError((Mishap(0, False, "exit", f"no process could be started: {error}"),)) from None
        if self._closed.is_set():
            party.end()
        return party

    def _orders(
        self, key: Key, groups: list[list[Device]], environments: list[ChildEnvironment], engine: str
    ) -> list[Build]:
        job = self._job
        grouped = key.kind == "split" and len(groups) > 1
        peers = tuple(f"127.0.0.1:{port}" for port in free_ports(len(groups))) if grouped else ()
        orders = []
        for rank, (group, environment) in enumerate(zip(groups, environments, strict=True)):
            first = group[0]
            place = Place(
                devices=tuple(f"{'CPU' if first.kind == 'cpu' else 'GPU'}:{i}" for i in range(len(group))),
                memory_limit_bytes=tuple(self._framework_limit(device) for device in group),
                rank=rank if grouped else 0,
                peers=peers,
                threads=environment.threads,
                engine=engine or "auto",
                precision=MIXED if "mixed" in key.knobs else job.precision,
                xla=job.xla or "xla" in key.knobs,
                input=job.input,
                placement=key.placement,
            )
            slowed = first.kind == "cpu" and first.limit.percent is not None
            compute = (first.limit.percent or 100.0) / 100 if slowed else 1.0
            room = environment.address_space_bytes
            parallelism = float(environment.threads or 1)
            orders.append(Build(job.workload, job.framework, job.settings, place, compute, parallelism, room))
        return orders

    def _framework_limit(self, device: Device) -> int | None:
        """The cap that the workload itself sets; TensorFlow's and torch's on CPU slices are set from outside."""
        if device.kind == "gpu" or self._job.framework == "none":
            return device.limit.memory_bytes
        return None

    def engine(self, key: Key) -> str:
        """How a split over these devices is kept in step; empty for a layout without a choice."""
        devices = [self._job.devices[i] for i in key.positions]
        if key.kind != "split":
            return ""
        if self._job.framework == "torch":
            return "ddp"
        if self._job.framework == "none":
            return "auto"
        free = all(device.kind == "gpu" and not device.limit for device in devices)
        return "towers" if free else "multiworker"

    def _learn(self, facts: dict[str, str], engine: str) -> None:
        with self._lock:
            known = self._facts
            versions = known.versions | {name: facts[name] for name in _VERSIONS if name in facts}
            if self._job.framework in ("tensorflow", "torch") and "version" in facts:
                versions.setdefault(self._job.framework, facts["version"])
            parts = [self._job.workload, self._job.settings, facts.get("digest", ""), facts.get("parameters", "")]
            digest = known.workload_digest or blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()
            engine = engine if engine not in ("", "auto") else known.engine
            self._facts = Facts(versions, known.driver, engine, digest)

    def _mishap(self, probe: Probe, mishap: Mishap, phase: str, elapsed_seconds: float) -> Observation:
        key = key_of(probe.layout)
        one_child = key.kind == "place" or self.engine(key) == "towers"
        devices = key.positions
        if not one_child:
            devices = (key.positions[mishap.rank % len(key.positions)],)
        elif len(key.positions) > 1:
            devices = () if mishap.gpu is None else key.positions[mishap.gpu : mishap.gpu + 1]
        if mishap.out_of_memory:
            return OutOfMemory(probe, devices, mishap.detail, elapsed_seconds)
        labels = ", ".join(self._job.devices[i].label for i in devices or key.positions)
        detail = f"{labels}, {phase}: {mishap.detail}"
        return Failed(probe, mishap.cause, detail, devices or key.positions, elapsed_seconds)

    def _make_room(self, probes: tuple[Probe, ...]) -> None:
        """End idle children that would leave the coming ones too little memory; the ones that are wanted stay."""
        wanted = {key_of(probe.layout) for probe in probes}
        needs: dict[int, int | None] = {}
        for probe in probes:
            copies = probe.layout.processes
            for position in probe.layout.active:
                most = self._most(position, probe.layout.shares[position])
                needs[position] = None if most is None else most * copies
        low = (available_memory() or LOW_HOST_MEMORY_BYTES) < LOW_HOST_MEMORY_BYTES
        for key, standing in list(self._idle.items()):
            if key in wanted:
                continue
            shared = [position for position in key.positions if position in needs]
            if low or any(self._crowded(position, needs[position], wanted) for position in shared):
                self._idle.pop(key)
                self._end(standing)

    def _most(self, position: int, share: int) -> int | None:
        """At most what a process will hold, by what others held: memory rises with the share, no faster than it."""
        known = self._peaks.get(position, {})
        return min((round(size * max(1.0, share / seen)) for seen, size in known.items()), default=None)

    def _crowded(self, position: int, need: int | None, wanted: set[Key]) -> bool:
        """Whether a GPU could not hold all idle children and one that needs so much; unknown counts as everything."""
        device = self._job.devices[position]
        if device.kind != "gpu":
            return False
        usable = device.usable_memory_bytes
        if need is None or usable is None:
            return True
        held = {key: standing.held.get(position, 0) for key, standing in self._idle.items()}
        own = max((held[key] for key in wanted if key in held), default=0)  # an allocator keeps what it once had
        others = sum(size for key, size in held.items() if key not in wanted)
        return max(need, own) + others > KEPT_MEMORY * usable

    def _end(self, standing: _Standing) -> None:
        standing.party.end()
        self._parties.discard(standing.party)


def key_of(layout: Layout) -> Key:
    """The children that a layout needs; solo probes and packs of a device share nothing."""
    return Key(layout.kind, layout.active, layout.processes, layout.placement, layout.knobs)


def _stand(key: Key, devices: list[Device], children: int, environments: list[ChildEnvironment]) -> Stand:
    one_child = children == 1 and len(devices) > 1
    own_cores = all(device.kind == "cpu" for device in devices)
    return Stand(key.positions * key.processes, key.kind == "split", one_child, own_cores, environments[0].threads or 1)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has at this moment."""
    with _all_open(count) as listeners:
        return [listener.getsockname()[1] for listener in listeners]


class _all_open:  # noqa: N801 - read as a statement
    def __init__(self, count: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]

    def __enter__(self) -> list[socket.socket]:
        return self._listeners

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            with suppress(OSError):
                listener.close()
