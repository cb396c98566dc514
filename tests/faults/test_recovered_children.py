"""Children that ran out of memory in a step recover, or exit.

A child frees the memory of the failed step, and continues if its state is as before; otherwise it
exits. So do the children of a group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("PyTorch isn't installed", allow_module_level=True)

import torch

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.protocol import ChildError
from evener.balancer.probes.worker import Worker
from evener.balancer.request import Job, Request
from evener.balancer.search.search import Search
from evener.balancer.types import (
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
    layout_of,
)
from evener.devices.cpu import slices
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
SIZE = 64 << 20  # elements of a tensor that a failing step keeps: 256 MiB


def make(where: str, kept: list[Any]) -> TorchWorkload:
    """Return a workload whose steps can run out of memory.

    They fail in the forward pass, in the forward pass with a tensor that stays allocated, or in the
    optimizer.
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

    setup = WorkerSetup(("cpu:0",))
    return TorchWorkload(
        setup, lambda: Recipe(module, Fails(module.parameters()), loss, sample_batch=sample)
    )


def fail(worker: Worker, step: Callable[[], None]) -> ChildError:
    """Return the reply of a worker whose step fails."""
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
    kept.append(None)  # steps fail from now on
    workload.prepare((4,))
    failed = fail(worker, workload.step)
    assert failed.recovered is recovers
    assert failed.fits_no_rows is (where == "optimizer"), "only rows' own memory is less with fewer"
    if recovers:
        kept.clear()
        workload.prepare((4,))
        workload.step()
        assert workload.loss_is_finite()


def test_a_model_that_is_too_large_for_its_device_fits_with_no_rows() -> None:
    """It is known before any rows were computed."""

    def build() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert fail(Worker(), build).fits_no_rows


IN_A_GROUP = """
import torch
import torch.distributed as dist

class Adam(torch.optim.Adam):
    def step(self, closure=None):
        super().step(closure)
        if dist.get_rank() == 1 and WHERE == "optimizer" and Adam.rows > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")

def loss(outputs, targets):
    Adam.rows = len(outputs)
    if dist.get_rank() == 1 and WHERE == "forward" and len(outputs) > 6:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return outputs.square().mean()

def build():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return module, Adam(module.parameters()), loss, sample_batch

def sample_batch(rows):
    return torch.ones(rows, 8), torch.ones(rows, 8)
"""


def test_no_fewer_rows_are_tried_where_the_model_itself_is_too_large(
    tmp_path: Path, shared_servers: None
) -> None:
    """Another start, of 20 s for a large model, would fail again."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n\ndef build():\n    raise torch.OutOfMemoryError('CUDA out of memory.')\n"
    )
    prober = ChildProber(Job(Request(), slices(2), f"{script}:build", "torch"))
    probe = Probe(layout_of((4, 0)), Stage.SOLO, 0.1)
    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
    prober.close()
    assert isinstance(seen, OutOfMemory), seen
    assert seen.fits_no_rows
    search = Search(Problem(2, (1 << 30, 1 << 30), global_batch=8))
    search.tell(seen)
    assert {one.layout.active for one in search.ask()} == {(1,)}


@pytest.fixture
def group(tmp_path: Path, shared_servers: None) -> Iterator[Callable[..., Observation]]:
    """Measures a split whose second rank runs out of memory above 6 rows."""
    made: list[ChildProber] = []

    def measure(where: str, *shares: int) -> Observation:
        if not made:
            script = tmp_path / "train.py"
            script.write_text(IN_A_GROUP.replace("WHERE", repr(where)))
            made.append(ChildProber(Job(Request(), slices(2), f"{script}:build", "torch")))
        probe = Probe(layout_of(shares), Stage.SPLIT, 0.1)
        (seen,) = made[0].measure((probe,), lambda _: None, threading.Event())
        return seen

    yield measure
    made[0].close()


def test_a_group_goes_on_after_one_rank_ran_out_of_memory(
    group: Callable[..., Observation],
) -> None:
    """The group continues, even after its first step; no rank waits, and no child restarts."""
    for shares in ((4, 9), (4, 7)):
        seen = group("forward", *shares)
        assert isinstance(seen, OutOfMemory), seen
        assert seen.devices == (1,)
        assert seen.goes_on
        assert seen.elapsed_seconds < 300, "the rank ended the step in smaller passes"
        ran = group("forward", 4, 5)
        assert isinstance(ran, Timed), ran
        assert ran.start_seconds == 0


def test_a_group_ends_where_the_optimizer_ran_out_of_memory(
    group: Callable[..., Observation],
) -> None:
    seen = group("optimizer", 4, 9)
    assert isinstance(seen, OutOfMemory), seen
    assert not seen.goes_on
    ran = group("optimizer", 4, 5)
    assert isinstance(ran, Timed), ran
    assert ran.start_seconds > 0, "by new children"
