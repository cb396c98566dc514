"""Search for plans of models that no device holds, on simulated machines that start slowly.

  python -m benchmarks.shard_searches [--seeds 600] [--first 0] [--budget 120] [--json FILE]
                                      [--beside FILE] [--processes 2]

Each seed draws two to four devices of 3 to 40 GiB, a model that fits only in shards, step times
with a fixed part of 0.05 to 4 s, memory that grows faster with more rows, and processes that take
3, 10 or 20 s to start. A group takes 4 s longer, and ends if it runs out of memory. Prints how many
searches end without a plan, how many steps over several devices run out of memory, and, with the
file of another version, how much slower each version's plans are than the better one's.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec

from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Observation, OutOfMemory, Probe, Problem, Timed
from evener.devices.machine import Machine
from evener.devices.simulated import parse_machine

SIZES_GIB = (3, 4, 5, 6, 8, 11, 12, 16, 24, 40)
STATES_MIB = (3000, 6000, 12_000, 17_000, 30_000, 47_000)
START_SECONDS = (3.0, 10.0, 20.0)
GROUP_SECONDS = 4.0  # that a group takes longer to start than single processes
ENDS_SECONDS = 2.0  # until a group that ran out of memory has ended
MOST_ROWS = 200


class ShardSearch(msgspec.Struct, frozen=True):
    """The result of a search: its plan's samples/s, or None, and failed steps over devices."""

    seed: int
    rate: float | None
    failures: int


class SlowStarts:
    """A simulated prober whose processes take time to start, and whose groups end by failures.

    - `start`: seconds that a process takes to start.
    - `budget`: seconds after which nothing is measured.
    """

    def __init__(self, machine: Machine, seed: int, start: float, budget: float) -> None:
        self._prober = SimulatedProber(machine, seed)
        self._start, self._budget = start, budget
        self._running: set[Layout] = set()  # group keys of the processes that are running
        self._seconds = 0.0
        self.failures = 0  # steps over several devices that ran out of memory

    def measure(self, probes: tuple[Probe, ...]) -> Iterable[Observation]:
        """Yield the outcomes of probes that run at the same time and end within the budget."""
        seen = [
            self._add_start(one)
            for one in self._prober.measure(probes, lambda _: None, threading.Event())
        ]
        began = self._seconds
        self._seconds += max(one.elapsed_seconds for one in seen)
        in_time = [one for one in seen if began + one.elapsed_seconds <= self._budget]
        yield from sorted(in_time, key=lambda one: one.elapsed_seconds)

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._seconds >= self._budget

    def _add_start(self, one: Observation) -> Observation:
        layout = one.probe.layout
        start = 0.0
        if layout.group_key not in self._running:
            start = self._start
            if layout.state:
                start += GROUP_SECONDS
                self._running.clear()
            else:  # a group holds the memory of all its devices
                self._running = {key for key in self._running if not key.state}
            self._running.add(layout.group_key)
        elapsed = one.elapsed_seconds + start
        if isinstance(one, Timed):
            return msgspec.structs.replace(one, elapsed_seconds=elapsed, start_seconds=start)
        if not isinstance(one, OutOfMemory):
            return one
        if layout.state:
            self.failures += 1
            self._running.discard(layout.group_key)
            return msgspec.structs.replace(one, elapsed_seconds=elapsed + ENDS_SECONDS)
        return msgspec.structs.replace(one, elapsed_seconds=elapsed, goes_on=True)


def draw_machine(chance: random.Random) -> Machine:
    """Draw a machine on which a model fits in shards, and on no device by itself."""
    count = chance.choice([2, 2, 2, 3, 4])
    while True:
        state = chance.choice(STATES_MIB)
        gathered = 200 + state * chance.uniform(0.02, 0.15)
        row = state * chance.uniform(0.005, 0.06)
        sizes = [1024 * chance.choice(SIZES_GIB) for _ in range(count)]
        need = state + count * (gathered + 1.5 * row)
        fits = 0.93 * sum(sizes) > need and sum(sizes) < 4 * need
        if fits and max(sizes) < state + gathered + 4 * row:
            break
    memory = _write_memory(chance, state, row)
    tables = [_write_device(chance, size, memory) for size in sizes]
    shards = (
        f"[shards]\nstate_mib = {state}\ngathered_mib = {gathered:.0f}\n"
        f"gradients_mib = {chance.choice([0, state // 4])}\n"
        f"gather_ms = {chance.uniform(5, 400):.1f}\nfragments = {chance.uniform(0, 0.06):.3f}\n"
    )
    return parse_machine((shards + "".join(tables)).encode(), "a drawn machine")


def _write_memory(chance: random.Random, state: float, row: float) -> str:
    """Return a memory curve; rows need the same memory on each device, as the model is the same."""
    base = state + chance.uniform(50, 400)
    bend, steeper = chance.choice([4, 6, 8, 12]), chance.uniform(1, 1.4)
    at_bend = base + row * bend
    return json.dumps(
        [[1, base + row], [bend, at_bend], [400, at_bend + steeper * row * (400 - bend)]]
    )


def _write_device(chance: random.Random, size: int, memory: str) -> str:
    fixed = chance.uniform(50, 4000)
    slope = fixed * chance.uniform(0.002, 0.3)
    curve = [[1, fixed + slope], [MOST_ROWS, fixed + MOST_ROWS * slope]]
    return (
        f'\n[[device]]\nname = "a card"\nmemory_mib = {size}\nmemory_curve = {memory}\n'
        f"curve = {json.dumps(curve)}\nnoise = {chance.uniform(0.01, 0.08):.3f}\n"
    )


def search(seed: int, budget: float) -> ShardSearch:
    """Search on the machine of a seed."""
    chance = random.Random(seed)
    machine = draw_machine(chance)
    prober = SlowStarts(machine, seed, chance.choice(START_SECONDS), budget)
    count = len(machine.devices)
    memory = tuple(machine.usable_memory_bytes(i) for i in range(count))
    problem = Problem(count, memory, max_global_batch=MOST_ROWS, budget_seconds=budget)
    made = Search(problem)
    made.learn_data(SimulatedProber(machine, seed).facts())
    while not prober.is_over and (probes := made.ask()):
        for seen in prober.measure(probes):
            made.tell(seen)
    best = made.best()
    return ShardSearch(seed, None if best is None else best.throughput.value, prober.failures)


def describe(found: Sequence[ShardSearch]) -> str:
    """Describe the results in one line."""
    without = sum(one.rate is None for one in found)
    failures = sum(one.failures for one in found)
    return (
        f"{len(found)} searches: {without} without a plan; {failures} steps over several devices "
        "ran out of memory"
    )


def compare(found: Sequence[ShardSearch], others: Sequence[ShardSearch]) -> Iterator[str]:
    """Yield the mean loss of each version beside the better plan of each seed."""
    rates = {one.seed: one.rate or 0.0 for one in others}
    pairs = [(one.rate or 0.0, rates[one.seed]) for one in found if one.seed in rates]
    pairs = [pair for pair in pairs if max(pair)]
    for name, place in (("this version", 0), ("the other", 1)):
        losses = sorted(1 - pair[place] / max(pair) for pair in pairs)
        yield (
            f"{name}: {fmean(losses):.2%} below the better plan on average, 95th percentile "
            f"{losses[int(0.95 * len(losses))]:.1%} (no plan: 100 %)"
        )


def main() -> None:
    """Search on the machines of all seeds, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=600)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(pool.map(search, seeds, [options.budget] * len(seeds), chunksize=4))
    print(describe(found))
    if options.json:
        options.json.write_bytes(msgspec.json.encode(found))
    if options.beside:
        others = msgspec.json.decode(options.beside.read_bytes(), type=list[ShardSearch])
        print("\n".join(compare(found, others)))


if __name__ == "__main__":
    main()
