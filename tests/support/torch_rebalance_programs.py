"""Programs for tests of own work and changing shares; each function is one rank of a RankServer."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch.utils.data import TensorDataset

from evener.live import reporter as live
from evener.live.reporter import read_trainings
from evener.torch import Split
from evener.torch.ranks.own_work import GpuClock, HostClock
from evener.torch.rows.sampler import UnevenBatchSampler
from evener.torch.step.batches import match_objects
from evener.training.rebalance import Change
from tests.support.fewer_audits import audit_first_step
from tests.support.scripted_shares import script
from tests.support.torch_program_parts import data, network

SLEEP_SECONDS = 0.1
CLOCK_HERTZ = 1.7e9  # similar to a GPU's

# for each backward pass of rank 1: the clock and its marks
_held_up: list[tuple[Any, Any, Any]] = []


def _hold_up(on_gpu: bool) -> None:
    clock: Any = GpuClock() if on_gpu else HostClock()
    start = clock.mark()
    torch.cuda._sleep(int(SLEEP_SECONDS * CLOCK_HERTZ)) if on_gpu else time.sleep(SLEEP_SECONDS)
    _held_up.append((clock, start, clock.mark()))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if int(os.environ["RANK"]) == 1:
            _hold_up(gradient.is_cuda)
        return gradient


class SlowBackward(torch.nn.Module):
    """The tests' network; on rank 1 its backward pass sleeps before the last gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = torch.nn.Linear(5, 5).double(), network()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.rest(_Sleep.apply(self.first(rows)))


def slow_backward(folder: Path, rank: int) -> None:
    """Train with each kind of weighting, and save the live records and how long rank 1
    was delayed.
    """
    torch.set_num_threads(1)
    live.INTERVAL_SECONDS, live.COST_LIMIT = 0.0, 1.0
    found = {
        "gradients": _live_record(Split(ratios=(3, 1), global_batch=8)),
        "loss": _live_record(Split(ratios=(3, 1), global_batch=8, weigh="loss")),
        "loss, and its mean before the backward pass": _live_record(
            Split(ratios=(3, 1), global_batch=8, weigh="loss"), by_mean=True
        ),
    }
    torch.save(found, folder / f"{rank}.pt")


def _live_record(split: Split, by_mean: bool = False) -> tuple[dict[str, Any], float]:
    """Return the live record of a training in which rank 1 sleeps in each step.

    It sleeps in its backward pass, or before ranks meet in `split.mean`.
    """
    _held_up.clear()
    model = split.wrap(network() if by_mean else SlowBackward())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in split.loader(data(64)):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        if by_mean:
            if split.rank == 1:
                _hold_up(inputs.is_cuda)
            split.mean(loss)
        (split.scale(loss) if split.weigh == "loss" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits until a GPU has computed the step
    (own,) = (each for each in read_trainings() if each.pid == os.getpid())
    split.reporter.close()
    held_up = [clock.seconds(start, end) for clock, start, end in _held_up]
    return msgspec.to_builtins(own), median(held_up or [0.0])


GLOBAL_BATCH = 16
SHARES = ((12, 4), (7, 9), (15, 1), (5, 11), (8, 8))


class TurnedClock:
    """A clock that tests set; marks up to `past` have been reached."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0.0  # part of `now`; the CPU was busy in the rest
        self.past = math.inf

    def mark(self) -> float:
        return self.now

    def computed(self) -> float:
        return self.now - self.slept

    computed_by_all = computed

    def is_past(self, mark: float) -> bool:
        return mark <= self.past

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def reuse(self, marks: Sequence[float]) -> None:
        pass


class RebalancedCase(msgspec.Struct, frozen=True):
    """A training with changing shares; in `slow` steps, rank 1 takes four times as long per row."""

    rows: int = 97  # the last batch has only one row
    steps: int = 120
    micros: tuple[int, ...] = ()  # rows of a pass on each rank: by parts
    accumulate: int = 1
    weigh: Any = "gradients"
    loaders: int = 1  # used in turn, with a backward pass each
    prefetch: int = 0
    resume: int = 0  # after this step, from a saved state
    slow: tuple[int, int] | None = None


CASES = {  # the real rule comes first, as scripted rules remain in force
    "by the rule": RebalancedCase(steps=330, slow=(130, 270)),
    "at once": RebalancedCase(),
    "fetched ahead, by the loss": RebalancedCase(rows=103, weigh="loss", prefetch=2),
    "in passes, accumulated": RebalancedCase(micros=(3, 4), accumulate=3),
    "two loaders, resumed in mid-epoch": RebalancedCase(rows=99, loaders=2, prefetch=1, resume=107),
}


class ScriptedRule:
    """Changes shares after each window."""

    windows_seen = windows_needed = 0

    def __init__(self, micros: tuple[int, ...]) -> None:
        self._micros = micros
        self._left = iter(SHARES[1:] * 100)

    def observe(
        self, step: int, own_work_s: Sequence[float], rows: Sequence[int], **_: Any
    ) -> Change:
        assert min(own_work_s) > 0
        shares = next(self._left)
        micros = tuple(map(min, shares, self._micros)) if self._micros else shares
        return Change(shares, micros, f"a script, at step {step}", 0.1)


def numbered(rows: int) -> TensorDataset:
    """Return the tests' data with the number of each row."""
    return TensorDataset(*data(rows).tensors, torch.arange(rows))


def rebalanced(folder: Path, rank: int) -> None:
    """Train every case, and save the weights, the rows of each epoch and the changes of shares."""
    torch.set_num_threads(1)
    audit_first_step()
    torch.save({name: _train(case, rank) for name, case in CASES.items()}, folder / f"{rank}.pt")


def reference(case: RebalancedCase) -> list[torch.Tensor]:
    """Return the weights of one process that doesn't use evener."""
    net, seen = network(), 0
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    samplers = [
        UnevenBatchSampler(case.rows, [GLOBAL_BATCH], 0, seed=seed) for seed in range(case.loaders)
    ]
    inputs, labels = data(case.rows).tensors
    for epoch in range(case.steps):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*samplers, strict=True):
            for rows in batches:
                (
                    torch.nn.functional.cross_entropy(net(inputs[rows]), labels[rows])
                    / case.accumulate
                ).backward()
            seen += 1
            _update(case, seen, net, optimizer)
            if seen == case.steps:
                return [each.detach() for each in net.parameters()]
    raise AssertionError


def _update(
    case: RebalancedCase, seen: int, net: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    if seen % case.accumulate == 0:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


class _Training:
    """One case on one rank."""

    def __init__(self, case: RebalancedCase, rank: int) -> None:
        self._case, self._rank = case, rank
        self.net: Any = network()
        self._optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self._seen = 0
        self._clock = TurnedClock()  # advances by the time that rows are said to take
        self.rows: list[list[int]] = []  # by epoch, of the first loader
        self.changes: list[tuple[tuple[int, ...], int]] = []

    def run(self) -> None:
        state: dict[str, Any] | None = None
        while self._seen < self._case.steps:
            state = self._run_until(
                self._case.resume if state is None and self._case.resume else self._case.steps,
                state,
            )

    def _run_until(self, last: int, state: dict[str, Any] | None) -> dict[str, Any]:
        case = self._case
        split = Split(ratios=SHARES[0], global_batch=GLOBAL_BATCH, weigh=case.weigh, rebalance=True)
        split.timer._clock = self._clock
        if case.slow is None:
            script(split.rebalancing, ScriptedRule(case.micros))
        if state is not None:
            split.load_state_dict(state)
        model = split.wrap(self.net.to(split.device))
        datasets = [numbered(case.rows) for _ in range(case.loaders)]
        loaders = [
            split.loader(each, seed=seed, prefetch=case.prefetch)
            for seed, each in enumerate(datasets)
        ]
        while True:
            if state is None or self._seen != case.resume:
                self.rows.append([])
            for batches in zip(*loaders, strict=True):
                self._step(split, model, batches)
                if self._seen == last:
                    self.changes += [(each.after, each.step) for each in split.reporter.changes]
                    return json.loads(json.dumps(split.state_dict()))

    def _step(self, split: Split, model: Any, batches: Sequence[Any]) -> None:
        case = self._case
        synced = (self._seen + 1) % case.accumulate == 0
        for number, (inputs, labels, rows) in enumerate(batches):
            if number == 0:
                found: Any = split.weights.find((inputs,), True, match_objects)
                self.rows[-1] += rows[: found.sizes[self._rank]].tolist()
            with nullcontext() if synced else split.no_sync(model):
                self._compute(split, model, inputs, labels)
        self._seen += 1
        _update(case, self._seen, self.net, self._optimizer)

    def _compute(
        self, split: Split, model: Any, inputs: torch.Tensor, labels: torch.Tensor
    ) -> None:
        case = self._case
        if case.micros:
            self._clock.now += 0.001
            for part in split.parts((inputs, labels)):
                part.backward(
                    torch.nn.functional.cross_entropy(model(part.batch[0]), part.batch[1])
                    / case.accumulate
                )
            return
        slow = case.slow is not None and self._rank and case.slow[0] <= self._seen < case.slow[1]
        self._clock.now += len(inputs) * (0.04 if slow else 0.01)
        inputs, labels = inputs.to(split.device), labels.to(split.device)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels) / case.accumulate
        (split.scale(loss) if case.weigh == "loss" else loss).backward()


def _train(case: RebalancedCase, rank: int) -> dict[str, Any]:
    training = _Training(case, rank)
    training.run()
    weights = [each.detach().cpu() for each in training.net.parameters()]
    return {"weights": weights, "rows": training.rows, "changes": training.changes}
