"""The layouts of a race over rows of unequal length: one device and splits dealt by cost, and the usual even split.

The even split gives each device as many rows as another, as they come: what a training without a plan does.
"""

from __future__ import annotations

from functools import cached_property

from evener.balancer.search.budget import Budget
from evener.balancer.search.candidates import Candidates
from evener.balancer.search.layouts import Candidate, LayoutOptions, PackMode, split_evenly
from evener.balancer.search.packing import Packing
from evener.balancer.search.predictions import Predictions
from evener.balancer.search.text_model import TextModel
from evener.balancer.types import Layout, Problem, Timed, layout_of


class TextCandidates(Candidates):
    """The candidates by one set of observations. Packs and placements train by rows, and don't take part."""

    def __init__(
        self, problem: Problem, options: LayoutOptions, predictions: Predictions, budget: Budget, text: TextModel
    ) -> None:
        super().__init__(problem, options, predictions, budget)
        self._text = text

    def expected_rate(self, one: Candidate) -> float:
        """Samples/s to expect of rows dealt by cost, whether they are or not."""
        return self._text.predicted_rate(one.layout) if self._text.able else 0.0

    @cached_property
    def packings(self) -> tuple[tuple[PackMode, Packing], ...]:
        """No packs: they train by rows."""
        return ()

    @cached_property
    def best_single(self) -> Layout | None:
        """The global batch on the device that takes the least time for it alone."""
        batch, alone = self._text.batch if self._text.able else 0, []
        for i in self._text.able:
            if self._text.can_hold((i,)):
                layout = self._whole(i) or self._text.layout((i,), batch)
                if self.seen.broken(layout) is None:
                    alone.append((self._text.predicted_rate(layout), layout))
        return max(alone, key=lambda pair: pair[0], default=(0.0, None))[1]

    def _whole(self, position: int) -> Layout | None:
        """As exploration measured it."""
        ran = [one.probe.layout for one in self._text.tried_alone(position) if isinstance(one, Timed)]
        return next((layout for layout in reversed(ran) if layout.costs), None)

    @cached_property
    def _wished(self) -> tuple[Candidate, ...]:
        families, splits = self._options.families, self._split_layouts()
        found = [Candidate("split", layout) for layout in splits]
        if "even" in families and splits and (even := self._even_rows(splits[0])):
            found.insert(0, Candidate("even", even))
        if "solo" in families and self.best_single is not None:
            found.insert(0, Candidate("solo", self.best_single))
        return tuple(found)

    def _split_layouts(self) -> list[Layout]:
        """The last split that exploration measured, and the fastest."""
        ran = self.seen.still_fit({one.probe.layout: [one] for one in self._text.splits})
        if not ran:
            return []
        fastest = max(ran, key=lambda layout: ran[layout][0].samples_per_second)
        return list(dict.fromkeys([list(ran)[-1], fastest]))

    def _even_rows(self, split: Layout) -> Layout | None:
        """As many rows for each device of a split, in passes that hold the longest rows."""
        even = split_evenly(self._problem.devices, split.active, split.global_batch, self._quantum)
        if even is None:
            return None
        longest, walls = self._problem.lengths[-1], self._text.walls
        rows = [min(share, walls[i] // longest) if walls[i] else share for i, share in enumerate(even.shares)]
        return layout_of(even.shares, tuple(rows)) if all(rows[i] for i in even.active) else None
