"""The batches that replace those of a program's sampler: they keep the state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.frameworks import skip_without

skip_without("torch")

from evener.program.loops import RESUMED, SharedBatches  # noqa: E402

BATCHES = [[0, 1], [2, 3], [4, 5]]


class Stateful:
    """An iteration over BATCHES that can be saved and resumed, as torchdata's are."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self.drawn == len(BATCHES):
            raise StopIteration
        self.drawn += 1
        return BATCHES[self.drawn - 1]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Sampler:
    """A batch sampler whose iterators have a state."""

    def __iter__(self) -> Stateful:
        return Stateful()

    def __len__(self) -> int:
        return len(BATCHES)


def test_a_state_that_is_saved_is_the_programs_own() -> None:
    batches: Any = iter(SharedBatches(Sampler(), ""))
    assert next(batches) == BATCHES[0]
    assert batches.state_dict() == {"drawn": 1}


def test_an_epoch_that_resumes_has_its_own_batches() -> None:
    shared = SharedBatches(Sampler(), "")
    shared.opens = True  # by a loop that would divide the rows
    batches: Any = iter(shared)
    batches.load_state_dict({"drawn": 1})
    assert list(batches) == BATCHES[1:]
    assert shared.fault == RESUMED


def test_a_sampler_without_a_state_gets_none() -> None:
    assert not hasattr(iter(SharedBatches(BATCHES, "")), "state_dict")
