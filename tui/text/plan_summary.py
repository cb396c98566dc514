"""A plan as text: the table of shares, and the comparison with its rivals. Knows no screen."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.session_state import SUM, plan_rivals
from evener.plan import LARGER_BATCH, SOLO_PREFIX, Evidence, Plan, Throughput
from evener.tui.text.formatting import energy_cells, folded, half_width, percent, plain, rate, write_share
from evener.tui.text.tables import align


def summary_lines(plan: Plan, labels: Sequence[str], verdict: str = "", width: int | None = None) -> list[str]:
    """The table, the rivals and the verdict; `labels` are the devices' short names, in the plan's order.

    With `width`, that of a terminal, sentences are broken between words.
    """
    lines = [*share_table(plan, labels), "", *rival_lines(plan, labels)]
    for warning in plan.warnings:
        lines += folded(f"warning: {plain(warning)}", width, "  ")
    return [*lines, "", *folded(plain(verdict), width)] if verdict else lines


def share_table(plan: Plan, labels: Sequence[str]) -> list[str]:
    """One row per device: its share, its ratio, its samples/s within the layout and alone."""
    alone = {
        rival.name.removeprefix(SOLO_PREFIX): rival for rival in plan.evidence if rival.name.startswith(SOLO_PREFIX)
    }
    rows = [("device", "name", "share", "ratio", "samples/s", "alone")]
    combined = plan.throughput.samples_per_second
    for share, label in zip(plan.layout.share, labels, strict=True):
        solo = alone.get(label)
        rows.append(
            (
                label + (f" @{plain(share.limit, 32)}" if share.limit else ""),
                plain(share.name, 32),
                write_share(share.batch, share.micro) if share.batch else "left out",
                f"{share.ratio:.3f}",
                rate(share.ratio * combined) if share.batch else "-",
                _alone(solo),
            )
        )
    total, error = plan.layout.global_batch, half_width(combined, plan.throughput.low, plan.throughput.high)
    rows.append(("together", "", str(total), "1.000", rate(combined), f"± {error}"))
    tokens = f"{rate(plan.throughput.tokens_per_second)} tokens/s, {percent(plan.throughput.padding)} padding"
    return [
        *align(rows, numbers_from=2),
        *([tokens] if plan.throughput.tokens_per_second else []),
        *([_write_energy(plan.throughput)] if plan.throughput.samples_per_joule else []),
    ]


def _write_energy(figure: Throughput) -> str:
    """Samples per joule of all devices, and what they draw for it; those that are left out apart."""
    efficiency, active, idle = energy_cells(figure.samples_per_second, figure.active_watts, figure.idle_watts)
    return f"{efficiency} samples/J at {active} W" + (f", and {idle} W in idle devices" if figure.idle_watts else "")


def _alone(solo: Evidence | None) -> str:
    if solo is None:
        return "-"
    (share,) = solo.layout.active
    return f"{rate(solo.throughput.samples_per_second)} at {write_share(share.batch, share.micro)}"


def rival_lines(plan: Plan, labels: Sequence[str]) -> list[str]:
    """What the plan gains over the even split and the best single device, and its part of the sum of solos."""
    lines, own = [], plan.throughput.samples_per_second
    for rival in plan_rivals(plan, tuple(labels)):
        figure = f"{rival.name}: {rate(rival.samples_per_second)} samples/s"
        if rival.name == SUM:
            lines.append(f"{figure}; the plan reaches {percent(own / rival.samples_per_second, 1)} of it")
        elif rival.batches != plan.layout.batches and (rival.name != LARGER_BATCH or rival.samples_per_second > own):
            gain = rival.gain_for(own)
            versus = f"{'gains' if gain >= 0 else 'loses'} {percent(abs(gain), 1)}"
            where = f"{'on' if rival.device else 'at'} {rival.where}"
            lines.append(f"{figure} {where}; the plan {'is as fast within the error' if rival.tie else versus}")
    return lines
