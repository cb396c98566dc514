"""Ranks find that their data sets differ, and no difference where rows are only drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import default_collate  # noqa: E402

from evener.torch.audit import same_data  # noqa: E402
from evener.torch.rows.sampler import RowOrder, UnevenBatchSampler  # noqa: E402

LENGTH = 40
FEATURES = torch.randn(LENGTH, 7, generator=torch.Generator().manual_seed(0))


class Rows:
    """Rows of the numbers, changed by a function of a row, and labels."""

    def __init__(self, numbers: Any, change: Callable[[Any], Any] = lambda row: row) -> None:
        self._numbers, self._change = list(numbers), change

    def __getitem__(self, place: int) -> Any:
        number = self._numbers[place]
        return self._change(FEATURES[number]), number % 3

    def __len__(self) -> int:
        return len(self._numbers)


def summarize(rows: Rows, order: Any = None) -> Any:
    sampler = UnevenBatchSampler(len(rows), (3, 1), 0, order=order)
    return same_data.summarize(rows, default_collate, sampler)


def round_otherwise(row: Any) -> Any:
    return row * (1 + 1e-6)


def augment(row: Any) -> Any:
    return row + random.random()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Rows(range(LENGTH)), Rows(range(LENGTH))),
        (Rows(range(LENGTH)), Rows(range(LENGTH), round_otherwise)),
        (Rows(range(LENGTH), augment), Rows(range(LENGTH), augment)),
    ],
)
def test_equal_data_sets_have_no_difference(one: Rows, other: Rows) -> None:
    summaries = [summarize(one), summarize(other)]
    assert all(each.rows for each in summaries)
    assert same_data.find_difference(summaries) == ""


def add_random(drawn: random.Random, row: Any) -> Any:
    return row + drawn.random()


def test_rows_by_a_generator_of_each_rank_are_not_compared() -> None:
    every = []
    for rank in range(2):
        drawn = random.Random(rank)
        every.append(summarize(Rows(range(LENGTH), partial(add_random, drawn))))
    assert not every[0].rows
    assert same_data.find_difference(every) == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Rows(range(1, LENGTH)), "Rank 1 has 39 rows in an epoch, and rank 0 has 40"),
        (Rows([*range(1, LENGTH), 0]), "The data sets of the ranks differ: row "),
        (Rows(reversed(range(LENGTH))), "The data sets of the ranks differ: row "),
        (Rows(range(LENGTH), lambda row: row[:6]), "The data sets of the ranks differ: row "),
        (Rows(range(LENGTH), lambda row: row.flip(0)), "The data sets of the ranks differ: row "),
    ],
)
def test_other_data_sets_are_found(other: Rows, words: str) -> None:
    assert same_data.find_difference([summarize(Rows(range(LENGTH))), summarize(other)]).startswith(
        words
    )


def test_other_orders_of_the_same_rows_are_found() -> None:
    rows = Rows(range(LENGTH))
    orders = [RowOrder(order, LENGTH, 0) for order in (range(LENGTH), range(LENGTH)[::-1])]
    every = [summarize(rows, order) for order in orders]
    assert "another order" in same_data.find_difference(every)


def test_few_rows_are_read_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_data, "LONGEST_SECONDS", 0.0)
    (summary,) = summarize(Rows(range(LENGTH))).rows.values()
    assert len(summary) == 2
