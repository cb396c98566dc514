"""Random devices of a test's own and a noiseless measurement of them: independent of `devices` and of the probes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import strategies as st

from balancer.records import Observation, OutOfMemory, Probe, Problem, Timed


class Bench(msgspec.Struct, frozen=True):
    """Devices as (fixed ms, ms a sample, samples up to which it is flat, most samples), and the cost of k >= 2."""

    devices: tuple[tuple[float, float, int, int], ...]
    sync_seconds: float = 0.0

    def own(self, i: int, share: int) -> float:
        fixed, slope, knee, _ = self.devices[i]
        return (fixed + slope * max(share, knee)) / 1000

    def step(self, shares: tuple[int, ...]) -> float:
        active = [i for i, share in enumerate(shares) if share]
        return max(self.own(i, shares[i]) for i in active) + (self.sync_seconds if len(active) > 1 else 0.0)

    def rate(self, shares: tuple[int, ...]) -> float:
        return sum(shares) / self.step(shares)

    def measure(self, probes: Iterable[Probe], scale: float = 1.0) -> list[Observation]:
        return [self._one(probe, scale) for probe in probes]

    def _one(self, probe: Probe, scale: float) -> Observation:
        shares = probe.layout.shares
        short = tuple(i for i, share in enumerate(shares) if share > self.devices[i][3])
        if short:
            return OutOfMemory(probe, short, "full", 1.0)
        step = self.step(shares) * scale
        own = tuple(self.own(i, share) * scale if share else None for i, share in enumerate(shares))
        memory = tuple(1000 + 10 * share if share else None for share in shares)
        return Timed(probe, step, step * 0.999, step * 1.001, 20, memory, own, step, 1.0)

    def problem(self, known: bool = True, **options: object) -> Problem:
        memory = tuple(1000 + 10 * most if known else None for *_, most in self.devices)
        return msgspec.convert({"devices": len(self.devices), "memory_bytes": memory, **options}, Problem)


@st.composite
def benches(draw: st.DrawFn, fewest: int = 1, most: int = 4) -> Bench:
    device = st.tuples(
        st.floats(0.5, 50.0), st.floats(0.05, 2.0), st.sampled_from([0, 0, 40, 150]), st.integers(8, 2000)
    )
    devices = draw(st.lists(device, min_size=fewest, max_size=most))
    return Bench(tuple(devices), draw(st.sampled_from([0.0, 0.002, 0.05])))
