"""Time to a target loss of the batch that the noise scale chooses, beside the best batch and that
of most samples/s.

    python -m benchmarks.learning --json FILE [--processes N] [--data FILE.npz] [--save-data
    FILE.npz] [--only NAME]

Three small real workloads (benchmarks/learning_tasks.py) train to a target loss at seven batches,
with three seeds and the rate tuned at each batch. Four simulated machines of unequal devices give
each batch's step time, by the best split. The noise scale is that of a training in shares of 5:2:1
at the workload's own batch. Trainings whose result is in the file aren't repeated; without any left
to do, the table is made from it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from evener.shares.curves import Curve
from evener.shares.waterfill import DeviceCurve, split_fixed

SEEDS = (0, 1, 2)
FINALISTS = 3  # rates that all seeds train at, by the first seed
KINDS = (("plain", "whole"), ("plain", "end"), ("plain", "early"), ("preconditioned", "whole"))


class Machine(NamedTuple):
    """Unequal devices; a second is what a device of speed 1 needs for the rows of the workload's
    own batch.
    """

    name: str
    speeds: tuple[float, ...]
    overhead: float  # seconds of each device's step, beside its rows
    exchange: float  # seconds of the sum of gradients

    def seconds(self, batch: int, own_batch: int) -> float:
        """Seconds of the fastest step of a batch, by any devices."""
        curves = [
            DeviceCurve(place, Curve((0.0,), (self.overhead,), 1 / own_batch / speed), batch)
            for place, speed in enumerate(self.speeds)
        ]
        costs = [0.0, 0.0, *[self.exchange] * (len(curves) - 1)]
        best = split_fixed(curves, costs, batch, fewest=1)
        assert best is not None
        return best.seconds


MACHINES = (
    Machine("two cards, 2:1", (1, 0.5), 0.1, 0.05),
    Machine("three cards, bound by the host", (2, 1, 0.5), 1.0, 0.1),
    Machine("four cards, slow network", (1, 1, 0.5, 0.5), 0.2, 2.5),
    Machine("one fast card and three", (8, 1, 1, 1), 2.0, 1.0),
)

Key = tuple[str, int, float, int]  # workload, batch, rate, seed


def run_one(key: Key, saved: Path | None) -> int | None:
    """A training's steps to the target; in a process of its own."""
    from benchmarks import learning_tasks as tasks

    return tasks.train(key[0], _load(key[0], saved), *key[1:])


def measure_one(name: str, rate: float, seed: int, saved: Path | None) -> dict[str, Any]:
    """The noise scale of a training; in a process of its own."""
    from benchmarks import learning_tasks as tasks

    return tasks.measure(name, _load(name, saved), rate, seed)


def _load(name: str, saved: Path | None) -> Any:
    import torch

    from benchmarks import learning_tasks as tasks

    torch.set_num_threads(1)
    return tasks.load(name, saved)


class Cache:
    """Results on disk, and the processes that make more of them."""

    def __init__(self, path: Path, processes: int, saved: Path | None) -> None:
        self._path, self._saved = path, saved
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"))

    def trainings(self, keys: Iterable[Key]) -> None:
        """Train what isn't there yet."""
        self._fill({_name(key): (run_one, key, self._saved) for key in keys})

    def scales(self, wanted: Iterable[tuple[str, float, int]]) -> None:
        """Measure the noise scales that aren't there yet."""
        self._fill(
            {
                f"noise {name} {seed}": (measure_one, name, rate, seed, self._saved)
                for name, rate, seed in wanted
            }
        )

    def steps(self, key: Key) -> int | None:
        """Steps to the target; None where it wasn't reached, or not tried."""
        steps: int | None = self.found.get(_name(key))
        return steps

    def _fill(self, calls: dict[str, tuple[Any, ...]]) -> None:
        began, missing = (
            time.monotonic(),
            {name: call for name, call in calls.items() if name not in self.found},
        )
        waiting = {self._pool.submit(*call): name for name, call in missing.items()}
        for count, done in enumerate(as_completed(waiting), 1):
            self.found[waiting[done]] = done.result()
            if count % 20 == 0 or count == len(waiting):
                self._path.write_text(json.dumps(self.found, indent=0, sort_keys=True))
                print(
                    f"{count} of {len(waiting)}, {time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


def _name(key: Key) -> str:
    name, batch, rate, seed = key
    return f"{name} {batch} {rate:.4g} {seed}"


def train_all(cache: Cache, only: str | None) -> None:
    """The trainings, those of few rows a step first, as they take longest; then the noise
    scales.
    """
    from benchmarks.learning_tasks import TASKS

    wanted = [(name, task) for name, task in TASKS.items() if only in (None, name)]
    grid = sorted(
        ((name, batch) for name, task in wanted for batch in task.batches), key=lambda one: one[1]
    )
    first = [
        (name, batch, rate, SEEDS[0]) for name, batch in grid for rate in TASKS[name].rates(batch)
    ]
    cache.trainings(first)
    while edges := [key for name, batch in grid for key in _beyond(cache, name, batch)]:
        cache.trainings(edges)
    cache.trainings(
        (*one, rate, seed) for one in grid for rate in _finalists(cache, *one) for seed in SEEDS[1:]
    )
    cache.scales(
        (name, best_rate(cache, name, task.own_batch)[0], seed)
        for name, task in wanted
        for seed in SEEDS
    )


def _tried(cache: Cache, name: str, batch: int) -> list[tuple[float, int | None]]:
    """The rates that the first seed has trained at, and its steps."""
    found = [(text.split(), steps) for text, steps in cache.found.items()]
    own = [
        (float(words[2]), steps)
        for words, steps in found
        if words[:2] == [name, str(batch)] and words[3] == "0"
    ]
    return sorted(own)


def _beyond(cache: Cache, name: str, batch: int) -> list[Key]:
    """The rate beyond the best one, where that is the highest or the lowest of those that were
    tried.
    """
    tried = _tried(cache, name, batch)
    place = min(range(len(tried)), key=lambda at: tried[at][1] or 1e9)
    rates = {0: tried[0][0] / 2, len(tried) - 1: tried[-1][0] * 2}
    return [(name, batch, rates[place], SEEDS[0])] if place in rates else []


def _finalists(cache: Cache, name: str, batch: int) -> list[float]:
    tried = sorted(_tried(cache, name, batch), key=lambda one: one[1] or 1e9)
    return [rate for rate, steps in tried[:FINALISTS] if steps]


def best_rate(cache: Cache, name: str, batch: int) -> tuple[float, list[int]]:
    """The rate of the fewest steps over the seeds, and each seed's steps."""
    found = []
    for rate in _finalists(cache, name, batch):
        steps = [cache.steps((name, batch, rate, seed)) for seed in SEEDS]
        if all(steps):
            found.append((rate, [one for one in steps if one]))
    return min(found, key=lambda one: fmean(one[1]))


def compare(cache: Cache, only: str | None) -> list[dict[str, Any]]:
    """For each workload, seed and machine: time to the target of each way to choose, over that of
    the best batch.
    """
    from benchmarks.learning_tasks import TASKS

    rows = []
    for name, task in TASKS.items():
        if only not in (None, name):
            continue
        steps = {batch: fmean(best_rate(cache, name, batch)[1]) for batch in task.batches}
        for machine in MACHINES:
            seconds = {batch: machine.seconds(batch, task.own_batch) for batch in task.batches}
            for seed in SEEDS:
                ways = {"speed": 1e18, "own batch": None}
                ways |= {" ".join(kind): _noise_scale(cache, name, seed, kind) for kind in KINDS}
                row = {"workload": name, "machine": machine.name, "seed": seed}
                rows.append(row | _judge(steps, seconds, ways, task.own_batch))
    return rows


def _noise_scale(cache: Cache, name: str, seed: int, kind: tuple[str, str]) -> float | None:
    """The measured noise scale; None where the training was too short for one."""
    found = cache.found[f"noise {name} {seed}"][kind[0]][kind[1]]
    return float(found[0]) if found else None


def _judge(steps: Any, seconds: Any, ways: Any, own: int) -> dict[str, Any]:
    """The best batch, and each way's batch with its time over the best one's."""
    took = {batch: steps[batch] * seconds[batch] for batch in steps}
    best = min(took, key=lambda batch: took[batch])
    found: dict[str, Any] = {"best": best}
    for way, scale in ways.items():
        batch = own if scale is None else max(steps, key=_goodput(seconds, scale))
        found[way] = (batch, took[batch] / took[best])
    return found


def _goodput(seconds: dict[int, float], scale: float) -> Callable[[int], float]:
    return lambda batch: batch / seconds[batch] / (batch + scale)


def write_table(cache: Cache, rows: list[dict[str, Any]], only: str | None) -> Iterable[str]:
    """The tables, as Markdown."""
    from benchmarks.learning_tasks import TASKS

    yield (
        "| workload | steps at each batch, rate | noise scale: whole, end, early, "
        "preconditioned (3 seeds) |"
    )
    yield "| --- | --- | --- |"
    for name, task in TASKS.items():
        if only in (None, name):
            best = [(batch, *best_rate(cache, name, batch)) for batch in task.batches]
            steps = ", ".join(
                f"{batch}: {fmean(own):.0f} at {rate:.3g}" for batch, rate, own in best
            )
            found = [
                [_noise_scale(cache, name, seed, kind) or 0.0 for seed in SEEDS] for kind in KINDS
            ]
            scales = "; ".join("/".join(f"{one:.3g}" for one in each) for each in found)
            yield f"| {name} | {steps} | {scales} |"
    ways = [way for way in rows[0] if way not in ("workload", "machine", "seed", "best")]
    yield ""
    yield f"| workload, machine | best | {' | '.join(ways)} |"
    yield "| --- | --- |" + " --- |" * len(ways)
    for name, machine in dict.fromkeys((row["workload"], row["machine"]) for row in rows):
        own = [row for row in rows if (row["workload"], row["machine"]) == (name, machine)]
        cells = [" ".join(f"{row[way][0]} ({row[way][1]:.2f})" for row in own) for way in ways]
        yield f"| {name}, {machine} | {own[0]['best']} | {' | '.join(cells)} |"
    for title, pick in (("mean", fmean), ("worst", max)):
        yield (
            f"| {title} | | "
            f"{' | '.join(f'{pick([row[way][1] for row in rows]):.2f}' for way in ways)} |"
        )


def main() -> None:
    """Train what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--save-data", type=Path)
    parser.add_argument("--only")
    given = parser.parse_args()
    if given.save_data:
        import numpy as np

        from benchmarks.learning_tasks import read_packages

        np.savez_compressed(given.save_data, allow_pickle=True, **read_packages())
        return
    cache = Cache(given.json, given.processes, given.data)
    train_all(cache, given.only)
    rows = compare(cache, given.only)
    print("\n".join(write_table(cache, rows, given.only)))


if __name__ == "__main__":
    main()
