"""The extra measurements that find the limits of a step, on invented GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.children import ChildGroup
from evener.balancer.probes.failures import GroupError, RankFailure
from evener.balancer.probes.launch_plan import RankMap
from evener.balancer.probes.measurement import Measurement, ProgressReporter, Timeouts
from evener.balancer.probes.protocol import (
    BatchKept,
    Command,
    KeepBatch,
    Prepare,
    Prepared,
    Ran,
    Reply,
    RunSteps,
    TimedOnDevice,
    TimeOnDevice,
)
from evener.balancer.request import Job, Request
from evener.balancer.types import Probe, Stage, Timed, solo
from evener.devices.cpu import slices

STEP = 0.02  # seconds of a step, of which `input` are spent waiting for rows


class Gpu:
    """One GPU whose step takes 5 ms once its kernels are enqueued.

    In the first 0.1 s on a kept batch it is slow, as after each pause.
    """

    ranks, fresh, import_seconds, link_speed, link_path = RankMap((0,)), False, 0.0, 0.0, ""

    def __init__(self, input_seconds: float, able: bool = True, fails: bool = False) -> None:
        self._input, self._able, self._fails = input_seconds, able, fails
        self.kept, self._slow_s = False, 0.1
        self.asked: list[type[Command]] = []

    def call(
        self, command: Callable[[int], Command], _expected: type[Reply], _s: float, _stop: object
    ) -> list[Reply]:
        asked = command(0)
        self.asked.append(type(asked))
        if isinstance(asked, Prepare):
            return [Prepared(STEP)]
        if isinstance(asked, KeepBatch):
            self.kept = asked.kept and self._able
            return [BatchKept(self._able)]
        if isinstance(asked, TimeOnDevice):
            if self._fails:
                raise GroupError(RankFailure(0, "raised", "out of memory", True))
            return [TimedOnDevice(0.005)]
        assert isinstance(asked, RunSteps)
        step = STEP - self._input if self.kept else STEP
        seconds, waited = asked.steps * step, 0.0 if self.kept else asked.steps * self._input
        if self.kept and self._slow_s > 0:
            self._slow_s -= seconds
            seconds *= 1.5
        return [Ran(asked.steps, seconds, seconds, 0.0, (None,), input_seconds=waited)]


class Watch:
    """Devices that report nothing."""

    def read(self, _positions: object) -> dict[int, object]:
        return {}

    find_neighbours = read


def measure(group: Gpu, closer: bool = True) -> Timed:
    """Return a probe of one second on this group."""
    probe = Probe(solo(1, 0, 8), Stage.CHECK, 1.0)
    progress = ProgressReporter(probe, lambda _: None, time.monotonic)
    found = Measurement(
        probe,
        cast(ChildGroup, group),
        Timeouts(),
        progress,
        cast(Any, Watch()),
        measure_limits=closer,
    )
    return found.run(threading.Event(), time.monotonic(), 0, ())


def test_a_step_that_waits_for_rows_is_timed_without_them_and_goes_on_with_new_ones() -> None:
    group = Gpu(0.012)
    seen = measure(group)
    assert seen.step_seconds == pytest.approx(STEP)
    assert seen.parts[0] is not None
    assert seen.parts[0].input_seconds == pytest.approx(0.012)
    assert seen.kept is not None
    assert seen.kept.step_seconds == pytest.approx(0.008)
    assert seen.enqueued_seconds == 0.005
    assert not group.kept


def test_a_gpu_that_hardly_waits_for_rows_is_only_asked_what_it_needs_itself() -> None:
    seen = measure(Gpu(0.0002))
    assert seen.kept is None
    assert seen.enqueued_seconds == 0.005


def test_a_workload_that_can_not_keep_a_batch_has_its_step_alone() -> None:
    seen = measure(Gpu(0.012, able=False))
    assert (seen.kept, seen.enqueued_seconds) == (None, None)
    assert seen.parts[0] is not None


def test_what_fails_in_a_closer_look_costs_no_measurement() -> None:
    seen = measure(Gpu(0.0, fails=True))
    assert seen.step_seconds == pytest.approx(STEP)
    assert seen.enqueued_seconds is None


def test_a_layout_is_looked_at_once() -> None:
    group = Gpu(0.012)
    assert measure(group, closer=False).kept is None
    assert KeepBatch not in group.asked


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [(Stage.PART, False), (Stage.SOLO, False), (Stage.SHARD, True), (Stage.CHECK, True)],
)
def test_only_layouts_that_may_become_the_plan_get_a_closer_look(
    stage: Stage, wanted: bool
) -> None:
    """One device with a part of a model that is trained in shards can't become the plan."""
    prober = ChildProber(Job(Request(), slices(2), "synthetic", "none"))
    try:
        assert prober._should_time_without_loading(Probe(solo(2, 0, 8), stage, 1.0)) is wanted
    finally:
        prober.close()
