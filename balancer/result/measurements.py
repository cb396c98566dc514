"""Findings about the measurements behind a plan: doubts, memory that others hold, devices that were
left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, permutations
from typing import Any, get_args

from evener.devices.types import Device

from ..search.ranking import ROUGH
from ..types import Doubt, Failed, Finding, Layout, Observation, OutOfMemory, Timed, Warned
from .words import DOUBTS, UNCERTAIN

ORDER = get_args(Doubt)
# of a rival's blocks, from which other work is said to have slowed the chosen layout too
MOSTLY = 0.5
FEW_STEPS = 100  # of an epoch: with fewer, little is learnt
CHANGED = 0.1  # relative difference of two measurements of one layout


def find_doubts(
    seen: Sequence[Observation], chosen: Layout, error: float | None = None
) -> tuple[Warned, ...]:
    """Doubts about the chosen layout's own measurements, the worst of each kind.

    Of any layout: a loss that wasn't finite, and measurements that differ. `error`, the relative
    one of the figure over all its measurements, says whether they were too noisy.
    """
    worst: dict[str, Warned] = {}
    for doubt in chain(_doubts_about(seen, chosen), _compare_repeats(seen)):
        if doubt.code not in worst or _weight(doubt) > _weight(worst[doubt.code]):
            worst[doubt.code] = doubt
    if error is not None and "noisy" in worst:
        worst["noisy"] = Warned("noisy", error)
        if error <= ROUGH:  # the search asked for no more
            del worst["noisy"]
    return tuple(worst[code] for code in ORDER if code in worst)


def _weight(doubt: Warned) -> float:
    """The larger the worse; a loss is lost the earlier the worse."""
    return -doubt.value if doubt.code == "not_finite" else abs(doubt.value)


def _doubts_about(seen: Iterable[Observation], chosen: Layout) -> Iterator[Warned]:
    """The layout's own doubts, and of several devices what a rival saw of other work in turns with
    it, if mostly that.

    Processes that wait for each other can't tell other work from waiting.
    """
    for one in seen:
        if isinstance(one, Timed):
            yield from (each for each in one.warnings if each.code == "not_finite")
        if isinstance(one, Timed) and one.probe.layout == chosen:
            yield from one.warnings
        elif isinstance(one, Timed) and one.probe.stage == "race" and len(chosen.active) > 1:
            yield from (
                each for each in one.warnings if each.code == "disturbed" and each.value >= MOSTLY
            )


def _compare_repeats(seen: Iterable[Observation]) -> Iterator[Warned]:
    """Warnings of measurements of one layout that differ beyond their intervals, with the gain of
    the faster one.

    A measurement that exploration made on all devices at once may be slower for that reason.
    """
    repeats: defaultdict[Layout, list[Timed]] = defaultdict(list)
    for one in seen:
        if isinstance(one, Timed):
            repeats[one.probe.layout].append(one)
    for slow, fast in (pair for taken in repeats.values() for pair in permutations(taken, 2)):
        change = fast.samples_per_second / slow.samples_per_second - 1
        at_once = slow.probe.stage == "solo" != fast.probe.stage
        if change > CHANGED and slow.throughput.high < fast.throughput.low and not at_once:
            yield Warned("changed", change)


def describe_doubts(
    doubts: Iterable[Warned], devices: Sequence[Device], longer: str = "a longer --budget"
) -> list[Finding]:
    """Each doubt as a finding, with what helps against it; `longer` is how more can be measured."""
    hot = any(not device.on_cpu for device in devices)

    def describe(doubt: Warned) -> Finding:
        label = devices[doubt.device].label if 0 <= doubt.device < len(devices) else ""
        return Finding(
            f"doubt.{doubt.code}",
            {"device": label, "value": doubt.value, "hot": hot, "longer": longer},
        )

    return [describe(doubt) for doubt in doubts]


def find_weakness(doubts: Iterable[Warned]) -> list[Finding]:
    """The doubt that most weakens a verdict; noise is in its intervals already."""
    codes = {doubt.code for doubt in doubts}
    return [Finding("doubt.verdict", {"doubt": code}) for code in DOUBTS if code in codes][:1]


def find_remedy(doubts: Iterable[Warned], run: str) -> Finding:
    """The line that measures on where samples/s aren't known, and why they aren't."""
    codes = {doubt.code for doubt in doubts}
    return Finding(
        "remedy.measure_on",
        {"doubt": next((code for code in UNCERTAIN if code in codes), ""), "run": run},
    )


def find_taken_memory(seen: Iterable[Observation], devices: Sequence[Device]) -> list[Finding]:
    """Each device of whose memory others were seen to hold a part that the request counted on."""
    found = sorted(find_taken_bytes(seen).items())
    return [
        Finding("taken.memory", {"device": devices[i].label, "size_bytes": size})
        for i, size in found
    ]


def find_pass_statistics(chosen: Layout, layer: str) -> list[Finding]:
    """A layer that takes its statistics over the rows of a pass, not over a device's share."""
    rows = [chosen.pass_rows[i] for i in chosen.active if chosen.passes(i) > 1]
    return (
        [Finding("passes.statistics", {"layer": layer, "rows": min(rows)})]
        if layer and rows
        else []
    )


def find_taken_bytes(seen: Iterable[Observation]) -> dict[int, int]:
    """The most that others were seen to hold, by position."""
    most: dict[int, int] = {}
    for one in seen:
        for i, size in enumerate(() if isinstance(one, Failed) else one.short_bytes):
            if size > most.get(i, 0):
                most[i] = size
    return most


def find_left_out(
    seen: Sequence[Observation], devices: Sequence[Device], chosen: Layout
) -> list[Finding]:
    """Devices on which nothing ran, and those that worked at first, then always failed and have no
    part; and why.
    """
    found: dict[int, Finding] = {}
    ran: set[int] = set()
    for one in seen:
        if isinstance(one, Timed):
            ran |= set(one.probe.layout.active)
            found = {i: finding for i, finding in found.items() if i not in one.probe.layout.active}
            continue
        for i in one.devices or one.probe.layout.active:
            if code := _why_left_out(one, i, i in ran, chosen):
                values: dict[str, Any] = {"device": devices[i].label, "why": one.detail}
                found[i] = Finding(
                    f"device.{code}", values | {"rows": one.probe.layout.pass_rows[i]}
                )
    return [found[i] for i in sorted(found)]


def _why_left_out(one: Failed | OutOfMemory, position: int, ran: bool, chosen: Layout) -> str:
    """The code of what a failure says of a device; empty if it is still used."""
    if not ran:
        return "nothing_ran" if isinstance(one, Failed) else "nothing_fits"
    if not isinstance(one, Failed) or one.devices != (position,):
        return ""
    if not chosen.shares[position]:
        return "failed"
    return "gone" if one.cause == "device" else ""


def find_few_steps(chosen: Layout, rows: int) -> list[Finding]:
    """An epoch that has so few steps that little is learnt; `rows` 0: unknown."""
    batch = chosen.global_batch
    if not 0 < rows < FEW_STEPS * batch:
        return []
    bound = [rows // FEW_STEPS, FEW_STEPS] if rows >= FEW_STEPS else None
    return [
        Finding(
            "epoch.few_steps",
            {"steps": rows // batch, "batch": batch, "rows": rows, "bound": bound},
        )
    ]
