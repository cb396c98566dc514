"""What a plan keeps of a split's curves and memory, so that the training can change its shares."""

from __future__ import annotations

from evener.balancer.search.machine_model import MachineModel
from evener.balancer.types import Layout
from evener.plan.layout import Knots
from evener.shares.curves import Curve

DIGITS = 6  # significant ones


def describe_curves(model: MachineModel, layout: Layout) -> tuple[tuple[Knots, int], ...]:
    """Each device's curve up to the global batch, and the rows of a pass that surely fit; nothing unless it trains."""
    found: list[tuple[Knots, int]] = [((), 0)] * len(layout.shares)
    for i in layout.active:
        curve = model.in_splits[i]
        if curve is not None:
            most = min(model.safe_limits[i], model.pass_rows[i] or layout.global_batch, layout.global_batch)
            found[i] = _cut(curve, layout.global_batch), max(most, layout.pass_rows[i])
    return tuple(found)


def _cut(curve: Curve, batch: int) -> Knots:
    """The knots below a batch, and the curve there."""
    bends = len(curve.batches) if curve.bent else 1
    knots = [(rows, time) for rows, time in zip(curve.batches[:bends], curve.times, strict=False) if rows < batch - 0.5]
    return tuple((_round(rows), _round(time)) for rows, time in (*knots, (batch, curve.seconds(batch))))


def _round(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")
