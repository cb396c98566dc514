"""Properties of the list of limits: names, order and gains."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evener.training.limits import (
    LEAST_SHARE,
    LimitKind,
    StepPart,
    TrainingLimit,
    divide_step,
    find_limits,
    least_gain,
)

STEP = st.floats(1e-4, 100.0)
RELATIVE = st.floats(0.0, 1.0)


@st.composite
def relative_parts(draw: st.DrawFn) -> list[StepPart]:
    """Draw the parts of a step of one second."""
    kinds = draw(st.lists(st.sampled_from(LimitKind), unique=True, max_size=6))
    return [
        StepPart(
            kind=kind,
            seconds=draw(RELATIVE),
            error_s=draw(st.floats(0.0, 0.2)),
            spared=draw(RELATIVE),
            without_s=draw(st.none() | st.floats(0.01, 1.2)),
            without_error_s=draw(st.floats(0.0, 0.2)),
            high_error_s=draw(st.none() | st.floats(0.0, 0.4)),
            remaining_s=draw(st.floats(0.0, 0.1)),
        )
        for kind in kinds
    ]


def scale(part: StepPart, by: float) -> StepPart:
    """Return the part in other units of time."""
    return msgspec.structs.replace(
        part,
        seconds=part.seconds * by,
        error_s=part.error_s * by,
        without_s=None if part.without_s is None else part.without_s * by,
        without_error_s=part.without_error_s * by,
        high_error_s=None if part.high_error_s is None else part.high_error_s * by,
        remaining_s=part.remaining_s * by,
    )


def surely_gained(part: StepPart) -> float:
    """Return a remedy's gain in a step of a second, if the part has its minimum duration."""
    left = part.without_s
    error = part.without_error_s
    if left is None:
        left, error = 1 - part.spared * part.seconds, part.spared * part.error_s
    return 1 / max(1e-3, left + error + part.remaining_s) - 1


def _is_clear(part: StepPart) -> bool:
    """True if the part isn't so near 5 % that rounding decides."""
    return (
        min(abs(part.seconds - LEAST_SHARE), abs(surely_gained(part) - least_gain(part.kind)))
        > 1e-6
    )


@given(relative_parts())
def test_limits_surely_gain_five_percent_and_the_largest_gain_is_first(
    parts: list[StepPart],
) -> None:
    limits = find_limits(1.0, parts)
    own = divide_step(1.0, parts)
    assume(all(map(_is_clear, own)))
    large = [part for part in own if part.seconds >= LEAST_SHARE]
    gained = [part for part in large if surely_gained(part) >= least_gain(part.kind)]
    assert {each.kind for each in limits} == {part.kind for part in gained}
    assert all(each.gain_low >= least_gain(each.kind) for each in limits)
    gains = [each.gain for each in limits]
    assert gains == sorted(gains, reverse=True)


@given(relative_parts())
def test_no_time_of_a_step_is_two_limits(parts: list[StepPart]) -> None:
    assert sum(each.share for each in find_limits(1.0, parts)) <= 1 + 1e-9
    measured = {part.kind: part.seconds for part in parts}
    for own in divide_step(1.0, parts):
        assert 0 <= own.seconds <= measured[own.kind]


@given(relative_parts())
def test_parts_that_do_not_overlap_are_as_measured(parts: list[StepPart]) -> None:
    inside = (LimitKind.HOST_STARVED, LimitKind.UNEQUAL)
    apart = [scale(part, 1 / 6) for part in parts if part.kind not in inside]
    assert {part.kind: part.seconds for part in divide_step(1.0, apart)} == {
        part.kind: part.seconds for part in apart
    }


def test_time_without_a_core_is_taken_from_what_a_rank_does_and_not_from_its_waiting() -> None:
    parts = [
        StepPart(kind=LimitKind.HOST_STARVED, seconds=0.4),
        StepPart(kind=LimitKind.INPUT, seconds=0.5),
        StepPart(kind=LimitKind.EXCHANGE, seconds=0.2),
    ]
    found = {part.kind: part.seconds for part in divide_step(1.0, parts)}
    assert found[LimitKind.HOST_STARVED] == 0.4
    assert found[LimitKind.INPUT] == pytest.approx(0.25), "half of the 0.8 s of work and input"
    assert found[LimitKind.EXCHANGE] == 0.2


def test_a_device_that_is_hot_is_unequal_by_its_heat() -> None:
    parts = [
        StepPart(kind=LimitKind.UNEQUAL, seconds=0.3, by="GPU:1"),
        StepPart(kind=LimitKind.HEAT, seconds=0.2, by="GPU:1"),
        StepPart(kind=LimitKind.POWER, seconds=0.1, by="GPU:0"),
    ]
    found = {part.kind: part.seconds for part in divide_step(1.0, parts)}
    assert found[LimitKind.UNEQUAL] == pytest.approx(0.1)
    assert found[LimitKind.HEAT] == 0.2


@given(relative_parts(), st.randoms(use_true_random=False))
def test_the_order_of_parts_changes_nothing(parts: list[StepPart], random: object) -> None:
    mixed = list(parts)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert find_limits(1.0, mixed) == find_limits(1.0, parts)


@given(relative_parts())
def test_a_gain_lies_in_its_interval_and_is_never_a_loss(parts: list[StepPart]) -> None:
    for each in find_limits(1.0, parts):
        assert 0 <= each.gain_low <= each.gain <= each.gain_high
        assert each.milliseconds == pytest.approx(1e3 * each.share)


@given(STEP, st.floats(LEAST_SHARE, 0.99), st.floats(0.0, 0.2))
def test_a_step_without_the_part_is_faster_by_the_gain(
    step_s: float, share: float, error: float
) -> None:
    part = StepPart(kind=LimitKind.INPUT, seconds=share * step_s, error_s=error * share * step_s)
    for limit in find_limits(step_s, [part]):
        assert (1 + limit.gain) * (step_s - part.seconds) == pytest.approx(step_s)
        lowest = (1 + limit.gain_low) * (step_s - part.seconds + part.error_s)
        assert lowest == pytest.approx(step_s)


@given(relative_parts(), st.floats(1e-3, 1e3))
def test_limits_are_the_same_in_any_unit_of_time(parts: list[StepPart], unit: float) -> None:
    near = [part for part in parts if _is_clear(part)]
    assume(all(map(_is_clear, divide_step(1.0, near))))
    scaled = [scale(part, unit) for part in near]
    for one, other in zip(find_limits(1.0, near), find_limits(unit, scaled), strict=True):
        assert one.gain == pytest.approx(other.gain, rel=1e-6, abs=1e-9)
        assert one.share == pytest.approx(other.share)


def test_an_upper_end_of_its_own_leaves_the_lower_end_alone() -> None:
    part = StepPart(kind=LimitKind.MEMORY, seconds=0.4, error_s=0.1, high_error_s=0.3, spared=0.5)
    (limit,) = find_limits(1.0, [part])
    assert limit.gain == pytest.approx(1 / 0.8 - 1)
    assert limit.gain_low == pytest.approx(1 / 0.85 - 1)
    assert limit.gain_high == pytest.approx(1 / 0.65 - 1)


@given(st.floats(0.05, 0.9), st.floats(0.05, 0.94))
def test_a_measured_step_without_the_limit_decides_the_gain(share: float, without: float) -> None:
    part = StepPart(kind=LimitKind.INPUT, seconds=share, without_s=without)
    (limit,) = find_limits(1.0, [part])
    assert limit.measured
    assert limit.gain == pytest.approx(1 / without - 1)


@pytest.mark.parametrize("kind", LimitKind)
def test_each_kind_says_what_happens_and_what_to_do(kind: LimitKind) -> None:
    part = StepPart(kind=kind, seconds=0.5)
    (limit,) = find_limits(1.0, [part])
    assert kind.meaning.endswith(".")
    assert limit.remedy == kind.usual_remedy
    assert msgspec.json.decode(msgspec.json.encode(limit), type=TrainingLimit) == limit


def test_a_step_that_took_no_time_has_no_limits() -> None:
    assert find_limits(0.0, [StepPart(kind=LimitKind.INPUT, seconds=1.0)]) == ()
