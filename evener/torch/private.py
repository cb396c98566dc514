"""All undocumented parts of PyTorch that evener uses."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter
from wrapt import register_post_import_hook, wrap_function_wrapper

# Called in each step, so these are PyTorch's functions themselves, without a wrapper.

# The number of the backward pass that runs in this thread; -1 outside of one.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# Copy, or add, many tensors in one call.
copy_each: Callable[..., Any] = torch._foreach_copy_
add_each: Callable[..., Any] = torch._foreach_add_

# A context in which a tensor subclass computes as a plain tensor.
plain_tensors: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
# The mode that intercepts calls of PyTorch's functions in this thread, or None.
function_mode: Callable[[], Any] = _get_current_function_mode

# A context in which functions of tensors are hidden from modes that record them.
without_functions: Callable[[], Any] = torch._C.DisableTorchFunction

# The module through which recurrent layers call PyTorch's functions.
recurrent_functions: Any = torch._VF

BatchNorm = _BatchNorm  # the base class of all BatchNorms, also of SyncBatchNorm


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward pass that this thread is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def unwrap_compiled(model: Any) -> Any:
    """Return the model inside a module that torch.compile returned, or `model` itself."""
    return getattr(model, "_orig_mod", model)


# Excludes a function from torch.compile, with all functions that it calls. Otherwise a compiled
# model that calls it would compile those, which takes longer than the model.
leave_uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._disable_dynamo


def leave_modules_uncompiled(names: Iterable[str]) -> None:
    """Make torch.compile leave out the modules with these names."""

    def skip(rules: Any) -> None:
        for name in names:
            rules.add(name)

    register_post_import_hook(skip, "torch._dynamo.trace_rules")


def take_apart(outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested outputs, and a function that rebuilds outputs from new leaves."""
    leaves, spec = pytree.tree_flatten(outputs)
    return leaves, lambda items: pytree.tree_unflatten(items, spec)


def gradient_hooks(parameter: Any) -> list[int]:
    """Return the ids of the hooks that run when the gradient of a parameter is computed."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [hook for hooks in both if hooks for hook in hooks]


# cuda.h: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_VIRTUAL_MEMORY = 102
# environment variables with the CUDA allocator's settings; the last two are older
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# functions that change the CUDA allocator's settings; the second one is older
_SET_ALLOCATOR = (
    "_accelerator_setAllocatorSettings",
    "_cuda_cudaCachingAllocator_set_allocator_settings",
)


def grow_segments(gpu: int) -> None:
    """Let the CUDA allocator grow its memory segments, which avoids fragmentation.

    `gpu` is the index of the GPU. Nothing changes if the allocator already has settings, or if the
    GPU can't map memory in pieces, as some virtual GPUs can't.
    """
    if _allocator_settings() or not _has_virtual_memory(gpu):
        return
    for name in _SET_ALLOCATOR:
        change = getattr(torch._C, name, None)
        if change is not None:
            with suppress(RuntimeError, ValueError):
                change("expandable_segments:True")
            return


def _allocator_settings() -> str:
    """Return the CUDA allocator's settings.

    PyTorch 2.11 has no function that returns them, so they are then read from the environment.
    """
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask())
    return next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def _has_virtual_memory(gpu: int) -> bool:
    """Return whether a GPU supports CUDA's virtual memory management."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int(0)
    library.cuInit(0)
    status: int = library.cuDeviceGetAttribute(ctypes.byref(found), _VIRTUAL_MEMORY, gpu)
    return status == 0 and bool(found.value)


# -- a module's own dicts, in which tensors can be replaced without registering them again


def own_parameters(module: Any) -> dict[str, Any]:
    """Return the dict in which a module stores its parameters, without those of submodules."""
    found: dict[str, Any] = module._parameters
    return found


def own_buffers(module: Any) -> dict[str, Any]:
    """Return the dict in which a module stores its buffers, without those of submodules."""
    found: dict[str, Any] = module._buffers
    return found


def unsaved_buffers(module: Any) -> set[str]:
    """Return the names of a module's own buffers that aren't in its state dict."""
    return set(module._non_persistent_buffers_set)


# -- names of functions that are replaced while a model is in shards

TOTAL_NORM = "_get_total_norm"  # computes clip_grad_norm_'s norm, in torch.nn.utils.clip_grad
UNSCALE = "_unscale_grads_"  # method of GradScaler that divides gradients and reports overflows

# -- tensors


def is_view(tensor: Any) -> bool:
    """Return whether a tensor is a view of another tensor."""
    return tensor._base is not None


# -- DistributedDataParallel


def is_loader_iterator(iterator: Any) -> bool:
    """Return whether an object is an iterator of a DataLoader."""
    return isinstance(iterator, _BaseDataLoaderIter)


def wrap_next_batch(wrapper: Callable[..., Any]) -> None:
    """Wrap the `__next__` method of DataLoader's iterators with a wrapper of the wrapt package."""
    wrap_function_wrapper(_BaseDataLoaderIter, "__next__", wrapper)


def count_yielded(iterator: Any) -> int:
    """Return how many batches a DataLoader's iterator has yielded, or 0 if unknown."""
    return getattr(iterator, "_num_yielded", 0)


def is_in_ddp_forward() -> bool:
    """Return whether a forward pass of a DistributedDataParallel is running."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def needs_own_sums(ddp: Any) -> bool:
    """Return whether a DistributedDataParallel must keep its own all-reduce.

    This is the case if it has a communication hook or mixed precision.
    """
    return bool(ddp._comm_hooks) or ddp.mixed_precision is not None


def joins_unevenly(ddp: Any) -> bool:
    """Return whether a DistributedDataParallel is inside its `join` context."""
    return bool(ddp._join_config.enable)


def ignored_names(module: Any) -> set[str]:
    """Return the names of the parameters and buffers that DistributedDataParallel ignores."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# -- FSDP


def free_gathered(models: Iterable[Any]) -> None:
    """Free the parameters that FSDP has gathered for these models."""
    # FSDP1 and FSDP2 keep them until a backward pass ends, and would otherwise use them even after
    # an optimizer's step has changed the weights
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for part in (module for model in models for module in model.modules()):
        names = {kind.__name__ for kind in type(part).__mro__}
        if "FSDPModule" in names:
            part.reshard()
        elif "FullyShardedDataParallel" in names:
            handle = part._handle
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                handle.reshard(True)


def ignores_parameters(model: Any) -> bool:
    """Return whether FSDP1 leaves any parameter of the model unsharded."""
    return any(bool(getattr(part, "_ignored_params", ())) for part in model.modules())


# -- process groups


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def backend_name(group: Any, device: torch.device) -> str:
    """Return the name of a process group's backend for a device, such as "nccl"."""
    return str(group._get_backend(device).name())


def rendezvous_handlers() -> dict[str, Any]:
    """Return PyTorch's rendezvous handlers by scheme, such as "env".

    The dict is PyTorch's own and may be changed.
    """
    found: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    return found


def abort_group() -> None:
    """Abort all process groups without waiting for other ranks."""
    dist.distributed_c10d._abort_process_group()


# The code of the functions that leave a group, to recognize that a thread is in one of them.
LEAVING = {
    dist.destroy_process_group.__code__,
    dist.distributed_c10d._abort_process_group.__code__,
}


def count_collectives() -> dict[str, int]:
    """Return how many collectives each process group has started, by group and device.

    A key has the group's name, a space and the device type. Groups of a single rank, and groups
    whose backend doesn't count, are left out.
    """
    groups = [group for group in list(dist.distributed_c10d._world.pg_map) if group.size() > 1]
    every = {
        group._get_backend(device): (group, device)
        for group in groups
        for device in group._device_types
    }
    counts = {}
    for backend, (group, device) in every.items():
        with suppress(RuntimeError):  # the backend keeps no count
            counts[f"{group.group_name} {device}"] = backend._get_sequence_number_for_group()
    return counts


def broadcast_each(
    tensors: Sequence[torch.Tensor], group: Any, most_bytes: int, source: int = 0
) -> None:
    """Broadcast tensors, which are all on one device, from rank `source` of a group.

    A `group` of None is the default group. Each collective sends up to `most_bytes` bytes.
    """
    chosen = dist.group.WORLD if group is None else group
    dist._broadcast_coalesced(chosen, list(tensors), most_bytes, source)
