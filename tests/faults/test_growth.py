"""What a long-lived process keeps of the sessions that it ran: nothing."""

from __future__ import annotations

import gc
import sys

from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session


def live_objects(sessions: range) -> int:
    """Python's objects after these sessions on simulated devices, which differ by their noise;
    caches have bounds.
    """
    for seed in sessions:
        session = Session(
            open_run(
                Request(devices="sim:gtx1080ti,gtx1080,t4,t4", seed=seed, max_global_batch=512)
            )
        )
        list(session.events())
        session.close()
    ours = [module for name, module in sys.modules.items() if name.startswith("evener.")]
    for cached in {each for module in ours for each in vars(module).values() if callable(each)}:
        getattr(cached, "cache_clear", int)()
    gc.collect()
    return len(gc.get_objects())


def test_sessions_leave_no_objects_behind() -> None:
    """Fits, events and evidence go with the session that made them; what is loaded once stays, and
    was before.
    """
    before = live_objects(range(4))
    grown = live_objects(range(4, 16)) - before
    assert grown < 150
