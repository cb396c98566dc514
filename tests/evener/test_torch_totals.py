"""Sums over all ranks' rows, and what a program computes from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.program.origins import Origins

from .test_torch_origins import Follower

PLACE = "all_reduce (train.py:3)"


class Batch:
    """Four rows on each of two ranks; `own` was computed from them."""

    rows, has_asked_length = 4, False

    def __init__(self) -> None:
        self.own = torch.tensor(3.0)

    def depends_on_rows(self, tensor: Tensor) -> bool:
        return tensor is self.own


SAME: dict[str, Callable[[Tensor, Batch], Any]] = {
    "by the number of ranks": lambda total, _: 2 / total,
    "its inverse": lambda total, _: 1.0 / total.clamp(min=1),
    "divided by another": lambda total, _: total.sqrt() / (total + total),
    "in place": lambda total, _: total.clone().clamp_(min=5),
    "a view": lambda total, _: total.view(1)[0],
}
OTHER: dict[str, Callable[[Tensor, Batch], Any]] = {
    "by a multiple of the rows": lambda total, _: total / 8,
    "by another number": lambda total, _: total * 0.9,
    "by a value of own rows": lambda total, batch: total / batch.own,
    "read": lambda total, _: total.item(),
}


def follow(compute: Callable[[Tensor, Batch], Any], batch: Batch, gathered: bool = False) -> Any:
    """Return the origins, and what `compute` makes of a tensor with a sum over all rows."""
    origins, total = Origins(), torch.full((2,), 6.0) if gathered else torch.tensor(12.0)
    (origins.write_gathered if gathered else origins.write_totals)(total, PLACE)
    with Follower(origins, batch):
        made = compute(total, batch)
    return origins, made


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_with_any_shares_may_go_anywhere(name: str) -> None:
    origins, made = follow(SAME[name], Batch())
    assert (origins.find([made]), origins.read) == ("", "")
    assert origins.totals.find(made) == PLACE


@pytest.mark.parametrize("name", OTHER)
def test_what_may_depend_on_the_shares_counts_as_exchanged(name: str) -> None:
    origins, made = follow(OTHER[name], Batch())
    assert PLACE in (origins.find([made]), origins.read)


def test_the_number_of_ranks_is_doubtful_if_it_is_also_that_of_rows() -> None:
    batch = Batch()
    batch.rows = 2
    assert not follow(SAME["by the number of ranks"], batch)[0].seen
    batch.has_asked_length = True
    assert follow(SAME["by the number of ranks"], batch)[0].seen


def test_gradients_that_it_scales_are_the_programs_own() -> None:
    gradient = torch.ones(3)
    origins, _ = follow(lambda total, _: gradient.mul_(2 / total), Batch())
    assert (origins.find([gradient]), origins.totals.find(gradient)) == ("", "")


def test_only_the_sum_of_all_that_was_gathered_is_the_same() -> None:
    origins, made = follow(lambda total, _: total.view(-1).sum(), Batch(), gathered=True)
    assert (origins.find([made]), origins.totals.find(made)) == ("", PLACE)
    for other in (lambda total, _: total[0], lambda total, _: total.mean()):
        origins, made = follow(other, Batch(), gathered=True)
        assert origins.find([made]) == PLACE


@pytest.mark.parametrize("parts", [2, 1])
def test_a_list_of_all_ranks_sums_is_joined_before_it_is_added(parts: int) -> None:
    origins, every = Origins(), [torch.tensor([5.0]), torch.tensor([7.0])]
    origins.write_gathered(every, PLACE)
    with Follower(origins, Batch()):
        made = torch.cat(every[:parts]).sum()
    assert origins.find([made]) == ("" if parts == 2 else PLACE)
