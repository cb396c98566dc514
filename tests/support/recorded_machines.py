"""Simulated machines made from the journals in tests/recorded, and a search on each.

A device's step times come from its solo probes in all journals of the same workload and memory
limit, joined by straight lines up to the largest measured batch. The cost of synchronization is the
time by which the journal's splits exceeded their slowest device.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from evener.balancer import journal
from evener.balancer.search.search import Search
from evener.balancer.types import Timed
from evener.devices.machine import Machine, SimulatedDevice, Sync
from tests.support import search_oracle as oracle
from tests.support.machines import samples_per_second
from tests.support.recording_prober import RecordingProber, run_search

RECORDED = Path(__file__).resolve().parent.parent / "recorded"
NOISE = 0.005  # relative, as in the intervals of most of these probes
BASE_MIB = 1000.0  # any memory line that fits all batches that ran

Curve = dict[int, list[float]]  # samples -> milliseconds of a step


class Found(msgspec.Struct, frozen=True):
    """The result of one search on one recorded machine."""

    regret: float  # 1 - its throughput / the best throughput
    shares: tuple[int, ...]
    probes: int
    best: oracle.Best


def records(folder: Path = RECORDED) -> dict[str, journal.JournalContents]:
    """Return the recorded searches by name.

    Comparisons, and runs during which other work used the GPUs, are left out.
    """
    found = {path.stem: journal.read(path) for path in sorted(folder.glob("*.jsonl"))}
    return {
        name: record
        for name, record in found.items()
        if record.header.request.compare is None and not _shared(name, record)
    }


def _shared(name: str, record: journal.JournalContents) -> bool:
    return name.endswith("-neighbour") or any(
        device.limit.memory_bytes for device in record.header.devices
    )


def curves(recorded: Iterable[journal.JournalContents]) -> dict[tuple[str, str], Curve]:
    """Return step times by workload and memory limit."""
    found: dict[tuple[str, str], Curve] = defaultdict(lambda: defaultdict(list))
    for record in recorded:
        for entry in record.seen:
            seen = entry.seen
            if isinstance(seen, Timed) and seen.probe.layout.kind == "solo":
                (position,) = seen.probe.layout.active
                key = record.header.workload, str(record.header.devices[position].limit)
                found[key][seen.probe.layout.global_batch].append(1000 * seen.step_seconds)
    return found


def machine(record: journal.JournalContents, known: Mapping[tuple[str, str], Curve]) -> Machine:
    """Return a machine with the journal's devices and their step times."""
    most = record.header.largest_share
    parts = [
        {
            batch: times
            for batch, times in known[record.header.workload, str(device.limit)].items()
            if batch <= (most or batch)
        }
        for device in record.header.devices
    ]
    devices = tuple(
        _device(device.name, part)
        for device, part in zip(record.header.devices, parts, strict=True)
    )
    return Machine(devices, Sync(1000 * _sync_seconds(record, devices)))


def search(record: journal.JournalContents, made: Machine, seed: int) -> Found:
    """Search the machine as the journal's request asks, without a budget."""
    batch, tolerance = record.header.request.global_batch, record.header.request.tolerance
    best = oracle.free(made, tolerance) if batch is None else oracle.fixed(made, batch)
    memory = tuple(made.usable_memory_bytes(i) for i in range(len(made.devices)))
    problem = msgspec.structs.replace(
        record.header.job.problem, memory_bytes=memory, budget_seconds=None
    )
    looking = Search(problem)
    watched = RecordingProber(made, seed)
    run_search(looking, watched.measure)
    result = looking.best()
    if result is None:
        raise RuntimeError(f"nothing was measured: {looking.why_stopped()}")
    rate = samples_per_second(made, result.layout.shares)
    return Found(1 - rate / best.samples_per_second, result.layout.shares, len(watched.seen), best)


def _device(name: str, curve: Curve) -> SimulatedDevice:
    """Return a device whose step times never fall as batches grow."""
    batches = sorted(curve)
    times = list(accumulate((statistics.median(curve[batch]) for batch in batches), max))
    points = tuple(zip(batches, times, strict=True))
    return SimulatedDevice(
        name=name,
        memory_mib=BASE_MIB + batches[-1] + 0.5,
        memory_base_mib=BASE_MIB,
        memory_per_sample_mib=1.0,
        noise=NOISE,
        curve=points if batches[0] == 1 else ((1, times[0]), *points),
    )


def _sync_seconds(record: journal.JournalContents, devices: Sequence[SimulatedDevice]) -> float:
    """Return how much longer the splits took than their slowest share; 0 without splits."""
    costs = []
    for entry in record.seen:
        seen = entry.seen
        if isinstance(seen, Timed) and seen.probe.layout.kind == "split":
            slowest = max(
                device.seconds(share)
                for device, share in zip(devices, seen.probe.layout.shares, strict=True)
            )
            costs.append(seen.step_seconds - slowest)
    return max(0.0, statistics.median(costs)) if costs else 0.0
