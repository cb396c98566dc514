"""Prefetched batches are those of a DataLoader, in its order, however a pass ends."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from evener.errors import RequestError
from evener.torch.rows import fetch as torch_prefetch
from evener.torch.rows.fetch import Fetch, Prefetcher, whole_fetch
from evener.torch.rows.loader import Loader, StepListener
from evener.torch.rows.sampler import UnevenBatchSampler
from evener.torch.rows.structure import each_tensor

CPU = torch.device("cpu")
PAIRS = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


class Annotated(Dataset[Any]):
    """A data set that returns whole batches for a tensor of row indices."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        assert isinstance(rows, torch.Tensor)
        return {"x": rows * 10}


class Listed(Dataset[Any]):
    """A data set that returns rows for a list of indices, as in PyTorch."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, rows: list[int]) -> list[int]:
        assert isinstance(rows, list)
        return [row * 10 for row in rows]


def sampler() -> UnevenBatchSampler:
    return UnevenBatchSampler(20, [3, 2], 0, seed=4)


def equal(ours: Any, expected: Any) -> bool:
    return type(ours) is type(expected) and all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(
    "dataset",
    [PAIRS, Subset(PAIRS, list(range(19, -1, -1))), Subset(PAIRS, list(range(-10, 10)))],
    ids=["tensors", "subset", "from the end"],
)
def test_a_batch_at_once_is_what_row_by_row_gives(dataset: Any) -> None:
    expected = list(DataLoader(dataset, batch_sampler=sampler()))
    assert whole_fetch(dataset) is not None
    assert all(map(equal, Fetch(dataset, sampler(), {}, False), expected))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
def test_a_data_set_that_says_so_is_given_a_tensor(workers: int) -> None:
    """The data set returns whole batches, also in workers; `collate_fn` may change them."""
    rows = list(sampler().batches())
    options = {"num_workers": workers}
    for batch, expected in zip(Fetch(Annotated(), sampler(), options, False), rows, strict=True):
        assert torch.equal(batch["x"], expected * 10)
    changed = Fetch(Annotated(), sampler(), {**options, "collate_fn": list}, False)
    assert list(changed) == [["x"]] * 4


def test_other_data_sets_are_asked_as_dataloader_asks() -> None:
    batches = list(Fetch(Listed(), sampler(), {}, False))
    assert [batch.tolist() for batch in batches] == [
        [row * 10 for row in rows] for rows in sampler()
    ]
    kept = list(Fetch(PAIRS, sampler(), {"collate_fn": list}, False))
    assert [len(batch) for batch in kept] == [3] * 4
    assert all(isinstance(row, tuple) for batch in kept for row in batch)


class RecordingListener(StepListener):
    """Records the rows of each step of its loader."""

    def __init__(self, dataset: Any = PAIRS, prefetch: int = 2, **options: Any) -> None:
        self.begun: list[tuple[int, ...]] = []
        self.loader = Loader(dataset, sampler(), self, options, CPU, prefetch)

    def begin(self, origin: Any, sizes: Sequence[int], batch: Any) -> None:
        self.begun.append(tuple(sizes))


def fetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "evener-prefetch"]


def test_ahead_or_not_the_epochs_are_the_same() -> None:
    ahead, plain = RecordingListener(prefetch=3), RecordingListener(prefetch=0)
    for _ in range(3):
        assert all(map(equal, ahead.loader, plain.loader))
    assert ahead.begun == plain.begun
    assert fetchers() == []


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_state_counts_only_the_batches_handed_out(taken: int) -> None:
    """Prefetched batches aren't lost: a resumed loader starts with the next batch of the loop."""
    heard = RecordingListener()
    seen = []
    for batch in heard.loader:
        seen.append(batch)
        if len(seen) == taken:
            heard.loader.wait_until_full()
            break
    state = heard.loader.state_dict()
    assert state["position"] == 5 * taken
    assert fetchers() == []
    again = RecordingListener()
    again.loader.load_state_dict(state)
    assert all(map(equal, [*seen, *again.loader], RecordingListener(prefetch=0).loader))


def test_no_more_is_fetched_than_may_wait() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            yield number

    ahead = Prefetcher(source(), CPU, 2)
    for taken in range(4):
        ahead.wait_until_full()
        assert made == list(range(taken + 2))
        assert next(ahead) == taken
    ahead.close()
    ahead.close()
    assert list(ahead) == []
    assert fetchers() == []


def test_what_the_data_raise_comes_where_the_batch_would() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("row 7 is torn")

    ahead = Prefetcher(source(), CPU)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="row 7"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_loop_that_breaks_off_or_fails_leaves_no_thread() -> None:
    for _ in RecordingListener().loader:
        break
    with pytest.raises(KeyError):
        fail(RecordingListener().loader)
    walk = iter(RecordingListener().loader)
    next(walk)
    del walk
    assert fetchers() == []


def fail(loader: Loader) -> None:
    for _ in loader:
        raise KeyError


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, "2"])
def test_an_invalid_prefetch_is_a_one_line_error(prefetch: Any) -> None:
    with pytest.raises(RequestError, match="prefetch") as caught:
        RecordingListener(prefetch=prefetch)
    assert caught.value.remedy


class Point(NamedTuple):
    """A batch with named fields."""

    x: Any
    y: Any


def test_containers_keep_their_types() -> None:
    one = torch.ones(1)
    batch: dict[str, Any] = {
        "a": [one, "word"],
        "b": (one, None),
        "c": Point(one, 3),
        "d": collections.OrderedDict(e=one),
    }
    moved = each_tensor(lambda tensor: tensor + 1, batch)
    assert moved["a"] == [torch.tensor([2.0]), "word"]
    assert moved["b"] == (torch.tensor([2.0]), None)
    assert isinstance(moved["c"], Point)
    assert moved["c"] == (torch.tensor([2.0]), 3)
    assert type(moved["d"]) is collections.OrderedDict
    assert batch["a"][0] is one


class FakeEvent:
    """An event that is done when its stream has reached it."""

    def __init__(self, blocking: bool = False) -> None:
        self.number = -1

    def record(self, stream: FakeStream) -> None:
        self.number = stream.enqueued

    def synchronize(self) -> None:
        while self.number > MAIN.done:
            time.sleep(0.001)


class FakeStream:
    """A stream whose work finishes when the test says so."""

    def __init__(self, device: Any = None) -> None:
        self.enqueued = self.done = 0

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        pass


MAIN = FakeStream()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose work finishes when the test says so."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", Mock(return_value=nullcontext()))
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(return_value=MAIN))
    monkeypatch.setattr(torch_prefetch, "_pin", torch.clone)
    monkeypatch.setattr(torch.Tensor, "record_stream", Mock())


@pytest.mark.usefixtures("fake_gpu")
def test_a_batch_that_finds_no_room_is_sent_as_the_loop_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a step, prefetching would need the step's memory; between steps, some is free."""
    by: list[str] = []

    def send(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        by.append(threading.current_thread().name)
        if float(tensor) == 1 and by[-1] == "evener-prefetch":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", send)
    ahead = Prefetcher(iter(torch.arange(3.0)), torch.device("cuda", 0), 3)
    assert list(map(float, ahead)) == [0, 1, 2]
    # batch 2 may be sent ahead before the loop sends batch 1 again
    assert collections.Counter(by) == {"evener-prefetch": 3, threading.current_thread().name: 1}


@pytest.mark.usefixtures("fake_gpu")
def test_a_gpu_that_lags_holds_the_fetching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two batches ahead, a batch is sent once the GPU is done with the third one before it.

    This bounds the memory.
    """
    sent: list[float] = []

    def send(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        sent.append(float(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", send)
    ahead = Prefetcher(iter(torch.arange(9.0)), torch.device("cuda", 0), 2)
    for taken in range(9):
        MAIN.done = max(0, taken - 2)  # of the enqueued steps
        assert float(next(ahead)) == taken
        MAIN.enqueued = taken + 1
        time.sleep(0.02)
        assert len(sent) <= MAIN.done + 4
    assert sent == list(range(9))
    ahead.close()
