"""Predict how many rows fit in a rank's memory, from measured peaks of memory use.

The memory that a pass uses is modelled as fixed + rows * per_row: activations grow with the rows,
but weights and optimizer state don't. If peaks are known for only one pass size, all memory is
assumed to grow with the rows. That overestimates the memory of larger passes.

Otherwise, per_row is the steepest slope between the peak of a smaller size and that of the largest
size. This slope is too low if a smaller size's peak was unusually high, for example because evener
checked the loss in that step. So per_row has a lower limit: the largest size's peak, minus the
memory that stays allocated between steps, divided by the rows of that size.
"""

from __future__ import annotations

import math

LEFT = 0.1  # fraction of the memory that stays free
LEFT_AT_RISK = 0.2  # the same if running out would end the training, or if the lengths of rows vary


class MemoryPeaks:
    """Measured peaks of memory use, by the number of rows in a pass."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}
        self._held_bytes: float | None = None

    @property
    def sizes(self) -> int:
        """The number of pass sizes whose peak memory was measured."""
        return len(self._peaks)

    def record(self, rows: int, peak_bytes: float, held_bytes: float = 0.0) -> None:
        """Record the peak memory of a pass and the memory in use between steps, in bytes.

        The peak is ignored if a larger pass was recorded before.
        """
        # A device reports only its highest peak so far. The smallest `held_bytes` is stored.
        least = held_bytes if self._held_bytes is None else self._held_bytes
        self._held_bytes = min(least, held_bytes)
        if rows > 0 and rows >= max(self._peaks, default=0):
            self._peaks[rows] = max(peak_bytes, self._peaks.get(rows, 0.0))

    def predict(self, rows: int) -> float:
        """Return the predicted peak memory of a pass of `rows` rows, in bytes.

        Returns 0 if no peaks were measured.
        """
        if not self._peaks:
            return 0.0
        largest = max(self._peaks)
        return self._peaks[largest] + self._bytes_per_row(largest) * (rows - largest)

    def most_rows(self, capacity_bytes: float, free_fraction: float) -> int:
        """Return how many rows per pass are predicted to fit in memory.

        `free_fraction` of the `capacity_bytes` has to stay free. The result is at least the size of
        the largest recorded pass, or 0 if no peaks were measured.
        """
        # the largest recorded pass has fit in memory
        if not self._peaks:
            return 0
        largest = max(self._peaks)
        room_bytes = capacity_bytes * (1 - free_fraction) - self._peaks[largest]
        per_row = self._bytes_per_row(largest)
        if room_bytes <= 0 or per_row <= 0:
            return largest
        return largest + int(room_bytes / per_row)

    def most_rows_with_reserve(
        self, capacity_bytes: float, free_fraction: float, extra_bytes: float
    ) -> int:
        """Return how many rows per pass fit if something else needs `extra_bytes` of memory.

        `free_fraction` of the `capacity_bytes` has to stay free. Returns 0 if fewer than two pass
        sizes were measured.
        """
        # one size doesn't show how much memory a row needs
        if self.sizes < 2:
            return 0
        largest = max(self._peaks)
        room_bytes = capacity_bytes * (1 - free_fraction) - self._peaks[largest] - extra_bytes
        per_row = self._bytes_per_row(largest)
        return max(0, largest + math.floor(room_bytes / per_row)) if per_row > 0 else 0

    def _bytes_per_row(self, largest: int) -> float:
        peak = self._peaks[largest]
        if len(self._peaks) == 1:
            return peak / largest
        slopes = [
            (peak - smaller_peak) / (largest - rows)
            for rows, smaller_peak in self._peaks.items()
            if rows < largest
        ]
        above_held = (peak - (self._held_bytes or 0.0)) / largest
        return min(peak / largest, max(*slopes, above_held))
