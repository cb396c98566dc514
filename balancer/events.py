"""The events of a session, for a terminal, a screen or a viewer of journals to draw."""

from __future__ import annotations

import msgspec

from evener.plan.file import Plan

from .types import Belief, Observation, Probe, Result, Said


class Started(msgspec.Struct, frozen=True, tag=True):
    """The session began. `replayed` observations came from the journal and were not measured again."""

    run: str
    devices: tuple[str, ...]  # labels, in the order of the request
    workload: str
    budget_seconds: float | None
    replayed: int
    notes: tuple[str, ...] = ()  # to show: what `auto` chose, devices that others use


class ProbeStarted(msgspec.Struct, frozen=True, tag=True):
    """A measurement began; several run at the same time."""

    probe: Probe
    at_seconds: float  # of the session's clock


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """The progress of a running measurement, at least once a second. A later report replaces it."""

    probe: Probe
    phase: str  # starting | building | warming up | measuring; stopped while building: importing | loading | preparing
    samples_per_second: float | None
    relative_interval: float | None  # half-width of the 95 % interval / the figure
    at_seconds: float
    phase_seconds: float = 0.0  # how long it has been in this phase
    where: str = ""  # "file.py:12": the user's own line at which it was stopped


class Observed(msgspec.Struct, frozen=True, tag=True):
    """A measurement ended, was journalled, and the search has it."""

    seen: Observation
    belief: Belief
    best: Result | None
    probes: int  # so far, including replayed ones
    out_of_memory: int
    at_seconds: float


class Paused(msgspec.Struct, frozen=True, tag=True):
    """No new probe starts until the session continues."""

    at_seconds: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The session ended with a plan. `interrupted`: by the user, with the best plan so far."""

    run: str
    plan: Plan
    results: tuple[Result, ...]  # every layout measured in the race, best first
    verdict: str  # one sentence: what to do and why
    interrupted: bool
    at_seconds: float
    findings: Said = Said()  # the same as data; empty where a journal is shown


Event = Started | ProbeStarted | ProbeProgress | Observed | Paused | Finished
