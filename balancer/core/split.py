"""The split stage: the real synchronous step, two to four times, each time with what the last one taught.

The first split is the fastest that the solo curves predict; its step gives the cost of keeping in step and, where the
devices' own times are known, one point more of every curve. It ends when the prediction says nothing new.
"""

from __future__ import annotations

from balancer.core.fill import Fill
from balancer.core.stop import Purse
from balancer.core.view import UNMEASURABLE, View, near
from balancer.records import Failed, Probe

MOST_SPLITS = 4
PATIENT_SPLITS = 8  # while none has run
MOST_FAILED = 2  # splits that can't run, after which there are none
NEAR_GLOBAL = 0.04  # a tolerable global batch so near to a measured one, relatively, is not measured again
HIDDEN = 1.3  # a device may be so many times as fast alone as it was with the others at work


def next_probe(view: View, purse: Purse) -> tuple[Probe, ...]:
    """The next split to measure, as a tuple of one; empty when the stage is over."""
    wanted = next_split(view) or next_single(view)
    if wanted is None:
        return ()
    layout = view.layout(wanted)
    first = not view.splits
    if not purse.affords("race" if first else "split", wanted.seconds):
        return ()
    left = MOST_SPLITS - len(view.splits)
    return (Probe(layout, "split", purse.seconds("split", wanted.seconds, left)),)


def next_split(view: View) -> Fill | None:
    """The fill that is worth a split probe; None when nothing is."""
    known = [seen for seen in view.ledger.of("split") if seen.probe.layout.kind == "split"]
    tried = [seen.probe.layout for seen in known]
    failed = sum(1 for seen in known if isinstance(seen, Failed))
    most = MOST_SPLITS if view.splits else PATIENT_SPLITS
    if len(view.live) < 2 or sum(1 for _ in view.ledger.of("split")) >= most or failed >= MOST_FAILED:
        return None
    best = view.fastest_split
    hope = view.hopeful_split
    choices = ((best, _gains), (view.tolerable, _smaller), (hope, _gains))
    for wanted, worth in choices:
        if wanted is None or len(wanted.shares) < 2 or not worth(view, wanted):
            continue
        layout = view.layout(wanted)
        if not any(near(layout, other) for other in tried):
            return wanted
    return None


def next_single(view: View) -> Fill | None:
    """One device alone, the others at rest: at a batch it was not seen to hold, or that contention may have hidden."""
    if not view.splits and len(view.live) > 1:
        return None
    if sum(1 for _ in view.ledger.of("split")) >= MOST_SPLITS:
        return None
    known = max((view.predicted_rate(seen.probe.layout) for seen in view.standing_splits), default=0.0)
    known = max(known, *(seen.samples_per_second for seen in view.rested.values()), 0.0)
    tried = {seen.probe.layout.active[0] for seen in view.ledger.of("split") if seen.probe.layout.kind == "solo"}
    fills = [f for i in view.live if i not in tried and (f := view.single(i))]
    lone = max(fills, key=lambda f: f.samples_per_second, default=None)
    if lone is None:
        return None
    if len(view.live) > 1:
        return lone if lone.samples_per_second * HIDDEN > known else None
    ((position, batch),) = lone.shares
    return None if batch <= view.devices[position].memory.safe(view.cap, view.quantum) else lone


def _gains(view: View, wanted: Fill | None) -> bool:
    """Whether the fastest split is predicted to beat everything measured, and one device alone, by what can be seen."""
    if wanted is None:
        return False
    if not view.standing_splits:
        return True
    known = max(view.predicted_rate(seen.probe.layout) for seen in view.standing_splits)
    known = max(known, view.single_rate)
    return wanted.samples_per_second > known * (1 + UNMEASURABLE)


def _smaller(view: View, wanted: Fill | None) -> bool:
    """Whether the smallest tolerable global batch is below every measured one that is fast enough."""
    if wanted is None:
        return False
    enough = [
        seen.probe.layout.global_batch
        for seen in view.standing_splits
        if view.predicted_rate(seen.probe.layout) >= wanted.samples_per_second * (1 - UNMEASURABLE)
    ]
    return not enough or wanted.global_batch < min(enough) * (1 - NEAR_GLOBAL)
