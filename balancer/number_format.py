"""Formats numbers with units for all messages and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from evener.shares.whole_rows import split_passes


def rate(samples_per_second: float) -> str:
    """Return samples/s as text, such as 12.35, 684.2, 2 123 or 158 012.

    There are two decimals below 100 and one below 1000. Above, thousands are grouped.
    """
    for digits, limit in ((2, 99.995), (1, 999.95)):
        if samples_per_second < limit:
            return f"{samples_per_second:.{digits}f}"
    return count_words(samples_per_second)


def factor(times: float) -> str:
    """Return a factor as text, such as 0.83, 2.7 or 140.

    Below 10, it has two significant digits. From 10 on, it is a whole number.
    """
    return f"{times:.2g}" if times < 10 else f"{times:.0f}"


def efficiency(samples_per_joule: float) -> str:
    """Return samples per joule as text, such as 0.699, 28 or 3 197.

    There are three significant digits. From 1000 on, the number is written as `rate` does.
    """
    return f"{samples_per_joule:.3g}" if samples_per_joule < 999.5 else rate(samples_per_joule)


def milliseconds(seconds: float) -> str:
    """Return a duration as text in milliseconds, such as 0.48 ms, 7.1 ms or 157 ms.

    There are two decimals below 1 ms and one below 10 ms.
    """
    count = seconds * 1000
    if count >= 9.95:
        return f"{count:.0f} ms"
    digits = 1 if count >= 0.995 else 2
    return f"{count:.{digits}f} ms"


def percent(share: float, digits: int = 0) -> str:
    """Return a fraction as a percentage with `digits` decimals: 0.173 is "17 %"."""
    return f"{share * 100:.{digits}f} %"


STATE_ONLY = "state only"  # in place of a share: the device holds state and computes no rows


def write_share(batch: int, micro: int) -> str:
    """Return a share as text, with its passes.

    Examples are 820 for one pass, and 820 = 2 × 410 or 820 = 2 × 273 + 274 for several. A pass has
    up to `micro` rows. If `micro` is 0, the share is one pass.
    """
    passes = Counter(split_passes(batch, micro or batch or 1))
    if passes.total() < 2:
        return str(batch)
    parts = [str(rows) if times == 1 else f"{times} × {rows}" for rows, times in passes.items()]
    return f"{batch} = {' + '.join(parts)}"


def relative_error(value: float, low: float, high: float) -> float:
    """Return the relative error of a value.

    `low` and `high` are the bounds of the value's 95 % interval. The error is half of the
    interval's width, or the distance from the value to `high` if that is larger. Either is divided
    by the value. Return 0 for a value of 0.
    """
    # near 0, an interval may be lopsided
    return max(high - value, (high - low) / 2) / value if value else 0.0


def half_width(value: float, low: float, high: float) -> str:
    """Return a value's relative error as text to follow ±, such as 0.4 %.

    It is computed from the bounds of the value's 95 % interval, as in `relative_error`.
    """
    return write_error(relative_error(value, low, high))


def write_error(relative: float) -> str:
    """Return a relative error as text to follow ±, such as 0.4 % or < 0.05 %."""
    return percent(relative, 1) if relative >= 0.0005 else "< 0.05 %"


def duration(seconds: float) -> str:
    """Return a duration as text, such as 0.4 s, 12 s, 3 min 20 s or 2 h 5 min."""
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
    """Return the duration of a step, or of a part, as text, such as 157 ms or 12 s."""
    return milliseconds(seconds) if seconds < 9.95 else duration(seconds)


def size(count: float) -> str:
    """Return a number of bytes as text in binary units, such as 512 MiB or 7.63 GiB.

    There are three significant digits.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def count_words(count: float) -> str:
    """Return a number as text with grouped thousands, such as 12 040."""
    return f"{count:,.0f}".replace(",", " ")


def millions(count: int) -> str:
    """Return a large number as short text, such as 740 million or 2.1 billion."""
    return f"{count / 1e9:.1f} billion" if count >= 999.5e6 else f"{count / 1e6:.3g} million"


def join_shares(shares: Sequence[Sequence[int]]) -> str:
    """Return shares as text, such as 150 + 106.

    With passes, an example is (820 = 2 × 410) + 568. Each share is given as its number of rows and
    its number of rows per pass.
    """
    words = [write_share(rows, micro) for rows, micro in shares]
    return " + ".join(f"({share})" if "=" in share and len(words) > 1 else share for share in words)


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Return words as a list in a sentence, such as "one, two and three".

    `last` is the conjunction before the last word: "and" or "or".
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
