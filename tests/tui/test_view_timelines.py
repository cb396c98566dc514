"""Graphs over time fill their cells, don't change what was drawn, and share one cursor and one time
axis.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.sampler import History
from evener.devices.types import LOST, UNSUPPORTED, DeviceSample, value
from evener.tui.view.cells import span_cells, to_ascii
from evener.tui.view.time_graph import (
    MOST_STRETCH,
    TickWindow,
    scale_short_history,
    ticks_per_dot,
    time_at,
)
from evener.tui.view.timelines import GraphPlan, TimeView, draw_timelines, place_graphs


class Kept:
    """The past of these devices, one tick per second."""

    def __init__(self, script: Any, samples: list[DeviceSample], ticks: int) -> None:
        self._script = script
        self._history = History(600)
        for tick in range(ticks):
            self.add(samples, tick)

    def add(self, samples: list[DeviceSample], tick: int, **changed: Any) -> None:
        moved = tuple(
            msgspec.structs.replace(each, utilization_percent=value(tick % 101), **changed)
            for each in samples
        )
        snapshot = self._script.snapshot(at_seconds=1_790_000_000.0 + tick)
        self._history.add(msgspec.structs.replace(snapshot, devices=moved))

    @property
    def ticks(self) -> int:
        return self._history.count

    def history(self, key: str, metric: str, newest: int) -> tuple[float | None, ...]:
        return self._history.values(key, metric, newest)

    def times(self, newest: int) -> tuple[float, ...]:
        return self._history.times(newest)


def _samples(script: Any, count: int, **changed: Any) -> list[DeviceSample]:
    return [script.sample(index, **changed) for index in range(count)]


def _drawn(script: Any, plan: GraphPlan | None, past: Kept, width: int, **view: Any) -> list[str]:
    assert plan is not None
    lines = draw_timelines(plan, past, TimeView(**view), width)
    assert {span_cells(line.spans) for line in lines} == {width}
    assert len(lines) == sum(plan.rows) + 2
    return [line.text for line in lines]


@pytest.mark.parametrize(("width", "columns"), [(78, 3), (118, 5), (198, 5), (40, 1)])
@pytest.mark.parametrize("ticks", [1, 7, 150, 900])
def test_graphs_fill_their_cells(script: Any, width: int, columns: int, ticks: int) -> None:
    samples = _samples(script, 8)
    past = Kept(script, samples, ticks)
    plan = place_graphs(samples, past, width, 34)
    assert plan is not None
    assert len(plan.metrics) == columns
    for per_dot in (1, 2, 5):
        lines = _drawn(script, plan, past, width, per_dot=per_dot)
        assert all(to_ascii(line).isascii() for line in lines)
    assert sum(plan.rows) == 32, "every row is used"


def test_a_low_panel_shows_the_devices_around_the_chosen_one(script: Any) -> None:
    samples = _samples(script, 8)
    past = Kept(script, samples, 3)
    plan = place_graphs(samples, past, 80, 9, chosen_key="gpu-6")
    assert plan is not None
    assert [each.device.index for each in plan.devices] == [5, 6, 7]
    assert place_graphs(samples, past, 80, 3) is None
    assert place_graphs(samples, past, 20, 30) is None


def test_what_no_device_reports_has_no_column(script: Any) -> None:
    """A training that has ended keeps its column as long as its past is stored."""
    silent = _samples(script, 2, samples_per_second=UNSUPPORTED, power_watts=UNSUPPORTED)
    past = Kept(script, silent, 3)
    plan = place_graphs(silent, past, 198, 20)
    assert plan is not None
    assert [each.field for each in plan.metrics] == [
        "utilization_percent",
        "temperature_celsius",
        "memory_used_bytes",
    ]
    past.add(silent, 4, samples_per_second=value(100.0))
    plan = place_graphs(silent, past, 198, 20)
    assert plan is not None
    assert "samples_per_second" in [each.field for each in plan.metrics]


@given(st.integers(1, 5), st.integers(1, 700), st.integers(10, 40))
def test_dots_that_are_drawn_never_change(per_dot: int, ticks: int, width: int) -> None:
    """A picture that moves by whole cells doesn't flicker."""

    def dots(count: int) -> dict[int, float]:
        window = TickWindow(width, per_dot, count)
        newest = max(0, window.newest)
        values = tuple(float(tick) for tick in range(max(0, count - newest), count))
        drawn = window.dots(values)
        assert len(drawn) == 2 * width
        first = window.first_cell * 2
        return {first + place: dot for place, dot in enumerate(drawn) if dot is not None}

    before, after = dots(ticks), dots(ticks + 1)
    shared = before.keys() & after.keys()
    assert all(before[place] == after[place] for place in shared)
    assert len(before) <= 2 * width
    assert len(after) >= min(ticks // per_dot, 2 * width - 2)


@given(st.floats(30, 600), st.floats(0.1, 10), st.integers(14, 80))
def test_the_chosen_time_span_is_shown(span: float, interval: float, width: int) -> None:
    per_dot = ticks_per_dot(span, interval, width)
    assert per_dot * 2 * width * interval >= span * 0.94
    assert per_dot == 1 or (per_dot - 1) * 2 * width * interval < span


@given(st.integers(1, 6), st.integers(1, 700), st.integers(10, 90))
def test_a_short_history_is_drawn_wide_and_whole(per_dot: int, ticks: int, width: int) -> None:
    """It fills a good part of the graph, each tick equally wide, the newest at the end."""
    finer, stretch = scale_short_history(per_dot, ticks, width)
    assert finer <= per_dot
    assert stretch == 1 or finer == 1
    window = TickWindow(width, finer, ticks, stretch)
    values = tuple(float(tick) for tick in range(ticks))[-window.newest :]
    dots = window.dots(values)
    drawn = [dot for dot in dots if dot is not None]
    assert len(dots) == 2 * width
    assert len(drawn) >= min(width, MOST_STRETCH * ticks) // 2 - 1
    assert drawn == sorted(drawn), "from left to right"
    if stretch > 1:
        assert sorted(set(drawn)) == list(values)
        assert {drawn.count(each) for each in drawn} == {stretch}
        column = next(place for place, dot in enumerate(dots) if dot is not None) // 2
        times = tuple(range(ticks))
        assert time_at(window, times, column) == times[0]
        assert time_at(window, times, width - 1) >= times[-1] - 2  # type: ignore[operator]


def test_one_cursor_reads_every_graph_at_one_time(script: Any) -> None:
    samples = _samples(script, 2)
    past = Kept(script, samples, 120)
    plan = place_graphs(samples, past, 118, 14)
    assert plan is not None
    window = TickWindow(plan.graph, 1, past.ticks)
    cell = window.last_cell - 5
    lines = _drawn(script, plan, past, 118, cursor=cell)
    plain = _drawn(script, plan, past, 118)
    expected = (2 * cell % 101 + (2 * cell + 1) % 101) / 2
    assert f" {expected:.0f} " in lines[2]
    assert f" {119 % 101} " in plain[2] or "19" not in lines[2]
    assert lines[-1].count(":") == 2 * len(plan.metrics), "the time below each column"
    column = plan.label + 6 + cell - window.first_cell
    assert plan.cell_at(column) == cell - window.first_cell
    assert plan.cell_at(3) is None
    assert _drawn(script, plan, past, 118, cursor=-40) == plain, "out of the window there is none"


def test_the_axis_has_round_times(script: Any) -> None:
    samples = _samples(script, 1)
    past = Kept(script, samples, 400)
    plan = place_graphs(samples, past, 198, 8)
    for per_dot, label in ((1, "30 s"), (5, "2 min")):
        axis = _drawn(script, plan, past, 198, per_dot=per_dot)[-1]
        assert f"┴{label}" in axis
        assert "now" in axis


@pytest.mark.parametrize("per_dot", [1, 2, 3, 5, 10])
def test_labels_of_the_axis_never_touch(script: Any, per_dot: int) -> None:
    samples = _samples(script, 1, **dict.fromkeys(("power_watts",), UNSUPPORTED))
    past = Kept(script, samples, 600)
    for width in range(40, 260, 7):
        plan = place_graphs(samples, past, width, 6)
        axis = _drawn(script, plan, past, width, per_dot=per_dot)[-1]
        for label in axis.split("┴")[1:]:
            assert re.match(r"(\d+ s|\d+ min|\d+:\d\d|[\d.]+ h) ", label), axis


def test_what_is_nought_everywhere_has_no_graph_without_an_upper_end(script: Any) -> None:
    """Samples/s of idle simulated devices have none; idle utilisation has one."""
    idle = _samples(script, 2, samples_per_second=value(0), utilization_percent=value(0))
    past = Kept(script, idle, 1)
    plan = place_graphs(idle, past, 198, 20)
    assert plan is not None
    fields = [each.field for each in plan.metrics]
    assert "samples_per_second" not in fields
    assert "utilization_percent" in fields


def test_one_scale_makes_devices_comparable(script: Any) -> None:
    fast = script.sample(0, samples_per_second=value(1900.0))
    slow = script.sample(1, samples_per_second=value(180.0))
    past = Kept(script, [fast, slow], 30)
    plan = place_graphs([fast, slow], past, 198, 12)
    own = _drawn(script, plan, past, 198)
    common = _drawn(script, plan, past, 198, common_top=True)
    assert " 200 " in own[6]
    assert " 200 " not in common[6]
    assert " 2000 " in common[6]


def test_a_lost_device_says_so_in_its_row(script: Any) -> None:
    samples = [script.sample(0), script.sample(1, utilization_percent=LOST)]
    past = Kept(script, samples[:1], 30)
    plan = place_graphs(samples, past, 118, 10)
    lines = _drawn(script, plan, past, 118)
    assert "lost" in "".join(lines[5:])
