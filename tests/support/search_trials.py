"""Runs one search as a user would: with a budget, probes that take time to start, and changing
machines.

The result is compared with the true state of the machine when the last probe began.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path

import msgspec

from evener.balancer.journal import FactsEntry, Header, JournalContents, ObservationEntry
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.request import Job, Request
from evener.balancer.result.judge import SearchEnd
from evener.balancer.result.outcome import build_outcome
from evener.balancer.search.search import Search
from evener.balancer.session import latest_end
from evener.balancer.types import (
    End,
    Facts,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stop,
    Timed,
)
from evener.devices.machine import Machine
from evener.devices.simulated import load_machine
from tests.support import search_oracle as oracle

MOST_PROBES = 600


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a user, and how long each group of probe processes takes to start."""

    batch: int | None = None
    budget: float | None = 120.0
    start: float = 0.0
    tolerance: float = 0.02
    quantum: int = 1
    most: int | None = None
    micro: bool = True

    def request(self, seed: int) -> Request:
        """Return them as a request."""
        return Request(
            devices="sim:made",
            global_batch=self.batch,
            max_global_batch=self.most,
            multiple_of=self.quantum,
            budget_seconds=self.budget,
            tolerance=self.tolerance,
            micro="auto" if self.micro else "off",
            seed=seed,
        )

    def words(self) -> str:
        """Return the command line options that differ from the defaults."""
        own = (
            ("--global-batch", self.batch),
            ("--max-global-batch", self.most),
            ("--multiple-of", self.quantum),
        )
        said = [f"{name} {value}" for name, value in own if value not in (None, 1)]
        said += [f"--budget {self.budget:g}s"] if self.budget not in (None, 120.0) else []
        said += [f"--tolerance {100 * self.tolerance:g}%"] if self.tolerance != 0.02 else []
        said += [] if self.micro else ["--micro off"]
        return " ".join([*said, *([f"starts {self.start:g} s"] if self.start else [])])


class Case(msgspec.Struct, frozen=True):
    """One machine of a family, and one question about it."""

    family: str
    seed: int
    mode: str
    machine: Machine
    ask: Ask


class Trial(msgspec.Struct, frozen=True):
    """The result of a search.

    `regret` is the fraction of throughput that it loses, beyond the tolerance if the batch is free.
    """

    regret: float
    out_of_memory: int  # number of failures on the device with most of them
    probes: int
    seconds: float
    late: float  # seconds beyond the budget, as a fraction of it
    held: bool  # the interval contains the true throughput
    settled: bool  # the verdict says that no further measurement would change the plan
    rate: float
    best: float
    layout: Layout | None
    verdict: str
    why: str
    seen: tuple[Observation, ...]


class StartingProber:
    """The command's own prober, with a time to start: for each group, and after each failure."""

    def __init__(self, machine: Machine, seed: int, ask: Ask) -> None:
        self._machine, self._seed, self._start, self._end = (
            machine,
            seed,
            ask.start,
            latest_end(ask.budget),
        )
        self._rank_layout: set[tuple[object, ...]] = set()
        self.seconds, self.last_began = 0.0, 0.0
        self.seen: list[Observation] = []

    def measure(self, probes: tuple[Probe, ...]) -> list[Observation]:
        """Measure all probes at once, and return the results in the order in which they end."""
        self.last_began = self.seconds
        ends: list[tuple[float, Observation]] = []
        for probe in probes:
            crew = (probe.layout.kind, probe.layout.active, probe.layout.processes)
            start = 0.0 if crew in self._rank_layout else self._start
            prober = SimulatedProber(
                self._machine,
                self._seed,
                start_seconds=self.last_began + start,
                end_seconds=self._end,
            )
            others = tuple(one for one in probes if one != probe)
            for one in prober.measure((probe,), lambda _: None, threading.Event(), others):
                ends.append((prober.now(), _later(one, start)))
                (self._rank_layout.add if isinstance(one, Timed) else self._rank_layout.discard)(
                    crew
                )
            self.seconds = max(self.seconds, min(prober.now(), self._end))
        found = [one for _, one in sorted(ends, key=lambda pair: pair[0])]
        self.seen += found
        return found


def _later(seen: Observation, start: float) -> Observation:
    elapsed = seen.elapsed_seconds + start
    if isinstance(seen, Timed):
        return msgspec.structs.replace(seen, elapsed_seconds=elapsed, start_seconds=start)
    return msgspec.structs.replace(seen, elapsed_seconds=elapsed)


def problem(machine: Machine, ask: Ask, seed: int = 0) -> Problem:
    """Return the problem that a session would give to its search."""
    return _job(machine, ask, seed).problem


def _job(machine: Machine, ask: Ask, seed: int) -> Job:
    return Job(ask.request(seed), machine.described(), "synthetic", "none", machine=machine)


def run(machine: Machine, ask: Ask, seed: int = 0) -> Trial:
    """Run a search up to its verdict; any exception is a bug."""
    prober = StartingProber(machine, seed, ask)
    search = Search(problem(machine, ask, seed))
    finish(search, prober)
    job = _job(machine, ask, seed)
    header = Header("run", "", job.request, job.devices, job.workload, job.framework, "", None, ())
    seen = (ObservationEntry(one, 0.0) for one in prober.seen)
    record = JournalContents(header, (FactsEntry(Facts(engine="simulated")), *seen), 0)
    end, report = SearchEnd(search.ended() or End(Stop.LATE), prober.seconds), search.report()
    verdict = build_outcome(record, report, end).verdict if report is not None else ""
    return _judge(machine, ask, search, prober, verdict)


def finish(search: Search, prober: StartingProber) -> None:
    """Measure until the search asks for nothing more, or the budget ended while probes were
    running.
    """
    while probes := search.ask():
        found = prober.measure(probes)
        for one in found:
            search.tell(one)
        if len(found) < len(probes):
            return
        if len(prober.seen) > MOST_PROBES:
            last = [(one.stage, one.turn, one.layout.shares) for one in probes]
            raise AssertionError(f"the search does not end, and asks for {last}")


def _judge(
    machine: Machine, ask: Ask, search: Search, prober: StartingProber, verdict: str
) -> Trial:
    at, found = prober.last_began, search.best()
    best = best_at(machine, ask, at)
    rate = true_rate(machine, found.layout, at) if found else 0.0
    short = Counter(i for one in prober.seen if isinstance(one, OutOfMemory) for i in one.devices)
    return Trial(
        regret=max(0.0, 1 - rate / best) if best else 0.0,
        out_of_memory=max(short.values(), default=0),
        probes=len(prober.seen),
        seconds=prober.seconds,
        late=round(prober.seconds / ask.budget - 1, 6) if ask.budget else -1.0,
        held=found is not None and found.throughput.low <= rate <= found.throughput.high,
        settled=search.why_stopped() == Stop.SETTLED.value,
        rate=rate,
        best=best,
        layout=found.layout if found else None,
        verdict=verdict,
        why=search.why_stopped() or Stop.LATE.value,
        seen=tuple(prober.seen),
    )


def true_rate(machine: Machine, layout: Layout, at: float) -> float:
    """Return the samples/s of a layout at that moment."""
    return oracle.true_rate(machine, layout.shares, layout.micro, at)


def best_at(machine: Machine, ask: Ask, at: float) -> float:
    """Return the samples/s that a plan must reach: the best, minus the tolerance if the batch is
    free.
    """
    if ask.batch is not None:
        return oracle.fixed(machine, ask.batch, ask.micro, ask.quantum, at).samples_per_second
    return oracle.free(machine, ask.tolerance, ask.quantum, ask.most, at).samples_per_second * (
        1 - ask.tolerance
    )


def load(path: Path) -> tuple[Machine, tuple[Ask, ...]]:
    """Read a machine file and the questions about it.

    Each comment at its top that is a command is a question; it may end with `starts 5 s`.
    """
    lines = path.read_text().partition("\n[")[0].splitlines()
    return load_machine(path), tuple(
        _read_ask(line) for line in lines if line.startswith("# evener balance")
    )


def _read_ask(command: str) -> Ask:
    found = {
        key: re.search(rf"{key} (\d+)", command) for key in ("--global-batch", "--budget", "starts")
    }
    number = {key: int(one[1]) for key, one in found.items() if one}
    return Ask(
        batch=number.get("--global-batch"),
        budget=number.get("--budget", 120),
        start=number.get("starts", 0),
    )
