"""The shares of a loop's batches: rows are drawn ahead of their turn, so new shares begin some batches on."""

from __future__ import annotations

Shares = tuple[int, ...]


class ShareSchedule:
    """The shares that a loop began with at row `position` of its epoch, and those that it changed to."""

    def __init__(self, shares: Shares, position: int) -> None:
        self.begun = position  # the row after the loop's newest batch
        self._changes = [(position, shares)]

    def at(self, first: int) -> Shares:
        """The shares of the batch that begins with the epoch's row `first`."""
        for start, shares in reversed(self._changes):
            if first >= start:
                return shares
        return self._changes[0][1]

    def change(self, rows: int, shares: Shares) -> None:
        """Take these shares from the batch on that begins `rows` rows after the end of the newest one."""
        self._changes.append((self.begun + rows, shares))
