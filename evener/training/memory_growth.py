"""Predict how many rows fit in a rank's memory, from measured peaks.

The memory of a pass is modelled as fixed + rows * per_row. Weights and optimizer state don't depend
on the rows, and activations do. If only one pass size has a peak, all memory is assumed to grow
with the rows. That overestimates the memory of larger passes.

Otherwise per_row is the steepest slope from a smaller size's peak to the largest size's peak. That
slope is too flat if a smaller size's peak was too high, for example because evener checked the loss
in that step. So per_row has a lower limit: the largest size's peak, minus the memory that is held
between steps, divided by the rows of that size.
"""

from __future__ import annotations

import math

LEFT = 0.1  # fraction of the memory that stays free
LEFT_AT_RISK = 0.2  # the same if running out would end the training, or if the lengths of rows vary


class MemoryPeaks:
    """Peak memory of passes by their number of rows."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}
        self._held_bytes: float | None = None

    @property
    def sizes(self) -> int:
        """How many different pass sizes have a measured peak."""
        return len(self._peaks)

    def note(self, rows: int, peak_bytes: float, held_bytes: float = 0.0) -> None:
        """Store the peak memory of a pass, and the memory held between steps, in bytes.

        Sizes below the largest so far are ignored.
        """
        # A device reports only its highest peak so far. The smallest `held_bytes` is stored.
        least = held_bytes if self._held_bytes is None else self._held_bytes
        self._held_bytes = min(least, held_bytes)
        if rows > 0 and rows >= max(self._peaks, default=0):
            self._peaks[rows] = max(peak_bytes, self._peaks.get(rows, 0.0))

    def predict(self, rows: int) -> float:
        """Return the predicted peak of a pass of `rows` rows in bytes, 0 without measurements."""
        if not self._peaks:
            return 0.0
        largest = max(self._peaks)
        return self._peaks[largest] + self._bytes_per_row(largest) * (rows - largest)

    def most_rows(self, capacity_bytes: float, left: float) -> int:
        """Return the rows per pass that are predicted to fit, 0 without measurements.

        `left` is the fraction of `capacity_bytes` to keep free. The result is at least the rows of
        the largest measured pass.
        """
        # the largest recorded pass has fit in memory
        if not self._peaks:
            return 0
        largest = max(self._peaks)
        room_bytes = capacity_bytes * (1 - left) - self._peaks[largest]
        per_row = self._bytes_per_row(largest)
        if room_bytes <= 0 or per_row <= 0:
            return largest
        return largest + int(room_bytes / per_row)

    def most_rows_beside(self, capacity_bytes: float, left: float, beside_bytes: float) -> int:
        """Return the rows per pass that fit if something else uses `beside_bytes` of memory.

        Returns 0 with fewer than two measured sizes. `left` is the fraction of `capacity_bytes` to
        keep free.
        """
        # One size doesn't show how much memory a row needs.
        if self.sizes < 2:
            return 0
        largest = max(self._peaks)
        room_bytes = capacity_bytes * (1 - left) - self._peaks[largest] - beside_bytes
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
