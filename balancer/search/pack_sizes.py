"""How many trainings side by side get most out of one device: which N to try next, from those tried.

N grows as 1, 2, 3, 5, 8, 13, ... while the combined throughput gains. Growth ends after two sizes in a row without a
gain, or one that fails. Then the gaps next to the best size are halved. Each training costs memory and takes longer, so
the smallest N within `ENOUGH` of the best is chosen, or within the tolerance where that is more.
"""

from __future__ import annotations

from collections.abc import Mapping

GAIN = 0.01  # relative; less than that is no gain
ENOUGH = 0.05  # relative: what more trainings must gain, as each then takes longer
SIZES_WITHOUT_GAIN = 2  # sizes in a row without a gain after which growth ends
REFINEMENTS = 5  # sizes tried between neighbours after growth ended
MOST_PROCESSES = 89

Rates = Mapping[int, float | None]  # trainings -> combined samples/s; None: did not run


def next_size(tried: Rates, most: int = MOST_PROCESSES) -> int | None:
    """The number of trainings to try next, up to `most`; None when the best is known well enough."""
    grown = _grown(most)
    for position, size in enumerate(grown):
        if size not in tried:
            return size if _gains([tried[other] for other in grown[:position]]) else _between(tried, grown)
        if tried[size] is None:
            break
    return _between(tried, grown)


def best_size(tried: Rates, tolerance: float = GAIN) -> int | None:
    """The fewest trainings within the tolerance of the best; None if none ran."""
    ran = {size: rate for size, rate in tried.items() if rate is not None}
    if not ran:
        return None
    top = max(ran.values())
    return min(size for size, rate in ran.items() if rate >= top * (1 - tolerance))


def _grown(most: int) -> list[int]:
    """1, 2, 3, 5, 8, ... and `most`."""
    sizes = [1, 2]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-2])
    return [*(size for size in sizes if size < most), most]


def _gains(rates: list[float | None]) -> bool:
    """Whether one of the last `SIZES_WITHOUT_GAIN` sizes beat all smaller ones."""
    known = [rate or 0.0 for rate in rates]
    if len(known) <= SIZES_WITHOUT_GAIN:
        return True
    return max(known[-SIZES_WITHOUT_GAIN:]) > max(known[:-SIZES_WITHOUT_GAIN]) * (1 + GAIN)


def _between(tried: Rates, grown: list[int]) -> int | None:
    """The middle of the wider gap beside the best, while there is one and refinements are left."""
    best = best_size(tried)
    if best is None or sum(1 for size in tried if size not in grown) >= REFINEMENTS:
        return None
    sizes = sorted(tried)
    place = sizes.index(best)
    nearest = sizes[max(0, place - 1) : place + 2]
    gaps = [(abs(best - other), (best + other) // 2) for other in nearest if abs(best - other) > 1]
    return max(gaps)[1] if gaps else None
