"""Run the search or a rival on one machine.

The simulated prober measures; the machine's true speeds judge the result.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from itertools import chain

import msgspec

from benchmarks.search_rivals import RIVALS
from evener.balancer.search.budget import BASE_SECONDS
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, OutOfMemory, Probe, Problem, Stage, Timed
from evener.devices.machine import Machine
from tests.support import machine_families as machines
from tests.support import search_oracle as oracle
from tests.support.machines import samples_per_second
from tests.support.recording_prober import RecordingProber, run_search

# tolerance 0, a fixed global batch that fits at once, one that may not, and the default tolerance
MODES = ("free", "fixed", "beyond", "tolerant")


class Job(msgspec.Struct, frozen=True):
    """The options of a run. `rivals` run with as many probes as the search."""

    family: str
    devices: int
    noise: float
    mode: str
    seed: int
    rivals: tuple[str, ...] = ()
    micro: bool = True  # a share may be computed in several passes


class SearchOutcome(msgspec.Struct, frozen=True):
    """The result of a job; fractions, not percent."""

    job: Job
    regret: float  # 1 - true throughput / oracle
    batch_ratio: (
        float  # global batch / smallest global batch that the oracle finds within the tolerance
    )
    held: bool  # whether the 95 % interval contains the true throughput
    probes: int
    solo_rounds: int
    splits: int
    races: int
    out_of_memory: int  # largest number on one device
    race_out_of_memory: int
    virtual_seconds: float
    cpu_seconds: float  # spent in ask and tell
    even: bool  # whether all devices in use have equal shares
    course: tuple[float, ...]  # regret of the best layout after each probe; 1 before any
    rivals: dict[str, tuple[float, ...]]  # the regrets of each rival
    why: str


def run(job: Job) -> SearchOutcome:
    """Run the search on the job's machine, then its rivals with as many probes."""
    machine = machines.machine(job.family, job.devices, job.noise, job.seed)
    batches = {"fixed": machines.fixed_batch, "beyond": machines.batch_beyond}
    batch = batches[job.mode](machine, job.seed) if job.mode in batches else None
    tolerance = 0.02 if job.mode == "tolerant" else 0.0
    best = (
        oracle.free(machine, tolerance)
        if batch is None
        else oracle.fixed(machine, batch, job.micro)
    )
    memory = tuple(machine.usable_memory_bytes(i) for i in range(job.devices))
    problem = Problem(job.devices, memory, global_batch=batch, tolerance=tolerance, micro=job.micro)
    watched = RecordingProber(machine, job.seed)
    search = Search(problem)
    course: list[float] = []
    cpu = time.process_time()
    run_search(search, watched.measure)
    cpu = time.process_time() - cpu
    replay = Search(problem)
    for seen in watched.seen:
        replay.tell(seen)
        course.append(_regret(machine, replay, best.samples_per_second))
    rivals = {
        name: rival_course(
            machine, name, batch, job.seed, len(watched.seen), best.samples_per_second
        )
        for name in job.rivals
    }
    return _outcome(job, machine, search, watched, best, cpu, tuple(course), rivals)


def rival_course(
    machine: Machine, name: str, batch: int | None, seed: int, probes: int, best: float
) -> tuple[float, ...]:
    """Return the regret of a rival's best measured layout after each of its probes.

    There are at most `probes` of them.
    """
    watched = RecordingProber(machine, seed)
    asks = RIVALS[name](len(machine.devices), batch, seed)
    course: list[float] = []
    top, truth = 0.0, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layouts = next(asks)
        while len(course) < probes:
            wanted = layouts[: probes - len(course)]
            seen = list(watched.measure(tuple(_probe(layout, len(course)) for layout in wanted)))
            for one in seen:
                fit = isinstance(one, Timed) and (
                    batch is None or one.probe.layout.global_batch == batch
                )
                if fit and isinstance(one, Timed) and one.samples_per_second > top:
                    top, truth = (
                        one.samples_per_second,
                        samples_per_second(machine, one.probe.layout.shares),
                    )
                course.append(1 - truth / best)
            if len(wanted) < len(layouts):
                break
            try:
                layouts = asks.send(seen)
            except StopIteration:
                break
    return tuple(course + [course[-1]] * (probes - len(course)))


def _probe(layout: Layout, turn: int) -> Probe:
    stage: Stage = Stage.SOLO if layout.kind == "solo" else Stage.SPLIT
    return Probe(layout, stage, BASE_SECONDS[stage], turn)


def _regret(machine: Machine, search: Search, best: float) -> float:
    result = search.best()
    return 1.0 if result is None else 1 - _true_rate(machine, result.layout) / best


def _true_rate(machine: Machine, layout: Layout) -> float:
    return samples_per_second(machine, layout.shares, layout.micro)


def _outcome(
    job: Job,
    machine: Machine,
    search: Search,
    watched: RecordingProber,
    best: oracle.Best,
    cpu: float,
    course: tuple[float, ...],
    rivals: dict[str, tuple[float, ...]],
) -> SearchOutcome:
    result = search.best()
    if result is None:
        raise RuntimeError(f"no layout was measured: {job}, {search.why_stopped()}")
    truth = _true_rate(machine, result.layout)
    stages = Counter(seen.probe.stage for seen in watched.seen)
    failures = [seen.devices for seen in watched.seen if isinstance(seen, OutOfMemory)]
    short = Counter(chain.from_iterable(failures))
    return SearchOutcome(
        job=job,
        regret=1 - truth / best.samples_per_second,
        batch_ratio=result.layout.global_batch / best.smallest_batch,
        held=result.throughput.low <= truth <= result.throughput.high,
        probes=len(watched.seen),
        solo_rounds=max(
            seen.probe.turn + 1 for seen in watched.seen if seen.probe.stage == Stage.SOLO
        ),
        splits=stages[Stage.SPLIT],
        races=stages[Stage.RACE],
        out_of_memory=max(short.values(), default=0),
        race_out_of_memory=sum(
            isinstance(s, OutOfMemory) and s.probe.stage == Stage.RACE for s in watched.seen
        ),
        virtual_seconds=watched.seconds,
        cpu_seconds=cpu,
        even=max(result.layout.shares) - min(s for s in result.layout.shares if s) <= 1,
        course=course,
        rivals=rivals,
        why=search.why_stopped() or "",
    )
