"""Comparisons on one device whose memory use bends upwards.

The single batch continues beyond the bend, and packs stay below it.
"""

from __future__ import annotations

import threading

from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, OutOfMemory, Problem
from evener.devices.machine import Machine, SimulatedDevice
from tests.support import comparison_cases

BEND = ((1, 901.2), (500, 1500.0), (1000, 2600.0))  # samples, MiB


def compared(**changes: object) -> tuple[Machine, Search, list[Layout]]:
    """Return a finished comparison, and the layouts that ran out of memory in it."""
    keys: dict[str, object] = {
        "name": "bent",
        "memory_mib": 2601.0,
        "memory_curve": BEND,
        "curve": ((1, 4.0), (1000, 300.0)),
        "noise": 0.002,
    }
    machine = Machine((SimulatedDevice(**(keys | changes)),))  # type: ignore[arg-type]
    search = Search(Problem(1, (machine.usable_memory_bytes(0),), tolerance=0.0), LayoutOptions())
    prober, full = SimulatedProber(machine, seed=1), list[Layout]()
    while asked := search.ask():
        for seen in prober.measure(asked, lambda _: None, threading.Event()):
            search.tell(seen)
            full += [seen.probe.layout] if isinstance(seen, OutOfMemory) else []
    return machine, search, full


def test_packs_below_the_bend_are_sized_by_the_memory_there() -> None:
    """The line through the two largest batches, beyond the bend, predicts less than nothing for
    small ones.
    """
    machine, search, full = compared(pack_gain=((1, 1.0), (2, 1.5)))
    best = search.best()
    assert best is not None
    assert best.layout.processes == 2
    assert not [layout for layout in full if layout.kind == "pack"]
    most = max(
        b
        for b in range(1, 1000)
        if 2 * machine.memory_bytes(0, b) <= machine.usable_memory_bytes(0)
    )
    assert best.layout.global_batch >= 0.75 * most


def test_one_device_is_measured_beyond_what_four_rounds_reach() -> None:
    """A bend hides how much fits. With nothing to split, the search continues alone."""
    machine, search, _ = compared(curve=((1, 60.0), (1000, 300.0)))
    best = search.best()
    assert best is not None
    truth = max(b / machine.device_seconds(0, b, False) for b in range(1, 1001))
    assert comparison_cases.true_throughput(machine, best.layout) >= 0.985 * truth
