"""What a profiler saw, grouped by name."""

from __future__ import annotations

import pytest

from evener.errors import RequestError
from evener.workloads.profiling import group_events, profile


def test_events_of_one_name_are_one_row_the_dearest_first() -> None:
    rows = group_events([("Memcpy PtoP", 0.002, 100), ("nccl", 0.01, None), ("Memcpy PtoP", 0.001, 50)])
    assert [row.name for row in rows] == ["nccl", "Memcpy PtoP"]
    assert rows[1].calls == 2
    assert rows[1].seconds == pytest.approx(0.003)
    assert (rows[1].shortest_seconds, rows[1].longest_seconds) == (0.001, 0.002)
    assert rows[1].moved_bytes == 150


def test_bytes_are_told_only_if_all_of_them_are_known() -> None:
    assert group_events([("copy", 1.0, 10), ("copy", 1.0, None)])[0].moved_bytes is None


def test_nothing_moved_is_no_row() -> None:
    assert group_events([]) == ()


def test_a_framework_without_a_profiler_is_refused() -> None:
    with pytest.raises(RequestError, match="none"):
        profile("none", lambda: None)


@pytest.mark.slow
def test_pytorchs_profiler_runs_the_steps_and_sees_no_copies_on_one_cpu() -> None:
    torch = pytest.importorskip("torch")
    steps = []

    def run() -> None:
        steps.append(torch.ones(4).sum())

    assert profile("torch", run) == ()
    assert len(steps) == 1
