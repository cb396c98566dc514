"""Simulated devices with known costs of a pass, for searches over rows of unequal length."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from statistics import NormalDist

import msgspec

from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.types import Facts, Layout, Observation, OutOfMemory, Probe, Problem, Timed
from evener.shares.curves import Cost, RankCost, Work
from evener.shares.whole_rows import bounds
from evener.training.row_assignment import RowAssigner

BATCHES = 8  # number of batches that a measurement of random rows averages
BASE_BYTES, TOKEN_BYTES = 1000, 10


def lognormal(
    median: float = 64, sigma: float = 0.8, longest: int = 512, count: int = 256
) -> tuple[int, ...]:
    """Return lengths at even quantiles of a lognormal distribution, in rising order."""
    normal = NormalDist(math.log(median), sigma)
    drawn = (math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count))
    return tuple(min(longest, max(1, round(length))) for length in drawn)


class TextMachine:
    """Devices that train on texts of different lengths.

    `step_s` is the time of a step apart from its passes. A pass of device i can have at most
    `most_tokens[i]` tokens, with padding.
    """

    def __init__(
        self,
        costs: Sequence[Cost],
        *,
        step_s: float = 0.002,
        sync_s: float = 0.001,
        across_s: float = 0.0,
        hosts: tuple[int, ...] = (),
        noise: float = 0.003,
        most_tokens: Sequence[int] | None = None,
        lengths: tuple[int, ...] = lognormal(),
    ) -> None:
        self.costs, self.step_s, self.sync_s, self.noise = tuple(costs), step_s, sync_s, noise
        self.across_s, self.hosts = across_s, hosts
        self.most_tokens = tuple(most_tokens or [1 << 40] * len(costs))
        self.lengths = lengths
        self._random = random.Random(0)

    def problem(self, **options: object) -> Problem:
        """Return a search problem with the memory that `most_tokens` imply."""
        memory = tuple(BASE_BYTES + TOKEN_BYTES * tokens for tokens in self.most_tokens)
        known = {"devices": len(self.costs), "memory_bytes": memory, "hosts": self.hosts}
        return msgspec.convert({**known, **options}, Problem)

    def searched(
        self, options: LayoutOptions = BALANCE, **problem: object
    ) -> tuple[Search, list[Observation]]:
        """Return a finished search and its observations; the first probes report the
        rows' lengths.
        """
        search, seen = Search(self.problem(**problem), options), []
        while probes := search.ask():
            for one in self.measure(probes):
                search.tell(one)
                seen.append(one)
            search.learn_data(Facts(lengths=self.lengths))
            assert len(seen) < 100, "the search does not end"
        return search, seen

    def measure(self, probes: Iterable[Probe]) -> Iterator[Observation]:
        """Measure each probe."""
        for probe in probes:
            yield self._one(probe)

    def step_seconds(
        self, layout: Layout, ranks: Sequence[RankCost], batches: int = BATCHES
    ) -> float:
        """Return the mean step time of a layout whose rows are assigned by these costs.

        Every call uses the same batches.
        """
        before, self._random = self._random, random.Random(1)
        seconds = self._run(layout, ranks, batches)[0]
        self._random = before
        return seconds

    def _one(self, probe: Probe) -> Observation:
        layout, draws = probe.layout, self._random
        ranks = [
            RankCost(cost, most)
            for cost, most in zip(layout.costs, layout.tokens, strict=True)
            if cost
        ]
        seconds, own, works, largest = self._run(layout, ranks, 1 if layout.length else BATCHES)
        full = tuple(i for i in layout.active if largest[i] > self.most_tokens[i])
        if full:
            return OutOfMemory(probe, full, "full", 1.0)
        factor = draws.gauss(1, self.noise)
        memory = tuple(BASE_BYTES + TOKEN_BYTES * tokens if tokens else None for tokens in largest)
        step, parts = seconds * factor, tuple(part and part * factor for part in own)
        first = step if layout.costs or layout.length else step + 1.0  # the first step of a process
        return Timed(
            probe, step, step * 0.997, step * 1.003, 30, memory, parts, first, 2.0, work=works
        )

    def _run(
        self, layout: Layout, ranks: Sequence[RankCost], batches: int
    ) -> tuple[float, tuple[float | None, ...], tuple[Work | None, ...], list[int]]:
        steps, assigned = [], [self._passes(layout, ranks) for _ in range(batches)]
        sums = [[0.0] * 4 for _ in self.costs]
        largest = [0] * len(self.costs)
        for parts in assigned:
            own = {i: _work(passes) for i, passes in parts.items()}
            steps.append(
                max(self.step_s + self.costs[i].seconds_for(work) for i, work in own.items())
            )
            for i, work in own.items():
                amounts = msgspec.structs.astuple(work)
                sums[i] = [
                    each + amount / batches for each, amount in zip(sums[i], amounts, strict=True)
                ]
                largest[i] = max(largest[i], *(len(each) * max(each) for each in parts[i]))
        works = tuple(Work(*sums[i]) if layout.shares[i] else None for i in range(len(sums)))
        parts_s = tuple(
            self.step_s + self.costs[i].seconds_for(work) if work else None
            for i, work in enumerate(works)
        )
        apart = len({self.hosts[i] for i in layout.active}) > 1 if self.hosts else False
        sync = (self.sync_s if len(layout.active) > 1 else 0.0) + (self.across_s if apart else 0.0)
        return sum(steps) / batches + sync, parts_s, works, largest

    def _passes(self, layout: Layout, ranks: Sequence[RankCost]) -> dict[int, list[list[int]]]:
        """Return the row lengths of each device's passes in a step."""
        if layout.length:
            (i,) = layout.active
            return {i: [[layout.length] * layout.pass_rows[i]] * layout.passes(i)}
        batch = [self._random.choice(self.lengths) for _ in range(layout.global_batch)]
        if ranks:
            passes = (
                RowAssigner(tuple(ranks), tuple(float(layout.shares[i]) for i in layout.active))
                .assign(batch)
                .passes
            )
            assigned = zip(layout.active, passes, strict=True)
            return {i: [[batch[row] for row in each] for each in own] for i, own in assigned}
        parts = {
            i: batch[start:stop]
            for i, (start, stop) in enumerate(bounds(layout.shares))
            if stop > start
        }
        rows = layout.pass_rows
        return {
            i: [own[at : at + rows[i]] for at in range(0, len(own), rows[i])]
            for i, own in parts.items()
        }


def _work(passes: Sequence[Sequence[int]]) -> Work:
    padded = [(len(each) * max(each), max(each)) for each in passes]
    tokens = sum(sum(each) for each in passes)
    return Work(
        tokens,
        len(passes),
        sum(each for each, _ in padded),
        sum(each * longest for each, longest in padded),
    )
