"""Texts about the measurements of a plan: doubts with remedies, memory of others,
devices left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pytest

from evener.balancer.result.measurements import (
    ORDER,
    describe_doubts,
    find_code_limit,
    find_doubts,
    find_left_out,
    find_pass_statistics,
    find_short_epoch,
    find_taken_memory,
)
from evener.balancer.result.sentences import write_doubt
from evener.balancer.types import (
    Failed,
    Layout,
    MeasurementDoubt,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.balancer.verdict import PassStatistics, ShortEpoch, TakenMemory
from evener.devices.types import Device
from evener.tui.text.summaries import DOUBTS

DEVICES = (Device("a", 0, "GTX 1080 Ti", "gpu", None), Device("b", 1, "GTX 1080", "gpu", None))
EVERY = [msgspec.convert({"code": code, "value": 0.1}, MeasurementDoubt) for code in ORDER]
SPLIT, EVEN = layout_of((820, 568)), layout_of((694, 694))


def timed(
    *doubts: MeasurementDoubt,
    layout: Layout = SPLIT,
    stage: Stage = Stage.RACE,
    short: tuple[int, ...] = (),
    step: float = 1.0,
) -> Timed:
    """Return a measurement with doubts, memory that others held, and seconds of a step ± 10 %."""
    probe, seconds = Probe(layout, stage, 1.0), (step, 0.9 * step, 1.1 * step)
    return Timed(probe, *seconds, 5, (1, 1), (1.0, 1.0), 1.0, 5.0, doubts, short_bytes=short)


def explain_doubts(
    doubts: Iterable[MeasurementDoubt], devices: Sequence[Device], *longer: str
) -> tuple[str, ...]:
    """Return each doubt as a sentence."""
    on_gpus = any(not device.on_cpu for device in devices)
    return tuple(write_doubt(one, on_gpus, *longer) for one in describe_doubts(doubts, devices))


def test_a_layer_that_sees_one_pass_is_a_warning() -> None:
    """The warning appears only if a share is computed in passes, and has the smallest of them."""
    passes = layout_of((820, 568), (410, 568))
    assert find_pass_statistics(passes, "BatchNorm2d") == PassStatistics("BatchNorm2d", 410)
    assert find_pass_statistics(SPLIT, "BatchNorm2d") is None
    assert find_pass_statistics(passes, "") is None


def test_every_doubt_has_a_message_and_the_worst_of_a_kind_is_reported_once() -> None:
    """Doubts come in a fixed order, each with its device and a remedy."""
    seen = [
        *map(timed, EVERY),
        timed(MeasurementDoubt("drift", -0.3, 1)),
        timed(layout=EVEN, step=2.0),
        timed(layout=EVEN),
    ]
    doubts = find_doubts(seen, SPLIT)
    assert [doubt.code for doubt in doubts] == list(ORDER)
    assert set(DOUBTS) == set(ORDER), "a journal may have any of them behind a measurement"
    sentences = explain_doubts(doubts, DEVICES)
    assert len(set(sentences)) == len(ORDER)
    assert (
        "GPU:1: Steps got 30.0 % faster while they were timed; measure again with a longer "
        "--budget."
    ) in sentences
    (slower,) = explain_doubts([MeasurementDoubt("drift", 0.05)], DEVICES, "more steps")
    assert slower == "Steps got 5.0 % slower while they were timed; measure again with more steps."


def test_a_busy_cpu_is_not_to_be_cooled() -> None:
    """A throttled GPU may be hot."""
    slices = [Device(f"cpu-{i}-of-2", i, "EPYC", "cpu", None) for i in range(2)]
    (busy,), (hot,) = (
        explain_doubts([MeasurementDoubt("throttled", 0.1, 0)], devices)
        for devices in (slices, DEVICES)
    )
    assert "other work" in busy
    assert "heat" in hot
    assert "heat" not in busy


def test_a_doubt_about_another_layout_is_none_about_this_one() -> None:
    """An exception is other work during most of a rival's blocks: it disturbed this layout's blocks
    too.
    """
    assert not find_doubts([timed(MeasurementDoubt("drift", 0.1))], EVEN)
    assert find_doubts([timed(MeasurementDoubt("disturbed", 0.9))], EVEN)
    assert not find_doubts([timed(MeasurementDoubt("disturbed", 0.4))], EVEN)
    assert not find_doubts([timed(MeasurementDoubt("disturbed", 0.9), stage=Stage.SOLO)], EVEN)
    assert not find_doubts([timed(MeasurementDoubt("disturbed", 0.9))], solo(2, 0, 8)), (
        "one device sees other work itself"
    )


def test_a_figure_is_rough_only_where_the_search_would_have_measured_on() -> None:
    """All turns together count, whatever one measurement alone showed: a longer budget changes
    nothing.
    """
    noisy = [timed(MeasurementDoubt("noisy", 0.12))]
    assert find_doubts(noisy, SPLIT, 0.049) == ()
    assert find_doubts(noisy, SPLIT, 0.051) == (MeasurementDoubt("noisy", 0.051),)


def test_a_layout_that_ran_at_two_speeds_is_a_doubt_about_every_gain() -> None:
    """This holds for any layout, unless the intervals overlap.

    It doesn't hold either if all devices ran at the same time in one of the two measurements.
    """
    twice = [timed(layout=EVEN, step=1.3), timed(layout=EVEN), timed(layout=EVEN, step=1.1)]
    (doubt,) = find_doubts(twice, SPLIT)
    assert (doubt.code, doubt.value) == ("changed", pytest.approx(0.3))
    assert not find_doubts(twice[1:], SPLIT), "their intervals overlap"
    assert not find_doubts([timed(layout=SPLIT, step=1.3), timed(layout=EVEN)], SPLIT), (
        "two layouts"
    )
    alone = solo(2, 0, 8)
    assert not find_doubts(
        [timed(layout=alone, stage=Stage.SOLO, step=1.3), timed(layout=alone)], SPLIT
    )
    assert find_doubts(
        [timed(layout=alone, stage=Stage.SOLO), timed(layout=alone, step=1.3)], SPLIT
    )
    assert find_doubts(
        [timed(layout=alone, stage=Stage.SOLO, step=each) for each in (1.0, 1.3)], SPLIT
    )


def test_a_loss_that_was_not_finite_is_reported_with_its_first_step() -> None:
    """A layout that wasn't chosen counts too, because the model is the same."""
    seen = [
        timed(MeasurementDoubt("not_finite", 57.0, 1), layout=EVEN),
        timed(MeasurementDoubt("not_finite", 3.0, 0), layout=EVEN),
    ]
    doubts = find_doubts(seen, SPLIT)
    assert doubts == (MeasurementDoubt("not_finite", 3.0, 0),)
    (sentence,) = explain_doubts(doubts, DEVICES)
    assert sentence.startswith("GPU:0: The loss was NaN or infinite at step 3, ")


def test_noise_is_that_of_the_figure_over_all_turns() -> None:
    """A rough first turn is no doubt once the other turns have made the result precise."""
    seen = [timed(MeasurementDoubt("noisy", 0.8)), timed()]
    assert find_doubts(seen, SPLIT, error=0.02) == ()
    assert find_doubts(seen, SPLIT, error=0.09) == (MeasurementDoubt("noisy", 0.09),)


def test_single_steps_are_one_doubt_unless_their_noise_was_measured() -> None:
    """Each single step is short and noisy; a probe of several steps shows the noise."""
    doubts = MeasurementDoubt("noisy", 0.08), MeasurementDoubt("too_short", 9.8)
    lone = msgspec.structs.replace(timed(*doubts), steps=1)
    assert find_doubts([lone, lone], SPLIT, error=0.06) == (MeasurementDoubt("few_steps", 2),)
    assert find_doubts([lone, timed(layout=EVEN)], SPLIT, error=0.08) == (
        MeasurementDoubt("few_steps", 1),
    )
    codes = [doubt.code for doubt in find_doubts([lone, timed()], SPLIT, error=0.08)]
    assert codes == ["noisy", "too_short"]


def test_a_plan_whose_layout_also_ran_out_of_memory_is_doubted() -> None:
    full = OutOfMemory(timed().probe, (0,), "full", 1.0)
    assert find_doubts([timed(), full, full], SPLIT) == (MeasurementDoubt("ran_out", 2),)
    assert not find_doubts([timed(), full], EVEN)


def test_memory_that_others_hold_is_reported_with_its_maximum() -> None:
    """Each device has its own sentence."""
    seen = [timed(short=(0, 1 << 30)), timed(short=(0, 3 << 30)), timed()]
    assert find_taken_memory(seen, DEVICES) == (TakenMemory("GPU:1", 3 << 30),)
    assert find_taken_memory([timed()], DEVICES) == ()


def failed(position: int, batch: int = 8, cause: str = "exit") -> Failed:
    """Return a failure of one device alone."""
    probe = Probe(solo(2, position, batch), Stage.SOLO, 1.0)
    return Failed(probe, cause, f"GPU:{position}, building: SIGABRT", (position,), 1.0)  # type: ignore[arg-type]


def test_a_device_on_which_nothing_ran_is_reported_as_left_out() -> None:
    """A device on which anything ran isn't, whatever else failed on it."""
    alone = timed(layout=solo(2, 0, 8), stage=Stage.SOLO)
    (one,) = find_left_out([alone, failed(1)], DEVICES, alone.probe.layout)
    assert (one.name, one.reason) == ("GPU:1", "nothing_ran")
    assert "SIGABRT" in one.detail
    assert not find_left_out([timed(), failed(1)], DEVICES, SPLIT)


def test_a_device_that_ran_and_then_failed_to_the_last_is_reported_as_left_out() -> None:
    """It isn't reported if something ran on it again, or if the plan uses it."""
    (one,) = find_left_out([timed(), failed(1)], DEVICES, solo(2, 0, 8))
    assert (one.name, one.reason) == ("GPU:1", "failed")
    assert not find_left_out([timed(), failed(1), timed()], DEVICES, solo(2, 0, 8))
    (one,) = find_left_out([timed(), failed(1, cause="device")], DEVICES, SPLIT)
    assert (one.name, one.reason) == ("GPU:1", "gone")


def test_an_epoch_of_few_steps_is_found_where_the_number_of_rows_is_certain() -> None:
    """The warning has the batch with which an epoch is long enough."""
    assert find_short_epoch(SPLIT, 0) is None
    assert find_short_epoch(SPLIT, 100 * (820 + 568)) is None
    assert find_short_epoch(SPLIT, 28000) == ShortEpoch(20, 1388, 28000, 280)
    assert find_short_epoch(SPLIT, 64) == ShortEpoch(0, 1388, 64, 0)


RAISED = "GPU:0, warming up: limit.py:9: ValueError: this table holds 200 rows"


def raised(position: int, batch: int, detail: str = RAISED) -> Failed:
    """Return a failure of the user's own code with this many rows on one device."""
    probe = Probe(solo(2, position, batch), Stage.SOLO, 1.0)
    return Failed(probe, "raised", detail, (position,), 1.0)


def test_a_limit_of_the_user_s_code_is_where_more_rows_always_raise() -> None:
    """It is reported with its message and the rows on both sides.

    A failure below what ran is no limit.
    """
    ran = [timed(layout=solo(2, 0, size), stage=Stage.SOLO) for size in (8, 197)]
    limit = find_code_limit([*ran, raised(0, 512), raised(0, 212)])
    assert limit is not None
    assert (limit.rows, limit.failed_rows) == (197, 212)
    assert limit.error == "limit.py:9: ValueError: this table holds 200 rows"
    assert find_code_limit(ran) is None
    assert find_code_limit([raised(0, 8)]) is None, "nothing ran"
    assert find_code_limit([*ran, raised(0, 64)]) is None, "197 ran"
    other = [raised(0, 512), raised(0, 100, "GPU:0, out of luck")]
    found = find_code_limit([*ran, *other])
    assert found is not None
    assert found.failed_rows == 512
