"""The transfers between devices in each layout, as tables like nvprof's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer.layout_profile import LayoutProfile
from evener.balancer.probes.protocol import Profiled
from evener.tui.text.formatting import percent, plain, size
from evener.tui.text.tables import Table
from evener.workloads.profiling import Transfer

MOST_ROWS = 8  # of each table, the slowest first


def transfer_tables(profiles: Sequence[LayoutProfile]) -> list[Table]:
    """One for each layout; times are relative to the steps' time without the profiler."""
    return [_table(title, profile) for title, profile in profiles]


def _table(title: str, profile: Profiled | str) -> Table:
    rows: list[tuple[str, ...]] = [("time", "ms", "calls", "avg us", "min us", "max us", "size", "name")]
    if isinstance(profile, str):
        return Table(f"profile of {title}", rows, 0, plain(profile, 200))
    rows += [_row(row, profile.seconds) for row in profile.transfers[:MOST_ROWS]]
    title = f"profile of {title}, {profile.steps} steps of {profile.seconds / profile.steps * 1000:.2f} ms"
    return Table(title, rows, 0, "" if profile.transfers else "nothing moved between devices")


def _row(row: Transfer, total_seconds: float) -> tuple[str, ...]:
    micro = (row.seconds / row.calls, row.shortest_seconds, row.longest_seconds)
    return (
        percent(row.seconds / total_seconds if total_seconds else 0.0, 1),
        f"{row.seconds * 1e3:.2f}",
        str(row.calls),
        *(f"{seconds * 1e6:.1f}" for seconds in micro),
        "-" if row.moved_bytes is None else size(row.moved_bytes),
        plain(row.name, 60),
    )


def transfer_json(profiles: Sequence[LayoutProfile]) -> list[dict[str, object]]:
    """The same as data, with every row."""
    listing: list[dict[str, object]] = []
    for title, profile in profiles:
        if isinstance(profile, str):
            listing.append({"name": title, "trouble": profile})
        else:
            transfers = msgspec.to_builtins(profile.transfers)
            listing.append({"name": title, "steps": profile.steps, "seconds": profile.seconds, "transfers": transfers})
    return listing
