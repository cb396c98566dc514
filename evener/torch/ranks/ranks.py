"""The place of a PyTorch training process: its rank, its device, its process group, and the rows of
all ranks.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...errors import DeviceError, EvenerError, PlanError, RequestError
from ...plan.check import check_fit, describe
from ...plan.file import Plan, Share, load_plan
from ...plan.use import note_use
from ...shares.whole_rows import count_passes, even
from ...system.cores import allowed_cpus, core_groups, pin_threads, slice_cores
from ...training.launched import find_host, launched_device, launched_plan
from ...training.share_order import RankInfo, check_agreement, divide_by_ratios, order_shares
from ..messages import gather_messages

MOST_FETCHING_THREADS = 8
LARGE_BYTES = (
    1 << 18
)  # of a piece of memory that is returned when it is freed, where units are gathered
_ALLOWED = allowed_cpus()  # before any slice was settled on
_GATHERINGS = count()  # every rank counts alike
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


class Stand(msgspec.Struct, frozen=True):
    """A process among those that train together; `local_rank` counts on its machine."""

    rank: int
    world: int
    local_rank: int


def find_stand() -> Stand:
    """This process's place: by its process group, else torchrun's variables, else alone; PlanError
    for a wrong one.
    """
    if dist.is_available() and dist.is_initialized():
        return Stand(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", dist.get_rank()))
    if "WORLD_SIZE" not in os.environ:
        return Stand(0, 1, 0)
    world = _number("WORLD_SIZE", 1)
    _check_set(world, "RANK")
    rank = _number("RANK", 0)
    if rank >= max(1, world):
        raise PlanError(
            f"There is no rank {rank} among WORLD_SIZE={world}.", "Start the script with torchrun."
        )
    return Stand(rank, world, _number("LOCAL_RANK", rank))


def _check_set(world: int, *names: str) -> None:
    """PlanError unless the variables are set that several processes find each other by."""
    missing = [name for name in names if name not in os.environ]
    if world > 1 and missing:
        raise PlanError(
            f"WORLD_SIZE says that {world} processes take part, but nothing is said of "
            f"{' and '.join(missing)}.",
            "Start the script with torchrun, or set what it would.",
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise PlanError(
            f"The environment variable {name} is {text!r}, no number.",
            "Start the script with torchrun.",
        )
    return int(text)


def visible_gpus() -> dict[str, int]:
    """The GPUs that PyTorch sees in this process: UUID -> its number for PyTorch."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {f"GPU-{torch.cuda.get_device_properties(i).uuid}": i for i in range(count)}


def choose_device(share: Share | None, stand: Stand, gpus: dict[str, int]) -> Any:
    """The `torch.device` of this process: the plan's GPU by its UUID, else the GPU of its local
    rank, else the CPU.

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
            f"The plan's GPU {share.name} ({share.device}) is not among the {len(gpus)} that "
            f"PyTorch sees.",
            "Run evener doctor to see why, or make a plan for what is here.",
        )
    return torch.device("cpu")


def is_cpu(share: Share) -> bool:
    """True if a share is that of a CPU slice."""
    return share.device.startswith("cpu-")


def claim_device(device: Any, share: Share | None, trainings: int = 1) -> None:
    """Set up this process for its device, as a probe does: make a GPU the current one, or run on a
    CPU slice's cores with one thread each.

    evener launch has started the process on its cores already. Several `trainings` of a pack share
    the cores.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # 1 is torchrun's choice; cores fetch the rows of a GPU
        if torch.get_num_threads() == 1 or trainings > 1:
            torch.set_num_threads(fetching_threads(_number("LOCAL_WORLD_SIZE", 1) * trainings))
    elif (
        share is not None
        and not launched_device()
        and (cores := slice_cores(share.device, _ALLOWED))
    ):
        # also threads of a trainer's earlier group: on other cores they would slow other ranks
        pin_threads(cores)
        torch.set_num_threads(len(core_groups(cores)))
        # what a step frees is kept for the next one: by its own choice glibc maps and unmaps 15 %
        # of a step's time
        _tell_glibc({_MMAP_THRESHOLD: 2**31 - 1, _TRIM_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1})


def fetching_threads(processes: int) -> int:
    """Threads that fetch rows for a GPU beside other processes of this machine that do: 8, or its
    part of the cores.
    """
    return max(1, min(MOST_FETCHING_THREADS, len(_ALLOWED) // max(2, processes)))


def return_memory() -> None:
    """Let glibc return large pieces as they are freed: gathered units would leave gaps as large as
    the model.
    """
    _tell_glibc({_MMAP_THRESHOLD: LARGE_BYTES})


def _tell_glibc(options: Mapping[int, int]) -> None:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in options.items():
            library.mallopt(option, value)


def gather_infos(own: RankInfo, stand: Stand) -> list[RankInfo]:
    """The RankInfo of every rank, in the order of ranks, before a device is chosen; every rank
    calls it.
    """
    if stand.world == 1:
        return [own]
    if dist.is_initialized():
        return gather_messages(own, RankInfo)
    store = _open_store()
    kept = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )  # with what the ranks before a restart wrote
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
    every = meet(
        store,
        f"evener/{attempt}/{next(_GATHERINGS)}",
        stand.rank,
        stand.world,
        msgspec.json.encode(own),
    )
    return [msgspec.json.decode(each, type=RankInfo) for each in every]


def meet(
    store: Any, place: str, rank: int, world: int, own: bytes, seconds: float = 0
) -> list[bytes]:
    """The values of all ranks, exchanged by a store under a new name; with `seconds`, none if one
    comes later.
    """
    keys = [f"{place}/{each}" for each in range(world)]
    store.set(keys[rank], own)
    if seconds:
        came = "late"
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=seconds))
            came = "all"
        if store.compare_set(f"{place}/came", "", came) == b"late":
            return []
    every = [store.get(key) for key in keys]
    if store.add(f"{place}/read", 1) == world:
        store.set(f"{place}/done", "")
    if rank == 0:  # the store may be in this process, and the others still read it
        store.wait([f"{place}/done"])
    return every


@cache
def _open_store() -> Any:
    """The store in which ranks that a launcher started find each other, before they have a process
    group.
    """
    _check_set(_number("WORLD_SIZE", 1), "MASTER_ADDR", "MASTER_PORT")
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def join(device: Any, backend: str | None) -> None:
    """Make the process group that torchrun described, NCCL for GPUs, gloo for CPUs, if it isn't
    there.
    """
    if dist.is_initialized():
        return
    _check_set(_number("WORLD_SIZE", 1), "MASTER_ADDR", "MASTER_PORT")
    if device.type == "cuda":
        dist.init_process_group(
            backend or "cpu:gloo,cuda:nccl", device_id=None if backend else device
        )
    else:
        dist.init_process_group(backend or "gloo")


class RankShares(msgspec.Struct, frozen=True):
    """A plan as the ranks of this training have it; what is of several ranks is in their order."""

    rank: int
    batches: tuple[int, ...]  # rows of each rank in a full global batch
    micros: tuple[int, ...]  # the most of them in one pass
    passes: tuple[int, ...]
    shares: tuple[Share, ...]  # of the plan; where there is none, this rank's device for each
    workload: str
    training: str  # a name for it that all ranks have
    samples_per_second: float = 0.0  # that the plan expects; 0: none, or for another global batch
    plan: Plan | None = None
    device: Any = None  # this process's, as PyTorch names it

    @property
    def share(self) -> Share:
        """This rank's share, with the rows of this training."""
        batch, micro = self.batches[self.rank], self.micros[self.rank]
        return msgspec.structs.replace(self.shares[self.rank], batch=batch, micro=micro)

    @property
    def world(self) -> int:
        """Processes that train together."""
        return len(self.batches)

    @property
    def global_batch(self) -> int:
        """Rows of a full global batch."""
        return sum(self.batches)

    @property
    def in_passes(self) -> bool:
        """True if a rank needs more than one pass for its share."""
        return self.micros != self.batches

    @property
    def is_sharded(self) -> bool:
        """True if the plan has each device hold a part of the model."""
        return self.plan is not None and self.plan.layout.traits.sharded

    @property
    def pass_rows(self) -> Iterator[int]:
        """The rows of each pass of a full batch, of all ranks."""
        return (
            rows for each in zip(self.batches, self.passes, strict=True) for rows in even(*each)
        )


def open_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan or its file; without one, that of evener launch, if it started this process."""
    if isinstance(plan, Plan):
        return plan
    path = launched_plan(plan)
    return None if path is None else load_plan(path)


def find_shares(
    plan: Plan | str | os.PathLike[str] | None,
    ratios: Sequence[float] | None,
    global_batch: int | None,
    options: Mapping[str, bool | str],
    *,
    strict: bool = False,
    device: Any = None,
) -> RankShares:
    """The shares of all ranks, by a plan or that of evener launch, or by `ratios`; every rank calls
    it.

    `device` is this process's, where it is settled on one. PlanError, on every rank, if one can't
    read its plan, if not each share has a process, or with `strict` if the plan was measured on
    other devices, which is a warning else; RequestError if `options` aren't the same on every rank.
    """
    note_use()  # also of ratios, which are a plan by hand
    if plan is not None and ratios is not None:
        raise RequestError(
            "Both a plan and ratios are given.", "Give one of them; the plan has its own ratios."
        )
    stand, gpus = find_stand(), visible_gpus()
    try:
        chosen = None if ratios is not None else open_plan(plan)
    except EvenerError as fault:  # no rank then waits for one that can't read its plan
        gather_infos(RankInfo(socket.gethostname(), "", fault=fault.message), stand)
        raise
    if chosen is None:
        return _share_by_ratios(ratios, global_batch, stand, gpus, options, device)
    fits = partial(check_fit, chosen, workload_digest=None, global_batch=global_batch)
    # before any rank waits for a process that never comes
    fits(devices=None, world=stand.world, strict=False)
    digest = zlib.crc32(msgspec.json.encode((chosen.layout, global_batch)))
    host = find_host(share.host for share in chosen.layout.active)
    named = _name_gpu(device, gpus) or launched_device()
    own = RankInfo(socket.gethostname(), host, named, tuple(gpus), stand.local_rank, plan=digest)
    ranks = _meet(own, stand, options)
    seen = _seen(chosen.layout.active, ranks)
    differences = fits(devices=seen, world=None, strict=strict, framework="torch")
    return _share_by_plan(chosen, global_batch, stand, gpus, differences, ranks, device)


def _name_gpu(device: Any, gpus: Mapping[str, int]) -> str:
    """The id of this process's GPU among those that it sees, by their index; "" if it has none."""
    if device is None or device.type != "cuda":
        return ""
    return next((name for name, index in gpus.items() if index == device.index), "")


def _meet(own: RankInfo, stand: Stand, options: Mapping[str, bool | str]) -> list[RankInfo]:
    """What all ranks are, in their order; RequestError if they don't agree."""
    training = secrets.token_hex(8)
    told = msgspec.structs.replace(own, options=dict(options), training=training)
    ranks = gather_infos(told, stand)
    check_agreement(ranks)
    return ranks


def _share_by_ratios(
    ratios: Sequence[float] | None,
    global_batch: int | None,
    stand: Stand,
    gpus: dict[str, int],
    options: Mapping[str, bool | str],
    device: Any,
) -> RankShares:
    device = device or choose_device(None, stand, gpus)
    name = _name_gpu(device, gpus) or str(device)
    share = Share(name, device.index or 0, str(device), 0, 0.0)  # as the monitor shows it
    divided = divide_by_ratios(ratios, global_batch, stand.world)
    digest = zlib.crc32(msgspec.json.encode(divided))
    ranks = _meet(RankInfo(socket.gethostname(), "", plan=digest), stand, options)
    return RankShares(
        stand.rank,
        divided,
        divided,
        (1,) * stand.world,
        (share,) * stand.world,
        os.path.basename(sys.argv[0]),
        ranks[0].training,
        device=device,
    )


def _share_by_plan(
    plan: Plan,
    global_batch: int | None,
    stand: Stand,
    gpus: dict[str, int],
    differences: Sequence[str],
    ranks: Sequence[RankInfo],
    device: Any,
) -> RankShares:
    """The shares of all ranks, each found by its host and its device."""
    active = plan.layout.active
    order = order_shares(active, ranks)
    for difference in differences:
        warnings.warn(difference, stacklevel=4)
    held = ", ".join(
        f"{describe(share)} limited to {share.limit}" for share in active if share.limit
    )
    if held and stand.rank == 0:  # one process says it for all
        warnings.warn(
            f"The plan was measured with {held}; a training has no such limit.", stacklevel=4
        )
    computing = [i for i, share in enumerate(plan.layout.share) if share.batch]
    rows, most = plan.shares(global_batch), plan.micros(global_batch)
    batches, micros = (tuple(sizes[computing[place]] for place in order) for sizes in (rows, most))
    passes = tuple(map(count_passes, batches, micros))
    promised = (
        plan.throughput.samples_per_second
        if global_batch in (None, plan.layout.global_batch)
        else 0.0
    )
    shares = tuple(active[place] for place in order)
    own, training = device or choose_device(shares[stand.rank], stand, gpus), ranks[0].training
    return RankShares(
        stand.rank, batches, micros, passes, shares, plan.workload, training, promised, plan, own
    )


def _seen(active: Sequence[Share], ranks: Sequence[RankInfo]) -> tuple[str, ...] | None:
    """The devices that any rank sees, for comparison with a plan's; None where it needs no GPU."""
    if all(map(is_cpu, active)):
        return None
    return tuple(dict.fromkeys(name for info in ranks for name in info.visible)) or ("the CPU",)
