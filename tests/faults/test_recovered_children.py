"""A child that ran out of memory in a step gives back what the step held, and goes on where it is
again what it was; else it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("PyTorch isn't installed", allow_module_level=True)

import torch

from evener.balancer.probes.protocol import ChildError
from evener.balancer.probes.worker import Worker
from evener.workloads.protocol import Place
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
SIZE = 64 << 20  # numbers of a tensor that a failing step keeps: 256 MiB


def make(where: str, kept: list[Any]) -> TorchWorkload:
    """A workload whose steps can be made to run out of memory: in the forward pass, also with a
    tensor that stays, or in the optimizer.
    """
    module = torch.nn.Linear(8, 8)

    class Fails(torch.optim.AdamW):
        """An optimizer that runs out of memory halfway."""

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if kept and where == "optimizer":
                raise torch.OutOfMemoryError("CUDA out of memory.")

    def loss(outputs: Any, _: Any) -> Any:
        if kept and where in ("forward", "leak"):
            taken = torch.ones(SIZE)
            if where == "leak":
                kept.append(taken)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs.square().mean()

    def sample(rows: int) -> Any:
        return torch.ones(rows, 8), torch.ones(rows, 8)

    place = Place(("cpu:0",))
    return TorchWorkload(
        place, lambda: Recipe(module, Fails(module.parameters()), loss, sample_batch=sample)
    )


def fail(worker: Worker, step: Callable[[], None]) -> ChildError:
    """The reply of a worker whose step fails."""
    try:
        step()
    except torch.OutOfMemoryError as error:
        return worker.recover(error, worker.describe_error(error))
    raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("where", "recovers"), [("forward", True), ("leak", False), ("optimizer", False)]
)
def test_a_child_goes_on_where_it_is_what_it_was(where: str, recovers: bool) -> None:
    kept: list[Any] = []
    workload, worker = make(where, kept), Worker()
    worker._workload = workload
    workload.prepare((4,))
    workload.step()
    kept.append(None)  # from now on it fails
    workload.prepare((4,))
    assert fail(worker, workload.step).recovered is recovers
    if recovers:
        kept.clear()
        workload.prepare((4,))
        workload.step()
        assert workload.loss_is_finite()
