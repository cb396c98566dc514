"""Ranks find that their data sets differ, and no difference where rows are only drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset, TensorDataset, default_collate  # noqa: E402

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


def summarize(rows: Any, order: Any = None) -> Any:
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


def flip_sometimes(drawn: random.Random, row: Any) -> Any:
    return row.flip(0) if drawn.random() < 0.5 else row


def test_rows_that_each_rank_changes_only_sometimes_are_not_compared() -> None:
    """Some rows are the same when they are read again, although their transform is random."""
    for seed in range(0, 20, 2):
        every = []
        for rank in range(2):
            drawn = random.Random(seed + rank)
            every.append(summarize(Rows(range(LENGTH), partial(flip_sometimes, drawn))))
        assert same_data.find_difference(every) == ""


class KeptRows(Rows):
    """Rows that are changed at random when they are first read, and kept."""

    def __init__(self, first: Any) -> None:
        super().__init__(range(LENGTH), augment)
        self._kept: dict[int, Any] = {}
        for place in first:
            self[place]

    def __getitem__(self, place: int) -> Any:
        if place not in self._kept:
            self._kept[place] = super().__getitem__(place)
        return self._kept[place]


def test_random_rows_that_a_rank_has_kept_are_not_compared() -> None:
    """Each rank has drawn the rows of its first batch with random numbers of its own."""
    every = []
    for seed, first in ((0, range(20)), (1, range(20, 30))):
        random.seed(seed)
        every.append(summarize(KeptRows(first)))
    assert same_data.find_difference(every) == ""


def test_large_integers_are_equal_with_other_numbers_of_threads() -> None:
    images = torch.randint(0, 256, (3, 150_528), generator=torch.Generator().manual_seed(0))
    every = []
    threads = torch.get_num_threads()
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        every.append(summarize(TensorDataset(images)))
    torch.set_num_threads(threads)
    assert same_data.find_difference(every) == ""
    images[:, 70_000] += 1
    assert "other values" in same_data.find_difference([every[0], summarize(TensorDataset(images))])


def test_one_row_that_differs_is_no_difference_of_data_sets() -> None:
    """A transform that rarely draws a number of its own may have drawn it for this row."""
    numbers = list(range(LENGTH))
    numbers[0] = LENGTH - 1
    order = RowOrder(range(LENGTH), LENGTH, 0)
    every = [summarize(Rows(each), order) for each in (range(LENGTH), numbers)]
    assert every[0].rows["0"] != every[1].rows["0"]
    assert same_data.find_difference(every) == ""


class Opened(Dataset[Any]):
    """A data set that opens its file for the first row, as each worker process has to."""

    def __init__(self) -> None:
        self.file = ""
        self.rows = Rows(range(LENGTH))

    def __getitem__(self, place: int) -> Any:
        self.file = "opened"
        return self.rows[place]

    def __len__(self) -> int:
        return LENGTH


class Wrapped(Opened):
    """A data set around another one, which it has under a name of its own."""

    def __init__(self) -> None:
        self.inner = Opened()
        self.rows = self.inner
        self.outer = self  # a circle


def test_comparing_opens_no_file_of_the_data_set() -> None:
    rows = Wrapped()
    assert summarize(rows).rows
    assert rows.inner.file == ""
    assert "file" not in vars(rows)


class Fixed(Rows):
    """A data set whose attributes can't be set once it is made."""

    def __init__(self) -> None:
        super().__init__(range(LENGTH))
        vars(self)["dataset"] = Rows(range(LENGTH))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dataset":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_a_data_set_that_cannot_be_copied_is_not_compared() -> None:
    assert not summarize(Fixed()).rows


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
