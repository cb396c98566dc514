"""What the scout may spend of a budget, so that every wanted layout can be measured after it. Pure."""

from __future__ import annotations

import msgspec

from evener.balancer.search.layouts import Wanted, device_counts
from evener.balancer.search.probe_costs import LEAST_STEPS, STARTS
from evener.balancer.types import Problem

SHARE, SHARE_SOLO = 0.4, 0.25  # of the budget, with and without splits
MOST = 0.75  # of the budget, where children start slowly
SOLO_STAGE = 2.0  # the search gives its solo stage one half of what it has: the starts, and this part of the budget,
SOLO_SHARE, SOLO_SECONDS = 0.15, 15.0  # or so many seconds, if that is less
STEPS_SHARE = 0.4  # of the time that no start takes, for one probe of every layout
QUICKEST_STEP = 0.05  # seconds; however short the budget, steps up to it are tried


def within(problem: Problem, wanted: Wanted, start_seconds: float) -> Problem:
    """The problem with a budget for the scout, and no steps so long that one probe of each layout can't be paid.

    `start_seconds`: how long the children of one device take to start; 0 where it is not known, or nothing.
    """
    budget = problem.budget_seconds
    if budget is None:
        return problem
    splits = "split" in wanted.families and problem.devices > 1
    share = SHARE if splits else SHARE_SOLO
    starts, probes = _to_come(problem, wanted)
    free = max(0.0, budget - starts * start_seconds)
    alone = SOLO_STAGE * (start_seconds + min(SOLO_SHARE * budget, SOLO_SECONDS))
    step = max(QUICKEST_STEP, STEPS_SHARE * free / (LEAST_STEPS * probes))
    return msgspec.structs.replace(
        problem,
        budget_seconds=max(share * budget, min(MOST * budget, alone)) if start_seconds else share * budget,
        longest_step_seconds=step,
    )


def _to_come(problem: Problem, wanted: Wanted) -> tuple[float, float]:
    """What one probe of every layout costs: starts, in those of one device, and measurements, in those of one step."""
    families, devices = wanted.families, problem.devices
    starts, probes = STARTS["solo"], 1.0
    groups = len(device_counts(devices)) if "even" in families else 0
    if "split" in families and devices > 1:
        groups, probes = max(1, groups), probes + 1
    starts, probes = starts + groups * STARTS["split"], probes + groups
    if "place" in families:
        starts += len(wanted.placements) * STARTS["place"]
        probes += len(wanted.placements)
    if "pack" in families:
        starts += 2 * len(wanted.pack_modes) * STARTS["pack"]
        probes += 2 * len(wanted.pack_modes)
    turned = len(wanted.knobs)
    return starts + turned * STARTS["solo"], probes + turned
