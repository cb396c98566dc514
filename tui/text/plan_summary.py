"""A plan as a person reads it: the table of shares, the comparison with its rivals. Knows no screen."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.session_state import BEST_SINGLE, EVEN, LARGER, SOLO
from evener.plan import Evidence, Layout, Plan, Throughput
from evener.tui.text.formatting import folded, percent, plain, rate


def summary_lines(plan: Plan, labels: Sequence[str], verdict: str = "", width: int | None = None) -> list[str]:
    """The table, the rivals and the verdict; `labels` are the devices' short names, in the plan's order.

    With `width`, a terminal's, sentences are broken between words.
    """
    lines = [*share_table(plan, labels), "", *rival_lines(plan, labels)]
    for warning in plan.warnings:
        lines += folded(f"warning: {plain(warning)}", width, "  ")
    return [*lines, "", *folded(plain(verdict), width)] if verdict else lines


def share_table(plan: Plan, labels: Sequence[str]) -> list[str]:
    """One row a device: its share, its ratio, its samples/s within the layout and alone."""
    alone = {rival.name.removeprefix(SOLO): rival for rival in plan.evidence if rival.name.startswith(SOLO)}
    rows = [("device", "name", "share", "ratio", "samples/s", "alone")]
    combined = plan.throughput.samples_per_second
    for share, label in zip(plan.layout.share, labels, strict=True):
        solo = alone.get(label)
        rows.append(
            (
                label + (f" @{plain(share.limit, 32)}" if share.limit else ""),
                plain(share.name, 32),
                str(share.batch) if share.batch else "left out",
                f"{share.ratio:.3f}",
                rate(share.ratio * combined) if share.batch else "-",
                _alone(solo),
            )
        )
    total = plan.layout.global_batch
    rows.append(("together", "", str(total), "1.000", rate(combined), interval(plan.throughput)))
    return align(rows, numbers_from=2)


def _alone(solo: Evidence | None) -> str:
    if solo is None:
        return "-"
    return f"{rate(solo.throughput.samples_per_second)} at {solo.layout.global_batch}"


def interval(throughput: Throughput) -> str:
    """Half the width of the 95 % interval, as a part of the figure."""
    half = (throughput.high - throughput.low) / 2
    return f"± {percent(half / throughput.samples_per_second, 1)}" if throughput.samples_per_second else ""


def rival_lines(plan: Plan, labels: Sequence[str]) -> list[str]:
    """What the plan gains over the even split and the best single device, and its part of the sum of solos."""
    lines = []
    for name in (EVEN, BEST_SINGLE, LARGER):
        rival = next((rival for rival in plan.evidence if rival.name == name), None)
        if rival is not None and rival.layout.batches != plan.layout.batches:
            gain = plan.throughput.samples_per_second / rival.throughput.samples_per_second - 1
            lines.append(
                f"{name}: {rate(rival.throughput.samples_per_second)} samples/s {_where(rival.layout, labels)}"
                f"; the plan {'gains' if gain >= 0 else 'loses'} {percent(abs(gain), 1)}"
            )
    solos = [rival for rival in plan.evidence if rival.name.startswith(SOLO)]
    if len(solos) > 1:
        total = sum(rival.throughput.samples_per_second for rival in solos)
        part = plan.throughput.samples_per_second / total
        lines.append(f"sum of solos: {rate(total)} samples/s; the plan reaches {percent(part, 1)} of it")
    return lines


def _where(layout: Layout, labels: Sequence[str]) -> str:
    """The shares, or the one device of several that computes, with its batch."""
    active = [label for label, batch in zip(labels, layout.batches, strict=True) if batch]
    who = f"on {active[0]} " if len(active) == 1 < len(labels) else ""
    return f"{who}at {batches_words(layout)}"


def batches_words(layout: Layout) -> str:
    """820+568, or the one device's batch."""
    return "+".join(str(batch) for batch in layout.batches if batch)


def align(rows: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """Columns two spaces apart, those from `numbers_from` flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column >= numbers_from else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
