"""The profile of each layout by its framework: the transfers between devices, and the time they take."""

from __future__ import annotations

import threading
from contextlib import closing

from .probes.child_prober import ChildProber
from .probes.make import make_prober
from .probes.protocol import Profiled
from .request import Job
from .result.layout_names import name_candidate
from .search.search import Search

STEPS = 20  # profiled of each layout
LayoutProfile = tuple[str, Profiled | str]  # a layout's name, and its profile or why there is none


def profile_ranking(resolved: Job, search: Search, stop: threading.Event) -> list[LayoutProfile]:
    """Profile the best single device and the layouts of the ranking that use several, until `stop` is set."""
    if resolved.machine is not None:
        return [("simulated devices", "they run no framework that could be profiled")]
    ranked = [one.candidate for one in search.ranking()]
    profiles: list[LayoutProfile] = []
    with closing(make_prober(resolved)) as prober:
        for one in ranked:
            if stop.is_set() or not isinstance(prober, ChildProber):
                break
            if one.layout.traits.alone or len(one.layout.active) > 1:
                name = name_candidate(one, len(resolved.devices))
                profiles.append((name, prober.profile(one.layout, STEPS, stop)))
    return profiles
