"""The split stage: the real synchronous step, two to four times (six of stairs), each with what the last one taught.

The first split is the fastest that the solo curves predict; its step gives the cost of keeping in step and, where the
devices' own times are known, one point more of every curve. It ends when the prediction says nothing new.
"""

from __future__ import annotations

from collections.abc import Iterator

from evener.balancer.search.budget import Purse
from evener.balancer.search.model.device_model import UNMEASURABLE
from evener.balancer.search.predictions import View
from evener.balancer.search.waterfill import Fill
from evener.balancer.types import Failed, Probe

MOST_SPLITS = 4
MOST_OF_STAIRS = 6  # splits, where times come in stairs: each halves what is not known of their edges
PATIENT_SPLITS = 8  # while none has run
MOST_FAILED = 2  # splits that can't run, after which there are none
NEAR_GLOBAL = 0.04  # a tolerable global batch so near to a measured one, relatively, is not measured again
PROMISE = 0.02  # relative: a gain that one device alone is not believed to have before it was measured
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
    left = _most(view) - len(view.splits)
    return (Probe(layout, "split", purse.seconds("split", wanted.seconds, left)),)


def _choices(view: View) -> Iterator[tuple[Fill | None, bool]]:
    """What may be worth a split probe and whether it is; each is dear, so the next comes only if it is asked for."""
    yield view.fastest_split, _gains(view, view.fastest_split)
    yield view.tolerable, _smaller(view, view.tolerable)
    yield view.hopeful_split, _gains(view, view.hopeful_split)


def next_split(view: View) -> Fill | None:
    """The fill that is worth a split probe; None when nothing is."""
    known = [seen for seen in view.ledger.of("split") if seen.probe.layout.kind == "split"]
    tried = [seen.probe.layout for seen in known]
    failed = sum(1 for seen in known if isinstance(seen, Failed))
    most = _most(view) if view.splits else PATIENT_SPLITS
    if len(view.live) < 2 or sum(1 for _ in view.ledger.of("split")) >= most or failed >= MOST_FAILED:
        return None
    for wanted, worth in _choices(view):
        if wanted is None or len(wanted.shares) < 2 or not worth:
            continue
        layout = view.layout(wanted)
        if not any(view.same(layout, other) for other in tried):
            return wanted
    return None


def next_single(view: View) -> Fill | None:
    """One device alone, the others at rest: at a batch it was not seen to hold, or that contention may have hidden."""
    if not view.splits and len(view.live) > 1:
        return None
    if len(view.ledger.of("split")) >= _most(view):
        return None
    known = max((view.predicted_rate(seen.probe.layout) for seen in view.standing_splits), default=0.0)
    known = max(known, *(seen.samples_per_second for seen in view.rested.values()), 0.0)
    fills = [f for i in view.live if (f := view.single(i)) and _untried(view, f, known)]
    lone = max(fills, key=lambda f: f.samples_per_second, default=None)
    if lone is None:
        return None
    if len(view.live) > 1:
        return lone if lone.samples_per_second * HIDDEN > known else None
    ((position, batch),) = lone.shares
    fits = batch <= view.devices[position].memory.safe(view.cap, view.quantum)
    return None if fits and not (_edge(view, lone, known) or _promises(view, lone, known)) else lone


def _most(view: View) -> int:
    return MOST_OF_STAIRS if view.stepped else MOST_SPLITS


def _untried(view: View, lone: Fill, known: float) -> bool:
    """Whether a device was not measured at rest; in stairs it is measured again where another edge should gain."""
    ((position, batch),) = lone.shares
    tried = [
        seen.probe.layout.global_batch
        for seen in view.ledger.of("split")
        if seen.probe.layout.kind == "solo" and seen.probe.layout.active == (position,)
    ]
    return not tried or (batch not in tried and (_edge(view, lone, known) or _promises(view, lone, known)))


def _edge(view: View, lone: Fill, known: float) -> bool:
    """Whether a device alone is predicted to gain, by the edge of a stair, over all that was measured."""
    ((position, batch),) = lone.shares
    curve, alone = view.alone[position], view.devices[position].alone
    if curve is None or not curve.stair or any(p.batch == batch for p in alone):
        return False
    known = max(known, *(p.batch / p.seconds for p in alone))
    return lone.samples_per_second > known * (1 + UNMEASURABLE)


def _promises(view: View, lone: Fill, known: float) -> bool:
    """Whether the only device is predicted to gain so much over all that was measured that it has to be seen."""
    ((position, batch),) = lone.shares
    alone = view.devices[position].alone
    if len(view.live) > 1 or any(p.batch == batch for p in alone):
        return False
    return lone.samples_per_second > max(known, *(p.batch / p.seconds for p in alone)) * (1 + PROMISE)


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
