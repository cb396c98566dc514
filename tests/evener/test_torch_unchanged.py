"""The steps of a program that trains unchanged are found, whatever its loaders."""

from __future__ import annotations

import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import evener
from evener.plan.check import describe
from evener.program import unchanged
from evener.program.unchanged import UnchangedTraining
from evener.torch.ranks import own_work, ranks
from evener.torch.ranks.own_work import HostClock
from evener.torch.ranks.timed_batches import ON_GPU, TimedBatches

Steps = list[int]  # rows of each reported step


class Followed:
    """A training whose loop calls the hooks as evener.program.install has PyTorch call them."""

    def __init__(self) -> None:
        self.hooks = UnchangedTraining()
        self.optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)

    def loop(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a loader."""
        self.hooks.begin_loop(loader)
        iterator = iter(loader)
        self.hooks.note_loop(loader, iterator)
        del loader  # as in a loop over a loader that has no name
        while True:
            try:
                yield self.hooks.fetch(iterator.__next__, iterator, (), {})
            except StopIteration:
                return

    def backward(self) -> None:
        """Compute gradients."""
        self.hooks.run_backward(lambda: None, None, (), {})

    def train(self) -> None:
        """Compute gradients and update."""
        self.backward()
        self.optimizer.step()
        self.hooks.end_update(self.optimizer)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The rows of the steps that are reported."""
    rows: Steps = []

    class Reports:
        def __init__(self, *_: Any) -> None:
            self.reporter = self

        def report(self, count: int) -> None:
            rows.append(count)

        def discard(self) -> None:
            rows.clear()

    monkeypatch.setattr(unchanged, "StepReporter", Reports)
    monkeypatch.setattr(unchanged, "wrap_next_batch", lambda _: None)
    monkeypatch.setattr(unchanged, "is_reported_elsewhere", lambda _: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return rows


def make_loader(rows: int, size: int | None = 4) -> Any:
    return DataLoader(torch.ones(rows, 3), size)


def test_a_step_has_the_rows_of_its_batch(reported: Steps) -> None:
    followed = Followed()
    for _ in range(2):
        for _ in followed.loop(make_loader(10)):
            followed.train()
    # the timer begins with the second step, whose batch came before
    assert reported == [2, 4, 4, 2]


def test_rows_of_accumulated_batches_belong_to_one_step(reported: Steps) -> None:
    followed = Followed()
    for _ in range(2):
        for number, _ in enumerate(followed.loop(make_loader(16))):
            followed.train() if number % 2 else followed.backward()
    assert reported[-2:] == [8, 8]


@pytest.mark.parametrize("with_gradients", [True, False])
def test_validation_is_no_step(reported: Steps, with_gradients: bool) -> None:
    followed = Followed()
    held_back = make_loader(24)
    for _ in range(3):
        for _ in followed.loop(make_loader(12)):
            followed.train()
        with torch.set_grad_enabled(with_gradients):
            for _ in followed.loop(held_back):
                pass
    assert set(reported) == {4}
    timer: Any = followed.hooks._timer
    timer.last()
    assert timer.sums.whole.validation_s > 0


def test_a_loop_that_fetches_ahead_trains(reported: Steps) -> None:
    """It requests a batch before it trains with the last one, as accelerate does."""
    followed = Followed()
    for _ in range(2):
        batches = followed.loop(make_loader(20))
        ahead = next(batches)
        while ahead is not None:
            ahead = next(batches, None)
            followed.train()
    assert len(reported) >= 7
    timer: Any = followed.hooks._timer
    timer.last()
    assert timer.sums.whole.validation_s == 0


def test_a_step_of_two_loaders_has_the_rows_of_the_larger(reported: Steps) -> None:
    followed = Followed()
    pairs: Callable[[], Any] = lambda: zip(  # noqa: E731
        followed.loop(make_loader(12)), followed.loop(make_loader(24, 8)), strict=True
    )
    for _ in range(2):
        for _ in pairs():
            followed.train()
    assert reported[-2:] == [8, 8]


def test_updates_without_a_loader_are_steps_of_unknown_rows(reported: Steps) -> None:
    """Another optimizer's update belongs to the same step."""
    followed = Followed()
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    for _ in range(20):
        followed.train()
        other.step()
        followed.hooks.end_update(other)
    assert 8 <= len(reported) <= 12
    assert set(reported) == {0}


def test_what_reports_its_own_steps_is_left_alone(
    reported: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed()
    batches = followed.loop(make_loader(600))
    for _ in range(10):
        next(batches)
        followed.train()
    assert reported
    monkeypatch.setattr(unchanged, "is_reported_elsewhere", lambda _: True)
    for _ in batches:
        followed.train()
        if not reported:
            break
    assert not reported


@pytest.mark.parametrize(
    ("size", "batch", "rows"),
    [
        (4, torch.ones(3, 7), 3),
        (4, torch.ones(90, 7), 4),
        (None, [["a"], torch.ones(5)], 5),
        (None, UserDict(names=["a"] * 99, inputs=torch.ones(6, 2)), 6),
    ],
    ids=["a short last batch", "nodes of graphs", "a batch sampler's", "a tokenizer's"],
)
def test_rows_are_counted_by_the_loader(size: int | None, batch: Any, rows: int) -> None:
    assert unchanged._count_rows(batch, size) == rows


def test_a_batch_of_long_lists_is_not_read_whole() -> None:
    rows = [{"tokens": list(range(1000))} for _ in range(64)]
    calls = []
    sys.setprofile(lambda _, event, __: calls.append(event))
    counted = unchanged._count_rows(rows, 64)
    sys.setprofile(None)
    assert counted == 64
    assert len(calls) < 5000


class Equal(DataLoader[Any]):
    """A loader that can't be a key of a dictionary."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__: Any = None


def test_a_loader_that_is_not_hashable_is_followed(
    reported: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    followed, loader = Followed(), Equal(torch.ones(12, 3), 4)
    for _ in range(3):
        for _ in followed.loop(loader):
            followed.train()
    assert len(reported) == 7
    assert "fault" not in capsys.readouterr().err


class Listed(DataLoader[Any]):
    """A loader whose iterators allow no weak references."""

    def _get_iterator(self) -> Any:
        return iter([*super()._get_iterator()])


def test_a_loader_with_an_iterator_of_its_own_is_left_alone(
    reported: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks, loader = UnchangedTraining(), Listed(torch.ones(12, 3), 4)
    hooks.note_loop(loader, iter(loader))
    assert not capsys.readouterr().err
    assert not hooks._is_over


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_reports_none_of_its_parent_s_steps(
    reported: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed()
    monkeypatch.setattr(unchanged, "UNCHANGED", followed.hooks)

    def train() -> int:
        before = len(reported)
        for _ in followed.loop(make_loader(12)):
            followed.train()
        return len(reported) - before

    train()
    assert train() > 0
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 100 + train()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 100
    assert train() > 0


def test_an_error_in_an_optimizer_s_hook_ends_the_timing_and_not_the_program(
    reported: Steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    followed = Followed()
    for _ in followed.loop(make_loader(40)):
        followed.train()
    assert reported
    timer: Any = followed.hooks._timer
    monkeypatch.setattr(timer, "_note_timed_update", lambda: 1 / 0)
    monkeypatch.setattr(timer, "_timed", True)
    followed.train()
    followed.train()
    assert reported == []
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_a_fault_of_evener_ends_the_timing_and_not_the_program(
    reported: Steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    followed = Followed()
    taken = 0
    for _ in followed.loop(make_loader(40)):
        followed.train()
        taken += 1
        if taken == 5:
            monkeypatch.setattr(unchanged, "_count_rows", lambda *_: 1 / 0)
    assert taken == 10
    assert reported == []
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_steps_are_timed_on_the_device_of_the_parameters(
    reported: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may train on another GPU than the current one."""
    devices: list[torch.device] = []

    def make_clock(device: torch.device) -> HostClock:
        devices.append(device)
        return HostClock()

    monkeypatch.setattr(unchanged, "make_clock", make_clock)
    followed = Followed()
    elsewhere = torch.ones(1, requires_grad=True, device="meta")
    followed.optimizer = torch.optim.SGD([elsewhere], 0.1)
    for _ in followed.loop(make_loader(12)):
        followed.train()
    assert devices == [elsewhere.device]
    assert reported


def test_most_steps_call_few_of_evener_s_functions(
    reported: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes about a microsecond, once the step has displaced it from the CPU's cache."""
    monkeypatch.setattr(own_work, "_timers", ())  # without those of other tests
    followed = Followed()
    for _ in followed.loop(make_loader(40)):
        followed.train()
    timer: Any = followed.hooks._timer
    timer._choice = TimedBatches(ON_GPU, lambda: 0.0, first_stride=ON_GPU.most_stride)
    own_files = os.path.dirname(evener.__file__) + os.sep
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(own_files)

    steps = len(reported)
    batches = followed.loop(make_loader(4 * 256))
    next(batches)  # a loop's first batch is always timed
    sys.setprofile(count)
    for _ in batches:
        followed.train()
    sys.setprofile(None)
    assert calls / (len(reported) - steps) < 45


def test_without_a_plan_a_gpu_is_named_by_the_number_that_pytorch_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher shows each process its own GPU, so all are PyTorch's first, of the host's four."""
    monkeypatch.setattr(ranks, "visible_gpus", lambda: {"GPU-5f": 0})
    shares = ranks.describe_own_rows(torch.device("cuda", 0), 32, 1)
    assert shares.share.device == "GPU-5f"
    assert shares.share.label == describe(shares.share) == "cuda:0"
