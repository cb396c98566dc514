"""Random devices and noiseless measurements of them, which share no code with simulated
machines.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import strategies as st

from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Observation, OutOfMemory, Probe, Problem, Timed


class Bench(msgspec.Struct, frozen=True):
    """Devices whose step times are known, to search on.

    Each device is (fixed ms, ms per sample, samples up to which its time is flat, samples that
    fit). `curves`, if given, are points (samples, ms) joined by lines, and replace the first three.
    `sync_seconds` is added for 2 or more devices.
    """

    devices: tuple[tuple[float, float, int, int], ...]
    sync_seconds: float = 0.0
    curves: tuple[tuple[tuple[int, float], ...], ...] = ()

    def own(self, i: int, share: float, passes: int = 1) -> float:
        """Return a device's own time; each pass takes as long as a step with its rows."""
        fixed, slope, knee, _ = self.devices[i]
        rows = share / passes
        time = _along(self.curves[i], rows) if self.curves else fixed + slope * max(rows, knee)
        return passes * time / 1000

    def step(self, layout: Layout) -> float:
        own = [self.own(i, layout.shares[i], layout.passes(i)) for i in layout.active]
        return max(own) + (self.sync_seconds if len(own) > 1 else 0.0)

    def rate(self, layout: Layout) -> float:
        return layout.global_batch / self.step(layout)

    def best(self) -> tuple[float, int]:
        """Return the highest throughput of one or two devices and its global batch.

        All finish times are tried.
        """
        times = [
            [self.own(i, share) for share in range(1, most + 1)]
            for i, (*_, most) in enumerate(self.devices)
        ]
        found = [(share / t, share) for alone in times for share, t in enumerate(alone, 1)]
        for t in sorted({t for alone in times for t in alone}) if len(times) == 2 else ():
            shares = [bisect_right(alone, t) for alone in times]
            if all(shares):
                found.append((sum(shares) / (t + self.sync_seconds), sum(shares)))
        return max(found)

    def measure(self, probes: Iterable[Probe], scale: float = 1.0) -> list[Observation]:
        return [self._one(probe, scale) for probe in probes]

    def _one(self, probe: Probe, scale: float) -> Observation:
        layout = probe.layout
        short = tuple(i for i, rows in enumerate(layout.pass_rows) if rows > self.devices[i][3])
        if short:
            return OutOfMemory(probe, short, "full", 1.0)
        step = self.step(layout) * scale
        shares = enumerate(layout.shares)
        own = tuple(
            self.own(i, share, layout.passes(i)) * scale if share else None for i, share in shares
        )
        memory = tuple(1000 + 10 * rows if rows else None for rows in layout.pass_rows)
        return Timed(probe, step, step * 0.999, step * 1.001, 20, memory, own, step, 1.0)

    def problem(self, known: bool = True, **options: object) -> Problem:
        memory = tuple(1000 + 10 * most if known else None for *_, most in self.devices)
        return msgspec.convert(
            {"devices": len(self.devices), "memory_bytes": memory, **options}, Problem
        )


def _along(curve: tuple[tuple[int, float], ...], share: float) -> float:
    right = min(max(bisect_right(curve, (share, 0.0)), 1), len(curve) - 1)
    (b0, t0), (b1, t1) = curve[right - 1], curve[right]
    return t0 + (t1 - t0) * (share - b0) / (b1 - b0)


@st.composite
def benches(draw: st.DrawFn, fewest: int = 1, most: int = 4) -> Bench:
    device = st.tuples(
        st.floats(0.5, 50.0),
        st.floats(0.05, 2.0),
        st.sampled_from([0, 0, 40, 150]),
        st.integers(8, 2000),
    )
    devices = draw(st.lists(device, min_size=fewest, max_size=most))
    return Bench(tuple(devices), draw(st.sampled_from([0.0, 0.002, 0.05])))


def searched(bench: Bench, problem: Problem) -> tuple[Search, list[Observation]]:
    """Return a finished search and its observations."""
    search, seen = Search(problem), []
    while probes := search.ask():
        for one in bench.measure(probes):
            seen.append(one)
            search.tell(one)
        assert len(seen) < 200, "the search does not end"
    return search, seen


def noisy(
    bench: Bench, deviation: float, seed: int, **options: Any
) -> tuple[Search, list[Observation]]:
    """Return a search in which every probe has as much noise as its interval states, and its
    observations.
    """
    search, seen = Search(bench.problem(**options)), list[Observation]()
    while probes := search.ask():
        for probe in probes:
            # the noise of a probe doesn't depend on the probes before it
            drawn = probe.layout, probe.stage.value, probe.seconds, probe.turn
            chance = random.Random(f"{seed}/{drawn}")
            (one,) = bench.measure([probe], max(0.1, chance.gauss(1, deviation)))
            if isinstance(one, Timed):
                half = 2.36 * deviation * one.step_seconds
                own = one.step_seconds
                one = Timed(
                    probe,
                    own,
                    own - half,
                    own + half,
                    20,
                    one.memory_bytes,
                    one.device_seconds,
                    own,
                    probe.seconds + 1,
                )
            seen.append(one)
            search.tell(one)
        assert len(seen) < 300, "the search does not end"
    return search, seen
