"""A rank's own work is timed apart from its waiting, whatever the loop does between its batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evener.live import Training
from evener.torch_split.own_work import GpuClock, HostClock, StepTimer, TimedStep
from tests.support.torch_rebalance_programs import SLEEP_SECONDS, TurnedClock

SIZES = (3, 1)


def run(script: str, alone: bool = False) -> tuple[StepTimer, TurnedClock]:
    """Digits are seconds between what letters say: b a batch in hand, g gradients, u update, f finished, p pause."""
    clock = TurnedClock()
    timer = StepTimer(clock, alone)
    calls = {"g": timer.note_gradients, "u": timer.note_update, "f": timer.finish, "p": timer.pause}
    for letter in script:
        if letter.isdigit():
            clock.now += int(letter)
        elif letter == "b":
            timer.begin(SIZES)
        else:
            calls[letter]()
    return timer, clock


def last(script: str, **options: Any) -> TimedStep:
    return run(script, **options)[0].last()[-1]


def test_a_step_is_own_work_then_waiting_and_the_input_lies_before() -> None:
    assert last("b1g1u1f4b3g2u1f") == (SIZES, 3, 2, 4, 10)


def test_what_lies_outside_of_a_step_is_not_in_it() -> None:
    """A checkpoint behind the update, and an evaluation between two epochs, aren't own work."""
    assert last("b3g2u9f")[:3] == (SIZES, 3, 2)
    first = last("b1g1u1fp99b3g2u1f")
    assert first[:3] == (SIZES, 3, 2)
    assert math.isnan(first.input_s)


def test_with_several_passes_the_last_one_ends_own_work() -> None:
    assert last("b3g1g1g2u1f")[1:3] == (5, 2)


def test_two_updates_in_a_step_have_own_work_each() -> None:
    """As in a GAN: what the first update waited for isn't own work."""
    assert last("b3g2u4g1uf")[1:3] == (7, 3)


def test_an_exchange_within_a_step_is_waiting() -> None:
    """As of the number of tokens before the backward pass, and of the mean loss behind it."""
    timer, clock = run("b1")
    with timer.meeting():
        clock.now += 5
    clock.now += 2
    timer.note_gradients()
    with timer.meeting():
        clock.now += 3
    timer.note_update()
    timer.finish()
    assert timer.last()[0][1:3] == (3, 8)


def test_batches_that_are_taken_together_are_one_step() -> None:
    timer, _ = run("b1f1b2g1u1f" * 2)
    assert [step[1:3] for step in timer.last()] == [(2, 1), (2, 1)]


def test_a_step_without_an_update_has_own_work() -> None:
    """As in all but the last step of an accumulation with an exchange each."""
    step = last("b3g2f")
    assert step.own_work_s == 3
    assert math.isnan(step.waiting_s)


def test_only_a_step_with_gradients_counts_for_an_agreement() -> None:
    """An optimizer of one rank's own may step at any time; the others would wait for it."""
    timer, _ = run("b1u1")
    assert not timer.finish()
    timer.begin(SIZES)
    timer.note_gradients()
    assert timer.finish()
    assert not timer.finish()


def test_a_process_alone_waits_for_nobody() -> None:
    assert last("b5u1f", alone=True)[1:3] == (5, 0)


def test_medians_leave_out_what_is_not_known() -> None:
    timer, _ = run("b3g2u1f2" + "b5g1u1f1" + "b4g9u1f1")
    assert timer.medians()[:4] == (4, 2, 1.5, 12)
    assert run("")[0].medians() == (0, 0, 0, 0, 0)


def test_steps_that_the_device_has_not_computed_are_left_out() -> None:
    timer, clock = run("b1g1u1fb2g1u1fb3g1u1f")
    clock.computed = 7
    assert [step.own_work_s for step in timer.last()] == [1, 2]


def test_a_timer_hears_of_real_optimizers_as_long_as_it_lives() -> None:
    clock = TurnedClock()
    timer = StepTimer(clock, alone=True)
    timer.begin(SIZES)
    clock.now = 2.0
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1).step()
    timer.finish()
    assert timer.last()[0].own_work_s == 2
    del timer
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1).step()


class FakeEvent:
    """An event of a GPU; `computed` are the milliseconds at which it comes to the next ones."""

    computed: ClassVar[deque[float]] = deque()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = math.nan

    def record(self) -> None:
        self.at = self.computed.popleft()

    def query(self) -> bool:
        return self.at <= 100

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def take_step(timer: StepTimer) -> None:
    timer.begin(SIZES)
    timer.note_gradients()
    timer.note_update()
    timer.finish()


def test_on_a_gpu_events_are_read_once_they_are_past() -> None:
    FakeEvent.computed = deque([10, 30, 38, 40, 45, 90, 98, 101])
    timer = StepTimer(GpuClock(FakeEvent), alone=False)
    take_step(timer)
    take_step(timer)
    (step,) = timer.last()
    assert step[1:3] == pytest.approx((0.020, 0.008))


def test_events_are_recorded_again_once_they_were_read() -> None:
    """The times of steps that were read stay as they are."""
    made: list[FakeEvent] = []

    def make(enable_timing: bool) -> FakeEvent:
        made.append(FakeEvent(enable_timing))
        return made[-1]

    FakeEvent.computed = deque(float(at) for at in range(100))
    timer = StepTimer(GpuClock(make), alone=False)
    for _ in range(20):
        take_step(timer)
        assert {step[1:3] for step in timer.last()} == {(0.001, 0.001)}
    assert len(timer.last()) == 20
    assert len(made) == 3 + 20, "three for all steps, and the end of each"


def paired(first: Any, second: Any) -> Iterator[tuple[Training, Training, float]]:
    """What the live files of two ranks say of each training, and the seconds that the second was held up."""
    for weigh, (record, _) in first.items():
        other, held_up = second[weigh]
        yield msgspec.convert(record, Training), msgspec.convert(other, Training), held_up


@pytest.mark.slow
def test_live_files_tell_the_rank_whose_backward_pass_is_slow(trainer_ranks: Callable[..., list[Any]]) -> None:
    """DDP makes both backward passes equally long; own work differs by what rank 1 sleeps, and rank 0 waits as long."""
    first, second = trainer_ranks("tests.support.torch_rebalance_programs.slow_backward", world=2)
    assert len(first) == 3
    for fast, slow, _ in paired(first, second):
        (quick,), (late,) = fast.devices, slow.devices
        assert late.own_work_s >= SLEEP_SECONDS
        assert quick.own_work_s < 0.5 * late.own_work_s
        assert quick.waiting_s > 0.5 * SLEEP_SECONDS > late.waiting_s
        assert quick.own_work_s + quick.waiting_s == pytest.approx(late.own_work_s + late.waiting_s, rel=0.2)
        assert (fast.rank, slow.rank, fast.world, slow.world) == (0, 1, 2, 2)
        assert fast.training == slow.training != ""
        assert (quick.batch, late.batch) == (6, 2)
        assert fast.step_s >= SLEEP_SECONDS


@pytest.mark.slow
def test_gpus_tell_by_how_much_a_backward_pass_was_held_up(gpu_ranks: Callable[..., list[Any]]) -> None:
    """By CUDA events: a kernel holds up rank 1."""
    first, second = gpu_ranks("tests.support.torch_rebalance_programs.slow_backward")
    for fast, slow, held_up in paired(first, second):
        (quick,), (late,) = fast.devices, slow.devices
        assert late.own_work_s - quick.own_work_s == pytest.approx(held_up, rel=0.1)
        assert quick.waiting_s - late.waiting_s == pytest.approx(held_up, rel=0.1)


def test_a_timer_that_is_collected_while_an_optimizer_steps_disturbs_nothing() -> None:
    """PyTorch walks over its hooks then; none may go."""
    timers = [StepTimer(HostClock(), alone=True)]
    handle = register_optimizer_step_pre_hook(lambda *_: timers.clear())
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], 0.5).step()
    handle.remove()
    assert not timers
    assert weight.item() == 0.5
