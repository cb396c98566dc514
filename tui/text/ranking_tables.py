"""Tables and JSON of `evener compare`, which compares layouts by their speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.balancer.families import MODES, is_even
from evener.balancer.number_format import half_width, percent, rate, size
from evener.balancer.objectives import mean_power
from evener.balancer.result.judge import padding_share, waiting_share
from evener.balancer.result.rivals import name_all
from evener.balancer.search.ranking import RankedLayout
from evener.balancer.search.report import SearchReport
from evener.balancer.statistics import is_known
from evener.balancer.types import Failed, Observation, OutOfMemory, Power, Timed
from evener.printable import plain

from .formatting import Table, energy_cells
from .summaries import outcome_name, share_text

SCALING_STEPS = 1000  # the tables give the seconds for this many steps
RANKING_NOTE = (
    "±: half of the 95 % interval. waiting: part of a step in which even the busiest device "
    "waits for others or for"
    " data. against the winner: as measured alternately, which the samples/s alone may not show. "
    "turns: how often it was"
    " measured in turn with the others."
)


def ranking_table(report: SearchReport, labels: Sequence[str]) -> Table:
    """Return a table of all compared layouts, fastest first."""
    counts = ("tokens/s", "padding") if report.mean_length else ()
    drawn = [mean_power(report.turns_of(ranked.candidate.layout)) for ranked in report.ranking]
    energy = ("samples/J", "W", "idle W") if any(drawn) else ()
    rows = [
        (
            "layout",
            "where",
            *counts,
            "samples/s",
            "±",
            *energy,
            "step ms",
            "waiting",
            "against the winner",
            "turns",
        )
    ]
    standings = report.ranking
    titles = name_all([standing.candidate for standing in standings], len(labels))
    for title, one, power in zip(titles, standings, drawn, strict=True):
        waiting = (
            waiting_share(report.turns_of(one.candidate.layout))
            if len(one.candidate.layout.active) > 1
            else None
        )
        rows.append(
            (
                title,
                describe_devices(one, labels),
                *_token_cells(report, one),
                rate(one.throughput.value),
                half_width(one.throughput.value, one.throughput.low, one.throughput.high),
                *(_energy_cells(one, power) if energy else ()),
                f"{one.step.value * 1000:.2f}",
                "-" if waiting is None else percent(waiting, 1),
                describe_gain(one, standings[0]),
                str(one.turns),
            )
        )
    return Table("", rows, 2, RANKING_NOTE)


def _token_cells(report: SearchReport, ranked: RankedLayout) -> tuple[str, ...]:
    """Return the table cells for tokens/s and padding, or none if the length of rows is unknown."""
    if not report.mean_length:
        return ()
    padding = padding_share(report.turns_of(ranked.candidate.layout))
    return rate(ranked.throughput.value * report.mean_length), percent(padding, 1)


def _energy_cells(ranked: RankedLayout, power: Power | None) -> tuple[str, str, str]:
    power = power or Power(0.0, 0.0)
    return energy_cells(ranked.throughput.value, power.active_watts, power.idle_watts)


def describe_devices(ranked: RankedLayout, labels: Sequence[str]) -> str:
    """Return the devices of a layout with their shares, such as "GPU:0[640] GPU:1[384]"."""
    layout = ranked.candidate.layout
    if layout.traits.placed:
        return f"{' '.join(labels[i] for i in layout.active)} [{layout.global_batch}]"
    words = " ".join(f"{labels[i]}[{share_text(layout, i)}]" for i in layout.active)
    return words if layout.processes == 1 else f"{layout.processes} x {words}"


def describe_gain(ranked: RankedLayout, winner: RankedLayout) -> str:
    """Return a layout's gain or loss against the winner, such as "-9.0 % (-9.4 to -8.6)".

    The numbers in parentheses are the 95 % interval. For the winner itself, returns "chosen". A
    remark may precede the numbers:

    - "tie": equally fast.
    - "unclear": perhaps a tie.
    - "too uncertain": the measurements don't show which one is faster.
    - "larger batch": faster, but not chosen because of its larger batch.
    """
    if ranked.against is None:
        return "chosen"
    low, high = (
        f"{100 * max(-1.0, value):+.1f}" for value in (ranked.against.low, ranked.against.high)
    )
    notes = []
    batch = ranked.candidate.layout.global_batch
    faster = ranked.throughput.value > winner.throughput.value
    if not is_known(ranked.throughput, winner.throughput):
        notes.append("too uncertain")
    elif ranked.tie:
        notes.append("unclear" if ranked.unclear else "tie")
    if faster and batch > winner.candidate.layout.global_batch and ranked.candidate.synchronous:
        notes.append("larger batch")
    return ", ".join([*notes, f"{100 * ranked.against.value:+.1f} % ({low} to {high})"])


def packing_tables(report: SearchReport) -> list[Table]:
    """Return a table for each way of sharing a device between several training runs."""
    heads = ("trainings", "batch", "samples/s together", f"s per {SCALING_STEPS} steps", "memory")
    packs = report.packings
    return [
        Table(f"packing{MODES[mode]}", [heads, *map(_pack_row, seen)], 0) for mode, seen in packs
    ]


def _pack_row(observation: Observation) -> tuple[str, str, str, str, str]:
    layout = observation.probe.layout
    head = (str(layout.processes), str(layout.global_batch))
    if isinstance(observation, OutOfMemory):
        return (*head, "out of memory", "-", "-")
    if isinstance(observation, Failed):
        return (*head, f"failed: {plain(observation.detail, 60)}", "-", "-")
    held = observation.memory_bytes[layout.active[0]]
    seconds = f"{observation.step_seconds * SCALING_STEPS:.1f}"
    return (
        *head,
        rate(observation.samples_per_second),
        seconds,
        "-" if held is None else size(held),
    )


def scaling_table(report: SearchReport) -> Table:
    """Return a table that shows how equal shares scale from one device to several.

    It is empty unless a single device and equal shares over several devices were measured.
    """
    plain_ones = [ranked for ranked in report.ranking if not ranked.candidate.layout.knobs]
    single = next((one for one in plain_ones if one.candidate.layout.traits.alone), None)
    together = [one for one in plain_ones if one.candidate.layout.traits.together]
    evens = [one for one in together if is_even(one.candidate.layout)]
    evens.sort(key=lambda one: len(one.candidate.layout.active))
    rows = [("devices", "global batch", f"s per {SCALING_STEPS} steps", "samples/s", "times one")]
    scaled = [single, *evens] if single is not None and evens else []
    for one in scaled:
        layout = one.candidate.layout
        times = one.throughput.value / scaled[0].throughput.value
        seconds = f"{one.step.value * SCALING_STEPS:.1f}"
        row = (
            str(len(layout.active)),
            str(layout.global_batch),
            seconds,
            rate(one.throughput.value),
            f"{times:.2f}",
        )
        rows.append(row)
    return Table("equal shares over 1, 2, ... devices", rows, 0)


def ranking_json(report: SearchReport, labels: Sequence[str]) -> dict[str, Any]:
    """Return the compared layouts and packings as JSON data. The keys include the units."""
    standings = report.ranking
    titles = name_all([standing.candidate for standing in standings], len(labels))
    return {
        "layouts": [
            {"name": title, **_ranked_json(report, one)}
            for title, one in zip(titles, standings, strict=True)
        ],
        "packing": [
            {"mode": mode or "processes", "measured": [_pack_json(one) for one in seen]}
            for mode, seen in report.packings
        ],
    }


def _ranked_json(report: SearchReport, ranked: RankedLayout) -> dict[str, object]:
    layout = ranked.candidate.layout
    difference = ranked.against
    interval = None if difference is None else [difference.low, difference.high]
    turns = report.turns_of(layout)
    power = mean_power(turns)
    return {
        "kind": ranked.candidate.family.name,
        "batches": layout.shares,
        "micro": layout.pass_rows,
        "processes": layout.processes,
        "placement": layout.placement,
        "knobs": layout.knobs,
        "samples_per_second": ranked.throughput.value,
        "samples_per_second_interval": [ranked.throughput.low, ranked.throughput.high],
        "tokens_per_second": ranked.throughput.value * report.mean_length or None,
        "padding": padding_share(turns) if report.mean_length else None,
        "samples_per_joule": power.samples_per_joule(ranked.throughput.value) if power else None,
        "active_watts": power and power.active_watts,
        "idle_watts": power and power.idle_watts,
        "step_milliseconds": ranked.step.value * 1000,
        "moved_share": waiting_share(turns) if len(layout.active) > 1 else None,
        "against_winner": None if difference is None else difference.value,
        "against_winner_interval": interval,
        "paired": difference is not None,
        "tie": ranked.tie,
        "unclear": ranked.unclear,
        "turns": ranked.turns,
    }


def _pack_json(observation: Observation) -> dict[str, object]:
    layout = observation.probe.layout
    timed = observation if isinstance(observation, Timed) else None
    return {
        "processes": layout.processes,
        "batch": layout.global_batch,
        "samples_per_second": timed and timed.samples_per_second,
        "step_milliseconds": timed and timed.step_seconds * 1000,
        "memory_bytes": timed and timed.memory_bytes[layout.active[0]],
        "outcome": outcome_name(observation),
    }
