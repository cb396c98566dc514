"""Simulated ranks without a plan, with the real rule for shares.

Shares move if that pays, and stay if it can't.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.training.bottleneck import RankTimes, fewest_windows, find_bottleneck
from evener.training.rebalance import MOST_WINDOWS
from tests.support.simulated_ranks import Device, Noise, Training, train

SEEDS = range(8)
NOISES = {
    "quiet": Noise(0.01),
    "drifting": Noise(0.03, 0.02),
    "busy": Noise(0.05, 0.03, rare=0.02),
    "very busy": Noise(0.02, 0.1),  # other programs start and stop
}
ROW_S = 2.9e-4  # time per row of a decoder with 34 M parameters on an H200


def gpus(*parts: float, **options: float) -> list[Device]:
    """Return GPUs with these fractions of the full speed."""
    return [Device(ROW_S / part, **options) for part in parts]  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", NOISES)
def test_equal_devices_keep_their_shares_for_1000_steps(noise: str) -> None:
    for devices in (gpus(1, 1), gpus(1, 0.97), gpus(1, 1, 1, 1)):
        rows = (128,) * len(devices)
        ran = [train(devices, rows, 1000, seed, NOISES[noise]) for seed in SEEDS]
        moved = [each.changes for each in ran if each.changes]
        allowed = 0 if len(devices) == 2 else 5 * (noise == "very busy")
        assert len(moved) <= allowed, (len(devices), moved)


@pytest.mark.parametrize("noise", NOISES)
def test_a_host_that_starts_kernels_too_slowly_moves_no_shares(noise: str) -> None:
    """A host that is the limit moves no shares, even if it is slower than the others.

    Its GPU waits for it with any number of rows.
    """
    devices = [Device(5e-5, host_s=0.020), Device(5e-5, host_s=0.026)]
    for seed in SEEDS:
        assert train(devices, (64, 64), 1000, seed, NOISES[noise]).changes == 0


@pytest.mark.parametrize("noise", ["quiet", "drifting", "busy"])
def test_own_work_that_hardly_goes_by_rows_moves_no_shares(noise: str) -> None:
    """In a small model on CPUs, only a change of rows shows how compute time depends on rows."""
    devices = [Device(2e-5, fixed_s=each, on_gpu=False) for each in (0.020, 0.0205)]
    for seed in SEEDS:
        assert train(devices, (64, 64), 1000, seed, NOISES[noise]).changes == 0


def test_own_work_that_hardly_goes_by_rows_is_seen_after_one_change() -> None:
    """If one host is 40 % slower, shares don't oscillate."""
    devices = [Device(2e-5, fixed_s=each, on_gpu=False) for each in (0.020, 0.028)]
    for seed in SEEDS:
        ran = train(devices, (64, 64), 1000, seed, NOISES["quiet"])
        assert ran.changes <= 3
        assert ran.rate_of_best(-1) >= ran.rate_of_best(0)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("ahead", [0, 4])
def test_input_that_is_the_limit_moves_no_shares(noise: str, ahead: int) -> None:
    """The input comes from workers, or from the loop itself, which computes little."""
    devices = gpus(1, 0.9 if ahead == 0 else 0.7)
    for seed in SEEDS:
        ran = train(devices, (64, 64), 1000, seed, NOISES[noise], input_s=0.2, ahead=ahead)
        assert ran.changes == 0


@pytest.mark.parametrize("noise", ["quiet", "drifting", "busy"])
@pytest.mark.parametrize("fixed_s", [0.0, 0.005])
def test_four_unequal_gpus_come_near_the_best_shares_within_60_steps(
    noise: str, fixed_s: float
) -> None:
    devices = gpus(1, 0.6, 0.4, 0.25, fixed_s=fixed_s)
    ran = [train(devices, (128,) * 4, 100, seed, NOISES[noise]) for seed in SEEDS]
    near = [each for each in ran if each.rate_of_best(60) >= 0.93]
    assert len(near) >= 7
    assert all(each.memory_part <= 0.9 for each in ran)
    assert all(_grows_by_half_at_most(each) for each in ran)


def test_memory_that_holds_little_more_bounds_a_share() -> None:
    """The fastest GPU's memory holds 150 rows, at 80 % of it."""
    devices = gpus(1, 0.6, 0.4, 0.25)
    devices[0] = devices[0]._replace(capacity_bytes=devices[0].bytes(150) / 0.8)
    for seed in SEEDS:
        ran = train(devices, (128,) * 4, 200, seed, NOISES["quiet"])
        assert ran.memory_part <= 0.8
        assert 140 <= ran.shares[-1][0] <= 150


def _grows_by_half_at_most(ran: Training) -> bool:
    pairs = zip(ran.shares, ran.shares[1:], strict=False)
    return all(
        after <= 1.5 * before
        for one, other in pairs
        for before, after in zip(one, other, strict=True)
    )


def test_a_device_that_slows_down_is_followed_and_one_that_flaps_is_not() -> None:
    def slow_down(at: float) -> float:
        return 2.0 if at >= 10 else 1.0

    def flap(at: float) -> float:
        return 1.5 if at % 3 < 1 else 1.0

    other = Device(8e-4)
    for seed in SEEDS:
        ran = train([other, other._replace(slowdown=slow_down)], (64, 64), 1000, seed)
        slowed = next(i for i in range(1000) if sum(ran.seconds[:i]) >= 10)
        assert ran.shares[slowed] == (64, 64)
        assert ran.shares[slowed + 40][0] >= 80
        flapped = train([other, other._replace(slowdown=flap)], (64, 64), 1000, seed)
        assert flapped.changes <= 6  # of 20 slowdowns and 20 recoveries


def test_a_device_is_followed_on_a_machine_that_gets_slower_as_a_whole() -> None:
    """A slowdown of all ranks doesn't hide that of one rank."""

    def busy(at: float) -> float:
        return 2.5 + 1.5 * math.sin(at)

    def busy_and_slow(at: float) -> float:
        return busy(at) * (2.0 if at >= 30 else 1.0)

    devices = [Device(8e-4, slowdown=busy), Device(8e-4, slowdown=busy_and_slow)]
    for seed in SEEDS:
        ran = train(devices, (64, 64), 800, seed)
        slowed = next(i for i in range(800) if sum(ran.seconds[:i]) >= 30)
        assert ran.shares[slowed] == (64, 64)
        assert ran.shares[min(slowed + 60, 799)][0] >= 80


FIGURES = RankTimes(own_work_s=0.1, input_s=0.0, step_s=0.12, behind=1.0)


def test_what_limits_steps_is_read_from_the_rank_that_is_last() -> None:
    fast = FIGURES._replace(own_work_s=0.05)
    assert find_bottleneck([fast, FIGURES]) == "own work"
    assert find_bottleneck([fast._replace(behind=0.0), FIGURES]) == "own work"
    assert find_bottleneck([fast, FIGURES._replace(behind=0.2)]) == "host"
    late = FIGURES._replace(input_s=0.05, step_s=0.16)
    assert find_bottleneck([fast, late]) == "input"
    assert find_bottleneck([fast._replace(input_s=0.02), FIGURES]) == "own work"
    shared = FIGURES._replace(behind=math.nan, computing=0.5)
    assert find_bottleneck([fast, shared]) == "shared core"


@given(st.floats(0.0, 100.0))
def test_the_shorter_windows_are_the_more_of_them_are_evidence(window_s: float) -> None:
    own, shared = (fewest_windows(each, window_s) for each in ("own work", "shared core"))
    assert 2 <= own <= shared <= MOST_WINDOWS
    assert own * window_s >= 0.5 or own == MOST_WINDOWS
    assert fewest_windows("host", window_s) == fewest_windows("input", window_s) == 0
