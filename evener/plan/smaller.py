"""A plan for the devices that are left: those that are gone get no rows, and the others take them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ..errors import PlanError
from ..shares.whole_rows import apportion
from .check import describe
from .file import Plan, PlanLayout, Share, make_layout
from .solver import pass_rows, read_curves, solve_shares


def leave_out(plan: Plan, gone: Collection[tuple[str, str]]) -> Plan:
    """The plan without these devices, each a host and a device of it, at the same global batch.

    Shares are those that the curves predict to be done first, within memory; passes are used where the plan had some,
    or where memory holds the batch in no other way. The throughput is that of the devices that are left, which nobody
    has measured together. PlanError if none is left.
    """
    layout = plan.layout
    left = tuple(share for share in layout.active if (share.host, share.device) not in gone)
    if not left:
        names = ", ".join(map(describe, layout.active))
        raise PlanError(f"None of the plan's devices is left: {names}.", "Run evener doctor to see why.")
    part = sum(share.ratio for share in left)
    speed = plan.throughput
    rates = {name: getattr(speed, name) * part for name in ("samples_per_second", "low", "high", "tokens_per_second")}
    names = ", ".join(describe(share) for share in layout.active if share not in left)
    return msgspec.structs.replace(
        plan,
        layout=_divide(layout, left, part),
        throughput=msgspec.structs.replace(speed, **rates),
        warnings=(*plan.warnings, f"Left out, because nothing computes there: {names}."),
    )


def _divide(layout: PlanLayout, left: Sequence[Share], part: float) -> PlanLayout:
    """The layout with the whole batch on the shares that are left, which had this part of it."""
    walls = tuple(share.most or (share.micro if share.micro < share.batch else 0) for share in left)
    by_rows = apportion(layout.global_batch, [share.ratio for share in left])
    solved = None
    if not layout.by_cost:
        in_passes = any(share.micro < share.batch for share in layout.active)
        for passes in (True,) if in_passes else (False, True):
            solved = solved or solve_shares(read_curves(left), layout.global_batch, walls, passes)
    rows = solved or by_rows
    sizes = dict(zip(left, zip(rows, pass_rows(rows, walls), strict=True), strict=True))
    batches, micros = zip(*(sizes.get(share, (0, 0)) for share in layout.share), strict=True)
    ratios = tuple(share.ratio / part if share in sizes else 0.0 for share in layout.share)
    return make_layout(
        "split" if len(left) > 1 else "solo",
        layout.share,
        batches,
        micros=micros,
        ratios=ratios if layout.by_cost else None,
        engine=layout.engine if len(left) > 1 else "",
    )
