"""Which batch a loop computes: the one it names, or the one its tensors belong to."""

from __future__ import annotations

import pytest
import torch

from evener.errors import RequestError
from evener.torch.rows.loader import Epoch
from evener.torch.step.batches import BatchTracker, Match, match_objects
from evener.torch.step.recognition import match_addresses

FULL, TAIL = (6, 2), (2, 1)  # rows of two ranks in a full batch, and in the epoch's last one


def take_two(second: tuple[int, ...] = TAIL) -> tuple[BatchTracker, list[torch.Tensor]]:
    """Return a tracker whose loop took the second batch before computing the first, and tensors."""
    tracker, epoch = BatchTracker(), Epoch(tail=TAIL)
    batches = [torch.ones(6, 3), torch.ones(2, 3)]
    for sizes, batch in zip((FULL, second), batches, strict=True):
        tracker.take(epoch, sizes, (batch,))
    return tracker, batches


@pytest.mark.parametrize("match", [match_objects, match_addresses])
def test_a_batch_that_was_taken_early_keeps_its_own_weight(match: Match) -> None:
    tracker, batches = take_two()
    sizes = []
    for batch in batches:
        found = tracker.find({"rows": batch}, True, match)
        sizes.append(None if found is None else found.sizes)
    assert sizes == [FULL, TAIL]


def test_a_named_batch_is_known_by_the_loaders_own_tensors_and_not_by_their_memory() -> None:
    """A loop that calls backward itself may pass views; one that names its batch passes itself."""
    tracker, batches = take_two()
    views = [batch.view(-1) for batch in batches]
    found = tracker.find(views[0], True, match_addresses)
    assert found is not None
    assert found.sizes == FULL
    tracker, batches = take_two()
    with pytest.raises(RequestError, match="It isn't clear which of 2 fetched batches"):
        tracker.find(batches[0].view(-1), True, match_objects)


@pytest.mark.parametrize("match", [match_objects, match_addresses])
def test_other_tensors_are_of_the_newest_batch_where_it_makes_no_difference(match: Match) -> None:
    tracker, epoch = BatchTracker(), Epoch()
    for _ in range(2):
        tracker.take(epoch, FULL, (torch.ones(6, 3),))
    found = tracker.find(torch.zeros(6, 3), True, match)
    assert found is tracker.current
    assert found is not None
    assert (found.number, found.sizes) == (1, FULL)


def test_without_a_batch_there_is_none() -> None:
    assert BatchTracker().find(torch.ones(1), True, match_objects) is None
