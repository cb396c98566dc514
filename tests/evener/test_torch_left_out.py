"""Batches that only some ranks skip; ranks take turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evener.torch import left_out  # noqa: E402
from evener.torch.left_out import LeftOutBatches  # noqa: E402

USUAL, ZERO = ("a mean",), ("a product", "a mean")
Loss = tuple[float, tuple[str, ...]]  # a loss: its value, and the operations that computed it


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that trains two ranks for 90 steps with `loss(rank, step)`.

    It returns the step in which both find a skipped batch, and what they find.
    """
    store = torch.distributed.HashStore()
    monkeypatch.setattr(left_out, "default_store", lambda: store)

    def train(loss: Callable[[int, int], Loss], shares: tuple[int, ...] = (3, 1)) -> Any:
        ranks = [LeftOutBatches("here", rank) for rank in range(2)]
        for step in range(1, 91):
            found = []
            for rank, own in enumerate(ranks):
                found.append(own.begin(step, shares))
                if shares[rank]:
                    value, made_of = loss(rank, step)
                    own.note(torch.tensor(value), made_of)
            assert found[0] == found[1]
            if found[0] is not None:
                return step, found[0]
        return None

    return train


@pytest.mark.parametrize(("step", "found_in"), [(1, None), (5, 8), (64, 74), (70, 74), (88, None)])
def test_a_batch_that_one_rank_leaves_out_is_found_soon(
    find: Callable[..., Any], step: int, found_in: int | None
) -> None:
    """A batch isn't found if it is the first one, or among the last."""
    found = find(lambda rank, now: (0.0, ZERO) if (rank, now) == (1, step) else (2.0, USUAL))
    assert found == (None if found_in is None else (found_in, (step, [1])))


def test_a_batch_that_all_ranks_leave_out_is_right(find: Callable[..., Any]) -> None:
    assert find(lambda _, now: (0.0, ZERO) if now == 5 else (2.0, USUAL)) is None


def test_ranks_without_rows_leave_nothing_out(find: Callable[..., Any]) -> None:
    assert find(lambda _, now: (0.0, ZERO) if now == 5 else (2.0, USUAL), (4, 0)) is None


def test_a_loss_may_be_0(find: Callable[..., Any]) -> None:
    """Examples are a hinge loss with all rows right, and a branch whose loss isn't always 0."""
    assert find(lambda rank, now: ((now + rank) % 3, USUAL)) is None
    kinds = (USUAL, ZERO)
    assert find(lambda rank, now: (1.0 if now < 9 else rank, kinds[(now + rank) % 2])) is None
