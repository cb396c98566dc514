"""The chart of a search, which plots samples/s of each device alone against its batch size."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.number_format import rate, size
from evener.balancer.session_state import ChartedCurve, SessionState, curves
from evener.balancer.types import Timed

from .cells import Mark, device_tone
from .plot import Chart, PlotPoint, Series, Zone

ALIKE = 0.03  # curves with a smaller relative difference are drawn as one


def curve_chart(state: SessionState) -> Chart:
    """Return the chart with the measured points and the predicted curve of each device.

    Devices whose speeds differ by at most 3 % share one curve.
    """
    found = curves(state)
    groups = _group_alike(found)
    measured = _index_by_point(state)
    series = tuple(_make_series(state, group, measured) for group in groups)
    return Chart(series, _mark_failed_batches(state, found), "rows", "samples/s")


def _group_alike(found: Sequence[ChartedCurve]) -> list[list[ChartedCurve]]:
    groups: list[list[ChartedCurve]] = []
    for curve in found:
        like = next((group for group in groups if _are_alike(group[0], curve)), None)
        if like is None:
            groups.append([curve])
        else:
            like.append(curve)
    return groups


def _are_alike(one: ChartedCurve, other: ChartedCurve) -> bool:
    """Return whether two devices were measured at the same batches and are about equally fast."""
    if not one.measured or len(one.measured) != len(other.measured):
        return False
    for (batch, speed), (other_batch, other_speed) in zip(
        one.measured, other.measured, strict=True
    ):
        if batch != other_batch or abs(speed - other_speed) > ALIKE * max(speed, other_speed):
            return False
    return one.failed_batch == other.failed_batch


def _make_series(
    state: SessionState,
    group: Sequence[ChartedCurve],
    measured: dict[tuple[int, int, float], tuple[int, Timed]],
) -> Series:
    """Return the points and the predicted curve for a group of equally fast devices.

    `measured` maps a point, as (device, batch, samples/s), to the number of its measurement and to
    the measurement itself. Both are shown when the cursor is on the point.
    """
    first = group[0]
    points = [
        _point(curve.device, batch, speed, measured.get((curve.device, batch, speed)))
        for curve in group
        for batch, speed in curve.measured
    ]
    labels = ", ".join(state.devices[curve.device] for curve in group)
    name = state.names[first.device] if first.device < len(state.names) else ""
    sign = str(first.device) if first.device < 10 and len(group) == 1 else Mark.RUNNING
    begin = min(first.measured, default=(0, 0.0))
    believed = [(float(batch), speed) for batch, speed in first.believed if batch > begin[0]]
    if believed and begin[0]:
        believed.insert(0, (float(begin[0]), begin[1]))
    return Series(
        f"{labels} {name}".strip(),
        device_tone(first.device),
        tuple(points),
        tuple(believed),
        known_to=first.largest_tested,
        sign=sign,
    )


def _point(device: int, batch: int, speed: float, seen: tuple[int, Timed] | None) -> PlotPoint:
    if seen is None:
        return PlotPoint(batch, speed, text=f"{rate(speed)} samples/s")
    number, timed = seen
    low, high = batch / timed.high_seconds, batch / max(timed.low_seconds, 1e-12)
    half = (timed.high_seconds - timed.low_seconds) / 2 / timed.step_seconds
    words = [f"{rate(speed)} samples/s ± {100 * half:.1f} %"]
    memory = timed.memory_bytes[device] if device < len(timed.memory_bytes) else None
    if memory:
        words.append(size(memory))
    words.append(f"probe {number}")
    return PlotPoint(batch, speed, low, high, ", ".join(words))


def _index_by_point(state: SessionState) -> dict[tuple[int, int, float], tuple[int, Timed]]:
    """Return the measurements of single devices, to look them up by a point of the chart.

    The keys are (device, batch, samples/s), and the values are (number, measurement).
    """
    found = {}
    before = state.probes - len(state.seen)
    for number, entry in enumerate(state.seen, start=before + 1):
        seen = entry.seen
        if isinstance(seen, Timed) and seen.probe.layout.traits.alone:
            layout = seen.probe.layout
            for device in layout.active:
                key = device, layout.global_batch, seen.samples_per_second
                found[key] = number, seen
    return found


def _mark_failed_batches(
    state: SessionState, charted_curves: Sequence[ChartedCurve]
) -> tuple[Zone, ...]:
    """Return zones that mark the batch sizes at which a device ran out of memory.

    The largest of them is the left edge of a hatched zone without a right edge. Each smaller one is
    marked with a vertical line.
    """
    # From the largest of these batch sizes on, the chart is hatched.
    failed = [
        (curve.failed_batch, curve.device)
        for curve in charted_curves
        if curve.failed_batch is not None
    ]
    if not failed:
        return ()
    last, device = max(failed)
    lines = [Zone(batch, batch, "", device_tone(owner)) for batch, owner in failed if batch < last]
    words = (
        "memory ends" if len(state.devices) == len(failed) else f"{state.devices[device]} is full"
    )
    return (*lines, Zone(last, label=words, tone=device_tone(device)))
