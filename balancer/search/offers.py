"""Collect the layouts that take part in the final comparison.

Each requested layout family (kind of layout) proposes its best ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from ..families import PACK, Family, family_of
from ..objectives import find_objective
from ..types import Layout, Observation, OutOfMemory, Timed
from .family_view import FamilyView
from .layouts import RETREATS, Candidate, divide, same_measurement, shrink
from .rows import RowPolicy
from .texts import TextPolicy


class Offers:
    """The layouts that the layout families propose for the final comparison."""

    def __init__(self, view: FamilyView, policy: RowPolicy | TextPolicy) -> None:
        self.view = view
        self.options = view.options
        self._policy = policy
        self._problem = policy.problem
        self._seen = policy.seen

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The layouts to compare, without duplicates.

        A layout that ran out of memory is replaced by a smaller one.
        """
        kept: dict[Layout, Candidate] = {}
        for candidate in self._offered_candidates:
            instead = self._replace_if_out_of_memory(candidate)
            kept.setdefault(instead.layout, instead)
        return tuple(kept.values())

    @cached_property
    def replaced_layouts(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Layouts that ran out of memory, each with the smaller one that replaces it."""
        pairs = [
            (candidate, self._replace_if_out_of_memory(candidate))
            for candidate in self._offered_candidates
        ]
        return tuple((wanted, instead) for wanted, instead in pairs if instead != wanted)

    def list_failed(self) -> list[tuple[Candidate, Observation]]:
        """Return the layouts that failed in the comparison, each with its failure.

        Layouts with several jobs on one device are included only if they failed for every number of
        jobs.
        """
        found = []
        for candidate in self.candidates:
            failure = self._seen.first_failure(candidate.layout)
            if failure is not None:
                found.append((candidate, failure))
        for _, packing in self.view.packings:
            if packing.seen and not any(isinstance(one, Timed) for one in packing.seen):
                smallest = packing.seen[0]
                found.append((Candidate(PACK, smallest.probe.layout), smallest))
        return found

    @cached_property
    def _offered_candidates(self) -> tuple[Candidate, ...]:
        """The proposals of all layout families, including layouts that later ran out of memory."""
        found = [one for family in self.options.wanted for one in self._candidates_of(family)]
        trades_speed = find_objective(self._problem.objective).trades_speed
        # further candidates for an objective that may trade speed for energy
        if trades_speed and isinstance(self._policy, RowPolicy):
            efficient = self._policy.efficient()
            found += [Candidate(family_of(layout), layout, extra=True) for layout in efficient]
        # one of the splits may use a single device, whose family wasn't requested
        return tuple(
            _without_duplicates([one for one in found if one.family in self.options.wanted])
        )

    def _candidates_of(self, family: Family) -> Iterator[Candidate]:
        """Yield the proposals of one layout family."""
        for i, layout in enumerate(family.layouts(self.view)):
            own = layout.kind == family.kind
            extra = i > 0 and layout.traits.by_shares and not family.equal_shares
            # a layout of another kind, such as a single device that beats any split, belongs to
            # that kind's family
            yield Candidate(family if own else family_of(layout), layout, extra)

    def _replace_if_out_of_memory(self, candidate: Candidate) -> Candidate:
        """Return the candidate, or a smaller one if it ran out of memory.

        A requested global batch is kept, and computed in smaller passes. A free batch is reduced.
        """
        fixed = self._problem.global_batch is not None
        if fixed and not (self._problem.micro and candidate.synchronous):
            return candidate
        layout = candidate.layout
        for _ in range(RETREATS):
            failure = self._seen.first_failure(layout)
            if not isinstance(failure, OutOfMemory):
                break
            if fixed:
                smaller = divide(layout, failure.devices)
            else:
                smaller = shrink(layout, self._problem.multiple_of)
            if smaller is None:
                break
            layout = smaller
        return msgspec.structs.replace(candidate, layout=layout)


def _without_duplicates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out layouts that a measurement couldn't distinguish from one earlier in the list."""
    kept: list[Candidate] = []
    splits: list[Layout] = []
    for candidate in candidates:
        layout = candidate.layout
        if layout.by_rows and any(same_measurement(layout, split) for split in splits):
            continue
        kept.append(candidate)
        if layout.traits.together and layout.by_rows:
            splits.append(layout)
    return kept
