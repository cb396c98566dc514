"""Each private name of PyTorch that evener uses exists and does what is expected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from evener.torch import private
from tests.support.fake_cuda import make_cuda_library
from tests.support.python_path import python_path
from tests.support.uncompiled import add_three

COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    seen: list[int] = []
    ends: list[str] = []
    weight = torch.ones(2, requires_grad=True)

    def note(_: torch.Tensor) -> None:
        seen.append(private.backward_number())
        private.call_after_backward(lambda: ends.append("over"))

    product = weight * 2
    product.register_hook(note)
    weight.register_post_accumulate_grad_hook(lambda _: ends.append("gradient"))
    product.sum().backward()
    assert seen[0] >= 0
    assert private.backward_number() == -1
    assert ends == ["gradient", "over"]


def test_many_tensors_are_copied_and_added_in_one_call() -> None:
    into, given = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    private.copy_each(into, given)
    private.add_each(into, given)
    assert [each.tolist() for each in into] == [[2, 2], [4, 4, 4]]


SEGMENTS = """
import sys
import torch
ask = torch._C._accelerator_getAllocatorSettings
if "as 2.11" in sys.argv:
    del torch._C._accelerator_getAllocatorSettings
from evener.torch.private import grow_segments
grow_segments(0)
print(ask())
"""
SPLIT_SIZE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}


@pytest.mark.parametrize("version", ["this one", "as 2.11"])
@pytest.mark.parametrize(
    ("variables", "virtual_memory", "expected"),
    [({}, 1, "expandable_segments:True"), (SPLIT_SIZE, 1, "max_split_size_mb:512"), ({}, 0, "")],
)
def test_segments_grow_where_the_gpu_can_unless_the_allocator_has_settings(
    tmp_path: Path, variables: dict[str, str], virtual_memory: int, expected: str, version: str
) -> None:
    """On a virtual GPU that can't, each allocation would fail.

    PyTorch 2.11 can change the settings, but not print them.
    """
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this version can't change the allocator's settings")
    make_cuda_library(tmp_path, 0, virtual_memory)
    libraries = os.pathsep.join((str(tmp_path), os.environ.get("LD_LIBRARY_PATH", str(tmp_path))))
    variables = {**variables, "LD_LIBRARY_PATH": libraries}
    ran = subprocess.run(
        [sys.executable, "-c", SEGMENTS, version],
        env={**os.environ, "PYTHONPATH": python_path(), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == expected


def test_a_loaders_iterator_is_known_and_counts_its_batches() -> None:
    iterator = iter(torch.utils.data.DataLoader(range(6), 2))
    next(iterator)
    assert private.is_loader_iterator(iterator)
    assert private.count_yielded(iterator) == 1
    assert not private.is_loader_iterator(iter([]))
    assert private.count_yielded(iter([])) == 0


@COMPILES
def test_modules_and_hooks_are_found() -> None:
    model = nn.Linear(2, 2)
    assert all(
        issubclass(kind, private.BatchNorm)
        for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm)
    )
    assert private.unwrap_compiled(torch.compile(model)) is model
    assert private.unwrap_compiled(model) is model
    found, put_together = private.take_apart({"loss": 1, "hidden": (2, [3])})
    assert sorted(found) == [1, 2, 3]
    assert put_together(found) == {"loss": 1, "hidden": (2, [3])}
    own = model.weight.register_hook(print)
    late = model.weight.register_post_accumulate_grad_hook(print)
    assert set(private.gradient_hooks(model.weight)) == {own.id, late.id}
    assert private.gradient_hooks(model.bias) == []


@COMPILES
def test_a_function_and_what_it_calls_are_left_uncompiled() -> None:
    compiled: list[int] = []  # operations of each graph

    def count(graph: Any, _: Any) -> Any:
        compiled.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    def called(rows: torch.Tensor) -> torch.Tensor:
        return rows * 2 * 3 * 4

    @private.leave_uncompiled
    def look(rows: torch.Tensor) -> torch.Tensor:
        return called(rows) + called(rows)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return look(rows + 1) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(compute, backend="eager", fullgraph=True)(torch.ones(1))
    assert torch.compile(compute, backend=count)(torch.ones(1)) == 97
    assert torch.compile(called, backend=count)(torch.ones(1)) == 24
    assert compiled == [1, 1, 3]


@COMPILES
def test_functions_of_modules_are_left_uncompiled() -> None:
    """Those that they call aren't, and it makes no difference whether the compiler is imported."""
    private.leave_modules_uncompiled(["tests.support.uncompiled"])
    compiled: list[int] = []  # operations of each graph

    def count(graph: Any, _: Any) -> Any:
        compiled.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return add_three(rows + 1) * 2

    assert torch.compile(compute, backend=count)(torch.ones(1)) == 10
    assert compiled == [1, 1], "the three are added in between"


@pytest.mark.usefixtures("group")
def test_ddp_says_what_it_does() -> None:
    seen: list[bool] = []

    class Seen(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            seen.append(private.is_in_ddp_forward())
            made: torch.Tensor = super().forward(rows)
            return made

    inner = Seen(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["bias"])
    assert private.ignored_names(inner) == {"bias"}
    ddp = DistributedDataParallel(inner)
    ddp(torch.ones(1, 2))
    assert seen == [True]
    assert not private.is_in_ddp_forward()
    assert not private.joins_unevenly(ddp)
    assert not private.needs_own_sums(ddp)
    ddp.register_comm_hook(None, allreduce_hook)
    assert private.needs_own_sums(ddp)
    with ddp.join(enable=False):
        assert not private.joins_unevenly(ddp)


@pytest.mark.usefixtures("group")
def test_groups_are_asked() -> None:
    private.default_store().set("key", "value")
    assert private.default_store().get("key") == b"value"
    assert private.count_collectives() == {}, "one process alone exchanges nothing"
    tensors = [torch.ones(2), torch.zeros(3)]
    private.broadcast_each(tensors, None, 1 << 20)
    assert [each.tolist() for each in tensors] == [[1, 1], [0, 0, 0]]
    assert callable(private.abort_group)
    assert dist.destroy_process_group.__code__ in private.LEAVING
