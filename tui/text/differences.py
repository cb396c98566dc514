"""Text of `evener runs compare`: the slowdown from one training run or plan to another."""

from __future__ import annotations

from collections.abc import Iterator

from evener.balancer.number_format import milliseconds, percent, rate
from evener.balancer.store.compared import PhaseDifference, RunDifference
from evener.printable import align

# if the interval of the slowdown goes beyond this multiple of the allowed one, the answer is open
OPEN = 2.0
LONGER = "train both for longer, or on cores that nothing else uses"


def difference_lines(difference: RunDifference, max_slowdown: float) -> list[str]:
    """Describe how two runs differ, and whether the second one is too slow.

    `max_slowdown` is the slowdown that is allowed, as a fraction: 0.05 allows 5 % more time per
    sample.
    """
    rows = [
        ("run", "samples/s"),
        (difference.before, rate(difference.before_samples_per_second)),
        (difference.after, rate(difference.after_samples_per_second)),
    ]
    lines = align(rows, 1)
    lines.append(_format_whole(difference))
    if not difference.low <= difference.mean_slowdown <= difference.high:
        lines.append(
            f"{_signed(difference.mean_slowdown)} by the mean of all steps: what disturbs some of "
            f"them, such as other programs, isn't counted"
        )
    if difference.other_batch:
        lines.append("their steps have different numbers of rows: times are per sample")
    if difference.phases:
        lines += ["", *_format_phases(difference)]
    return [*lines, "", _format_verdict(difference, max_slowdown)]


def _format_whole(found: RunDifference) -> str:
    interval = f"{_signed(found.low)} to {_signed(found.high)}"
    return f"{_signed(found.slowdown)} time per sample, between {interval} (95 %)"


def _signed(part: float) -> str:
    return f"{'+' if part >= 0 else '-'}{percent(abs(part), 1)}"


def _format_phases(found: RunDifference) -> Iterator[str]:
    heading = ("of a step", "before", "after", "longer by", "95 %", "")
    yield from align([heading, *map(_format_phase, found.phases)], 1)


def _format_phase(phase: PhaseDifference) -> tuple[str, ...]:
    longer = phase.after_s - phase.before_s
    error = (phase.high_s - phase.low_s) / 2
    surely = "longer" if phase.low_s > 0 else ""
    if phase.high_s < 0:
        surely = "shorter"
    sign = "-" if longer < 0 else ""
    return (
        phase.name,
        milliseconds(phase.before_s),
        milliseconds(phase.after_s),
        f"{sign}{milliseconds(abs(longer))}",
        f"± {milliseconds(error)}",
        surely,
    )


def _format_verdict(found: RunDifference, max_slowdown: float) -> str:
    allowed = percent(max_slowdown, 1)
    if found.is_beyond(max_slowdown):
        return f"slower by more than {allowed}"
    if found.slowdown > max_slowdown:
        return f"above {allowed}, but not surely slower: {LONGER}"
    if found.high > OPEN * max_slowdown:
        return f"up to {_signed(found.high)} is possible, so {allowed} isn't excluded: {LONGER}"
    return f"not slower by more than {allowed}"
