"""The limits of a training run, found from the sums of its ranks' steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.training.limits import LimitKind
from evener.training.step_limits import MeasuredRank, judge_training
from evener.training.step_sums import StepSums, divide_steps

STEPS = 50
SECONDS = st.floats(0, 100)


def rank(
    name: str = "GPU:0", least: float = 0.001, spread: float = 0.01, **parts: Any
) -> MeasuredRank:
    """Return a rank with these seconds in a mean step; the compute time is 0.1 s by default."""
    seconds = {"own_work_s": 0.1, "meeting_s": 0.001, **parts}
    sums = StepSums(STEPS, **{part: STEPS * each for part, each in seconds.items()})
    own, meeting = seconds["own_work_s"], seconds["meeting_s"]
    return MeasuredRank(name, 64, sums, StepSums(), own, meeting, least, spread)


def kinds(*ranks: MeasuredRank, **more: Any) -> list[LimitKind]:
    return [limit.kind for limit in judge_training(ranks, **more).limits]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("input_s", LimitKind.INPUT),
        ("update_s", LimitKind.OPTIMIZER),
        ("files_s", LimitKind.CHECKPOINTS),
        ("validation_s", LimitKind.VALIDATION),
        ("between_s", LimitKind.BETWEEN),
    ],
)
def test_a_part_that_is_long_on_every_rank_limits_the_training(part: str, kind: LimitKind) -> None:
    long: dict[str, Any] = {part: 0.05}
    short: dict[str, Any] = {part: 0.004}
    assert kinds(rank(**long), rank("GPU:1", **long)) == [kind]
    assert kinds(rank(**long)) == [kind]
    assert kinds(rank(**short), rank("GPU:1", **short)) == []


def test_rows_that_come_within_half_a_millisecond_come_as_fast_as_from_workers() -> None:
    """Loading for a tiny model takes time that worker processes couldn't save."""
    tiny = [rank(own_work_s=0.006, input_s=0.0005)]
    assert kinds(*tiny) == []
    larger = [rank(own_work_s=0.6, input_s=0.05)]
    assert kinds(*larger) == [LimitKind.INPUT], "the same part of a longer step"


def test_what_a_trainer_needs_between_two_steps_is_no_limit() -> None:
    """2.4 ms of callbacks and schedules in 19 ms are no limit; 24 ms of logging in 190 ms are."""
    assert kinds(rank(own_work_s=0.0166, between_s=0.0024)) == []
    assert kinds(rank(own_work_s=0.166, between_s=0.024)) == [LimitKind.BETWEEN]


def test_an_optimizer_is_a_limit_once_half_as_many_updates_gain_a_tenth() -> None:
    """The step takes 100 ms."""
    errors = StepSums(STEPS, update_s=0.002)
    assert kinds(rank(own_work_s=0.082, update_s=0.018)._replace(errors=errors)) == []
    named = kinds(rank(own_work_s=0.075, update_s=0.025)._replace(errors=errors))
    assert named == [LimitKind.OPTIMIZER]


@pytest.mark.parametrize("starved", [0.2, 0.5, 0.66])
def test_the_gain_of_freed_cores_is_known_within_a_fifth(starved: float) -> None:
    """Most of what remains of the step was measured."""
    (limit,) = judge_training([rank()._replace(starved=starved)]).limits
    assert limit.kind is LimitKind.HOST_STARVED
    expected = 1 / (1 - starved)
    assert 1 + limit.gain == pytest.approx(expected)
    assert 0.8 * expected < 1 + limit.gain_low < 1 + limit.gain_high < 1.26 * expected


def test_a_remedy_on_one_rank_saves_what_all_others_wait() -> None:
    """The third rank takes 20 ms longer than the first, and the second 10 ms."""
    ranks = (
        rank(meeting_s=0.021),
        rank("GPU:1", own_work_s=0.11, meeting_s=0.011),
        rank("GPU:2", input_s=0.02),
    )
    (limit,) = [each for each in judge_training(ranks).limits if each.kind is LimitKind.RANK_INPUT]
    assert limit.gain == pytest.approx(0.121 / 0.111 - 1, rel=0.02)


def test_ranks_without_cores_also_wait_for_each_other() -> None:
    """Each of two is the last one in half of the steps, and both would be as fast without it."""
    times: dict[str, Any] = {"own_work_s": 0.06, "idle_own_s": 0.03, "meeting_s": 0.021}
    late = rank(**times)._replace(starved=0.5)
    other = rank("GPU:1", **times)
    (limit, *_) = judge_training([late, other._replace(starved=0.5)]).limits
    assert limit.kind is LimitKind.HOST_STARVED
    blocked = 81 - 0.5 * 81 - 30 - 1  # of the 20 ms that it waits, the rest has no core
    assert limit.milliseconds == pytest.approx(0.5 * 81 + blocked)
    (limit, *_) = judge_training([late, other]).limits
    assert limit.milliseconds == pytest.approx(0.5 * 81), "the other one has all cores it needs"


def test_a_part_whose_gain_is_uncertain_is_not_named() -> None:
    known = rank(between_s=0.01)
    errors = StepSums(STEPS, between_s=0.006)
    assert kinds(known) == [LimitKind.BETWEEN]
    assert kinds(known._replace(errors=errors)) == []


def test_a_part_of_one_rank_costs_what_the_others_wait_for_it() -> None:
    """The parts are a checkpoint on the first rank, and a slow disk on the second."""
    first, second = rank(files_s=0.02), rank("GPU:1", meeting_s=0.021)
    (limit,) = judge_training([first, second]).limits
    assert (limit.kind, limit.by) == (LimitKind.CHECKPOINTS, "GPU:0")
    assert limit.gain == pytest.approx(0.121 / (0.121 - 0.02 / 2) - 1, rel=0.01), "half as often"
    first, second = rank(meeting_s=0.041), rank("GPU:1", input_s=0.04)
    (limit,) = judge_training([first, second]).limits
    assert (limit.kind, limit.by) == (LimitKind.RANK_INPUT, "GPU:1")
    assert limit.gain == pytest.approx(0.141 / 0.101 - 1, rel=0.02)


def test_what_another_rank_s_work_hides_is_no_limit() -> None:
    hidden, slow = rank(input_s=0.03, meeting_s=0.021), rank("GPU:1", own_work_s=0.15)
    assert kinds(hidden, slow) == [LimitKind.UNEQUAL]


def test_unequal_work_has_the_gain_of_the_shares_that_are_advised() -> None:
    quick, slow = rank(meeting_s=0.101), rank("GPU:1", own_work_s=0.2)
    found = judge_training([quick, slow])
    (limit,) = found.limits
    assert found.advice is not None
    assert limit.gain == pytest.approx(found.advice.gain)
    assert " + ".join(map(str, found.advice.shares)) in limit.remedy
    assert found.advice.shares[0] == pytest.approx(128 * 2 / 3, abs=2)
    assert judge_training([quick, slow], complete=False).advice is None


def test_a_step_takes_as_long_as_on_the_rank_that_waits_least() -> None:
    """Of a wait in single steps, as for another rank's checkpoint, a part is missed."""
    writes, waits = rank(files_s=0.4), rank("GPU:1", meeting_s=0.3)
    judged = judge_training([writes, waits])
    assert judged.step_s == pytest.approx(0.1 + 0.001 + 0.4)
    assert judged.limits[0].kind == LimitKind.CHECKPOINTS


def test_noise_makes_no_rank_slow() -> None:
    assert kinds(rank(meeting_s=0.02, spread=0.3), rank("GPU:1", own_work_s=0.12, spread=0.3)) == []


def test_an_exchange_is_a_limit_where_the_last_rank_waits_too() -> None:
    pair = [rank(name, meeting_s=0.05, least=0.045) for name in ("GPU:0", "GPU:1")]
    assert kinds(*pair) == [LimitKind.EXCHANGE]
    assert kinds(rank(meeting_s=0.05, least=0.045)) == [], "alone, nothing is exchanged"


def test_want_of_cores_is_named_with_those_that_have_them() -> None:
    starved = rank(idle_own_s=0.06)._replace(starved=0.4)
    (limit,) = judge_training([starved], competitors="load (16 cores)").limits
    assert (limit.kind, limit.by) == (LimitKind.HOST_STARVED, "load (16 cores)")


def test_a_model_that_sleeps_is_not_taken_for_a_lack_of_cores() -> None:
    assert kinds(rank(idle_own_s=0.06)) == [LimitKind.OWN_CODE]


def test_a_gpu_that_waits_for_its_host_is_a_limit_and_one_that_is_behind_is_not() -> None:
    assert kinds(rank()._replace(behind=0.1)) == [LimitKind.HOST_LAUNCHES]
    assert kinds(rank()._replace(behind=0.9)) == []


@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4),
    st.lists(SECONDS, min_size=4, max_size=4),
)
def test_five_parts_are_the_step(ranks: list[tuple[float, ...]], least: list[float]) -> None:
    sums = [
        StepSums(7, one, two, three, 0.0, four, 0.0, 0.0, five)
        for one, two, three, four, five in ranks
    ]
    for each, whole in zip(divide_steps(sums, least[: len(sums)]), sums, strict=True):
        assert sum(each) == pytest.approx(whole.step_s)
        assert min(each) >= 0


@given(
    st.lists(
        st.tuples(*[st.sampled_from([0.0, 1e-320, 1e-9, 0.1, 60.0, 1e18])] * 8),
        min_size=1,
        max_size=4,
    )
)
def test_any_figures_are_judged(ranks: list[tuple[float, ...]]) -> None:
    every = [
        MeasuredRank(
            f"rank {place}",
            int(each[0]),
            StepSums(1, *each),
            StepSums(),
            each[0],
            each[1],
            each[2],
            each[3],
        )
        for place, each in enumerate(ranks)
    ]
    for limit in judge_training(every).limits:
        assert limit.gain_low <= limit.gain <= limit.gain_high
