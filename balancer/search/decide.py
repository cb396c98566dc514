"""The stages in their order: the first that wants a probe gets it, and says in one sentence what for."""

from __future__ import annotations

from functools import cached_property

import msgspec

from evener.balancer.search import race_stage, solo_stage, split_stage
from evener.balancer.search.budget import Purse, Rule
from evener.balancer.search.observations import Ledger
from evener.balancer.search.predictions import View
from evener.balancer.types import Layout, Probe

WHY_SOLO = (
    "a first time",
    "the slope of time and memory",
    "the largest batch that matters, or one on the way to it",
    "what is still in doubt",
)


class Decision(msgspec.Struct, frozen=True):
    """What to measure now and why; without probes, the rule that ended the search in words."""

    probes: tuple[Probe, ...]
    doing: str
    ended: str | None = None


class Judged(msgspec.Struct, frozen=True, dict=True):
    """What was known before the race, and who races on the strength of it."""

    view: View

    @cached_property
    def rivals(self) -> tuple[Layout, ...]:
        """The contenders, the favourite first."""
        return race_stage.contenders(self.view)


def decide(known: Judged, everything: Ledger) -> Decision:
    """The next probes; a race that has begun is left for an earlier stage if its splits fell or a budget grew."""
    view, purse = known.view, Purse(known.view.problem, everything)
    if again := everything.open_failures():
        stage = again[0].stage
        same = tuple(probe for probe in again if probe.stage == stage)
        return Decision(same if stage == "solo" else same[:1], "Tries once more what failed.")
    if not view.live:
        return Decision((), "Nothing more can be measured.", nobody(view))
    fallen = bool(view.splits) and not view.standing_splits
    if purse.budget is None or fallen or not everything.timed(["race"]) or purse.affords("split", 0.0):
        if probes := solo_stage.next_probes(view, purse):
            return Decision(probes, f"Measures every device alone: {WHY_SOLO[min(probes[0].turn, 3)]}.")
        if probes := split_stage.next_probe(view, purse):
            return Decision(probes, _split_words(view, probes[0]))
    rivals = race_stage.with_overlooked(view, known.rivals, everything)
    probes, rule = race_stage.next_probe(view, rivals, everything, purse)
    if probes:
        return Decision(probes, f"Races {len(rivals)} layouts in turns; this is turn {probes[0].turn + 1}.")
    if rule is None:
        rule = Rule.BUDGET if everything.timed(["split"]) or view.lanes_hold_batch else Rule.NO_FIT
    return Decision((), "Done.", rule.value)


def nobody(view: View) -> str:
    """Why no device can be used, each with its smallest failure."""
    words = [
        f"device {i}: {device.lost or f'out of memory at batch {device.memory.failed}'}"
        for i, device in enumerate(view.devices)
    ]
    rule = Rule.ALL_LOST if all(device.lost for device in view.devices) else Rule.NO_ROOM
    return f"{rule.value}: {'; '.join(words)}."


def _split_words(view: View, probe: Probe) -> str:
    if probe.layout.kind == "solo":
        return f"Measures device {probe.layout.active[0]} alone with the others at rest: it may beat every split."
    count = len(probe.layout.active)
    first = "the fastest that the curves predict" if not view.splits else "what the last ones taught"
    return f"Measures a real step split over {count} devices: {first}."
