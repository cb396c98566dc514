"""The place of a PyTorch training process: its rank among the plan's active devices, its device, its process group."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import DeviceError, PlanError
from ..plan.file import Share
from ..system.cpu_topology import allowed_cpus, core_groups, slice_cores
from ..training.device_errors import abort_on_device_error
from ..training.launched import launched_device
from ..training.share_order import RankInfo

MOST_FETCHING_THREADS = 8
_ALLOWED = allowed_cpus()  # before any slice was settled on
_GATHERINGS = count()  # every rank counts alike
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


class Stand(msgspec.Struct, frozen=True):
    """A process among those that train together; `local_rank` counts on its machine."""

    rank: int
    world: int
    local_rank: int


def find_stand() -> Stand:
    """This process's place: by its process group, else torchrun's variables, else alone; PlanError for a wrong one."""
    if dist.is_available() and dist.is_initialized():
        return Stand(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", dist.get_rank()))
    if "WORLD_SIZE" not in os.environ:
        return Stand(0, 1, 0)
    world = _number("WORLD_SIZE", 1)
    _check_set(world, "RANK")
    rank = _number("RANK", 0)
    if rank >= max(1, world):
        raise PlanError(f"There is no rank {rank} among WORLD_SIZE={world}.", "Start the script with torchrun.")
    return Stand(rank, world, _number("LOCAL_RANK", rank))


def _check_set(world: int, *names: str) -> None:
    """PlanError unless the variables are set that several processes find each other by."""
    missing = [name for name in names if name not in os.environ]
    if world > 1 and missing:
        raise PlanError(
            f"WORLD_SIZE says that {world} processes take part, but nothing is said of {' and '.join(missing)}.",
            "Start the script with torchrun, or set what it would.",
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise PlanError(f"The environment variable {name} is {text!r}, no number.", "Start the script with torchrun.")
    return int(text)


def visible_gpus() -> dict[str, int]:
    """The GPUs that PyTorch sees in this process: UUID -> its number for PyTorch."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {_uuid(i): i for i in range(count)}


def choose_device(share: Share | None, stand: Stand, gpus: dict[str, int]) -> Any:
    """The `torch.device` of this process: the plan's GPU by its UUID, else the GPU of its local rank, else the CPU.

    DeviceError where the plan names GPUs and fewer are here than processes.
    """
    if share is not None and is_cpu(share):
        return torch.device("cpu")
    if share is not None and share.device in gpus:
        return torch.device("cuda", gpus[share.device])
    if share is None and len(gpus) == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)  # a launcher that shows each process its own
    if stand.local_rank < len(gpus):
        return torch.device("cuda", stand.local_rank)
    if share is not None and share.on_gpu:
        raise DeviceError(
            f"The plan's GPU {share.name} ({share.device}) is not among the {len(gpus)} that PyTorch sees.",
            "Run evener doctor to see why, or make a plan for what is here.",
        )
    return torch.device("cpu")


def is_cpu(share: Share) -> bool:
    """True if a share is that of a CPU slice."""
    return share.device.startswith("cpu-")


def settle(device: Any, share: Share | None) -> None:
    """Make the device this process's own as a probe does: the current GPU, or the slice's cores with a thread each.

    evener launch has started the process on its cores already.
    """
    if device.type == "cuda":
        abort_on_device_error()
        torch.cuda.set_device(device)
        if torch.get_num_threads() == 1:  # torchrun's choice; a GPU's rows are fetched by the cores
            torch.set_num_threads(fetching_threads(_number("LOCAL_WORLD_SIZE", 1)))
    elif share is not None and not launched_device() and (cores := slice_cores(share.device, _ALLOWED)):
        _pin_threads(cores)
        torch.set_num_threads(len(core_groups(cores)))
        _keep_memory()


def _pin_threads(cores: Iterable[int]) -> None:
    """Pin all threads, also those of a trainer's earlier process group: on other cores they would slow other ranks."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def fetching_threads(processes: int) -> int:
    """Threads that fetch rows for a GPU beside other processes of this machine that do: 8, or its part of the cores."""
    return max(1, min(MOST_FETCHING_THREADS, len(_ALLOWED) // max(2, processes)))


def _keep_memory() -> None:
    """Let glibc keep what a step frees for the next one; by its own choice it maps and unmaps 15 % of a step's time."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in ((_MMAP_THRESHOLD, 2**31 - 1), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            library.mallopt(option, value)


def gather_infos(own: RankInfo, stand: Stand) -> list[RankInfo]:
    """The RankInfo of every rank, in the order of ranks, before a device is chosen; every rank calls it."""
    if stand.world == 1:
        return [own]
    if dist.is_initialized():
        gathered: list[Any] = [None] * stand.world
        dist.all_gather_object(gathered, own)
        return gathered
    store = _open_store()
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # with what the ranks before a restart wrote
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
    prefix = f"evener/{attempt}/{next(_GATHERINGS)}"
    store.set(f"{prefix}/{stand.rank}", msgspec.json.encode(own))
    keys = [f"{prefix}/{rank}" for rank in range(stand.world)]
    infos = [msgspec.json.decode(store.get(key), type=RankInfo) for key in keys]
    if store.add(f"{prefix}/read", 1) == stand.world:
        store.set(f"{prefix}/done", "")
    if stand.rank == 0:  # the store may be in this process, and the others still read it
        store.wait([f"{prefix}/done"])
    return infos


@cache
def _open_store() -> Any:
    """The store in which ranks that a launcher started find each other, before they have a process group."""
    _check_set(_number("WORLD_SIZE", 1), "MASTER_ADDR", "MASTER_PORT")
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def join(device: Any, backend: str | None) -> bool:
    """Make the process group that torchrun described, NCCL for GPUs, gloo for CPUs; True if it wasn't there before."""
    if dist.is_initialized():
        return False
    _check_set(_number("WORLD_SIZE", 1), "MASTER_ADDR", "MASTER_PORT")
    if device.type == "cuda":
        dist.init_process_group(backend or "cpu:gloo,cuda:nccl", device_id=None if backend else device)
    else:
        dist.init_process_group(backend or "gloo")
    return True


_left: list[Any] = []  # process groups, until the interpreter ends


def leave_group() -> None:
    """Leave the process group, if there still is one.

    Its last reference isn't a model's: DistributedDataParallel that is dropped right after would wait for gloo's
    thread, which may wait for the interpreter's lock to drop its last tensors.
    """
    if dist.is_initialized():
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


def _uuid(number: int) -> str:
    identity = getattr(torch.cuda.get_device_properties(number), "uuid", None)
    return f"cuda:{number}" if identity is None else f"GPU-{identity}"
