"""A trainer that evener doesn't know: it owns the loop, and a subclass overrides three methods."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from evener.torch.planned import PlannedTraining
from evener.torch.ranks.ranks import find_shares
from tests.support.torch_program_parts import data, network, sgd, weights


class Trainer:
    def fit(self, model: Any, rows: Any) -> list[torch.Tensor]:
        model = self.prepare(model)
        optimizer = sgd(model)
        for step, batch in enumerate(self.load(rows)):
            self.backward(model, step, batch)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def prepare(self, model: Any) -> Any:
        return model

    def load(self, rows: Any) -> Iterable[Any]:
        return DataLoader(rows, batch_size=8)

    def backward(self, model: Any, step: int, batch: Any) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()


class Adapted(Trainer):
    def __init__(self) -> None:
        self.planned = PlannedTraining(find_shares(None, ratios=(3, 1), global_batch=8, options={}))
        self.prepare = self.planned.wrap  # type: ignore[method-assign]

    def load(self, rows: Any) -> Iterable[Any]:
        self.rows = self.planned.sampler(len(rows), shuffle=False)
        return DataLoader(rows, batch_sampler=self.rows)

    def backward(self, model: Any, step: int, batch: Any) -> None:
        self.planned.begin(self.rows.take(step))
        self.planned.step(batch, lambda part: cross_entropy(model(part.batch[0]), part.batch[1]))
        self.planned.report()


def train(folder: Path, rank: int) -> None:
    torch.save(Adapted().fit(network(), data(37)), folder / f"{rank}.pt")


def test_one_more_trainer_learns_by_its_shares_what_it_learns_alone(trainer_ranks: Any) -> None:
    for rank in trainer_ranks("tests.evener.test_torch_new_trainer.train", world=2):
        for mine, its in zip(rank, Trainer().fit(network(), data(37)), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
