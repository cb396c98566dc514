"""Plans for given devices."""

from __future__ import annotations

from typing import Any

import msgspec

from evener.plan.file import (
    Fingerprint,
    Plan,
    PlanLayout,
    SearchSummary,
    Share,
    Throughput,
    make_layout,
)

# for two slices of the CPU, as a person writes it
UNEVEN = """
[[layout.share]]
device = "cpu-0-of-2"
batch = 3
[[layout.share]]
device = "cpu-1-of-2"
batch = 1
"""


def plan(devices: list[str], hosts: tuple[str, ...] = (), **changes: Any) -> Plan:
    """Return a plan for these devices, each with two rows less than the previous one.

    A device with "(out)" after it is left out.
    """
    shares = tuple(
        Share(
            device.removesuffix("(out)"),
            i,
            "a device",
            0,
            0.0,
            host=(hosts or [""] * len(devices))[i],
        )
        for i, device in enumerate(devices)
    )
    batches = tuple(
        0 if device.endswith("(out)") else 2 * (len(devices) - i)
        for i, device in enumerate(devices)
    )
    kind = changes.pop("kind", "split" if sum(map(bool, batches)) > 1 else "solo")
    layout = make_layout(
        kind, shares, batches, engine=changes.pop("engine", ""), placement="by layer"
    )
    return make_plan(layout, **changes)


def make_plan(layout: PlanLayout, **changes: Any) -> Plan:
    """Return a plan with this layout, and arbitrary other values."""
    made = Plan(
        created="2026-11-22T12:00:00Z",
        workload="torch_mnist",
        framework="torch",
        precision="float32",
        xla=False,
        layout=layout,
        throughput=Throughput(100.0, 99.0, 101.0),
        evidence=(),
        search=SearchSummary(1, 0, 1.0, 0, "test"),
        fingerprint=Fingerprint((), "", {}, ""),
    )
    return msgspec.structs.replace(made, **changes)
