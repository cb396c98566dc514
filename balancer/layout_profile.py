"""What a framework's profiler says of each layout: the transfers between devices, and the time they take."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.protocol import Profiled
from evener.balancer.request import ResolvedRequest
from evener.balancer.resolve import make_prober
from evener.balancer.types import Layout

STEPS = 20  # profiled of each layout
LayoutProfile = tuple[str, Profiled | str]  # a layout's name, and its profile or why there is none


def profile_layouts(
    resolved: ResolvedRequest, layouts: Iterable[tuple[str, Layout]], stop: threading.Event
) -> list[LayoutProfile]:
    """Profile these layouts, by name, until `stop` is set."""
    if resolved.machine is not None:
        return [("simulated devices", "they run no framework that could be profiled")]
    prober = make_prober(resolved)
    profiles: list[LayoutProfile] = []
    try:
        for name, layout in layouts:
            if stop.is_set() or not isinstance(prober, ChildProber):
                break
            profiles.append((name, prober.profile(layout, STEPS, stop)))
    finally:
        prober.close()
    return profiles
