"""The speed of a core is sampled now and then, and recorded with each window of steps."""

from __future__ import annotations

import sys

import msgspec
import pytest

from evener.live.journal import WINDOW_SECONDS, StepsEntry, TrainingJournal
from evener.system import core_speed
from evener.system.core_speed import SAMPLE_SECONDS, CoreSpeed
from evener.training.step_sums import StepSums


def test_the_shortest_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [9.0, 7.0, *range(20, 38)]
    monkeypatch.setattr(core_speed, "time_product", iter(times).__next__)
    speed = CoreSpeed()
    for number in range(len(times)):
        speed.sample(1.01 * number * SAMPLE_SECONDS)
        speed.sample((1.01 * number + 0.5) * SAMPLE_SECONDS)  # too early
    assert speed.take() == 7.0
    assert speed.take() == 0.0


def test_without_numpy_the_speed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    core_speed.numpy_version.cache_clear()
    try:
        speed = CoreSpeed()
        speed.sample(0.0)
        assert speed.take() == 0.0
        assert not core_speed.numpy_version()
    finally:
        core_speed.numpy_version.cache_clear()


def test_each_window_of_a_journal_has_the_speed_of_its_core() -> None:
    pytest.importorskip("numpy")
    journal = TrainingJournal(("cpu-0-of-1",), (8,))
    for step in range(9):
        journal.count(step, step * WINDOW_SECONDS, StepSums)
    windows = [each for each in journal._noted if isinstance(each, StepsEntry)]
    assert len(windows) == 8
    assert all(0 < each.core_s < 0.1 for each in windows)
    assert msgspec.json.decode(msgspec.json.encode(windows[0]), type=StepsEntry) == windows[0]
