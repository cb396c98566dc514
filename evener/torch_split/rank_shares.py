"""The rows of each rank in a full step: by a plan that fits what is here, or by ratios."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from evener.errors import RequestError
from evener.passes import batch_in_one_pass
from evener.plan import Plan, Share
from evener.plan_check import check_fit, check_global_batch, describe
from evener.shares import apportion, check_ratios
from evener.torch_split.process import Stand, present


def plan_shares(
    plan: Plan,
    ratios: Sequence[float] | None,
    global_batch: int | None,
    stand: Stand,
    gpus: dict[str, int],
    strict: bool,
) -> tuple[int, ...]:
    """By the plan, with a warning where it was measured with something else than what is here.

    PlanError where it can't train here, with `strict` also instead of a warning.
    """
    if ratios is not None:
        raise RequestError("Both a plan and ratios are given.", "Give one of them; the plan has its own ratios.")
    differences = check_fit(
        plan,
        devices=present(gpus, plan.layout.active),
        world=stand.world,
        workload_digest=None,
        strict=strict,
        global_batch=global_batch,
        framework="torch",
    )
    for difference in differences:
        warnings.warn(difference, stacklevel=3)
    held = ", ".join(f"{describe(share)} to {share.limit}" for share in plan.layout.active if share.limit)
    if held and stand.rank == 0:  # one process says it for all
        warnings.warn(f"The plan was measured with limits that a training doesn't have: {held}.", stacklevel=3)
    return tuple(size for size, share in zip(plan.shares(global_batch), plan.layout.share, strict=True) if share.batch)


def plan_micros(plan: Plan, global_batch: int | None) -> tuple[int, ...]:
    """The most rows that each rank computes in one pass."""
    return tuple(filter(None, plan.micros(global_batch)))


def shares_to_evaluate(shares: Sequence[int], micros: Sequence[int]) -> tuple[int, ...]:
    """Those of a batch that each rank computes in one pass: validation isn't cut into passes."""
    if tuple(shares) == tuple(micros):
        return tuple(shares)
    return apportion(max(len(shares), batch_in_one_pass(shares, micros)), shares)


def ratio_shares(ratios: Sequence[float] | None, global_batch: int | None, world: int) -> tuple[int, ...]:
    """By the ratios, or as evenly as can be; RequestError if there isn't one for each process."""
    if global_batch is None:
        raise RequestError("Neither a plan nor a global batch is given.", "Give Split(plan) or Split(global_batch=N).")
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


def unplanned_share(device: Any, gpus: dict[str, int]) -> Share:
    """The device as the monitor shows it where no plan names it."""
    names = [identity for identity, number in gpus.items() if device.type == "cuda" and number == device.index]
    return Share(names[0] if names else str(device), device.index or 0, str(device), 0, 0.0)
