"""The chart of a search has the same numbers as the list, and every device."""

from __future__ import annotations

from typing import Any

from evener.balancer.events import Observed, Started
from evener.balancer.session_state import SessionState, advance
from evener.balancer.types import Belief, Probe, Stage, Timed, solo
from evener.tui.view.curves import curve_chart


def _state(events: list[Any]) -> SessionState:
    state = SessionState()
    for event in events:
        state = advance(state, event)
    return state


def _solo(devices: int, device: int, batch: int, speed: float) -> Timed:
    seconds = batch / speed
    return Timed(
        probe=Probe(solo(devices, device, batch), Stage.SOLO, 10.0),
        step_seconds=seconds,
        low_seconds=seconds / 1.1,
        high_seconds=seconds / 0.9,
        steps=20,
        memory_bytes=tuple(3 * 2**30 if each == device else None for each in range(devices)),
        device_seconds=(None,) * devices,
        first_step_seconds=0.1,
        elapsed_seconds=2.0,
    )


def test_points_are_the_measurements_with_their_intervals_and_memory() -> None:
    empty = Belief((), "")
    state = _state(
        [
            Started("r", ("GPU:0", "GPU:1"), "w", 60.0, 0),
            Observed(_solo(2, 0, 64, 1000.0), empty, None, 1, 0, 2.0),
            Observed(_solo(2, 1, 64, 500.0), empty, None, 2, 0, 4.0),
        ]
    )
    chart = curve_chart(state)
    assert [series.label for series in chart.series] == ["GPU:0", "GPU:1"]
    point = chart.series[0].points[0]
    assert (point.x, round(point.y)) == (64, 1000)
    assert point.low is not None
    assert point.high is not None
    assert (round(point.low), round(point.high)) == (900, 1100)
    assert "3 GiB" in point.text
    assert "probe 1" in point.text
    assert "probe 2" in chart.series[1].points[0].text


def test_devices_that_are_alike_share_a_curve_with_all_their_numbers() -> None:
    empty = Belief((), "")
    speeds = (1000.0, 1010.0, 400.0)
    state = _state(
        [
            Started("r", ("GPU:0", "GPU:1", "GPU:2"), "w", 60.0, 0),
            *(
                Observed(_solo(3, device, 64, speed), empty, None, device + 1, 0, 2.0)
                for device, speed in enumerate(speeds)
            ),
        ]
    )
    chart = curve_chart(state)
    assert [series.label for series in chart.series] == ["GPU:0, GPU:1", "GPU:2"]
    assert len(chart.series[0].points) == 2, "each device keeps its own point"


def test_the_end_of_memory_is_a_zone(events: list[Any]) -> None:
    chart = curve_chart(_state(events))
    zone = chart.zones[-1]
    assert zone.low == 1310
    assert zone.high > 1e9
    assert zone.label == "SIM:0 is full"
