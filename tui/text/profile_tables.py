"""Where a step's time goes between devices: the profiler's table of each layout, as nvprof prints it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.protocol import Profiled
from evener.balancer.request import Request
from evener.balancer.resolve import make_prober, understand
from evener.balancer.result.explain_ranking import name
from evener.balancer.search.comparison import Comparison
from evener.balancer.search.layouts import Candidate
from evener.tui.text.formatting import percent, plain, size
from evener.tui.text.plan_summary import align
from evener.workloads.profiling import Transfer

STEPS = 20  # profiled of each layout
MOST_ROWS = 8  # of each table, the dearest first
Table = tuple[str, Profiled | str]


def profile_layouts(request: Request, found: Comparison, devices: int, stop: threading.Event) -> list[Table]:
    """Profile the layouts of the ranking that lie on several devices, and the best single one; by name."""
    bench = understand(request)
    if bench.machine is not None:
        return [("simulated devices", "there is no framework whose profiler could look")]
    prober = make_prober(bench)
    tables: list[Table] = []
    try:
        for candidate in _worth_it(found):
            if stop.is_set() or not isinstance(prober, ChildProber):
                break
            tables.append((name(candidate, devices), prober.profile(candidate.layout, STEPS, stop)))
    finally:
        prober.close()
    return tables


def _worth_it(found: Comparison) -> list[Candidate]:
    wanted = [one.candidate for one in found.standings()]
    return [one for one in wanted if one.family == "solo" or len(one.layout.active) > 1]


def transfer_lines(tables: Sequence[Table]) -> list[str]:
    """One table a layout; the share is of the steps' time without the profiler."""
    lines: list[str] = []
    for title, told in tables:
        if isinstance(told, str):
            lines += [f"profile of {title}: {plain(told, 200)}", ""]
            continue
        lines += [f"profile of {title}, {told.steps} steps of {told.seconds / told.steps * 1000:.2f} ms:"]
        lines += [*_table(told), ""] if told.transfers else ["  nothing moved between devices", ""]
    return lines


def _table(told: Profiled) -> list[str]:
    rows: list[tuple[str, ...]] = [("time", "ms", "calls", "avg us", "min us", "max us", "moved", "name")]
    rows += [_row(row, told.seconds) for row in told.transfers[:MOST_ROWS]]
    return align(rows, numbers_from=0)


def _row(row: Transfer, of_seconds: float) -> tuple[str, ...]:
    micro = (row.seconds / row.calls, row.shortest_seconds, row.longest_seconds)
    return (
        percent(row.seconds / of_seconds if of_seconds else 0.0, 1),
        f"{row.seconds * 1e3:.2f}",
        str(row.calls),
        *(f"{seconds * 1e6:.1f}" for seconds in micro),
        "-" if row.moved_bytes is None else size(row.moved_bytes),
        plain(row.name, 60),
    )


def transfer_json(tables: Sequence[Table]) -> list[dict[str, object]]:
    """The same as data, every row."""
    listing: list[dict[str, object]] = []
    for title, told in tables:
        if isinstance(told, str):
            listing.append({"name": title, "trouble": told})
            continue
        rows = [
            {
                "name": row.name,
                "calls": row.calls,
                "seconds": row.seconds,
                "shortest_seconds": row.shortest_seconds,
                "longest_seconds": row.longest_seconds,
                "moved_bytes": row.moved_bytes,
            }
            for row in told.transfers
        ]
        listing.append({"name": title, "steps": told.steps, "seconds": told.seconds, "transfers": rows})
    return listing
