"""Each row is used once per epoch, for any length, shares, seed and number of ranks.

Training resumes where it stopped.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import RequestError
from evener.torch.rows.loader import Loader, LoaderStates, StepListener, check_options, count_rows
from evener.torch.rows.sampler import RowOrder, UnevenBatchSampler

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6)
LENGTH = st.integers(1, 120)
SEED = st.integers(-(2**40), 2**40)


def ranks(length: int, shares: Sequence[int], **options: Any) -> list[UnevenBatchSampler]:
    return [UnevenBatchSampler(length, shares, rank, **options) for rank in range(len(shares))]


def rows_that_count(samplers: list[UnevenBatchSampler]) -> list[list[int]]:
    """Return the rows of each step over all ranks, without filler rows."""
    steps = []
    for step, batches in enumerate(zip(*samplers, strict=True)):
        sizes = samplers[0].sizes(step)
        assert [len(batch) for batch in batches] == [max(1, size) for size in sizes]
        steps.append(
            [row for batch, size in zip(batches, sizes, strict=True) for row in batch[:size]]
        )
    assert len(steps) == samplers[0].steps_left
    return steps


@given(LENGTH, SHARES, SEED, st.integers(0, 5), st.booleans())
def test_each_row_is_computed_once_an_epoch(
    length: int, shares: list[int], seed: int, epoch: int, shuffle: bool
) -> None:
    samplers = ranks(length, shares, seed=seed, shuffle=shuffle)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    steps = rows_that_count(samplers)
    assert sorted(row for step in steps for row in step) == list(range(length))
    assert all(len(step) == sum(shares) for step in steps[:-1])


@given(LENGTH, SHARES, SEED)
def test_the_global_batches_are_those_of_one_device(
    length: int, shares: list[int], seed: int
) -> None:
    """The rows of a step don't depend on the shares."""
    (alone,) = ranks(length, [sum(shares)], seed=seed)
    assert rows_that_count(ranks(length, shares, seed=seed)) == list(alone)


@given(LENGTH, SHARES, SEED)
def test_drop_last_drops_only_the_short_batch(length: int, shares: list[int], seed: int) -> None:
    total = sum(shares)
    if length < total:
        with pytest.raises(RequestError, match="drop_last"):
            ranks(length, shares, drop_last=True)
        return
    steps = rows_that_count(ranks(length, shares, seed=seed, drop_last=True))
    assert steps == rows_that_count(ranks(length, shares, seed=seed))[: length // total]


@given(LENGTH, SHARES, SHARES, SEED, st.integers(0, 130))
def test_a_state_goes_on_under_other_shares_with_the_rows_that_are_left(
    length: int, before: list[int], after: list[int], seed: int, taken: int
) -> None:
    first = ranks(length, before, seed=seed)
    steps = rows_that_count(first)
    taken = min(taken, len(steps))
    state = first[0].state_dict(taken)
    assert all(sampler.state_dict(taken) == state for sampler in first)
    then = ranks(length, after, seed=seed)
    for sampler in then:
        sampler.load_state_dict(state)
    seen = [row for step in steps[:taken] + rows_that_count(then) for row in step]
    assert sorted(seen) == list(range(length))


@given(st.integers(30, 120), SEED)
def test_epochs_and_seeds_have_orders_of_their_own(length: int, seed: int) -> None:
    (sampler,) = ranks(length, [7], seed=seed)
    (other,) = ranks(length, [7], seed=seed + 1)
    orders = [[row for batch in sampler for row in batch]]
    sampler.set_epoch(1)
    orders.append([row for batch in sampler for row in batch])
    orders.append([row for batch in other for row in batch])
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(
    ("length", "shares", "rank"),
    [
        (0, [1], 0),
        (-1, [1], 0),
        (5, [1, 0], 0),
        (5, [1, -2], 0),
        (5, [1.5], 0),
        (5, [True], 0),
        (5, [2, 2], 2),
        (5, [], 0),
    ],
)
def test_what_cannot_be_sampled_is_a_one_line_error(
    length: int, shares: list[Any], rank: int
) -> None:
    with pytest.raises(RequestError) as caught:
        UnevenBatchSampler(length, shares, rank)
    assert caught.value.remedy


def test_a_state_of_other_data_is_refused() -> None:
    (sampler,) = ranks(20, [4])
    state = sampler.state_dict(2)
    for key, value in (("length", 21), ("seed", 1), ("shuffle", False)):
        with pytest.raises(RequestError, match=key):
            sampler.load_state_dict({**state, key: value})
    with pytest.raises(RequestError, match="position"):
        sampler.load_state_dict({key: value for key, value in state.items() if key != "position"})


class Numbers(torch.utils.data.Dataset):
    """A data set of the numbers from 0."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> int:
        return row


class RecordingListener(StepListener):
    """Records the steps of a loader."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, ...]] = []
        self.ended: list[int] = []

    def loader(self, length: int, shares: Sequence[int], rank: int = 0, **options: Any) -> Loader:
        self.rank = rank
        sampler = UnevenBatchSampler(length, shares, rank)
        return Loader(Numbers(length), sampler, self, options)

    def begin(self, origin: Any, sizes: Sequence[int], batch: Any) -> None:
        self.begun.append(tuple(sizes))

    def done(self, sizes: Sequence[int], tokens: tuple[int, int]) -> None:
        assert tokens == (0, 0)
        self.ended.append(sizes[self.rank])


def test_a_loader_says_the_rows_of_each_step_as_it_begins_and_ends() -> None:
    heard = RecordingListener()
    loader = heard.loader(11, [3, 1], rank=1)
    for step, _ in enumerate(loader):
        assert len(heard.begun) == step + 1
        assert len(heard.ended) == step
    assert heard.begun == [(3, 1), (3, 1), (2, 1)]
    assert heard.ended == [1, 1, 1]
    assert len(loader) == 3


def test_a_rank_that_only_keeps_step_has_done_nothing() -> None:
    heard = RecordingListener()
    assert [len(batch) for batch in heard.loader(9, [3, 1], rank=1)] == [1, 1, 1]
    assert heard.ended == [1, 1, 0]


def test_every_iteration_is_a_new_epoch_unless_set_otherwise() -> None:
    loader = RecordingListener().loader(40, [8])
    first, second = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert first != second
    loader.set_epoch(0)
    assert torch.cat(list(loader)).tolist() == first
    assert torch.cat(list(loader)).tolist() == second


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
def test_a_loader_goes_on_in_mid_epoch(taken: int, workers: int) -> None:
    """Rows fetched ahead by worker processes aren't lost, and the next epoch is as usual."""
    whole = RecordingListener().loader(37, [8])
    expected = [batch.tolist() for _ in range(2) for batch in whole]
    loader = RecordingListener().loader(37, [8], num_workers=workers)
    seen: list[list[int]] = []
    for batch in loader:
        if len(seen) == taken:
            break
        seen.append(batch.tolist())
        state = loader.state_dict()
    state = state if taken else RecordingListener().loader(37, [8]).state_dict()
    again = RecordingListener().loader(37, [8], num_workers=workers)
    again.load_state_dict(state)
    seen += [batch.tolist() for _ in range(2 if taken < 5 else 1) for batch in again]
    assert seen == expected


@pytest.mark.parametrize("taken", [2, 5])
def test_a_loop_that_sets_every_epoch_goes_on_too(taken: int) -> None:
    """Setting the loaded epoch keeps what remains of it, even if nothing; later it starts again."""
    whole = RecordingListener().loader(37, [8])
    expected = [[batch.tolist() for batch in whole] for _ in range(2)]
    loader = RecordingListener().loader(37, [8])
    for step, _ in enumerate(loader, 1):
        if step == taken:
            break
    again = RecordingListener().loader(37, [8])
    again.load_state_dict(loader.state_dict())
    for epoch, left in ((0, expected[0][taken:]), (1, expected[1]), (1, expected[1])):
        again.set_epoch(epoch)
        assert [batch.tolist() for batch in again] == left


@pytest.mark.parametrize("taken", [0, 2, 5])
def test_a_split_goes_on_in_all_its_loaders_under_other_shares(taken: int) -> None:
    """Loaders may be made before or after the state is loaded; deleted ones don't count."""
    states = LoaderStates()
    states.add(RecordingListener().loader(40, [3, 5]))  # deleted at once
    first, second = (states.add(RecordingListener().loader(length, [3, 5])) for length in (40, 24))
    for _ in zip(range(taken), first, strict=False):
        pass
    state = states.state_dict()
    again = LoaderStates()
    earlier = again.add(RecordingListener().loader(40, [8]))
    again.load_state_dict(state)
    later = again.add(RecordingListener().loader(24, [8]))
    assert (earlier.state_dict(), later.state_dict()) == (first.state_dict(), second.state_dict())
    assert earlier.next_epoch == (1 if taken == 5 else 0)
    assert len([batch for epoch in range(earlier.next_epoch, 1) for batch in earlier]) == 5 - taken
    assert earlier.next_epoch == 1
    with pytest.raises(RequestError, match="has no 'loaders'"):
        again.load_state_dict(first.state_dict())


def test_an_iterator_takes_nothing_before_its_first_batch() -> None:
    """The same holds after a state was loaded; the length always is that of a whole epoch."""
    loader = RecordingListener().loader(45, [8])
    first = [batch.tolist() for batch in loader]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 24})
    unused = iter(loader)
    assert len(loader) == 6
    assert loader.state_dict()["position"] == 24
    assert [batch.tolist() for batch in loader] == first[3:]
    assert len(loader) == 6
    del unused


def test_other_libraries_find_a_dataloaders_attributes() -> None:
    """Setting the sampler's epoch, as Lightning does, sets the loader's."""
    loader = RecordingListener().loader(45, [6, 2], num_workers=0, pin_memory=False)
    expected = vars(torch.utils.data.DataLoader(Numbers(45)))
    missing = [name for name in expected if not name.startswith("_") and not hasattr(loader, name)]
    assert missing == []
    assert not isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, len(loader.batch_sampler), len(loader.dataset)) == (6, 6, 45)
    assert len(loader.sampler) == 5 * 6 + 4
    rows = list(loader.sampler)
    loader.sampler.set_epoch(0)
    assert torch.cat(list(loader)).tolist() == rows
    assert repr(loader) == "Loader(45 rows, shares=(6, 2), rank=0, device=cpu)"


def test_a_pickled_loader_gives_the_same_batches_and_reports_nothing() -> None:
    loader = RecordingListener().loader(11, [3, 1])
    again = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


@given(st.integers(1, 120), SHARES)
def test_a_tail_that_joins_leaves_no_rank_without_rows(length: int, shares: list[int]) -> None:
    """The exception is data with fewer rows than ranks; batches grow by fewer rows than ranks."""
    steps = [
        samplers.sizes(step)
        for samplers in ranks(length, shares, join_tail=True)[:1]
        for step in range(len(samplers))
    ]
    assert sum(map(sum, steps)) == length
    assert rows_that_count(ranks(length, shares, join_tail=True))
    if length >= len(shares):
        assert all(min(sizes) > 0 for sizes in steps)
    assert all(
        size - share < len(shares)
        for sizes in steps
        for size, share in zip(sizes, shares, strict=True)
    )


def drawn(order: Any, length: int = 20, seed: int = 0) -> RowOrder:
    return RowOrder(order, length, seed)


def test_an_order_is_the_same_for_every_rank_and_another_in_each_epoch() -> None:
    """The order doesn't depend on a rank's random state, which it doesn't change."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    for sampler in (
        torch.utils.data.RandomSampler(range(20)),
        torch.utils.data.RandomSampler(range(20), generator=torch.Generator()),
    ):
        first = drawn(sampler)
        torch.manual_seed(1)
        second = drawn(sampler)
        assert torch.equal(torch.rand(3), expected)
        assert torch.equal(first.draw(1), second.draw(1))
        assert not torch.equal(second.draw(0), second.draw(1))
        assert not torch.equal(second.draw(1), drawn(sampler, seed=1).draw(1))


@pytest.mark.parametrize(
    "order",
    [
        [],
        [20],
        [-1],
        [0.5],
        [[1, 2], [3, 4]],
        [True],
        ["a"],
        lambda _: None,
        torch.utils.data.BatchSampler([1, 2], 2, False),
    ],
)
def test_an_invalid_order_is_a_one_line_error(order: Any) -> None:
    with pytest.raises(RequestError, match="row numbers from 0 to 19") as caught:
        drawn(order)
    assert caught.value.remedy


def test_an_order_has_as_many_rows_in_every_epoch_and_is_that_of_its_state() -> None:
    with pytest.raises(RequestError, match="2 rows in epoch 1"):
        drawn(lambda epoch: range(1 + epoch)).draw(1)
    state = UnevenBatchSampler(20, [4], 0, order=drawn(range(20))).state_dict(2)
    UnevenBatchSampler(20, [4], 0, order=drawn(range(20))).load_state_dict(state)
    with pytest.raises(RequestError, match="order"):
        UnevenBatchSampler(20, [4], 0, order=drawn(list(range(19, -1, -1)))).load_state_dict(state)


class Stream(torch.utils.data.IterableDataset):
    """An iterable data set with a length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    "dataset", [Stream(), iter([1, 2]), object(), torch.utils.data.DataLoader([1, 2])]
)
def test_data_without_numbered_rows_are_refused(dataset: Any) -> None:
    with pytest.raises(RequestError, match=type(dataset).__name__) as caught:
        count_rows(dataset)
    assert caught.value.remedy


@pytest.mark.parametrize("option", [{"batch_size": 4}, {"sampler": [1]}, {"batch_sampler": [[1]]}])
def test_options_that_the_plan_decides_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(option))):
        check_options(option)


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (2, 0), (1, 1)])
def test_shares_that_change_in_a_loop_take_each_row_once(prefetch: int, workers: int) -> None:
    """Rows drawn ahead keep their shares, and the loaders report these."""
    length, before, after = 61, (5, 3), (2, 6)
    heard = [RecordingListener(), RecordingListener()]
    samplers = ranks(length, before, seed=4)
    loaders = [
        Loader(Numbers(length), sampler, listener, {"num_workers": workers}, prefetch=prefetch)
        for sampler, listener in zip(samplers, heard, strict=True)
    ]
    for each, sampler in zip(heard, samplers, strict=True):
        each.rank = sampler.rank
    whole = list(UnevenBatchSampler(length, [8], 0, seed=4))
    for step, batches in enumerate(zip(*loaders, strict=True)):
        sizes = heard[0].begun[step]
        assert heard[1].begun[step] == sizes
        assert [
            row for batch, size in zip(batches, sizes, strict=True) for row in batch.tolist()[:size]
        ] == whole[step]
        if step == 1:
            for loader, sampler in zip(loaders, samplers, strict=True):
                sampler.change_shares(after, loader.drawn_ahead)
    first = 2 + loaders[0].drawn_ahead
    assert heard[0].begun == [before] * first + [after] * (7 - first) + [(1, 4)]
