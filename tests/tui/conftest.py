"""Scripted devices, snapshots, samplers and sessions that drive the screens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from textual.css.stylesheet import Stylesheet

from evener.balancer.events import Event, Finished, Observed, ProbeProgress, ProbeStarted, Started
from evener.balancer.types import (
    Belief,
    Interval,
    Layout,
    Observation,
    OutOfMemory,
    PredictedCurve,
    Probe,
    Result,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.sampler import History, Sampler, Subscriber
from evener.devices.types import Device, DeviceSample, HostSample, ProcessSample, Snapshot, value
from evener.plan import file as plans
from evener.tui.app import EvenerApp
from evener.tui.base_app import BaseApp
from tests.support import launched_plan

GIB = 1024**3
AT_SECONDS = 1_790_000_000.0  # a fixed time, so that pictures don't change


class Script:
    """Makes records that look like a machine's."""

    @staticmethod
    def device(index: int = 0, name: str = "NVIDIA H200", kind: str = "gpu") -> Device:
        return Device(f"{kind}-{index}", index, name, kind, 140 * GIB)

    @classmethod
    def sample(cls, index: int = 0, **changed: Any) -> DeviceSample:
        full = DeviceSample(
            device=cls.device(index),
            utilization_percent=value(max(5, 98 - 6 * index)),
            sm_percent=value(87 - index),
            occupancy_percent=value(12),
            tensor_percent=value(84),
            dram_percent=value(14),
            memory_used_bytes=value((62 + index) * GIB),
            memory_total_bytes=value(140 * GIB),
            temperature_celsius=value(61 + index),
            temperature_limit_celsius=value(89),
            power_watts=value(640 - 9 * index),
            power_limit_watts=value(700),
            clock_mhz=value(1980),
            throttled_percent=value(12 if index == 1 else 0),
            throttle_reasons=("power cap",) if index == 1 else (),
            link_receive_bytes_per_second=value(11e9),
            link_send_bytes_per_second=value(3e9),
            pcie_receive_bytes_per_second=value(4e8),
            pcie_send_bytes_per_second=value(2e7),
            samples_per_second=value(115_932 - 7000 * index),
        )
        return msgspec.structs.replace(full, **changed)

    @staticmethod
    def process(pid: int = 4242, index: int = 0, **changed: Any) -> ProcessSample:
        full = ProcessSample(
            pid=pid,
            start_time=AT_SECONDS - 3600,
            user="ada",
            device_id=f"gpu-{index}",
            device_label=f"GPU:{index}",
            memory_bytes=value((60 + index) * GIB),
            sm_percent=value(87),
            cpu_percent=value(103),
            command=f"python train.py --rank {index}",
            samples_per_second=value(115_000),
        )
        return msgspec.structs.replace(full, **changed)

    @classmethod
    def snapshot(cls, count: int = 2, **changed: Any) -> Snapshot:
        full = Snapshot(
            at_seconds=AT_SECONDS,
            interval_seconds=1.0,
            devices=tuple(cls.sample(index) for index in range(count)),
            processes=tuple(cls.process(4000 + index, index) for index in range(count)),
            host=HostSample(
                cpu_percent=41.0,
                load_1min=3.2,
                memory_used_bytes=62 * GIB,
                memory_total_bytes=256 * GIB,
                cores=32,
                hostname="node7",
            ),
            sampling_seconds=0.002,
            driver="580.159",
        )
        return msgspec.structs.replace(full, **changed)


class ScriptedPublisher(Sampler):
    """A publisher whose snapshots the test pushes."""

    interval_seconds = 1.0
    state = ""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.stopped = False
        self.loads: list[Mapping[str, tuple[float | None, int]]] = []
        self._snapshots = snapshots
        self._history = History(600)
        self._lock = threading.Lock()

    def start(self, subscriber: Subscriber | None = None) -> None:
        assert subscriber is not None
        self._subscriber = subscriber
        for snapshot in self._snapshots:
            self.push(snapshot)

    def push(self, snapshot: Snapshot) -> None:
        self._history.add(snapshot)
        self._subscriber(snapshot)

    def close(self, wait_seconds: float = 0.0) -> bool:
        self.stopped = True
        return True

    def set_loads(self, loads: Mapping[str, tuple[float | None, int]]) -> None:
        self.loads.append(dict(loads))


class ScriptedSession:
    """Plays events. With `hold`, the last ones wait for `stop`."""

    def __init__(self, events: Iterable[Event], hold: bool = False) -> None:
        self._events = list(events)
        self._hold = hold
        self.asked = threading.Event()
        self.calls: list[str] = []

    def events(self) -> Iterator[Event]:
        yield from self._events[:-1]
        if self._hold:
            self.asked.wait(200)
        yield self._events[-1]

    def run(self, report: Callable[[Event], object]) -> None:
        for event in self.events():
            report(event)

    def stop(self) -> None:
        self.calls.append("stop")
        self.asked.set()

    def pause(self) -> None:
        self.calls.append("pause")

    def unpause(self) -> None:
        self.calls.append("unpause")

    def close(self) -> None:
        self.calls.append("close")
        self.asked.set()


class ScriptedSearches:
    """Makes sessions that play these events, and records the requests."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = tuple(events)
        self.requests: list[Any] = []

    def __call__(self, request: Any) -> ScriptedSession:
        self.requests.append(request)
        return ScriptedSession(self._events)


def _timed(layout: Layout, samples_per_second: float, stage: str = "solo", turn: int = 0) -> Timed:
    seconds = layout.global_batch / samples_per_second
    return Timed(
        probe=Probe(layout, stage, 10.0, turn),  # type: ignore[arg-type]
        step_seconds=seconds,
        low_seconds=seconds * 0.995,
        high_seconds=seconds * 1.005,
        steps=40,
        memory_bytes=tuple(None for _ in layout.shares),
        device_seconds=tuple(None for _ in layout.shares),
        first_step_seconds=0.5,
        elapsed_seconds=6.0,
    )


BELIEF = Belief(
    curves=(
        PredictedCurve(0, ((64, 0.094), (1024, 0.76)), 1179, 1310),
        PredictedCurve(1, ((64, 0.117), (710, 0.77)), 744, None),
    ),
    doing="Measures the split that the curves say is fastest.",
)


def _observed(
    seen: Observation,
    probes: int,
    at_seconds: float,
    best: Result | None = None,
    out_of_memory: int = 0,
) -> Observed:
    return Observed(seen, BELIEF, best, probes, out_of_memory, at_seconds)


def make_plan() -> plans.Plan:
    """Return the plan of the scripted search."""
    templates = (
        plans.Share("sim-0-gtx1080ti", 0, "GTX 1080 Ti", 0, 0.0),
        plans.Share("sim-1-gtx1080", 1, "GTX 1080", 0, 0.0),
    )

    def evidence(
        kind: plans.EvidenceKind, name: str, batches: tuple[int, int], speed: float
    ) -> plans.Evidence:
        layout = plans.make_layout("split" if all(batches) else "solo", templates, batches)
        figure = plans.Throughput(speed, speed * 0.995, speed * 1.005)
        return plans.Evidence(name, layout, figure, kind)

    return launched_plan.make_plan(
        plans.make_layout("split", templates, (820, 568)),
        created="2026-09-22T10:13:20Z",
        workload="keras_maxer",
        framework="tensorflow",
        throughput=plans.Throughput(2127.0, 2118.0, 2136.0),
        evidence=(
            evidence("equal_shares", "equal shares", (710, 710), 1801.0),
            evidence("best_device", "best single device", (1024, 0), 1346.0),
            evidence("one_device", "solo SIM:0", (1024, 0), 1346.0),
            evidence("one_device", "solo SIM:1", (0, 710), 925.0),
        ),
        search=plans.SearchSummary(
            6, 1, 47.0, 0, "The winner's interval lies above every rival's."
        ),
        fingerprint=plans.Fingerprint(("GTX 1080 Ti (11178 MiB)",), "", {}, ""),
        warnings=("Measured on simulated devices.",),
    )


def make_events() -> list[Event]:
    """Return a short search: solos, one out of memory, a split, the even split, the verdict."""
    split = _timed(layout_of((820, 568)), 2127.0, "split")
    best = Result(split.probe.layout, Interval(2127.0, 2118.0, 2136.0), 1)
    ran_out = OutOfMemory(Probe(solo(2, 0, 1310), Stage.SOLO, 10.0), (0,), "out of memory", 1.0)
    first = Probe(solo(2, 0, 64), Stage.SOLO, 10.0)
    return [
        Started("20260922-101320-ab12", ("SIM:0", "SIM:1"), "keras_maxer", 120.0, 0),
        ProbeStarted(first, 0.0),
        ProbeProgress(first, "measuring", 683.0, 0.012, 2.0),
        _observed(_timed(solo(2, 0, 64), 683.0), 1, 4.0),
        _observed(_timed(solo(2, 1, 710), 925.0), 2, 5.0),
        _observed(_timed(solo(2, 0, 1024), 1346.0), 3, 11.0),
        _observed(ran_out, 4, 12.0, out_of_memory=1),
        _observed(split, 5, 18.0, best, 1),
        _observed(_timed(layout_of((710, 710)), 1801.0, "race"), 6, 24.0, best, 1),
        Finished(
            make_plan(), (best,), "Split 820 and 568: 18 % faster than equal shares.", False, 47.0
        ),
    ]


@pytest.fixture(autouse=True, scope="session")
def shared_styles() -> Iterator[None]:
    """Parse each style sheet once in this process instead of once per app.

    That takes a sixth of an app's start.
    """
    parsed: dict[Any, Any] = {}
    parse = Stylesheet._parse_rules

    def parse_once(sheet: Stylesheet, *given: Any, **named: Any) -> Any:
        variables = frozenset(sheet._variables.items())
        key = (variables, given, frozenset(named.items()))
        if key not in parsed:
            parsed[key] = parse(sheet, *given, **named)
        return parsed[key]

    with patch.object(Stylesheet, "_parse_rules", parse_once):
        yield


@pytest.fixture
def script() -> type[Script]:
    """Return the maker of scripted records."""
    return Script


@pytest.fixture
def events() -> list[Event]:
    """Return the events of a short search over two devices."""
    return make_events()


@pytest.fixture
def plan() -> plans.Plan:
    """Return a plan for two devices."""
    return make_plan()


@pytest.fixture
def publisher_of() -> type[ScriptedPublisher]:
    """Return a maker of publishers with the given snapshots."""
    return ScriptedPublisher


@pytest.fixture
def session_of() -> type[ScriptedSession]:
    """Return a maker of sessions that play the given events."""
    return ScriptedSession


@pytest.fixture
def searches(events: list[Event]) -> ScriptedSearches:
    """Return a maker of sessions that play `events`."""
    return ScriptedSearches(events)


@pytest.fixture
def quick_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the app replay a run in a second, not five."""
    monkeypatch.setattr(BaseApp.replay, "__defaults__", (40.0,))


@pytest.fixture
def app_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EvenerApp]:
    """Return a maker of apps over scripted snapshots."""
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make(*snapshots: Snapshot, **options: Any) -> EvenerApp:
        feed = ScriptedPublisher(*(snapshots or (Script.snapshot(),)))
        return EvenerApp(
            feed, trainable=(Script.device(0), Script.device(1)), devices="gpu:0,1", **options
        )

    return make
