"""Bars, small graphs, and short formats of numbers for tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, Reading, State, value

from .cells import Mark, Span, Tone, cells

History = Callable[
    [str, str, int], tuple[float | None, ...]
]  # (key of a device, metric, number of ticks) -> values, the oldest first
GIB = 1024.0**3
STATE_WORDS = {
    State.UNSUPPORTED: "not reported by this device",
    State.DENIED: "denied to this user",
    State.LOST: "lost",
    State.STALE: "not read yet",
}


whole = "{:.0f}".format
percents = "{:.0f} %".format  # for a metric that is already in percent
watts = "{:.0f} W".format
celsius = "{:.0f} °C".format


def samples_rate(number: float) -> str:
    """Format a throughput in samples/s, with its unit."""
    return f"{rate(number)} samples/s"


def short(number: float) -> str:
    """Format a number in a few characters, such as 7.5, 812, 12k or 3.4M."""
    if number < 0:
        return f"-{short(-number)}"
    for below, scale, unit in (
        (9999.5, 1.0, ""),
        (999_500.0, 1e3, "k"),
        (999.5e6, 1e6, "M"),
        (999.5e9, 1e9, "G"),
    ):
        if number < below:
            return _digits(number / scale) + unit
    return f"{number:.0e}"


def _digits(number: float) -> str:
    if number == 0:
        return "0"
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def short_bytes(count: float) -> str:
    """Format bytes in a few characters with binary units, such as 812B, 1.5K or 40G."""
    if count < 999.5:
        return f"{count:.0f}B" if count >= 0.5 else "0"
    for unit in "KMG":
        count /= 1024
        if count < 999.5:
            return _digits(count) + unit
    return _digits(count / 1024) + "T"


def run_time(seconds: float | None) -> str:
    """Format seconds as 3:05, 2h10 or 1d04h; "" if unknown or negative."""
    if seconds is None or seconds < 0:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{rest:02}"


def gib(count: float) -> str:
    """Format bytes in GiB, without the unit."""
    number = count / GIB
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def reading_text(
    reading: Reading, format_value: Callable[[float], str], width: int
) -> tuple[str, bool]:
    """Return the text of a reading, and whether it is a current value.

    A missing value becomes a word or a mark. An old value gets "~" in front of it, or is replaced
    with "~" if there isn't room for both in `width` cells.
    """
    if reading.current is not None:
        return format_value(reading.current), True
    if reading.state is State.DENIED:
        return ("denied" if width >= 6 else Mark.DENIED), False
    if reading.state is State.LOST:
        return ("lost" if width >= 4 else Mark.LOST), False
    if reading.value is None:
        return (Mark.PENDING if reading.state is State.STALE else Mark.NONE), False
    marked = Mark.STALE + format_value(reading.value)
    return (marked if cells(marked) <= width else Mark.STALE), False


def draw_reading(
    reading: Reading,
    width: int,
    format_value: Callable[[float], str] = whole,
    tone: Callable[[float], Tone] | Tone = "text",
) -> Span:
    """Draw a reading in `width` cells, aligned to the right.

    A current value has the tone `tone`. Old and missing values are drawn in the tone "dim", and a
    lost device in the tone "bad".
    """
    text, current = reading_text(reading, format_value, width)
    if not current:
        return Span(text.rjust(width), "bad" if reading.state is State.LOST else "dim")
    number = reading.value or 0.0
    return Span(text.rjust(width), tone(number) if callable(tone) else tone)


def temperature_tone(sample: DeviceSample) -> Callable[[float], Tone]:
    """Return a function that picks the tone of a temperature in °C.

    The tone is a warning from 10 °C below the limit at which the device slows down, and an alarm
    from 3 °C below it.
    """
    limit = sample.temperature_limit_celsius.current or 90.0

    def tone(number: float) -> Tone:
        if number >= limit - 3:
            return "bad"
        return "warn" if number >= limit - 10 else "text"

    return tone


def throttle_tone(number: float) -> Tone:
    """Return the tone for a percentage of the time that a device was throttled."""
    if number >= 20:
        return "bad"
    return "warn" if number >= 0.5 else "dim"


def traffic(sample: DeviceSample) -> Reading:
    """Return one reading with the total bytes per second sent and received over PCIe and NVLink."""
    parts = (
        sample.link_receive_bytes_per_second,
        sample.link_send_bytes_per_second,
        sample.pcie_receive_bytes_per_second,
        sample.pcie_send_bytes_per_second,
    )
    known = [part for part in parts if part.value is not None]
    if not known:
        return next((part for part in parts if part.state is not State.UNSUPPORTED), parts[0])
    total = sum(part.value or 0.0 for part in known)
    stale = [part for part in known if part.state is State.STALE]
    return (
        Reading(State.STALE, total, max(part.age_seconds for part in stale))
        if stale
        else value(total)
    )


def bar(fraction: float, width: int, tone: Tone = "accent") -> tuple[Span, ...]:
    """Draw a horizontal bar that is full if `fraction` is 1. Values above 0 are always visible."""
    if width <= 0:
        return ()
    halves = round(max(0.0, min(1.0, fraction)) * width * 2)
    if fraction > 0 and halves == 0:
        halves = 1  # anything above 0 is visible
    full, half = divmod(halves, 2)
    filled = Mark.FULL * full + Mark.HALF * half
    return Span(filled, tone), Span(Mark.TRACK * (width - full - half), "track")


def work_bar(own_work_s: float, waiting_s: float, longest_s: float, width: int) -> tuple[Span, ...]:
    """Draw a bar of the compute time followed by the waiting time.

    The bar is full at `longest_s` seconds.
    """
    own, both = (
        round(width * min(1.0, seconds / longest_s)) if longest_s > 0 else 0
        for seconds in (own_work_s, own_work_s + waiting_s)
    )
    own = max(own, int(own_work_s > 0))  # anything above 0 is visible
    both = max(own, both)
    return (
        Span(Mark.FULL * own, "speed"),
        Span(Mark.SHADE * (both - own), "warn"),
        Span(" " * (width - both)),
    )


def graph(
    values: Sequence[float | None], width: int, height: int, highest: float
) -> tuple[str, ...]:
    """Draw values as a graph with the newest value on the right, and return its lines from the top.

    `highest` is the upper end of the axis. A value of None leaves its column empty.
    """
    if width <= 0 or height <= 0:
        return ()
    newest = values[-width:]
    most = height * (len(Mark.LEVELS) - 1)
    steps = [0] * (width - len(newest)) + [_count_steps(number, highest, most) for number in newest]
    stacks = [_stack(count, height, Mark.LEVELS, Mark.SHADE) for count in steps]
    return tuple(map("".join, zip(*stacks, strict=True)))


def _count_steps(number: float | None, highest: float, max_steps: int) -> int:
    """Return how far to fill a column of a graph for a value, in steps from 0 to `max_steps`.

    The column is full at `highest`. A finite value fills at least one step, and None fills none.
    """
    # A known value has at least one step, so that it is visible.
    if number is None or highest <= 0 or not math.isfinite(number):
        return 0
    return max_steps if number >= highest else max(1, round(max(0.0, number) / highest * max_steps))


@lru_cache(maxsize=4096)
def _stack(count: int, height: int, levels: str, full: str) -> tuple[str, ...]:
    """Return the characters of a graph's column, from top to bottom.

    `count` is the number of filled steps. `levels` are the characters of a cell from empty to
    full, and `full` is used in cells below the highest filled one.
    """
    each = len(levels) - 1
    belows = range((height - 1) * each, -1, -each)
    return tuple(
        full if count - below > each else levels[max(0, min(each, count - below))]
        for below in belows
    )


def nice_ceiling(number: float) -> float:
    """Round up to 1, 2, 2.5, 5 or 10 times a power of ten.

    Returns 1 for 0, negative numbers, and numbers that aren't finite.
    """
    # With so few possible ends, the axis rarely changes while values grow.
    if number <= 0 or not math.isfinite(number):
        return 1.0
    power = 10.0 ** math.floor(math.log10(number))
    return next(
        step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if number <= step * power * (1 + 1e-9)
    )
