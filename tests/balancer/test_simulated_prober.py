"""Simulated probes: the machine's physics, correct intervals, and one run for one seed."""

from __future__ import annotations

import threading
import time

from evener.balancer.events import ProbeProgress
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.types import (
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.machine import Machine, SimulatedDevice, Sync

FAST = SimulatedDevice(
    name="fast",
    memory_mib=1000,
    curve=((64, 100.0), (128, 150.0)),
    memory_base_mib=100,
    memory_per_sample_mib=1,
)
SLOW = SimulatedDevice(
    name="slow",
    memory_mib=500,
    curve=((64, 200.0), (128, 300.0)),
    memory_base_mib=100,
    memory_per_sample_mib=1,
    noise=0.02,
    contention=0.1,
)
MACHINE = Machine((FAST, SLOW), Sync(base_ms=5, per_device_ms=10))


def observe(
    prober: SimulatedProber, *probes: Probe, finished: tuple[Probe, ...] = ()
) -> dict[Probe, Observation]:
    """Return all observations of one request for probes."""
    seen = prober.measure(probes, lambda _: None, threading.Event(), finished)
    return {one.probe: one for one in seen}


def only(prober: SimulatedProber, layout: Layout) -> Observation:
    """Return the observation of one probe of a layout."""
    probe = Probe(layout, Stage.SPLIT, 4.0)
    return observe(prober, probe)[probe]


def test_a_step_takes_what_the_machine_says() -> None:
    """Noise-free devices are measured exactly, including the cost of synchronization."""
    seen = only(SimulatedProber(MACHINE, 0), solo(2, 0, 128))
    assert isinstance(seen, Timed)
    assert seen.step_seconds == 0.15
    assert seen.memory_bytes == (228 << 20, None)
    both = only(SimulatedProber(MACHINE, 0), layout_of((64, 64)))
    assert isinstance(both, Timed)
    assert abs(both.step_seconds / (0.2 * 1.1 + 0.015) - 1) < 0.02
    assert both.low_seconds <= both.step_seconds <= both.high_seconds


def test_a_whole_run_lasts_what_was_asked_and_out_of_memory_ends_it() -> None:
    """It takes all of its time or steps, even if a step that never varies is known after a few.

    A batch that is too large is an observation.
    """
    prober = SimulatedProber(MACHINE, 0)
    sure, long = (
        Probe(solo(2, 0, 128), Stage.SOLO, 20.0),
        Probe(solo(2, 0, 128), Stage.SOLO, 20.0, whole=True),
    )
    stepped, full = (
        Probe(solo(2, 0, 128), Stage.SOLO, 1.0, steps=500),
        Probe(solo(2, 1, 401), Stage.SOLO, 1.0, steps=500),
    )
    seen = observe(prober, sure, long, stepped, full)
    steps = [one.steps for one in (seen[sure], seen[long], seen[stepped]) if isinstance(one, Timed)]
    assert steps[0] * 0.15 < 10
    assert 20 <= steps[1] * 0.15 < 21
    assert steps[2] == 500
    assert isinstance(seen[full], OutOfMemory)


def test_more_than_fits_runs_out_of_memory_on_the_device_that_is_full() -> None:
    """The observation names the device, and costs a step."""
    seen = only(SimulatedProber(MACHINE, 0), layout_of((64, 401)))
    assert isinstance(seen, OutOfMemory)
    assert seen.devices == (1,)
    assert 0 < seen.elapsed_seconds < 2


def test_a_pack_holds_its_memory_once_for_each_process() -> None:
    """Eight times 164 MiB don't fit where six times do."""
    fits = only(SimulatedProber(MACHINE, 0), Layout("pack", (64, 0), processes=6))
    assert isinstance(fits, Timed)
    assert abs(fits.samples_per_second / 640 - 1) < 1e-9
    assert isinstance(
        only(SimulatedProber(MACHINE, 0), Layout("pack", (64, 0), processes=8)), OutOfMemory
    )


def test_what_a_simulation_has_no_physics_for_is_reported() -> None:
    """A placed model fails with a reason."""
    seen = only(SimulatedProber(MACHINE, 0), Layout("place", (64, 64), placement="halves"))
    assert isinstance(seen, Failed)
    assert seen.cause == "unsupported"


def test_a_probe_s_figure_depends_on_the_seed_and_on_nothing_before_it() -> None:
    """Order doesn't matter, repeats are equal, and another turn or seed gives another value."""
    first, second = Probe(solo(2, 1, 64), Stage.SOLO, 2.0), Probe(solo(2, 1, 128), Stage.SOLO, 2.0)
    prober = SimulatedProber(MACHINE, 7)
    forward = {**observe(prober, first), **observe(prober, second)}
    other = SimulatedProber(MACHINE, 7)
    assert {**observe(other, second), **observe(other, first)} == forward
    turned = Probe(solo(2, 1, 64), Stage.SOLO, 2.0, turn=1)
    times = {
        forward[first],
        observe(other, turned)[turned],
        observe(SimulatedProber(MACHINE, 8), first)[first],
    }
    assert len({one.step_seconds for one in times if isinstance(one, Timed)}) == 3


def test_solo_probes_of_one_asking_run_together_and_a_resumed_one_is_not_alone() -> None:
    """Contention slows the second device if the first is busy, or was busy in the
    resumed request.
    """
    a, b = Probe(solo(2, 0, 64), Stage.SOLO, 2.0), Probe(solo(2, 1, 64), Stage.SOLO, 2.0)
    together = observe(SimulatedProber(MACHINE, 0), a, b)[b]
    alone = observe(SimulatedProber(MACHINE, 0), b)[b]
    resumed = observe(SimulatedProber(MACHINE, 0), b, finished=(a,))[b]
    assert resumed == together
    assert isinstance(together, Timed)
    assert isinstance(alone, Timed)
    assert 1.05 < together.step_seconds / alone.step_seconds < 1.15


def test_the_clock_is_virtual_and_goes_by_the_longest_probe() -> None:
    """Two probes at the same time cost the time of the longer one."""
    prober = SimulatedProber(MACHINE, 0, start_seconds=100.0)
    seen = observe(
        prober, Probe(solo(2, 0, 64), Stage.SOLO, 2.0), Probe(solo(2, 1, 64), Stage.SOLO, 2.0)
    )
    assert prober.now() == 100 + max(one.elapsed_seconds for one in seen.values())


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """The 95 % interval misses the noise-free step for few of 200 seeds."""
    misses = 0
    for seed in range(200):
        seen = only(SimulatedProber(MACHINE, seed), solo(2, 1, 64))
        assert isinstance(seen, Timed)
        misses += not seen.low_seconds <= 0.2 <= seen.high_seconds
    assert misses <= 30  # 10 expected; stopping once it looks tight costs some


def test_paced_probes_take_real_time_report_and_stop_without_an_observation() -> None:
    """`pace` 1 is real time. A stop ends it at once, without an observation."""
    reports: list[ProbeProgress] = []
    stop = threading.Event()
    threading.Timer(0.4, stop.set).start()
    started = time.monotonic()
    prober = SimulatedProber(MACHINE, 0, pace=1.0)
    assert not list(
        prober.measure((Probe(solo(2, 0, 64), Stage.SOLO, 30.0),), reports.append, stop)
    )
    assert 0.3 < time.monotonic() - started < 20
    assert reports
    assert reports[-1].at_seconds <= prober.now()
