"""Results in words: one sentence of what to do and why, a sentence for each doubt, and what failed if nothing ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from evener.balancer.result.number_format import percent, rate
from evener.balancer.types import Failed, Interval, Layout, Observation, Result, Timed, Warned
from evener.devices.types import Device

GIB = 1 << 30
ORDER = ("disturbed", "throttled", "capped", "drift", "noisy", "slow_start", "stalled", "too_short")
MOSTLY = 0.5  # of a rival's blocks, from which other work is said to have slowed the chosen layout too


class Rivals(msgspec.Struct, frozen=True):
    """What the chosen layout is held against, where it was measured."""

    even: Result | None = None
    single: Result | None = None  # the best device alone
    split: Result | None = None  # the fastest split
    sync_seconds: float | None = None  # the exposed cost of keeping replicas in step
    apart_seconds: float | None = None  # the longest that a device alone takes for its share of the fastest split
    larger: Result | None = None  # faster, but with more samples than the tolerance allows for


def verdict(chosen: Result, rivals: Rivals, devices: Sequence[Device]) -> str:
    """What to do and why, with the figures; a difference within the error is called a tie."""
    begin = f"{_advice(chosen, devices)}: {_rate(chosen)}"
    if chosen.layout.kind == "split":
        reasons = []
        if rivals.even is not None and rivals.even.layout != chosen.layout:
            reasons.append(_against("the even split", chosen, rivals.even))
        if rivals.single is not None:
            reasons.append(_against(f"{_names(rivals.single.layout, devices)} alone", chosen, rivals.single))
        return f"{begin}{_reasons(reasons)}{_more(chosen, rivals.larger)}."
    if len(devices) == 1:
        return f"{begin}."
    if rivals.split is None:
        return f"{begin}; no split over several devices was measured."
    return f"{begin}; {_why_not(chosen, rivals.split, rivals, devices)}."


def is_even(layout: Layout) -> bool:
    """Whether all devices of the request have the same share, as far as whole samples go."""
    return layout.kind == "split" and min(layout.shares) > 0 and max(layout.shares) - min(layout.shares) <= 1


def _more(chosen: Result, larger: Result | None) -> str:
    """What a larger global batch would add, within the tolerance."""
    if larger is None or ties(chosen, larger):
        return ""
    gain = larger.throughput.value / chosen.throughput.value - 1
    return f"; {larger.layout.global_batch} samples a step would add {percent(gain, 1)}"


def _why_not(chosen: Result, split: Result, rivals: Rivals, devices: Sequence[Device]) -> str:
    """Why the fastest split that was measured is not worth it."""
    over = f"a split over {_names(split.layout, devices)}"
    if ties(chosen, split):
        return f"{over} is no faster within the error ({rate(split.throughput.value)} samples/s)"
    loss = 1 - split.throughput.value / chosen.throughput.value
    return f"{over} loses {percent(loss)}{_cause(chosen, split.layout, rivals)}"


def _cause(chosen: Result, split: Layout, rivals: Rivals) -> str:
    """What takes most of a split's step: keeping in step, or what a smaller share does not shorten; "" if unknown."""
    sync, apart = rivals.sync_seconds or 0.0, rivals.apart_seconds or 0.0
    whole, share = chosen.layout.global_batch / chosen.throughput.value, max(split.shares)
    rigid = apart - whole * share / chosen.layout.global_batch
    if rigid > sync:
        of_all = f"the {_milliseconds(whole)} of all {chosen.layout.global_batch}"
        return f", because a step of {share} samples alone still takes {_milliseconds(apart)}, against {of_all}"
    return f", because keeping them in step costs {_milliseconds(sync)} a step" if sync else ""


def _milliseconds(seconds: float) -> str:
    """With two significant digits at least."""
    milliseconds = seconds * 1000
    return f"{milliseconds:.{0 if milliseconds >= 9.95 else 1 if milliseconds >= 0.995 else 2}f} ms"


def _advice(chosen: Result, devices: Sequence[Device]) -> str:
    layout = chosen.layout
    names = _names(layout, devices)
    if layout.kind == "split":
        ratios = ":".join(f"{layout.shares[i] / layout.global_batch:.3f}" for i in layout.active)
        samples = " + ".join(str(layout.shares[i]) for i in layout.active)
        return f"Split {ratios} over {names} ({samples} samples)"
    if layout.kind == "pack":
        return f"Run {layout.processes} trainings side by side on {names}, {layout.global_batch} samples each"
    if layout.kind == "place":
        return f"Place the model's parts as {layout.placement} over {names}, {layout.global_batch} samples"
    only = " alone" if len(devices) > 1 else ""
    return f"Use {names}{only}, {layout.global_batch} samples a step"


def _against(name: str, chosen: Result, rival: Result) -> str:
    if ties(chosen, rival):
        return f"as fast as {name} within the error"
    gain = chosen.throughput.value / rival.throughput.value - 1
    if gain < 0:
        return f"{percent(-gain)} slower than {name}"
    return f"{percent(gain)} faster than {name}" if gain >= 0.01 else f"{percent(gain, 1)} faster than {name}"


def _reasons(reasons: Sequence[str]) -> str:
    return f", {' and '.join(reasons)}" if reasons else ""


def ties(one: Result, other: Result) -> bool:
    """Whether their 95 % intervals overlap, so that neither is surely faster."""
    a, b = one.throughput, other.throughput
    return a.low <= b.high and b.low <= a.high


def _rate(result: Result) -> str:
    return f"{rate(result.throughput.value)} samples/s{_error(result.throughput)}"


def _error(figure: Interval) -> str:
    half = (figure.high - figure.low) / 2 / figure.value if figure.value else 0.0
    return f" ± {percent(half, 1)}" if half >= 0.0005 else ""


def _names(layout: Layout, devices: Sequence[Device]) -> str:
    names = [devices[i].label for i in layout.active]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def doubts_of(seen: Iterable[Observation], chosen: Layout) -> tuple[Warned, ...]:
    """Doubts about the chosen layout's own measurement, the worst of each kind."""
    worst: dict[str, Warned] = {}
    for doubt in _about(seen, chosen):
        if doubt.code not in worst or abs(doubt.value) > abs(worst[doubt.code].value):
            worst[doubt.code] = doubt
    return tuple(worst[code] for code in ORDER if code in worst)


def _about(seen: Iterable[Observation], chosen: Layout) -> Iterator[Warned]:
    """The layout's own doubts, and of several devices what a rival saw of other work in turns with it, if mostly that.

    Processes that wait for each other can't tell other work from waiting.
    """
    for one in seen:
        if isinstance(one, Timed) and one.probe.layout == chosen:
            yield from one.warnings
        elif isinstance(one, Timed) and one.probe.stage == "race" and len(chosen.active) > 1:
            yield from (each for each in one.warnings if each.code == "disturbed" and each.value >= MOSTLY)


def warnings(doubts: Iterable[Warned], devices: Sequence[Device], longer: str = "a longer --budget") -> tuple[str, ...]:
    """Each doubt in a sentence, with what helps against it; `longer` is how more can be measured."""
    return tuple(_doubt(doubt, devices, longer) for doubt in doubts)


def doubtful(sentence: str, doubts: Iterable[Warned]) -> str:
    """The verdict with what most lessens it; noise is in its intervals already."""
    seen = {doubt.code for doubt in doubts}
    why = next((words for code, words in _SHORT.items() if code in seen), "")
    return f"{sentence.removesuffix('.')}; but {why}: measure again to be sure." if why else sentence


_SHORT = {
    "throttled": "steps were held back while it was measured",
    "drift": "its speed drifted while it was measured",
    "disturbed": "other work took CPU time while it was measured",
}


def _doubt(doubt: Warned, devices: Sequence[Device], longer: str) -> str:
    size, whole, fine = doubt.value, percent(doubt.value), percent(abs(doubt.value), 1)
    who = f"{devices[doubt.device].label}: " if 0 <= doubt.device < len(devices) else ""
    return (
        who
        + {
            "disturbed": f"Other work took CPU time in {whole} of the blocks; stop it and measure again.",
            "throttled": f"Some steps were held back (by {whole}), as by heat, power or other work; let it cool,"
            " look at evener monitor, and measure again.",
            "capped": f"A device was at its power limit in {whole} of the time: the figure is that of this limit.",
            "drift": f"Steps became {fine} {'slower' if size > 0 else 'faster'} while they were timed; measure"
            f" again with {longer}.",
            "noisy": f"The step time is known to within ± {fine} only; measure again with {longer}.",
            "slow_start": f"Steps were still becoming faster (by {whole}) when the warm-up's time was over.",
            "stalled": f"One block took {size:.1f} times as long as the others.",
            "too_short": f"Only {size:.2f} s were timed; give {longer}.",
        }[doubt.code]
    )


def crowded(seen: Iterable[Observation], devices: Sequence[Device]) -> tuple[str, ...]:
    """A sentence for each device of whose memory others were seen to hold a part that the request counted on."""
    return tuple(
        f"{devices[i].label}: others hold {size / GIB:.1f} GiB of its memory; the batches here leave it to them."
        for i, size in sorted(_short(seen).items())
    )


def room_left(sentence: str, seen: Iterable[Observation], devices: Sequence[Device]) -> str:
    """The verdict, with whose memory was taken by others where that bounds what fits."""
    names = [devices[i].label for i in sorted(_short(seen))]
    if not names:
        return sentence
    return f"{sentence.removesuffix('.')}; others hold memory of {' and '.join(names)}, which is left to them."


def _short(seen: Iterable[Observation]) -> dict[int, int]:
    """The most that others were seen to hold, by position."""
    most: dict[int, int] = {}
    for one in seen:
        for i, size in enumerate(() if isinstance(one, Failed) else one.short_bytes):
            if size > most.get(i, 0):
                most[i] = size
    return most


def left_out(seen: Sequence[Observation], devices: Sequence[Device], chosen: Layout) -> tuple[str, ...]:
    """Devices on which nothing ran, and those that ran at first, failed to the last, and have no part; with the why."""
    words: dict[int, str] = {}
    ran: set[int] = set()
    for one in seen:
        if isinstance(one, Timed):
            ran |= set(one.probe.layout.active)
            words = {i: why for i, why in words.items() if i not in one.probe.layout.active}
            continue
        for i in one.devices or one.probe.layout.active:
            if i not in ran:
                words[i] = f"was left out, as nothing ran on it: {one.detail}."
            elif isinstance(one, Failed) and one.devices == (i,):
                if not chosen.shares[i]:
                    words[i] = f"ran at first and then failed to the last, so it was left out: {one.detail}."
                elif one.cause == "device":
                    words[i] = f"ran at first and can't be used now: {one.detail}."
    return tuple(f"{devices[i].label} {words[i]}" for i in sorted(words))
