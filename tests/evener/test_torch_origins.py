"""Tracking exchanged values through tensors, parts of them, and numbers read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from evener.program.origins import Origins

PLACE = "all_reduce (train.py:3)"
WAYS: dict[str, Callable[[Tensor], Any]] = {
    "computed": lambda own: own * 2 + 1,
    "a part": lambda own: own[1:],
    "in place": lambda own: torch.zeros(3).add_(own),
    "in place, by a view": lambda own: _fill(torch.zeros(6), lambda all_: all_[:3].copy_(own)),
    "an item set": lambda own: _fill(torch.zeros(3), lambda each: each.__setitem__(0, own[0])),
    "divided in place": lambda own: torch.ones(3).__itruediv__(own),
    "an output": lambda own: _fill(torch.zeros(3), lambda each: torch.add(own, own, out=each)),
    "a list in place": lambda own: _fill(
        torch.ones(3), lambda each: torch._foreach_mul_([each], own[0])
    ),
    "stacked": lambda own: torch.stack([torch.ones(3), own]),
}


def _fill(made: Tensor, function: Callable[[Tensor], Any]) -> Tensor:
    function(made)
    return made


class NoRows:
    """A batch from which nothing was computed."""

    rows, has_asked_length = 4, False

    def depends_on_rows(self, _: Tensor) -> bool:
        return False


class Follower(TorchFunctionMode):
    """A mode that tracks every function."""

    def __init__(self, origins: Origins, rows: Any = None) -> None:
        super().__init__()
        self.origins = origins
        self.rows = rows or NoRows()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        given = keywords or {}
        result = function(*arguments, **given)
        self.origins.follow(function, arguments, given, result, self.rows)
        return result


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("exchanged", [True, False])
def test_what_is_made_of_exchanged_figures_is_known(name: str, exchanged: bool) -> None:
    origins, own = Origins(), torch.rand(3)
    origins.write(own if exchanged else torch.rand(3), PLACE)
    with Follower(origins):
        made = WAYS[name](own)
    assert origins.find([made]) == (PLACE if exchanged else "")


def test_what_was_computed_before_is_not_made_of_them() -> None:
    origins, own = Origins(), torch.rand(3)
    with Follower(origins):
        loss = own.detach().square().mean()
        origins.write(own, PLACE)
        later = own.detach().square().mean()
    assert (origins.find_source_collective(loss), origins.find_source_collective(later)) == (
        "",
        PLACE,
    )


def test_memory_that_is_used_again_is_not_taken_for_what_was_in_it() -> None:
    origins = Origins()
    for _ in range(3000):
        origins.write(torch.rand(3), PLACE)
        assert origins.find(torch.rand(3)) == ""


@pytest.mark.parametrize(
    "read",
    [Tensor.item, float, Tensor.tolist, Tensor.numpy, lambda own: [each.item() for each in own]],
)
@pytest.mark.parametrize("exchanged", [True, False])
def test_a_number_that_is_read_stays_plain_and_is_noted(read: Any, exchanged: bool) -> None:
    """A program may save the number, and some formats accept only plain ones."""
    origins, own = Origins(), torch.rand(1, dtype=torch.float64)
    origins.write(own if exchanged else torch.rand(3), PLACE)
    with Follower(origins):
        found = read(own * 2)
    assert origins.read == (PLACE if exchanged else "")
    assert type(found) in (float, list, numpy.ndarray)


def test_objects_with_numbers_are_read() -> None:
    origins = Origins()
    origins.write_objects([{"name": "a"}, None], PLACE)
    assert not origins.read
    origins.write_objects([{"loss": 0.5}, {"loss": 0.25}], PLACE)
    assert origins.read == PLACE
