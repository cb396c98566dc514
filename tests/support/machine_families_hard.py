"""Random machines on which searches went wrong or might, with questions about each.

They are made by family and seed. The docstring of each family in `hard_curves`, `hard_devices` and
`hard_events` states its ranges.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import msgspec

from evener.devices.machine import Machine
from tests.support import hard_curves as curves
from tests.support import hard_devices as devices
from tests.support import hard_events as events
from tests.support import hard_slow as slow
from tests.support import search_oracle
from tests.support.machine_drafts import Draft, draw
from tests.support.machine_families import FIXED, batch_beyond, largest
from tests.support.search_trials import Ask, Case

LONG_STEP = 15  # the budget must allow this many steps with the best layout
LONG_STEP_OF_SLOW = 8  # the same for families with slow steps
SLOW = ("slow_flat", "slow_line", "slow_knee", "slow_loads")
# another order of probes meets other conditions here, so pairs of searches can't be compared
CHANCE = (
    "noisy",
    "noisy_slow",
    "bursts",
    "lost",
    "throttle",
    "memory_held",
    "memory_held_gone",
    "neighbour",
)


def cases(family: str, seed: int, **asked: Any) -> list[Case]:
    """Return every question about a seed's machine; `asked` overrides options of all, such as the
    budget.

    A machine whose best step would take over 1/15 of the family's budget is drawn again, since no
    search could measure it.
    """
    for attempt in count():
        draft = draw(chance := random.Random(f"{family}/{seed}/{attempt}"))
        FAMILIES[family](chance, draft)
        found = [
            _ask(mode, draft, random.Random(f"{family}/{seed}/{mode}")) for mode in draft.modes
        ]
        machine = draft.machine()
        if all(is_measurable(machine, ask, fewest_steps(family)) for ask in found):
            break
    asks = [Ask(**(msgspec.structs.asdict(ask) | asked)) for ask in found]
    return [
        Case(family, seed, mode, machine, ask) for mode, ask in zip(draft.modes, asks, strict=True)
    ]


def _ask(mode: str, draft: Draft, chance: random.Random) -> Ask:
    machine = draft.machine()
    most = sum(largest(machine, i) for i in range(len(machine.devices)))
    return Ask(batch=_batch(mode, draft, most, chance), **draft.ask)


def fewest_steps(family: str) -> int:
    """Return how many steps with the best layout the budget must allow."""
    return LONG_STEP_OF_SLOW if family in SLOW else LONG_STEP


def is_measurable(machine: Machine, ask: Ask, steps: int = LONG_STEP) -> bool:
    """Return whether that many steps with the best layout fit the budget, before any event."""
    if ask.batch is not None:
        best = search_oracle.fixed(machine, ask.batch, ask.micro, ask.quantum)
    else:
        best = search_oracle.free(machine, ask.tolerance, ask.quantum, ask.most)
    seconds = best.smallest_batch / best.samples_per_second if best.samples_per_second else math.inf
    return seconds <= (math.inf if ask.budget is None else ask.budget / steps)


def _batch(mode: str, draft: Draft, most: int, chance: random.Random) -> int | None:
    """Return the batch of a mode: None, an odd one, one beyond memory, or one of the
    usual sizes.
    """
    least, quantum = len(draft.parts), draft.ask.get("quantum", 1)
    if mode == "free":
        return None
    if mode.startswith("odd"):
        return int(chance.randrange(least, max(least + 2, round(0.9 * most))) | 1)
    if mode == "beyond":
        return batch_beyond(draft.machine(), chance.randrange(1 << 20))
    fit = [
        batch for batch in FIXED if least * quantum <= batch <= 0.9 * most and batch % quantum == 0
    ]
    return chance.choice(fit) if fit else max(least, round(0.9 * most) // quantum) * quantum


FAMILIES: dict[str, Callable[[random.Random, Draft], None]] = {
    **{f"stairs{width}": partial(curves.waves, width) for width in (8, 64, 128)},
    "kernel_up": partial(curves.kernel, 1),
    "kernel_down": partial(curves.kernel, -1),
    "falling": curves.falling,
    "falling_fixed": curves.falling_fixed,
    "memory_bend": devices.memory_bend,
    "unequal20": devices.unequal,
    "useless": devices.useless,
    "equal": devices.equal,
    "mixed_many": devices.mixed_many,
    "hosts": devices.hosts,
    "sync_grows": devices.sync_grows,
    "sync_base": devices.sync_base,
    "contention80": devices.contention,
    "noisy": events.noisy,
    "noisy_slow": events.noisy_slow,
    "bursts": events.bursts,
    "lost": events.lost,
    "throttle": events.throttle,
    "memory_held": events.memory_held,
    "memory_held_gone": events.memory_held_gone,
    "neighbour": events.neighbour,
    "tiny_steps": curves.tiny_steps,
    "huge_steps": curves.huge_steps,
    "large_only": curves.large_only,
    "quantum": devices.quantum,
    "odd_batch": devices.odd_batch,
    "passes_none": partial(devices.passes, None),
    "passes_cheap": partial(devices.passes, 0.05),
    "passes_dear": partial(devices.passes, 1.0),
    "micro_off": devices.micro_off,
    "tol2": partial(devices.tolerance, 0.02),
    "tol5": partial(devices.tolerance, 0.05),
    "tol_jagged": curves.jagged,
    "max_batch": devices.max_batch,
    "small_memory": devices.small_memory,
    "convex": curves.convex,
    "concave": curves.concave,
    "knee": curves.knee,
    "stall": curves.stall,
    "slow_start": devices.slow_start,
    "default": curves.default,
    "slow_flat": slow.flat,
    "slow_line": slow.line,
    "slow_knee": slow.knee,
    "slow_loads": slow.loads,
}
