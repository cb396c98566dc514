"""Searches with noise on random devices up to their verdicts, for tests of the printed text."""

from __future__ import annotations

import random

from evener.balancer.events import Finished
from evener.balancer.journal import Header, JournalContents, ObservationEntry
from evener.balancer.request import Request
from evener.balancer.result.judge import SearchEnd
from evener.balancer.result.outcome import build_outcome
from evener.balancer.types import End, Stop
from evener.devices.types import Device
from tests.support.search_machines import Bench, noisy

NOISE = (0.001, 0.005, 0.02, 0.08, 0.2)


def draw_outcome(chance: random.Random) -> tuple[Finished, tuple[str, ...]]:
    """Return a finished search of one to four devices, and their labels."""
    bench = _draw_bench(chance)
    batch = chance.choice([None, None, 64, 256, 1500])
    if batch is not None and sum(most for *_, most in bench.devices) < batch:
        batch = None
    budget = chance.choice([None, 20.0, 60.0, 120.0])
    noise, seed = chance.choice(NOISE), chance.randrange(1 << 30)
    search, seen = noisy(bench, noise, seed, global_batch=batch, budget_seconds=budget)
    labels = tuple(f"SIM:{i}" for i in range(len(bench.devices)))
    devices = tuple(
        Device(f"sim-{i}", i, "made up", "sim", None) for i in range(len(bench.devices))
    )
    request = Request(global_batch=batch)
    header = Header(
        "20260101-000000-aaaa", "2026-01-01T00:00:00Z", request, devices, "model", "none", "0"
    )
    record = JournalContents(header, tuple(ObservationEntry(one, 60.0) for one in seen), 0)
    report = search.report()
    assert report is not None
    end = SearchEnd(search.ended() or End(Stop.CUT_OFF), 60.0)
    return build_outcome(record, report, end), labels


def _draw_bench(chance: random.Random) -> Bench:
    def device() -> tuple[float, float, int, int]:
        fixed = chance.uniform(0.5, 50.0)
        return (
            fixed,
            chance.uniform(0.05, 2.0),
            chance.choice([0, 0, 40, 150]),
            chance.randrange(8, 2000),
        )

    return Bench(
        tuple(device() for _ in range(chance.randint(1, 4))), chance.choice([0.0, 0.002, 0.05])
    )
