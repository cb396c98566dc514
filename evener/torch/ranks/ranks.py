"""Find out this process's rank, its device, and its share of each batch."""

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
from ...live.step_clock import find_group
from ...plan.check import check_fit, describe
from ...plan.file import Plan, Share, load_plan
from ...plan.use import note_use
from ...shares.whole_rows import count_passes, even
from ...system.cores import allowed_cpus, core_groups, pin_threads, slice_cores
from ...training.launched import find_host, launched_device, launched_plan
from ...training.share_order import RankInfo, check_agreement, divide_by_ratios, order_shares
from ..messages import gather_messages

MOST_FETCHING_THREADS = 8
LARGE_BYTES = 1 << 18  # minimum size of blocks that are returned to the system when freed
_ALLOWED = allowed_cpus()  # the allowed CPUs before this process was pinned to a slice
_GATHERINGS = count()  # counts gather calls; the same on every rank
_GROUPS = count()  # counts process groups that `join` creates; the same on every rank
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


class ProcessRank(msgspec.Struct, frozen=True):
    """Rank of this process among all ranks and on this machine, and the number of ranks."""

    rank: int
    world: int
    local_rank: int


def find_process_rank() -> ProcessRank:
    """Return this process's rank, from the process group or from torchrun's environment variables.

    Without either, the process is rank 0 of 1. Raises PlanError if torchrun's variables are
    incomplete or invalid.
    """
    if dist.is_available() and dist.is_initialized():
        return ProcessRank(
            dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", dist.get_rank())
        )
    if "WORLD_SIZE" not in os.environ:
        return ProcessRank(0, 1, 0)
    world = _number("WORLD_SIZE", 1)
    _check_set(world, "RANK")
    rank = _number("RANK", 0)
    if rank >= max(1, world):
        raise PlanError(
            f"There is no rank {rank} among WORLD_SIZE={world}.", "Start the script with torchrun."
        )
    return ProcessRank(rank, world, _number("LOCAL_RANK", rank))


def _check_set(world: int, *names: str) -> None:
    """Raise PlanError if a required environment variable is missing.

    A single process (`world` 1) requires none of them.
    """
    missing = [name for name in names if name not in os.environ]
    if world > 1 and missing:
        raise PlanError(
            f"WORLD_SIZE says that {world} processes take part, but nothing sets "
            f"{' and '.join(missing)}.",
            "Start the script with torchrun, or set what torchrun would.",
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
    """Return the index of each GPU that PyTorch sees, by the GPU's UUID ("GPU-1a2b...")."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {f"GPU-{torch.cuda.get_device_properties(i).uuid}": i for i in range(count)}


def choose_device(share: Share | None, process: ProcessRank, gpus: dict[str, int]) -> Any:
    """Choose the device that this process trains on.

    For a share on a CPU, this is the CPU. Otherwise it is the first of these that exists:

    - the plan's GPU, found by its UUID in `gpus` (indices by UUID),
    - without a plan, the only GPU that the launcher lets this process see,
    - the GPU whose index is the local rank,
    - the CPU, if the plan doesn't require a GPU.

    Raises DeviceError if the plan's GPU is missing and no GPU has the local rank's index.
    """
    if share is not None and is_cpu(share):
        return torch.device("cpu")
    if share is not None and share.device in gpus:
        return torch.device("cuda", gpus[share.device])
    if share is None and len(gpus) == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)  # the launcher shows each process only its own GPU
    if process.local_rank < len(gpus):
        return torch.device("cuda", process.local_rank)
    if share is not None and share.on_gpu:
        raise DeviceError(
            f"The plan's GPU {share.name} ({share.device}) is not among the {len(gpus)} that "
            f"PyTorch sees.",
            "Run evener doctor to see why, or make a plan for what is here.",
        )
    return torch.device("cpu")


def is_cpu(share: Share) -> bool:
    """Return whether a share in a plan is for a CPU."""
    return share.device.startswith("cpu-")


def claim_device(device: Any, share: Share | None, trainings: int = 1) -> None:
    """Set this process up to train on a device: current GPU, threads and memory options.

    `share` is this rank's share in the plan, or None without a plan. `trainings` is the number of
    processes on the device.
    """
    # a GPU becomes the current device; a process for a CPU slice is pinned to its cores, with one
    # thread per core, unless evener launch has already done so
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torchrun sets 1, but fetching a GPU's rows takes several cores
        if torch.get_num_threads() == 1 or trainings > 1:
            torch.set_num_threads(fetching_threads(_number("LOCAL_WORLD_SIZE", 1) * trainings))
    elif (
        share is not None
        and not launched_device()
        and (cores := slice_cores(share.device, _ALLOWED))
    ):
        # also pins threads of a trainer's earlier process group, which would slow other ranks
        pin_threads(cores)
        torch.set_num_threads(len(core_groups(cores)))
        # Memory that a step frees stays mapped for the next step, because glibc's mapping and
        # unmapping by default take 15 % of a step's time.
        _tell_glibc({_MMAP_THRESHOLD: 2**31 - 1, _TRIM_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1})


def fetching_threads(processes: int) -> int:
    """Return how many threads a process should use to fetch rows, at most 8.

    `processes` is the number of processes on this machine.
    """
    return max(1, min(MOST_FETCHING_THREADS, len(_ALLOWED) // max(2, processes)))


def return_memory() -> None:
    """Make glibc return freed blocks of 256 KiB or more to the system immediately."""
    # a sharded model, gathered layer by layer, would otherwise leave gaps as large as the model
    _tell_glibc({_MMAP_THRESHOLD: LARGE_BYTES})


def _tell_glibc(options: Mapping[int, int]) -> None:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in options.items():
            library.mallopt(option, value)


def gather_infos(own: RankInfo, process: ProcessRank) -> list[RankInfo]:
    """Send this rank's description to all ranks; return all descriptions in rank order.

    Every rank has to call this.
    """
    # It works even before the ranks have chosen their devices and created a process group.
    if process.world == 1:
        return [own]
    if dist.is_initialized():
        return gather_messages(own, RankInfo)
    store = _open_store()
    # True if the store still contains values from before a restart
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
    every = exchange_values(
        store,
        f"evener/{attempt}/{next(_GATHERINGS)}",
        process.rank,
        process.world,
        msgspec.json.encode(own),
    )
    return [msgspec.json.decode(each, type=RankInfo) for each in every]


def exchange_values(
    store: Any, prefix: str, rank: int, world: int, own: bytes, seconds: float = 0
) -> list[bytes]:
    """Exchange values between all ranks through a key-value store; return them in rank order.

    Every rank has to call this. The store mustn't have any keys that start with `prefix` yet. If
    `seconds` isn't 0, it is a timeout: unless all values arrive in time, every rank gets [].
    """
    keys = [f"{prefix}/{each}" for each in range(world)]
    store.set(keys[rank], own)
    if seconds:
        came = "late"
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=seconds))
            came = "all"
        if store.compare_set(f"{prefix}/came", "", came) == b"late":
            return []
    every = [store.get(key) for key in keys]
    if store.add(f"{prefix}/read", 1) == world:
        store.set(f"{prefix}/done", "")
    if rank == 0:  # the store may be in this process, and other ranks still read it
        store.wait([f"{prefix}/done"])
    return every


@cache
def _open_store() -> Any:
    """Connect to the key-value store at the address in torchrun's environment variables."""
    _check_set(_number("WORLD_SIZE", 1), "MASTER_ADDR", "MASTER_PORT")
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def join(device: Any, backend: str | None) -> None:
    """Create the default process group, unless the user's script has already created it.

    Every rank has to call this. A `backend` of None means NCCL and gloo for GPUs, and gloo for
    CPUs. Raises PlanError if torchrun's environment variables are incomplete.
    """
    if dist.is_initialized():
        return
    _check_set(_number("WORLD_SIZE", 1), "MASTER_ADDR", "MASTER_PORT")
    place = _place_group(next(_GROUPS))
    if device.type == "cuda":
        dist.init_process_group(
            backend or "cpu:gloo,cuda:nccl", device_id=None if backend else device, **place
        )
    else:
        dist.init_process_group(backend or "gloo", **place)


def _place_group(number: int) -> dict[str, Any]:
    """Return arguments that make `init_process_group` use separate store keys for each group.

    `number` is the number of groups that this process has created before. For 0, the result is {},
    and PyTorch uses torchrun's environment variables.
    """
    # For the first group, the result is empty, and PyTorch reads torchrun's environment variables.
    # Under torchrun, a second training run in a process uses the same store, in which the first
    # group has left its ranks' addresses.
    if number == 0:
        return {}
    process = find_process_rank()
    store = dist.PrefixStore(f"evener/group/{number}", _open_store())
    return {"store": store, "rank": process.rank, "world_size": process.world}


class RankShares(msgspec.Struct, frozen=True):
    """The shares of all ranks in a training run, and this process's rank and device."""

    rank: int
    batches: tuple[int, ...]  # rows of each rank in a full global batch
    micros: tuple[int, ...]  # maximum rows per pass of each rank
    passes: tuple[int, ...]  # number of passes of each rank
    shares: tuple[Share, ...]  # the plan's shares; without a plan, this rank's device for each rank
    workload: str
    training: str  # an id that is the same on all ranks
    samples_per_second: float = 0.0  # in the plan; 0 without a plan, or for another global batch
    plan: Plan | None = None
    device: Any = None  # this process's `torch.device`

    @property
    def share(self) -> Share:
        """This rank's share in the plan, with its current number of rows."""
        batch, micro = self.batches[self.rank], self.micros[self.rank]
        return msgspec.structs.replace(self.shares[self.rank], batch=batch, micro=micro)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.batches)

    @property
    def global_batch(self) -> int:
        """Number of rows in a global batch, over all ranks."""
        return sum(self.batches)

    @property
    def in_passes(self) -> bool:
        """Whether any rank computes its share in several passes."""
        pairs = zip(self.micros, self.batches, strict=True)
        return any(micro < batch for micro, batch in pairs)

    @property
    def is_sharded(self) -> bool:
        """Whether the plan shards the model over its devices."""
        return self.plan is not None and self.plan.layout.traits.sharded

    @property
    def pass_rows(self) -> Iterator[int]:
        """Row counts of the gradient-accumulation passes of a global batch, over all ranks."""
        return (
            rows for each in zip(self.batches, self.passes, strict=True) for rows in even(*each)
        )


def open_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """Return the plan, which is given as an object or a path.

    If `plan` is None, return the plan of `evener launch`; without one, return None.
    """
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
    """Find how many rows each rank computes, from a plan or from ratios.

    All ranks have to call this with the same arguments.

    Arguments:

    - `plan`: a plan or its path; None takes it from `evener launch`.
    - `ratios`: relative shares of the ranks, in place of a plan.
    - `global_batch`: rows per batch over all ranks; None takes the plan's.
    - `options`: options that have to be equal on all ranks.
    - `strict`: whether to raise PlanError, instead of a warning, if the plan was made on other
      devices.
    - `device`: this process's device, if the caller has chosen it.

    Raises PlanError, RequestError or DeviceError if the shares can't be applied here.
    """
    note_use()  # ratios count as using a plan too
    if plan is not None and ratios is not None:
        raise RequestError(
            "Both a plan and ratios are given.", "Give one of them; the plan has its own ratios."
        )
    process, gpus = find_process_rank(), visible_gpus()
    try:
        chosen = None if ratios is not None else open_plan(plan)
    except EvenerError as fault:  # so that no rank waits for a rank that can't read its plan
        gather_infos(RankInfo(socket.gethostname(), "", fault=fault.message), process)
        raise
    if chosen is None:
        return _share_by_ratios(ratios, global_batch, process, gpus, options, device)
    fits = partial(check_fit, chosen, workload_digest=None, global_batch=global_batch)
    # before any rank waits for a process that never comes
    fits(devices=None, world=process.world, strict=False)
    digest = zlib.crc32(msgspec.json.encode((chosen.layout, global_batch)))
    host = find_host(share.host for share in chosen.layout.active)
    named = _name_gpu(device, gpus) or launched_device()
    own = RankInfo(socket.gethostname(), host, named, tuple(gpus), process.local_rank, plan=digest)
    ranks = _gather_agreed_infos(own, process, options)
    seen = _list_visible_gpus(chosen.layout.active, ranks)
    differences = fits(devices=seen, world=None, strict=strict, framework="torch")
    return _share_by_plan(chosen, global_batch, process, gpus, differences, ranks, device)


def describe_own_rows(device: Any, rows: int, world: int) -> RankShares:
    """Return equal shares of `rows` rows per rank, for a script that trains without a plan."""
    # all shares name this process's `device`, or the CPU slice on which evener started the process
    name = _name_gpu(device, visible_gpus()) if device.type == "cuda" else launched_device()
    share = Share(name or str(device), device.index or 0, str(device), 0, 0.0)
    if device.type == "cpu" and not is_cpu(share):
        share = msgspec.structs.replace(share, device=str(device))
    return RankShares(
        rank=dist.get_rank() if world > 1 else 0,
        batches=(rows,) * world,
        micros=(rows,) * world,
        passes=(1,) * world,
        shares=(share,) * world,
        workload=os.path.basename(sys.argv[0]),
        training=find_group(world) or ("" if world > 1 else secrets.token_hex(8)),
        device=device,
    )


def _name_gpu(device: Any, gpus: Mapping[str, int]) -> str:
    """Return the UUID of a GPU, or "" for other devices."""
    if device is None or device.type != "cuda":
        return ""
    return next((name for name, index in gpus.items() if index == device.index), "")


def _gather_agreed_infos(
    own: RankInfo, process: ProcessRank, options: Mapping[str, bool | str]
) -> list[RankInfo]:
    """Gather all ranks' descriptions, and check that their plans and options are equal.

    Raises RequestError or PlanError on every rank if they differ.
    """
    training = secrets.token_hex(8)
    own = msgspec.structs.replace(own, options=dict(options), training=training)
    ranks = gather_infos(own, process)
    check_agreement(ranks)
    return ranks


def _share_by_ratios(
    ratios: Sequence[float] | None,
    global_batch: int | None,
    process: ProcessRank,
    gpus: dict[str, int],
    options: Mapping[str, bool | str],
    device: Any,
) -> RankShares:
    device = device or choose_device(None, process, gpus)
    name = _name_gpu(device, gpus) or str(device)
    share = Share(name, device.index or 0, str(device), 0, 0.0)  # for the monitor
    divided = divide_by_ratios(ratios, global_batch, process.world)
    digest = zlib.crc32(msgspec.json.encode(divided))
    ranks = _gather_agreed_infos(RankInfo(socket.gethostname(), "", plan=digest), process, options)
    return RankShares(
        process.rank,
        divided,
        divided,
        (1,) * process.world,
        (share,) * process.world,
        os.path.basename(sys.argv[0]),
        ranks[0].training,
        device=device,
    )


def _share_by_plan(
    plan: Plan,
    global_batch: int | None,
    process: ProcessRank,
    gpus: dict[str, int],
    differences: Sequence[str],
    ranks: Sequence[RankInfo],
    device: Any,
) -> RankShares:
    """Return the shares of all ranks in a plan, with each rank matched to a share by its device.

    `differences` are warnings about differences between the plan and this training run. `gpus` has
    the index of each GPU, by UUID. `device` is this process's device; None chooses it by the share.
    """
    # shares are matched to ranks by host and device
    active = plan.layout.active
    order = order_shares(active, ranks)
    for difference in differences:
        warnings.warn(difference, stacklevel=4)
    if process.rank == 0:  # only one process warns
        _warn_of_limits(active)
    places = [i for i, share in enumerate(plan.layout.share) if share.takes_part]
    rows, most = plan.shares(global_batch), plan.micros(global_batch)
    batches = tuple(rows[places[place]] for place in order)
    # a rank without rows has filler rows
    micros = tuple(max(1, most[places[place]]) for place in order)
    passes = tuple(max(1, count_passes(*own)) for own in zip(batches, micros, strict=True))
    promised = (
        plan.throughput.samples_per_second
        if global_batch in (None, plan.layout.global_batch)
        else 0.0
    )
    shares = tuple(active[place] for place in order)
    own, training = device or choose_device(shares[process.rank], process, gpus), ranks[0].training
    return RankShares(
        process.rank, batches, micros, passes, shares, plan.workload, training, promised, plan, own
    )


def _warn_of_limits(active: Sequence[Share]) -> None:
    """Warn if the speed or memory of devices was limited when the plan was measured."""
    # A training run has no such limits. In a device's name, `@` is followed by the limit, for
    # example "60%+8GiB".
    held = [f"{describe(share)} limited to {share.limit}" for share in active if share.limit]
    if held:
        warnings.warn(
            f"The plan was measured with {', '.join(held)}; a training has no such limit.",
            stacklevel=5,
        )


def _list_visible_gpus(
    active: Sequence[Share], ranks: Sequence[RankInfo]
) -> tuple[str, ...] | None:
    """Return the names of all GPUs that the ranks can use, to compare them with the plan's.

    Without any GPU, the result is `("the CPU",)`. It is None for a plan for CPUs.
    """
    if all(map(is_cpu, active)):
        return None
    return tuple(dict.fromkeys(name for info in ranks for name in info.visible)) or ("the CPU",)
