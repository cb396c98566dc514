"""Pairs of searches of which the second can't be worse, but by noise: the question is asked in
another way.

Each law gives what the second lost: a fraction of the best, beyond what the first lost (negative:
gained); None where it has no pair. How often that is more than `NOISE` by chance alone, a `control`
shows: the first search again, with other draws of noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from evener.balancer.search.search import Search
from evener.devices.machine import Machine, SimulatedDevice, Sync
from tests.support import search_trials as trials
from tests.support.search_trials import Ask, Case, StartingProber, Trial

MORE_BUDGET, MORE_TOLERANCE, USELESS = 2.0, 0.05, 60.0
LONGEST_STEP = 0.1  # of the budget: a device whose smallest step takes longer isn't added
NOISE = 0.03  # what a pair may differ by
OTHER_NOISE = 1_000_003  # from a seed to the next that a control draws noise by


@lru_cache(256)
def first_run(case: Case) -> Trial:
    """The search that the others are compared with: all laws have the same."""
    return trials.run(case.machine, case.ask, case.seed)


def permuted(case: Case) -> float:
    """The devices in the opposite order."""
    machine, last = case.machine, len(case.machine.devices) - 1
    events = tuple(msgspec.structs.replace(one, device=last - one.device) for one in machine.events)
    return _loss(
        case,
        msgspec.structs.replace(machine, devices=machine.devices[::-1], events=events),
        case.ask,
    )


def twice_as_fast(case: Case) -> float:
    """Every time is half as long."""
    sync = Sync(*(0.5 * each for each in msgspec.structs.astuple(case.machine.sync)))
    devices = tuple(_at_speed(device, 2.0) for device in case.machine.devices)
    return _loss(case, msgspec.structs.replace(case.machine, devices=devices, sync=sync), case.ask)


def with_a_useless_device(case: Case) -> float | None:
    """One more device like the first, 60 times slower, if a step of one sample doesn't take a tenth
    of the budget.
    """
    if USELESS * case.machine.devices[0].seconds(1) > LONGEST_STEP * (case.ask.budget or 120):
        return None
    slow = msgspec.structs.replace(_at_speed(case.machine.devices[0], 1 / USELESS), name="useless")
    machine = msgspec.structs.replace(case.machine, devices=(*case.machine.devices, slow))
    batch = case.ask.batch and max(case.ask.batch, len(machine.devices) * case.ask.quantum)
    return _loss(case, machine, msgspec.structs.replace(case.ask, batch=batch))


def with_more_time(case: Case) -> float:
    """Twice the budget."""
    return _loss(
        case,
        case.machine,
        msgspec.structs.replace(case.ask, budget=(case.ask.budget or 120) * MORE_BUDGET),
    )


def with_more_tolerance(case: Case) -> float:
    """Of a free batch: 5 % instead of 2 %. The batch isn't larger; what it is larger counts as a
    loss.
    """
    ask = msgspec.structs.replace(case.ask, tolerance=MORE_TOLERANCE)
    second = trials.run(case.machine, ask, case.seed)
    return max(_lost(case, second), _larger(case, second))


def resumed(case: Case) -> float:
    """The same run, stopped halfway through its observations and taken up with twice the budget."""
    first = first_run(case)
    ask = msgspec.structs.replace(case.ask, budget=(case.ask.budget or 120) * MORE_BUDGET)
    prober = StartingProber(case.machine, case.seed, ask)
    search = Search(trials.problem(case.machine, ask, case.seed))
    for one in first.seen[: len(first.seen) // 2]:
        search.tell(one)
    prober.seconds = search._seen.spent_seconds()
    trials.finish(search, prober)
    found = search.best()
    rate = trials.true_rate(case.machine, found.layout, prober.last_began) if found else 0.0
    best = trials.best_at(case.machine, ask, prober.last_began)
    return max(0.0, 1 - rate / best) - first.regret if best else 0.0


LAWS: dict[str, Callable[[Case], float | None]] = {
    "permuted": permuted,
    "twice as fast": twice_as_fast,
    "a useless device more": with_a_useless_device,
    "more time": with_more_time,
    "more tolerance": with_more_tolerance,
    "resumed": resumed,
}


def control(case: Case, law: str) -> float:
    """What other draws of noise make of the same question, judged as the law judges; each law has
    its own draws.
    """
    second = trials.run(
        case.machine, case.ask, case.seed + OTHER_NOISE * (1 + list(LAWS).index(law))
    )
    return max(_lost(case, second), _larger(case, second) if law == "more tolerance" else 0.0)


def _loss(case: Case, machine: Machine, ask: Ask) -> float:
    return _lost(case, trials.run(machine, ask, case.seed))


def _lost(case: Case, second: Trial) -> float:
    return second.regret - first_run(case).regret


def _larger(case: Case, second: Trial) -> float:
    """By how much the second's free batch is larger."""
    first = first_run(case)
    if case.ask.batch is not None or not first.layout or not second.layout:
        return 0.0
    return second.layout.global_batch / first.layout.global_batch - 1


def _at_speed(device: SimulatedDevice, speed: float) -> SimulatedDevice:
    overhead = device.pass_overhead_ms
    return msgspec.structs.replace(
        device,
        curve=tuple((batch, time / speed) for batch, time in device.curve),
        stall_ms=device.stall_ms / speed,
        pass_overhead_ms=None if overhead is None else overhead / speed,
    )
