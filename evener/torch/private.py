"""What evener uses of PyTorch that PyTorch doesn't promise: each name once, with what it is for.

Steps, sums and ranks ask this file; tests/evener/test_torch_private.py tries each name, and fails
first where a new version of PyTorch has changed one. The room of audits has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

# Called in each step: they are PyTorch's own functions, without one of ours around them.

# The number of the backward pass that this thread is in; -1 outside of one.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# Copy, or add, many tensors in one call.
copy_each: Callable[..., Any] = torch._foreach_copy_
add_each: Callable[..., Any] = torch._foreach_add_
# A context in which changes of tensors don't count as changes, as for buffers in DDP.
uncounted_changes: Callable[..., Any] = torch.autograd._unsafe_preserve_version_counter

BatchNorm = _BatchNorm  # of which all BatchNorms are, SyncBatchNorm too


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that this thread is in."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def unwrap_compiled(model: Any) -> Any:
    """The module that torch.compile has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def leave_uncompiled(function: Any) -> None:
    """Have torch.compile leave a function as it is."""
    vars(function)["_torchdynamo_disable"] = True


def forward_pre_hooks(model: Any) -> list[Any]:
    """The functions that are called before a module's forward pass."""
    return list(model._forward_pre_hooks.values())


def gradient_hooks(parameter: Any) -> list[int]:
    """The hooks on a parameter's gradient, by the ids of their handles."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [each for hooks in both if hooks for each in hooks]


# -- DistributedDataParallel


def is_in_ddp_forward() -> bool:
    """True in the forward pass of a DistributedDataParallel."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def needs_own_sums(ddp: Any) -> bool:
    """True if a DistributedDataParallel has a communication hook, or mixed precision of its own."""
    return bool(ddp._comm_hooks) or ddp.mixed_precision is not None


def joins_unevenly(ddp: Any) -> bool:
    """True within `join`, where ranks have different numbers of batches."""
    return bool(ddp._join_config.enable)


def ignored_names(module: Any) -> set[str]:
    """The names of parameters and buffers that DistributedDataParallel is told to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# -- process groups


def default_store() -> Any:
    """The store by which the ranks of the default process group have met."""
    return dist.distributed_c10d._get_default_store()


def abort_group() -> None:
    """End the default process group without waiting for the other ranks."""
    dist.distributed_c10d._abort_process_group()


# The code of the functions that leave a group, by which a thread sees that another is in one.
LEAVING = {
    dist.destroy_process_group.__code__,
    dist.distributed_c10d._abort_process_group.__code__,
}


def count_collectives() -> dict[str, int]:
    """The collectives that this process has begun among several ranks, by process group and
    device.
    """
    groups = [group for group in list(dist.distributed_c10d._world.pg_map) if group.size() > 1]
    every = {
        group._get_backend(device): (group, device)
        for group in groups
        for device in group._device_types
    }
    counts = {}
    for backend, (group, device) in every.items():
        with suppress(RuntimeError):  # of one that doesn't count
            counts[f"{group.group_name} {device}"] = backend._get_sequence_number_for_group()
    return counts


def broadcast_each(tensors: Sequence[torch.Tensor], group: Any, most_bytes: int) -> None:
    """Copy the first rank's values of tensors on one device to every rank, in few collectives."""
    chosen = dist.group.WORLD if group is None else group
    dist._broadcast_coalesced(chosen, list(tensors), most_bytes, 0)
