"""A session's children: started, kept between probes where memory allows, killed and started anew; deaths are data.

A solo probe has a child of its own. A split has one child over all its devices where one process can drive them (GPUs
without limits, in TensorFlow), else a child for each device, which step as a group over loopback.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from hashlib import blake2b
from typing import cast

import msgspec

from evener.balancer.probes.child import Child, Inbox
from evener.balancer.probes.child_group import BrokenError, Mishap, Party, StoppedError
from evener.balancer.probes.interference import Guard
from evener.balancer.probes.launch_plan import (
    Groups,
    Job,
    Key,
    engine_of,
    groups_of,
    key_of,
    one_child,
    orders_of,
    stand_of,
)
from evener.balancer.probes.measurement import Limits, Stand, Trial, Watch
from evener.balancer.probes.memory_budget import Room
from evener.balancer.probes.prober import Facts, Report
from evener.balancer.probes.protocol import Built, Prepare, Prepared, Profile, Profiled, Ready
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Probe, Timed
from evener.devices.child_environment import ChildEnvironment, child_environment
from evener.devices.nvidia.mps import MpsDaemon
from evener.devices.types import Device
from evener.errors import DeviceError

WARM_UP_SHARE = 16  # at most: any other size will do, and a small one is made at once
PORT_TRIES = 3  # a port may be taken between its choice and its use
_PORT_TAKEN = ("address already in use", "failed to bind", "could not start grpc server")
_VERSIONS = ("tensorflow", "keras", "torch", "cuda", "cudnn", "nccl")


class _Standing:
    """A party that is built, and the most that each of its devices held for it."""

    def __init__(self, party: Party, stand: Stand) -> None:
        self.party, self.stand = party, stand
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
        self._room = Room(job.devices)
        self._guard = Guard(job.devices)
        self._busy_cores: dict[int, float] = {}  # position -> cores that a step alone keeps busy
        self._facts = Facts(driver=job.driver)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._mps = MpsDaemon()  # started when a pack asks for it
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
        faults: list[BaseException] = []
        for _ in probes:
            seen = ended.get()
            if isinstance(seen, BaseException):
                faults.append(seen)
            elif seen is not None:
                yield seen
        if faults:
            raise faults[0]

    def profile(self, layout: Layout, steps: int, stop: threading.Event) -> Profiled | str:
        """What moves between devices in steps of a layout, as its first process sees it; or why it can't be told."""
        probe = Probe(layout, "race", 0.0)
        watch = Watch(probe, lambda _: None, self.now)
        self._make_room((probe,))
        try:
            standing = self._start(key_of(layout), watch, stop)
            try:
                shares = tuple(layout.shares[i] for i in dict.fromkeys(standing.stand.positions))
                for _ in range(2):  # TensorFlow traces twice
                    standing.party.order(lambda _: Prepare(shares), Prepared, self._limits.prepare, stop)
                told = standing.party.order(lambda _: Profile(steps), Profiled, self._limits.prepare, stop)
                return cast(Profiled, told[0])
            finally:
                self._end(standing)
        except StoppedError:
            return "it was stopped"
        except BrokenError as broken:
            return broken.first.detail

    def now(self) -> float:
        """Wall seconds since the session began."""
        return time.monotonic() - self._began

    def facts(self) -> Facts:
        """What the children have told."""
        return self._facts

    def close(self) -> None:
        """Kill every child at once."""
        self._closed.set()
        self._starter.shutdown(wait=True, cancel_futures=True)  # who is being born now is ended below, or at birth
        for party in list(self._parties):
            party.end()
        self._idle.clear()
        self._guard.close()
        with self._lock:
            self._mps.close()

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
        self._guard.admit(key.positions, stop)
        with self._lock:
            standing = self._idle.pop(key, None)
        if standing is not None and not standing.party.usable:
            self._end(standing)
            standing = None
        short = self._short_bytes(key, standing is None)
        if standing is None:
            standing = self._start(key, watch, stop)
        try:
            trial = Trial(probe, standing.party, standing.stand, self._limits, watch, self._guard)
            seen = trial.run(self._other_shares(probe, standing), stop, started)
        except BaseException:
            self._end(standing)
            raise
        if standing.fresh:
            seen = msgspec.structs.replace(seen, start_seconds=max(0.0, trial.prepared - started))
        standing.fresh = False
        held = {i: self._room.kept(i, size) for i, size in enumerate(seen.memory_bytes) if size is not None}
        standing.held = {i: max(size, standing.held.get(i, 0)) for i, size in held.items()}
        with self._lock:
            if trial.busy_cores is not None:
                self._busy_cores[key.positions[0]] = trial.busy_cores
            for i, size in held.items():
                self._room.learn(i, probe.layout.shares[i], size // probe.layout.processes)
            self._idle[key] = standing
        return msgspec.structs.replace(seen, short_bytes=short)

    def _short_bytes(self, key: Key, clean: bool) -> tuple[int, ...]:
        """What others hold of each device's memory; empty for nothing. `clean`: no child of this layout lives."""
        if key.kind == "pack":
            return ()  # under MPS, memory is in the daemon's name
        with self._lock:
            taken = {position for other in self._idle for position in other.positions}
        own = {child.pid for party in list(self._parties) for child in party.children}
        alone = set(key.positions) - taken if clean else set()
        short = self._guard.short_bytes(key.positions, own, alone)
        with self._lock:
            for position, size in short.items():
                self._room.shrink(position, size)
        return tuple(short.get(i, 0) for i in range(len(self._job.devices))) if short else ()

    def _other_shares(self, probe: Probe, standing: _Standing) -> tuple[int, ...] | None:
        """TensorFlow traces the first size for itself and the second for all sizes, so a new child sees two."""
        if not standing.fresh or self._job.framework != "tensorflow" or self._job.xla or probe.layout.knobs:
            return None
        shares = tuple(probe.layout.shares[i] for i in dict.fromkeys(standing.stand.positions))
        smaller = tuple(max(1, min(share // 2, WARM_UP_SHARE)) for share in shares)
        return smaller if smaller != shares else None

    def _start(self, key: Key, watch: Watch, stop: threading.Event) -> _Standing:
        """New children, built; BrokenError if one of them dies or refuses."""
        watch.enter("starting")
        groups = groups_of(self._job, key)
        environments = [self._environment(group, key) for group in groups]
        stand = stand_of(self._job, key, environments, self._busy_cores)
        standing = _Standing(self._spawn(groups, environments), stand)
        try:
            standing.party.hear(Ready, self._limits.start, stop)
            watch.enter("building")
            orders = orders_of(self._job, key, groups, environments, stand)
            replies = standing.party.order(lambda rank: orders[rank], Built, self._limits.build, stop)
        except BaseException:
            self._end(standing)
            raise
        facts = cast(Built, replies[0]).facts
        asked = engine_of(self._job, key)
        self._learn(facts, facts.get("engine", asked) if asked not in ("", "auto") else "")
        return standing

    def _environment(self, group: list[Device], key: Key) -> ChildEnvironment:
        """How a child is started; BrokenError if it needs an MPS daemon and none comes up."""
        environment = child_environment(group, self._job.framework)
        if key.kind != "pack" or key.placement != "mps":
            return environment
        try:
            with self._lock:
                if self._closed.is_set():
                    raise StoppedError
                variables = self._mps.variables()
        except DeviceError as error:
            raise BrokenError((Mishap(0, False, "unsupported", error.message),)) from None
        return msgspec.structs.replace(environment, variables=environment.variables | variables)

    def _spawn(self, groups: Groups, environments: list[ChildEnvironment]) -> Party:
        inbox: Inbox = queue.Queue(1000)

        def start() -> Party:
            children: list[Child] = []
            try:
                for rank, (group, environment) in enumerate(zip(groups, environments, strict=True)):
                    cap = group[0].usable_memory_bytes if group[0].kind == "cpu" else None
                    children.append(Child(rank, inbox, environment, cap))
                    if self._closed.is_set():
                        raise StoppedError
            except BaseException:
                for child in children:
                    child.end()
                raise
            party = Party(tuple(children), inbox)
            self._parties.add(party)
            return party

        try:
            return self._starter.submit(start).result()
        except (OSError, RuntimeError, CancelledError) as error:
            if self._closed.is_set():
                raise StoppedError from None
            raise BrokenError((Mishap(0, False, "exit", f"no process could be started: {error}"),)) from None

    def _learn(self, facts: dict[str, str], engine: str) -> None:
        with self._lock:
            known = self._facts
            versions = known.versions | {name: facts[name] for name in _VERSIONS if name in facts}
            if self._job.framework in ("tensorflow", "torch") and "version" in facts:
                versions.setdefault(self._job.framework, facts["version"])
            # the model's own digest where it has one: it is what a training script compares with its model
            parts = [self._job.workload, self._job.settings, facts.get("parameters", "")]
            own = facts.get("digest") or blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()
            digest = known.workload_digest or own
            self._facts = Facts(versions, known.driver, engine or known.engine, digest)

    def _mishap(self, probe: Probe, mishap: Mishap, phase: str, elapsed_seconds: float) -> Observation:
        key = key_of(probe.layout)
        devices = key.positions
        if not one_child(self._job, key):
            devices = (key.positions[mishap.rank % len(key.positions)],)
        elif len(key.positions) > 1:
            devices = () if mishap.gpu is None else key.positions[mishap.gpu : mishap.gpu + 1]
        if mishap.out_of_memory:
            return OutOfMemory(probe, devices, mishap.detail, elapsed_seconds, self._short_bytes(key, True))
        labels = ", ".join(self._job.devices[i].label for i in devices or key.positions)
        detail = f"{labels}, {phase}: {mishap.detail}"
        return Failed(probe, mishap.cause, detail, devices or key.positions, elapsed_seconds)

    def _make_room(self, probes: tuple[Probe, ...]) -> None:
        """End idle children that would leave the coming ones too little memory."""
        for key in self._room.too_many(probes, {key: standing.held for key, standing in self._idle.items()}):
            self._end(self._idle.pop(key))

    def _end(self, standing: _Standing) -> None:
        standing.party.end()
        self._parties.discard(standing.party)
