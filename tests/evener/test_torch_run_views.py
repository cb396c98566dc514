"""The reason why a program's step can't use shares: exactly one is given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frameworks import skip_without

skip_without("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from evener.program import views  # noqa: E402
from evener.program.exchanges import make_call, sends_flag  # noqa: E402


def _optimizer(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("wrapped", "why"), [(False, views.NO_MODEL), (True, views.BEGUN_EARLY)])
def test_the_one_obstacle_is_named(wrapped: bool, why: str) -> None:
    model = nn.Linear(2, 1)
    found = views.find_obstacle(_optimizer(model), [model] * wrapped, views.BEGUN_EARLY)
    assert found == why


def test_a_step_of_another_model_says_nothing() -> None:
    """An example is a model that a program trains before, on one rank."""
    assert (
        views.find_obstacle(_optimizer(nn.Linear(2, 1)), [nn.Linear(2, 1)], views.NO_LOADER) == ""
    )


def test_sharded_parameters_are_named() -> None:
    class DTensor(torch.Tensor):
        pass

    weight = nn.Parameter(torch.zeros(2).as_subclass(DTensor))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["params"] = [weight]
    assert views.find_obstacle(optimizer, [], views.NO_LOADER) == views.TENSOR_PARALLEL


@pytest.mark.parametrize(
    ("sent", "is_flag"),
    [
        (torch.zeros(1), True),
        (torch.tensor(True), True),
        (torch.tensor(1), True),
        (torch.tensor(0.7), False),  # a mean loss
        (torch.tensor([0.0, 1.0]), False),
    ],
)
def test_a_single_zero_or_one_is_a_flag(sent: torch.Tensor, is_flag: bool) -> None:
    for collective, more in (
        (torch.distributed.broadcast, (0,)),
        (torch.distributed.all_reduce, ()),
    ):
        assert sends_flag(make_call(collective, (sent, *more), {}, "train.py:3")) is is_flag
