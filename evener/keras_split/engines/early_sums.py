"""Early sums: the gradients that are summed while the backward pass still computes the others.

TensorFlow queues a step's kernels long before its GPU computes them, and a sum waits for all that is queued when it
starts. Sums run one after another, so the first may run behind the backward pass, and all that come after it wait for
its end: more than two sums of a step would hide less.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LATE_PART = 0.25  # of all bytes, that may wait for the end of the backward pass
WORTH_BYTES = 8 << 20  # less is summed at once, sooner than another sum would start


def divide_sums(tensors: Sequence[tuple[int, Hashable]], apart: int = 0) -> list[list[int]]:
    """Places of tensors (bytes, type) that are summed together; given, and returned, in the order of being ready.

    Few bytes are one sum of each type. More bytes are two, of which the second has at most LATE_PART, or only the last
    tensor; the last `apart` tensors are left out of both and summed at the end.
    """
    sizes = [size for size, _ in tensors]
    left, last = sum(sizes), len(sizes) - apart - 1
    most_late = LATE_PART * left if left >= WORTH_BYTES else None
    sums: dict[tuple[int, Hashable], list[int]] = {}
    for place, (size, kind) in enumerate(tensors):
        turn = 0 if most_late is None else 2 if place > last else int(place == last or left <= most_late)
        sums.setdefault((turn, kind), []).append(place)
        left -= size
    return list(sums.values())
