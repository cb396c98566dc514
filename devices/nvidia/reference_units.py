"""Reference GPU units: what a model is expected to do, to compare with what was measured.

Source: Digital Research Alliance of Canada, "Allocations and compute scheduling", as the slides "Squeeze more juice out
of a single GPU" give it: RGU = 1.6 * FP32 score + 1.6 * FP16 score + 0.8 * memory score, an A100 of 40 GB having 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

GIB = 1 << 30
UNITS: dict[tuple[str, int], float] = {  # (model, GB of memory) -> RGU
    ("P100", 12): 1.0,
    ("P100", 16): 1.1,
    ("T4", 16): 1.3,
    ("V100", 16): 2.2,
    ("V100", 32): 2.6,
    ("A100", 40): 4.0,
    ("A100", 80): 4.8,
}


def reference_units(name: str, memory_bytes: int | None) -> float | None:
    """The RGU of a GPU by its product name and memory; None for a model that the table doesn't have.

    A driver reports a little less than the nominal memory, so the model's nearest size within a sixth counts.
    """
    words = re.split(r"[^A-Za-z0-9]+", name)
    sizes = {size: units for (model, size), units in UNITS.items() if model in words}
    if not sizes or memory_bytes is None:
        return None
    nearest = min(sizes, key=lambda size: abs(size - memory_bytes / GIB))
    return sizes[nearest] if abs(nearest - memory_bytes / GIB) <= nearest / 6 else None


def over_expected(units: Sequence[float | None], rates: Sequence[float | None]) -> tuple[float | None, ...]:
    """Each device's measured part of all samples/s over its part of all units; None where either is unknown.

    It takes at least two devices with known units and a measured rate.
    """
    known = [i for i, (unit, rate) in enumerate(zip(units, rates, strict=True)) if unit and rate]
    if len(known) < 2:
        return (None,) * len(units)
    all_units = sum(units[i] or 0.0 for i in known)
    all_rates = sum(rates[i] or 0.0 for i in known)
    parts = {i: ((rates[i] or 0.0) / all_rates) / ((units[i] or 1.0) / all_units) for i in known}
    return tuple(parts.get(i) for i in range(len(units)))
