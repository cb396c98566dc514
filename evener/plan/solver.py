"""Compute shares from step-time curves, for example if a device of a plan no longer works."""

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
    """Return, for each share of a plan, its device's step time as a function of rows.

    If any share has no curve, none of the curves is used. Instead, each device's step time is
    assumed to be proportional to its rows, and to be the same on all devices with the plan's rows.
    """
    return join_curves([share.curve for share in shares], [share.batch for share in shares])


def join_curves(curves: Sequence[Knots], rows: Sequence[int]) -> tuple[Curve, ...]:
    """Return curves through the given points of rows and seconds, one for each device.

    If any device has fewer than two points, none of the points is used. Instead, step times are
    assumed to be proportional to rows. Each device then takes one second for its number of rows in
    `rows`.
    """
    if all(len(knots) > 1 for knots in curves):
        return tuple(map(_join_knots, curves))
    return proportional_curves(rows)


def proportional_curves(rows: Sequence[float]) -> tuple[Curve, ...]:
    """Return a curve for each device, on which step time is proportional to rows.

    `rows` has a number of rows for each device. A step with that many rows takes the device one
    second.
    """
    return tuple(Curve((0.0,), (0.0,), 1 / row) for row in rows)


def scale(curve: Curve, factor: float) -> Curve:
    """Return a curve with all times multiplied by `factor`."""
    times = tuple(time * factor for time in curve.times)
    return Curve(curve.batches, times, curve.slope * factor)


def solve_shares(
    curves: Sequence[Curve],
    batch: int,
    pass_limits: Sequence[int],
    passes: bool | Sequence[int],
    quantum: int = 1,
    extras: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Return the shares of `batch` rows that make a step fastest, or None if they don't fit.

    - `curves`: for each device, its step time as a function of rows.
    - `pass_limits`: for each device, the maximum rows of a share that is computed in one pass; 0
      for no limit.
    - `passes`: True if larger shares may be computed in several passes, and False if not; or a list
      that has, for each device, the rows per pass of such shares.
    - `quantum`: each share is a multiple of this number of rows.
    - `extras`: for each device, how many seconds longer each pass after the first takes than its
      time on the curve.
    """
    count = len(curves)
    more = extras or (0.0,) * count
    rows = [limit * passes for limit in pass_limits] if isinstance(passes, bool) else passes
    devices = []
    for i, (curve, pass_limit) in enumerate(zip(curves, pass_limits, strict=True)):
        if pass_limit and rows[i]:
            device = DeviceCurve(i, PassCurve(curve, pass_limit, rows[i], more[i]), batch)
        else:
            device = DeviceCurve(i, curve, min(pass_limit or batch, batch))
        devices.append(device)
    no_costs = (0.0,) * (count + 1)
    found = split_fixed(devices, no_costs, batch, quantum, min_devices=count)
    if found is None:
        return None
    return tuple(share for _, share in found.shares)


def pass_rows(shares: Sequence[int], pass_limits: Sequence[int]) -> tuple[int, ...]:
    """Return the rows per pass of each share, given the maximum rows per pass.

    In `pass_limits`, 0 means that there is no limit.
    """
    pairs = zip(shares, pass_limits, strict=True)
    return tuple(min(share, pass_limit) if pass_limit else share for share, pass_limit in pairs)


def _join_knots(knots: Knots) -> Curve:
    """Return a curve that is linear between these points of rows and seconds."""
    # beyond the last point, the curve continues with the slope of the last segment
    (rows, seconds), (last, end) = knots[-2:]
    batches, times = zip(*knots, strict=True)
    return Curve(batches, times, (end - seconds) / (last - rows))


def leave_out(plan: Plan, removed: Collection[tuple[str, str]]) -> Plan:
    """Return a plan without the devices in `removed`. Their rows go to the other devices.

    The global batch stays the same. `removed` contains pairs of host and device id. Raises
    PlanError if no remaining device computes rows, or if only one device of a sharded model
    remains.
    """
    # The remaining devices get the shares that are fastest by their curves and fit in memory, in
    # passes if necessary. The throughput is only estimated: the plan's throughput times the
    # fraction of the batch that the remaining devices had before.
    layout = plan.layout
    left = tuple(share for share in layout.active if (share.host, share.device) not in removed)
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
    if not part:
        names = ", ".join(map(describe, left))
        raise PlanError(
            f"The devices that are left compute no rows in the plan: {names}.",
            "Run evener doctor to see why the others aren't there.",
        )
    speed = plan.throughput
    rates = {
        name: getattr(speed, name) * part
        for name in ("samples_per_second", "low", "high", "tokens_per_second")
    }
    names = ", ".join(describe(share) for share in layout.active if share not in left)
    return msgspec.structs.replace(
        plan,
        layout=_divide_batch(layout, left, part),
        throughput=msgspec.structs.replace(speed, **rates),
        warnings=(*plan.warnings, f"Left out, because nothing computes there: {names}."),
    )


def _divide_batch(layout: PlanLayout, remaining: Sequence[Share], part: float) -> PlanLayout:
    """Divide a layout's batch among the shares in `remaining`, and return the new layout.

    `part` is the fraction of the batch that these shares had before the others were removed.
    """
    rows, micros = _divide_rows(layout, remaining)
    held = sum(share.state for share in remaining)
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
    several = len(remaining) > 1
    return make_layout(
        layout.kind if several else "solo",
        tuple(shares),
        tuple(batches),
        micros=tuple(passes),
        ratios=tuple(ratios) if layout.by_cost else None,
        engine=layout.engine if several else "",
    )


def _divide_rows(
    layout: PlanLayout, remaining: Sequence[Share]
) -> tuple[dict[Share, int], dict[Share, int]]:
    """Return the rows per step and the rows per pass of each remaining share."""
    # The rows follow from the curves. If the plan's ratios are of costs, or the curves give no
    # solution, the rows are divided by the ratios.
    computing = [share for share in remaining if share.batch]
    pass_limits = tuple(_largest_pass(share) for share in computing)
    rows = None if layout.by_cost else _solve_by_curves(layout, computing, pass_limits)
    if rows is None:
        rows = apportion(layout.global_batch, [share.ratio for share in computing])
    without = {share: 0 for share in remaining if not share.batch}  # they only hold state
    by_share = dict(zip(computing, rows, strict=True))
    passes = dict(zip(computing, pass_rows(rows, pass_limits), strict=True))
    return by_share | without, passes | without


def _largest_pass(share: Share) -> int:
    """Return how many rows fit in a pass on a share's device, or 0 if the plan doesn't say."""
    if share.most:
        return share.most
    return share.micro if share.micro < share.batch else 0


def _solve_by_curves(
    layout: PlanLayout, remaining: Sequence[Share], pass_limits: tuple[int, ...]
) -> Sequence[int] | None:
    """Return the rows of the remaining shares that make a step fastest, according to their curves.

    Returns None if no shares fit.
    """
    curves = read_curves(remaining)
    in_passes = any(share.micro < share.batch for share in layout.active)
    if not in_passes:
        rows = solve_shares(curves, layout.global_batch, pass_limits, False)
        if rows:
            return rows
    return solve_shares(curves, layout.global_batch, pass_limits, True) or None
