"""The search: a problem in, probes out, observations back, and at every moment the best layout measured so far."""

from __future__ import annotations

from collections.abc import Callable

from evener.balancer.search import race_stage
from evener.balancer.search.decide import Decision, Judged, decide
from evener.balancer.search.model.step_time import remembered
from evener.balancer.search.observations import Ledger
from evener.balancer.search.predictions import View
from evener.balancer.search.problem import check
from evener.balancer.types import Belief, CurveSketch, Failed, Layout, Observation, Probe, Problem, Result

SKETCHED = 24  # points of a curve for drawing


class Search:
    """Finds the layout that trains fastest, in a handful of probes; see `evener.balancer.search` for the theory.

    Time comes in by observations alone: the budget is held against the sum of their `elapsed_seconds`, where solo
    probes of one turn run at the same time and count once, by the longest.
    """

    def __init__(self, problem: Problem) -> None:
        check(problem)
        self.problem = problem
        self._all = Ledger(problem)
        self._before_race = Ledger(problem)  # the race is planned by what was known when it began
        self._fit = remembered()
        self._judged: Judged | None = None
        self._decided: Decision | None = None

    def ask(self) -> tuple[Probe, ...]:
        """What to measure now, at the same time; empty when the search is over. Asking changes nothing."""
        return self._decision().probes

    def tell(self, seen: Observation) -> None:
        """Take what was seen: in any order, asked for or not, more than once."""
        if not self._all.add(seen):
            return
        if seen.probe.stage != "race":
            self._before_race.add(seen)
            self._judged = None
        elif not isinstance(seen, Failed) and self._before_race.shrink(seen.short_bytes):
            self._judged = None  # who raced may not fit any more
        self._decided = None

    def best(self) -> Result | None:
        """The smallest global batch within the tolerance of the fastest layout measured; None before any was."""
        return race_stage.preferred(self._eligible(), self.problem.tolerance, self.problem.global_batch)

    def results(self) -> tuple[Result, ...]:
        """Every layout that ran and may run again, best first: by its turns in the race, else by the stage that ran it.

        All that ran, if none may run again.
        """
        ran = {**self._all.timed(["solo", "split"]), **self._all.timed(["race"])}
        return race_stage.results(self._all.standing(ran) or ran)

    def belief(self) -> Belief:
        """The view between two probes, for whoever draws it."""
        decision, view = self._decision(), self._known().view
        fits = [f for f in (view.fastest_split, view.fastest_single) if f]
        top = max(fits, key=lambda f: f.samples_per_second, default=None)
        return Belief(
            curves=tuple(_sketch(view, i) for i in range(self.problem.devices)),
            predicted=view.layout(top) if top else None,
            predicted_samples_per_second=top.samples_per_second if top else None,
            sync_seconds=view.sync_seconds,
            doing=decision.doing,
        )

    def why_stopped(self) -> str | None:
        """The rule that ended the search, in words; None while it goes on."""
        return None if self._decision().probes else self._decision().ended

    def spent_seconds(self) -> float:
        """What the budget is held against."""
        return self._all.spent_seconds()

    def apart_seconds(self, layout: Layout) -> float | None:
        """The longest that a device would take alone for its share of a layout; None if none of them ran alone."""
        view = self._known().view
        curves = [(view.alone[i], layout.shares[i]) for i in layout.active]
        return max((curve.seconds(share) for curve, share in curves if curve), default=None)

    def predicted_rate(self, layout: Layout) -> float:
        """Samples/s of a layout as the curves have it; 0 if one of its devices has none."""
        return self._known().view.predicted_rate(layout)

    def same(self, one: Layout, other: Layout, within: float) -> bool:
        """Whether shares differ by less than `within`, relatively, and by no edge of a stair."""
        return self._known().view.same(one, other, within)

    def even_split(self) -> Result | None:
        """The even split over all devices that take part, as measured; None if it wasn't."""
        return _first(
            self.results(), lambda layout: layout.kind == "split" and _is_even(layout, self._known().view.live)
        )

    def best_single(self) -> Result | None:
        """The fastest device alone, as measured in the race if it raced."""
        raced = race_stage.results(self._all.timed(["race"]))
        return _first((*raced, *self.results()), lambda layout: layout.kind == "solo")

    def solos(self) -> tuple[Result | None, ...]:
        """Each device's highest throughput alone, as measured; None for one that never ran."""
        best: dict[int, Result] = {}
        for result in self.results():
            if result.layout.kind == "solo":
                best.setdefault(result.layout.active[0], result)
        return tuple(best.get(i) for i in range(self.problem.devices))

    def contenders(self) -> tuple[Layout, ...]:
        """Who deserves the race, the favourite first: measured or predicted, and sure to fit."""
        return self._known().rivals

    def _eligible(self) -> tuple[Result, ...]:
        """What raced and still fits; else what was measured before and does; else all, as nothing fits any more."""
        raced, earlier = self._all.timed(["race"]), self._all.timed(["solo", "split"])
        fits = self._all.standing
        return race_stage.results(fits(raced) or fits(earlier) or raced or earlier)

    def _known(self) -> Judged:
        if self._judged is None:
            self._judged = Judged(View(self.problem, self._before_race, self._fit))
        return self._judged

    def _decision(self) -> Decision:
        if self._decided is None:
            self._decided = decide(self._known(), self._all)
        return self._decided


def _sketch(view: View, position: int) -> CurveSketch:
    device = view.devices[position]
    curve = view.alone[position]
    largest = view.rooms[position] or device.memory.ran or None
    points: tuple[tuple[int, float], ...] = ()
    if curve and largest:
        sizes = sorted({max(1, round(largest * n / SKETCHED)) for n in range(SKETCHED + 1)})
        points = tuple((size, curve.seconds(size)) for size in sizes)
    seen = tuple((p.batch, p.seconds) for p in device.alone)
    return CurveSketch(position, points, seen, largest, device.memory.failed)


def _is_even(layout: Layout, live: tuple[int, ...]) -> bool:
    active = [layout.shares[i] for i in layout.active]
    return layout.active == live and max(active) - min(active) <= max(1, max(active) // 100)


def _first(found: tuple[Result, ...], wanted: Callable[[Layout], bool]) -> Result | None:
    return next((result for result in found if wanted(result.layout)), None)
