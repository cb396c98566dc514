"""The shares of a batch that are done first, by the curves and walls that a plan has for its
devices. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ..errors import PlanError
from ..shares.curves import Curve, PassCurve
from ..shares.waterfill import DeviceCurve, split_fixed
from ..shares.whole_rows import apportion
from .check import describe
from .file import Plan, PlanLayout, make_layout
from .layout import Knots, Share


def read_curves(shares: Sequence[Share]) -> tuple[Curve, ...]:
    """The curve of each active share; where one has none, all take times in proportion to rows."""
    return join_curves([share.curve for share in shares], [share.batch for share in shares])


def join_curves(curves: Sequence[Knots], rows: Sequence[int]) -> tuple[Curve, ...]:
    """The curve through each device's knots; where one has none, all take times in proportion to
    `rows`.
    """
    if all(len(knots) > 1 for knots in curves):
        return tuple(map(_join_knots, curves))
    return proportional_curves(rows)


def proportional_curves(rows: Sequence[float]) -> tuple[Curve, ...]:
    """Curves without fixed costs, on which these rows take one second on every device."""
    return tuple(Curve((0.0,), (0.0,), 1 / each) for each in rows)


def scale(curve: Curve, factor: float) -> Curve:
    """The curve of a device that takes `factor` times as long."""
    times = tuple(time * factor for time in curve.times)
    return Curve(curve.batches, times, curve.slope * factor)


def solve_shares(
    curves: Sequence[Curve],
    batch: int,
    walls: Sequence[int],
    passes: bool | Sequence[bool],
    quantum: int = 1,
    extras: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Rows of each device, `quantum` or more, that sum to `batch` and are done first; None if they
    don't fit.

    A wall is the most rows of a pass that a device's memory holds, 0 where there is none. Without
    `passes`, of all or of each device, no share is above its wall. `extras` are the seconds that
    each further pass costs a device beside its rows.
    """
    count = len(curves)
    more = extras or (0.0,) * count
    cut = (passes,) * count if isinstance(passes, bool) else passes
    devices = []
    for i, (curve, wall) in enumerate(zip(curves, walls, strict=True)):
        if wall and cut[i]:
            device = DeviceCurve(i, PassCurve(curve, wall, wall, more[i]), batch)
        else:
            device = DeviceCurve(i, curve, min(wall or batch, batch))
        devices.append(device)
    no_costs = (0.0,) * (count + 1)
    found = split_fixed(devices, no_costs, batch, quantum, fewest=count)
    if found is None:
        return None
    return tuple(share for _, share in found.shares)


def pass_rows(shares: Sequence[int], walls: Sequence[int]) -> tuple[int, ...]:
    """The most rows of each pass of these shares: all where they fit at once, else those of the
    wall.
    """
    pairs = zip(shares, walls, strict=True)
    return tuple(min(share, wall) if wall else share for share, wall in pairs)


def _join_knots(knots: Knots) -> Curve:
    """The broken line through (rows, seconds), straight beyond the last as before it."""
    (rows, seconds), (last, end) = knots[-2:]
    batches, times = zip(*knots, strict=True)
    return Curve(batches, times, (end - seconds) / (last - rows))


def leave_out(plan: Plan, gone: Collection[tuple[str, str]]) -> Plan:
    """The plan without these devices, each a host and a device of it, at the same global batch.

    Shares are those that the curves predict to be done first, within memory; passes are used where
    the plan had some, or where memory holds the batch in no other way. The throughput is that of
    the devices that are left, which nobody has measured together. PlanError if none is left.
    """
    layout = plan.layout
    left = tuple(share for share in layout.active if (share.host, share.device) not in gone)
    if not left:
        names = ", ".join(map(describe, layout.active))
        raise PlanError(
            f"None of the plan's devices is left: {names}.", "Run evener doctor to see why."
        )
    if layout.traits.sharded and len(left) == 1:
        raise PlanError(
            f"{describe(left[0])} alone is left, and the plan has it hold a part of the model.",
            "Run evener doctor to see why.",
        )
    part = sum(share.ratio for share in left)
    speed = plan.throughput
    rates = {
        name: getattr(speed, name) * part
        for name in ("samples_per_second", "low", "high", "tokens_per_second")
    }
    names = ", ".join(describe(share) for share in layout.active if share not in left)
    return msgspec.structs.replace(
        plan,
        layout=_divide(layout, left, part),
        throughput=msgspec.structs.replace(speed, **rates),
        warnings=(*plan.warnings, f"Left out, because nothing computes there: {names}."),
    )


def _divide(layout: PlanLayout, left: Sequence[Share], part: float) -> PlanLayout:
    """The layout with the whole batch on the shares that are left, which had this part of it."""
    rows, micros = _rows_of(layout, left)
    held = sum(share.state for share in left)
    shares = []
    batches = []
    passes = []
    ratios = []
    for share in layout.share:
        stays = share in rows
        state = share.state / held if held and stays else 0.0
        shares.append(msgspec.structs.replace(share, state=state, held_bytes=0, peak_bytes=0))
        batches.append(rows.get(share, 0))
        passes.append(micros.get(share, 0))
        ratios.append(share.ratio / part if stays else 0.0)
    several = len(left) > 1
    return make_layout(
        layout.kind if several else "solo",
        tuple(shares),
        tuple(batches),
        micros=tuple(passes),
        ratios=tuple(ratios) if layout.by_cost else None,
        engine=layout.engine if several else "",
    )


def _rows_of(
    layout: PlanLayout, left: Sequence[Share]
) -> tuple[dict[Share, int], dict[Share, int]]:
    """The rows of each share that is left, and of each of its passes: by the devices' curves where
    the plan has them, else in proportion to the shares.
    """
    walls = tuple(_largest_pass(share) for share in left)
    rows = None if layout.by_cost else _solve(layout, left, walls)
    if rows is None:
        rows = apportion(layout.global_batch, [share.ratio for share in left])
    by_share = dict(zip(left, rows, strict=True))
    return by_share, dict(zip(left, pass_rows(rows, walls), strict=True))


def _largest_pass(share: Share) -> int:
    """The most rows that a device surely holds at once; 0 where the plan doesn't say."""
    if share.most:
        return share.most
    return share.micro if share.micro < share.batch else 0


def _solve(
    layout: PlanLayout, left: Sequence[Share], walls: tuple[int, ...]
) -> Sequence[int] | None:
    """The fastest rows by the devices' curves, in passes where the plan has them or it doesn't fit
    otherwise; None where no rows fit.
    """
    curves = read_curves(left)
    in_passes = any(share.micro < share.batch for share in layout.active)
    if not in_passes:
        rows = solve_shares(curves, layout.global_batch, walls, False)
        if rows:
            return rows
    return solve_shares(curves, layout.global_batch, walls, True) or None
