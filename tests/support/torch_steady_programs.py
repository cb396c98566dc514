"""Real ranks that rebalance when there is no reason to; each function is one rank of a RankServer.

Own work is measured with a clock that the training sets, so results don't depend on the machine.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import TensorDataset

from evener.torch import Split
from tests.support.torch_program_parts import CLASSES, WIDTH, data
from tests.support.torch_rebalance_programs import TurnedClock

SHARES = (48, 32)
SHARE_SECONDS = 0.1  # that the rows of each share take
STEPS, BATCHES = 200, 50  # of a training, of an epoch


class SteadyCase(msgspec.Struct, frozen=True):
    """A training of 200 steps with some event."""

    slower: int = 0  # from this step on, rank 1 takes 40 % longer
    stall: int = 0  # in this step, rank 1 takes 2 s longer
    input_stall: int = 0  # before this step, rank 0 waits 10 s for its rows
    evaluation: int = 0  # after every so many steps: 3 s, on rank 0 a little more
    checkpoint: int = 0  # after every so many steps: 0.5 to 2.5 s on rank 0
    norms: int = 0  # after every so many steps: 0.1 s, on rank 1 twice as long


NOISE = 0.02  # relative standard deviation of a step's own work
CASES = {
    "slower by 40 %": SteadyCase(slower=100),
    "a stall, evaluations": SteadyCase(stall=133, evaluation=50),
    "an input stall, checkpoints of unequal length, logged norms": SteadyCase(
        input_stall=103, checkpoint=40, norms=10
    ),
}


def steady(folder: Path, rank: int) -> None:
    """Train every case, and save the changes of shares."""
    torch.set_num_threads(1)
    torch.save(
        {name: _Training(case, rank).run() for name, case in CASES.items()}, folder / f"{rank}.pt"
    )


class _LateRows(TensorDataset):
    """Rows that arrive late for one step; batches aren't fetched ahead."""

    clock: TurnedClock
    fetched = late = 0

    def __getitems__(self, rows: torch.Tensor) -> Any:
        self.fetched += 1
        self.clock.now += 10.0 * (self.fetched == self.late)
        return tuple(tensor[rows] for tensor in self.tensors)


class _Training:
    def __init__(self, case: SteadyCase, rank: int) -> None:
        self._case, self._rank = case, rank
        self._clock = TurnedClock()
        self._numbers = random.Random(rank)
        self._split = Split(ratios=SHARES, global_batch=sum(SHARES), rebalance=True)
        self._split.timer._clock = self._clock
        self._net: Any = self._split.wrap(torch.nn.Linear(WIDTH, CLASSES).double())
        self._optimizer = torch.optim.SGD(self._net.parameters(), 0.01)

    def run(self) -> list[tuple[int, tuple[int, ...]]]:
        """Train, and return the first step with each of the new shares."""
        rows = _LateRows(*data(BATCHES * sum(SHARES)).tensors)
        rows.clock, rows.late = self._clock, self._case.input_stall * (self._rank == 0)
        loader, held = self._split.loader(rows), self._split.loader(data(160), training=False)
        for epoch in range(STEPS // BATCHES):
            for number, batch in enumerate(loader):
                self._step(epoch * BATCHES + number + 1, held, *batch)
        assert rows.fetched == STEPS
        changes = [(each.step, each.after) for each in self._split.reporter.changes]
        self._split.reporter.close()
        return changes

    def _step(self, step: int, held: Any, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        case, clock, rank = self._case, self._clock, self._rank
        slower = 1.4 if rank and 0 < case.slower <= step else 1.0
        noise = math.exp(self._numbers.gauss(0.0, NOISE))
        clock.now += SHARE_SECONDS * len(inputs) / SHARES[rank] * slower * noise
        clock.now += 2.0 * (rank and step == case.stall)
        loss = torch.nn.functional.cross_entropy(self._net(inputs), labels)
        loss.backward()
        if _comes(case.norms, step):
            self._split.mean(loss)
            torch.nn.utils.clip_grad_norm_(self._net.parameters(), math.inf)
            clock.now += 0.1 * (1 + rank)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if _comes(case.evaluation, step):
            self._evaluate(held)
        if _comes(case.checkpoint, step):
            self._split.state_dict()
            clock.now += self._numbers.uniform(0.5, 2.5) * (rank == 0)

    def _evaluate(self, held: Any) -> None:
        self._net.eval()
        with torch.no_grad():
            for inputs, _ in held:
                self._net(inputs)
                self._clock.now += 1.5 + 0.1 * (self._rank == 0)
        self._net.train()


def _comes(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
