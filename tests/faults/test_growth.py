"""A long-lived process keeps nothing of the sessions that it ran."""

from __future__ import annotations

import gc
import sys

from evener.balancer.request import Request
from tests.support.whole_sessions import drive


def live_objects(sessions: range) -> int:
    """Return the number of Python objects after sessions on simulated devices with other noise."""
    for seed in sessions:
        drive(Request(devices="sim:gtx1080ti,gtx1080,t4,t4", seed=seed, max_global_batch=512))
    ours = [module for name, module in sys.modules.items() if name.startswith("evener.")]
    for cached in {each for module in ours for each in vars(module).values() if callable(each)}:
        getattr(cached, "cache_clear", int)()
    gc.collect()
    return len(gc.get_objects())


def test_sessions_leave_no_objects_behind() -> None:
    """Fits, events and evidence are freed with their session."""
    before = live_objects(range(4))
    grown = live_objects(range(4, 16)) - before
    assert grown < 150
