"""The race: the best layouts against the even split and the best single device, in turns A B C A B C.

Turns side by side cancel what drifts. A rival leaves when its interval lies below the leader's; what still overlaps
after the last turn is a tie. Only batches that surely fit take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from evener.balancer.search import statistics
from evener.balancer.search.budget import Purse, Rule
from evener.balancer.search.model.device_model import UNMEASURABLE
from evener.balancer.search.observations import Ledger
from evener.balancer.search.predictions import LIKELY, View
from evener.balancer.search.waterfill import Fill
from evener.balancer.types import Interval, Layout, OutOfMemory, Probe, Result, Timed, layout_of
from evener.shares import even

MOST_TURNS = 3
OTHER_BATCH = 0.03  # relative: tolerable global batches that differ by more are worth a race
SLACK = 0.005  # of the throughput: what a tolerable layout may miss by where the measurements can't tell


def results(timed: dict[Layout, list[Timed]]) -> tuple[Result, ...]:
    """Each layout's throughput over all its turns, best first."""
    found = []
    for layout, turns in timed.items():
        step = statistics.pooled(
            [Interval(t.step_seconds, t.low_seconds, t.high_seconds) for t in turns], [float(t.steps) for t in turns]
        )
        batch = layout.global_batch
        low = batch / step.high if step.high > 0 else 0.0
        high = batch / step.low if step.low > 0 else 2 * batch / step.value
        found.append(Result(layout, Interval(batch / step.value, low, high), len(turns)))
    return tuple(sorted(found, key=lambda r: (-r.throughput.value, r.layout.global_batch, r.layout.shares)))


def preferred(found: Sequence[Result], tolerance: float, global_batch: int | None) -> Result | None:
    """The smallest global batch within the tolerance of the best, or that can't be told from it; None without any."""
    fit = [result for result in found if global_batch is None or result.layout.global_batch == global_batch]
    if not fit:
        return None
    best = max(fit, key=lambda r: r.throughput.value)
    if not tolerance or global_batch is not None:
        return best
    least = best.throughput.value * (1 - tolerance)
    enough = [r for r in fit if r.throughput.value + min(_half(r), SLACK * r.throughput.value) >= least]
    return min(enough, key=lambda r: (r.layout.global_batch, -r.throughput.value))


def contenders(view: View) -> tuple[Layout, ...]:
    """Who races, the favourite first: measured splits, a newer prediction, the even split, the best single device."""
    if not view.live:
        return ()
    wanted = [_levelled(view, layout) for layout in _favourites(view)]
    favourite = wanted[0].global_batch if wanted else None
    level = even_split(view, favourite)
    if level is not None:
        wanted.append(level)
    wanted.extend(best_singles(view))
    return _distinct(view, wanted)


def with_overlooked(view: View, rivals: tuple[Layout, ...], ledger: Ledger) -> tuple[Layout, ...]:
    """The rivals; after a turn of all, also what was measured before to be faster than any of them turned out to be."""
    raced = results({layout: turns for layout, turns in ledger.timed(["race"]).items() if layout in rivals})
    broken = {seen.probe.layout for seen in ledger.of("race") if not isinstance(seen, Timed)}
    if not raced or len({*broken.intersection(rivals), *(one.layout for one in raced)}) < len(rivals):
        return rivals
    lead = max(one.throughput.high for one in raced)
    earlier = results(view.ledger.standing(view.ledger.timed(["solo", "split"])))
    best = preferred(earlier, 0.0, view.problem.global_batch)
    faster = best is not None and best.layout not in rivals and best.throughput.low > lead
    return (*rivals, best.layout) if best and faster else rivals


def even_split(view: View, batch: int | None) -> Layout | None:
    """The even split over all live devices at `batch`, or the largest that surely fits; None for fewer than two."""
    quantum, live = view.quantum, view.live
    if len(live) < 2 or not view.splits:
        return None
    least = min(view.devices[i].memory.safe(view.cap, quantum) for i in live)
    wanted = batch if batch is not None else least * len(live)
    if wanted // quantum < len(live):
        wanted = len(live) * quantum
    parts = even(wanted // quantum, len(live))
    if parts[0] * quantum > least:
        parts = (least // quantum,) * len(live)
    if not parts[0]:
        return None
    shares = dict(zip(live, parts, strict=True))
    return layout_of(tuple(shares.get(i, 0) * quantum for i in range(view.problem.devices)))


def best_singles(view: View) -> list[Layout]:
    """The device that is fastest alone, at its best batch that surely fits; of stairs, also the batch likely to be."""
    rested = [(seen.samples_per_second, seen.probe.layout) for i, seen in sorted(view.rested.items()) if i in view.live]
    sure, likely = (max(_alone_at(view, doubt), key=_rate, default=None) for doubt in (1.0, LIKELY))
    found = [*rested, (sure.samples_per_second, view.layout(sure))] if sure else rested
    if not found:
        return []
    rate, layout = max(found, key=lambda pair: pair[0])
    gains = likely is not None and view.stepped_alone and _rate(likely) > rate * (1 + UNMEASURABLE)
    return [layout, view.layout(likely)] if likely and gains else [layout]


def _alone_at(view: View, doubt: float) -> Iterator[Fill]:
    """Each device alone, as doubted if its curve is in stairs; else as its curve has it, if not seen at rest."""
    for i in view.live:
        curve = view.alone[i]
        stepped = curve is not None and curve.stair > 0
        if (stepped or i not in view.rested) and (f := view.single(i, safe=True, doubt=doubt if stepped else 0.0)):
            yield f


def _rate(found: Fill) -> float:
    return found.samples_per_second


def next_probe(
    view: View, rivals: tuple[Layout, ...], ledger: Ledger, purse: Purse
) -> tuple[tuple[Probe, ...], Rule | None]:
    """The next turn of the next contender as a tuple of one; or none, and why the race is over."""
    if not rivals:
        return (), None
    for turn in range(MOST_TURNS):
        running = still_running(rivals, ledger, turn)
        for layout in running:
            if _seen(ledger, layout, turn):
                continue
            step = layout.global_batch / max(view.predicted_rate(layout), 1e-9)
            if not purse.affords("race", step):
                return (), Rule.BUDGET
            left = len(running) * (MOST_TURNS - turn)
            return (Probe(layout, "race", purse.seconds("race", step, left), turn),), None
        if len(still_running(rivals, ledger, turn + 1)) < 2:
            return (), Rule.SEPARATED if len(rivals) > 1 else Rule.ONLY_ONE
    return (), Rule.TIED


def still_running(rivals: Iterable[Layout], ledger: Ledger, turn: int) -> list[Layout]:
    """Who takes part in a turn: nobody that broke, or whose interval lies below the leader's after the turns before."""
    rivals = list(rivals)
    broken = {seen.probe.layout for seen in ledger.of("race") if not isinstance(seen, Timed)}
    timed = {
        layout: [t for t in turns if t.probe.turn < turn]
        for layout, turns in ledger.timed(["race"]).items()
        if layout in rivals
    }
    known = {r.layout: r.throughput for r in results({a: b for a, b in timed.items() if b})}
    lead = max(known.values(), key=lambda i: i.value, default=Interval(0.0, 0.0, 0.0))
    return [r for r in rivals if r not in broken and (r not in known or known[r].high >= lead.low)]


def _favourites(view: View) -> list[Layout]:
    """The measured layout that is preferred, predictions that should beat it, and the fastest measured.

    Of a tolerance also the smallest batches that are predicted to keep to it, wholly and with a little to spare.
    """
    found = results(view.ledger.standing(view.ledger.timed(["split"])))
    problem = view.problem
    chosen = preferred(found, problem.tolerance, problem.global_batch)
    if chosen is None:
        surest = view.surest_split if view.splits else None  # what was measured has no room any more
        return [view.layout(surest)] if surest and _surely_fits(view, view.layout(surest)) else []
    layouts = [chosen.layout]
    for wanted in (view.surest_split, view.likely_split, view.tolerable, view.insured, view.fastest_split):
        if wanted is None or not _surely_fits(view, view.layout(wanted)):
            continue
        layout = view.layout(wanted)
        better = wanted.samples_per_second > view.predicted_rate(chosen.layout) * (1 + UNMEASURABLE)
        other = abs(layout.global_batch / chosen.layout.global_batch - 1) > OTHER_BATCH
        tolerated = wanted in (view.tolerable, view.insured)
        if (tolerated and other) or (better and (view.stepped or not tolerated)):
            layouts.append(layout)
    if problem.tolerance and problem.global_batch is None:
        layouts.append(max(found, key=lambda r: r.throughput.value).layout)
    return layouts


def _levelled(view: View, layout: Layout) -> Layout:
    """Equal shares for the same devices, where no measurement tells them from the layout and they surely fit."""
    batches = [layout.global_batch]
    if view.problem.global_batch is None:  # the least share fits all
        batches.append(min(layout.shares[i] for i in layout.active) * len(layout.active))
    for batch in batches:
        parts = even(batch // view.quantum, len(layout.active))
        shares = dict(zip(layout.active, (part * view.quantum for part in parts), strict=True))
        level = layout_of(tuple(shares.get(i, 0) for i in range(view.problem.devices)))
        if view.same(level, layout) and _surely_fits(view, level):
            return level
    return layout


def _surely_fits(view: View, layout: Layout) -> bool:
    return all(layout.shares[i] <= view.devices[i].memory.safe(view.cap, view.quantum) for i in layout.active)


def _distinct(view: View, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    kept: list[Layout] = []
    for layout in layouts:
        if not any(view.same(layout, other) for other in kept):
            kept.append(layout)
    return tuple(kept)


def _seen(ledger: Ledger, layout: Layout, turn: int) -> bool:
    return any(seen.probe.layout == layout and seen.probe.turn == turn for seen in ledger.of("race"))


def _half(result: Result) -> float:
    return (result.throughput.high - result.throughput.low) / 2


def out_of_memory(ledger: Ledger) -> bool:
    """Whether a racer ran out of memory."""
    return any(isinstance(seen, OutOfMemory) for seen in ledger.of("race"))
