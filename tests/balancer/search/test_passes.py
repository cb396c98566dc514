"""Shares in passes: memory limits the pass, not the share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evener.balancer.families import SPLIT
from evener.balancer.search.layouts import Candidate, divide, shrink
from evener.balancer.search.model.step_time import Point, fit_pass_overhead
from evener.balancer.search.ranking import choose_winner
from evener.balancer.search.search import Search
from evener.balancer.types import (
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Result,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.machine import Machine, SimulatedDevice, Sync
from evener.shares import waterfill
from evener.shares.curves import Curve, PassCurve
from evener.shares.waterfill import DeviceCurve
from tests.support import machine_families as families
from tests.support import search_oracle as oracle
from tests.support import search_trials as trials
from tests.support.machines import samples_per_second
from tests.support.recording_prober import RecordingProber, run_search
from tests.support.search_machines import Bench, benches, searched
from tests.support.search_trials import Ask

PAIR = Bench(((10.0, 0.1, 0, 2000), (10.0, 0.1, 0, 500)), 0.002)


def card(
    rows: int,
    overhead_ms: float | None = None,
    curve: Sequence[tuple[int, float]] = ((1, 1.1), (8192, 820.2)),
) -> SimulatedDevice:
    """Return a card on which this many rows fit in a pass. A step takes 1 ms + 0.1 ms per row."""
    return SimulatedDevice(
        name="card",
        memory_mib=1000 + rows + 0.5,
        memory_base_mib=1000.0,
        memory_per_sample_mib=1.0,
        noise=0.005,
        curve=tuple(curve),
        pass_overhead_ms=overhead_ms,
    )


def plan(
    machine: Machine, batch: int | None, micro: bool = True
) -> tuple[Result | None, list[Observation]]:
    """Return the result of a search, and its observations."""
    memory = tuple(machine.usable_memory_bytes(i) for i in range(len(machine.devices)))
    prober = RecordingProber(machine, 1)
    search = run_search(
        Search(Problem(len(memory), memory, global_batch=batch, micro=micro)), prober.measure
    )
    return search.best(), prober.seen


def rate(machine: Machine, found: Result | None) -> float:
    assert found is not None
    return samples_per_second(machine, found.layout.shares, found.layout.micro)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Draw a curve that is straight, or level up to 50 rows. A row never takes less time in a
    smaller batch.
    """
    fixed, slope = draw(st.floats(0.5, 20.0)), draw(st.floats(0.01, 1.0))
    if draw(st.booleans()):
        return Curve((0.0, 1.0), (fixed, fixed + slope), slope)
    return Curve((0.0, 50.0), (fixed, fixed), slope * fixed / 50)


@st.composite
def pass_curves(draw: st.DrawFn) -> PassCurve:
    curve, pass_limit = draw(curves()), 4 * draw(st.integers(5, 100))
    begins = curve.times[-1] - curve.slope * curve.batches[-1]
    return PassCurve(curve, pass_limit, pass_limit, -draw(st.floats(-0.5, 1.0)) * begins)


@settings(max_examples=20, deadline=None)
@given(pass_curves(), st.sampled_from([1, 2, 4]), st.floats(0.1, 300.0))
def test_the_most_rows_by_a_time_are_what_trying_every_share_finds(
    curve: PassCurve, quantum: int, seconds: float
) -> None:
    """The limit of a pass is a whole number of quanta."""
    times = [curve.seconds(share) for share in range(quantum, 401, quantum)]
    found = sum(1 for time in times if time <= seconds * (1 + 1e-9)) * quantum
    assert abs(curve.largest(seconds, 400, quantum) - found) <= quantum


@given(pass_curves(), st.integers(2, 2000))
def test_a_share_in_passes_ends_at_known_times(curve: PassCurve, ceiling: int) -> None:
    """They rise, and the last is that of the ceiling."""
    times = curve.breakpoints(ceiling)
    assert times == sorted(set(times))
    assert curve.seconds(ceiling) in times


@given(pass_curves())
def test_a_share_that_fits_at_once_is_one_pass_and_others_are_as_few_as_fit(
    curve: PassCurve,
) -> None:
    assert curve.seconds(curve.pass_limit) == curve.curve.seconds(curve.pass_limit)
    assert [
        curve.passes(share) for share in (1, curve.pass_limit, curve.pass_limit + 1, 3 * curve.rows)
    ] == [
        1,
        1,
        2,
        3,
    ]


@settings(max_examples=20, deadline=None)
@given(st.integers(20, 200), st.floats(1.0, 3.0), st.floats(1.0, 2.0), st.floats(0.2, 30.0))
def test_fewer_passes_of_more_rows_are_taken_where_they_are_faster(
    knee: int, room: float, steep: float, seconds: float
) -> None:
    """The curve is level up to a knee, which is the best size of a pass.

    1,024 rows in two passes of 512 take less time than in three of 342.
    """
    curve = Curve((0.0, float(knee)), (1.0, 1.0), steep / knee)
    fits = int(room * knee)
    device = PassCurve(curve, knee, knee, fits=fits)
    for share in range(knee + 1, 12 * knee, max(1, knee // 7)):
        ways = [n * curve.seconds(share / n) for n in range(2, 13) if math.ceil(share / n) <= fits]
        assert device.seconds(share) <= min(ways) * 1.001
        assert math.ceil(share / device.passes(share)) <= fits
    most = device.largest(seconds, 10 * knee, 1)
    assert most == 0 or device.seconds(most) <= seconds * (1 + 1e-6)


@settings(max_examples=20, deadline=None)
@given(pass_curves(), curves(), st.integers(2, 600))
def test_a_fixed_batch_over_passes_is_solved_as_trying_every_share_does(
    one: PassCurve, two: Curve, batch: int
) -> None:
    devices = (DeviceCurve(0, one, batch), DeviceCurve(1, two, batch))
    found = waterfill.split_fixed(devices, (0.0, 0.0, 0.0), batch)
    least = min(max(one.seconds(share), two.seconds(batch - share)) for share in range(1, batch))
    assert found is not None
    assert found.seconds == pytest.approx(least, rel=0.02)


def test_what_a_further_pass_costs_is_fitted() -> None:
    curve = Curve((0.0, 1.0), (1.0, 1.1), 0.1)
    steps = [
        Point(share, n * curve.seconds(share / n) - (n - 1) * 0.7, 0.001, n)
        for share, n in ((200, 2), (900, 3))
    ]
    assert fit_pass_overhead(steps, curve, 300) == pytest.approx(-0.7)


def test_a_card_with_a_quarter_of_the_memory_trains_nearly_as_fast() -> None:
    """Each pass costs 2 % of a full one more."""
    full, small = card(1024), card(256, 0.02 * (1 + 25.6))
    whole = Machine((full, full), Sync(0.5))
    found, seen = plan(Machine((full, small), Sync(0.5)), 2048)
    assert found is not None
    assert found.layout.passes(1) >= 3
    assert not any(isinstance(one, OutOfMemory) for one in seen if one.probe.stage == Stage.RACE)
    assert rate(Machine((full, small), Sync(0.5)), found) >= 0.95 * samples_per_second(
        whole, (1024, 1024)
    )
    held, _ = plan(Machine((full, small), Sync(0.5)), 2048, micro=False)
    assert held is None


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_four_times_what_fits_is_a_plan(devices: int) -> None:
    machine = Machine(tuple(card(200 * (i + 1), 0.3) for i in range(devices)), Sync(0.5, 0.2))
    batch = 4 * sum(200 * (i + 1) for i in range(devices))
    found, _ = plan(machine, batch)
    assert found is not None
    assert found.layout.global_batch == batch
    assert all(rows <= 200 * (i + 1) for i, rows in enumerate(found.layout.pass_rows))
    assert rate(machine, found) >= 0.98 * oracle.fixed(machine, batch).samples_per_second


def test_small_cards_are_used_as_the_best_of_all_pass_sizes() -> None:
    """A smaller run of `python -m benchmarks.search`, with the fixed batches that don't fit."""
    regrets = []
    for seed in range(8):
        for devices in (2, 4):
            machine = families.machine("small card", devices, 0.01, seed)
            batch = families.batch_beyond(machine, seed)
            found, _ = plan(machine, batch)
            regrets.append(
                1 - rate(machine, found) / oracle.fixed(machine, batch).samples_per_second
            )
    assert statistics.median(regrets) <= 0.01
    assert max(regrets) <= 0.03


@settings(max_examples=12, deadline=None)
@given(benches(fewest=1, most=3), st.data())
def test_where_everything_fits_passes_cost_nothing(bench: Bench, data: st.DataObject) -> None:
    """Any of the devices could hold the fixed batch, and another pass is never faster."""
    batch = data.draw(
        st.integers(
            len(bench.devices), max(len(bench.devices), min(m for *_, m in bench.devices) // 2)
        )
    )
    found, without = (
        searched(bench, bench.problem(global_batch=batch, micro=micro))[0].best()
        for micro in (True, False)
    )
    assert found is not None
    assert without is not None
    assert bench.rate(found.layout) >= 0.97 * bench.rate(without.layout)


@settings(max_examples=12, deadline=None)
@given(benches(fewest=2, most=3), st.booleans())
def test_a_free_batch_has_no_passes(bench: Bench, known: bool) -> None:
    """It would grow without end."""
    _, seen = searched(bench, bench.problem(known))
    _, plain = searched(bench, bench.problem(known, micro=False))
    assert seen == plain


class Keeping(Bench, frozen=True):
    """Devices that keep gradients between passes, as large as 40 rows."""

    def _one(self, probe: Probe, scale: float) -> Observation:
        seen, layout = super()._one(probe, scale), probe.layout
        kept = tuple(40 if layout.passes(i) > 1 else 0 for i in range(len(self.devices)))
        rows = tuple(a + b for a, b in zip(layout.pass_rows, kept, strict=True))
        full = tuple(
            i
            for i, (size, (*_, most)) in enumerate(zip(rows, self.devices, strict=True))
            if size > most
        )
        if full:
            return OutOfMemory(probe, full, "full", 1.0)
        if not isinstance(seen, Timed):
            return seen
        memory = tuple(
            1000 + 10 * size if share else None
            for size, share in zip(rows, layout.shares, strict=True)
        )
        return msgspec.structs.replace(seen, memory_bytes=memory)


@pytest.mark.parametrize("known", [True, False])
def test_gradients_that_are_kept_between_passes_make_them_smaller(known: bool) -> None:
    """Exploration may run out of memory, the race doesn't. The plan is near the best with such
    passes.
    """
    bench = Keeping(PAIR.devices, PAIR.sync_seconds)
    search, seen = searched(bench, bench.problem(known, global_batch=8000))
    best = search.best()
    assert best is not None
    assert best.layout.pass_rows[1] <= 460
    assert best.layout.pass_rows[1] >= 230
    assert not any(isinstance(one, OutOfMemory) for one in seen if one.probe.stage == Stage.RACE)
    assert bench.rate(best.layout) >= 0.93 * bench.rate(layout_of((4000, 4000), (1960, 460)))


def test_passes_are_as_even_as_the_quantum_allows() -> None:
    _, seen = searched(PAIR, PAIR.problem(global_batch=5000, multiple_of=8))
    layouts = [one.probe.layout for one in seen if one.probe.layout.in_passes]
    assert layouts
    for one in layouts:
        assert not any(share % 8 for share in one.shares)
        assert all(one.shares[i] > one.pass_rows[i] * (one.passes(i) - 1) for i in one.active)


def test_a_workload_that_can_not_be_cut_keeps_its_devices() -> None:
    """It raises an exception in passes, so the plan has what fits in one."""
    search = Search(PAIR.problem(global_batch=2200))
    while probes := search.ask():
        for probe in probes:
            (seen,) = PAIR.measure([probe])
            search.tell(
                Failed(probe, "raised", "can't be cut", (), 1.0) if probe.layout.in_passes else seen
            )
    best = search.best()
    assert best is not None
    assert best.layout == layout_of((1700, 500)) or best.layout.shares[1] >= 450
    assert not best.layout.in_passes


def test_a_card_that_holds_no_row_is_left_out() -> None:
    bench = Bench((*PAIR.devices, (1.0, 0.01, 0, 0)), 0.002)
    search, _ = searched(bench, bench.problem(False, global_batch=6000))
    best = search.best()
    assert best is not None
    assert best.layout.shares[2] == 0
    assert best.layout.global_batch == 6000


def test_a_plan_that_is_known_to_fit_comes_before_one_that_may_not() -> None:
    """4 and 8 rows predict that 17 fit, and 15 do. The time left is too short for a
    second attempt.
    """
    memory, curve = (
        ((4, 3180.0), (8, 4594.0), (15, 7990.0), (16, 9000.0), (64, 40000.0)),
        ((1, 28.0), (8, 31.5)),
    )
    card = SimulatedDevice(
        name="a", memory_mib=8192.0, memory_curve=memory, noise=0.01, curve=curve
    )
    found = trials.run(Machine((card,), Sync(0.0)), Ask(batch=192, budget=12.0, start=3.0))
    assert found.layout is not None
    assert found.layout.in_passes


def test_out_of_memory_means_more_passes_or_a_smaller_batch() -> None:
    """With a fixed batch, the device that ran out uses more passes.

    A free batch keeps its passes and shrinks.
    """
    layout = layout_of((820, 400), (410, 400))
    assert divide(layout, (0,)) == layout_of((820, 400), (287, 400))
    assert divide(layout, ()) == layout_of((820, 400), (287, 280))
    assert divide(layout_of((2, 9), (1, 9)), (0,)) is None
    smaller = shrink(layout)
    assert smaller is not None
    assert [smaller.passes(i) for i in (0, 1)] == [2, 1]


def test_one_pass_wins_a_tie() -> None:
    whole, cut = layout_of((500, 500)), layout_of((600, 400), (300, 400))
    ran = {layout: {0: timed(layout, step)} for layout, step in ((whole, 1.0), (cut, 0.995))}
    found = choose_winner(
        [Candidate(SPLIT, one) for one in ran], ran, Problem(2, (None, None), global_batch=1000)
    )
    assert found.layout == whole


def timed(layout: Layout, step: float) -> Timed:
    return Timed(
        Probe(layout, Stage.RACE, 1.0), step, step, step, 20, (1, 1), (step, step), step, 1.0
    )


def test_layouts_of_the_same_passes_are_equal() -> None:
    assert layout_of((820, 400), (300, 400)) == layout_of((820, 400), (274, 400))
    assert layout_of((820, 400), (820, 999)) == layout_of((820, 400))
    assert solo(2, 1, 820, 410) == layout_of((0, 820), (1, 410))


@settings(max_examples=12, deadline=None)
@example(points=[(3, 1.0), (4, 2.0)], pass_limit=3, overhead=1.0)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.floats(0.1, 30.0)),
        min_size=2,
        max_size=4,
        unique_by=lambda p: p[0],
    ),
    st.integers(1, 40),
    st.none() | st.floats(0.0, 5.0),
)
def test_the_oracle_tries_every_pass_size(
    points: list[tuple[int, float]], pass_limit: int, overhead: float | None
) -> None:
    device = card(
        pass_limit, overhead, list(zip(*map(sorted, zip(*points, strict=True)), strict=True))
    )
    every = [
        min(device.seconds(b, k) for k in range(-(-b // pass_limit), b + 1)) for b in range(1, 49)
    ]
    assert np.all(oracle.step_times(device, pass_limit, 48) >= np.array(every) * (1 - 1e-9) - 1e-12)
    assert oracle.step_times(device, pass_limit, 48) == pytest.approx(every, rel=0.05)


def test_four_hosts_share_a_batch_that_fits_on_none_of_them() -> None:
    """A device computes it in passes. The times at which passes end decide which hosts share it."""
    machine = Machine(
        tuple(card(200, curve=((1, 5.3), (1000, 305.0))) for _ in range(4)), Sync(1.0, 0.0, 100.0)
    )
    search = Search(
        Problem(4, (round(1200.5 * (1 << 20)),) * 4, global_batch=512, hosts=(0, 1, 2, 3))
    )
    run_search(search, RecordingProber(machine, 0).measure)
    best = search.best()
    assert best is not None
    assert len(best.layout.active) == 4
