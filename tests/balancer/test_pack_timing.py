"""The timing of trainings side by side, and of the parts of a split.

Time in which one training of a pack was alone doesn't count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from evener.balancer.probes.children import ChildGroup
from evener.balancer.probes.launch_plan import RankMap
from evener.balancer.probes.measurement import Measurement, ProgressReporter, Timeouts
from evener.balancer.probes.protocol import Command, Prepare, Prepared, Ran, Reply, RunSteps
from evener.balancer.types import Layout, Probe, Stage

STEP = 0.02  # seconds while both train; half of that alone


class Pair:
    """Two trainings on one device. The second still builds while the first is alone on
    the device.
    """

    ranks, fresh, import_seconds, link_speed, link_path = RankMap((0, 0)), False, 0.0, 0.0, ""

    def __init__(self, builds: int) -> None:
        self.builds, self.blocks = builds, list[RunSteps]()

    def call(
        self, command: Callable[[int], Command], _expected: type[Reply], _s: float, _stop: object
    ) -> list[Reply]:
        asked = command(0)
        if isinstance(asked, Prepare):
            return [Prepared(STEP), Prepared(STEP)]
        assert isinstance(asked, RunSteps)
        self.blocks.append(asked)
        if len(self.blocks) <= self.builds:
            return [ran(100, 100 * STEP / 2), ran(1, 100 * STEP / 2)]
        return [ran(20, 20 * STEP), ran(20, 20 * STEP)]


def ran(steps: int, seconds: float) -> Ran:
    return Ran(steps, seconds, seconds, 0.0, (None,))


@pytest.mark.parametrize("builds", [0, 2])
def test_a_pack_is_timed_once_all_of_its_trainings_are_warm(builds: int) -> None:
    """Its blocks have several steps, because the trainings don't end together."""
    probe, pair = Probe(Layout("pack", (8,), processes=2), Stage.PACK, 2.0), Pair(builds)
    progress = ProgressReporter(probe, lambda _: None, time.monotonic)
    monitor = cast(Any, Watch())
    found = Measurement(probe, cast(ChildGroup, pair), Timeouts(), progress, monitor)
    timed = found.run(threading.Event(), time.monotonic(), 0, ())
    assert timed.step_seconds == pytest.approx(STEP)
    assert not timed.warnings
    assert all(each.seconds >= 3 * STEP for each in pair.blocks)


class Split:
    """Two GPUs. The first waits for a quarter of each step and reports it, the second for a
    hundredth.
    """

    ranks, fresh, import_seconds, link_speed, link_path = RankMap((1, 0)), False, 0.0, 0.0, ""

    def call(
        self, command: Callable[[int], Command], _expected: type[Reply], _s: float, _stop: object
    ) -> list[Reply]:
        asked = command(0)
        if isinstance(asked, Prepare):
            return [Prepared(STEP), Prepared(STEP)]
        assert isinstance(asked, RunSteps)
        seconds = asked.steps * STEP
        waits = (0.25 * seconds, 0.01 * seconds)
        return [
            msgspec.structs.replace(ran(asked.steps, seconds), waited_seconds=waited)
            for waited in waits
        ]


def test_what_a_gpu_waits_is_no_part_of_its_own_work() -> None:
    """Times are listed by position: the first rank has the second device."""
    probe = Probe(Layout("split", (8, 16)), Stage.SPLIT, 2.0)
    progress = ProgressReporter(probe, lambda _: None, time.monotonic)
    monitor = cast(Any, Watch())
    found = Measurement(probe, cast(ChildGroup, Split()), Timeouts(), progress, monitor)
    timed = found.run(threading.Event(), time.monotonic(), 0, ())
    assert timed.device_seconds == pytest.approx((0.99 * STEP, 0.75 * STEP))


class Disturbed:
    """A slice of a CPU of whose core other programs take a third."""

    ranks, fresh, import_seconds, link_speed, link_path = (
        RankMap((1,), own_cores=True),
        False,
        0.0,
        0.0,
        "",
    )

    def call(
        self, command: Callable[[int], Command], _expected: type[Reply], _s: float, _stop: object
    ) -> list[Reply]:
        asked = command(0)
        if isinstance(asked, Prepare):
            return [Prepared(STEP)]
        assert isinstance(asked, RunSteps)
        return [
            msgspec.structs.replace(
                ran(asked.steps, asked.steps * STEP), cpu_seconds=asked.steps * STEP * 2 / 3
            )
        ]


def test_what_others_take_of_a_slice_s_core_is_no_part_of_its_own_work() -> None:
    """This holds alone and in a split. The samples/s are the actual ones."""
    probe = Probe(Layout("solo", (0, 16)), Stage.SOLO, 2.0)
    progress = ProgressReporter(probe, lambda _: None, time.monotonic)
    found = Measurement(
        probe, cast(ChildGroup, Disturbed()), Timeouts(), progress, cast(Any, Watch())
    )
    timed = found.run(threading.Event(), time.monotonic(), 0, ())
    assert timed.step_seconds == pytest.approx(STEP)
    assert timed.device_seconds == (None, pytest.approx(STEP * 2 / 3))


class Watch:
    """Devices that report nothing."""

    def read(self, _positions: object) -> dict[int, object]:
        return {}

    find_neighbours = read
