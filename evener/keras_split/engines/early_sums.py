"""Which gradients are summed while the backward pass still computes the others.

TensorFlow queues a step's kernels long before its GPU computes them, and a sum waits for all that is queued when it
starts. Sums run one after another, so the first may run behind the backward pass, and all that come after it wait for
its end: more than two sums of a step would hide less.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

LATE_PART = 0.25  # of all bytes, that may wait for the end of the backward pass
WORTH_BYTES = 8 << 20  # less is summed at once, sooner than another sum would start


def divide_sums(tensors: Sequence[tuple[int, Hashable]]) -> list[list[int]]:
    """Places of tensors (bytes, type) that are summed together; given, and returned, in the order of being ready.

    The last sum of a type has at most LATE_PART of all bytes, or only the last tensor.
    """
    sizes = [size for size, _ in tensors]
    total, last = sum(sizes), len(sizes) - 1
    sums: dict[tuple[bool, Hashable], list[int]] = {}
    for place, ((_, kind), before) in enumerate(zip(tensors, accumulate([0, *sizes]), strict=False)):
        late = total >= WORTH_BYTES and (place == last or total - before <= LATE_PART * total)
        sums.setdefault((late, kind), []).append(place)
    return list(sums.values())
