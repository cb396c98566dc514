"""Find each rank's share in the plan of a training run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ..errors import PlanError, RequestError
from ..plan.check import check_global_batch, describe
from ..plan.layout import Share
from ..shares.whole_rows import apportion, check_ratios


class RankInfo(msgspec.Struct, frozen=True):
    """What a rank reports about itself to all other ranks before training."""

    machine: str  # its host name, for messages
    # the host's name in the plan; empty if the plan has no hosts, or not this machine
    host: str
    device: str = ""  # the plan's name of its device, if that is known
    visible: tuple[str, ...] = ()  # the GPUs visible to it, in the framework's order
    local_rank: int = 0
    plan: int = 0  # a digest of the plan's shares, or of the shares computed from ratios
    options: dict[str, bool | str] = {}  # options of its Split, which must be equal on all ranks
    training: str = ""  # a name for the training; rank 0's is used
    fault: str = ""  # why it can't train; the other fields are then unknown


def check_agreement(ranks: Sequence[RankInfo]) -> None:
    """Check that all ranks use the same plan and the same options.

    Raises PlanError or RequestError if they don't, with the same message on every rank.
    """
    for rank, info in enumerate(ranks):
        if info.fault:
            raise PlanError(
                f"Rank {rank}, on {info.machine}, has no plan that it can use: "
                f"{info.fault.rstrip('.')}.",
                "Give every process the same plan file.",
            )
    other = [str(rank) for rank, info in enumerate(ranks) if info.plan != ranks[0].plan]
    if other:
        raise PlanError(
            f"Rank {', '.join(other)} trains with another plan, or another global batch, than "
            f"rank 0.",
            "Give every process the same plan file, or the same ratios.",
        )
    for name, value in ranks[0].options.items():
        for rank, info in enumerate(ranks):
            if (given := info.options.get(name)) != value:
                raise RequestError(
                    f"Rank {rank} has {name}={given!r}, rank 0 has {name}={value!r}.",
                    "Give every process the same.",
                )


def order_shares(active: Sequence[Share], ranks: Sequence[RankInfo]) -> tuple[int, ...]:
    """Return, for each rank, the index in `active` of its share.

    Raises PlanError if a rank has no share, or if two ranks have the same one.
    """
    # Ranks are matched to shares by device. If no rank's device is in the plan, they are matched by
    # host and local rank, or by rank if the shares name no hosts.
    by_device = [_find_by_device(active, info) for info in ranks]
    if any(place is not None for place in by_device):
        return check_share_indices(active, by_device)
    if active[0].host:
        return check_share_indices(active, [_find_by_local_rank(active, info) for info in ranks])
    return tuple(range(len(ranks)))  # nothing distinguishes the devices, so ranks are in order


def check_share_indices(active: Sequence[Share], indices: Sequence[int | None]) -> tuple[int, ...]:
    """Check that each rank has a share of its own, and return the indices of the shares.

    `indices` contains, for each rank, the index of its share in `active`. Raises PlanError if a
    rank has none, or if two ranks have the same one. The message is the same on every rank.
    """
    for rank, place in enumerate(indices):
        if place is None:
            raise PlanError(
                f"Rank {rank} trains on none of the plan's devices: "
                f"{', '.join(map(describe, active))}.",
                "Start it with evener launch, or one process on each of them.",
            )
    taken = Counter(indices)
    for place, share in enumerate(active):
        if taken[place] > 1:
            doubled = " and ".join(str(rank) for rank, each in enumerate(indices) if each == place)
            missing = ", ".join(describe(other) for i, other in enumerate(active) if not taken[i])
            raise PlanError(
                f"Ranks {doubled} all train on {describe(share)}, and none on {missing}.",
                "Start it with evener launch, or one process on each of them.",
            )
    return tuple(place for place in indices if place is not None)


def _find_by_device(active: Sequence[Share], info: RankInfo) -> int | None:
    """Return the index in `active` of the share on a rank's device, or None if there is none."""
    # If the device's name is unknown, the plan's GPUs that the process can see are counted: local
    # rank 0 has the first, local rank 1 the second. A process that sees only one GPU has that one.
    here = {share.device: i for i, share in enumerate(active) if info.host in ("", share.host)}
    if info.device:
        return here.get(info.device)
    found = sorted(here[device] for device in info.visible if device in here)
    # a launcher may make only one GPU visible to each process
    number = 0 if len(info.visible) == 1 else info.local_rank
    return found[number] if number < len(found) else None


def _find_by_local_rank(active: Sequence[Share], info: RankInfo) -> int | None:
    """Return the index in `active` of a rank's share, found by its host and local rank.

    Returns None if its host has too few shares. Raises PlanError if the host isn't in the plan.
    """
    if not any(share.host == info.host for share in active):
        hosts = ", ".join(dict.fromkeys(share.host for share in active))
        raise PlanError(
            f"A process runs on {info.machine}, which is none of the plan's hosts: {hosts}.",
            "Set EVENER_HOST there to the name that the plan has for it.",
        )
    own = [i for i, share in enumerate(active) if share.host == info.host]
    return own[info.local_rank] if info.local_rank < len(own) else None


def divide_by_ratios(
    ratios: Sequence[float] | None, global_batch: int | None, world: int
) -> tuple[int, ...]:
    """Divide a global batch among the ranks by `ratios`, or equally if they are None.

    `world` is the number of ranks. Returns the rows of each rank. Raises RequestError if there is
    no global batch or the ratios are invalid, and PlanError if the batch has fewer rows than ranks.
    """
    # ratios are valid if there are `world` of them and all are above 0
    if global_batch is None:
        raise RequestError(
            "Neither a plan nor a global batch is given.",
            "Give Split(plan) or Split(global_batch=N), or start the script with evener launch.",
        )
    check_global_batch(global_batch, world)
    chosen = [1.0] * world if ratios is None else list(ratios)
    check_ratios(chosen)
    if min(chosen) <= 0:
        raise RequestError(
            f"A ratio of {min(chosen)} leaves a process without work.",
            "Start no process for a device left out.",
        )
    if len(chosen) != world:
        raise RequestError(
            f"There are {len(chosen)} ratios, but {world} processes take part.",
            (
                f"Start the script with torchrun --nproc-per-node {len(chosen)}, or give {world} "
                f"ratios."
            ),
        )
    return apportion(global_batch, chosen)
