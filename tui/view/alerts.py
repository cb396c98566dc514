"""Alerts about devices (hot, throttled, idle or silent) and about slow or silent training runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, Snapshot, State
from evener.live.files import Training
from evener.printable import plain

BELOW_LIMIT = 3.0  # °C below the temperature at which a device throttles itself
IDLE_PERCENT = 5.0
SECONDS = {  # seconds that a problem must last before it is reported
    "hot": 10.0,
    "throttled": 30.0,
    "idle": 60.0,
    "silent": 10.0,
    "below plan": 300.0,
}
SILENT_REPORT_SECONDS = 30.0  # a training is silent if its report is late by more seconds


class Alert(NamedTuple):
    """A problem with a device or training run that has lasted long enough to report.

    - `kind`: "hot", "throttled", "idle", "silent" or "below plan".
    - `about`: the key of the device or the id of the training run; for a run without an id, "pid "
      followed by its process id.
    - `label`: the name to show for the device or training run.
    - `at_seconds`: when it was raised, in Unix seconds.
    """

    kind: str
    about: str
    label: str
    text: str
    at_seconds: float = 0.0


class AlertRules(NamedTuple):
    """The thresholds of alerts.

    An alert is raised for a device that is throttled for more than `throttled_percent` of the
    time, and for a training run below `plan_percent` of its plan's samples/s.
    """

    throttled_percent: float = 20.0
    plan_percent: float = 90.0


class AlertWatch:
    """Raises one alert for each problem that lasts long enough."""

    def __init__(self, rules: AlertRules) -> None:
        self.rules = rules
        self._since: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()

    def update(self, snapshot: Snapshot) -> tuple[Alert, ...]:
        """Return the alerts that a new reading of the devices raises.

        Each kind of problem must last for its time in `SECONDS` before it is reported. It is
        reported again only if it has disappeared and come back.
        """
        now = snapshot.at_seconds
        found = {(one.kind, one.about): one for one in find_alerts(snapshot, self.rules)}
        self._since = {key: self._since.get(key, now) for key in found}
        self._reported &= found.keys()
        new = []
        for key, alert in found.items():
            if key not in self._reported and now - self._since[key] >= SECONDS[alert.kind]:
                self._reported.add(key)
                new.append(alert._replace(at_seconds=now))
        return tuple(new)

    @property
    def reported(self) -> frozenset[str]:
        """The keys of devices and ids of training runs with a reported problem that still lasts."""
        return frozenset(about for _, about in self._reported)


def find_alerts(snapshot: Snapshot, rules: AlertRules) -> Iterator[Alert]:
    """Yield all problems in a single reading, no matter how long they have lasted."""
    training = {device.id for report in snapshot.reports for device in report.devices}
    for sample in snapshot.devices:
        yield from _device_alerts(sample, rules, sample.device.id in training)
    yield from _training_alerts(snapshot, rules)


def _device_alerts(sample: DeviceSample, rules: AlertRules, trains: bool) -> Iterator[Alert]:
    device = sample.device

    def alert(kind: str, text: str) -> Alert:
        return Alert(kind, device.key, device.label, f"{device.label} {text}")

    if sample.utilization_percent.state in (State.LOST, State.STALE) and sample.note:
        yield alert("silent", f"says nothing: {plain(sample.note, 120)}")
        return
    heat, limit = sample.temperature_celsius.current, sample.temperature_limit_celsius.current
    if heat is not None and limit is not None and heat >= limit - BELOW_LIMIT:
        yield alert("hot", f"is hot: {heat:.0f} °C, and it slows itself down at {limit:.0f} °C.")
    throttled = sample.throttled_percent.current
    if throttled is not None and throttled >= rules.throttled_percent:
        why = plain(", ".join(sample.throttle_reasons), 60) or "no reason given"
        yield alert("throttled", f"is throttled {throttled:.0f} % of the time: {why}.")
    busy = sample.utilization_percent.current
    if trains and busy is not None and busy < IDLE_PERCENT:
        yield alert("idle", f"is idle, {busy:.0f} % busy, while a training waits on it.")


def _training_alerts(snapshot: Snapshot, rules: AlertRules) -> Iterator[Alert]:
    groups: dict[str, list[Training]] = {}
    for report in snapshot.reports:
        groups.setdefault(report.training or f"pid {report.pid}", []).append(report)
    for about, reports in groups.items():
        name = plain(reports[0].workload or reports[0].framework, 60)
        silent = [report for report in reports if _is_silent(report, snapshot.at_seconds)]
        if silent:
            ranks = ", ".join(str(report.rank) for report in silent)
            yield Alert("silent", about, name, f"{name}: no report from rank {ranks}.")
            continue
        reached = _part_of_plan(reports)
        if reached is not None and 100 * reached < rules.plan_percent:
            speed = sum(report.samples_per_second for report in reports)
            part = f"{100 * reached:.0f} % of its plan"
            text = f"{name} reaches {part}: {rate(speed)} samples/s."
            yield Alert("below plan", about, name, text)


def _is_silent(report: Training, now: float) -> bool:
    return report.late_seconds(now) > SILENT_REPORT_SECONDS


def _part_of_plan(reports: Sequence[Training]) -> float | None:
    """Return the ranks' samples/s as a fraction of the plan's samples/s, or None if unknown."""
    plan = max(report.plan_samples_per_second for report in reports)
    ranks = {report.rank for report in reports}
    world = max(1, *(report.world for report in reports))
    # unknown without a plan, or if some ranks are on other machines
    if plan <= 0 or len(ranks) != world:
        return None
    speed: float = sum(report.samples_per_second for report in reports)
    return speed / plan
