"""Texts of unequal length: rows dealt by cost against rows as they come. `python -m
benchmarks.text`.

A plan for two devices of one speed, and one where the second is held to 60 %. Then turns of layouts
at the plan's global batch, all with real rows: dealt by the plan's costs; as many rows by speed as
they come; each device alone, dealt by its cost, and both alone at the same time. The second table
says where the split loses against the sum of the solos. The tables for docs/benchmarks/text.md go
to stdout; on two slices of a CPU that takes under 6 minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from evener.balancer.events import Finished
from evener.balancer.intake import take_in
from evener.balancer.probes.child_prober import Prober, make_prober
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.types import Layout, Probe, Timed, layout_of
from evener.shares.whole_rows import apportion

DEALT, BY_SPEED, AT_ONCE = "by cost", "rows by speed", "both alone, at once"
USUAL_ROWS, USUAL_LENGTH = 8, 40  # of the pass by which speeds are compared

Figures = dict[str, list[tuple[Timed, ...]]]  # by what was measured, of each turn


def main() -> None:
    """Print both tables."""
    options = parse()
    losses = []
    print(
        "| devices | rows | layout | step | tokens/s | padding | against rows by speed | "
        "against the sum of the solos |"
    )
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    losses = [
        compare(options, devices.format(*options.devices)) for devices in ("{},{}", "{},{}@60%")
    ]
    print(
        "\n| devices | at once | own work | finish | exchange | all |\n| --- | ---: | ---: | "
        "---: | ---: | ---: |"
    )
    print("\n".join(losses))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cpu:0", "cpu:1"], help="two of one speed")
    parser.add_argument("--workload", default="torch_text")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the workload"
    )
    parser.add_argument("--batch", type=int, default=512, help="the global batch")
    parser.add_argument("--budget", type=float, default=40.0, help="of each search, in seconds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--share", action="store_true", help="run beside other measurements")
    return parser.parse_args()


def compare(options: argparse.Namespace, devices: str) -> str:
    """Plan, measure in turns, and print the rows of the first table; returns that of the second."""
    settings = dict(each.split("=", 1) for each in options.set)
    request = Request(
        devices,
        workload=options.workload,
        framework="torch",
        settings=settings,
        share=options.share,
    )
    request = msgspec.structs.replace(
        request, global_batch=options.batch, budget_seconds=options.budget
    )
    layouts = list_layouts(find_split(request))
    prober = make_prober(take_in(request))
    try:
        figures = measure(prober, layouts, options.turns, options.seconds)
    finally:
        prober.close()
    rates = {name: [sum(map(rate, turn)) for turn in turns] for name, turns in figures.items()}
    solos = [
        sum(each)
        for each in zip(*(rates[name] for name in rates if name.startswith("alone")), strict=True)
    ]
    for name, own in rates.items():
        seen = [each for turn in figures[name] for each in turn]
        step, padding = (
            median(each.step_seconds for each in seen),
            median(each.padding for each in seen),
        )
        row = (
            f"{devices} | {options.batch} | {name} | {1e3 * step:.0f} ms | {median(own):,.0f} "
            f"| {100 * padding:.1f} %"
        )
        gain, part = compare_rates(own, rates[BY_SPEED]), compare_rates(own, solos)
        print(f"| {row} | {gain:.2f} x | {part:.3f} |", flush=True)
    parts = [
        compare_rates(rates[AT_ONCE], solos),
        *explain(figures),
        compare_rates(rates[DEALT], solos),
    ]
    return f"| {devices} | " + " | ".join(f"{part:.3f}" for part in parts) + " |"


def rate(seen: Timed) -> float:
    """Tokens/s."""
    return seen.tokens / seen.step_seconds


def compare_rates(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios within a turn."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def explain(figures: Figures) -> list[float]:
    """What the split loses against both devices alone at once, in three factors.

    Its ranks' own work for their tokens, as devices alone take for as many over what they took; the
    mean of the ranks' own work over the longest; and that over the step, which has the exchange and
    waiting too. NaN where own work isn't known, as on a GPU.
    """
    factors = []
    for (split,), solos in zip(figures[DEALT], figures[AT_ONCE], strict=True):
        own = [math.nan if seconds is None else seconds for seconds in split.device_seconds]
        alone = [each.step_seconds / each.tokens for each in solos]
        least = sum(
            each * work.tokens for each, work in zip(alone, split.work, strict=True) if work
        )
        factors.append((least / sum(own), fmean(own) / max(own), max(own) / split.step_seconds))
    return [median(each) for each in zip(*factors, strict=True)]


def find_split(request: Request) -> Layout:
    """The split by cost that a search finds; SystemExit if it finds none."""
    session = Session(open_run(request))
    (verdict,) = [event.verdict for event in session.events() if isinstance(event, Finished)]
    session.close()
    print(f"{request.devices}: {verdict}", file=sys.stderr, flush=True)
    splits = [one.candidate.layout for one in session.search.ranking()]
    splits = [layout for layout in splits if layout.kind == "split" and layout.costs]
    if not splits:
        raise SystemExit("No split by cost was measured.")
    return splits[0]


def list_layouts(split: Layout) -> dict[str, tuple[Layout, ...]]:
    """What is compared, by name; layouts beside each other are measured at the same time."""
    devices, batch = len(split.shares), split.global_batch
    alone = tuple(
        Layout(
            "solo",
            tuple(batch * (i == position) for i in range(devices)),
            costs=tuple(cost if i == position else None for i, cost in enumerate(split.costs)),
            tokens=tuple(most if i == position else 0 for i, most in enumerate(split.tokens)),
        )
        for position in range(devices)
    )
    speeds = [1 / cost.seconds(USUAL_ROWS, USUAL_LENGTH) for cost in split.costs if cost]
    return {
        DEALT: (split,),
        BY_SPEED: (layout_of(apportion(batch, speeds)),),
        AT_ONCE: alone,
        **{f"alone {position}": (layout,) for position, layout in enumerate(alone)},
    }


def measure(
    prober: Prober, layouts: dict[str, tuple[Layout, ...]], turns: int, seconds: float
) -> Figures:
    """All of them once a turn; a first turn, which starts the children, isn't counted. SystemExit
    if one fails.
    """
    figures: Figures = {name: [] for name in layouts}
    for turn in range(turns + 1):
        for name, chosen in layouts.items():
            probes = tuple(
                Probe(each, "race", seconds if turn else 0.5, turn, whole=True) for each in chosen
            )
            seen = prober.measure(probes, lambda _: None, threading.Event())
            by_place = sorted(
                (each for each in seen if isinstance(each, Timed)),
                key=lambda each: each.probe.layout.active,
            )
            if len(by_place) < len(chosen):
                raise SystemExit(f"{name}: {seen}")
            if turn:
                figures[name].append(tuple(by_place))
    return figures


if __name__ == "__main__":
    main()
