"""Checks pairs of searches in which the second can't do worse than the first, except by noise.

The second search asks the first one's question in another way. Each law returns what the second
loses as a fraction of the best throughput, minus what the first loses (negative: it gains); None if
the law doesn't apply. `control` shows how often that exceeds `NOISE` by chance alone: it is the
first search again, with other random noise.
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
NOISE = 0.03  # the largest relative difference of a pair that counts as equal
OTHER_NOISE = 1_000_003  # added to the seed for a control's noise


@lru_cache(256)
def first_run(case: Case) -> Trial:
    """Return the search that all laws compare with."""
    return trials.run(case.machine, case.ask, case.seed)


def permuted(case: Case) -> float:
    """Search with the devices in reverse order."""
    machine, last = case.machine, len(case.machine.devices) - 1
    events = tuple(msgspec.structs.replace(one, device=last - one.device) for one in machine.events)
    return _loss(
        case,
        msgspec.structs.replace(machine, devices=machine.devices[::-1], events=events),
        case.ask,
    )


def twice_as_fast(case: Case) -> float:
    """Search with every time halved."""
    sync = Sync(*(0.5 * each for each in msgspec.structs.astuple(case.machine.sync)))
    devices = tuple(_at_speed(device, 2.0) for device in case.machine.devices)
    return _loss(case, msgspec.structs.replace(case.machine, devices=devices, sync=sync), case.ask)


def with_a_useless_device(case: Case) -> float | None:
    """Search with one more device, like the first but 60 times slower.

    Returns None if a step of one sample on it takes more than a tenth of the budget.
    """
    if USELESS * case.machine.devices[0].seconds(1) > LONGEST_STEP * (case.ask.budget or 120):
        return None
    slow = msgspec.structs.replace(_at_speed(case.machine.devices[0], 1 / USELESS), name="useless")
    machine = msgspec.structs.replace(case.machine, devices=(*case.machine.devices, slow))
    batch = case.ask.batch and max(case.ask.batch, len(machine.devices) * case.ask.quantum)
    return _loss(case, machine, msgspec.structs.replace(case.ask, batch=batch))


def with_more_time(case: Case) -> float:
    """Search with twice the budget."""
    return _loss(
        case,
        case.machine,
        msgspec.structs.replace(case.ask, budget=(case.ask.budget or 120) * MORE_BUDGET),
    )


def with_more_tolerance(case: Case) -> float:
    """Search with a tolerance of 5 % instead of 2 %, if the batch is free.

    The batch must not be larger than the first search's; any excess counts as a loss.
    """
    ask = msgspec.structs.replace(case.ask, tolerance=MORE_TOLERANCE)
    second = trials.run(case.machine, ask, case.seed)
    return max(_lost(case, second), _larger(case, second))


def resumed(case: Case) -> float:
    """Stop the search after half of its observations, and resume it with twice the budget."""
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
    """Search again with other random noise, and judge the result as `law` does."""
    second = trials.run(
        case.machine, case.ask, case.seed + OTHER_NOISE * (1 + list(LAWS).index(law))
    )
    return max(_lost(case, second), _larger(case, second) if law == "more tolerance" else 0.0)


def _loss(case: Case, machine: Machine, ask: Ask) -> float:
    return _lost(case, trials.run(machine, ask, case.seed))


def _lost(case: Case, second: Trial) -> float:
    return second.regret - first_run(case).regret


def _larger(case: Case, second: Trial) -> float:
    """Return by what fraction the second search's free batch is larger."""
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
