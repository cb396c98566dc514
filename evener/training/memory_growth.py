"""The rows that a rank's memory is predicted to hold, from the peaks that it was seen to take.
Pure.

Memory of a pass is taken to be fixed + rows * per_row: weights and optimizer state don't go by
rows, activations do. With a peak at one size alone, all of it is taken to go by rows, which is more
than will be needed. With peaks at several sizes, the steepest line to the largest counts, and never
less than what isn't held between steps, divided by the rows: a peak at a smaller size may have been
too high, as when a loss was checked there.
"""

from __future__ import annotations

LEFT = 0.1  # of the memory: what stays free
LEFT_AT_RISK = 0.2  # where running out would end the training, or lengths of rows vary


class MemoryPeaks:
    """The peaks of one rank by the rows of a pass; `held_bytes` is the least seen between steps."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}
        self._held_bytes: float | None = None

    @property
    def sizes(self) -> int:
        """The number of sizes whose peaks are known."""
        return len(self._peaks)

    def note(self, rows: int, peak_bytes: float, held_bytes: float = 0.0) -> None:
        """Note the most that was taken so far, by passes of up to these rows.

        A peak is of the largest pass so far, so those of smaller passes show nothing.
        """
        least = held_bytes if self._held_bytes is None else self._held_bytes
        self._held_bytes = min(least, held_bytes)
        if rows > 0 and rows >= max(self._peaks, default=0):
            self._peaks[rows] = max(peak_bytes, self._peaks.get(rows, 0.0))

    def predict(self, rows: int) -> float:
        """The bytes that a pass of these rows takes; 0 before any peak was noted."""
        if not self._peaks:
            return 0.0
        largest = max(self._peaks)
        return self._peaks[largest] + self._bytes_per_row(largest) * (rows - largest)

    def most_rows(self, capacity_bytes: float, left: float) -> int:
        """The most rows of a pass that leave this part of the capacity free; 0 before any peak was
        noted.

        Never fewer than the largest pass so far, which has fitted.
        """
        if not self._peaks:
            return 0
        largest = max(self._peaks)
        room_bytes = capacity_bytes * (1 - left) - self._peaks[largest]
        per_row = self._bytes_per_row(largest)
        if room_bytes <= 0 or per_row <= 0:
            return largest
        return largest + int(room_bytes / per_row)

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
