"""When shares change and to which: properties of the rule and its solver."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.plan.file import Share
from evener.plan.solver import pass_rows, proportional_curves, read_curves, scale, solve_shares
from evener.shares.curves import Curve
from evener.shares.whole_rows import split_passes
from evener.training.rebalance import (
    GROWTH,
    Change,
    Rebalancer,
    advise,
    choose_quantum,
    name_devices,
)
from tests.support.share_traces import (
    Machine,
    Run,
    Trace,
    at_rest,
    flipping,
    foresee,
    machine,
    rebalance,
    slower,
    solve_or_fail,
    stay,
)

STRAIGHT = st.builds(
    lambda fixed, slope: Curve((0.0,), (fixed,), slope), st.floats(0.0, 0.02), st.floats(1e-4, 1e-3)
)
CURVES = st.lists(STRAIGHT, min_size=2, max_size=4)
PAIR = proportional_curves((768, 560))


def feed(
    rebalancer: Rebalancer, factors: list[float], curves: tuple[Curve, ...], windows: int
) -> list[Change]:
    """Return the proposed changes for windows with these slowdown factors of the curves."""
    changes = []
    for number in range(windows):
        shares = rebalancer.shares
        own = [
            factor * curve.seconds(share)
            for factor, curve, share in zip(factors, curves, shares, strict=True)
        ]
        change = rebalancer.observe(5 * number + 4, own, shares)
        changes += [change] if change else []
    return changes


@settings(max_examples=30, deadline=None)
@given(CURVES, st.integers(20, 3000), st.booleans(), st.data())
def test_solved_shares_hold_their_walls_and_no_row_would_be_done_earlier_elsewhere(
    curves: list[Curve], batch: int, passes: bool, data: st.DataObject
) -> None:
    limits = [data.draw(st.integers(0, batch)) for _ in curves]
    shares = solve_shares(curves, batch, limits, passes)
    if shares is None:
        assert not passes
        assert all(limits)
        assert sum(limits) < batch
        return
    assert sum(shares) == batch
    assert min(shares) >= 1
    for share, most, limit in zip(shares, pass_rows(shares, limits), limits, strict=True):
        assert max(split_passes(share, most)) <= (limit or share)
    if passes:
        return
    assert all(share <= (limit or share) for share, limit in zip(shares, limits, strict=True))
    seconds = [curve.seconds(share) for curve, share in zip(curves, shares, strict=True)]
    slowest = seconds.index(max(seconds))
    for i, curve in enumerate(curves):
        if i != slowest and shares[slowest] > 1 and (not limits[i] or shares[i] < limits[i]):
            assert curve.seconds(shares[i] + 1) >= max(seconds) * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(CURVES, st.data())
def test_steady_slowdowns_are_mended_by_one_change_that_gains_what_it_says(
    curves: list[Curve], data: st.DataObject
) -> None:
    factors = [data.draw(st.floats(1.0, 3.0)) for _ in curves]
    batch = 100 * len(curves)
    shares = solve_or_fail(curves, batch)
    rebalancer = Rebalancer(shares, curves, [batch] * len(shares), False)
    changes = feed(rebalancer, factors, tuple(curves), 20)
    assert len(changes) <= 1
    best = solve_or_fail(
        [scale(curve, factor) for curve, factor in zip(curves, factors, strict=True)], batch
    )

    def slowest(some: tuple[int, ...]) -> float:
        return max(f * c.seconds(share) for f, c, share in zip(factors, curves, some, strict=True))

    for change in changes:
        assert sum(change.shares) == batch
        assert slowest(shares) / slowest(change.shares) - 1 == pytest.approx(change.gain)
    assert slowest(rebalancer.shares) <= 1.1 * slowest(best)


def test_the_reason_names_the_device_how_much_and_since_when() -> None:
    rebalancer = Rebalancer((768, 560), PAIR, (2000, 2000), False, ("GPU:0", "GPU:1"))
    assert not feed(rebalancer, [1.0, 1.0], PAIR, 40)
    for step in range(1, 5):  # windows continue where the last one ended
        own = [1.0, 1.4]
        change = rebalancer.observe(199 + 5 * step, own, (768, 560))
        if change:
            break
    assert change is not None
    assert step == 2
    assert change.reason == "GPU:1 slower by 40 % since step 200"
    assert change.describe((768, 560)) == f"{change.reason}: 768+560 -> 872+456"
    assert change.shares == (872, 456)
    assert change.micros == (872, 456)
    assert change.gain == pytest.approx(1.4 / (1.4 * 456 / 560) - 1)


def test_devices_are_named_as_in_the_monitor_and_by_rank_where_nothing_tells_them_apart() -> None:
    shares = [
        Share("mig-8a50", 1, "H200", 60, 0.6, host="b"),
        Share("cpu-0-of-2", 0, "a slice", 40, 0.4),
    ]
    assert name_devices(shares) == ("b/GPU:1", "CPU:0")
    assert name_devices([shares[1], shares[1]]) == ()


def test_the_reason_compares_with_other_ranks_or_with_the_plan() -> None:
    rebalancer = Rebalancer((100, 100), proportional_curves((100, 100)), (200, 200), False)
    (change,) = feed(rebalancer, [1.0, 1.5], proportional_curves((100, 100)), 10)
    assert change.reason == "rank 1 slower by 50 % than rank 0"
    assert change.shares == (120, 80)
    curves = proportional_curves((200, 100))
    (change,) = feed(Rebalancer((200, 100), curves, (300, 300), False), [1.0, 1.5], curves, 10)
    assert change.reason == "rank 1 slower by 50 % than planned"


@pytest.mark.parametrize("passes", [False, True])
def test_memory_bounds_a_share_or_its_passes(passes: bool) -> None:
    """Without a known memory, a pass grows by at most a quarter."""
    curves = proportional_curves((100, 100))
    (change,) = feed(Rebalancer((100, 100), curves, (110, 0), passes), [1.0, 4.0], curves, 10)
    assert change.shares == ((160, 40) if passes else (110, 90))
    assert change.micros == ((110, 40) if passes else (110, 90))
    (change,) = feed(Rebalancer((100, 100), curves, (0, 0), passes), [1.0, 4.0], curves, 10)
    assert change.micros[0] == 100 * GROWTH


@pytest.mark.parametrize("least", [0.008, 0.014, 0.020, 0.026])
@pytest.mark.parametrize("room", [16, 32, 64])
def test_shares_beside_a_neighbour_are_the_best_in_a_few_windows(least: float, room: int) -> None:
    """The best shares next to a neighbour are found in a few windows.

    The neighbour limits the rows of a pass on the second rank, and each pass takes the host a
    minimum time. The first rank's measured memory holds all rows, so its passes aren't limited by a
    guess.
    """
    rule = Rebalancer((128, 128), proportional_curves((128, 128)), (0, 0), True)

    def find_own(shares: tuple[int, ...], micros: tuple[int, ...]) -> list[float]:
        passes = [split_passes(*each) for each in zip(shares, micros, strict=True)]
        return [sum(max(least, 0.00022 * rows) for rows in each) for each in passes]

    micros = (128, 128)
    for number in range(60):
        most = room if number >= 10 else 256
        micros = (micros[0], min(micros[1], most))
        own = find_own(rule.shares, micros)
        limits = (0, most % 256)
        if change := rule.observe(5 * number + 4, own, rule.shares, limits, fits=(256, 256)):
            micros = (change.micros[0], min(change.micros[1], most))
    best = min(max(find_own((rows, 256 - rows), (256, room))) for rows in range(8, 256, 8))
    assert max(find_own(rule.shares, micros)) <= 1.02 * best


def test_windows_of_other_rows_and_figures_that_are_none_count_for_nothing() -> None:
    rebalancer = Rebalancer((100, 100), proportional_curves((100, 100)), (200, 200), False)
    for step in range(50):
        assert rebalancer.observe(step, (1.0, 2.0), (100, 60)) is None  # a short batch
        assert rebalancer.observe(step, (1.0, math.nan), (100, 100)) is None
        assert rebalancer.observe(step, (1.0, 0.0), (100, 100)) is None
    assert rebalancer.observe(60, (1.0, 2.0), (100, 100)) is None
    assert rebalancer.observe(65, (1.0, 2.0), (100, 100)) is not None


def test_shares_stay_multiples_of_what_they_were_where_they_are_large() -> None:
    assert choose_quantum((768, 560)) == 8
    assert choose_quantum((256, 256)) == 4
    assert choose_quantum((64, 32)) == 1
    assert choose_quantum((767, 561)) == 1


def trained(slowdown: object, noise: float, steps: int, **stalls: int) -> tuple[Machine, Run]:
    """Train on two equal devices in steps of 0.12 s."""
    curves = proportional_curves((1000, 1000))
    some = Machine(200, curves, curves, 0.02)
    return some, rebalance(some, Trace(0.12 * steps, slowdown, noise, **stalls))  # type: ignore[arg-type]


def test_noise_and_stalls_move_nothing() -> None:
    """5 and 10 % of noise in 5,000 steps give at most one change; stalls give none."""
    for noise in (0.05, 0.1):
        _, run = trained(at_rest, noise, 5000)
        assert run.steps > 4500
        assert len(run.changes) <= 1
    _, run = trained(at_rest, 0.02, 5000, stall_every=60, input_every=400)
    assert run.changes == ()


def test_a_slow_device_loses_rows_within_20_steps_and_gets_them_back() -> None:
    """The device is 40 % slower from step 200 until 76 s are over, at about step 570."""
    _, run = trained(slower(1.4, 24.0, 76.0), 0.02, 1000)
    slowed, *later = run.changes
    assert 200 < slowed[0] <= 220
    assert slowed[1] == pytest.approx((83, 117), abs=4)
    assert slowed[2].startswith("rank 0 slower by ")
    freed = next(change for change in later if change[1][0] > 95)
    assert 560 < freed[0] <= 600
    assert freed[1] == pytest.approx((100, 100), abs=4)
    assert "rank 0 faster by " in freed[2]


def test_what_comes_and_goes_too_fast_is_left_alone_soon() -> None:
    """After the first slowdown of 2 s in each 8 s, the rule waits."""
    some, run = trained(flipping(8.0, 0.25), 0.02, 5000)
    assert len(run.changes) <= 6
    assert run.samples >= 0.99 * stay(some, Trace(600.0, flipping(8.0, 0.25), 0.02)).samples


@pytest.mark.parametrize("devices", [2, 5])
@pytest.mark.parametrize(
    "trace",
    [
        Trace(300.0, slower(1.4, 60, 200), 0.03),
        Trace(300.0, lambda device, at: 1 + at / 500 if device == 0 else 1.0, 0.03),
        Trace(300.0, at_rest, 0.05),
        Trace(300.0, at_rest, 0.03, dead_at=150),
    ],
    ids=["throttled", "leak", "noise", "dead"],
)
def test_a_trace_is_trained_nearly_as_fast_as_by_an_oracle(trace: Trace, devices: int) -> None:
    some = machine(devices, seed=1)
    run = rebalance(some, trace)
    assert run.samples >= 0.97 * foresee(some, trace).samples
    assert run.samples >= 0.995 * stay(some, trace).samples


def test_advice_says_the_gain_in_the_whole_step() -> None:
    advice = advise(PAIR, (768, 560), (0.1, 0.14))
    assert advice is not None
    assert advice.shares == (872, 456)
    slower_step = advise(PAIR, (768, 560), (0.1, 0.14), step_s=0.28)
    assert slower_step is not None
    assert 0 < slower_step.gain < advice.gain / 1.9
    assert advise(PAIR, (768, 560), (0.1, 0.101)) is None


@settings(max_examples=20, deadline=None)
@given(CURVES, st.data())
def test_advice_promises_what_the_curves_as_seen_give_and_no_row_would_be_done_earlier_elsewhere(
    curves: list[Curve], data: st.DataObject
) -> None:
    shares = [data.draw(st.integers(16, 800)) for _ in curves]
    factors = [data.draw(st.floats(0.5, 3.0)) for _ in curves]
    seen = [scale(curve, factor) for curve, factor in zip(curves, factors, strict=True)]
    own = [curve.seconds(share) for curve, share in zip(seen, shares, strict=True)]
    step_s = max(own) * data.draw(st.floats(1.0, 2.0))
    most = [data.draw(st.sampled_from([0, share, 2 * share])) for share in shares]
    advice = advise(curves, shares, own, step_s, most, passes=False)
    solved = solve_shares(seen, sum(shares), most, False, choose_quantum(shares)) or shares
    soonest = max(curve.seconds(share) for curve, share in zip(seen, solved, strict=True))
    gain = step_s / (step_s - max(own) + soonest) - 1
    assert (advice is not None) == (gain >= 0.02)
    if advice is not None:
        assert sum(advice.shares) == sum(shares)
        assert all(
            share <= (limit or share) for share, limit in zip(advice.shares, most, strict=True)
        )
        assert advice.gain == pytest.approx(gain)


def test_a_plan_without_curves_is_taken_to_be_in_proportion_to_rows() -> None:
    shares = [
        Share("a", 0, "", 30, 0.6, micro=30),
        Share("b", 1, "", 20, 0.4, micro=20, curve=((0.0, 1.0), (50.0, 2.0))),
    ]
    assert [
        curve.seconds(share.batch) for curve, share in zip(read_curves(shares), shares, strict=True)
    ] == [1.0, 1.0]
    (curve,) = read_curves(shares[1:])
    assert [curve.seconds(rows) for rows in (0, 25, 50, 100)] == [1.0, 1.5, 2.0, 3.0]
