"""What to say of the measurements behind a plan: doubts, memory that others hold, devices that were left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, permutations
from typing import get_args

from evener.balancer.probes.block_timing import NOISY
from evener.balancer.result.number_format import join_words, percent
from evener.balancer.types import Doubt, Failed, Layout, Observation, OutOfMemory, Timed, Warned
from evener.devices.types import Device

GIB = 1 << 30
ORDER = get_args(Doubt)
MOSTLY = 0.5  # of a rival's blocks, from which other work is said to have slowed the chosen layout too
FEW_STEPS = 100  # of an epoch: with fewer, little is learnt
CHANGED = 0.1  # relative difference of two measurements of one layout
IN_SHORT = {
    "not_finite": "its loss was not finite",
    "throttled": "steps were held back while it was measured",
    "drift": "its speed drifted while it was measured",
    "disturbed": "other work took CPU time while it was measured",
    "changed": "the machine's speed changed between measurements",
}
UNCERTAIN = {"noisy": "its steps vary much", "too_short": "it was timed too shortly"}


def find_doubts(seen: Sequence[Observation], chosen: Layout, error: float | None = None) -> tuple[Warned, ...]:
    """Doubts about the chosen layout's own measurements, the worst of each kind.

    Of any layout: a loss that wasn't finite, and measurements that differ.

    `error` is that of the figure over all its measurements, relative: what says whether they were too noisy.
    """
    worst: dict[str, Warned] = {}
    for doubt in chain(_doubts_about(seen, chosen), _compare_repeats(seen)):
        if doubt.code not in worst or _weight(doubt) > _weight(worst[doubt.code]):
            worst[doubt.code] = doubt
    if error is not None and "noisy" in worst:
        worst["noisy"] = Warned("noisy", error)
        if error <= NOISY:
            del worst["noisy"]
    return tuple(worst[code] for code in ORDER if code in worst)


def _weight(doubt: Warned) -> float:
    """The larger the worse; a loss is lost the earlier the worse."""
    return -doubt.value if doubt.code == "not_finite" else abs(doubt.value)


def _doubts_about(seen: Iterable[Observation], chosen: Layout) -> Iterator[Warned]:
    """The layout's own, and of several devices what a rival saw of other work in turns with it, if mostly that.

    Processes that wait for each other can't tell other work from waiting.
    """
    for one in seen:
        if isinstance(one, Timed):
            yield from (each for each in one.warnings if each.code == "not_finite")
        if isinstance(one, Timed) and one.probe.layout == chosen:
            yield from one.warnings
        elif isinstance(one, Timed) and one.probe.stage == "race" and len(chosen.active) > 1:
            yield from (each for each in one.warnings if each.code == "disturbed" and each.value >= MOSTLY)


def _compare_repeats(seen: Iterable[Observation]) -> Iterator[Warned]:
    """How much faster one measurement of a layout is than another, beyond their intervals.

    One that exploration made on all devices at once may be slower for that.
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


def explain_doubts(
    doubts: Iterable[Warned], devices: Sequence[Device], longer: str = "a longer --budget"
) -> tuple[str, ...]:
    """Each doubt in a sentence, with what helps against it; `longer` is how more can be measured."""
    return tuple(_explain_doubt(doubt, devices, longer) for doubt in doubts)


def _explain_doubt(doubt: Warned, devices: Sequence[Device], longer: str) -> str:
    size, whole, fine = doubt.value, percent(doubt.value), percent(abs(doubt.value), 1)
    who = f"{devices[doubt.device].label}: " if 0 <= doubt.device < len(devices) else ""
    cause = "other work" if all(device.on_cpu for device in devices) else "heat, power or other work; let it cool"
    sentences = {
        "not_finite": f"The loss was not finite (NaN or infinite) by step {size:.0f}: nothing is learned like that;"
        " look at the data, the learning rate and the precision.",
        "disturbed": f"Other work took CPU time in {whole} of the blocks; stop it and measure again.",
        "throttled": f"Some steps were held back (by {whole}), as by {cause}; look at evener"
        " monitor, and measure again.",
        "capped": f"A device was at its power limit in {whole} of the time: the figure is that of this limit.",
        "drift": f"Steps became {fine} {'slower' if size > 0 else 'faster'} while they were timed; measure"
        f" again with {longer}.",
        "changed": f"The same layout was {whole} faster in one measurement than in another, as by {cause}: gains may be"
        " wrong by as much; measure again.",
        "noisy": f"The samples/s are only known to within ± {fine}; measure again with {longer}.",
        "slow_start": f"Steps were still becoming faster (by {whole}) when the warm-up's time was over.",
        "stalled": f"One block took {size:.1f} times as long as the others.",
        "too_short": f"Only {size:.2f} s were timed; give {longer}.",
    }
    return who + sentences[doubt.code]


def add_doubt(sentence: str, doubts: Iterable[Warned]) -> str:
    """The verdict with what most weakens it; noise is in its intervals already."""
    codes = {doubt.code for doubt in doubts}
    why = next((words for code, words in IN_SHORT.items() if code in codes), "")
    if not why:
        return sentence
    remedy = "look at it before you train" if "not_finite" in codes else "measure again to be sure"
    return f"{sentence.removesuffix('.')}; but {why}: {remedy}."


def add_remedy(sentence: str, doubts: Iterable[Warned], run: str) -> str:
    """The verdict of samples/s that aren't known, with what makes them uncertain and the line that measures on."""
    codes = {doubt.code for doubt in doubts}
    why = next((words for code, words in {**IN_SHORT, **UNCERTAIN}.items() if code in codes), "")
    cause = f", as {why}" if why else ""
    return f"{sentence.removesuffix('.')}{cause}: evener balance --resume {run} --budget +5m measures on."


def explain_taken_memory(seen: Iterable[Observation], devices: Sequence[Device]) -> tuple[str, ...]:
    """A sentence for each device of whose memory others were seen to hold a part that the request counted on."""
    return tuple(
        f"{devices[i].label}: others hold {size / GIB:.1f} GiB of its memory; the batches here leave it to them."
        for i, size in sorted(find_taken_bytes(seen).items())
    )


def add_taken_memory(sentence: str, seen: Iterable[Observation], devices: Sequence[Device]) -> str:
    """The verdict, with whose memory was taken by others where that bounds what fits."""
    names = [devices[i].label for i in sorted(find_taken_bytes(seen))]
    if not names:
        return sentence
    return f"{sentence.removesuffix('.')}; others hold memory of {join_words(names)}, which is left to them."


def explain_passes(chosen: Layout, batch_statistics: str) -> tuple[str, ...]:
    """A warning if a layer takes its statistics over the rows of a pass, not over a device's share."""
    rows = [chosen.pass_rows[i] for i in chosen.active if chosen.passes(i) > 1]
    if not batch_statistics or not rows:
        return ()
    return (
        f"{batch_statistics} sees one pass of {min(rows)} rows, not a device's whole share, so training depends on the"
        " passes; GroupNorm or LayerNorm doesn't, and --micro off makes a plan without passes.",
    )


def find_taken_bytes(seen: Iterable[Observation]) -> dict[int, int]:
    """The most that others were seen to hold, by position."""
    most: dict[int, int] = {}
    for one in seen:
        for i, size in enumerate(() if isinstance(one, Failed) else one.short_bytes):
            if size > most.get(i, 0):
                most[i] = size
    return most


def explain_left_out(seen: Sequence[Observation], devices: Sequence[Device], chosen: Layout) -> tuple[str, ...]:
    """Devices on which nothing ran, and those that worked at first, then always failed and have no part; and why."""
    words: dict[int, str] = {}
    ran: set[int] = set()
    for one in seen:
        if isinstance(one, Timed):
            ran |= set(one.probe.layout.active)
            words = {i: why for i, why in words.items() if i not in one.probe.layout.active}
            continue
        for i in one.devices or one.probe.layout.active:
            if i not in ran:
                words[i] = f"was left out, as {_why_nothing_ran(one, i)}: {one.detail}."
            elif isinstance(one, Failed) and one.devices == (i,):
                if not chosen.shares[i]:
                    words[i] = f"worked at first and then failed every time, so it was left out: {one.detail}."
                elif one.cause == "device":
                    words[i] = f"worked at first and can't be used now: {one.detail}."
    return tuple(f"{devices[i].label} {words[i]}" for i in sorted(words))


def explain_few_steps(chosen: Layout, rows: int) -> str:
    """What the verdict begins with if an epoch has so few steps that little is learnt; `rows` 0: unknown."""
    batch = chosen.global_batch
    if not 0 < rows < FEW_STEPS * batch:
        return ""
    steps = "less than one step" if rows < batch else f"only {rows // batch} step{'s' * (rows >= 2 * batch)}"
    remedy = f"; search with --max-global-batch {rows // FEW_STEPS} for {FEW_STEPS}" if rows >= FEW_STEPS else ""
    return f"An epoch is {steps}, as a step takes {batch} of the {rows} rows{remedy}. "


def _why_nothing_ran(seen: Failed | OutOfMemory, position: int) -> str:
    if isinstance(seen, Failed):
        return "nothing ran on it"
    rows = seen.probe.layout.pass_rows[position]
    return f"not even {rows} sample{'s fit' if rows > 1 else ' fits'} in its memory"
