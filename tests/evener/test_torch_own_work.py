"""A rank's compute time (own work) is separated from its waiting, whatever the loop does."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evener.live.files import Details
from evener.live.reporter import Training
from evener.torch.ranks import own_work
from evener.torch.ranks.own_work import (
    STRIDES,
    WARM_STEPS,
    GpuClock,
    HostClock,
    StepTimer,
    TimedStep,
)
from evener.torch.ranks.timed_batches import (
    BLOCK_BATCHES,
    GOLDEN,
    ON_GPU,
    RANGE,
    TimedBatches,
)
from evener.torch.rebalancing import Rebalancing
from evener.training.bottleneck import RankTimes
from evener.training.step_limits import judge_training
from evener.training.step_sums import StepSums
from evener.tui.view.ranks import find_causes, place_ranks
from tests.support.torch_made_ranks import PAUSE_SECONDS
from tests.support.torch_rebalance_programs import SLEEP_SECONDS, TurnedClock

SIZES = (3, 1)


def run(
    script: str, single_rank: bool = False, past: float = math.inf
) -> tuple[StepTimer, TurnedClock]:
    """Run a script of events and seconds on a step timer.

    Digits are seconds between events. The letters are b: batch received, g: gradients, e: end of
    the backward pass, u: optimizer step begins, d: optimizer step done, f: finish, p: pause, v: a
    validation batch, w: a wait within a pass begins, o: it ends.
    """
    clock = TurnedClock()
    clock.past = past
    timer = StepTimer(clock, single_rank)
    calls = {
        "g": timer.note_gradients,
        "e": timer.note_backward,
        "u": timer.note_update,
        "d": timer.note_updated,
        "f": timer.finish,
        "p": timer.pause,
        "v": timer.note_validation,
        "w": timer.begin_wait,
        "o": timer.end_wait,
    }
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
    assert last("b1g1eudf4b3g2eudf")[:6] == (SIZES, 3, 2, 4, 9, 0)


def test_what_a_rank_waits_for_within_a_pass_is_no_own_work() -> None:
    """FSDP's layers have waits within a pass; after the last gradient they aren't part of it."""
    step = last("fb1w2o3w4ogew7ou5df")
    assert (step.own_work_s, step.waiting_s) == (1 + 3, 2 + 4)
    assert step.between_s == 7


def test_between_steps_is_what_lies_around_the_optimizer_s_step() -> None:
    """Clipping or a pause isn't waiting, and the optimizer's own time couldn't be saved."""
    step = last("fb3g2e4u5d1f")
    assert step[1:3] == (3, 2)
    assert step.between_s == 4 + 1
    assert step.step_s == 3 + 2 + 4 + 5 + 1
    assert last("b3g2e4f").between_s == 4, "a step that is skipped, as after an overflow"


def test_what_lies_outside_of_a_step_is_not_in_it() -> None:
    """A checkpoint after the update, and an evaluation between two epochs, don't count."""
    assert last("b3g2eud9f")[:3] == (SIZES, 3, 2)
    first = last("b1g1eud1fp99b3g2eud1f")
    assert first[:3] == (SIZES, 3, 2)
    assert math.isnan(first.input_s)


def test_with_several_passes_the_last_one_ends_own_work() -> None:
    assert last("b3g1g1g2u1f")[1:3] == (5, 2)
    assert last("b3ge1ge1g2eud1f")[1:3] == (5, 2)
    assert last("b3g1e1g1e1g2eud1f")[1:3] == (5, 4), "an exchange after each"


def test_two_updates_in_a_step_have_own_work_each() -> None:
    """In a GAN, the wait of the first update isn't compute time."""
    assert last("b3g2eud4g1eudf")[1:3] == (7, 3)


def test_an_exchange_within_a_step_is_waiting() -> None:
    """Examples are the number of tokens before the backward pass, and the mean loss after it."""
    timer, clock = run("b1")
    with timer.collective():
        clock.now += 5
    clock.now += 2
    timer.note_gradients()
    timer.note_backward()
    with timer.collective():
        clock.now += 3
    clock.now += 4
    timer.note_update()
    timer.note_updated()
    with timer.collective():
        clock.now += 1
    timer.finish()
    assert timer.last()[0][1:3] == (3, 9)
    assert timer.last()[0].between_s == 4


def test_batches_that_are_taken_together_are_one_step() -> None:
    timer, _ = run("b1f1b2g1u1f" * 2)
    assert [step[1:3] for step in timer.last()] == [(2, 1), (2, 1)]


def test_a_step_without_an_update_has_own_work() -> None:
    """Examples are all but the last step of an accumulation that exchanges gradients each time."""
    step = last("b3g2f")
    assert step.own_work_s == 3
    assert math.isnan(step.waiting_s)


def test_only_a_step_with_gradients_counts_for_an_agreement() -> None:
    """An optimizer of only one rank may step at any time, and the others would wait for it."""
    timer, _ = run("b1u1")
    assert not timer.finish()
    timer.begin(SIZES)
    timer.note_gradients()
    assert timer.finish()
    assert not timer.finish()


def test_a_process_alone_waits_for_no_other() -> None:
    assert last("b5ud1f", single_rank=True)[1:3] == (5, 0)
    assert last("b5ud3ud1f", single_rank=True)[1:3] == (8, 0)
    paused = last("b5ge2ud1f", single_rank=True)
    assert (paused.own_work_s, paused.between_s) == (5, 3)


def test_medians_leave_out_what_is_not_known() -> None:
    timer, _ = run("b3g2eud1f2" + "b5g1eud1f1" + "b4g9eud1f1")
    work, step = timer.medians()
    assert (work, step.input_s, step.step_s, step.between_s) == ((4, 2, 1, 0.5), 1.5, 12, 1)
    assert run("")[0].medians() == ((0, 0, 0, 0), Details())


def test_it_is_known_what_goes_on_now() -> None:
    parts = {
        "": "between steps",
        "b": "own work",
        "bg": "sum",
        "bge": "between steps",
        "bgeu": "update",
    }
    parts |= {
        "bgeud": "between steps",
        "bgeudf": "input",
        "bgeudfp": "between steps",
        "bgeudfb": "own work",
    }
    assert {script: run(script)[0].now()[1] for script in parts} == parts
    assert run("bgeudfb")[0].now()[0] == 2


def test_steps_that_the_device_has_not_computed_are_left_out() -> None:
    timer, _ = run("b1g1u1fb2g1u1fb3g1u1f", past=7)
    assert [step.own_work_s for step in timer.last()] == [1, 2]


def test_a_timer_is_notified_by_real_optimizers_as_long_as_it_lives() -> None:
    clock = TurnedClock()
    timer = StepTimer(clock, single_rank=True)
    timer.begin(SIZES)
    clock.now = 2.0
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1).step()
    timer.finish()
    assert timer.last()[0].own_work_s == 2
    del timer
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1).step()


class FakeEvent:
    """A GPU event; `computed` has the milliseconds at which the GPU reaches the next ones."""

    computed: ClassVar[deque[float]] = deque()
    past: ClassVar[float] = 100

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = math.nan

    def record(self, stream: object) -> None:
        self.at = self.computed.popleft()

    def query(self) -> bool:
        return self.at <= self.past

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def make_fake_clock(make_event: Callable[..., FakeEvent] = FakeEvent) -> GpuClock:
    """Return the clock of a GPU whose events are fakes."""
    return GpuClock(torch.device("cuda", 0), make_event, str)


def take_step(timer: StepTimer) -> None:
    timer.begin(SIZES)
    timer.note_gradients()
    timer.note_backward()
    timer.finish()


def test_on_a_gpu_events_are_read_once_they_are_past() -> None:
    FakeEvent.computed = deque([10, 30, 38, 40, 45, 90, 98, 101])
    timer = StepTimer(make_fake_clock(), single_rank=False)
    take_step(timer)
    take_step(timer)
    (step,) = timer.last()
    assert step[1:3] == pytest.approx((0.020, 0.008))


def test_events_are_recorded_on_the_stream_of_the_gpu_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program may compute on another GPU than the current one."""
    streams: list[object] = []
    monkeypatch.setattr(FakeEvent, "record", lambda _, stream: streams.append(stream))
    GpuClock(torch.device("cuda", 1), FakeEvent, str).mark()
    assert streams == ["cuda:1"]


@pytest.mark.parametrize("note", [StepTimer.note_sent, StepTimer.note_enqueued])
@pytest.mark.parametrize(("ready", "behind"), [(30, 0.0), (130, 1.0)])
def test_a_gpu_is_behind_its_host_that_has_not_come_to_the_last_gradient(
    ready: int, behind: float, note: Callable[[StepTimer], None]
) -> None:
    """When the sum starts, the GPU has passed events up to 100; when times are read, all."""
    FakeEvent.computed = deque([10, ready, 140, 141])
    timer = StepTimer(make_fake_clock(), single_rank=False)
    timer.begin(SIZES)
    timer.note_gradients()
    note(timer)
    timer.note_backward()
    timer.finish()
    FakeEvent.past = 200
    try:
        (step,) = timer.last()
    finally:
        FakeEvent.past = 100
    assert step.behind == behind
    assert math.isnan(step.computing), "that is a CPU's"


def test_a_gpu_that_ends_a_sharded_pass_soon_after_its_host_is_not_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes the pass's last kernels when the host looks for the first time."""
    FakeEvent.computed = deque([10, 30, 40, 41])
    timer = StepTimer(make_fake_clock(), single_rank=False)
    timer.begin(SIZES)
    timer.note_gradients()
    answers = iter([False, False, True])
    monkeypatch.setattr(own_work, "ENDS_SECONDS", 60.0)
    monkeypatch.setattr(FakeEvent, "query", lambda _: next(answers))
    timer.note_enqueued()
    monkeypatch.undo()
    timer.note_backward()
    timer.finish()
    (step,) = timer.last()
    assert step.behind == 0.0


@pytest.mark.parametrize(("behind", "is_timed_less"), [(0.0, True), (1.0, False)])
def test_few_waits_are_recorded_where_the_host_limits_a_sharded_model(
    monkeypatch: pytest.MonkeyPatch, behind: float, is_timed_less: bool
) -> None:
    FakeEvent.computed = deque(range(10_000))
    timer = StepTimer(make_fake_clock(), single_rank=False)
    timer.time_all()
    rebalancing = Rebalancing.__new__(Rebalancing)
    weights = SimpleNamespace(are_averaged=True)
    rebalancing._training = SimpleNamespace(timer=timer, weights=weights)
    rebalancing._planned = SimpleNamespace(world=1)
    rebalancing._windows, rebalancing._window_steps = {5: (0.2, 0)}, 5
    monkeypatch.setattr(rebalancing, "_decide_shares", lambda *_: True)
    times = RankTimes(0.2, 0.0, 0.25, behind)
    sent = torch.tensor([0.2, 0.0, *times, 0.0, 0.0, 0.0], dtype=torch.float64).nan_to_num(-1.0)
    rebalancing._end_exchange(SimpleNamespace(wait=lambda: None), sent)
    before = len(FakeEvent.computed)
    for _ in range(16):
        timer.begin(SIZES)
        for _ in range(20):
            if timer.begin_wait():
                timer.end_wait()
        timer.note_gradients()
        timer.note_backward()
        timer.finish()
    recorded = before - len(FakeEvent.computed)
    assert (recorded < 16 * 40 / 4) is is_timed_less


def test_the_part_of_own_work_in_which_a_cpu_computes_is_seen() -> None:
    """A thread that sleeps, or whose core others use, takes longer than its CPU time."""
    timer, clock = run("b3g1euf" * STRIDES[0])
    timer.begin(SIZES)
    clock.now += 4
    clock.slept += 3
    timer.note_gradients()
    timer.note_sent()
    timer.note_backward()
    timer.finish()
    known = [step.computing for step in timer.last() if not math.isnan(step.computing)]
    assert known == [1.0, 0.25], "of the first step, and of the next that is measured"
    assert all(math.isnan(step.behind) for step in timer.last()), "that is a GPU's"
    real = StepTimer(HostClock(), single_rank=False)
    real.begin(SIZES)
    time.sleep(0.1)
    real.note_gradients()
    real.finish()
    assert real.last()[0].computing < 0.5


def test_waiting_for_others_to_fetch_rows_is_not_counted_as_fetching_them() -> None:
    timer = StepTimer(HostClock(), single_rank=False)
    for _ in range(STRIDES[0]):
        take_step(timer)
    time.sleep(0.05)
    for _ in range(STRIDES[1]):
        take_step(timer)
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    take_step(timer)
    waited, fetched = [each for each in timer.last() if not math.isnan(each.idle_input_s)]
    assert waited.idle_input_s >= 0.04
    assert fetched.input_s >= 0.05
    assert fetched.idle_input_s <= fetched.input_s - 0.04


def test_a_disturbed_step_says_so_and_the_next_one_does_not() -> None:
    timer, clock = run("b")
    timer.disturb()
    for _ in range(2):
        clock.now += 1
        timer.note_gradients()
        timer.note_backward()
        timer.finish()
        timer.begin(SIZES)
    assert [(step.number, step.disturbed) for step in timer.last()] == [(1, True), (2, False)]


@pytest.mark.parametrize("single_rank", [False, True])
def test_events_are_recorded_again_once_they_were_read(
    single_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of steps that were read don't change."""
    made: list[FakeEvent] = []

    def make(enable_timing: bool) -> FakeEvent:
        made.append(FakeEvent(enable_timing))
        return made[-1]

    FakeEvent.computed = deque(float(at) for at in range(200))
    monkeypatch.setattr(FakeEvent, "past", 200)
    timer = StepTimer(make_fake_clock(make), single_rank)
    for step in range(20):
        timer.begin(SIZES)
        if not single_rank:
            timer.note_gradients()
            timer.note_backward()
        timer.note_update()
        timer.note_updated()
        timer.finish()
        if step == 10:
            timer.pause()
        assert {each.own_work_s for each in timer.last()} == {0.001}
    assert len(timer.last()) == 20
    whole = timer.sums.whole
    assert whole.update_s == pytest.approx(0.001 * (2 - single_rank) * whole.steps)
    assert len(made) <= 8, "those of one step, and of the next"


def test_on_a_gpu_few_of_many_short_steps_are_timed_and_stand_for_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There are three batches per update with a millisecond of compute time each, by events.

    One in 24 writes a checkpoint.
    """
    made: list[FakeEvent] = []

    def make(enable_timing: bool) -> FakeEvent:
        made.append(FakeEvent(enable_timing))
        return made[-1]

    recorded = count()

    def record(event: FakeEvent, stream: object) -> None:
        event.at = float(next(recorded))

    monkeypatch.setattr(FakeEvent, "past", math.inf)
    monkeypatch.setattr(FakeEvent, "record", record)
    timer = StepTimer(make_fake_clock(make), single_rank=True)
    batches, accumulated, files_s = 600, 3, 0.0
    for batch in range(batches):
        timer.begin(SIZES)
        if batch % accumulated == 2:
            timer.note_update()
            timer.note_updated()
        if batch % 24 == 23:
            began = time.perf_counter()
            (tmp_path / "checkpoint").write_bytes(b"x" * (1 << 20))
            time.sleep(0.005)
            files_s += time.perf_counter() - began
        timer.finish()
    whole = sums_of(timer)
    assert next(recorded) < 0.5 * 5 * batches
    assert whole.steps == pytest.approx(batches / accumulated, abs=15)
    assert whole.own_work_s == pytest.approx(1e-3 * batches, rel=0.2), "the event of each batch"
    assert whole.update_s == pytest.approx(1e-3 * batches / accumulated, rel=0.3)
    assert whole.files_s == pytest.approx(files_s, rel=0.3)
    every = StepTimer(make_fake_clock(make), single_rank=True)
    every.time_all()
    first = next(recorded)
    for _ in range(100):
        every.begin(SIZES)
        every.note_update()
        every.note_updated()
        every.finish()
    assert next(recorded) - first > 4 * 100


@pytest.mark.parametrize("alone", [False, True])
def test_files_and_validation_are_timed_in_batches_whose_parts_are_not(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch takes 7 s; of 64, one in 8 validates in three batches, and one writes a file."""
    host = SimpleNamespace(now=0.0)
    clock = SimpleNamespace(perf_counter=lambda: host.now, thread_time=lambda: host.now)
    monkeypatch.setattr(own_work, "time", clock)
    monkeypatch.setattr(HostClock, "mark", staticmethod(clock.perf_counter))
    written: list[int] = []
    monkeypatch.setattr(StepTimer, "_count_written", lambda _: written.pop() if written else 0)

    def train(is_timed: Callable[[int], bool]) -> tuple[StepSums, list[Any]]:
        timer = StepTimer(HostClock(), alone)
        choice: Any = SimpleNamespace(is_timed=is_timed, find_next=lambda number: number + 1)
        timer._choice = choice
        phases = []

        def take(seconds: float, *after: Callable[[], object]) -> None:
            host.now += seconds
            phases.append(timer.now()[1])
            for each in after:
                each()

        for batch in range(WARM_STEPS + 64):
            timer.begin(SIZES)
            if alone:
                take(3)
            else:
                take(2, timer.note_gradients)
                take(1, timer.note_backward)
            take(0, timer.note_update)
            take(1, timer.note_updated)
            written[:] = [1 << 20] * (batch % 8 == 1)
            if batch % 8 == 5:
                take(0, *[timer.note_validation] * 2)
                take(2, timer.note_validation)
            else:
                take(2)
            take(1, timer.finish)
        return sums_of(timer), phases

    every, every_phases = train(lambda _: True)
    few, few_phases = train(lambda number: number % 16 == 3)
    assert few_phases == every_phases
    assert (every.validation_s, every.files_s) == (8 * 3, 8 * 3), "its third batch takes a second"
    batches = 4 * 16  # up to the last one that was timed
    assert (few.steps, few.seconds) == (batches, pytest.approx(7 * batches, rel=0.12))
    assert few.validation_s == pytest.approx(every.validation_s, abs=2)
    assert few.files_s == pytest.approx(every.files_s, abs=3)


@given(st.integers(-1, 7), st.integers(1, 12))
def test_each_place_in_a_cycle_of_batches_is_timed_as_often(power: int, cycle: int) -> None:
    """The cycles have two batches per update, or twelve."""
    batch_s = 0.7 * ON_GPU.seconds / 2**power
    now = 0.0
    chosen = TimedBatches(ON_GPU, lambda: now)
    timed = []
    for number in range(1, 6000):
        now += batch_s
        if chosen.is_timed(number) and number > 100:
            timed.append(number)
    stride = chosen.stride
    assert stride == min(2 ** (power + 1), ON_GPU.most_stride)
    groups = [number // stride for number in timed]
    assert len(set(groups)) == len(groups), "one of each group"
    assert len(timed) == pytest.approx(5900 / stride, abs=3)
    places = Counter(number % cycle for number in timed)
    expected = len(timed) / cycle
    assert all(abs(places[each] - expected) <= 0.5 * expected + 3 for each in range(cycle))


def paired(first: Any, second: Any) -> Iterator[tuple[Training, Training, float]]:
    """Yield each run's live records of two ranks, and the seconds for which rank 1 was held up."""
    for weigh, (record, _) in first.items():
        other, held_up = second[weigh]
        yield msgspec.convert(record, Training), msgspec.convert(other, Training), held_up


@pytest.mark.slow
def test_live_files_tell_the_rank_whose_backward_pass_is_slow(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """DDP makes both backward passes equally long.

    The compute times differ by rank 1's sleep, for which rank 0 waits.
    """
    first, second = trainer_ranks("tests.support.torch_rebalance_programs.slow_backward", world=2)
    assert len(first) == 3
    for fast, slow, _ in paired(first, second):
        (quick,), (late,) = fast.devices, slow.devices
        assert late.own_work_s >= SLEEP_SECONDS
        assert quick.own_work_s < 0.5 * late.own_work_s
        assert quick.waiting_s > 0.5 * SLEEP_SECONDS > late.waiting_s
        assert quick.own_work_s + quick.waiting_s == pytest.approx(
            late.own_work_s + late.waiting_s, rel=0.4
        )
        assert (fast.rank, slow.rank, fast.world, slow.world) == (0, 1, 2, 2)
        assert fast.training == slow.training != ""
        assert (quick.batch, late.batch) == (6, 2)
        assert fast.step_s >= 0.9 * SLEEP_SECONDS


@pytest.mark.slow
def test_ranks_tell_where_they_pause(trainer_ranks: Callable[..., list[Any]]) -> None:
    """Each pause is in one time of the rank that pauses, and only in the other's waiting."""
    first, second = trainer_ranks("tests.support.torch_made_ranks.paused", world=2)
    for where, record in second.items():
        quick, late = msgspec.convert(first[where], Training), msgspec.convert(record, Training)
        figures = {
            "input": late.input_s,
            "own": late.devices[0].own_work_s,
            "between": late.between_s,
        }
        named = {"before": "between", "after": "between"}.get(where, where)
        least_s = 0.8 * PAUSE_SECONDS  # other programs also take time
        long = [name for name, seconds in figures.items() if seconds > least_s]
        assert long == [named], where
        assert late.devices[0].waiting_s < least_s, where
        assert quick.devices[0].waiting_s > 0.5 * PAUSE_SECONDS, where
        assert max(quick.input_s, quick.devices[0].own_work_s, quick.between_s) < least_s, where


@pytest.mark.slow
def test_a_rank_that_holds_others_up_is_distinguished_from_those_that_wait(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """The rank is slow in its compute time or between two steps, or it is stopped.

    Only the other rank reports then.
    """
    said = {
        "own work": "has been in own work for",
        "between steps": "has been between steps for",
        "stopped": "has been silent for",
    }
    first, _ = trainer_ranks("tests.support.torch_made_ranks.held", world=2)
    assert first.keys() == said.keys()
    for where, written in first.items():
        waits, holds = msgspec.json.decode(written, type=tuple[Training, Training])
        places = [
            place for each in (waits, holds) for place in place_ranks(each, {}, time.time() + 60)
        ]
        (cause,) = find_causes(places, judge_training([]), ())
        assert said[where] in cause.text
        assert cause.text.endswith("; the others wait for it.")
        assert cause.text.startswith(
            "Rank 1 " if places[0].row.device == places[1].row.device else places[1].row.device
        )


@pytest.mark.slow
def test_gpus_tell_by_how_much_a_backward_pass_was_held_up(
    gpu_ranks: Callable[..., list[Any]],
) -> None:
    """Measured by CUDA events: a kernel delays rank 1."""
    first, second = gpu_ranks("tests.support.torch_rebalance_programs.slow_backward")
    for fast, slow, held_up in paired(first, second):
        (quick,), (late,) = fast.devices, slow.devices
        assert late.own_work_s - quick.own_work_s == pytest.approx(held_up, rel=0.1)
        assert quick.waiting_s - late.waiting_s == pytest.approx(held_up, rel=0.1)


def test_a_timer_that_is_collected_while_an_optimizer_steps_disturbs_nothing() -> None:
    """PyTorch iterates over its hooks then, so none may be removed."""
    timers = [StepTimer(HostClock(), single_rank=True)]
    handle = register_optimizer_step_pre_hook(lambda *_: timers.clear())
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], 0.5).step()
    handle.remove()
    assert not timers
    assert weight.item() == 0.5


def sums(script: str, **options: Any) -> StepSums:
    """Return the sums of all steps of a script, after some steps that don't count."""
    return sums_of(run("b1g1eud1f1" * WARM_STEPS + script, **options)[0])


def sums_of(timer: StepTimer) -> StepSums:
    """Return the sums of all steps, once they are timed."""
    timer.last()
    return timer.sums.whole


def test_all_of_the_time_between_two_batches_is_in_the_sums() -> None:
    """The sums include the time between two loops, and of a batch whose gradients are kept."""
    step = sums("b3g2e4u5d1f6b3g2e4u5d1f6")
    assert (step.steps, step.input_s, step.own_work_s, step.meeting_s) == (2, 1 + 6, 6, 4)
    assert (step.update_s, step.between_s) == (8 + 10, 2), "clipping belongs to the update"
    assert sums("b3g2eud1fp9b3g2eud1f").between_s == 1 + 9 + 1
    kept = sums("b7f1b2g1eu1f")
    assert (kept.steps, kept.own_work_s, kept.input_s) == (1, 9, 2)


def test_a_validation_is_timed_apart_from_what_follows_it() -> None:
    """Validation batches start 2 s apart; the last one is expected to take as long."""
    step = sums("b3g2eud1v2v2v3f")
    assert (step.validation_s, step.between_s) == (6, 1 + 1)
    step = sums("b3g2eud1v2v2v1f")
    assert (step.validation_s, step.between_s) == (5, 1), "nothing else follows"
    apart = sums("b3g2eud1fp1v2v2v3b3g2eud1f")
    assert (apart.validation_s, apart.between_s) == (6, 1 + 1 + 1 + 1)
    assert sums("b3v2g2eud1f").validation_s == 0, "a teacher's pass is own work"


@pytest.mark.parametrize("part", [1, 3])
def test_idle_time_is_estimated_from_the_measured_steps(part: int) -> None:
    """Of two batches per update, the first never waits for rows. One of `part` batches is timed."""
    cycles = 40 * len(STRIDES)
    timer, clock = run("")
    choice: Any = SimpleNamespace(
        is_timed=lambda number: number * GOLDEN % RANGE <= RANGE // part,
        find_next=lambda number: number + 1,
    )
    timer._choice = choice
    for batch in range(cycles):
        clock.now += 1
        timer.begin(SIZES)
        clock.now += 2
        clock.slept += 2 * (batch % 2)
        timer.note_gradients()
        timer.note_backward()
        if batch % 2:
            timer.note_update()
            timer.note_updated()
        timer.finish()
    assert sums_of(timer).idle_own_s == pytest.approx(cycles, rel=0.1)


def test_ranks_that_meet_within_a_pass_have_an_optimizer() -> None:
    timer, clock = run("")
    timer.can_time_compute = False
    for _ in range(WARM_STEPS + 1):
        timer.begin(SIZES)
        clock.now += 5
        timer.note_update()
        clock.now += 2
        timer.note_updated()
        clock.now += 1
        timer.finish()
    whole = sums_of(timer)
    assert (whole.undivided_s, whole.own_work_s, whole.meeting_s) == (5, 0, 0)
    assert (whole.update_s, whole.between_s) == (2, 1)


def test_time_in_which_files_are_written_is_counted_apart(tmp_path: Path) -> None:
    """The first file counts, too."""
    timer = StepTimer(HostClock(), single_rank=False)
    for step in range(WARM_STEPS + 4):
        timer.begin(SIZES)
        timer.note_gradients()
        timer.note_backward()
        timer.note_update()
        timer.note_updated()
        if step == WARM_STEPS:
            (tmp_path / "checkpoint").write_bytes(b"x" * (1 << 20))
            time.sleep(0.05)
        if step > WARM_STEPS:
            time.sleep(0.002)
        timer.finish()
    whole = sums_of(timer)
    assert whole.files_s >= 0.05
    assert whole.between_s >= 3 * 0.002


def test_timing_a_step_costs_less_than_a_third_of_a_percent_of_10_ms() -> None:
    """CPU time is measured, the minimum of some rounds, because other programs run, too."""
    timer = StepTimer(HostClock(), single_rank=False)

    def round_s() -> float:
        began = time.thread_time()
        for _ in range(500):
            take_step(timer)
        return (time.thread_time() - began) / 500

    assert min(round_s() for _ in range(10)) <= 30e-6


class ByLoss(torch.optim.SGD):
    """A program's own optimizer, whose step takes the loss and the model."""

    def step(self, loss: Any, model: Any) -> Any:
        """Return the arguments."""
        super().step()
        return loss, model


def test_an_optimizer_s_own_arguments_are_left_alone() -> None:
    timer = StepTimer(HostClock(), single_rank=True)
    model = torch.nn.Linear(2, 1)
    model(torch.ones(2)).sum().backward()
    timer.begin((1,))
    assert ByLoss(model.parameters()).step(0.5, model) == (0.5, model)
    assert timer.has_trained


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("single_rank", [False, True])
def test_what_an_optimizer_s_closure_computes_is_own_work(single_rank: bool, by_name: bool) -> None:
    """Lightning's optimizers compute the gradients in a closure."""
    clock = TurnedClock()
    timer = StepTimer(clock, single_rank)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)

    def closure() -> float:
        clock.now += 3
        weight.grad = torch.ones(1)
        if not single_rank:
            timer.note_gradients()
            clock.now += 2
            timer.note_backward()
        return 7.0

    timer.begin(SIZES)
    result: Any = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    clock.now += 1
    timer.finish()
    (step,) = timer.last()
    assert result == 7.0
    assert step[1:3] == ((3, 0) if single_rank else (3, 2))
    assert step.between_s == 1
    assert weight.item() == pytest.approx(-0.1)


class LateGpu(TurnedClock):
    """A GPU that is some seconds behind its host."""

    late_s = 0.0

    def computed(self) -> float:
        return math.nan

    computed_by_all = computed

    def is_past(self, mark: float) -> bool:
        return mark <= self.now - self.late_s


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_a_process_alone_shows_whether_its_gpu_is_behind(late_s: float) -> None:
    """Two passes are accumulated. What follows the last one, such as clipping, is no own work."""
    clock = LateGpu()
    clock.late_s = late_s
    timer = StepTimer(clock, True)
    for _ in range(40):
        for is_last in (False, True):
            timer.finish()
            timer.begin(SIZES)
            clock.now += 3
            timer.note_pass_alone()
            clock.now += 2
            if is_last:
                timer.note_update()
                clock.now += 1
                timer.note_updated()
    clock.now += 9
    step = timer.last()[-2]
    assert (step.own_work_s, step.waiting_s) == (3, 0)
    sums = timer.sums.whole
    assert sums.mean("update_s") == pytest.approx(3, rel=0.05)
    assert sums.mean("own_work_s") == pytest.approx(2 * 3, rel=0.05)
    assert timer.behind_part() == float(late_s > 0)


@pytest.mark.parametrize("asks", [True, False])
def test_a_loops_first_batch_stands_for_no_other(asks: bool) -> None:
    """Every loop of 5 batches follows 3 s of other work, and 7 s in which its workers start.

    Its first batch is always timed, and one in four of all others.
    """
    timer, clock = run("", single_rank=True)
    choice: Any = SimpleNamespace(
        is_timed=lambda number: number % 4 == 0, find_next=lambda number: number + 1
    )
    timer._choice = choice
    for _ in range(80):
        clock.now += 3
        if asks:
            timer.start_loop()
        clock.now += 7
        for batch in range(5):
            if batch:
                timer.finish()
                clock.now += 1
            timer.begin(SIZES)
            clock.now += 2
            timer.note_update()
            timer.note_updated()
        timer.finish()
        timer.pause()
    timer.last()
    sums = timer.sums.whole
    first_s, between_s = (7, 3) if asks else (0, 10)
    assert sums.mean("input_s") == pytest.approx((4 * 1 + first_s) / 5, rel=0.03)
    assert sums.mean("between_s") == pytest.approx(between_s / 5, rel=0.03)
    assert sums.mean("own_work_s") == pytest.approx(2, rel=0.01)


@given(st.integers(0, 3000), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_the_next_timed_batch_is_the_first_that_is_chosen(number: int, stride: int) -> None:
    """Or the first of the next block, where the stride may change."""
    batches = TimedBatches(ON_GPU, first_stride=stride)
    following = number + 1
    while following % BLOCK_BATCHES and not batches._is_chosen(following):
        following += 1
    assert batches.find_next(number) == following
