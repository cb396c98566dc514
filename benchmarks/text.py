"""Texts of unequal length: rows dealt by cost against rows as they come. `python -m benchmarks.text`.

A plan for two devices of one speed, and one where the second is held to 60 %. Then turns of five layouts at the plan's
global batch, all with real rows: dealt by the plan's costs, as many rows by speed as they come, as many on each as they
come, and each device alone, dealt by its cost. The rows for docs/benchmarks/text.md go to stdout.
"""

from __future__ import annotations

import argparse
import sys
import threading
from statistics import median

import msgspec

from evener.balancer.events import Finished
from evener.balancer.probes.prober import Prober
from evener.balancer.request import Request
from evener.balancer.resolve import make_prober, resolve_request
from evener.balancer.session import Session
from evener.balancer.types import Layout, Probe, Timed, layout_of
from evener.shares import apportion

DEALT, BY_SPEED, EVENLY = "by cost", "rows by speed", "rows evenly"
USUAL_ROWS, USUAL_LENGTH = 8, 40  # of the pass by which speeds are compared


def main() -> None:
    """Print both tables."""
    options = parse()
    print("| devices | rows | layout | tokens/s | padding | against rows by speed | against the sum of the solos |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for devices in ("{},{}", "{},{}@60%"):
        compare(options, devices.format(*options.devices))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cpu:0", "cpu:1"], help="two of one speed")
    parser.add_argument("--workload", default="torch_text")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the workload")
    parser.add_argument("--batch", type=int, default=64, help="the global batch")
    parser.add_argument("--budget", type=float, default=75.0, help="of each search, in seconds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    return parser.parse_args()


def compare(options: argparse.Namespace, devices: str) -> None:
    """Plan, measure in turns, and print the rows of the table."""
    settings = dict(each.split("=", 1) for each in options.set)
    request = Request(devices, workload=options.workload, framework="torch", settings=settings)
    request = msgspec.structs.replace(request, global_batch=options.batch, budget_seconds=options.budget)
    layouts = list_layouts(find_split(request))
    prober = make_prober(resolve_request(request))
    try:
        figures = measure(prober, layouts, options.turns, options.seconds)
    finally:
        prober.close()
    rates = {name: [one.tokens / one.step_seconds for one in seen] for name, seen in figures.items()}
    solos = [sum(each) for each in zip(*(rates[name] for name in rates if name.startswith("alone")), strict=True)]
    for name, rate in rates.items():
        padding = median(one.padding for one in figures[name])
        gain = median(a / b for a, b in zip(rate, rates[BY_SPEED], strict=True))
        part = median(a / b for a, b in zip(rate, solos, strict=True))
        row = f"| {devices} | {options.batch} | {name} | {median(rate):,.0f} | {100 * padding:.1f} % |"
        print(f"{row} {gain:.2f} x | {part:.3f} |", flush=True)
    ideal = median(a / b for a, b in zip(solos, rates[BY_SPEED], strict=True))
    print(f"| {devices} | {options.batch} | ideal: the sum of the solos | {median(solos):,.0f} | | {ideal:.2f} x | 1 |")


def find_split(request: Request) -> Layout:
    """The split by cost that a search finds; SystemExit if it finds none."""
    session = Session(request)
    (verdict,) = [event.verdict for event in session.events() if isinstance(event, Finished)]
    session.close()
    print(f"{request.devices}: {verdict}", file=sys.stderr, flush=True)
    splits = [one.layout for one in session.search.candidates() if one.layout.kind == "split" and one.layout.costs]
    if not splits:
        raise SystemExit("No split by cost was measured.")
    return splits[0]


def list_layouts(split: Layout) -> dict[str, Layout]:
    """What is compared, by name."""
    devices, batch = len(split.shares), split.global_batch
    alone = {
        f"alone {position}": Layout(
            "solo",
            tuple(batch * (i == position) for i in range(devices)),
            costs=tuple(cost if i == position else None for i, cost in enumerate(split.costs)),
            tokens=tuple(most if i == position else 0 for i, most in enumerate(split.tokens)),
        )
        for position in range(devices)
    }
    speeds = [1 / cost.seconds(USUAL_ROWS, USUAL_LENGTH) for cost in split.costs if cost]
    return {
        DEALT: split,
        BY_SPEED: layout_of(apportion(batch, speeds)),
        EVENLY: layout_of(apportion(batch, [1.0] * devices)),
        **alone,
    }


def measure(prober: Prober, layouts: dict[str, Layout], turns: int, seconds: float) -> dict[str, list[Timed]]:
    """Every layout once a turn; a first turn, which starts the children, isn't counted. SystemExit if one fails."""
    figures: dict[str, list[Timed]] = {name: [] for name in layouts}
    for turn in range(turns + 1):
        for name, layout in layouts.items():
            probe = Probe(layout, "race", seconds if turn else 0.5, turn, whole=True)
            (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
            if not isinstance(seen, Timed):
                raise SystemExit(f"{name}: {seen}")
            if turn:
                figures[name].append(seen)
    return figures


if __name__ == "__main__":
    main()
