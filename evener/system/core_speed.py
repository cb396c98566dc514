"""Time a fixed matrix product, to see how fast a CPU core computes at the moment.

A core is slower while its clock is low, or while its other hardware thread is busy. A step may then
take up to 1.7 times as long, for seconds, although no thread waits for a core. A matrix product
shows this better than a loop in Python: a loop is slowed less when the other hardware thread uses
the core's vector units.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

# rows and columns of the matrices; the product takes about 6 us. OpenBLAS uses a single thread for
# up to 64 of them
SIZE = 60
TRIES = 3
SAMPLE_SECONDS = 0.1  # minimum time between two samples


@cache
def numpy_version() -> str:
    """Return NumPy's name and version, such as "numpy 2.1.0", or "" if it isn't loaded.

    NumPy computes the matrix product, so only times with the same version can be compared.
    """
    numpy = sys.modules.get("numpy")
    return f"numpy {numpy.__version__}" if numpy is not None else ""


@cache
def _make_product() -> Callable[[], object]:
    numpy: Any = sys.modules["numpy"]
    matrix = numpy.full((SIZE, SIZE), 1 / SIZE, numpy.float32)
    return partial(numpy.matmul, matrix, matrix, numpy.empty_like(matrix))


def time_product() -> float:
    """Compute the fixed matrix product three times, and return the shortest time in seconds.

    Returns 0 if NumPy isn't loaded.
    """
    if not numpy_version():
        return 0.0
    product = _make_product()
    least_s = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        product()
        least_s = min(least_s, time.perf_counter() - began)
    return least_s


class CoreSpeed:
    """Measures at intervals during training how long a fixed matrix product takes."""

    def __init__(self) -> None:
        self._least_s = 0.0
        self.due_at = 0.0  # when the next sample is due, in monotonic seconds

    def sample(self, now: float) -> None:
        """Time the matrix product, if the next measurement is due.

        `now` is in seconds of the monotonic clock.
        """
        if now >= self.due_at:
            self.due_at = now + SAMPLE_SECONDS
            took_s = time_product()
            self._least_s = min(self._least_s or took_s, took_s)

    def take(self) -> float:
        """Return the shortest time of the matrix product since the last call, in seconds.

        Returns 0 if there was no measurement.
        """
        least_s, self._least_s = self._least_s, 0.0
        return least_s
