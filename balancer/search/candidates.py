"""The layouts of the race: each family's candidates, by what exploration and growing packs showed."""

from __future__ import annotations

from functools import cached_property

import msgspec

from evener.balancer.search.budget import Budget
from evener.balancer.search.efficiency import most_efficient
from evener.balancer.search.layouts import (
    Candidate,
    LayoutOptions,
    PackMode,
    device_counts,
    divide,
    find_family,
    pack_on,
    place_on,
    same_measurement,
    shrink,
    split_evenly,
)
from evener.balancer.search.packing import Packing
from evener.balancer.search.predictions import Predictions
from evener.balancer.search.ranking import EDGE_SLACK, throughput, worthwhile_gain
from evener.balancer.search.text_model import TextModel
from evener.balancer.types import Layout, OutOfMemory, Problem, Timed, layout_of, solo

RETREATS = 4  # smaller batches tried after a layout ran out of memory in the race
OTHER_BATCH = 0.03  # relative: tolerable global batches that differ by more are worth a race


class Candidates:
    """The candidates by one set of observations."""

    def __init__(self, problem: Problem, options: LayoutOptions, predictions: Predictions, budget: Budget) -> None:
        self._problem, self._options, self._budget = problem, options, budget
        self._predictions, self._model, self.seen = predictions, predictions.model, predictions.model.seen
        self._quantum = problem.multiple_of

    @cached_property
    def all(self) -> tuple[Candidate, ...]:
        """Every layout of the race, the same never twice."""
        kept: dict[Layout, Candidate] = {}
        for candidate in map(self._in_its_place, self._wished):
            kept.setdefault(candidate.layout, candidate)
        return tuple(kept.values())

    @cached_property
    def running(self) -> tuple[Candidate, ...]:
        """Those that did not fail in the race and have all their devices."""
        here = (one for one in self.all if not self.seen.gone.intersection(one.layout.active))
        return tuple(one for one in here if self.seen.broken(one.layout) is None)

    @cached_property
    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        pairs = [(candidate, self._in_its_place(candidate)) for candidate in self._wished]
        return tuple((wished, instead) for wished, instead in pairs if instead != wished)

    def expected_rate(self, one: Candidate) -> float:
        """Samples/s to expect: as measured or predicted; of packs and placements, as much as the best of the others."""
        if one.synchronous:
            return self._model.predicted_rate(one.layout)
        return max((self._model.predicted_rate(other.layout) for other in self.all if other.synchronous), default=0.0)

    @cached_property
    def _wished(self) -> tuple[Candidate, ...]:
        families = self._options.families
        splits = self._splits() if "split" in families else []
        found = [
            *(self._singles() if "solo" in families else ()),
            *(self._evens(splits) if "even" in families else ()),
            *(Candidate(find_family(layout), layout, extra=i > 0) for i, layout in enumerate(splits)),
            *(self._frugal() if self._problem.max_slowdown is not None else ()),
            *(self._placed() if "place" in families else ()),
        ]
        allowed = [one for one in found if one.family in families]  # a tolerable "split" may be one device
        return (*self._distinct(allowed), *self._packed())

    def _distinct(self, found: list[Candidate]) -> list[Candidate]:
        """Without splits that no measurement could distinguish from an even split, or from one before them."""
        kept: list[Candidate] = []
        for one in found:
            splits = [other.layout for other in kept if other.layout.kind == one.layout.kind == "split"]
            if not any(same_measurement(one.layout, other) for other in splits):
                kept.append(one)
        return kept

    # ------------------------------------------------------------------ one device

    def _singles(self) -> list[Candidate]:
        """The best single device at the fixed batch, else at its best measured one; and one that the race favours."""
        if (best := self.best_single) is None:
            return []
        other = self._overlooked_single(best)
        return [Candidate("solo", best), *([Candidate("solo", other, extra=True)] if other else [])]

    @cached_property
    def best_single(self) -> Layout | None:
        """The layout of the best single device that did not fail in the race; None if none can train alone."""
        ranked = self._ranked_singles() if self._problem.global_batch is None else self._fixed_singles()
        whole = [layout for layout in ranked if self.seen.broken(layout) is None]
        return next(iter(whole or ranked), None)

    def _overlooked_single(self, best: Layout) -> Layout | None:
        """Another measured batch or device, if the race found the best single device surely slower; else None."""
        turns = self.seen.turns(best)
        if self._problem.global_batch is not None or not turns:
            return None
        other = next((layout for layout in self._ranked_singles() if layout != best), None)
        faster = other is not None and self._single_rate(other) > throughput(turns).high * (1 + EDGE_SLACK)
        return other if faster else None

    def _ranked_singles(self) -> list[Layout]:
        """Every batch that exploration measured on one device and that still fits, the fastest first."""
        ran = self.seen.timed(("solo", "rest"))
        fit = self.seen.still_fit({layout: turns for layout, turns in ran.items() if not layout.in_passes})
        return sorted(fit, key=lambda layout: -max(one.samples_per_second for one in fit[layout]))

    def _fixed_singles(self) -> list[Layout]:
        """Each device that safely holds the fixed batch, at once or in passes, the fastest first."""
        batch, devices = self._problem.global_batch or 0, self._problem.devices
        layouts = [self._model.lay_out_safely(solo(devices, i, batch).shares) for i in self._model.live]
        safe = [layout for layout in layouts if layout is not None and self._model.bounds.hold(layout)]
        return sorted(safe, key=lambda layout: -self._single_rate(layout, contended=False))

    def _single_rate(self, layout: Layout, contended: bool = True) -> float:
        """Samples/s of a device alone, measured at rest, else in the solo stage if `contended` counts, else predicted.

        A prediction is the same for indistinguishable devices.
        """
        timed = self.seen.timed_in(layout, "rest") or (self.seen.timed_in(layout, "solo") if contended else [])
        return max((one.samples_per_second for one in timed), default=self._model.predicted_rate(layout))

    def _frugal(self) -> list[Candidate]:
        """Where energy decides: every device alone, and splits over some of the devices that should take least."""
        ranked = self._ranked_singles() if self._problem.global_batch is None else self._fixed_singles()
        alone = {layout.active[0]: layout for layout in reversed(ranked)}
        splits = most_efficient(self._predictions, self._problem.max_slowdown or 0.0)
        layouts = [*alone.values(), *map(self._predictions.layout, splits)]
        return [Candidate(find_family(layout), layout, True) for layout in layouts if self._model.bounds.hold(layout)]

    # ------------------------------------------------------------------ several devices

    def _splits(self) -> list[Layout]:
        """The preferred measured split, predicted ones that should beat it, and the fastest measured one."""
        found = self._split_rates()
        if not found:
            fastest = self._predictions.fastest_split if self._model.splits else None
            layout = self._predictions.layout(fastest) if fastest else None
            return [self._model.level(layout)] if layout and self._model.bounds.surely_hold(layout) else []
        chosen = self._preferred(found)
        layouts = [chosen, *self._promising(chosen), max(found, key=lambda layout: found[layout])]
        layouts += self._on_other_hosts(chosen, found)
        if chosen.in_passes and (one_pass := self._predictions.one_pass_split):
            layout = self._predictions.layout(one_pass)
            layouts += [layout] if self._model.bounds.surely_hold(layout) else []
        return [self._level(layout) for layout in layouts]

    def _on_other_hosts(self, chosen: Layout, found: dict[Layout, float]) -> list[Layout]:
        """Against a split on one host the fastest measured one across hosts, or the other way round."""
        one_host = self._model.count_hosts(chosen) == 1
        others = [layout for layout in found if (self._model.count_hosts(layout) == 1) != one_host]
        return [max(others, key=lambda layout: found[layout])] if others else []

    def _level(self, layout: Layout) -> Layout:
        """Equal shares if they safely fit and no measurement could distinguish them from the layout's."""
        level = self._model.level(layout)
        return level if self._model.bounds.surely_hold(level) else layout

    def _split_rates(self) -> dict[Layout, float]:
        """Every split of exploration that still fits, with its samples/s."""
        batch = self._problem.global_batch
        return {
            layout: max(one.samples_per_second for one in turns)
            for layout, turns in self.seen.still_fit(self.seen.timed(("split",))).items()
            if batch is None or layout.global_batch == batch
        }

    def _preferred(self, found: dict[Layout, float]) -> Layout:
        """The smallest global batch within the tolerance of the fastest; the fastest for a fixed batch."""
        least = max(found.values()) * (1 - self._problem.tolerance)
        if self._problem.global_batch is not None:
            return max(found, key=lambda layout: found[layout])
        enough = [layout for layout, rate in found.items() if rate >= least]
        return min(enough, key=lambda layout: (layout.global_batch, -found[layout]))

    def _promising(self, chosen: Layout) -> list[Layout]:
        """Predicted splits that should be faster than the chosen one, or as good with another global batch.

        Where exploration has measured the smallest good batch, another one like it isn't worth a race.
        """
        predictions, fastest = self._predictions, self._predictions.fastest_split
        wanted = [
            one
            for one in (() if predictions.extrapolates else (predictions.tolerable, predictions.insured))
            if one and abs(one.global_batch / chosen.global_batch - 1) > OTHER_BATCH
        ]
        gain = worthwhile_gain(self._problem.tolerance)
        if fastest and fastest.samples_per_second > self._model.predicted_rate(chosen) * (1 + gain):
            wanted.append(fastest)
        return [layout for layout in map(predictions.layout, wanted) if self._model.bounds.surely_hold(layout)]

    def _evens(self, splits: list[Layout]) -> list[Candidate]:
        """The even split over all live devices; where scaling is asked for, also over 2, 4, ... of the fastest."""
        live = self._model.live
        if "split" in self._options.families and not self._model.splits:
            return []
        order = sorted(live, key=lambda i: -max((p.batch / p.seconds for p in self._model.devices[i].alone), default=0))
        counts = device_counts(len(live)) if self._options.scaling else (len(live),)
        found = [self._even(tuple(sorted(order[:count])), splits) for count in counts if count > 1]
        return [Candidate("even", layout) for layout in found if layout is not None]

    def _even(self, positions: tuple[int, ...], splits: list[Layout]) -> Layout | None:
        """At the fixed batch, else at the preferred split's or the best single's for each device; as far as it fits."""
        count, quantum = len(positions), self._quantum
        least = min(self._model.bounds.safe[i] for i in positions)
        batch = self._problem.global_batch
        if batch is None:
            batch = self._even_batch(positions, splits)
        batch = max(batch // quantum, count) * quantum
        even = split_evenly(self._problem.devices, positions, batch, quantum)
        layout = self._model.lay_out_safely(even.shares) if even and self._problem.global_batch else None
        if layout and self._model.knows_passes(layout):
            return layout
        if -(-batch // quantum // count) * quantum > least:
            batch = least // quantum * quantum * count
        if self._problem.global_batch is not None and self._options.scaling and batch != self._problem.global_batch:
            return None
        return split_evenly(self._problem.devices, positions, batch, quantum) if batch else None

    def _even_batch(self, positions: tuple[int, ...], splits: list[Layout]) -> int:
        count = len(positions)
        if splits:
            return splits[0].global_batch * count // len(self._model.live)
        best = {layout.active[0]: layout.global_batch for layout in reversed(self._ranked_singles())}
        each = min((best[i] for i in positions if i in best), default=0) * count
        return min(each, self._problem.max_global_batch or each)

    # ------------------------------------------------------------------ placements and packs

    @cached_property
    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own: the fixed one, the best single device's, else one that no
        single device could hold."""
        if self._problem.global_batch is not None:
            return self._problem.global_batch
        if self.best_single is not None:
            return self.best_single.global_batch
        full = [one.probe.layout.global_batch for one in self.seen.in_stage("solo") if isinstance(one, OutOfMemory)]
        return min(full, default=None)

    def _placed(self) -> list[Candidate]:
        if self.common_batch is None:
            return []
        found = [place_on(self._problem.devices, one, self.common_batch) for one in self._options.placements]
        return [Candidate("place", layout) for layout in found if layout is not None]

    @cached_property
    def packings(self) -> tuple[tuple[PackMode, Packing], ...]:
        """Packing in each mode whose number of trainings is searched for."""
        single = self.best_single
        if single is None or single.in_passes or "pack" not in self._options.families:
            return ()
        rate = self._single_rate(single)
        modes = [mode for mode in self._options.pack_modes if mode != "logical"]
        return tuple((mode, Packing(self._model, single, rate, mode)) for mode in modes)

    def _packed(self) -> list[Candidate]:
        """The best number of trainings in each mode, or the fewest if none was measured yet."""
        best = {mode: packing.best_layout() or packing.first_layout() for mode, packing in self.packings}
        plain = best.get("")
        if "logical" in self._options.pack_modes and plain is not None:
            best["logical"] = self._logical(plain)
        return [Candidate("pack", layout) for layout in best.values() if layout is not None]

    def _logical(self, plain: Layout) -> Layout:
        """As many trainings on logical devices as run best as plain processes, or the most that were measured so."""
        wanted = pack_on(plain, plain.processes, "logical")
        tried = [one.probe.layout for one in self.seen.all_timed() if one.probe.layout.placement == "logical"]
        if wanted in tried or not tried or self._budget.affords(wanted, "race"):
            return wanted
        return max(tried, key=lambda layout: layout.processes)

    def _in_its_place(self, candidate: Candidate) -> Candidate:
        """The candidate, or after it ran out of memory a smaller batch in its place; a fixed one in more passes."""
        fixed = self._problem.global_batch is not None
        for _ in range(RETREATS):
            full = self.seen.broken(candidate.layout)
            if not isinstance(full, OutOfMemory) or (fixed and not (self._problem.micro and candidate.synchronous)):
                break
            layout = divide(candidate.layout, full.devices) if fixed else shrink(candidate.layout, self._quantum)
            if layout is None:
                break
            candidate = msgspec.structs.replace(candidate, layout=layout)
        return candidate


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
