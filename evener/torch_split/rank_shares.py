"""The rows of each rank in a full step: by a plan that fits what is here, or by ratios."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ..errors import EvenerError, RequestError
from ..plan.check import check_fit, check_global_batch, describe
from ..plan.file import Plan, Share, load_plan
from ..shares.passes import batch_in_one_pass, count_passes
from ..shares.whole_rows import apportion, check_ratios
from ..training.launched import find_host, launched_device, launched_plan
from ..training.share_order import RankInfo, check_agreement, order_shares
from .process import Stand, choose_device, gather_infos, is_cpu


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
    def pass_rows(self) -> int | None:
        """Rows of the largest pass; None where every share is one pass."""
        if max(self.passes) == 1:
            return None
        return max(-(-batch // count) for batch, count in zip(self.batches, self.passes, strict=True))

    def with_equal_passes(self) -> RankShares:
        """The shares with every rank in as many passes as the one that needs most."""
        return msgspec.structs.replace(self, passes=(max(self.passes),) * self.world)


def open_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan or its file; without one, that of evener launch, if it started this process."""
    if isinstance(plan, Plan):
        return plan
    path = launched_plan(plan)
    return None if path is None else load_plan(path)


def open_plan_together(plan: Plan | str | os.PathLike[str] | None, stand: Stand) -> Plan | None:
    """The plan, as `open_plan` finds it, on every rank: none then waits for one that can't read its plan."""
    try:
        return open_plan(plan)
    except EvenerError as fault:
        gather_infos(RankInfo(machine=socket.gethostname(), host="", fault=fault.message), stand)
        raise


def find_rank_shares(
    plan: Plan,
    global_batch: int | None,
    stand: Stand,
    gpus: dict[str, int],
    strict: bool,
    options: Mapping[str, bool | str],
    device: Any = None,
) -> RankShares:
    """The shares of all ranks, each found by its host and its device; every rank calls it.

    `device` is this process's, where it is settled on one. PlanError, on every rank, if not each share has a process,
    or with `strict` if the plan was measured on other devices, which is a warning else; RequestError if `options`
    aren't the same on every rank.
    """
    active = plan.layout.active
    check = partial(check_fit, plan, workload_digest=None, global_batch=global_batch)
    check(devices=None, world=stand.world, strict=False)  # before anyone waits for a process that never comes
    own = _describe_rank(plan, global_batch, stand, gpus, device)
    ranks = gather_infos(msgspec.structs.replace(own, options=dict(options)), stand)
    check_agreement(ranks)
    differences = check(devices=_seen(active, ranks), world=None, strict=strict, framework="torch")
    order = order_shares(active, ranks)
    for difference in differences:
        warnings.warn(difference, stacklevel=3)
    held = ", ".join(f"{describe(share)} limited to {share.limit}" for share in active if share.limit)
    if held and stand.rank == 0:  # one process says it for all
        warnings.warn(f"The plan was measured with {held}; a training has no such limit.", stacklevel=3)
    computing = [i for i, share in enumerate(plan.layout.share) if share.batch]
    places = [computing[place] for place in order]
    batches, micros = (
        tuple(sizes[place] for place in places) for sizes in (plan.shares(global_batch), plan.micros(global_batch))
    )
    passes = tuple(map(count_passes, batches, micros))
    promised = plan.throughput.samples_per_second if global_batch in (None, plan.layout.global_batch) else 0.0
    shares = tuple(active[place] for place in order)
    return RankShares(stand.rank, batches, micros, passes, shares, plan.workload, ranks[0].training, promised)


def _describe_rank(plan: Plan, global_batch: int | None, stand: Stand, gpus: dict[str, int], device: Any) -> RankInfo:
    on_gpu = [] if device is None or device.type != "cuda" else [name for name, i in gpus.items() if i == device.index]
    return RankInfo(
        machine=socket.gethostname(),
        host=find_host(share.host for share in plan.layout.active),
        device=on_gpu[0] if on_gpu else launched_device(),
        visible=tuple(gpus),
        local_rank=stand.local_rank,
        plan=zlib.crc32(msgspec.json.encode((plan.layout, global_batch))),
        training=secrets.token_hex(8),
    )


def _seen(active: Sequence[Share], ranks: Sequence[RankInfo]) -> tuple[str, ...] | None:
    """The devices that any rank sees, for comparison with a plan's; None where it needs no GPU."""
    if all(map(is_cpu, active)):
        return None
    return tuple(dict.fromkeys(name for info in ranks for name in info.visible)) or ("the CPU",)


def shares_to_evaluate(shares: Sequence[int], micros: Sequence[int]) -> tuple[int, ...]:
    """The shares of a batch that each rank computes in one pass: validation isn't cut into passes."""
    if tuple(shares) == tuple(micros):
        return tuple(shares)
    return apportion(max(len(shares), batch_in_one_pass(shares, micros)), shares)


def share_by_ratios(
    ratios: Sequence[float] | None,
    global_batch: int | None,
    stand: Stand,
    gpus: dict[str, int],
    options: Mapping[str, bool | str],
) -> RankShares:
    """The shares by the ratios, or as even as can be; every rank calls it.

    RequestError if there isn't one for each process; as `find_rank_shares` if the ranks differ.
    """
    batches = _ratio_batches(ratios, global_batch, stand.world)
    own = RankInfo(
        machine=socket.gethostname(),
        host="",
        plan=zlib.crc32(msgspec.json.encode(batches)),
        training=secrets.token_hex(8),
        options=dict(options),
    )
    ranks = gather_infos(own, stand)
    check_agreement(ranks)
    training = ranks[0].training
    shares = (_unplanned_share(choose_device(None, stand, gpus), gpus),) * stand.world
    script = os.path.basename(sys.argv[0])
    return RankShares(stand.rank, batches, batches, (1,) * stand.world, shares, script, training)


def _ratio_batches(ratios: Sequence[float] | None, global_batch: int | None, world: int) -> tuple[int, ...]:
    if global_batch is None:
        raise RequestError(
            "Neither a plan nor a global batch is given.",
            "Give Split(plan) or Split(global_batch=N), or start the script with evener launch.",
        )
    chosen = [1.0] * world if ratios is None else list(ratios)
    check_ratios(chosen)
    if min(chosen) <= 0:
        raise RequestError(
            f"A ratio of {min(chosen)} leaves a process without work.", "Start no process for a device left out."
        )
    if len(chosen) != world:
        raise RequestError(
            f"There are {len(chosen)} ratios, but {world} processes take part.",
            f"Start the script with torchrun --nproc-per-node {len(chosen)}, or give {world} ratios.",
        )
    check_global_batch(global_batch, world)
    return apportion(global_batch, chosen)


def _unplanned_share(device: Any, gpus: dict[str, int]) -> Share:
    """The device as the monitor shows it where no plan names it."""
    names = [identity for identity, number in gpus.items() if device.type == "cuda" and number == device.index]
    return Share(names[0] if names else str(device), device.index or 0, str(device), 0, 0.0)
