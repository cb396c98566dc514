"""Readings and numbers as short texts, with the reason where there is no value: never a false 0."""

from __future__ import annotations

from collections.abc import Callable

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, Reading, State, value

from .cells import Marks, Span, Tone, cells

GIB = 1024.0**3
STATE_WORDS = {
    State.UNSUPPORTED: "not reported by this device",
    State.DENIED: "denied to this user",
    State.LOST: "lost",
    State.STALE: "not read yet",
}


whole = "{:.0f}".format
percents = "{:.0f} %".format  # of a metric that is in per cent already
watts = "{:.0f} W".format
celsius = "{:.0f} °C".format


def samples_rate(number: float) -> str:
    """Throughput with its unit."""
    return f"{rate(number)} samples/s"


def short(number: float) -> str:
    """A figure in at most four characters: 0.5, 12.3, 684, 2123, 12k, 158k, 2.1M."""
    if number < 0:
        return f"-{short(-number)}"
    for below, scale, unit in ((9999.5, 1.0, ""), (999_500.0, 1e3, "k"), (999.5e6, 1e6, "M"), (999.5e9, 1e9, "G")):
        if number < below:
            return _digits(number / scale) + unit
    return f"{number:.0e}"


def _digits(number: float) -> str:
    if number == 0:
        return "0"
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def short_bytes(count: float) -> str:
    """Bytes in at most four characters, binary: 0, 12K, 340M, 1.2G."""
    if count < 999.5:
        return f"{count:.0f}B" if count >= 0.5 else "0"
    for unit in "KMG":
        count /= 1024
        if count < 999.5:
            return _digits(count) + unit
    return _digits(count / 1024) + "T"


def run_time(seconds: float | None) -> str:
    """A time in at most six characters: 0:07, 59:59, 23h59, 99d23h; empty if unknown."""
    if seconds is None or seconds < 0:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{rest:02}"


def gib(count: float) -> str:
    """GiB in few characters: 0.1, 7.2, 62, 140."""
    number = count / GIB
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def reading_text(reading: Reading, draw: Callable[[float], str], marks: Marks, width: int) -> tuple[str, bool]:
    """A reading in at most `width` cells, and whether it is a current value.

    A stale value keeps its mark; where both don't fit, the mark stands alone.
    """
    if reading.current is not None:
        return draw(reading.current), True
    if reading.state is State.DENIED:
        return ("denied" if width >= 6 else marks.denied), False
    if reading.state is State.LOST:
        return ("lost" if width >= 4 else marks.lost), False
    if reading.value is None:
        return (marks.pending if reading.state is State.STALE else marks.none), False
    marked = marks.stale + draw(reading.value)
    return (marked if cells(marked) <= width else marks.stale), False


def figure(
    reading: Reading,
    width: int,
    marks: Marks,
    draw: Callable[[float], str] = whole,
    tone: Callable[[float], Tone] | Tone = "text",
) -> Span:
    """A reading as one span, right-aligned in `width` cells; the tone follows its value if it has a current one."""
    text, current = reading_text(reading, draw, marks, width)
    if not current:
        return Span(text.rjust(width), "bad" if reading.state is State.LOST else "dim")
    number = reading.value or 0.0
    return Span(text.rjust(width), tone(number) if callable(tone) else tone)


def temperature_tone(sample: DeviceSample) -> Callable[[float], Tone]:
    """Warm within 10 degrees of the limit at which the device slows itself down, hot within 3."""
    limit = sample.temperature_limit_celsius.current or 90.0

    def tone(number: float) -> Tone:
        if number >= limit - 3:
            return "bad"
        return "warn" if number >= limit - 10 else "text"

    return tone


def throttle_tone(number: float) -> Tone:
    """A warning for any throttling, bad from a fifth of the time on."""
    if number >= 20:
        return "bad"
    return "warn" if number >= 0.5 else "dim"


def fraction(part: Reading, whole_reading: Reading) -> float | None:
    """part / whole where both have values, stale ones included; else None."""
    if part.value is None or not whole_reading.value:
        return None
    return part.value / whole_reading.value


def traffic(sample: DeviceSample) -> Reading:
    """All traffic of the device, PCIe and NVLink, both ways, in bytes/s; without a value, why the first has none."""
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
    return Reading(State.STALE, total, max(part.age_seconds for part in stale)) if stale else value(total)
