"""The end of this host's processes, and whether a device may be the cause."""

from __future__ import annotations

import signal

import msgspec


class Ending(msgspec.Struct, frozen=True):
    """The end of all processes of one start; without a signal and failures, all ended well."""

    signal: int = 0  # that asked the launcher to end
    failures: dict[int, int] = {}  # rank -> exit code of those that failed by themselves; below 0 the signal
    left: tuple[int, ...] = ()  # ranks that ended well before the others: in mid-epoch that is why those failed

    @property
    def is_loss(self) -> bool:
        """True if a process was killed, or aborted by an error; False for a script that raised an exception.

        SIGTERM is what the others get when one has failed.
        """
        codes = set(self.failures.values())
        return bool(codes) and (any(code < 0 and code != -signal.SIGTERM for code in codes) or max(codes) < 0)

    @property
    def words(self) -> str:
        """The process that failed, and how; before it, one that had left."""
        rank, code = min(self.failures.items(), key=lambda each: (_order(each[1]), each[0]))
        left = f"rank {self.left[0]} left with exit code 0, and " if self.left and code != -signal.SIGKILL else ""
        return f"{left}rank {rank} " + (f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code}")


def _order(code: int) -> int:
    """A process that was killed is why others abort or raise exceptions, and these are why others get SIGTERM."""
    return {-signal.SIGKILL: 0, -signal.SIGTERM: 3}.get(code, 1 if code < 0 else 2)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
