"""Check whether a plan is the best among similar layouts.

  python -m benchmarks.grid PLAN --devices D [--workload W]

Probes time a grid of shares around the plan in turns. The winner of a grid is also the luckiest of
many measurements; therefore it is timed again in pairs with the plan, and the regret comes from
these pairs alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evener.balancer.jobs import make_job
from evener.balancer.probes.child_prober import Prober, make_prober
from evener.balancer.request import Request
from evener.balancer.types import Layout, OutOfMemory, Probe, Stage, Timed, layout_of
from evener.plan.file import Plan, load_plan


class Grid:
    """Measures the layouts around a plan; keeps their samples/s and the failures."""

    def __init__(self, prober: Prober, seconds: float) -> None:
        self.prober, self.seconds = prober, seconds
        self.rates: dict[Layout, list[float]] = defaultdict(list)
        self.memory: dict[Layout, tuple[int | None, ...]] = {}
        self.failed: dict[Layout, str] = {}
        self._turn = 0

    def measure(self, layout: Layout) -> float | None:
        """Measure a layout once in samples/s; return None if it ran out of memory or failed."""
        self._turn += 1
        probe = Probe(layout, Stage.RACE, self.seconds, self._turn)
        for seen in self.prober.measure((probe,), lambda _: None, threading.Event()):
            if isinstance(seen, Timed):
                self.rates[layout].append(seen.samples_per_second)
                self.memory[layout] = seen.memory_bytes
                return seen.samples_per_second
            self.failed[layout] = "out of memory" if isinstance(seen, OutOfMemory) else seen.detail
        return None

    def all_in_turns(self, layouts: Sequence[Layout], turns: int) -> None:
        """Measure each layout once per turn.

        Every second turn is in reverse order, so that drift affects all layouts equally.
        """
        for turn in range(turns):
            for layout in layouts if turn % 2 == 0 else reversed(layouts):
                if layout not in self.failed:
                    self.measure(layout)

    def winner(self) -> Layout:
        """Return the layout with the highest median samples/s."""
        return max(self.rates, key=lambda layout: statistics.median(self.rates[layout]))

    def paired(self, one: Layout, other: Layout, pairs: int) -> list[float]:
        """Return the speed ratios of `one` to `other` from pairs of measurements.

        The order within a pair alternates.
        """
        ratios = []
        for pair in range(pairs):
            first, second = (one, other) if pair % 2 == 0 else (other, one)
            rates = {first: self.measure(first), second: self.measure(second)}
            mine, theirs = rates[one], rates[other]
            if mine and theirs:
                ratios.append(mine / theirs)
        return ratios


def around(plan: Plan, steps: int, width: float) -> list[Layout]:
    """Return the layouts around a plan.

    They are the plan's layout, its shares moved both ways in steps of `width` of the batch, the
    even split, and solos. Each runs in the fewest passes that fit; if that is more than one, the
    plan's shares also run in one more pass.
    """
    batches, total = plan.batches, plan.layout.global_batch
    first, second = _largest_two(batches)
    layouts = [chosen(plan), lay(plan, batches, more=1)]
    for step in range(-steps, steps + 1):
        moved = list(batches)
        change = round(step * width * total)
        moved[first], moved[second] = moved[first] + change, moved[second] - change
        if step and min(moved[first], moved[second]) > 0:
            layouts.append(lay(plan, tuple(moved)))
    even = tuple(
        total * (i + 1) // len(batches) - total * i // len(batches) for i in range(len(batches))
    )
    alone = (
        tuple(total * (i == position) for i in range(len(batches)))
        for position in range(len(batches))
    )
    layouts += [lay(plan, shares) for shares in (even, *alone)]
    return list(dict.fromkeys(layouts))


def chosen(plan: Plan) -> Layout:
    """Return the layout of the plan's shares and passes."""
    return layout_of(plan.batches, tuple(share.micro or share.batch for share in plan.layout.share))


def lay(plan: Plan, batches: tuple[int, ...], more: int = 0) -> Layout:
    """Return the layout of these shares in the fewest passes that the plan knows to fit.

    If that is more than one pass, `more` passes are added.
    """
    micro = []
    for batch, share in zip(batches, plan.layout.share, strict=True):
        passes = -(-batch // (share.most or batch or 1))
        micro.append(-(-batch // (passes + more)) if passes > 1 else batch)
    return layout_of(batches, tuple(micro))


def _largest_two(batches: Sequence[int]) -> tuple[int, int]:
    """Return the positions of two devices between which rows are moved.

    One of them may have no share so far.
    """
    first, second = sorted(range(len(batches)), key=lambda i: -batches[i])[:2]
    return first, second


def run(plan: Plan, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the whole grid and return it as a JSON document."""
    prober = make_prober(make_job(request))
    try:
        grid = Grid(prober, options.seconds)
        own = chosen(plan)
        grid.all_in_turns(around(plan, options.steps, options.width), options.turns)
        winner = grid.winner()
        ratios = [1.0] if winner == own else grid.paired(own, winner, options.pairs)
    finally:
        prober.close()
    return {
        "plan": {"batches": plan.batches, "samples_per_second": plan.throughput.samples_per_second},
        "grid": [
            {
                "batches": layout.shares,
                "micro": layout.micro,
                "median": statistics.median(rates),
                "rates": rates,
            }
            for layout, rates in grid.rates.items()
        ],
        "failed": [
            {"batches": layout.shares, "micro": layout.micro, "why": why}
            for layout, why in grid.failed.items()
        ],
        "winner": {"batches": winner.shares, "micro": winner.micro},
        "plan_over_winner": statistics.median(ratios) if ratios else None,
        "pairs": ratios,
        "memory_bytes": grid.memory.get(own),
    }


def main() -> None:
    """Measure the grid and print the document; a summary goes to stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--workload")
    parser.add_argument("--framework", default="tensorflow")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the workload"
    )
    parser.add_argument("--steps", type=int, default=4, help="each way")
    parser.add_argument(
        "--width", type=float, default=0.02, help="of a step, as a part of the global batch"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--pairs", type=int, default=4, help="of measurements of the plan and the winner"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    options = parser.parse_args()
    settings = dict(each.split("=", 1) for each in options.set)
    request = Request(
        devices=options.devices,
        workload=options.workload,
        framework=options.framework,
        settings=settings,
    )
    found = run(load_plan(options.plan), request, options)
    print(json.dumps(found))
    for row in sorted(found["grid"], key=lambda row: -row["median"]):
        passes = f" in passes of {', '.join(map(str, row['micro']))}" if row["micro"] else ""
        print(
            f"{' + '.join(map(str, row['batches'])):>24}  {row['median']:14,.0f} samples/s{passes}",
            file=sys.stderr,
        )
    print(
        f"the plan / the winner of the grid, in pairs: {found['plan_over_winner']:.4f}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
