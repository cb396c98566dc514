"""Probers that start real processes, for tests that don't need a whole session."""

from __future__ import annotations

from typing import Any

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.measurement import Timeouts
from evener.balancer.request import Job, Request
from evener.devices.types import Device


def child_prober(
    devices: tuple[Device, ...],
    workload: str = "synthetic",
    framework: str = "none",
    timeouts: Timeouts | None = None,
    **settings: Any,
) -> ChildProber:
    """Return a prober of the workload with these settings; the caller closes it."""
    return ChildProber(Job(Request(settings=settings), devices, workload, framework), timeouts)
