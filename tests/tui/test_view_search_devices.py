"""A device's row in a search: its readings, its probe, and numbers that are shortened but never
cut.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from evener.balancer.events import ProbeProgress
from evener.balancer.journal import ObservationEntry
from evener.balancer.session_state import SessionState, advance
from evener.balancer.types import Belief, OutOfMemory, PredictedCurve, Probe, Stage, solo
from evener.devices.types import UNSUPPORTED
from evener.tui.view.cells import span_cells
from tests.support.tables import lane_lines


def _rows(state: SessionState, width: int, samples: Any = ()) -> list[str]:
    lines, _ = lane_lines(state, width, 9, samples=samples)
    assert all(span_cells(line.spans) <= width for line in lines)
    return [line.text for line in lines]


def _full(events: Any) -> SessionState:
    """Return two fast devices that both ran out of memory at large batches."""
    state = SessionState()
    for event in events[:4]:
        state = advance(state, event)
    probe = Probe(solo(2, 0, 20480), Stage.SOLO, 1.0)
    fast = msgspec.structs.replace(
        events[3].seen,
        probe=Probe(solo(2, 0, 16384), Stage.SOLO, 1.0),
        step_seconds=16384 / 158_012,
    )
    belief = Belief((PredictedCurve(0, (), 16384, 20480),), "Bisects.")
    seen = (
        ObservationEntry(fast, 1.0),
        ObservationEntry(OutOfMemory(probe, (0,), "CUDA out of memory", 1.0), 2.0),
    )
    return msgspec.structs.replace(state, seen=seen, belief=belief)


@pytest.mark.parametrize("width", [79, 80, 99, 100, 118, 200])
def test_utilisation_and_temperature_are_shown_with_the_probe(
    events: Any, script: Any, width: int
) -> None:
    state = advance(
        _full(events),
        ProbeProgress(Probe(solo(2, 1, 512), Stage.SOLO, 1.0), "measuring", 910.0, 0.004, 3.0),
    )
    head, first, second = _rows(state, width, (script.sample(0), script.sample(1)))
    assert "util" in head
    assert re.search(r"98( %)? +61", first)
    assert re.search(r"92( %)? +62", second)
    assert re.search(r"alone.* 512 +910.0 +±0.4 %", second)


def test_a_missing_metric_is_no_zero(events: Any, script: Any) -> None:
    blind = script.sample(0, utilization_percent=UNSUPPORTED, temperature_celsius=UNSUPPORTED)
    _, first, second = _rows(_full(events), 80, (blind, None))
    assert first.count("–") == 2
    assert second.count("–") >= 2


def test_a_replay_has_no_columns_for_values_without_samples(events: Any) -> None:
    assert "util" not in _rows(_full(events), 118)[0]


@pytest.mark.parametrize("width", range(40, 220, 7))
def test_no_figure_is_ever_cut(events: Any, script: Any, width: int) -> None:
    """Each number is whole or left out. The batch that ran out of memory is always shown."""
    _, first, _ = _rows(_full(events), width, (script.sample(0), script.sample(1)))
    numbers = set(re.findall(r"\d{3,}", first.replace("158 012", "158012")))
    assert numbers <= {"158012", "16384", "20480", "140", "1080"}
    if width >= 80:
        assert {"158012", "16384", "20480"} <= numbers


def test_no_size_is_claimed_to_fit_on_a_device_on_which_nothing_ran(events: Any) -> None:
    """At its beginning, a search assumes that one row fits."""
    state = advance(SessionState(), events[0])
    unseen = msgspec.structs.replace(state, belief=Belief((PredictedCurve(0, (), 1, None),), ""))
    assert "fits" not in _rows(unseen, 118)[1]
