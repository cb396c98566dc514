"""Runs the Rebalancing of several ranks in one process, with scripted times of own work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.plan.file import Share
from evener.torch.planned import PlannedTraining
from evener.torch.ranks.own_work import TimedStep
from evener.torch.ranks.ranks import RankShares
from evener.torch.rebalancing import Rebalancing
from evener.training.passes import PassLimit

OwnWork = Callable[[int, int, int], float]  # seconds of own work by step, rank and rows


class Post:
    """A process group of all ranks that sums once the last of them has sent its values."""

    def __init__(self, world: int) -> None:
        self._world, self._given = world, list[torch.Tensor]()

    def allreduce(self, figures: list[torch.Tensor]) -> Any:
        self._given += figures
        if len(self._given) == self._world:
            total = torch.stack(self._given).sum(0)
            for each in self._given:
                each.copy_(total)
            self._given = []
        return SimpleNamespace(wait=lambda: None)


class Timer:
    """The timed steps of a rank."""

    def __init__(self) -> None:
        self.steps: list[TimedStep] = []

    def last(self, count: int) -> list[TimedStep]:
        return self.steps[-count:]


def train(
    monkeypatch: pytest.MonkeyPatch,
    batches: Sequence[int],
    steps: int,
    own: OwnWork,
    retreats: dict[int, int],
    limit: Callable[[int, int], int | None] = lambda *_: None,
) -> list[tuple[int, ...]]:
    """Return the shares of each step; `retreats` says which rank runs out of memory in which step.

    `limit` returns how many rows of a pass fit in a rank's memory in a step.
    """
    post = Post(len(batches))
    monkeypatch.setattr(dist, "new_group", lambda **_: post)
    total, ranks = sum(batches), list[Any]()
    for rank, _ in enumerate(batches):
        shares = tuple(
            Share(f"sim:{i}", i, f"sim {i}", rows, rows / total) for i, rows in enumerate(batches)
        )
        found = RankShares(
            rank, tuple(batches), tuple(batches), (1,) * len(batches), shares, "a", "b"
        )
        training: Any = SimpleNamespace(
            ranks=found,
            rank=rank,
            world=len(batches),
            device=torch.device("cpu"),
            ahead=0,
            _samplers=(),
            timer=Timer(),
            reporter=SimpleNamespace(retreats=0, note_change=lambda _: None),
            listeners=[],
            begins_even=False,
            weights=SimpleNamespace(
                computes_at_once=False, lengths_vary=False, are_averaged=False, models=[]
            ),
            passes=SimpleNamespace(
                recovery=SimpleNamespace(limit=PassLimit(rank), uses_collectives=False)
            ),
        )
        training.change_shares = partial(PlannedTraining.change_shares, training)
        training.rebalancing = Rebalancing(training)
        ranks.append(training)
    seen = []
    for step in range(steps):
        sizes = ranks[0].ranks.batches
        assert all(each.ranks.batches == sizes for each in ranks)
        seen.append(sizes)
        works = [own(step, rank, sizes[rank]) for rank in range(len(ranks))]
        for rank, training in enumerate(ranks):
            training.passes.recovery.limit.most = limit(step, rank)
            training.reporter.retreats += retreats.get(step) == rank
            training.timer.steps.append(
                TimedStep(sizes, works[rank], max(works) - works[rank], 0.0, max(works), 0.0)
            )
            training.rebalancing.after_step(sizes)
    return seen
