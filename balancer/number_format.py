"""Format throughputs, times, sizes and shares for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from evener.shares.whole_rows import split_passes


def rate(samples_per_second: float) -> str:
    """Format samples/s: two decimals below 100, one below 1000, else a whole number."""
    for digits, limit in ((2, 99.995), (1, 999.95)):
        if samples_per_second < limit:
            return f"{samples_per_second:.{digits}f}"
    return group_digits(samples_per_second)


def factor(times: float) -> str:
    """Format a ratio with two digits if it is below 10, else as a whole number."""
    return f"{times:.2g}" if times < 10 else f"{times:.0f}"


def efficiency(samples_per_joule: float) -> str:
    """Format samples per joule with three significant digits, or as a whole number from 1000 on."""
    return f"{samples_per_joule:.3g}" if samples_per_joule < 999.5 else rate(samples_per_joule)


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    count = seconds * 1000
    if count >= 9.95:
        return f"{count:.0f} ms"
    digits = 1 if count >= 0.995 else 2
    return f"{count:.{digits}f} ms"


def percent(share: float, digits: int = 0) -> str:
    """Format a fraction as a percentage."""
    return f"{share * 100:.{digits}f} %"


STATE_ONLY = "state only"  # in place of a share: the device holds state and computes no rows


def write_share(batch: int, micro: int) -> str:
    """Format a share with its passes, such as "700 = 2 × 300 + 100".

    `micro` is the most rows in a pass; 0 means a single pass.
    """
    passes = Counter(split_passes(batch, micro or batch or 1))
    if passes.total() < 2:
        return str(batch)
    parts = [str(rows) if times == 1 else f"{times} × {rows}" for rows, times in passes.items()]
    return f"{batch} = {' + '.join(parts)}"


def relative_error(value: float, low: float, high: float) -> float:
    """Return the error of a value as a fraction of the value, or 0 if the value is 0.

    The error is half of the interval's width or, if that is larger, the distance from the value to
    the upper bound.
    """
    # near 0, an interval may be lopsided
    return max(high - value, (high - low) / 2) / value if value else 0.0


def half_width(value: float, low: float, high: float) -> str:
    """Format the half-width of an interval as a percentage of its value."""
    return write_error(relative_error(value, low, high))


def write_error(relative: float) -> str:
    """Format a relative error as a percentage, such as "0.4 %", or as "< 0.05 %" if smaller."""
    return percent(relative, 1) if relative >= 0.0005 else "< 0.05 %"


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours, such as "2 min 5 s"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def step_time(seconds: float) -> str:
    """Format the time of a step in milliseconds or, if it is 10 s or more, as a duration."""
    return milliseconds(seconds) if seconds < 9.95 else duration(seconds)


def size(count: float) -> str:
    """Format a byte count in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def group_digits(count: float) -> str:
    """Format a whole number with its digits in groups of three, separated by spaces."""
    return f"{count:,.0f}".replace(",", " ")


def count_samples(count: int | str) -> str:
    """Format a number of samples: "1 sample" or "64 samples"."""
    return count_nouns(count, "sample")


def count_nouns(count: int | str, noun: str) -> str:
    """Format a number of things, such as "1 row" or "64 rows"."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def millions(count: int) -> str:
    """Format a parameter count in millions or billions."""
    return f"{count / 1e9:.1f} billion" if count >= 999.5e6 else f"{count / 1e6:.3g} million"


def join_shares(shares: Sequence[Sequence[int]]) -> str:
    """Format shares, joined by "+", such as "826 + 571".

    Each item of `shares` has the rows of a share, and the rows of its largest pass.
    """
    words = [write_share(rows, micro) for rows, micro in shares]
    return " + ".join(f"({share})" if "=" in share and len(words) > 1 else share for share in words)


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Join words with commas, and with `last` before the last word."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
